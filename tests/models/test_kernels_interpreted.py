"""The Triton kernels without a GPU, in Triton's interpreter: their arithmetic and their addresses, not their speed.

It has no bf16, so 16 bits are float16 here. On a GPU test_flash.py, test_fused_modules.py and rollout/test_kernels.py show more.
"""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from strop.algorithms import logprobs
from strop.models.layouts.mixers import MixerForward
from strop.models.packing import lay_out, rectangle
from strop.rollout.native import pages
from strop.rollout.native.pages import PagedKVCache
from tests.rollout import draws

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="make test-kernels interprets kernels"
    ),
]

LENGTHS = [150, 1, 64, 65, 2]
HEADS = [(6, 2, 32, None), (4, 4, 24, 20), (3, 1, 16, None)]
SHORTER = [pytest.param(*HEADS[0], marks=pytest.mark.slow), *HEADS[1:]]
"""The largest case takes seconds in every variant."""


def inputs(heads, key_heads, size, dtype=torch.float16):
    torch.manual_seed(0)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return *(torch.randn(sum(LENGTHS), n, size, dtype=dtype) for n in (heads, key_heads, key_heads)), bounds


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 2e-6), (torch.float16, 3e-3)], ids=["fp32", "fp16"]
)
@pytest.mark.parametrize("heads, key_heads, size, window", HEADS)
def test_packed_attention_is_the_definition(heads, key_heads, size, window, dtype, tolerance):
    from strop.models.flash import packed_attention

    q, k, v, bounds = inputs(heads, key_heads, size, dtype)
    found = packed_attention(q, k, v, bounds, max(LENGTHS), window=window)
    k, v = (x.repeat_interleave(heads // key_heads, 1) for x in (k, v))
    for begin, end in pairwise(bounds.tolist()):
        at = torch.arange(end - begin)
        distance = at[:, None] - at
        seen = (distance >= 0) & (distance < (window or end - begin))
        scores = torch.einsum("ihd,jhd->hij", *(x[begin:end].double() for x in (q, k))) * size**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        expected = torch.einsum("hij,jhd->ihd", weights, v[begin:end].double())
        assert (found[begin:end] - expected).abs().max() < tolerance


def test_training_attends_with_this_kernel_also_where_beginnings_are_shared(monkeypatch):
    from strop.models import attention, flash, varlen

    beginning = torch.arange(50)
    ids = [torch.cat([beginning, 1000 * (i + 1) + torch.arange(n)]) for i, n in enumerate((90, 3, 40))]
    inputs = lay_out(rectangle(ids), packed=True)
    states = [torch.randn(1, heads, inputs.ids.shape[1], 16) for heads in (4, 2, 2)]
    expected, _ = attention.packed_attention(torch.nn.Module(), *states, None, packing=inputs.packing)
    monkeypatch.setattr(varlen, "DEVICES", ("cpu",))
    monkeypatch.setattr(varlen, "varlen_kernel", lambda *_: flash.packed_attention)
    found, _ = attention.packed_attention(torch.nn.Module(), *states, None, packing=inputs.packing)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def in_pages(tensors, table, size=64):
    """Rows [tokens, heads, D] in the pages that the lines of `table` name; the rest is what must not matter."""
    found = []
    for rows in tensors:
        held = torch.full(
            (int(table.max()) + 1, rows[0].shape[1], size, rows[0].shape[2]), 9.0, dtype=rows[0].dtype
        )
        for row, line in zip(rows, table.tolist()):
            for part, page in zip(row.split(size), line):
                held[page, :, : len(part)] = part.transpose(0, 1)
        found.append(held)
    return found


@pytest.mark.parametrize("segment", [64, pytest.param(128, marks=pytest.mark.slow), 1024])
@pytest.mark.parametrize("heads, key_heads, size, window", SHORTER)
def test_one_token_at_a_time_gives_the_same_bits(monkeypatch, heads, key_heads, size, window, segment):
    """In pages that lie anywhere, in as many segments as there are, and where the grid is wider than the rows."""
    from strop.models import flash
    from strop.rollout.native import kernels

    monkeypatch.setattr(flash, "SEGMENT", segment)
    monkeypatch.setattr(kernels, "SEGMENT", segment)
    q, k, v, bounds = inputs(heads, key_heads, size)
    together = flash.packed_attention(q, k, v, bounds, max(LENGTHS), window=window)
    positions = torch.tensor([0, 1, 63, 64, 65, 127, 128, 149])
    table = torch.randperm(40)[:32].view(8, 4).to(torch.int32)
    before = [[x[:position] for position in positions] for x in (k, v)]
    new = [x[positions, :, None] for x in (q, k, v)]
    for longest in (150, 190):
        held = in_pages(before, table)
        alone = kernels.decode_attention(*new, *held, positions, table, longest, window=window)[:, 0]
        assert torch.equal(alone, together[positions])
        for row, position in enumerate(positions.tolist()):
            page, place = table[row, position // 64], position % 64
            assert torch.equal(held[0][page, :, place], k[position])
            assert torch.equal(held[1][page, :, place], v[position])


def test_attention_sinks_are_in_the_first_segment_that_is_seen(monkeypatch):
    from strop.rollout.native import kernels

    torch.manual_seed(0)
    positions = torch.tensor([150, 200, 64, 129, 310, 5])
    q, k, v = (torch.randn(6, heads, 1, 32) for heads in (6, 2, 2))
    keys, values = (torch.randn(6, 2, 320, 32) for _ in range(2))
    table = torch.arange(6)[:, None].to(torch.int32)
    more = {"window": 100, "sinks": torch.randn(6), "softcap": 5.0}
    found = []
    for segment in (1024, 64):
        monkeypatch.setattr(kernels, "SEGMENT", segment)
        found.append(kernels.decode_attention(q, k, v, keys, values, positions, table, 320, **more))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("segment", [64, 1024])
@pytest.mark.parametrize("heads, key_heads, size, window", SHORTER)
def test_pieces_that_go_on_in_a_cache_give_the_same_bits(
    monkeypatch, heads, key_heads, size, window, segment
):
    from strop.models import flash

    monkeypatch.setattr(flash, "SEGMENT", segment)
    q, k, v, bounds = inputs(heads, key_heads, size)
    together = flash.packed_attention(q, k, v, bounds, max(LENGTHS), window=window)
    table = torch.randperm(30)[: 3 * len(LENGTHS)].view(-1, 3).to(torch.int32)
    keys, values = in_pages([x.split(LENGTHS) for x in (k, v)], table)
    origins = [length // 3 for length in LENGTHS]
    taken = [
        torch.arange(begin + origin, begin + length)
        for begin, length, origin in zip(bounds.tolist(), LENGTHS, origins)
    ]
    sizes, at = [len(t) for t in taken], torch.cat(taken)
    mine = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    pieces = flash.continued_attention(
        q[at], keys, values, mine, max(sizes), torch.tensor(origins), table, window=window
    )
    assert torch.equal(pieces, together[at])


def with_gradients(function, *tensors):
    tensors = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*tensors)
    out = list(out) if isinstance(out, tuple) else [out]
    generator = torch.Generator().manual_seed(1)
    return [
        *out,
        *torch.autograd.grad(out, tensors, [torch.randn(x.shape, generator=generator) for x in out]),
    ]


def plain_gate(both):
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def plain_norm(x, weight):
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def test_small_parts_are_their_formulas_with_their_gradients():
    from strop.models import kernels

    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 48), torch.randn(48)
    cos, sin = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    for quick, plain, given in (
        (lambda x, w: kernels.rms_norm(x, w, 1e-6), plain_norm, (x, weight)),
        (kernels.gated_silu, lambda gate, up: F.silu(gate) * up, (x, x.flip(0))),
        # Halves of one tensor, also of one whose rows lie apart.
        (kernels.gated_silu_halves, plain_gate, (x,)),
        (
            lambda wide: kernels.gated_silu_halves(wide[..., :24]),
            lambda wide: plain_gate(wide[..., :24]),
            (x,),
        ),
        (
            lambda q, k: kernels.rotary(q, k, cos, sin),
            lambda q, k: apply_rotary_pos_emb(q, k, cos, sin),
            (q, k),
        ),
    ):
        torch.testing.assert_close(
            with_gradients(quick, *given), with_gradients(plain, *given), rtol=1e-4, atol=1e-5
        )


def test_heads_that_are_views_are_normalised_where_they_are(monkeypatch):
    from strop.models import kernels

    whole = torch.randn(2, 3, 100)
    queries = whole[..., 10:74].unflatten(2, (4, 16))
    weight = torch.randn(16)
    expected = plain_norm(queries, weight)
    torch.testing.assert_close(kernels.rms_norm(queries, weight, 1e-6), expected)  # with gradients
    monkeypatch.setattr(torch.Tensor, "contiguous", None)  # nothing is copied
    with torch.no_grad():
        torch.testing.assert_close(kernels.rms_norm(queries, weight, 1e-6), expected)


@pytest.mark.parametrize("parts", [1, 2])
def test_few_rows_times_a_weight(parts):
    from strop.models.projections import few_row_kernels

    torch.manual_seed(0)
    rows, weight = torch.randn(5, 512, dtype=torch.float16), torch.randn(192, 512, dtype=torch.float16) / 20
    pairs = zip(rows.double().chunk(parts, 1), weight.double().chunk(parts, 1), strict=True)
    expected = torch.stack([a @ b.t() for a, b in pairs])
    for given in (rows, torch.cat([rows, rows], 1)[:, 512:]):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
            found = few_row_kernels.product(given, weight, parts, dtype)
            assert found.dtype == dtype and (found - expected).abs().max() < tolerance


@pytest.mark.parametrize("dtype, largest", [(torch.int8, 127.0), (torch.float8_e4m3fn, 448.0)])
def test_norms_and_gates_quantise_what_they_return(dtype, largest):
    from strop.models import kernels
    from strop.rollout.native.quantization import kernels as quantization

    torch.manual_seed(0)
    x = torch.randn(5, 96, dtype=torch.float16)[:, :80]
    x[3] = 0
    weight, up = torch.randn(80, dtype=torch.float16), torch.randn(5, 80, dtype=torch.float16)
    for plain, quick in (
        (
            kernels.rms_norm(x, weight, 1e-6),
            lambda *short: quantization.norm_and_quantize(x, weight, 1e-6, *short, largest),
        ),
        (kernels.gated_silu(x, up), lambda *short: quantization.gate_and_quantize(x, up, *short, largest)),
    ):
        values, scales = torch.empty(5, 80, dtype=dtype), torch.empty(5)
        quantization.quantize_rows(plain, values, scales, largest)
        found = [torch.empty_like(one) for one in (plain, values, scales)]
        quick(*found)
        for one, other in zip(found, (plain, values, scales), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("count", [5, 100])
def test_a_divided_product_is_added_to_the_stream(monkeypatch, count, in_place):
    from strop.rollout.native.quantization import adding_product

    monkeypatch.setattr(adding_product, "_parts", lambda *_: 2)
    torch.manual_seed(0)
    rows, weight = torch.randn(count, 512, dtype=torch.float16), torch.randn(256, 512, dtype=torch.float16)
    row_scales, scales, stream = torch.rand(count), torch.rand(256), torch.randn(count, 256)
    for bias in (None, torch.randn(256)):
        expected = stream + (rows.double() @ weight.double().t()) * row_scales[:, None] * scales
        if bias is not None:
            expected += bias
        found = adding_product.add_product(stream, rows, row_scales, weight, scales, bias, in_place=in_place)
        assert (found.data_ptr() == stream.data_ptr()) == in_place
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("in_place", [False, True])
def test_partial_products_are_added_from_the_left(in_place):
    from strop.models import kernels

    torch.manual_seed(0)
    stream, parts = torch.randn(7, 300), torch.randn(2, 7, 300)
    expected = (stream + parts[0]) + parts[1]
    given = stream.clone()
    assert torch.equal(kernels.add_in_order(given, parts, in_place=in_place), expected)
    assert torch.equal(given, expected if in_place else stream)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", [False, True], ids=["log_probs", "entropy"])
def test_passes_over_logits_give_the_numbers_and_gradients_of_plain_torch(monkeypatch, entropy, temperature):
    from strop.algorithms import logprob_kernels as row_kernels

    torch.manual_seed(0)
    labels, above = torch.randint(5000, (37,)), torch.randn(2, 37)
    states, head = torch.randn(37, 16), torch.randn(5000, 16)

    def answered(hidden, weight):
        found = logprobs.token_logprobs_from_hidden(
            hidden, weight, labels, temperature=temperature, chunk=10, want_entropy=entropy
        )
        return (above[0] * found.log_probs).sum() + ((above[1] * found.entropy).sum() if entropy else 0)

    both = []
    for kernels in (row_kernels, None):
        monkeypatch.setattr(logprobs, "compiled_for", lambda *_, kernels=kernels: kernels)
        both.append(with_gradients(answered, states, head))
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)


def test_pages_of_all_layers_are_copied_at_once(monkeypatch):
    from strop.rollout.native import kernels

    layers = {0: (2, 16, 16), 1: (2, 16, 16), 2: (1, 24, 16), 3: (3, 5, 7)}
    plain, fast = (PagedKVCache(layers, dtype=torch.float16, device=torch.device("cpu")) for _ in range(2))
    for one in (plain, fast):
        one.resize_pool(12)
    for layer in layers:
        for a, b in zip(plain.whole(layer), fast.whole(layer)):
            b.copy_(a.copy_(torch.randn(a.shape)))
    plain._copy([1, 1, 4], [2, 3, 9])
    monkeypatch.setattr(pages, "kernels", lambda device: kernels)
    fast._copy([1, 1, 4], [2, 3, 9])
    assert all(torch.equal(a, b) for layer in layers for a, b in zip(plain.whole(layer), fast.whole(layer)))
    assert torch.equal(plain.tensors.keys[0][9], plain.tensors.keys[0][4])


@pytest.mark.parametrize("mixed", [False, True], ids=["plain", "mixed"])
def test_a_draw_is_that_of_plain_torch(monkeypatch, mixed):
    used = {"temperature": mixed, "greedy": mixed, "all_greedy": False}
    draws.assert_drawn_as_plain(monkeypatch, torch.device("cpu"), 4097, used)


def draft_case(seed, rows=6, width=24, ahead=4):
    """Rows in all states: running, finished, in a prefill by decode steps, at their limit, at the end of the cache."""
    draw = torch.Generator().manual_seed(seed)

    def numbers(low, high, *shape):
        return torch.randint(low, high, shape, generator=draw)

    length = numbers(1, width - 2, rows)
    fields = {
        "tokens": numbers(0, 4, rows, width + 1),
        "log_probs": torch.zeros(rows, width + 1),
        "length": length,
        "num_known": torch.where(numbers(0, 3, rows) == 0, (length + 2).clamp(max=width - 1), 0),
        "limit": (length + numbers(1, 9, rows)).clamp(max=width),
        "state": torch.where(numbers(0, 5, rows) == 0, 1, 0),
        "stops": numbers(-1, 9, rows, 2),
    }
    lines = numbers(-1, 4, rows, 40).to(torch.int32)
    sampled = (
        numbers(0, 4, rows * ahead),
        -torch.rand(rows * ahead, generator=draw),
        numbers(0, 9, rows * ahead) > 0,
    )
    return fields, lines, sampled


@pytest.mark.parametrize("seed", range(6))
def test_drafts_are_found_and_kept_as_in_plain_torch(monkeypatch, seed):
    from strop.config.schema.rollout import SpeculationConfig
    from strop.rollout.native.decode_rows import DecodeRows
    from strop.rollout.native.sampler import SampledTokens
    from strop.rollout.native.speculation import drafts as module
    from strop.rollout.native.speculation import kernels

    monkeypatch.setattr(kernels, "_BLOCK", 16)
    found = []
    for fast in (None, kernels):
        monkeypatch.setattr(module, "draft_kernels", lambda device, fast=fast: fast)
        fields, lines, (tokens, log_probs, valid) = draft_case(seed)
        rows = DecodeRows(torch.device("cpu"))
        rows.fields = fields
        rows.capacity = 24
        drafts = module.Drafts(SpeculationConfig(num_tokens=3, max_match=3), torch.device("cpu"))
        drafts._lines = lines
        drafted = drafts.propose(rows, 6, 3, {"line_width": 40}, 24)
        found.append([drafted.clone(), rows.fields["tokens"][:, :24].clone()])
        sampled = torch.where(
            torch.arange(24) % 4 < seed % 4, torch.nn.functional.pad(drafted, (0, 1)).flatten(), tokens
        )
        drafts.keep(rows, drafted, SampledTokens(sampled.clamp(min=0), log_probs, valid))
        ends = torch.arange(25) < rows.fields["length"][:, None]
        found[-1] += [rows.fields[name].where(ends, 0) for name in ("tokens", "log_probs")]
        found[-1] += [rows.fields["length"], rows.fields["state"], drafts._counts]
    for plain, kernel in zip(*found):
        assert torch.equal(plain, kernel)
    assert found[0][-1][0] > 0


def test_keys_and_values_of_several_tokens_are_stored(monkeypatch):
    from strop.rollout.native.speculation import kernels

    key, value = (torch.randn(6, 1, 2, size).transpose(1, 2) for size in (24, 16))
    keys, values = (torch.zeros(8, 2, 64, size) for size in (24, 16))
    positions = torch.tensor([62, 63, 64, 0, 1, 2])
    table = torch.tensor([[3, 5]] * 3 + [[7, 0]] * 3, dtype=torch.int32)
    kernels.store(key, value, keys, values, positions, table)
    pages = torch.tensor([3, 3, 5, 7, 7, 7])
    assert torch.equal(keys[pages, :, positions % 64], key[:, :, 0])
    assert torch.equal(values[pages, :, positions % 64], value[:, :, 0])
    assert int((keys != 0).sum()) == key.numel()


@pytest.mark.parametrize(
    "family, dtype, tolerance",
    [
        ("qwen3_5_text", torch.float32, 1e-5),
        ("qwen3_next", torch.float16, 4e-3),
        pytest.param("qwen3_5_text", torch.float16, 4e-3, marks=pytest.mark.slow),
        pytest.param("qwen3_next", torch.float32, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_the_gated_delta_rule_is_that_of_the_module(family, dtype, tolerance, monkeypatch):
    from strop.models.layouts import delta_kernels, delta_rule
    from strop.models.layouts.states import RowStates
    from tests.models.hybrids import hybrid

    monkeypatch.setattr(delta_kernels, "_VALUES", 4)  # several programs for a state
    monkeypatch.setattr(delta_rule, "_checked", {})
    model = hybrid(family).to(dtype)
    prepared = [part.linear_attn for part in model.model.layers if hasattr(part, "linear_attn")]
    mixer = MixerForward(prepared[0], 0)
    hidden = torch.randn(5, 1, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        plain, fast = RowStates(), RowStates()
        plain.probe(mixer, hidden[:1])
        monkeypatch.setattr(delta_rule, "delta_kernels", lambda device: delta_kernels)
        fast.probe(mixer, hidden[:1])
        assert fast._rules[0].has_step and not plain._rules[0].has_step, "the self-check accepts the kernels"
        for states in (plain, fast):
            states.resize(6, 0)
        for step in range(4):
            expected, found = (states.step(mixer, hidden * (1 + step)) for states in (plain, fast))
            assert (expected - found).abs().max() < tolerance * max(1, expected.abs().max())
    for name, state in plain._states[0].items():
        assert (state - fast._states[0][name]).abs().max() < tolerance, name
        assert (fast._states[0][name][5] == 0).all(), "rows behind the running ones stay"
    before = {name: state.clone() for name, state in fast._states[0].items()}
    running = torch.tensor([True, False, True, False, False])
    with torch.no_grad():
        expected, found = (states.step(mixer, hidden, running) for states in (plain, fast))
    assert (expected - found).abs().max() < tolerance * max(1, expected.abs().max())
    for name, state in fast._states[0].items():
        assert torch.equal(state[[1, 3, 4]], before[name][[1, 3, 4]]), "the states of finished rows stay"
        assert (state - plain._states[0][name]).abs().max() < tolerance
        assert not torch.equal(state[0], before[name][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_4_bit_weights_are_dequantised_as_by_torch(dtype):
    from strop.models.nf4 import format, kernel

    packed, scales = format.quantize(torch.randn(37, 192, generator=torch.Generator().manual_seed(0)))
    found = kernel.dequantize(packed, scales, torch.tensor(format.LEVELS), dtype)
    assert torch.equal(found, format.dequantize(packed, scales, dtype))


def test_the_sum_of_a_lora_layer_and_its_gradients():
    """Two parts of the inner dimension, rows that do not fill a tile, float32 adapters."""
    from strop.models.lora_gpu.kernels import add_lora

    torch.manual_seed(0)
    x = torch.randn(70, 1100, dtype=torch.float16).requires_grad_()
    base = torch.randn(70, 150, dtype=torch.float16).requires_grad_()
    a = (torch.randn(5, 1100) / 33).requires_grad_()
    b = torch.randn(150, 5).requires_grad_()
    found = add_lora(base, x, a, b, 0.5)
    expected = base.double() + 0.5 * (x.double() @ a.double().t()) @ b.double().t()
    assert (found - expected).abs().max() < 1e-2
    assert torch.equal(add_lora(base[:3], x[:3], a, b, 0.5), found[:3]), "bits depend on the number of rows"
    weights = torch.randn(70, 150)
    mine = torch.autograd.grad((found * weights).sum(), [base, x, a, b])
    theirs = torch.autograd.grad((expected * weights).sum(), [base, x, a, b])
    for one, other in zip(mine, theirs):
        assert (one - other).norm() < 3e-3 * other.norm()


@pytest.mark.parametrize("sizes", [(150, 20, 33), (20, 129)])
def test_lora_layers_together_have_the_bits_that_they_have_alone(sizes):
    from strop.models.lora_gpu.kernels import add_lora, add_lora_to_all

    torch.manual_seed(0)
    rank = 5
    x = torch.randn(2, 35, 600, dtype=torch.float16)
    base = torch.randn(2, 35, sum(sizes), dtype=torch.float16)
    a = torch.randn(len(sizes) * rank, 600) / 25
    b = torch.randn(sum(sizes), rank)
    alone = [
        add_lora(*factors, 0.5)
        for factors in zip(base.split(sizes, -1), [x] * len(sizes), a.split(rank), b.split(sizes))
    ]
    assert torch.equal(add_lora_to_all(base, x, a, b, 0.5, sizes), torch.cat(alone, -1))


def test_numbers_are_shortened_as_in_plain_torch():
    """Powers of two, every mantissa, zeros, the smallest and largest, and what is not finite."""
    from strop.rollout.native.quantization import cache
    from strop.rollout.native.speculation import kernels

    torch.manual_seed(0)
    x = torch.randn(24, 1, 1, 16) * torch.logspace(-30, 30, 24)[:, None, None, None]
    x[1], x[2, 0, 0, 3], x[3, 0, 0, 5] = 0.0, torch.inf, torch.nan
    x[4:8, 0, 0, 0] = torch.tensor([448.0, 448.1, 1.75, 7.0])
    numbers, exponents = cache.in_8_bits(x)
    keys, values = torch.zeros(2, 24, 1, 1, 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    powers = torch.zeros(2, 24, 1, 1, 1, dtype=torch.uint8)
    rows = torch.arange(24)
    kernels.store(x, x, keys, values, rows * 0, rows[:, None].to(torch.int32), tuple(powers))
    finite = torch.ones(24, dtype=torch.bool)
    finite[2:4] = False
    assert torch.equal(keys.view(torch.uint8), numbers) and torch.equal(values.view(torch.uint8), numbers)
    assert torch.equal(powers[0], exponents) and torch.equal(powers[1], exponents)
    assert cache.from_8_bits(numbers, exponents, torch.float32)[~finite].isnan().all()
    exact = cache.from_8_bits(numbers, exponents, torch.float32)[finite]
    assert ((exact - x[finite]).abs() <= x[finite].abs().amax(-1, keepdim=True) / 16).all()


@pytest.mark.parametrize("segment", [64, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("heads, key_heads, size, window", SHORTER[:2])
def test_a_cache_of_8_bits_gives_the_bits_of_a_wide_one_with_the_same_numbers(
    monkeypatch, heads, key_heads, size, window, segment
):
    """One token at a time and pieces that go on, beside what packed attention says of these numbers."""
    from strop.models import flash
    from strop.rollout.native import kernels
    from strop.rollout.native.quantization import cache

    monkeypatch.setattr(flash, "SEGMENT", segment)
    monkeypatch.setattr(kernels, "SEGMENT", segment)
    q, exact_k, exact_v, bounds = inputs(heads, key_heads, size)
    short = [cache.in_8_bits(x) for x in (exact_k, exact_v)]
    k, v = (cache.from_8_bits(*pair, torch.float16) for pair in short)
    together = flash.packed_attention(q, k, v, bounds, max(LENGTHS), window=window)
    table = torch.randperm(30)[:15].view(5, 3).to(torch.int32)

    def held(rows, positions):
        parts = [[x[row] for row in rows] for pair in short for x in pair]
        found = [x.to(torch.uint8) for x in in_pages(parts, positions)]
        return [x.view(torch.float8_e4m3fn) for x in found[::2]], tuple(found[1::2])

    positions = torch.tensor([0, 63, 64, 130, 149])
    (keys, values), exponents = held([slice(position) for position in positions], table)
    new = [x[positions, :, None] for x in (q, exact_k, exact_v)]
    alone = kernels.decode_attention(
        *new, keys, values, positions, table, 150, exponents=exponents, window=window
    )
    assert torch.equal(alone[:, 0], together[positions])

    whole = [slice(begin, end) for begin, end in pairwise(bounds.tolist())]
    (keys, values), exponents = held(whole, table)
    origins = torch.tensor([length // 3 for length in LENGTHS])
    taken = [torch.arange(row.start + int(origin), row.stop) for row, origin in zip(whole, origins)]
    sizes, at = [len(t) for t in taken], torch.cat(taken)
    mine = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    pieces = flash.continued_attention(
        q[at], keys, values, mine, max(sizes), origins, table, exponents, window=window
    )
    assert torch.equal(pieces, together[at])


def test_every_number_of_8_bits_is_read_as_it_is():
    """All codes that are stored, in a decode step and in a prefill that goes on, beside a wide cache."""
    from strop.models.flash import continued_attention
    from strop.rollout.native.kernels import decode_attention
    from strop.rollout.native.quantization.cache import from_8_bits, in_8_bits

    torch.manual_seed(0)
    codes = torch.randint(256, (2, 3, 2, 64, 32), dtype=torch.uint8)
    codes[codes & 127 == 127] = 0
    assert len(codes.unique()) == 254
    exponents = torch.randint(112, 120, (2, 3, 2, 64, 1), dtype=torch.uint8)
    short = [x.view(torch.float8_e4m3fn) for x in codes]
    wide = list(from_8_bits(codes, exponents, torch.float16))
    query, *new = (torch.randn(1, n, 1, 32, dtype=torch.float16) for n in (6, 2, 2))
    stored = [from_8_bits(*in_8_bits(x), torch.float16) for x in new]
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    at = torch.tensor([180])
    expected = decode_attention(query, *stored, *wide, at, table, 192)
    found = decode_attention(query, *new, *short, at, table, 192, exponents=tuple(exponents))
    assert torch.equal(found, expected)
    bounds = torch.tensor([0, 30], dtype=torch.int32)
    queries = torch.randn(30, 6, 32, dtype=torch.float16)
    begin = torch.tensor([150])
    expected = continued_attention(queries, *wide, bounds, 30, begin, table)
    found = continued_attention(queries, *short, bounds, 30, begin, table, tuple(exponents))
    assert torch.equal(found, expected)


def test_vectors_that_are_not_finite_are_seen():
    from strop.rollout.native.kernels import decode_attention
    from strop.rollout.native.quantization.cache import in_8_bits

    torch.manual_seed(0)
    keys, values = (in_8_bits(torch.randn(3, 2, 64, 32, dtype=torch.float16)) for _ in range(2))
    numbers = [x[0].view(torch.float8_e4m3fn) for x in (keys, values)]
    query, key, value = (torch.randn(3, n, 1, 32, dtype=torch.float16) for n in (4, 2, 2))
    key[0, 0, 0, 3], value[1, 1, 0, 5] = torch.nan, torch.inf
    at, table = torch.tensor([40] * 3), torch.arange(3, dtype=torch.int32)[:, None]
    out = decode_attention(query, key, value, *numbers, at, table, 64, exponents=(keys[1], values[1]))
    assert out[:, 0].isnan().all(-1).tolist() == [
        [True, True, False, False],
        [False, False, True, True],
        [False] * 4,
    ]
    assert out[2].isfinite().all()
