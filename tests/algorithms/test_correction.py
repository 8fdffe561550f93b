"""Rollout correction: bands, rejection, presets, and diagnostics that never divide by zero."""

from __future__ import annotations

import math
import statistics

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
    rejection_tests,
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


@pytest.mark.parametrize("shift", [0.0, 1.0])  # with a mean above and below 1
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_average_one(level: str, shift: float) -> None:
    weights, _ = importance_weights(D - shift, MASK, level=level, normalize=True)
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
    mask, _ = rejection_mask(0 * d, torch.ones(1, 2), criteria="token_k1", threshold="1_1")
    assert mask.tolist() == [[1.0, 1.0]], "both bounds belong to the band"
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


def test_a_threshold_of_none_and_criteria_without_a_name_turn_a_correction_off() -> None:
    found = correct_rollout(D, 0 * D, MASK, rollout_is="token", rollout_is_threshold=None, rollout_rs=" , ")
    assert found.weights is None and torch.equal(found.mask, MASK)
    assert not any("rollout_is" in name or "rollout_rs" in name for name in found.metrics)


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
    assert not importance_weights(old, torch.ones(2, 3))[0].requires_grad
    found_rs = rejection_mask(old, torch.ones(2, 3), criteria="seq_mean_k3", threshold=0.1)[1]
    assert not any(value.requires_grad for value in found_rs.values())


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
def test_every_criterion_by_hand_with_its_metrics(criterion: str) -> None:
    d, on = torch.cat([D, D[:1] - 0.4]), torch.cat([MASK, torch.tensor([[1, 0, 0, 0]])])
    scope, _, kind = criterion.rpartition("_")
    value = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[kind]
    of_row = {"seq_sum": sum, "seq_mean": statistics.fmean, "seq_max": max}
    values = [[value(x) for x in row[kept.bool()].tolist()] for row, kept in zip(d, on)]
    if scope != "token":
        values = [[of_row[scope](row)] * len(row) for row in values]
    expected = [each for row in values for each in row]
    limit = sorted({*expected})[-2] + 1e-6  # rejects the largest only
    bounds = {"k1": f"1e-9_{math.exp(limit)}"}
    (test,) = rejection_tests(d, on, criteria=criterion, threshold=bounds.get(kind, limit))
    assert test.value[on.bool()].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert test.passes[on.bool()].tolist() == [each != max(expected) for each in expected]

    mask, metrics = rejection_mask(d, on, criteria=criterion, threshold=bounds.get(kind, limit))
    assert torch.equal(mask.bool(), on.bool() & test.passes)
    lost = expected.count(max(expected)) / len(expected)
    at = f"rollout_rs_{criterion}_"
    by_rows = [statistics.fmean(row) for row in values]
    found = {
        "rollout_rs_masked_fraction": lost,
        "rollout_rs_seq_masked_fraction": 1 / 5,
        f"{at}masked_fraction": lost,
        f"{at}seq_masked_fraction": 1 / 5,
        f"{at}fraction_high": lost if scope == "token" else 1 / 5,
        f"{at}mean": statistics.fmean(expected),
        f"{at}max": max(expected),
        f"{at}min": min(expected),
        f"{at}seq_mean": statistics.fmean(by_rows),
        f"{at}seq_std": statistics.stdev(by_rows),
        f"{at}seq_max": max(by_rows),
        f"{at}seq_min": min(by_rows),
        f"{at}seq_max_deviation": max(map(abs, by_rows)),
    }
    for name, number in found.items():
        assert metrics[name].item() == pytest.approx(number, rel=1e-5, abs=1e-6), name
    assert {f"{at}std", f"{at}fraction_low", f"{at}seq_fraction_high"} <= set(metrics)


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
    for band in ("0_2", "-1_2", "0.5_1_2", "0", 0.0):
        with pytest.raises(ValueError, match=f"0 < lo <= hi; got {band!r}"):
            parse_band(band)
    with pytest.raises(ValueError, match="must be a number or 'lo_hi', got True"):
        parse_band(True)
    with pytest.raises(ValueError, match="'token' or 'sequence', got 'geometric'"):
        importance_weights(D, MASK, level="geometric")
    with pytest.raises(ValueError, match="'clip' or 'zero', got 'cut'"):
        importance_weights(D, MASK, outside="cut")
    with pytest.raises(ValueError, match="no trained token"):
        correct_rollout(D, D, MASK * 0)
    with pytest.raises(ValueError, match=r"mask has shape \(4, 3\) but log_ratio has shape \(4, 4\)"):
        importance_weights(D, MASK[:, :3])
    with pytest.raises(ValueError, match=r"mask has shape \(4, 3\) but log_ratio has shape \(4, 4\)"):
        rejection_mask(D, MASK[:, :3], criteria="token_k2", threshold=1)
    with pytest.raises(ValueError, match=r"rollout_log_probs has shape \(4, 1\) but old_log_probs has"):
        correct_rollout(D, D[:, :1], MASK)
