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


def test_when_to_look_for_newcomers() -> None:
    """(running, waiting) of eight rows, of which two must be free while more wait than are free."""
    for counts, expected in {
        (0, 0): False,
        (8, 1): False,
        (8, 0): False,
        (0, 9): True,
        (7, 1): True,
        (7, 2): False,
        (6, 2): True,
        (6, 9): True,
    }.items():
        scheduler = Scheduler(max_num_seqs=8, budget=10_000, min_admit_share=1 / 4)
        scheduler.running = samples(0, counts[0])
        scheduler.add(samples(1, counts[1]))
        assert scheduler.may_admit() == expected, counts


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
    scheduler.lengths[:] = [95] * 4  # 100 with the headroom, up to the limit
    scheduler.preempt(scheduler.select_preempted())
    assert len(scheduler.running) == 2
    scheduler.budget = 199
    scheduler.preempt(scheduler.select_preempted())
    assert len(scheduler.running) == 1 and scheduler.select_preempted() == []
    scheduler.budget = 1000
    assert scheduler.cache_shape() == (1, 100), "no row too many"
    scheduler.budget = 50
    assert scheduler.select_preempted() == [], "the last one stays"


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


def paged(
    *sizes: tuple[int, int], headroom: int = 64, **more: int
) -> tuple[Scheduler, list[ScheduledSample]]:
    """A scheduler for pages of 64 tokens with one waiting request per prompt length and limit."""
    scheduler = Scheduler(max_num_seqs=16, budget=100_000, headroom=headroom, **more)
    made = [ScheduledSample(i, 0, [i] * prompt, limit) for i, (prompt, limit) in enumerate(sizes)]
    scheduler.add(made)
    return scheduler, made


def test_pages_are_counted_with_the_headroom_and_never_beyond_the_limit() -> None:
    scheduler, _ = paged((64, 1000), (10, 20), (64, 80))
    assert [s.request for s in scheduler.admit(free_pages=5)] == [1, 0, 2], "2 + 1 + 2 pages"
    for pages, admitted in ((4, 2), (2, 1), (0, 1)):
        scheduler, _ = paged((64, 1000), (10, 20), (64, 80))
        assert len(scheduler.admit(free_pages=pages)) == admitted, "one runs however little there is"
    scheduler, _ = paged((64, 1000))
    scheduler.admit(free_pages=5)
    scheduler.add([ScheduledSample(9, 0, [9] * 10, 20)])
    assert scheduler.admit(free_pages=1) == [], "the running row needs the free page soon"
    assert scheduler.admit(free_pages=2) != []


def test_samples_share_the_full_pages_of_a_prompt_that_is_computed() -> None:
    for free, admitted in ((9, 4), (8, 3), (3, 1)):  # 3 pages, then 2 for each sample more
        scheduler, _ = paged()
        scheduler.add(samples(0, 4, prompt=100, limit=1000))
        assert len(scheduler.admit(free)) == admitted
    scheduler, _ = paged()
    scheduler.add(samples(0, 1, prompt=100, limit=1000))
    scheduler.admit(3)
    scheduler.add(samples(0, 1, prompt=100, limit=1000))
    scheduler.running[0].decode_prefill_len = 50
    assert scheduler.admit(3) == [], "its pages are not computed yet; one is for the running row"
    scheduler.running[0].decode_prefill_len = 0
    assert len(scheduler.admit(3)) == 1


def test_the_shapes_of_a_cache_of_pages() -> None:
    scheduler, _ = paged((10, 100), (10, 200), (10, 300), (10, 600))
    scheduler.max_num_seqs = 3
    assert scheduler.wanted_pages() == 2 + 4 + 5, "of as many as can run"
    scheduler.admit(100)
    scheduler.assign_prefixes(0, 99)
    assert scheduler.table_shape() == (3, 320) and scheduler.wanted_pages() == 2 + 4 + 5
    scheduler.max_num_seqs = 16
    assert scheduler.table_shape() == (4, 320)
    for multi_turn, pages in ((True, 2), (False, 0)):
        scheduler, made = paged((70, 100))
        made[0].multi_turn = multi_turn
        scheduler.admit(100)
        scheduler.assign_prefixes(0, 99)
        scheduler.remove_finished([0], {0: range(80)})
        assert scheduler.wanted_pages() == pages, "of finished conversations"


def test_rows_that_are_sent_or_taken_back_wait_first() -> None:
    scheduler, made = paged((4, 20), (3, 20), (5, 20), (6, 20))
    scheduler.max_num_seqs = 3
    admit(scheduler)
    assert [s.request for s in scheduler.running] == [1, 0, 2] and scheduler.newest() == 2
    assert scheduler.send_back(0) == [(2, 0)]
    assert [s.request for s in scheduler.running] == [2, 0] and scheduler.newest() == 0
    assert [s.request for s in scheduler.waiting] == [1, 3]
    assert made[1].preempted and made[1].prefix is None and not made[0].preempted
    admit(scheduler)
    assert [s.request for s in scheduler.running] == [2, 0, 1] and scheduler.newest() == 0, (
        "it was there before"
    )
    assert scheduler.send_back(2) == []
    scheduler.remove_finished([0, 1])
    assert made[0].prefix is None

    admissions = admit(scheduler)
    assert [a.sample.request for a in admissions] == [1, 3] and scheduler.newest() == 1, "as before"
    scheduler.take_back(admissions[1:])
    assert scheduler.running == [made[1]] and scheduler.lengths == [3]
    assert list(scheduler.waiting) == [made[3]] and made[3].prefix is None and not made[3].preempted
    scheduler.add([made[0], made[2]])
    assert scheduler.take_waiting(lambda s: s.request != 0) == [made[3], made[2]]
    assert list(scheduler.waiting) == [made[0]] and scheduler.take_waiting(lambda s: False) == []
    assert not scheduler.idle
    scheduler.clear()
    assert scheduler.idle and not scheduler.lengths


def test_a_common_beginning_is_copied_from_the_longest_row_that_has_it() -> None:
    scheduler = Scheduler(max_num_seqs=8, budget=10_000, max_decode_prefill=10)
    text = list(range(300))
    scheduler.add([ScheduledSample(0, 0, text[:200], 400), ScheduledSample(1, 0, text[:150], 400)])
    short, long = admit(scheduler)
    assert (short.sample.request, short.source_row, long.source_row) == (1, None, 0)
    assert long.second_pass and long.num_cached_tokens == 150, "of a row that is computed in the same step"
    scheduler.add([ScheduledSample(2, 0, text[:205], 400), ScheduledSample(3, 0, text[:250], 400)])
    near, far = admit(scheduler)
    assert (near.source_row, near.num_cached_tokens, near.decode_prefill) == (1, 200, True)
    assert near.sample.decode_prefill_len == 205
    assert (far.source_row, far.num_cached_tokens, far.decode_prefill, far.second_pass) == (
        1,
        200,
        False,
        False,
    )
    other = ScheduledSample(4, 0, text[:250], 400)
    other.adapter = 3
    scheduler.add([other])
    (alone,) = admit(scheduler)
    assert alone.source_row is None and alone.num_cached_tokens == 0
    assert [s.request for s in scheduler.running] == [1, 0, 2, 3, 4]
    scheduler.remove_finished([0, 2, 4])
    scheduler.add([ScheduledSample(5, 0, text[:240], 400)])
    (moved,) = admit(scheduler)
    assert [s.request for s in scheduler.running] == [3, 0, 5]
    assert (moved.source_row, moved.num_cached_tokens) == (0, 239), "where the row is now"
