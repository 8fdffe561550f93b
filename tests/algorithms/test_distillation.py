"""The teacher's term of the advantages, against sums that are written out."""

from __future__ import annotations

import math

import pytest
import torch

from strop.algorithms.distillation import discounted_gain, teacher_gain


def test_the_gain_of_a_token_is_the_difference_of_log_probs():
    own = torch.tensor([[0.5, 0.25, 0.1]]).log()
    teacher = torch.tensor([[0.25, 0.5, 0.9]]).log()
    gain = teacher_gain(own, teacher, torch.tensor([[1.0, 1.0, 0.0]]))
    torch.testing.assert_close(gain, torch.tensor([[-math.log(2), math.log(2), 0.0]]))
    limited = teacher_gain(own, teacher, torch.ones(1, 3), limit=0.5)
    torch.testing.assert_close(limited, torch.tensor([[-0.5, 0.5, 0.5]]))
    with pytest.raises(ValueError, match=r"teacher_log_probs \(1, 2\)"):
        teacher_gain(own, teacher[:, :2], torch.ones(1, 3))


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
