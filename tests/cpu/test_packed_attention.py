"""Compiled attention inside packed sequences: as exact as torch in bf16, for every length and thread count, and
training uses it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from strop.cpu import packed_attention as compiled
from strop.models.attention import PACKED, set_attention
from strop.models.packing import lay_out, rectangle

pytestmark = pytest.mark.skipif(compiled._functions() is None, reason="no compiler, or a CPU without AMX")

LENGTHS = (1, 31, 32, 33, 129, 300)


def drawn(tokens: int, heads: int, key_heads: int, size: int) -> list[Tensor]:
    """Queries, keys and values as a model has them: [tokens, heads, size], of another order in memory."""
    draw = torch.Generator().manual_seed(tokens)
    found = [
        torch.randn(many, tokens, size, generator=draw).bfloat16().transpose(0, 1)
        for many in (heads, key_heads, key_heads)
    ]
    return [states.requires_grad_() for states in found]


def bounds_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def by_torch(states: list[Tensor], bounds: Tensor, scale: float | None, dtype: torch.dtype) -> list[Tensor]:
    """Out, and the gradients for `above`."""
    leaves = [one.detach().to(dtype).requires_grad_() for one in states]
    pieces = []
    for first, last in pairwise(bounds.tolist()):
        q, k, v = (one[first:last].transpose(0, 1)[None] for one in leaves)
        pieces.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True))
    out = torch.cat([piece[0].transpose(0, 1) for piece in pieces])
    return [out.detach(), *torch.autograd.grad(out, leaves, above(out).to(dtype))]


def above(out: Tensor) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def ours(states: list[Tensor], lengths: tuple[int, ...], scale: float | None = None) -> list[Tensor]:
    assert compiled.takes(*states)
    out = compiled.packed_attention(*states, bounds_of(lengths), max(lengths), scale=scale)
    return [out.detach(), *torch.autograd.grad(out, states, above(out))]


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("heads", [(7, 1), (4, 4), (6, 2)], ids=str)
@pytest.mark.parametrize("sharpness", [None, 2.4])
def test_it_is_as_exact_as_torch(size: int, heads: tuple[int, int], sharpness: float | None) -> None:
    scale = None if sharpness is None else sharpness * size**-0.5
    states = drawn(sum(LENGTHS), *heads, size)
    bounds = bounds_of(LENGTHS)
    found = ours(states, LENGTHS, scale)
    exact = by_torch(states, bounds, scale, torch.float64)
    rounded = by_torch(states, bounds, scale, torch.bfloat16)
    for one, other, expected in zip(found, rounded, exact, strict=True):
        for first, last in pairwise(bounds.tolist()):
            of_sequence = expected[first:last].norm()
            if of_sequence > 1e-6:  # of one token, queries and keys have no gradient
                error = (one[first:last].double() - expected[first:last]).norm() / of_sequence
                theirs = (other[first:last].double() - expected[first:last]).norm() / of_sequence
                assert error <= 1.2 * theirs + 1e-4 and error < 5e-3
            else:
                assert one[first:last].abs().max() < 1e-2


def test_a_sequence_does_not_depend_on_others_or_on_threads() -> None:
    states = drawn(sum(LENGTHS), 4, 2, 64)
    threads = torch.get_num_threads()
    together = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            together.append(ours(states, LENGTHS))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for run in together[1:] for a, b in zip(together[0], run, strict=True))
    first = sum(LENGTHS[:4])
    alone = [one[first : first + 129].detach().requires_grad_() for one in states]
    out = compiled.packed_attention(*alone, bounds_of((129,)), 129)
    grads = torch.autograd.grad(out, alone, above(together[0][0])[first : first + 129])
    for one, whole in zip((out, *grads), together[0], strict=True):
        assert torch.equal(one, whole[first : first + 129])


def test_a_longer_sequence_does_not_change_the_beginning() -> None:
    q, k, v = (one.detach() for one in drawn(300, 4, 2, 64))
    whole = compiled.packed_attention(q, k, v, bounds_of((300,)), 300)
    for length in (1, 32, 77, 299):
        part = compiled.packed_attention(q[:length], k[:length], v[:length], bounds_of((length,)), length)
        assert torch.equal(part, whole[:length])


def test_what_is_behind_the_last_sequence_is_zero() -> None:
    states = drawn(40, 2, 2, 64)
    found = ours(states, (3, 30))
    assert all(one.abs().sum() > 0 and torch.equal(one[33:], torch.zeros_like(one[33:])) for one in found)


def test_large_scores_give_finite_numbers() -> None:
    q, k, v = drawn(64, 2, 2, 64)
    found = ours([one.detach().mul(30).requires_grad_() for one in (q, k, v)], (64,))
    assert all(one.isfinite().all() for one in found)


@pytest.mark.parametrize("size", [32, 80])
def test_other_heads_are_left_to_torch(size: int) -> None:
    assert not compiled.takes(*drawn(5, 2, 2, size))
    assert not compiled.takes(*(one.float() for one in drawn(5, 2, 2, 64)))


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_model_trains_with_it(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two responses to a prompt that is packed once. The function is tried in the first forward pass."""
    compiled._functions.cache_clear()
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)).bfloat16()
    set_attention(model, PACKED)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable()
    prompt = torch.arange(40) % 50
    ids = rectangle([torch.cat([prompt, torch.randint(50, (n,))]) for n in (9, 30)])
    inputs = lay_out(ids, packed=True)
    calls = 0
    attend = compiled.packed_attention

    def counted(*given: object, **options: object) -> Tensor:
        nonlocal calls
        calls += 1
        return attend(*given, **options)  # type: ignore[arg-type]

    def gradients() -> list[Tensor]:
        model.zero_grad()
        out = model(inputs.ids, position_ids=inputs.positions, packing=inputs.packing, use_cache=False)
        out.logits.float().log_softmax(-1)[..., 3].sum().backward()
        return [part.grad for part in model.parameters() if part.grad is not None]

    monkeypatch.setattr(compiled, "packed_attention", counted)
    with_it = gradients()
    layers = 4 if checkpointing else 2
    assert calls == layers
    monkeypatch.setattr(compiled, "takes", lambda *_: False)
    without = gradients()
    model.float()
    exact = gradients()
    assert calls == layers
    for a, b, c in zip(with_it, without, exact, strict=True):
        assert (a.float() - c).norm() < 1.3 * (b.float() - c).norm() + 1e-3 * c.norm()
