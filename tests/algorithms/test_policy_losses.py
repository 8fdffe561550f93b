"""Every policy loss: invariances that no formula may break, and the numbers that tell them apart."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.aggregation import Totals, aggregate
from strop.algorithms.policy_losses.clipped import PolicyLoss, policy_loss
from strop.catalog import POLICY_LOSSES
from tests.algorithms.reference.token_selection import divergence_gate, high_entropy_mask, off_policy_mask

NAMES = POLICY_LOSSES.names()
BY_TOKENS_GIVEN = {"clip_cov", "kl_cov"}  # their selection is defined over the tensors given
SETTINGS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0, "dro_beta": 0.5}


def batch(seed: int, rows: int = 5, width: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    old = -normal().abs()
    return {
        "log_probs": (old + 0.4 * normal()).clamp(max=-1e-3),
        "old_log_probs": old,
        "advantages": normal(),
        "mask": (torch.rand(rows, width, generator=generator) < 0.7).long(),
        "rollout_weights": normal().exp(),
    }


def reduced(
    name: str, tensors: dict[str, torch.Tensor], totals: Totals, **more: Any
) -> tuple[torch.Tensor, PolicyLoss]:
    result = policy_loss(name, **tensors, **SETTINGS, **more)
    mode = POLICY_LOSSES.entry(name).facts["aggregation"] or "token-mean"
    return aggregate(result.per_token, tensors["mask"], mode, totals), result


def value_and_gradient(
    name: str, tensors: dict[str, torch.Tensor], totals: Totals
) -> tuple[float, torch.Tensor]:
    leaf = tensors["log_probs"].clone().requires_grad_()
    loss, _ = reduced(name, tensors | {"log_probs": leaf}, totals)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_and_rows_without_tokens_give_numbers(name: str) -> None:
    tensors = {key: value.half() if value.is_floating_point() else value for key, value in batch(3).items()}
    tensors["mask"][1] = 0
    tensors["rollout_weights"][2] = 0  # as outside of the band of IcePop
    log_probs = tensors["log_probs"].requires_grad_()
    per_token = policy_loss(name, **tensors, **SETTINGS).per_token
    per_token.float().sum().backward()
    assert log_probs.grad is not None and log_probs.grad.isfinite().all() and per_token.isfinite().all()


@pytest.mark.parametrize("name", sorted(set(NAMES) - BY_TOKENS_GIVEN))
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_micro_batches_add_up_in_value_gradient_and_metrics(name: str, seed: int, cut: int) -> None:
    tensors = batch(seed)
    totals = Totals.of(tensors["mask"])
    loss, grad = value_and_gradient(name, tensors, totals)
    pieces = [
        {key: value[part] for key, value in tensors.items()} for part in (slice(0, cut), slice(cut, None))
    ]
    found = [value_and_gradient(name, piece, totals) for piece in pieces]
    assert sum(value for value, _ in found) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(torch.cat([g for _, g in found]), grad, rtol=1e-9, atol=1e-12)

    whole = reduced(name, tensors, totals)[1].metrics
    parts = [reduced(name, piece, totals)[1].metrics for piece in pieces]
    for metric, value in whole.items():
        by_parts = sum(
            aggregate(p[metric], piece["mask"], "token-mean", totals) for p, piece in zip(parts, pieces)
        )
        torch.testing.assert_close(
            by_parts, aggregate(value, tensors["mask"], "token-mean", totals), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_masked_tokens_may_hold_anything_and_get_exactly_no_gradient(name: str, junk: float) -> None:
    tensors = batch(11)
    totals = Totals.of(tensors["mask"])
    torch.manual_seed(0)
    clean, clean_grad = value_and_gradient(name, tensors, totals)
    outside = tensors["mask"] == 0
    dirty = {
        key: value.masked_fill(outside, junk) if key != "mask" else value for key, value in tensors.items()
    }
    torch.manual_seed(0)
    value, grad = value_and_gradient(name, dirty, totals)
    assert value == clean and (grad[outside] == 0).all()
    torch.testing.assert_close(grad, clean_grad, rtol=0, atol=0)
    result = policy_loss(name, **dirty, **SETTINGS)
    assert (result.per_token[outside] == 0).all() and not result.per_token.isnan().any()
    assert all(metric[~outside].isfinite().all() for metric in result.metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_padding_columns_change_nothing(name: str) -> None:
    tensors = batch(12)
    totals = Totals.of(tensors["mask"], width=9)
    padded = {key: torch.nn.functional.pad(value, (2, 3)) for key, value in tensors.items()}
    torch.manual_seed(0)
    loss, grad = value_and_gradient(name, tensors, totals)
    torch.manual_seed(0)
    padded_loss, padded_grad = value_and_gradient(name, padded, totals)
    assert padded_loss == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(padded_grad[:, 2:-3], grad, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"clip_cov"}))
def test_permuting_rows_permutes_the_loss(name: str) -> None:
    tensors = batch(13)
    order = torch.tensor([3, 0, 4, 2, 1])
    plain = policy_loss(name, **tensors, **SETTINGS).per_token
    permuted = policy_loss(
        name, **{key: value[order] for key, value in tensors.items()}, **SETTINGS
    ).per_token
    torch.testing.assert_close(permuted, plain[order], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask", [[[1], [1]], [[1], [0]], [[0], [0]]])
def test_single_tokens_and_empty_responses_are_finite(name: str, mask: list[list[int]]) -> None:
    tensors = {key: value[:2, :1] for key, value in batch(14).items()} | {"mask": torch.tensor(mask)}
    loss, grad = value_and_gradient(name, tensors, Totals.of(tensors["mask"]))
    assert math.isfinite(loss) and grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_a_ratio_that_overflows_is_finite(name: str) -> None:
    """A group of equal scores has advantage 0, and 0 times an infinite ratio is NaN."""
    tensors = {key: value.float() for key, value in batch(16).items()}
    tensors["advantages"] = torch.zeros_like(tensors["advantages"])
    tensors["old_log_probs"] = torch.full_like(tensors["log_probs"], -120.0)
    loss, grad = value_and_gradient(name, tensors, Totals.of(tensors["mask"]))
    assert math.isfinite(loss) and grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_on_policy_gradient_is_the_policy_gradient(name: str) -> None:
    """At r = 1 nothing is clipped, and every objective starts as REINFORCE: dl/d log π = -A (in its own reduction)."""
    tensors = batch(15) | {"mask": torch.ones(5, 6)}
    tensors["advantages"] = tensors["advantages"][:, :1].expand(5, 6)
    tensors["old_log_probs"] = tensors["log_probs"]
    del tensors["rollout_weights"]
    leaf = tensors["log_probs"].clone().requires_grad_()
    result = policy_loss(
        name,
        **tensors | {"log_probs": leaf},
        **SETTINGS,
        clip_cov_lb=1e9,
        clip_cov_ub=2e9,
        ppo_kl_coef=0.0,
        tau_neg=1.0,
    )
    result.per_token.sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, -tensors["advantages"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"bypass_mode", "geo_mean", "vespo"}))
def test_rollout_weights_multiply_and_carry_no_gradient(name: str) -> None:
    tensors = batch(16)
    weights = tensors.pop("rollout_weights").requires_grad_()
    torch.manual_seed(0)
    plain = policy_loss(name, **tensors, **SETTINGS).per_token
    torch.manual_seed(0)
    weighted = policy_loss(name, **tensors, rollout_weights=weights, **SETTINGS).per_token
    torch.testing.assert_close(weighted, plain * weights.detach())
    assert not weighted.requires_grad


def fixture() -> dict[str, torch.Tensor]:
    old = torch.tensor(
        [[-1, -0.5, -2, -0.1], [-0.7, -0.2, -0.3, 0], [-1.2, 0, -0.4, -0.9], [-0.6, -0.8, 0, 0]]
    )
    moved = torch.tensor([[0.3, -0.3, 0.1, 1.5], [0, 0.25, -0.1, 0], [-0.5, 0, 0.4, 0.05], [0.2, -0.2, 0, 0]])
    advantages = torch.tensor([[1, 1, 1, -1], [-0.5, -0.5, -0.5, 0], [0.8, 0, 0.8, 0.8], [-1, -1, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0]])
    return {"log_probs": old + moved, "old_log_probs": old, "advantages": advantages, "mask": mask}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vanilla", 0.096528),
        ("gpg", 0.409583),
        ("cispo", 0.452036),
        ("clip_cov", 0.220002),
        ("sapo", 0.162363),
    ],
)
def test_published_fixture(name: str, expected: float) -> None:
    tensors = fixture()
    loss, _ = reduced(name, tensors, Totals.of(tensors["mask"]))
    assert loss.item() == pytest.approx(expected, abs=2e-6)


def test_vanilla_metrics_of_the_fixture() -> None:
    tensors = fixture()
    result = policy_loss("vanilla", **tensors, **SETTINGS)
    mean = {
        k: aggregate(v, tensors["mask"], "token-mean", Totals.of(tensors["mask"])).item()
        for k, v in result.metrics.items()
    }
    assert mean == pytest.approx(
        {"pg_clipfrac": 2 / 12, "pg_clipfrac_lower": 1 / 12, "ppo_kl": -1.7 / 12}, abs=1e-6
    )


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"gpg"}))
def test_ppo_kl_is_how_much_less_likely_the_tokens_became(name: str) -> None:
    tensors = batch(21)
    metrics = policy_loss(name, **tensors, **SETTINGS).metrics
    gap = (tensors["old_log_probs"] - tensors["log_probs"]) * tensors["mask"]
    if name == "kl_cov":
        gap = gap.abs()
    found = metrics["ppo_kl"] * tensors["mask"]
    torch.testing.assert_close(found.sum(-1), gap.sum(-1))


def test_gspo_levels_agree_when_the_advantage_is_one_number_per_row() -> None:
    tensors = batch(17)
    tensors["advantages"] = tensors["advantages"][:, :1].expand(5, 6)
    del tensors["rollout_weights"]
    totals, grads = Totals.of(tensors["mask"]), []
    for level in ("sequence", "sequence_token"):
        leaf = tensors["log_probs"].clone().requires_grad_()
        result = policy_loss(
            "gspo", **tensors | {"log_probs": leaf}, level=level, clip_low=0.2, clip_high=0.2
        )
        aggregate(result.per_token, tensors["mask"], "seq-mean-token-mean", totals).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_clip_cov_is_reproducible_with_a_generator() -> None:
    tensors = batch(18)
    wide = SETTINGS | {"clip_cov_ratio": 0.2, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}
    draws = [
        policy_loss("clip_cov", **tensors, **wide, generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    ]
    dropped = [draw.metrics["pg_clipfrac"] for draw in draws]
    assert torch.equal(dropped[0], dropped[1]) and not torch.equal(dropped[0], dropped[2])
    assert dropped[0].sum() == int(0.2 * tensors["mask"].sum())
    assert (draws[0].per_token[dropped[0].bool()] == 0).all()
    few = policy_loss("clip_cov", **tensors, **wide | {"clip_cov_ratio": 1e-4})
    assert few.metrics["pg_clipfrac"].sum() == 1, "at least one"


def test_errors_say_what_is_wrong() -> None:
    tensors = batch(19)
    with pytest.raises(ValueError, match="'dro' needs dro_beta"):
        policy_loss("dro", **tensors)
    with pytest.raises(ValueError, match="Did you mean 'vanilla'"):
        policy_loss("vanila", **tensors)
    with pytest.raises(ValueError, match=r"advantages has shape \(5, 5\) but mask has shape \(5, 6\)"):
        policy_loss("vanilla", **tensors | {"advantages": tensors["advantages"][:, :5]})
    with pytest.raises(ValueError, match=r"must be greater than 1, got 1\.0"):
        policy_loss("vanilla", **tensors, clip_c=1.0)
    with pytest.raises(ValueError, match="must not be negative"):
        policy_loss("vanilla", **tensors, clip_low=-0.1)
    with pytest.raises(ValueError, match="level must be one of"):
        policy_loss("vanilla", **tensors, level="sentence")
    with pytest.raises(ValueError, match="loss_type must be one of ppo_clip, reinforce"):
        policy_loss("bypass_mode", **tensors, loss_type="ppo")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", ["old_log_probs", "advantages", "log_probs"])
def test_every_loss_names_both_shapes(name: str, wrong: str) -> None:
    tensors = batch(16)
    del tensors["rollout_weights"]
    with pytest.raises(ValueError, match=r"\(5, [46]\).*\(5, [46]\)"):
        policy_loss(name, **tensors | {wrong: tensors[wrong][:, :4]}, **SETTINGS)


def test_every_loss_has_the_uniform_signature() -> None:
    for name in NAMES:
        parameters = inspect.signature(POLICY_LOSSES.get(name)).parameters
        positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == ["log_probs", "old_log_probs", "advantages", "mask"], name


def test_high_entropy_mask_keeps_the_top_of_the_masked_tokens() -> None:
    entropy = torch.tensor([[1.0, 2.0, 3.0, 99.0], [4.0, 5.0, 99.0, 99.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    assert high_entropy_mask(entropy, mask, quantile=0.75).tolist() == [
        [False] * 4,
        [True, True, False, False],
    ]
    assert not high_entropy_mask(entropy, mask * 0, quantile=0.5).any()


@pytest.mark.parametrize("quantile", [0.0, 0.25, 0.8, 1.0])
def test_high_entropy_mask_takes_the_quantile_of_torch(quantile: float) -> None:
    torch.manual_seed(3)
    entropy, mask = torch.rand(7, 9), torch.rand(7, 9) < 0.8
    expected = mask & (entropy >= entropy[mask].quantile(quantile))
    assert torch.equal(high_entropy_mask(entropy, mask, quantile=quantile), expected)


def test_off_policy_mask_drops_only_bad_rows_that_drifted() -> None:
    now, then = torch.tensor([[-3.0, -3.0]] * 3), torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-3.0, -3.0]])
    kept = off_policy_mask(now, then, torch.tensor([[1.0], [-1.0], [-1.0]]), torch.ones(3, 2), threshold=0.5)
    assert kept.squeeze(-1).tolist() == [True, False, True]


def test_divergence_gate_at_sequence_level_uses_the_geometric_mean() -> None:
    train, rollout = torch.zeros(2, 2) - 1, torch.tensor([[-1.5, -0.5], [-2.0, -2.0]])
    assert divergence_gate(
        train, rollout, torch.ones(2, 2), level="sequence", lower=0.9, upper=1.1
    ).tolist() == [
        [True, True],
        [False, False],
    ]
    assert divergence_gate(train, rollout, torch.ones(2, 2), lower=0.9, upper=1.7).tolist() == [
        [True, False],
        [False, False],
    ]
