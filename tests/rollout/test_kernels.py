"""The Triton kernels against what plain torch computes, on a GPU."""

from __future__ import annotations

import pytest
import torch

from strop.rollout.native import attention
from strop.rollout.native.attention import AttentionOptions, Decode
from strop.rollout.native.kv_cache import KVCache
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
    every, spans = torch.arange(rows, device=DEVICE), [(0, rows, int(positions.max()) + 1)]
    usual = Decode(plain, every, positions, spans).attend(0, *new, AttentionOptions(**flavour))
    wanted = Decode(exact, every, positions, spans).attend(
        0, *(x.double() for x in new), AttentionOptions(**flavour)
    )
    found = decode_attention(*new, *fast.whole(0), positions, **flavour)
    off, allowed = ((x - wanted).norm() / wanted.norm() for x in (found, usual))
    assert off < 1.2 * allowed + 1e-6
    assert (found - wanted).abs().max() < (1e-5 if dtype == torch.float32 else 5e-2)
    assert all(torch.equal(a, b) for a, b in zip(plain.whole(0), fast.whole(0)))


def test_beginnings_may_be_read_in_another_row():
    from strop.rollout.native.kernels import decode_attention

    torch.manual_seed(0)
    positions = torch.tensor([150, 200, 64, 129, 310, 5], device=DEVICE)
    prefix_rows, prefix_lens = torch.tensor([[0, 0, 2, 2, 0, 5], [0, 140, 0, 64, 140, 0]], device=DEVICE)
    q, k, v = (torch.randn(6, heads, 1, 64, device=DEVICE, dtype=torch.bfloat16) for heads in (9, 3, 3))
    keys, values = (torch.randn(6, 3, 320, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    for row, (other, count) in enumerate(zip(prefix_rows.tolist(), prefix_lens.tolist())):
        for held in (keys, values):
            held[row, :, :count] = held[other, :, :count]
    expected = decode_attention(q, k, v, keys, values, positions)
    for row, count in enumerate(prefix_lens.tolist()):
        keys[row, :, : count // 64 * 64] = values[row, :, : count // 64 * 64] = 9  # not read here, then
    assert torch.equal(
        decode_attention(q, k, v, keys, values, positions, prefix_rows=prefix_rows, prefix_lens=prefix_lens),
        expected,
    )


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
@pytest.mark.parametrize(
    "pairs", [([0, 0, 4], [1, 2, 9]), ([0, 3, 5, 7], [3, 0, 1, 5])], ids=["apart", "crossing"]
)
def test_rows_of_all_layers_are_copied_at_once(
    dtype: torch.dtype, pairs: tuple[list[int], list[int]]
) -> None:
    """Layers of three shapes, keys wider than values, one that is not aligned; more than one thread block per row."""
    layers = {0: (2, 64, 64), 1: (2, 64, 64), 2: (1, 96, 64), 3: (3, 24, 7)}
    here, there = (KVCache(layers, dtype=dtype, device=torch.device(kind)) for kind in ("cpu", "cuda"))
    for cache in (here, there):
        cache.resize(12, 300, 0)
    for layer in layers:
        for plain, fast in zip(here.read(layer, slice(None), 300), there.read(layer, slice(None), 300)):
            fast.copy_(plain.copy_(torch.randn(plain.shape)))
    here.copy(*pairs, 257)
    there.copy(*pairs, 257)
    for layer in layers:
        for plain, fast in zip(here.read(layer, slice(None), 300), there.read(layer, slice(None), 300)):
            assert torch.equal(plain, fast.cpu())
