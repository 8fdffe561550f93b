"""Every estimator and every policy loss beside a slow second writing of its formula: one sample, one token at a time.

Random rewards, masks with holes, empty rows and groups of any size, in float32 and float64.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.algorithms.advantages.base import estimate
from strop.algorithms.policy_losses.clipped import policy_loss
from strop.catalog import ADVANTAGES, POLICY_LOSSES

some = settings(max_examples=30, deadline=None)
GAMMA, LAM = 0.93, 0.8


def random_batch(seed: int, rows: int, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    mask = torch.rand(rows, width, generator=g) < 0.7
    old = -normal(rows, width).abs()
    return {
        "rewards": normal(rows, width) * (torch.rand(rows, width, generator=g) < 0.5),
        "mask": mask,
        "values": normal(rows, width),
        "groups": torch.randint(0, max(rows // 3, 1), (rows,), generator=g),
        "reward_baselines": normal(rows),
        "old_log_probs": old,
        "log_probs": (old + 0.5 * normal(rows, width)).clamp(max=0.0),
        "sum_pi_squared": normal(rows, width).abs(),
        "reward_components": normal(rows, 2),
        "advantages": normal(rows, width),
        "rollout_weights": normal(rows, width).exp(),
    }


def moved(b: dict[str, Tensor]) -> list[dict[int, float]]:
    """Per row: reward by trained token, strays moved to the trained token before them, or to the first one."""
    out = []
    for rewards, mask in zip(b["rewards"].tolist(), b["mask"].tolist()):
        trained = [t for t, on in enumerate(mask) if on]
        row = dict.fromkeys(trained, 0.0)
        for t, reward in enumerate(rewards):
            if trained:
                row[max((k for k in trained if k <= t), default=trained[0])] += reward
        out.append(row)
    return out


def on_tokens(per_row: list[dict[int, float]], like: Tensor) -> Tensor:
    out = torch.zeros(like.shape, dtype=torch.float64)
    for i, row in enumerate(per_row):
        for t, value in row.items():
            out[i, t] = value
    return out


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    kept = values[mask].tolist()
    if len(kept) < 2 or min(kept) == max(kept):
        return torch.zeros_like(values)
    mean, var = statistics.fmean(kept), statistics.variance(kept)
    return torch.where(mask, (values - mean) / math.sqrt(var + 1e-8), 0.0)


def to_go(b: dict[str, Tensor], gamma: float = GAMMA) -> list[dict[int, float]]:
    out = []
    for row in moved(b):
        running, found = 0.0, {}
        for t in sorted(row, reverse=True):
            running = row[t] + gamma * running
            found[t] = running
        out.append(found)
    return out


def gae(b: dict[str, Tensor]) -> Tensor:
    out = []
    for row, values in zip(moved(b), b["values"].tolist()):
        running, next_value, found = 0.0, 0.0, {}
        for t in sorted(row, reverse=True):
            running = row[t] + GAMMA * next_value - values[t] + GAMMA * LAM * running
            next_value, found[t] = values[t], running
        out.append(found)
    return whitened(on_tokens(out, b["rewards"]), b["mask"])


def scores_of(b: dict[str, Tensor]) -> list[float]:
    return [math.fsum(row) for row in b["rewards"].tolist()]


def by_group(
    formula: Callable[[list[float], int, list[int]], float],
) -> Callable[[dict[str, Tensor]], Tensor]:
    """An outcome estimator from `formula(scores of the group, place in it, lengths of the group)`."""

    def estimator(b: dict[str, Tensor], scores: list[float] | None = None) -> Tensor:
        scores = scores_of(b) if scores is None else scores
        lengths, groups = b["mask"].sum(1).tolist(), b["groups"].tolist()
        made = []
        for i, g in enumerate(groups):
            members = [j for j, other in enumerate(groups) if other == g]
            made.append(
                formula([scores[j] for j in members], members.index(i), [lengths[j] for j in members])
            )
        return torch.tensor(made, dtype=torch.float64)[:, None] * b["mask"]

    return estimator


def centred(s: list[float], i: int, lengths: list[int]) -> float:
    return s[i] if len(s) == 1 else s[i] - statistics.fmean(s)


def grpo(s: list[float], i: int, lengths: list[int], floor: float = 0.0) -> float:
    spread = math.sqrt(max(statistics.variance(s), floor)) if len(s) > 1 else 1.0
    return centred(s, i, lengths) / (spread + 1e-6)


def passk(s: list[float], i: int, lengths: list[int]) -> float:
    first, second = sorted(s, reverse=True)[:2]
    return (first - second) / (statistics.stdev(s) + 1e-6) if s[i] == first else 0.0


def leave_one_out(s: list[float], i: int, lengths: list[int]) -> float:
    return s[i] - statistics.fmean(s[:i] + s[i + 1 :]) if len(s) > 1 else s[i]


def opo(s: list[float], i: int, lengths: list[int]) -> float:
    if len(s) == 1:
        return s[i]
    return s[i] - sum(n * each for n, each in zip(lengths, s)) / (sum(lengths) or 1)


def gpg(b: dict[str, Tensor]) -> Tensor:
    scores, groups = scores_of(b), b["groups"].tolist()
    members = {g: [s for s, other in zip(scores, groups) if other == g] for g in groups}
    # A response that is alone keeps its score as advantage, so it teaches unless that is 0.
    taught = sum(len(set(members[g] + [0.0] * (len(members[g]) == 1))) > 1 for g in groups)
    return by_group(centred)(b) * len(scores) / max(taught, 1)


def gdpo(b: dict[str, Tensor]) -> Tensor:
    parts = [by_group(grpo)(b, column) for column in b["reward_components"].T.tolist()]  # type: ignore[call-arg]
    return whitened(parts[0] + parts[1], b["mask"])


def token_baseline(b: dict[str, Tensor], *, aligned: bool) -> Tensor:
    rows, energies = to_go(b, 1.0), []
    for i, row in enumerate(rows):
        total, found = 0.0, {}
        for t in sorted(row):
            total += 1 - 2 * math.exp(b["old_log_probs"][i, t].item()) + b["sum_pi_squared"][i, t].item()
            found[t] = total
        energies.append(found)
    if aligned:  # the k-th trained token instead of the column
        place = [dict(enumerate(sorted(row))) for row in rows]
    else:
        place = [{t: t for t in row} for row in rows]
    out: list[dict[int, float]] = []
    groups = b["groups"].tolist()
    for i, row in enumerate(rows):
        found = {}
        for k, t in place[i].items():
            alive = [j for j, g in enumerate(groups) if g == groups[i] and k in place[j]]
            weight = sum(energies[j][place[j][k]] for j in alive)
            base = sum(energies[j][place[j][k]] * rows[j][place[j][k]] for j in alive) / (weight + 1e-8)
            alone = groups.count(groups[i]) == 1 or (aligned and len(alive) < 2)
            found[t] = row[t] - (0.0 if alone else base)
        out.append(found)
    return on_tokens(out, b["rewards"])


ESTIMATORS: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "gae": gae,
    "reinforce": lambda b: on_tokens(to_go(b), b["rewards"]),
    "reinforce_plus_plus": lambda b: whitened(on_tokens(to_go(b), b["rewards"]), b["mask"]),
    "remax": lambda b: (
        on_tokens(to_go(b, 1.0), b["rewards"]) - b["reward_baselines"].double()[:, None] * b["mask"]
    ),
    "grpo": by_group(grpo),
    "group_norm": by_group(grpo),
    "grpo_vectorized": by_group(lambda *group: grpo(*group, floor=1e-6)),
    "dr_grpo": by_group(centred),
    "grpo_passk": by_group(passk),
    "rloo": by_group(leave_one_out),
    "rloo_vectorized": by_group(lambda s, i, n: leave_one_out(s, i, n) if len(s) > 1 else 0.0),
    "opo": by_group(opo),
    "gpg": gpg,
    "reinforce_plus_plus_baseline": lambda b: whitened(by_group(centred)(b), b["mask"]),
    "reinforce_baseline": lambda b: whitened(by_group(centred)(b), b["mask"]),
    "flash_reinforce": lambda b: by_group(centred)(b | {"groups": b["groups"] * 0}),
    "gdpo": gdpo,
    "optimal_token_baseline": lambda b: token_baseline(b, aligned=False),
    "tir_optimal_token_baseline": lambda b: token_baseline(b, aligned=True),
}


def test_every_estimator_has_a_second_writing() -> None:
    built_in = [name for name in ADVANTAGES.names() if ADVANTAGES.entry(name).source == "built-in"]
    assert sorted(ESTIMATORS) == built_in


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@some
@given(seed=st.integers(0, 10**6), rows=st.integers(2, 9), width=st.integers(1, 40))
def test_estimator_equals_its_second_writing(
    name: str, dtype: torch.dtype, seed: int, rows: int, width: int
) -> None:
    b = random_batch(seed, rows, width, dtype)
    if name == "grpo_passk":
        b["groups"] = torch.arange(rows) % max(rows // 2, 1)
    made = estimate(name, **b, gamma=GAMMA, lam=LAM).advantages
    assert made.dtype == dtype
    expected = ESTIMATORS[name](b)
    close = 1e-9 if dtype == torch.float64 else 2e-4 if "baseline" in name else 2e-5
    scale = max(float(expected.abs().max()), 1.0)
    torch.testing.assert_close(made.double(), expected, rtol=close, atol=close * scale)


def losses(name: str, b: dict[str, Tensor]) -> list[dict[int, float]]:
    """Per row and trained token, before rollout weights; settings as in the test below."""
    out = []
    for i in range(len(b["mask"])):
        tokens = [t for t, on in enumerate(b["mask"][i].tolist()) if on]
        lp, old, adv = (
            {t: b[key][i, t].item() for t in tokens} for key in ("log_probs", "old_log_probs", "advantages")
        )
        x = {t: lp[t] - old[t] for t in tokens}
        mean = math.fsum(x.values()) / max(len(x), 1)
        out.append({t: token_loss(name, adv[t], x[t], lp[t], old[t], mean, adv, x) for t in tokens})
    return out


def token_loss(
    name: str,
    a: float,
    x: float,
    lp: float,
    old: float,
    mean: float,
    row_a: dict[int, float],
    row_x: dict[int, float],
) -> float:
    def clip(r: float) -> float:
        return min(max(r, 0.8), 1.3)

    r = math.exp(x)
    if name in ("vanilla", "bypass_mode"):
        worst = max(-a * r, -a * clip(r))
        return min(worst, -a * 3.0) if a < 0 else worst
    if name in ("gspo", "luspo"):
        s = math.exp(mean)
        return max(-a * s, -a * clip(s))
    if name == "geo_mean":
        kept = [min(v, 0.3) if row_a[t] > 0 else max(v, -0.2) for t, v in row_x.items()]
        return -math.fsum(row_a.values()) / len(row_a) * math.exp(math.fsum(kept) / len(kept))
    if name == "cispo":
        return -clip(r) * a * lp
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return -a * 4 / tau / (1 + math.exp(-tau * (r - 1)))
    if name == "vespo":
        w = math.exp(min(max(math.fsum(row_x.values()), -20), 20))
        k, rate = (2.0, 3.0) if math.fsum(row_a.values()) >= 0 else (3.0, 2.0)
        return -(w**k * math.exp(rate * (1 - w))) * a * lp
    if name in ("dppo_tv", "dppo_kl"):
        p, q = math.exp(old), math.exp(lp)
        rest_p, rest_q = max(1 - p, 1e-8), max(1 - q, 1e-8)
        gone = abs(p - q) if name == "dppo_tv" else p * (old - lp) + rest_p * math.log(rest_p / rest_q)
        left = (x > 0 and gone > 0.3) if a > 0 else (x < 0 and gone > 0.2)
        return 0.0 if left else -a * min(r, 3.0) * lp
    return {"gpg": -a * lp, "reinforce": -a * lp, "dro": -a * lp + 0.25 * x * x}[name]


SELECTING = {"clip_cov", "kl_cov"}  # they rank the whole batch: test_policy_losses.py and the golden cases
WITH_WEIGHTS_INSIDE = {"geo_mean", "vespo", "bypass_mode"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES.names()) - SELECTING))
@some
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 6), width=st.integers(1, 12))
def test_loss_equals_its_second_writing(
    name: str, dtype: torch.dtype, seed: int, rows: int, width: int
) -> None:
    b = random_batch(seed, rows, width, dtype)
    weights: dict[str, Any] = {} if name in WITH_WEIGHTS_INSIDE else {"rollout_weights": b["rollout_weights"]}
    tensors = {key: b[key] for key in ("log_probs", "old_log_probs", "advantages", "mask")}
    made = policy_loss(
        name, **tensors, **weights, clip_low=0.2, clip_high=0.3, clip_c=3.0, dro_beta=0.5
    ).per_token
    expected = on_tokens(losses(name, b), b["rewards"]) * (b["rollout_weights"].double() if weights else 1.0)
    assert made.dtype == dtype
    close = 1e-9 if dtype == torch.float64 else 5e-5
    torch.testing.assert_close(made.double(), expected, rtol=close, atol=close)
