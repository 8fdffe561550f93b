"""Validation metrics of prompts sampled several times: mean@N, best@n, worst@n, maj@n, pass@k.

The estimator of "the best of n" is exact by default: the expectation over all n-subsets of the N responses, by counting
(for 0/1 scores this is the unbiased pass@k of Chen et al. 2021). At n = N it is the true maximum. `estimator="bootstrap"`
draws n responses 1000 times *with* replacement, as verl does; it is noisy and too low for best, too high for worst.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
) -> Metrics:
    """Metrics of every numeric variable per data source, averaged over its prompts.

    One entry per response in every argument; `variables` holds scores and whatever the scorer reported. A variable of strings
    is skipped; the one called `pred` is what responses vote with. A missing value (None) leaves the response out of that
    variable. `expected_acc_counts` says how many responses a prompt should have had: those that never came count as `acc` 0,
    and the accuracy of the ones that came is kept as `acc_success_only`.
    """
    if estimator not in ("exact", "bootstrap"):
        raise ValueError(f"The estimator of best@n is 'exact' or 'bootstrap', not {estimator!r}.")
    for name, column in (("uids", uids), *variables.items()):
        if len(column) != len(data_sources):
            raise ValueError(
                f"`{name}` has {len(column)} entries, `data_sources` {len(data_sources)}; one per response is needed."
            )
    prompts = _by_prompt(data_sources, uids, variables)
    for (source, uid), count in (expected_acc_counts or {}).items():
        _fill_missing_acc(prompts[source][uid], count)
    metrics: Metrics = {}
    for source, of_source in prompts.items():
        collected: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for prompt in of_source.values():
            for variable, values in prompt.items():
                if values and not isinstance(values[0], str):
                    votes = prompt.get("pred")
                    found = prompt_metrics(values, votes, estimator=estimator, seed=seed)
                    for metric, value in found.items():
                        collected[variable][metric].append(value)
        metrics[source] = {v: {m: float(np.mean(x)) for m, x in found.items()} for v, found in collected.items()}
    return metrics


def prompt_metrics(
    values: Sequence[float], votes: Sequence[Any] | None = None, *, estimator: str = "exact", seed: int = 42
) -> dict[str, float]:
    """All metrics of one prompt's responses. Votes count only when there is one for every value."""
    count = len(values)
    metrics = {f"mean@{count}": float(np.mean(values))}
    if count == 1:
        return metrics
    metrics[f"std@{count}"] = float(np.std(values))
    voting = votes is not None and len(votes) == count
    binary = all(value in (0, 1) for value in values)
    for size in subset_sizes(count):
        if estimator == "bootstrap":
            best, worst = bootstrap(values, size, [np.max, np.min], seed=seed)
        else:
            best, worst = best_of(values, size), worst_of(values, size)
            if binary:
                metrics[f"pass@{size}"] = best[0]
        metrics |= {f"best@{size}/mean": best[0], f"best@{size}/std": best[1]}
        metrics |= {f"worst@{size}/mean": worst[0], f"worst@{size}/std": worst[1]}
        if voting:
            assert votes is not None
            maj = majority_of(values, votes, size, estimator=estimator, seed=seed)
            metrics |= {f"maj@{size}/mean": maj[0], f"maj@{size}/std": maj[1]}
    return metrics


def subset_sizes(count: int) -> list[int]:
    """2, 4, 8, ... below `count`, then `count` itself."""
    return [2**power for power in range(1, count.bit_length()) if 2**power < count] + ([count] if count > 1 else [])


def best_of(values: Sequence[float], size: int) -> tuple[float, float]:
    """Mean and standard deviation of the maximum over all subsets of `size` responses.

    The i-th smallest of N is the maximum of C(i - 1, size - 1) of the C(N, size) subsets.
    """
    count = len(values)
    if not 1 <= size <= count:
        raise ValueError(f"The best of {size} cannot be told from {count} responses; sample at least {size} per prompt.")
    ordered = np.sort(np.asarray(values, dtype=float))
    shares = np.array([math.comb(place, size - 1) / math.comb(count, size) for place in range(count)])
    mean = float(shares @ ordered)
    return mean, math.sqrt(max(0.0, float(shares @ (ordered - mean) ** 2)))


def worst_of(values: Sequence[float], size: int) -> tuple[float, float]:
    """Mean and standard deviation of the minimum over all subsets of `size` responses."""
    mean, deviation = best_of([-value for value in values], size)
    return -mean, deviation


def pass_at_k(count: int, correct: int, k: int) -> float:
    """Chance that one of k responses is right, drawn from `count` with `correct` right ones: 1 - C(n-c, k)/C(n, k)."""
    return best_of([1.0] * correct + [0.0] * (count - correct), k)[0]


def majority_value(values: Sequence[float], votes: Sequence[Hashable]) -> float:
    """The value of the first response that carries the most frequent vote; ties go to the vote seen first, None abstains."""
    return float(_majorities(values, votes, np.arange(len(values))[None])[0])


def majority_of(
    values: Sequence[float], votes: Sequence[Hashable], size: int, *, estimator: str = "exact", seed: int = 42
) -> tuple[float, float]:
    """Mean and standard deviation of the majority's value over subsets of `size`; over 1000 of them if there are more."""
    found = _majorities(values, votes, _subsets(len(values), size, estimator, seed))
    return float(found.mean()), float(found.std())


def bootstrap(
    values: Sequence[float], size: int, reducers: Sequence[Callable[..., Any]], *, draws: int = DRAWS, seed: int = 42
) -> list[tuple[float, float]]:
    """Mean and standard deviation of each reducer over `draws` samples of `size` with replacement (legacy numpy stream)."""
    samples = np.asarray(values, dtype=float)[_draws(len(values), size, seed, draws)]
    reduced = [reducer(samples, axis=1) for reducer in reducers]
    return [(float(np.mean(each)), float(np.std(each))) for each in reduced]


def name_validation_metrics(metrics: Metrics) -> dict[str, float]:
    """Flat names: `val-core/` for what a run is judged by, `val-aux/` for the rest.

    Core is the variable `acc` (or `reward` where there is no acc), its mean, maj, best and pass at the largest number.
    """
    flat = {}
    for source, variables in metrics.items():
        core = "acc" if "acc" in variables else "reward"
        for variable, found in variables.items():
            largest = max((_number(metric) for metric in found), default=0)
            for metric, value in found.items():
                judged = metric.startswith(("mean@", "maj@", "best@", "pass@")) and _number(metric) == largest
                room = "val-core" if variable == core and judged else "val-aux"
                flat[f"{room}/{source}/{variable}/{metric}"] = value
    return flat


def _number(metric: str) -> int:
    return int(metric.partition("@")[2].partition("/")[0])


def _majorities(values: Sequence[float], votes: Sequence[Hashable], subsets: NDArray[np.int64]) -> NDArray[np.float64]:
    """The majority's value in each row of `subsets` (rows of response numbers)."""
    number: dict[Hashable, int] = {}
    ballots = np.array([number.setdefault(vote, len(number)) for vote in votes])[subsets]
    cells = ballots + len(number) * np.arange(len(subsets))[:, None]  # one counter per subset and vote
    support = np.where(np.array([vote is None for vote in votes])[subsets], 0, np.bincount(cells.ravel())[cells])
    first_winner = support.argmax(axis=1)  # argmax takes the first of equals
    return np.asarray(values, dtype=float)[subsets[np.arange(len(subsets)), first_winner]]


@functools.lru_cache(maxsize=32)  # every prompt of a validation run asks for the same few
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
) -> dict[str, dict[Hashable, dict[str, list[Any]]]]:
    prompts: dict[str, dict[Hashable, dict[str, list[Any]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row, (source, uid) in enumerate(zip(data_sources, uids)):
        for variable, column in variables.items():
            if column[row] is not None:
                prompts[source][uid][variable].append(column[row])
    return prompts


def _fill_missing_acc(prompt: dict[str, list[Any]], expected: int) -> None:
    came = prompt.get("acc", [])
    if came:
        prompt["acc_success_only"] = list(came)
    prompt["acc"] = list(came) + [0.0] * (expected - len(came))
