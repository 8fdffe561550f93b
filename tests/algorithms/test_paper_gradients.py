"""The gradient of every policy loss beside finite differences of the objective in its paper, written without torch.

A paper states an objective; a loss may be written differently (-w A log π with a constant w, instead of -ρ A).
What training sees is the gradient, so this is what is compared, after the reduction of the paper, together
with the invariances of advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strop.algorithms.advantages.base import estimate
from strop.algorithms.aggregation import Totals, aggregate
from strop.algorithms.kl import kl_penalty
from strop.algorithms.policy_losses.clipped import policy_loss
from strop.catalog import POLICY_LOSSES

LOW, HIGH, DUAL, BETA = 0.2, 0.3, 3.0, 0.5
STEP = 1e-6
Array = NDArray[np.float64]


class Row(NamedTuple):
    """One response without its untrained tokens."""

    new: Array  # log π, the variable of the objective
    now: Array  # the same numbers, for everything behind a stop-gradient
    old: Array
    advantage: float


def clip(ratio: Array | float) -> Array:
    return np.clip(ratio, 1 - LOW, 1 + HIGH)


def ppo(row: Row) -> float:
    """Schulman et al. 2017, eq. 7; Ye et al. 2020, eq. 4 for negative advantages; the mean over tokens of GRPO."""
    ratio = np.exp(row.new - row.old)
    gain = np.minimum(ratio * row.advantage, clip(ratio) * row.advantage)
    if row.advantage < 0:
        gain = np.maximum(gain, DUAL * row.advantage)
    return float(gain.mean())


def gspo(row: Row) -> float:
    """Zheng et al. 2025, eq. 5 and 7: (π(y) / π_old(y))^(1/|y|), clipped, times the advantage of the response."""
    ratio = math.exp(float(row.new.sum() - row.old.sum())) ** (1 / len(row.new))
    return min(ratio * row.advantage, float(clip(ratio)) * row.advantage)


def luspo(row: Row) -> float:
    return gspo(row) * len(row.new)


def gmpo(row: Row) -> float:
    """Zhao et al. 2025, eq. 4: the geometric mean over tokens of min(ρ^sgn A, clip(ρ)^sgn A)^sgn A, times A."""
    sign = math.copysign(1.0, row.advantage)
    ratio = np.exp(row.new - row.old)
    bounded = np.clip(ratio, math.exp(-LOW), math.exp(HIGH))
    worst = np.minimum(ratio**sign, bounded**sign) ** sign
    return float(np.prod(worst) ** (1 / len(ratio))) * row.advantage


def cispo(row: Row) -> float:
    """MiniMax-M1 2025, eq. 4 and 5."""
    return float((clip(np.exp(row.now - row.old)) * row.advantage * row.new).mean())


def sapo(row: Row) -> float:
    """Gao et al. 2025, eq. 5 to 7."""
    tau = 1.0 if row.advantage > 0 else 1.05
    ratio = np.exp(row.new - row.old)
    gate = 4 / tau / (1 + np.exp(-tau * (ratio - 1)))
    return float((gate * row.advantage).mean())


def vespo(row: Row) -> float:
    """Shen et al. 2026: W^c1 exp(c2 (1 - W)) A ∇ log π(y), W of the whole response."""
    weight = math.exp(float((row.now - row.old).sum()))
    first, second = (2.0, 3.0) if row.advantage >= 0 else (3.0, 2.0)
    return float(weight**first * math.exp(second * (1 - weight)) * row.advantage * row.new.mean())


def dppo(row: Row, moved: Array) -> float:
    """Qi et al. 2026: M ρ A, M = 0 where ρ moves away from 1 in the direction of A beyond the trust region."""
    now = np.exp(row.now - row.old)
    limit = HIGH if row.advantage > 0 else LOW
    leaving = (now > 1) if row.advantage > 0 else (now < 1)
    kept = ~(leaving & (moved > limit))
    return float((kept * np.exp(row.new - row.old) * row.advantage).mean())


def dppo_tv(row: Row) -> float:
    return dppo(row, np.abs(np.exp(row.now) - np.exp(row.old)))


def dppo_kl(row: Row) -> float:
    mu, pi = np.exp(row.old), np.exp(row.now)
    return dppo(row, mu * np.log(mu / pi) + (1 - mu) * np.log((1 - mu) / (1 - pi)))


def policy_gradient(row: Row) -> float:
    return float((row.advantage * row.new).mean())


def dro(row: Row) -> float:
    """Richemond et al. 2024, eq. 5: minus half the squared residual A - β log(π / π_old), divided by β."""
    residual = row.advantage - BETA * (row.new - row.old)
    return float((-0.5 * residual**2 / BETA).mean())


PAPERS: dict[str, tuple[Callable[[Row], float], str]] = {
    "vanilla": (ppo, "seq-mean-token-mean"),
    "bypass_mode": (ppo, "seq-mean-token-mean"),
    "gspo": (gspo, "seq-mean-token-mean"),
    "luspo": (luspo, "seq-mean-token-sum"),
    "geo_mean": (gmpo, "seq-mean-token-mean"),
    "cispo": (cispo, "seq-mean-token-mean"),
    "sapo": (sapo, "seq-mean-token-mean"),
    "vespo": (vespo, "seq-mean-token-mean"),
    "dppo_tv": (dppo_tv, "seq-mean-token-mean"),
    "dppo_kl": (dppo_kl, "seq-mean-token-mean"),
    "gpg": (policy_gradient, "seq-mean-token-mean"),
    "reinforce": (policy_gradient, "seq-mean-token-mean"),
    "dro": (dro, "seq-mean-token-mean"),
}
RANKING = {"clip_cov", "kl_cov"}


def test_every_loss_has_an_objective() -> None:
    assert set(PAPERS) | RANKING == set(POLICY_LOSSES.names())


def batch(seed: int, rows: int, width: int, spread: float) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=g, dtype=torch.float64) * 3 - 0.05
    moved = spread * torch.randn(rows, width, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=g) < 0.7
    mask[0] = True
    advantages = torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, width)
    return {
        "log_probs": (old + moved).clamp(max=-1e-3),
        "old_log_probs": old,
        "advantages": advantages,
        "mask": mask,
    }


def gradients(
    tensors: dict[str, torch.Tensor], objective: Callable[[Array], float]
) -> tuple[NDArray[np.bool_], Array]:
    """Central differences at the trained tokens, and where the objective has no kink within a step."""
    mask = tensors["mask"].numpy()
    start = tensors["log_probs"].numpy()
    found = np.zeros_like(start)
    smooth = np.ones_like(mask)
    here = objective(start)
    for place in zip(*np.nonzero(mask), strict=True):
        above, below = start.copy(), start.copy()
        above[place] += STEP
        below[place] -= STEP
        up, down = (objective(above) - here) / STEP, (here - objective(below)) / STEP
        found[place] = (up + down) / 2
        smooth[place] = abs(up - down) < 1e-3 * max(abs(up), abs(down), 1e-2)
    return smooth, found


def autograd(name: str, tensors: dict[str, torch.Tensor], mode: str, **more: object) -> Array:
    leaf = tensors["log_probs"].clone().requires_grad_()
    found = policy_loss(
        name,
        **(tensors | {"log_probs": leaf}),
        clip_low=LOW,
        clip_high=HIGH,
        clip_c=1e9 if name.startswith("dppo") else DUAL,
        dro_beta=BETA,
        **more,
    )
    aggregate(found.per_token, tensors["mask"], mode, Totals.of(tensors["mask"])).backward()
    assert leaf.grad is not None
    return leaf.grad.numpy()


@pytest.mark.parametrize("name", sorted(PAPERS))
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 4),
    width=st.integers(1, 6),
    spread=st.sampled_from([0.0, 0.3, 2.0]),
)
def test_gradient_is_that_of_the_objective_of_the_paper(
    name: str, seed: int, rows: int, width: int, spread: float
) -> None:
    tensors = batch(seed, rows, width, spread)
    of_row, mode = PAPERS[name]
    mask = tensors["mask"].numpy()
    start, old = tensors["log_probs"].numpy(), tensors["old_log_probs"].numpy()
    answered = [i for i in range(rows) if mask[i].any()]

    def objective(values: Array) -> float:
        gains = []
        for i in answered:
            on = mask[i]
            gains.append(
                of_row(Row(values[i, on], start[i, on], old[i, on], float(tensors["advantages"][i, 0])))
            )
        return math.fsum(gains) / len(answered)

    smooth, expected = gradients(tensors, objective)
    made = -autograd(name, tensors, mode)
    assert (made[~mask] == 0).all()
    if spread:  # at a ratio of exactly 1 nothing is near a bound; elsewhere a step may cross one
        assert smooth.mean() > 0.5 or mask.sum() < 4
    else:
        assert smooth.all()
    np.testing.assert_allclose(made[smooth], expected[smooth], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted(RANKING))
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(2, 4), width=st.integers(2, 6))
def test_gradient_of_losses_that_rank_tokens_is_that_of_the_paper(
    name: str, seed: int, rows: int, width: int
) -> None:
    """Cui et al. 2025, eq. 10 to 13. Clip-Cov draws from its band: here all tokens of the band, so nothing is
    random. KL-Cov has |log ρ| as the penalty, as in the code of the authors."""
    tensors = batch(seed, rows, width, 0.3)
    mask = tensors["mask"].numpy()
    start, old = tensors["log_probs"].numpy(), tensors["old_log_probs"].numpy()
    advantages = tensors["advantages"].numpy()
    covariance = (advantages - advantages[mask].mean()) * (start - start[mask].mean())
    if name == "clip_cov":
        more: dict[str, object] = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.5}
        chosen = mask & (covariance > 0.1) & (covariance < 0.5)
    else:
        more = {"kl_cov_ratio": 0.4, "ppo_kl_coef": 0.7}
        highest = np.sort(covariance[mask])[-max(int(0.4 * mask.sum()), 1) :]
        chosen = mask & (covariance >= highest[0])

    def objective(values: Array) -> float:
        ratio = np.exp(values - old)
        if name == "clip_cov":
            gain = np.minimum(ratio * advantages, clip(ratio) * advantages) * ~chosen
        else:
            gain = ratio * advantages - 0.7 * chosen * np.abs(values - old)
        return float(gain[mask].sum() / mask.sum())

    smooth, expected = gradients(tensors, objective)
    assume(len(np.unique(covariance[mask].round(12))) == mask.sum())  # of equal ones, any may be chosen
    made = -autograd(name, tensors, "token-mean", **more)
    np.testing.assert_allclose(made[smooth], expected[smooth], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_gradient_of_kl_estimators(estimator: str) -> None:
    """Schulman's note, with r = π_ref / π: -log r, (log r)² / 2, r - 1 - log r."""
    d = np.linspace(-2.4, 1.8, 11)  # from d = -2.6 on, k3 is limited to 10
    formulas: dict[str, Callable[[Array], Array]] = {
        "k1": lambda x: -np.log(np.exp(-x)),
        "abs": np.abs,
        "k2": lambda x: np.log(np.exp(-x)) ** 2 / 2,
        "k3": lambda x: np.exp(-x) - 1 + x,
    }
    formula = formulas[estimator]
    leaf = torch.tensor(d - 3.0, requires_grad=True)
    value = kl_penalty(leaf, torch.full_like(leaf, -3.0), estimator=estimator)
    value.sum().backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(value.detach().numpy(), formula(d), rtol=1e-9, atol=1e-12)
    slope = (formula(d + STEP) - formula(d - STEP)) / (2 * STEP)
    np.testing.assert_allclose(leaf.grad.numpy(), slope, rtol=1e-4, atol=1e-6)


# --- what an estimator must not notice ----------------------------------------------------------------------


def scored(seed: int, scores: list[float], size: int) -> dict[str, Any]:
    """Groups of `size` whose rewards are on the last token."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 5, (len(scores),), generator=g)
    rewards = torch.zeros(len(scores), 4, dtype=torch.float64)
    rewards[torch.arange(len(scores)), lengths - 1] = torch.tensor(scores, dtype=torch.float64)
    return {
        "rewards": rewards,
        "mask": torch.arange(4) < lengths[:, None],
        "groups": torch.arange(len(scores)) // size,
        "lengths": lengths,
    }


def shifted(tensors: dict[str, Any], by: torch.Tensor) -> dict[str, Any]:
    rewards = tensors["rewards"].clone()
    rewards[torch.arange(len(by)), tensors["lengths"] - 1] += by
    return tensors | {"rewards": rewards}


GROUPS = (
    *("grpo", "grpo_vectorized", "grpo_passk", "dr_grpo", "rloo", "rloo_vectorized", "opo", "gpg"),
    *("gdpo", "reinforce_plus_plus_baseline"),
)


@pytest.mark.parametrize("name", GROUPS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), scores=st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=6, max_size=6))
def test_a_constant_added_to_the_rewards_of_a_group_changes_nothing(
    name: str, seed: int, scores: list[float]
) -> None:
    tensors = scored(seed, scores, 3)
    by = torch.tensor([2.0, -1.0], dtype=torch.float64)[tensors["groups"]]
    plain = estimate(name, **tensors).advantages
    moved = estimate(name, **shifted(tensors, by)).advantages
    torch.testing.assert_close(moved, plain, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", GROUPS)
def test_rewards_times_a_number_scale_or_leave_advantages(name: str) -> None:
    tensors = scored(1, [0.0, 1.0, 0.5, 1.0, 1.0, 0.0], 3)
    plain = estimate(name, **tensors).advantages
    scaled = estimate(name, **(tensors | {"rewards": 8 * tensors["rewards"]})).advantages
    linear = name in ("dr_grpo", "rloo", "rloo_vectorized", "opo", "gpg")
    torch.testing.assert_close(scaled, 8 * plain if linear else plain, rtol=2e-5, atol=1e-9)


def test_gpg_scales_by_the_groups_that_teach() -> None:
    """Chu et al. 2025, eq. 7: α = B / (B - M), M of the B groups having only equal rewards."""
    tensors = scored(2, [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], 3)
    made = estimate("gpg", **tensors).advantages
    expected = (
        torch.tensor([0.0] * 6 + [-2 / 3, 1 / 3, 1 / 3], dtype=torch.float64)[:, None] * tensors["mask"]
    )
    torch.testing.assert_close(made, 3 * expected)
    by_scores = estimate("gpg", **tensors, compat="verl").advantages  # 5 of 9 scores are not 0
    torch.testing.assert_close(by_scores, 9 / 5 * expected)
