"""The Triton kernels against what plain torch computes, on a GPU."""

from __future__ import annotations

import pytest
import torch

from strop.rollout.native import attention
from strop.rollout.native.attention import AttentionOptions, Decode
from strop.rollout.native.kv_cache import KVCache
from strop.rollout.native.pages import PagedKVCache
from tests.rollout import draws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "rows, heads, key_heads, key_size, value_size, capacity, flavour",
    [
        (5, 14, 2, 64, 64, 600, {}),
        (5, 28, 4, 128, 128, 600, {"scale": 0.05}),
        (5, 4, 4, 24, 16, 600, {"window": 9}),
        (5, 8, 4, 256, 256, 600, {"softcap": 5.0}),
        (5, 6, 3, 32, 32, 600, {"window": 20, "sinks": True}),
        (5, 9, 3, 64, 64, 4096, {}),  # few long rows: read in parts
        (1200, 9, 3, 64, 64, 400, {}),
        (1200, 28, 4, 128, 128, 400, {"softcap": 5.0}),
        (1200, 6, 3, 24, 16, 400, {"window": 20, "sinks": True}),
        (1200, 8, 2, 256, 256, 400, {}),
    ],
)
def test_decode_attention(
    monkeypatch, dtype, rows, heads, key_heads, key_size, value_size, capacity, flavour
):
    from strop.rollout.native.kernels import decode_attention

    torch.manual_seed(0)
    flavour = {**flavour, "sinks": torch.randn(heads, device=DEVICE)} if "sinks" in flavour else flavour
    positions = torch.tensor([0, 3, 64, 333, capacity - 20], device=DEVICE).repeat(rows // 5)

    def randn(*shape):
        return torch.randn(*shape, device=DEVICE, dtype=dtype)

    new = [
        randn(rows, 1, n, d).transpose(1, 2)
        for n, d in ((heads, key_size), (key_heads, key_size), (key_heads, value_size))
    ]
    plain, fast, exact = (
        KVCache({0: (key_heads, key_size, value_size)}, dtype=kind, device=DEVICE)
        for kind in (dtype, dtype, torch.float64)
    )
    for cache in (plain, fast, exact):
        cache.resize(rows + 2, capacity, 0)
    for first, *others in zip(*(cache.whole(0) for cache in (plain, fast, exact))):
        first.normal_()
        for other in others:
            other.copy_(first)
    monkeypatch.setattr(attention, "kernels", lambda device: None)
    every, longest = torch.arange(rows, device=DEVICE), int(positions.max()) + 1
    spans = [(0, rows, longest)]
    usual = Decode(plain, every, positions, spans).attend(0, *new, AttentionOptions(**flavour))
    wanted = Decode(exact, every, positions, spans).attend(
        0, *(x.double() for x in new), AttentionOptions(**flavour)
    )
    table = torch.arange(rows, device=DEVICE)[:, None]  # a row in one page
    found = decode_attention(*new, *fast.whole(0), positions, table, longest, **flavour)
    off, allowed = ((x - wanted).norm() / wanted.norm() for x in (found, usual))
    assert off < 1.2 * allowed + 1e-6
    assert (found - wanted).abs().max() < (1e-5 if dtype == torch.float32 else 5e-2)
    assert all(torch.equal(a, b) for a, b in zip(plain.whole(0), fast.whole(0)))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("window", [None, 1500])
def test_pages_and_segments_give_the_bits_of_one_page(window, size):
    """Long and short rows together, in pages anywhere, shared by rows, with a grid wider than they are."""
    from strop.models.flash import packed_attention
    from strop.rollout.native.kernels import decode_attention

    torch.manual_seed(0)
    lengths = [5000, 64, 1024, 1025, 1, 3000, 700, 8000]
    q, k, v = (torch.randn(8000, n, size, device=DEVICE, dtype=torch.bfloat16) for n in (6, 2, 2))
    bounds = torch.tensor([0, 8000], device=DEVICE, dtype=torch.int32)
    together = packed_attention(q, k, v, bounds, 8000, window=window)
    positions = torch.tensor(lengths, device=DEVICE) - 1
    # All rows begin alike: full pages are those of the longest row, the last one of each row is its own.
    table = torch.randperm(200, device=DEVICE)[:125].repeat(8, 1)
    own = 200 + torch.arange(8, device=DEVICE)
    table[torch.arange(8, device=DEVICE), positions // 64] = own
    keys, values = (torch.full((208, 2, 64, size), 9.0, device=DEVICE, dtype=k.dtype) for _ in range(2))
    for held, x in ((keys, k), (values, v)):
        held[table[6]] = x.view(125, 64, 2, size).transpose(1, 2)
        held[table[7]] = x.view(125, 64, 2, size).transpose(1, 2)
        for row, length in enumerate(lengths):
            begin = (length - 1) // 64 * 64
            held[own[row], :, : length - 1 - begin] = x[begin : length - 1].transpose(0, 1)
    new = [x[positions, :, None] for x in (q, k, v)]
    for longest in (8000, 20_000):
        alone = decode_attention(*new, keys, values, positions, table.to(torch.int32), longest, window=window)
        assert torch.equal(alone[:, 0], together[positions])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("size", [64, 128])
def test_a_cache_of_8_bits_gives_the_numbers_of_a_wide_one(size, dtype):
    """A decode step, and a prefill that goes on."""
    from strop.models.flash import continued_attention, packed_attention
    from strop.rollout.native.kernels import decode_attention
    from strop.rollout.native.quantization.cache import from_8_bits, in_8_bits

    torch.manual_seed(0)
    length, pages = 3000, 47
    q, k, v = (torch.randn(length, n, size, device=DEVICE, dtype=dtype) for n in (6, 2, 2))
    k *= torch.logspace(-3, 2, length, device=DEVICE, dtype=dtype)[:, None, None]
    short = [in_8_bits(x) for x in (k, v)]
    wide = [from_8_bits(*pair, dtype) for pair in short]
    bounds = torch.tensor([0, length], device=DEVICE, dtype=torch.int32)
    together = packed_attention(q, *wide, bounds, length)
    table = torch.randperm(pages, device=DEVICE)[None].to(torch.int32)

    def held(x, count):
        found = torch.zeros(pages, 2, 64, x.shape[-1], device=DEVICE, dtype=torch.uint8)
        for page, part in zip(table[0].tolist(), x[:count].split(64)):
            found[page, :, : len(part)] = part.transpose(0, 1)
        return found

    for position in (2999, 1500):
        numbers = [held(pair[0], position).view(torch.float8_e4m3fn) for pair in short]
        exponents = tuple(held(pair[1], position) for pair in short)
        new = [x[position, None, :, None] for x in (q, k, v)]
        at = torch.tensor([position], device=DEVICE)
        alone = decode_attention(*new, *numbers, at, table, length, exponents=exponents)
        assert_equal_but_few(alone[:, 0], together[position, None])
    numbers = [held(pair[0], length).view(torch.float8_e4m3fn) for pair in short]
    exponents = tuple(held(pair[1], length) for pair in short)
    mine = torch.tensor([0, 2000], device=DEVICE, dtype=torch.int32)
    origins = torch.tensor([1000], device=DEVICE)
    later = continued_attention(q[1000:], *numbers, mine, 2000, origins, table, exponents)
    assert torch.equal(later, together[1000:])


def assert_equal_but_few(found, expected):
    """A decode step has the digits of a head in another order in the matrix instruction, which adds 16 products
    at a time. So about one number in 10,000 is rounded to its other neighbour."""
    different = found != expected
    assert different.float().mean() < 0.003
    spacing = torch.finfo(found.dtype).eps * expected.abs()
    assert ((found - expected).abs() <= spacing).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("size", [64, 128])
def test_every_number_of_8_bits_is_read_as_it_is(size, dtype):
    """All codes that are stored, in a decode step and in a prefill that goes on, beside a wide cache."""
    from strop.models.flash import continued_attention
    from strop.rollout.native.kernels import decode_attention
    from strop.rollout.native.quantization.cache import from_8_bits, in_8_bits

    torch.manual_seed(0)
    codes = torch.randint(256, (2, 3, 2, 64, size), device=DEVICE, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0
    assert len(codes.unique()) == 254
    exponents = torch.randint(112, 120, (2, 3, 2, 64, 1), device=DEVICE, dtype=torch.uint8)
    short = [x.view(torch.float8_e4m3fn) for x in codes]
    wide = list(from_8_bits(codes, exponents, dtype))
    query, *new = (torch.randn(1, n, 1, size, device=DEVICE, dtype=dtype) for n in (6, 2, 2))
    stored = [from_8_bits(*in_8_bits(x), dtype) for x in new]
    table = torch.tensor([[2, 0, 1]], device=DEVICE, dtype=torch.int32)
    at = torch.tensor([180], device=DEVICE)
    expected = decode_attention(query, *stored, *wide, at, table, 192)
    found = decode_attention(query, *new, *short, at, table, 192, exponents=tuple(exponents))
    assert_equal_but_few(found, expected)
    bounds = torch.tensor([0, 30], device=DEVICE, dtype=torch.int32)
    queries = torch.randn(30, 6, size, device=DEVICE, dtype=dtype)
    begin = torch.tensor([150], device=DEVICE)
    expected = continued_attention(queries, *wide, bounds, 30, begin, table)
    found = continued_attention(queries, *short, bounds, 30, begin, table, tuple(exponents))
    assert torch.equal(found, expected)


def test_vectors_that_are_not_finite_are_seen():
    from strop.rollout.native.kernels import decode_attention
    from strop.rollout.native.quantization.cache import in_8_bits

    torch.manual_seed(0)
    keys, values = (
        in_8_bits(torch.randn(3, 2, 64, 32, device=DEVICE, dtype=torch.bfloat16)) for _ in range(2)
    )
    numbers = [x[0].view(torch.float8_e4m3fn) for x in (keys, values)]
    query, key, value = (torch.randn(3, n, 1, 32, device=DEVICE, dtype=torch.bfloat16) for n in (4, 2, 2))
    key[0, 0, 0, 3], value[1, 1, 0, 5] = torch.nan, torch.inf
    at, table = (
        torch.tensor([40] * 3, device=DEVICE),
        torch.arange(3, device=DEVICE, dtype=torch.int32)[:, None],
    )
    out = decode_attention(query, key, value, *numbers, at, table, 64, exponents=(keys[1], values[1]))
    assert out[:, 0].isnan().all(-1).tolist() == [
        [True, True, False, False],
        [False, False, True, True],
        [False] * 4,
    ]
    assert out[2].isfinite().all()


@pytest.mark.parametrize("vocabulary", [11, 4096, 151_936])
@pytest.mark.parametrize(
    "used",
    [
        {"temperature": False, "greedy": False, "all_greedy": False},
        {"temperature": True, "greedy": True, "all_greedy": False},
        {"temperature": False, "greedy": True, "all_greedy": True},
    ],
    ids=["plain", "mixed", "greedy"],
)
def test_a_draw_is_that_of_plain_torch(monkeypatch, vocabulary, used):
    draws.assert_drawn_as_plain(monkeypatch, DEVICE, vocabulary, used)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_pages_of_all_layers_are_copied_at_once(dtype: torch.dtype) -> None:
    """Layers of three shapes, keys wider than values, one that is not aligned; more than one thread block."""
    layers = {0: (2, 64, 64), 1: (2, 64, 64), 2: (1, 96, 64), 3: (3, 24, 7)}
    here, there = (PagedKVCache(layers, dtype=dtype, device=torch.device(kind)) for kind in ("cpu", "cuda"))
    for cache in (here, there):
        cache.resize_pool(12)
    for layer in layers:
        for plain, fast in zip(here.whole(layer), there.whole(layer)):
            fast.copy_(plain.copy_(torch.randn(plain.shape)))
    for cache in (here, there):
        cache._copy([1, 1, 4], [2, 3, 9])
    for layer in layers:
        for plain, fast in zip(here.whole(layer), there.whole(layer)):
            assert torch.equal(plain, fast.cpu())
