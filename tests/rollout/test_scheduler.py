"""The scheduler, without a model: nobody is lost, nobody starves, the cache is never too small."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from strop.rollout.native.requests import Admission, ScheduledSample
from strop.rollout.native.scheduler import Scheduler


def admit(scheduler: Scheduler, rows: int = 99) -> list[Admission]:
    """Seat who fits, in a cache of so many rows."""
    first = len(scheduler.running)
    scheduler.admit()
    return scheduler.assign_prefixes(first, rows)[0]


def samples(request: int, count: int, prompt: int = 4, limit: int = 20) -> list[ScheduledSample]:
    return [ScheduledSample(request, i, [0] * prompt, limit) for i in range(count)]


def test_samples_of_a_request_share_one_prefill() -> None:
    scheduler = Scheduler(max_num_seqs=8, budget=10_000)
    scheduler.add([*samples(0, 3, prompt=9), *samples(1, 2, prompt=4)])
    admissions = admit(scheduler)
    assert [(a.sample.request, a.row, a.duplicate_of) for a in admissions] == [
        (1, 0, None),
        (1, 1, 0),
        (0, 2, None),
        (0, 3, 2),
        (0, 4, 2),
    ]


def test_a_late_sibling_copies_the_prompt_of_a_running_row() -> None:
    scheduler = Scheduler(max_num_seqs=2, budget=10_000)
    scheduler.add(samples(0, 3))
    assert [a.duplicate_of for a in admit(scheduler)] == [None, 0]
    assert admit(scheduler) == []
    scheduler.remove_finished([1])
    (late,) = admit(scheduler)
    assert (late.source_row, late.num_cached_tokens, late.duplicate_of) == (0, 3, None), (
        "the last token is computed again, for its logits"
    )


def test_gaps_are_closed_from_the_end() -> None:
    scheduler = Scheduler(max_num_seqs=9, budget=10_000)
    scheduler.add(s for r in range(6) for s in samples(r, 1))
    admit(scheduler)
    assert scheduler.remove_finished([0, 2, 5]) == [(3, 0), (4, 2)]
    assert [s.request for s in scheduler.running] == [3, 1, 4]


def test_newcomers_gather_while_the_queue_is_longer_than_the_free_rows() -> None:
    scheduler = Scheduler(max_num_seqs=16, budget=100_000, min_admit_share=1 / 4)
    scheduler.add(s for r in range(24) for s in samples(r, 1))
    assert len(admit(scheduler)) == 16, "an empty engine waits for nobody"
    scheduler.remove_finished([0, 1, 2])
    assert admit(scheduler) == [] and [s.request for s in scheduler.waiting] == list(range(16, 24))
    scheduler.remove_finished([0])
    assert [a.sample.request for a in admit(scheduler)] == [16, 17, 18, 19]
    scheduler.remove_finished([0])
    scheduler.waiting.clear()
    scheduler.add(samples(99, 1))
    assert [a.sample.request for a in admit(scheduler)] == [99], (
        "where all of the queue finds room, nobody waits"
    )


def test_admission_stops_where_the_budget_ends() -> None:
    scheduler = Scheduler(max_num_seqs=99, budget=200, block=10)
    scheduler.add(samples(0, 50, prompt=30, limit=100))
    assert len(admit(scheduler)) == 5  # 5 rows of 30 tokens and 10 of headroom
    assert scheduler.cache_shape() == (5, 40)
    assert scheduler.over_budget(200) is None
    assert "the cache holds 200" in (scheduler.over_budget(201) or "")


def test_the_youngest_rows_give_way_and_come_back_first() -> None:
    scheduler = Scheduler(max_num_seqs=99, budget=200, block=10)
    scheduler.add([*samples(0, 5, prompt=30, limit=100), *samples(1, 1, prompt=30, limit=100)])
    admit(scheduler)
    scheduler.lengths[:] = [40] * 5
    preempted = scheduler.select_preempted()
    assert [row for row, _ in preempted] == [4]
    scheduler.preempt(preempted)
    assert [(s.request, s.index) for s in scheduler.waiting] == [(0, 4), (1, 0)]
    assert scheduler.cache_shape() == (4, 50)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(60, 200),
    st.sampled_from([0.0, 1 / 8, 1 / 2]),
)
def test_everybody_finishes_within_the_budget(
    requests: list[tuple[int, int, int]], rows: int, budget: int, gather: float
) -> None:
    scheduler = Scheduler(max_num_seqs=rows, budget=budget, block=8, min_admit_share=gather)
    wanted = {}
    for number, (prompt, new, count) in enumerate(requests):
        for sample in samples(number, count, prompt, prompt + new):
            wanted[number, sample.index] = sample.limit
            scheduler.add([sample])
    done: dict[tuple[int, int], int] = {}
    capacity = 0
    for _ in range(10_000):
        if scheduler.idle:
            break
        admit(scheduler)
        if max(scheduler.lengths) >= capacity or len(scheduler.running) * capacity > budget:
            preempted = scheduler.select_preempted()
            for row, sample in preempted:
                sample.tokens = [0] * (scheduler.lengths[row] - len(sample.prompt))
            scheduler.preempt(preempted)
            shape = scheduler.cache_shape()
            assert shape[0] * shape[1] <= budget and shape[0] >= len(scheduler.running)
            capacity = shape[1]
        assert max(scheduler.lengths) < capacity or max(s.limit for s in scheduler.running) <= capacity
        scheduler.lengths[:] = [length + 1 for length in scheduler.lengths]
        ended = [row for row, s in enumerate(scheduler.running) if scheduler.lengths[row] >= s.limit]
        for row in ended:
            done[scheduler.running[row].request, scheduler.running[row].index] = scheduler.lengths[row]
        scheduler.remove_finished(ended)
    assert done == wanted
