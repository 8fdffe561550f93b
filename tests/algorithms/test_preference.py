"""Pairwise losses, supervised losses and the balance of experts."""

from __future__ import annotations

import math

import pytest
import torch

from strop.algorithms.aggregation import Totals
from strop.algorithms.losses import (
    answer_log_probs,
    dpo,
    ipo,
    kto,
    kto_kl,
    orpo,
    ptx_loss,
    reward_logexp,
    reward_sigmoid,
    sft_loss,
    simpo,
)
from strop.catalog import PREFERENCE_LOSSES
from tests.algorithms.reference.load_balancing import load_balancing_loss

CHOSEN, REJECTED = torch.tensor([-10.0, -4.0, -7.0]), torch.tensor([-12.0, -3.0, -7.0])
REFERENCE = torch.tensor([-11.0, -5.0, -7.5]), torch.tensor([-11.5, -3.5, -6.0])


def test_equal_scores_cost_log_two() -> None:
    for loss in (reward_sigmoid, reward_logexp):
        equal = loss(torch.ones(2), torch.ones(2))
        assert equal.per_pair.tolist() == pytest.approx([math.log(2)] * 2)
        assert equal.metrics["accuracy"].tolist() == [0.0, 0.0], "a tie is not right"


def test_the_two_reward_losses_are_one_function_and_neither_overflows() -> None:
    chosen, rejected = torch.tensor([-200.0, 300.0, 0.3]), torch.tensor([200.0, -300.0, 0.1])
    a, b = (
        reward_sigmoid(chosen, rejected).per_pair,
        reward_logexp(chosen.requires_grad_(), rejected).per_pair,
    )
    torch.testing.assert_close(a, b.detach())
    assert b[0].item() == 400.0
    b.sum().backward()
    assert chosen.grad is not None and chosen.grad.isfinite().all() and chosen.grad[0] == -1


def test_a_margin_asks_for_more() -> None:
    gap = reward_sigmoid(torch.tensor([2.0]), torch.tensor([0.0]), margin=torch.tensor([2.0]))
    assert gap.per_pair.item() == pytest.approx(math.log(2))
    assert gap.metrics["accuracy"].tolist() == [1.0]


def test_dpo_by_hand_and_its_smoothing() -> None:
    h = 0.1 * ((CHOSEN - REFERENCE[0]) - (REJECTED - REFERENCE[1]))
    plain = dpo(CHOSEN, REJECTED, *REFERENCE, beta=0.1)
    torch.testing.assert_close(plain.per_pair, -torch.log(torch.sigmoid(h)))
    torch.testing.assert_close(plain.metrics["reward_margin"], h)
    flipped = dpo(REJECTED, CHOSEN, REFERENCE[1], REFERENCE[0], beta=0.1)
    smooth = dpo(CHOSEN, REJECTED, *REFERENCE, beta=0.1, label_smoothing=0.2)
    torch.testing.assert_close(smooth.per_pair, 0.8 * plain.per_pair + 0.2 * flipped.per_pair)


def test_ipo_is_zero_at_its_target_gap() -> None:
    zero = torch.zeros(1)
    assert ipo(torch.tensor([5.0]), zero, zero, zero, beta=0.1).per_pair.item() == pytest.approx(
        0.0, abs=1e-9
    )
    assert ipo(torch.tensor([7.0]), zero, zero, zero, beta=0.1).per_pair.item() == pytest.approx(
        4.0, rel=1e-5
    )
    found = ipo(CHOSEN, REJECTED, *REFERENCE, beta=0.25)
    h = (CHOSEN - REFERENCE[0]) - (REJECTED - REFERENCE[1])
    torch.testing.assert_close(found.per_pair, (h - 2.0).square())
    torch.testing.assert_close(found.metrics["reward_margin"], 0.25 * h)


def test_reference_free_dpo_is_dpo_with_an_indifferent_reference() -> None:
    same = torch.full((3,), -8.0)
    torch.testing.assert_close(dpo(CHOSEN, REJECTED).per_pair, dpo(CHOSEN, REJECTED, same, same).per_pair)
    torch.testing.assert_close(
        simpo(CHOSEN, REJECTED, margin=0.0).per_pair, dpo(CHOSEN, REJECTED, beta=2.0).per_pair
    )
    with_margin = -torch.log(torch.sigmoid(2.0 * (CHOSEN - REJECTED) - 0.5))
    torch.testing.assert_close(simpo(CHOSEN, REJECTED, margin=0.5).per_pair, with_margin)


def test_the_nll_term_is_added() -> None:
    nll = torch.tensor([1.0, 2.0, 3.0])
    with_term = dpo(CHOSEN, REJECTED, *REFERENCE, chosen_nll=nll, nll_coef=0.5).per_pair
    torch.testing.assert_close(with_term, dpo(CHOSEN, REJECTED, *REFERENCE).per_pair + 0.5 * nll)
    with pytest.raises(ValueError, match=r"nll_coef is 0\.5 but chosen_nll was not given"):
        dpo(CHOSEN, REJECTED, nll_coef=0.5)


def test_answers_are_summed_or_averaged_over_their_own_tokens() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, math.nan], [-3.0, math.nan, math.nan]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert answer_log_probs(log_probs, mask).tolist() == [-3.0, -3.0]
    averaged = answer_log_probs(log_probs, mask, average=True)
    assert averaged.tolist() == [-1.5, -3.0]
    averaged.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]
    assert answer_log_probs(log_probs, mask * 0, average=True).tolist() == [0.0, 0.0]


def test_preference_errors() -> None:
    with pytest.raises(ValueError, match=r"rejected has shape \(2,\) but chosen has shape \(3,\)"):
        dpo(CHOSEN, REJECTED[:2])
    shapes = r" has shape \(2,\) but \w+ has shape \(3,\)"
    for name, short in {
        "rejected": lambda two: reward_sigmoid(CHOSEN, two),
        "margin": lambda two: reward_sigmoid(CHOSEN, REJECTED, margin=two),
        "chosen_nll": lambda two: dpo(CHOSEN, REJECTED, chosen_nll=two, nll_coef=1.0),
        "reference": lambda two: kto(CHOSEN, two, torch.ones(3), torch.zeros(3)),
        "labels": lambda two: kto(CHOSEN, REJECTED, two, torch.zeros(3)),
        "kl": lambda two: kto(CHOSEN, REJECTED, torch.ones(3), two),
    }.items():
        with pytest.raises(ValueError, match=name + shapes):
            short(torch.ones(2))
    with pytest.raises(ValueError, match="rejected" + shapes):
        reward_logexp(CHOSEN, REJECTED[:2])
    with pytest.raises(ValueError, match="reference" + shapes):
        kto_kl(CHOSEN, REJECTED[:2])
    with pytest.raises(ValueError, match=r"mask has shape \(3, 1\) but log_probs has shape \(3, 2\)"):
        answer_log_probs(torch.zeros(3, 2), torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"ptx coef must not be negative, got -0\.1"):
        ptx_loss(torch.zeros(1, 1), torch.ones(1, 1), Totals.of(torch.ones(1, 1)), coef=-0.1)
    with pytest.raises(ValueError, match="together, or neither"):
        dpo(CHOSEN, REJECTED, REFERENCE[0])
    with pytest.raises(ValueError, match=r"0 <= s < 0\.5; got 0\.5"):
        dpo(CHOSEN, REJECTED, label_smoothing=0.5)
    with pytest.raises(ValueError, match="beta must be positive, got 0"):
        ipo(CHOSEN, REJECTED, beta=0)


def test_the_registry_knows_who_needs_a_reference() -> None:
    needs = {name: PREFERENCE_LOSSES.entry(name).facts["needs"] for name in PREFERENCE_LOSSES.names()}
    assert {name for name, what in needs.items() if "reference" in what} == {"dpo", "ipo", "kto"}
    assert {name for name, what in needs.items() if "scores" in what} == {"sigmoid", "logexp"}
    assert all(callable(PREFERENCE_LOSSES.get(name)) for name in needs)


def test_sft_micro_batches_add_up() -> None:
    log_probs = -torch.rand(4, 5, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    totals = Totals.of(mask)
    whole = sft_loss(log_probs, mask, totals)
    assert whole.item() == pytest.approx(-(log_probs * mask).sum().item() / 7)
    parts = sft_loss(log_probs[:1], mask[:1], totals) + sft_loss(log_probs[1:], mask[1:], totals)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(ptx_loss(log_probs, mask, totals, coef=0.05), 0.05 * whole)


def test_balanced_experts_cost_k_and_a_collapsed_router_costs_more() -> None:
    identity = 20 * torch.eye(4)
    assert load_balancing_loss([identity], top_k=1).item() == pytest.approx(1.0, rel=1e-4)
    collapsed = torch.tensor([[20.0, 0, 0, 0]]).expand(4, 4)
    assert load_balancing_loss([collapsed], top_k=1).item() == pytest.approx(4.0, rel=1e-4)


def test_load_balancing_equals_transformers_with_and_without_padding() -> None:
    reference = pytest.importorskip("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    layers = tuple(torch.randn(2 * 5, 6) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    torch.testing.assert_close(load_balancing_loss(layers, top_k=2), reference(layers, 6, 2))
    torch.testing.assert_close(load_balancing_loss(layers, top_k=2, mask=mask), reference(layers, 6, 2, mask))


def test_padding_of_the_router_may_be_nan() -> None:
    logits = torch.randn(4, 3)
    dirty = torch.cat([logits, torch.full((2, 3), math.nan)]).requires_grad_()
    loss = load_balancing_loss([dirty], top_k=1, mask=torch.tensor([1, 1, 1, 1, 0, 0]))
    loss.backward()
    torch.testing.assert_close(loss.detach(), load_balancing_loss([logits], top_k=1))
    assert dirty.grad is not None and dirty.grad.isfinite().all() and (dirty.grad[4:] == 0).all()
    with pytest.raises(ValueError, match="mask has 3 entries but each layer's router_logits has 4 tokens"):
        load_balancing_loss([logits], top_k=1, mask=torch.ones(3))
    with pytest.raises(ValueError, match="output_router_logits"):
        load_balancing_loss([], top_k=1)


def test_orpo_by_hand() -> None:
    """nll - beta * log sigmoid(log(odds_c / odds_r)), with the odds written out."""
    chosen, rejected = torch.tensor([0.7, 0.2, 0.999]), torch.tensor([0.4, 0.3, 0.5])
    nll = -chosen.log()
    ratio = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    expected = nll - 0.25 * torch.log(ratio / (1 + ratio))
    found = orpo(chosen.log(), rejected.log(), nll, beta=0.25)
    torch.testing.assert_close(found.per_pair, expected)
    torch.testing.assert_close(found.metrics["log_odds"], ratio.log(), rtol=1e-4, atol=1e-4)
    assert found.metrics["accuracy"].tolist() == [1.0, 0.0, 1.0]
    torch.testing.assert_close(found.metrics["chosen_reward"], 0.25 * chosen.log())
    torch.testing.assert_close(found.metrics["rejected_reward"], 0.25 * rejected.log())


def test_orpo_stays_finite_at_the_ends() -> None:
    chosen = torch.tensor([0.0, -1e-9, -200.0]).requires_grad_()
    loss = orpo(chosen, torch.tensor([-200.0, -1e-9, 0.0]), torch.zeros(3)).per_pair
    loss.sum().backward()
    assert loss.isfinite().all() and chosen.grad is not None and chosen.grad.isfinite().all()


def test_kto_by_hand() -> None:
    """Good answers gain above the KL, bad ones below it; the KL is clamped at 0 and has no gradient."""
    answers, reference = torch.tensor([-4.0, -6.0, -3.0]), torch.tensor([-5.0, -5.0, -5.0])
    mismatched = torch.tensor([-9.0, -7.0]).requires_grad_()
    kl = kto_kl(mismatched, torch.tensor([-10.0, -7.5]))
    assert kl.item() == pytest.approx((1.0 + 0.5) / 2) and not kl.requires_grad
    assert kto_kl(torch.tensor([-9.0]), torch.tensor([-8.0])).item() == 0.0
    found = kto(
        answers,
        reference,
        torch.tensor([1.0, 0.0, 0.0]),
        kl.repeat(3),
        beta=0.5,
        desirable_weight=2.0,
        undesirable_weight=3.0,
    )
    expected = [
        2 * (1 - 1 / (1 + math.exp(-0.5 * (1.0 - 0.75)))),
        3 * (1 - 1 / (1 + math.exp(-0.5 * (0.75 + 1.0)))),
        3 * (1 - 1 / (1 + math.exp(-0.5 * (0.75 - 2.0)))),
    ]
    assert found.per_pair.tolist() == pytest.approx(expected)
    assert found.metrics["accuracy"].tolist() == [1.0, 1.0, 0.0]
