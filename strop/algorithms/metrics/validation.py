"""Validation metrics of prompts sampled several times: mean@N, best@n, worst@n, maj@n, pass@k.

The estimator of "the best of n" is exact by default: the expectation over all n-subsets of the N responses,
by counting (for 0/1 scores this is the unbiased pass@k of Chen et al. 2021). At n = N it is the true maximum.
`estimator="bootstrap"` draws n responses 1000 times *with* replacement, as verl does. It is noisy, too low
for best and too high for worst. The second half of this file has confidence intervals and a significance test
for means over prompts.
"""

from __future__ import annotations

import functools
import itertools
import math
import numbers
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strop.types import Trajectory

DRAWS = 1000
Metrics = dict[str, dict[str, dict[str, float]]]  # data source -> variable -> metric -> value


def validation_metrics(
    data_sources: Sequence[str],
    uids: Sequence[Hashable],
    variables: Mapping[str, Sequence[Any]],
    *,
    estimator: str = "exact",
    seed: int = 42,
    expected_acc_counts: Mapping[tuple[str, Hashable], int] | None = None,
    sampled: int | None = None,
) -> Metrics:
    """Metrics of every numeric variable per data source, averaged over its prompts.

    Every argument has one entry per response; `variables` holds scores and all values that the scorer
    reported. Variables with a string among their values are skipped; the variable `pred` holds the votes of
    the responses. A missing value (None) excludes the response from that variable. `expected_acc_counts` is
    the number of responses that a prompt should have: missing ones count as `acc` 0, and the accuracy of the
    others is kept as `acc_success_only`. `sampled` is the number of responses to each prompt, which names the
    metrics also where some have no value. None: each prompt counts under the number of its values.
    """
    if estimator not in ("exact", "bootstrap"):
        raise ValueError(f"The estimator of best@n is 'exact' or 'bootstrap', not {estimator!r}.")
    for name, column in (("uids", uids), *variables.items()):
        if len(column) != len(data_sources):
            raise ValueError(
                f"`{name}` has {len(column)} entries, `data_sources` {len(data_sources)}; one per response "
                "is needed."
            )
    prompts = _by_prompt(data_sources, uids, variables)
    for (source, uid), count in (expected_acc_counts or {}).items():
        _fill_missing_acc(prompts[source][uid], count)
    metrics: Metrics = {}
    for source, prompts_of_source in prompts.items():
        collected: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        texts: set[str] = set()
        graded: set[str] = set()
        for prompt in prompts_of_source.values():
            for name, values in prompt.items():
                if any(isinstance(value, str) for value in values.values()):
                    texts.add(name)
                elif not _is_binary(values.values()):
                    graded.add(name)
        for prompt in prompts_of_source.values():
            votes = prompt.get("pred", {})
            for variable, values in prompt.items():
                if values and variable not in texts:
                    own_votes = list(votes.values()) if votes.keys() == values.keys() else None
                    found = prompt_metrics(
                        list(values.values()), own_votes, estimator=estimator, seed=seed, sampled=sampled
                    )
                    for metric, value in found.items():
                        # pass@k of only those prompts that happen to have scores of 0 and 1 is biased.
                        if variable not in graded or not metric.startswith("pass@"):
                            collected[variable][metric].append(value)
        metrics[source] = {
            v: {m: float(np.mean(x)) for m, x in found.items()} for v, found in collected.items()
        }
    return metrics


def prompt_metrics(
    values: Sequence[float],
    votes: Sequence[Any] | None = None,
    *,
    estimator: str = "exact",
    seed: int = 42,
    sampled: int | None = None,
) -> dict[str, float]:
    """All metrics of one prompt's responses. Votes count only when there is one for every value.

    With fewer values than `sampled` responses, the mean of those that there are estimates mean@`sampled`;
    larger subsets than there are values have no metrics.
    """
    count = len(values)
    sampled = max(sampled or 0, count)
    metrics = {f"mean@{sampled}": float(np.mean(values))}
    if count == 1:
        return metrics
    metrics[f"std@{sampled}"] = float(np.std(values))
    voting = votes is not None and len(votes) == count
    binary = _is_binary(values)
    for size in subset_sizes(sampled):
        if size > count:
            break
        if estimator == "bootstrap":
            best, worst = bootstrap(values, size, [np.max, np.min], seed=seed)
        else:
            best = best_of(values, size)
            worst = worst_of(values, size)
            if binary:
                metrics[f"pass@{size}"] = best[0]
        metrics |= {f"best@{size}/mean": best[0], f"best@{size}/std": best[1]}
        metrics |= {f"worst@{size}/mean": worst[0], f"worst@{size}/std": worst[1]}
        if voting:
            assert votes is not None
            maj = majority_of(values, votes, size, estimator=estimator, seed=seed)
            metrics |= {f"maj@{size}/mean": maj[0], f"maj@{size}/std": maj[1]}
    return metrics


def _is_binary(values: Iterable[float]) -> bool:
    return all(value in (0, 1) for value in values)


def subset_sizes(count: int) -> list[int]:
    """2, 4, 8, ... below `count`, then `count` itself."""
    sizes = []
    size = 2
    while size < count:
        sizes.append(size)
        size *= 2
    if count > 1:
        sizes.append(count)
    return sizes


def best_of(values: Sequence[float], size: int) -> tuple[float, float]:
    """Mean and standard deviation of the maximum over all subsets of `size` responses.

    The i-th smallest of N is the maximum of C(i - 1, size - 1) of the C(N, size) subsets.
    """
    count = len(values)
    if not 1 <= size <= count:
        raise ValueError(
            f"The best of {size} cannot be computed from {count} responses; sample at least {size} per "
            "prompt."
        )
    ordered = np.sort(np.asarray(values, dtype=float))
    shares = np.array([math.comb(place, size - 1) / math.comb(count, size) for place in range(count)])
    mean = float(shares @ ordered)
    return mean, math.sqrt(max(0.0, float(shares @ (ordered - mean) ** 2)))


def worst_of(values: Sequence[float], size: int) -> tuple[float, float]:
    """Mean and standard deviation of the minimum over all subsets of `size` responses."""
    mean, deviation = best_of([-value for value in values], size)
    return -mean, deviation


def majority_of(
    values: Sequence[float], votes: Sequence[Hashable], size: int, *, estimator: str = "exact", seed: int = 42
) -> tuple[float, float]:
    """Mean and standard deviation of the majority's value over all subsets of `size`, at most 1000 of
    them."""
    found = _majorities(values, votes, _subsets(len(values), size, estimator, seed))
    return float(found.mean()), float(found.std())


def bootstrap(
    values: Sequence[float],
    size: int,
    reducers: Sequence[Callable[..., Any]],
    *,
    draws: int = DRAWS,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Mean and standard deviation of each reducer over `draws` samples of `size` with replacement (legacy
    numpy stream)."""
    samples = np.asarray(values, dtype=float)[_draws(len(values), size, seed, draws)]
    reduced = [reducer(samples, axis=1) for reducer in reducers]
    return [(float(np.mean(each)), float(np.std(each))) for each in reduced]


def name_validation_metrics(metrics: Metrics) -> dict[str, float]:
    """Flat metric names: `val-core/` for the main metrics, `val-aux/` for the rest.

    Main metrics are mean, maj, best and pass at the largest n, of the variable `acc` (or `reward` if there is
    no acc).
    """
    flat = {}
    for source, variables in metrics.items():
        core = "acc" if "acc" in variables else "reward"
        for variable, found in variables.items():
            largest = max((_number(metric) for metric in found), default=0)
            for metric, value in found.items():
                main = metric.startswith(("mean@", "maj@", "best@", "pass@")) and _number(metric) == largest
                prefix = "val-core" if variable == core and main else "val-aux"
                flat[f"{prefix}/{source}/{variable}/{metric}"] = value
    return flat


def _number(metric: str) -> int:
    return int(metric.partition("@")[2].partition("/")[0])


def _majorities(
    values: Sequence[float], votes: Sequence[Hashable], subsets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The majority's value in each row of `subsets` (rows of response numbers)."""
    number: dict[Hashable, int] = {}
    ballots = np.array([number.setdefault(vote, len(number)) for vote in votes])[subsets]
    cells = ballots + len(number) * np.arange(len(subsets))[:, None]  # one counter per subset and vote
    support = np.where(
        np.array([vote is None for vote in votes])[subsets], 0, np.bincount(cells.ravel())[cells]
    )
    first_winner = support.argmax(axis=1)  # argmax takes the first of equals
    return np.asarray(values, dtype=float)[subsets[np.arange(len(subsets)), first_winner]]


@functools.lru_cache(maxsize=32)  # all prompts of a validation run use the same few subsets
def _subsets(count: int, size: int, estimator: str, seed: int) -> NDArray[np.int64]:
    if estimator == "bootstrap":
        return _draws(count, size, seed)
    if math.comb(count, size) <= DRAWS:
        return np.array(list(itertools.combinations(range(count), size)))
    return np.random.default_rng(seed).random((DRAWS, count)).argsort(axis=1)[:, :size]


@functools.lru_cache(maxsize=32)
def _draws(count: int, size: int, seed: int, draws: int = DRAWS) -> NDArray[np.int64]:
    return np.random.RandomState(seed).choice(count, size=(draws, size), replace=True)


def _by_prompt(
    data_sources: Sequence[str], uids: Sequence[Hashable], variables: Mapping[str, Sequence[Any]]
) -> dict[str, dict[Hashable, dict[str, dict[int, Any]]]]:
    """By data source, prompt and variable: the values that there are, by the number of the response."""
    prompts: dict[str, dict[Hashable, dict[str, dict[int, Any]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(dict))
    )
    for row, (source, uid) in enumerate(zip(data_sources, uids)):
        for variable, column in variables.items():
            if column[row] is not None:
                prompts[source][uid][variable][row] = column[row]
    return prompts


def _fill_missing_acc(prompt: dict[str, dict[int, Any]], expected: int) -> None:
    received = prompt.get("acc", {})
    if received:
        prompt["acc_success_only"] = received
    missing = {-1 - number: 0.0 for number in range(expected - len(received))}
    prompt["acc"] = {**received, **missing}


# --- Confidence intervals by bootstrap, and a test for two systems on the same prompts ----------------------

ELEMENTS_AT_ONCE = 1 << 22


class Estimate(NamedTuple):
    """A mean and its confidence interval; low and high are None if no interval was computed."""

    mean: float
    low: float | None = None
    high: float | None = None
    prompts: int = 0
    """Number of prompts."""


def bootstrap_mean(
    values: Sequence[float], *, draws: int = 1000, confidence: float = 0.95, seed: int = 42
) -> Estimate:
    """The mean, and the percentile interval of means of `draws` samples of the prompts with replacement.

    Prompts are drawn, not responses: the responses to one prompt are correlated, so that an interval over
    responses would be too narrow.
    """
    numbers = np.asarray(values, dtype=float)
    if not len(numbers):
        raise ValueError("There is no prompt to take the mean of.")
    mean = float(numbers.mean())
    if draws < 1:
        return Estimate(mean, prompts=len(numbers))
    generator = np.random.default_rng(seed)
    at_once = max(1, ELEMENTS_AT_ONCE // len(numbers))
    means = np.concatenate(
        [
            numbers[generator.integers(0, len(numbers), (min(at_once, draws - start), len(numbers)))].mean(
                axis=1
            )
            for start in range(0, draws, at_once)
        ]
    )
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(mean, float(low), float(high), len(numbers))


def sign_test(gained: int, lost: int) -> float:
    """Two-sided p-value of the exact sign test (McNemar's test) on `gained` and `lost` prompts.

    >>> sign_test(0, 0), sign_test(3, 3), round(sign_test(9, 1), 4)
    (1.0, 1.0, 0.0215)
    """
    flips = gained + lost
    larger = max(gained, lost)
    ways = math.comb(flips, larger)
    tail = 0
    for count in range(larger, flips + 1):
        tail += ways
        ways = ways * (flips - count) // (count + 1)
    return min(1.0, 2 * tail / 2**flips)


def summarise(trajectories: list[Trajectory], best_of_n: str = "exact") -> dict[str, float]:
    """mean@N, best@N, maj@N ... of every number the scorer reported, N being the number of samples of each
    prompt. Failed samples are left out and counted; the others of their prompt count."""
    scored = [t for t in trajectories if t.score is not None]
    metrics: dict[str, float] = {"val-aux/failed": len(trajectories) - len(scored)}
    if scored:
        infos: dict[str, list[Any]] = {"reward": [t.reward for t in scored]}
        for name in sorted({name for t in scored for name in t.extras} - {"reward"}):  # that is the score's
            values = [t.extras.get(name) for t in scored]
            if all(value is None or isinstance(value, numbers.Real | str) for value in values):
                infos[name] = values
        sources = [t.prompt.data_source for t in scored]
        prompts = [str(t.group) for t in scored]
        sampled = max(Counter(t.group for t in trajectories).values())
        found = validation_metrics(sources, prompts, infos, estimator=best_of_n, sampled=sampled)
        metrics |= name_validation_metrics(found)
        turns = [t.num_turns for t in scored]
        metrics |= {
            "val-aux/num_turns/min": min(turns),
            "val-aux/num_turns/max": max(turns),
            "val-aux/num_turns/mean": sum(turns) / len(turns),
        }
    return metrics
