"""The teacher's term of the advantages, against sums that are written out."""

from __future__ import annotations

import math

import pytest
import torch

from strop.algorithms.distillation import discounted_gain, forward_kl_topk, teacher_gain
from strop.algorithms.top_tokens import log_probs_of_tokens, top_tokens


def test_the_gain_of_a_token_is_the_difference_of_log_probs():
    own = torch.tensor([[0.5, 0.25, 0.1]]).log()
    teacher = torch.tensor([[0.25, 0.5, 0.9]]).log()
    gain = teacher_gain(own, teacher, torch.tensor([[1.0, 1.0, 0.0]]))
    torch.testing.assert_close(gain, torch.tensor([[-math.log(2), math.log(2), 0.0]]))
    limited = teacher_gain(own, teacher, torch.ones(1, 3), limit=0.5)
    torch.testing.assert_close(limited, torch.tensor([[-0.5, 0.5, 0.5]]))
    with pytest.raises(ValueError, match=r"teacher_log_probs \(1, 2\)"):
        teacher_gain(own, teacher[:, :2], torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"mask \(1, 2\)"):
        teacher_gain(own, teacher, torch.ones(1, 2))


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_later_tokens_count_with_their_discount_and_other_tokens_not_at_all(discount):
    gain = torch.tensor([[1.0, -2.0, 0.0, 4.0, 8.0], [3.0, 5.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 0, 0, 0]])
    expected = torch.zeros_like(gain)
    for row in range(2):
        places = mask[row].nonzero().flatten().tolist()
        for first, place in enumerate(places):
            for ahead, other in enumerate(places[first:]):
                expected[row, place] += discount**ahead * gain[row, other]
    torch.testing.assert_close(discounted_gain(gain, mask, discount=discount), expected)


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_the_expected_gradient_is_that_of_the_reverse_kl(discount):
    """Two tokens out of three, all nine sequences with their probabilities: sum p * A * grad log p is minus
    the gradient of the reverse KL for discount 1, and of each step's own KL for discount 0."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_()
    second = torch.randn(3, 3, generator=generator, dtype=torch.float64).requires_grad_()
    wanted = torch.randn(4, 3, generator=generator, dtype=torch.float64).log_softmax(-1)
    own = torch.cat([first[None], second]).log_softmax(-1)
    surrogate = torch.zeros((), dtype=torch.float64)
    for a in range(3):
        for b in range(3):
            log_probs = torch.stack([own[0, a], own[1 + a, b]])
            teacher = torch.stack([wanted[0, a], wanted[1 + a, b]])
            mask = torch.ones(1, 2, dtype=torch.float64)
            gain = teacher_gain(log_probs.detach()[None], teacher[None], mask)
            advantage = discounted_gain(gain, mask, discount=discount)[0]
            surrogate = surrogate + log_probs.sum().exp().detach() * (advantage * log_probs).sum()
    found = torch.autograd.grad(surrogate, [first, second], retain_graph=True)
    reach = own[0].exp() if discount else own[0].exp().detach()
    step_kl = (own.exp() * (own - wanted)).sum(-1)
    kl = step_kl[0] + (reach * step_kl[1:]).sum()
    for one, other in zip(found, torch.autograd.grad(-kl, [first, second]), strict=True):
        torch.testing.assert_close(one, other)


def distribution(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*shape, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_tokens_and_their_gradients_are_those_of_a_softmax(chunk, temperature):
    """A token may be asked for twice; then its gradients add up."""
    parts = [distribution(5, 4), distribution(11, 4, seed=1), distribution(11, seed=2)]
    ids = torch.tensor([[3, 3, 0], [1, 2, 10], [0, 1, 2], [10, 9, 8], [4, 5, 4]])
    up = distribution(5, 3, seed=3)
    found, expected = [], []
    for results, computed in ((found, True), (expected, False)):
        hidden, weight, bias = (part.clone().requires_grad_() for part in parts)
        if computed:
            log_probs = log_probs_of_tokens(
                hidden, weight, ids, bias=bias, temperature=temperature, chunk=chunk
            )
        else:
            logits = hidden @ weight.T + bias
            log_probs = (logits / temperature).log_softmax(-1).gather(-1, ids)
        results += [log_probs, *torch.autograd.grad((log_probs * up).sum(), [hidden, weight, bias])]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_likeliest_tokens_come_with_their_log_probs():
    hidden, weight = distribution(5, 4), distribution(11, 4, seed=1)
    expected = (hidden @ weight.T / 0.7).log_softmax(-1).topk(3, dim=-1)
    for chunk in (2, 100):
        ids, log_probs = top_tokens(hidden, weight, 3, temperature=0.7, chunk=chunk)
        assert torch.equal(ids, expected.indices)
        torch.testing.assert_close(log_probs, expected.values)
    with pytest.raises(ValueError, match="The 12 likeliest tokens of a vocabulary of 11"):
        top_tokens(hidden, weight, 12)


def test_forward_kl_over_all_tokens_is_the_kl_and_over_some_is_a_part_of_it():
    student, teacher = (distribution(2, 3, 6, seed=seed).log_softmax(-1) for seed in (0, 1))
    whole = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(forward_kl_topk(student, teacher), whole)
    terms = torch.tensor([[[0.5, 0.25]]]).log(), torch.tensor([[[0.6, 0.1]]]).log()
    expected = 0.6 * math.log(0.6 / 0.5) + 0.1 * math.log(0.1 / 0.25)
    torch.testing.assert_close(forward_kl_topk(*terms), torch.tensor([[expected]]))
    assert forward_kl_topk(terms[1], torch.tensor([[[0.1, 0.05]]]).log()).item() == 0.0  # never negative
    limited = forward_kl_topk(*terms, min_log_prob=math.log(0.3))
    torch.testing.assert_close(limited, torch.tensor([[0.6 * math.log(0.6 / 0.5)]]))
    with pytest.raises(ValueError, match=r"teacher_log_probs \(2, 3, 5\)"):
        forward_kl_topk(student, teacher[..., :5])


def test_forward_kl_leaves_tokens_out_that_one_of_both_does_not_have():
    student = torch.tensor([[0.5, 0.0, 0.25]], dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor([[0.6, 0.3, 0.0]], dtype=torch.float64).log()
    for floor in (None, -10.0):
        divergence = forward_kl_topk(student, teacher, min_log_prob=floor)
        assert divergence.item() == pytest.approx(0.6 * math.log(0.6 / 0.5))
        (slope,) = torch.autograd.grad(divergence.sum(), student)
        torch.testing.assert_close(slope, torch.tensor([[-0.6, 0.0, 0.0]], dtype=torch.float64))
