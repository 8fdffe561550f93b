"""Attention over packed sequences on a GPU: right, and the very bits of what the rollout engine computes token by token."""

from __future__ import annotations

import pytest
import torch

from strop.models.varlen import HeadShape, checked_flash, plain_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = [150, 1, 64, 65, 331, 2]
LONG = [*LENGTHS, 1024, 2500, 1025]
HEADS = [(9, 3, 64, None), (28, 4, 128, None), (4, 4, 80, 50), (6, 2, 24, None), (14, 2, 64, 128)]


def inputs(heads, key_heads, size, dtype=torch.bfloat16, lengths=LENGTHS):
    torch.manual_seed(0)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    q, k, v = (
        torch.randn(sum(lengths), n, size, device="cuda", dtype=dtype) for n in (heads, key_heads, key_heads)
    )
    return q, k, v, bounds


def defined(q, k, v, window, lengths):
    """The definition, in float64."""
    parts = []
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    for queries, keys, values in zip(*(x.double().split(lengths) for x in (q, k, v))):
        scores = torch.einsum("ihd,jhd->hij", queries, keys) * q.shape[-1] ** -0.5
        at = torch.arange(len(queries), device="cuda")
        distance = at[:, None] - at
        seen = (distance >= 0) & (distance < (window or len(queries)))
        parts.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
    return torch.cat(parts)


def with_gradients(function, q, k, v, above):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = function(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), above.to(out.dtype))]


@pytest.mark.parametrize("lengths", [LENGTHS, LONG], ids=["short", "long"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("heads, key_heads, size, window", HEADS)
def test_it_is_as_near_to_the_definition_as_the_kernel_of_torch(
    heads, key_heads, size, window, dtype, lengths
):
    q, k, v, bounds = inputs(heads, key_heads, size, dtype, lengths)
    flash = checked_flash(HeadShape(q.device, dtype, heads // key_heads, size))
    plain = plain_kernel()
    assert flash is not None and plain is not None, "this kernel is not used here"
    above = torch.randn_like(q)
    exact = with_gradients(lambda q, k, v: defined(q, k, v, window, lengths), q, k, v, above)
    near, usual = (
        with_gradients(lambda q, k, v, f=f: f(q, k, v, bounds, max(lengths), window=window), q, k, v, above)
        for f in (flash.packed_attention, plain)
    )
    for found, other, wanted in zip(near, usual, exact):
        off, allowed = ((x.double() - wanted).norm() / wanted.norm() for x in (found, other))
        assert off < 1.1 * allowed + 1e-6


@pytest.mark.parametrize("heads, key_heads, size, window", HEADS)
def test_one_token_at_a_time_gives_the_same_bits(heads, key_heads, size, window):
    from strop.models.flash import packed_attention
    from strop.rollout.native.kernels import decode_attention

    q, k, v, bounds = inputs(heads, key_heads, size)
    together = packed_attention(q, k, v, bounds, max(LENGTHS), window=window)
    # A row of the cache for every position of the longest sequence.
    begin, length = int(bounds[4]), LENGTHS[4]
    keys, values = (x[begin : begin + length].transpose(0, 1).repeat(length, 1, 1, 1) for x in (k, v))
    positions = torch.arange(length, device="cuda")
    hidden = torch.arange(length, device="cuda")[None, None, :, None] >= positions[:, None, None, None]
    keys, values = (
        x.masked_fill(hidden, 9.0) for x in (keys, values)
    )  # what is not there yet must not matter
    new = slice(begin, begin + length)
    alone = decode_attention(
        q[new, :, None],
        k[new, :, None],
        v[new, :, None],
        keys,
        values,
        positions,
        torch.arange(length, device="cuda")[:, None],
        length,
        window=window,
    )
    assert torch.equal(alone[:, 0], together[new])


@pytest.mark.parametrize("heads, key_heads, size, window", HEADS)
def test_pieces_that_go_on_in_a_cache_give_the_same_bits(heads, key_heads, size, window):
    from strop.models.flash import continued_attention, packed_attention

    q, k, v, bounds = inputs(heads, key_heads, size, lengths=LONG)
    together = packed_attention(q, k, v, bounds, max(LONG), window=window)
    rows = torch.tensor([4, 0, 5, 2, 3, 1, 8, 6, 7], device="cuda")
    keys, values = (
        torch.zeros(9, key_heads, 2560, size, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    origins = [length // 3 for length in LONG]
    taken = []
    for row, begin, length, origin in zip(rows, bounds.tolist(), LONG, origins):
        keys[row, :, :length] = k[begin : begin + length].transpose(0, 1)
        values[row, :, :length] = v[begin : begin + length].transpose(0, 1)
        taken.append(torch.arange(begin + origin, begin + length))
    sizes = [len(t) for t in taken]
    mine, at = torch.tensor([0, *sizes]).cumsum(0).to("cuda", torch.int32), torch.cat(taken).cuda()
    pieces = continued_attention(
        q[at], keys, values, mine, max(sizes), torch.tensor(origins).cuda(), rows[:, None], window=window
    )
    assert torch.equal(pieces, together[at])
