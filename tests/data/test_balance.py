"""Partitions are complete, balanced and within budget; errors say what to change."""

from __future__ import annotations

import math
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data.balance import (
    balanced_partitions,
    imbalance_metrics,
    karmarkar_karp,
    light_ends_order,
    micro_batches,
    neighbour_micro_batches,
    workload,
)
from tests.algorithms.reference.partitions import (
    first_fit_count,
    greedy_partition,
    group_balanced_partitions,
    inverse_permutation,
    restore_order,
)

lengths_strategy = st.lists(st.integers(0, 5000), min_size=1, max_size=40)


@given(lengths_strategy, st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_every_row_lands_in_exactly_one_part(lengths: list[int], parts: int) -> None:
    parts = min(parts, len(lengths))
    for divide in (karmarkar_karp, greedy_partition, balanced_partitions):
        made = divide(lengths, parts)
        assert sorted(row for part in made for row in part) == list(range(len(lengths)))
        assert len(made) == parts
    assert all(karmarkar_karp(lengths, parts)), "no part of a free partition may be empty"


@given(st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_equal_size_parts_have_equal_counts(parts: int, each: int, random) -> None:  # type: ignore[no-untyped-def]
    lengths = [random.randint(1, 999) for _ in range(parts * each)]
    for divide in (karmarkar_karp, greedy_partition):
        assert {len(part) for part in divide(lengths, parts, equal_size=True)} == {each}


def test_differencing_beats_greedy_and_is_near_the_mean() -> None:
    lengths = np.random.default_rng(0).integers(1, 8192, 2048).tolist()

    def worst(partition: list[list[int]]) -> float:
        sums = [sum(lengths[row] for row in part) for part in partition]
        return max(sums) / (sum(sums) / len(sums))

    assert worst(karmarkar_karp(lengths, 16)) < 1.0001
    assert worst(karmarkar_karp(lengths, 16, equal_size=True)) < 1.0001
    assert worst(karmarkar_karp(lengths, 16)) < worst(greedy_partition(lengths, 16))


def test_ten_thousand_rows_take_a_moment() -> None:
    lengths = np.random.default_rng(0).integers(1, 8192, 10_000).tolist()
    start = time.thread_time()  # not the wall clock: other processes may have the processor
    karmarkar_karp(workload(lengths).tolist(), 8, equal_size=True)
    karmarkar_karp(workload(lengths).tolist(), 64)
    micro_batches(lengths, 131072)
    assert time.thread_time() - start < 15


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(100, 400), st.booleans())
@settings(max_examples=50, deadline=None)
def test_micro_batches_fit_and_restore(lengths: list[int], budget: int, light_ends: bool) -> None:
    parts = micro_batches(lengths, budget, light_ends=light_ends)
    assert all(sum(lengths[row] for row in part) <= budget for part in parts)
    mixed = [lengths[row] for part in parts for row in part]
    assert [mixed[place] for place in restore_order(parts)] == lengths


def test_micro_batch_counts_follow_the_requests() -> None:
    assert len(micro_batches([4] * 5, 10)) == 3, "one more than their sum needs"
    lengths = [10] * 12
    assert len(micro_batches(lengths, 60)) == 2
    assert len(micro_batches(lengths, 60, min_count=5)) == 5
    assert len(micro_batches(lengths, 60, min_count=5, count_multiple=4)) == 8
    grouped = micro_batches(lengths, 60, group_size=3)
    assert all(
        part[place : place + 3] == list(range(part[place], part[place] + 3))
        for part in grouped
        for place in range(0, len(part), 3)
    )


@pytest.mark.parametrize(("rows", "tokens"), [(205, 100), (1024, 9000), (203, 50)])
def test_rows_that_fit_only_alone_or_almost_are_cut(rows: int, tokens: int) -> None:
    """The count of micro-batches grows by a hundredth at a time, and must not jump over the last one that there
    are rows for."""
    budget = 3 * tokens // 2
    lengths = [tokens] * rows
    assert sorted(micro_batches(lengths, budget)) == [[row] for row in range(rows)]
    mixed = [*lengths, *[budget // 2 - 1] * 7]
    parts = micro_batches(mixed, budget)
    assert max(sum(mixed[row] for row in part) for part in parts) <= budget
    thirds = [100] * (rows // 2) + [49] * rows  # some fit together, but not those of the first half
    assert max(sum(thirds[row] for row in part) for part in micro_batches(thirds, 148)) <= 148


@pytest.mark.parametrize(("rows", "multiple", "expected"), [(201, 1, 201), (251, 1, 251), (804, 4, 804)])
def test_rows_of_more_than_half_the_budget_get_a_micro_batch_each(
    rows: int, multiple: int, expected: int
) -> None:
    """Counts grow by one in a hundred; a step must not pass by the only count that fits."""
    assert len(micro_batches([600] * rows, 1000, count_multiple=multiple)) == expected


def test_light_micro_batches_sit_at_both_ends() -> None:
    lengths = [90, 80, 70, 60, 50]
    order = [sum(lengths[row] for row in part) for part in micro_batches(lengths, 90, min_count=5)]
    assert order == [50, 70, 90, 80, 60]
    assert light_ends_order([[0], [1], [2]]) == [[2], [0], [1]]


def test_groups_stay_whole() -> None:
    groups = ["a", "b", "a", "b", "c", "d", "c", "d"]
    for part in group_balanced_partitions([5, 6, 7, 8, 9, 1, 2, 3], groups, 2):
        assert all(
            groups.count(groups[row]) == sum(groups[other] == groups[row] for other in part) for row in part
        )
        assert len({groups[row] for row in part}) == 2


def test_first_fit_opens_a_bin_only_when_nothing_fits() -> None:
    assert first_fit_count([5, 3, 7, 2, 6], 10) == 3
    assert first_fit_count([9, 9, 9], 4) == 3
    assert first_fit_count([], 4) == 0


def test_imbalance_of_a_perfect_partition() -> None:
    metrics = imbalance_metrics([1, 1, 3, 3], [[0, 2], [1, 3]])
    assert metrics["global_seqlen/minmax_diff"] == 4
    assert (
        metrics["global_seqlen/balanced_min"]
        == metrics["global_seqlen/balanced_max"]
        == metrics["global_seqlen/mean"]
        == 4
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: karmarkar_karp([1, 2], 3), "2 rows cannot fill 3 parts"),
        (lambda: karmarkar_karp([1, 2, 3], 2, equal_size=True), "3 rows cannot be divided equally into 2"),
        (lambda: group_balanced_partitions([1, 2], ["a"], 1), "`groups` names 1 rows but `lengths` has 2"),
        (
            lambda: group_balanced_partitions([1, 2], ["a", "a"], 2),
            "1 groups cannot be divided evenly into 2",
        ),
        (lambda: micro_batches([5, 90], 50), "row 1 has 90 tokens, over max_tokens=50; set it to 90"),
        (lambda: micro_batches([30, 30], 50, group_size=2), "rows 0..1 has 60 tokens"),
        (lambda: micro_batches([5], 50, padded_width=64), "below one padded row of 64"),
        (lambda: micro_batches([5, 5], 50, min_count=3), "only 2 rows to fill them"),
        (lambda: micro_batches([5, 5, 5], 50, group_size=2), "groups of group_size=2"),
        (lambda: inverse_permutation([0, 0]), "not a permutation"),
    ],
)
def test_errors_name_the_numbers(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("seed", range(5))
def test_neighbours_stay_neighbours_within_the_budget(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 600) for _ in range(draw.randint(1, 200))]
    order = draw.sample(range(len(lengths)), len(lengths))
    parts = neighbour_micro_batches(lengths, order, 2000)
    assert [row for part in parts for row in part] == order
    tokens = [sum(lengths[row] for row in part) for part in parts]
    assert max(tokens) <= 2000
    assert len(parts) <= math.ceil(sum(lengths) / 2000 * 1.3)
    assert neighbour_micro_batches([10] * 6, range(6), 30) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match=f"row {lengths.index(max(lengths))} has {max(lengths)} tokens"):
        neighbour_micro_batches(lengths, order, max(lengths) - 1)
