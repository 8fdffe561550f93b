"""Rollout correction: bands, rejection, presets, and diagnostics that never divide by zero."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.rollout_correction import (
    CRITERIA,
    PRESETS,
    correct_rollout,
    importance_weights,
    parse_band,
    parse_criteria,
    rejection_mask,
)

D = torch.tensor([[0.3, -0.3, 0.1, 1.5], [0, 0.25, -0.1, 9.0], [-0.5, 9.0, 0.4, 0.05], [0.2, -0.2, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0]])
SETTINGS = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")


def test_token_weights_are_truncated_above() -> None:
    weights, metrics = importance_weights(D, MASK, upper=2.0)
    expected = [
        [1.34986, 0.74082, 1.10517, 2],
        [1, 1.28403, 0.90484, 0],
        [0.60653, 0, 1.49182, 1.05127],
        [1.2214, 0.81873, 0, 0],
    ]
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert metrics["rollout_is_max"] == 2.0 and metrics["rollout_is_ratio_fraction_high"] == pytest.approx(
        1 / 12
    )


def test_sequence_weights_are_the_product_of_the_ratios() -> None:
    weights, _ = importance_weights(D, MASK, level="sequence", upper=2.0)
    torch.testing.assert_close(weights.amax(-1), torch.tensor([2, 1.16183, 0.95123, 1]), rtol=1e-5, atol=1e-5)


def test_a_band_zeroes_what_lies_outside() -> None:
    weights, metrics = importance_weights(D, MASK, **parse_band("0.7_1.4")._asdict())
    assert weights[0, 3] == 0 and weights[2, 0] == 0 and weights[0, 0] > 1.3
    assert metrics["rollout_is_oob_ratio"] == pytest.approx(3 / 12)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_average_one(level: str) -> None:
    weights, _ = importance_weights(D, MASK, level=level, normalize=True)
    mean = weights.sum() / MASK.sum() if level == "token" else weights.amax(-1).mean()
    assert mean.item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("criteria", "threshold", "kept"),
    [
        ("seq_sum_k1", "0.5_2.0", [1, 2, 3]),
        ("seq_mean_k3", 0.05, [1, 3]),
        ("seq_max_k2", 0.1, [1, 3]),
        ("seq_sum_k1,seq_mean_k3", "0.5_2.0,0.05", [1, 3]),
    ],
)
def test_rejected_rows_leave_the_mask(criteria: str, threshold: float | str, kept: list[int]) -> None:
    mask, metrics = rejection_mask(D, MASK, criteria=criteria, threshold=threshold)
    assert mask.sum(-1).nonzero().squeeze(-1).tolist() == kept
    assert mask.dtype == MASK.dtype and torch.equal(mask[kept], MASK[kept])
    assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(1 - len(kept) / 4)


def test_a_k1_band_bounds_rollout_over_train() -> None:
    d = torch.tensor([[0.2, -0.2]])  # train/rollout is 1.221 and 0.819, rollout/train 0.819 and 1.221
    mask, _ = rejection_mask(d, torch.ones(1, 2), criteria="token_k1", threshold="0.8_1.2")
    assert mask.tolist() == [[1.0, 0.0]]
    assert parse_criteria("token_k1", 2.0) == [("token_k1", -math.log(2), math.log(2))]


@given(seed=st.integers(0, 1000), junk=st.sampled_from([math.nan, math.inf, -math.inf]))
@settings(max_examples=25, deadline=None)
def test_what_stands_outside_the_mask_does_not_matter(seed: int, junk: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, rollout = -torch.rand(4, 5, generator=generator), -torch.rand(4, 5, generator=generator)
    mask = (torch.rand(4, 5, generator=generator) < 0.6).long()
    mask[0, 0] = 1
    chosen = {
        "rollout_is": "sequence",
        "rollout_rs": "seq_mean_k1,token_k3",
        "rollout_rs_threshold": "0.5_2.0,0.3",
    }
    clean = correct_rollout(old, rollout, mask, **chosen)
    dirty = correct_rollout(
        old.masked_fill(mask == 0, junk), rollout.masked_fill(mask == 0, junk), mask, **chosen
    )
    assert clean.weights is not None and dirty.weights is not None
    assert torch.equal(clean.weights, dirty.weights) and torch.equal(clean.mask, dirty.mask)
    assert {k: v.item() for k, v in clean.metrics.items()} == {k: v.item() for k, v in dirty.metrics.items()}
    assert all(math.isfinite(value.item()) for value in clean.metrics.values())


def test_identical_policies_need_no_correction() -> None:
    log_probs = -torch.rand(3, 4)
    found = correct_rollout(
        log_probs, log_probs, torch.ones(3, 4), rollout_is="token", rollout_is_batch_normalize=True
    )
    assert found.weights is not None and (found.weights == 1).all() and (found.mask == 1).all()
    assert found.metrics["rollout_corr/kl"] == 0 and found.metrics[
        "rollout_corr/rollout_is_eff_sample_size"
    ] == pytest.approx(1)
    assert found.metrics["rollout_corr/chi2_seq"] == pytest.approx(0, abs=1e-6)


def test_a_band_that_drops_everything_is_counted_not_divided_by() -> None:
    weights, metrics = importance_weights(
        torch.ones(2, 2), torch.ones(2, 2), lower=0.9, upper=1.1, outside="zero", normalize=True
    )
    assert (
        (weights == 0).all()
        and metrics["rollout_is_eff_sample_size"] == 0
        and metrics["rollout_is_oob_ratio"] == 1
    )
    _, empty = importance_weights(torch.ones(2, 2), torch.zeros(2, 2))
    assert all(math.isfinite(value.item()) for value in empty.values())


def test_one_sequence_or_one_token_has_finite_diagnostics() -> None:
    found = correct_rollout(
        torch.tensor([[-1.0]]),
        torch.tensor([[-1.2]]),
        torch.ones(1, 1),
        rollout_is="token",
        rollout_rs="seq_max_k2",
        rollout_rs_threshold=1.0,
    )
    assert all(math.isfinite(value.item()) for value in found.metrics.values())


def test_no_gradient_flows_through_a_correction() -> None:
    old = (-torch.rand(2, 3)).requires_grad_()
    found = correct_rollout(old, old.detach() - 0.1, torch.ones(2, 3), rollout_is="token")
    assert found.weights is not None and not found.weights.requires_grad
    assert not any(value.requires_grad for value in found.metrics.values())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_runs(name: str) -> None:
    preset = PRESETS[name]
    chosen = {key: preset[key] for key in SETTINGS if key in preset}
    old = -torch.rand(3, 4)
    found = correct_rollout(old, old - 0.01 * torch.randn(3, 4), torch.ones(3, 4), **chosen)
    assert (found.weights is not None) == ("rollout_is" in preset)
    assert all(math.isfinite(value.item()) for value in found.metrics.values())


def test_presets_say_whether_they_bypass() -> None:
    assert all(preset["bypass_mode"] == name.startswith("bypass") for name, preset in PRESETS.items())
    assert {preset["loss_type"] for preset in PRESETS.values() if preset["bypass_mode"]} == {
        "ppo_clip",
        "reinforce",
    }


@pytest.mark.parametrize("criterion", CRITERIA)
def test_every_criterion_reports_its_metrics(criterion: str) -> None:
    _, metrics = rejection_mask(D, MASK, criteria=criterion, threshold=1.5)
    names = {
        "mean",
        "max",
        "min",
        "std",
        "fraction_high",
        "fraction_low",
        "seq_mean",
        "masked_fraction",
        "seq_masked_fraction",
    }
    assert {f"rollout_rs_{criterion}_{name}" for name in names} <= set(metrics)


def test_errors_say_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"Unknown rollout_rs criterion 'seq_max_k1'\. Did you mean"):
        rejection_mask(D, MASK, criteria="seq_max_k1", threshold=2)
    with pytest.raises(ValueError, match="2 values but rollout_rs names 3 criteria"):
        rejection_mask(D, MASK, criteria="token_k1,token_k2,token_k3", threshold="1,2")
    with pytest.raises(ValueError, match=r"every token would be rejected\. Give 2, or a band"):
        rejection_mask(D, MASK, criteria="seq_mean_k1", threshold=0.5)
    with pytest.raises(ValueError, match="needs rollout_rs_threshold"):
        rejection_mask(D, MASK, criteria="token_k1", threshold=None)
    with pytest.raises(ValueError, match="bands are for k1"):
        rejection_mask(D, MASK, criteria="token_k2", threshold="0.1_0.2")
    with pytest.raises(ValueError, match="0 < lo <= hi; got '2_1'"):
        parse_band("2_1")
    with pytest.raises(ValueError, match="must be a number or 'lo_hi', got True"):
        parse_band(True)
    with pytest.raises(ValueError, match="'token' or 'sequence', got 'geometric'"):
        importance_weights(D, MASK, level="geometric")
    with pytest.raises(ValueError, match="no trained token"):
        correct_rollout(D, D, MASK * 0)
    with pytest.raises(ValueError, match=r"mask has shape \(4, 3\) but log_ratio has shape \(4, 4\)"):
        importance_weights(D, MASK[:, :3])
