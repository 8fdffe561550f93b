"""Over-sampling and the order of admission: which prompts a step takes, that none is lost or repeated, and
that a run resumes exactly."""

from __future__ import annotations

import asyncio
import json

import pytest

from strop.config.compose import load
from strop.data.loader import Loader
from strop.ppo.admission import AnswerLengths, LengthRecorder
from strop.ppo.build import build_ppo
from strop.ppo.over_sampling import OpenPrompts, OverSampling
from strop.ppo.sampler import Sampler, StepRollout
from strop.rollout.base import Completion, Sampling
from strop.run.checkpoint.tensor_files import join, split
from strop.types import Prompt
from tests.ppo.runs import metrics, same, weights

PROMPTS = [Prompt(index, [1, 2, 3 + index], [], "x") for index in range(40)]
OVER = "actor_rollout_ref.rollout.over_sampling="


class ScriptedEngine:
    """One token per step and sample. The answers to row i have `lengths[i]` tokens; `rows` samples run at
    once."""

    same_stream = True

    def __init__(self, lengths, rows=100):
        self.lengths = lengths
        self.rows = rows
        self.version = 0
        self.stop = False
        self.admitted = []
        self.asked = {}

    def length(self, request):
        prompt = request.ids[:3]
        return self.lengths[prompt[2] - 3] - (len(request.ids) - len(prompt))

    def abort(self):
        self.stop = True

    def generate(self, requests, sampling):
        self.stop = False
        waiting = list(enumerate(requests))
        running = []
        results = {}
        for request in requests:
            self.asked.setdefault(request.ids[2] - 3, set()).add((request.seed, request.first))
        while (waiting or running) and not self.stop:
            while waiting and len(running) < self.rows:
                index, request = waiting.pop(0)
                self.admitted.append(request.ids[2] - 3)
                running.append([index, request, []])
            for entry in list(running):
                index, request, ids = entry
                ids.append(7)
                if len(ids) == self.length(request):
                    running.remove(entry)
                    results[index] = [
                        Completion(list(ids), [-0.5] * len(ids), "stop", self.version)
                        for _ in range(request.n)
                    ]
                    if request.on_done is not None:
                        request.on_done()
        for index, request, ids in running:
            results[index] = [
                Completion(list(ids), [-0.5] * len(ids), "abort", self.version) for _ in range(request.n)
            ]
        for index, request in waiting:
            results[index] = [Completion([], [], "abort", self.version) for _ in range(request.n)]
        return [results[index] for index in range(len(requests))]

    async def agenerate(self, request, sampling):
        """Answers in the order of their lengths; an abort ends the others."""
        self.stop = False
        for _ in range(self.length(request)):
            await asyncio.sleep(0)
            if self.stop:
                return [Completion([7], [-0.5], "abort", self.version) for _ in range(request.n)]
        ids = [7] * self.length(request)
        return [Completion(ids, [-0.5] * len(ids), "stop", self.version) for _ in range(request.n)]


def build(lengths, *, factor=1.5, max_age=1, last_step=99, rows=100, calls_back=True, order=None, batch=4):
    engine = ScriptedEngine(lengths, rows)
    sampler = Sampler(engine, 1, 100)
    rollout = StepRollout(sampler, Sampling(max_tokens=64), 2, lengths=order)
    pool = OpenPrompts(Loader(PROMPTS, batch, shuffle=False), 2, 64)
    over = OverSampling(
        sampler, rollout, pool, factor, max_age=max_age, last_step=last_step, calls_back=calls_back
    )
    return engine, pool, over


def steps(over, engine, numbers, batch=4):
    """The rows that each step trains on."""
    rows = []
    for step in numbers:
        engine.version = step - 1
        count, samples = over.take(over.pool.draw, batch, step, 0)
        assert count == batch and [t.group for t in samples.trajectories] == [0, 0, 1, 1, 2, 2, 3, 3]
        rows.append([t.prompt.index for t in samples.trajectories[::2]])
    return rows


LENGTHS = [5] * 40
LENGTHS[1] = 30
LENGTHS[4] = 30
LENGTHS[7] = 60


@pytest.mark.parametrize("calls_back", [True, False], ids=["in_step", "asyncio"])
def test_a_step_takes_what_finishes_first_and_the_rest_comes_next(calls_back):
    """6 of 4 prompts run. Row 1 is cut in step 1, trained in step 2 and then waited for; row 7 is begun in
    step 2 and waited for in step 3."""
    engine, _, over = build(LENGTHS, calls_back=calls_back)
    assert steps(over, engine, range(1, 6)) == [
        [0, 2, 3, 5],
        [1, 4, 6, 8],
        [7, 9, 10, 11],
        [12, 13, 14, 15],
        [16, 17, 18, 19],
    ]
    assert all(len(seeds) <= 2 for seeds in engine.asked.values()), "one seed per row, one stream per sample"


def test_nothing_is_lost_or_repeated_and_answers_are_whole():
    engine, pool, over = build(LENGTHS)
    trained = []
    for step in range(1, 6):
        engine.version = step - 1
        _, samples = over.take(pool.draw, 4, step, 0)
        for t in samples.trajectories:
            assert len(t.response) == LENGTHS[t.prompt.index] == len(t.log_probs)
        trained += samples.trajectories
    rows = [t.prompt.index for t in trained]
    assert sorted(rows) == sorted([*range(20), *range(20)])
    spans = {t.prompt.index: t.versions for t in trained if t.versions}
    assert spans == {1: [(0, 5), (1, 25)], 4: [(0, 5), (1, 25)], 7: [(1, 25), (2, 35)]}


def test_metrics_count_what_is_carried_over():
    engine, _, over = build(LENGTHS)
    steps(over, engine, [1])
    first = over.metrics()
    assert first["over_sampling/carried_prompts"] == 0 and first["over_sampling/carried_age_max"] == 0
    assert first["staleness/prompts_ahead"] == first["over_sampling/unfinished_prompts"] == 2
    assert first["over_sampling/unfinished_tokens"] == 20, "two prompts with two samples of five tokens"
    steps(over, engine, [2])
    second = over.metrics()
    assert second["over_sampling/carried_prompts"] == 2
    assert second["over_sampling/carried_age_mean"] == second["over_sampling/carried_age_max"] == 1
    assert second["over_sampling/unfinished_prompts"] == 1 and second["staleness/prompts_ahead"] == 2


def test_age_limit():
    """A prompt of 60 tokens, in steps of 5 tokens: it comes after `max_age` steps, finished or not."""
    lengths = [5] * 40
    lengths[0] = 60
    for age in (1, 2, 3):
        engine, _, over = build(lengths, max_age=age)
        rows = steps(over, engine, range(1, 6))
        assert [step for step, taken in enumerate(rows, 1) if 0 in taken] == [1 + age]


def test_the_last_step_starts_nothing_more():
    engine, pool, over = build(LENGTHS, last_step=2)
    assert steps(over, engine, [1, 2]) == [[0, 2, 3, 5], [1, 4, 6, 7]]
    assert over.metrics()["staleness/prompts_ahead"] == 0
    assert 8 not in engine.admitted
    assert [group.number for group in pool.groups] == []


def test_a_prompt_that_only_waited_in_the_engine_is_not_started():
    """With room for four samples, step 1 needs rows 0 to 3; 4 and 5 have no token, and are new in step 2."""
    engine, pool, over = build([5] * 40, rows=4)
    steps(over, engine, [1])
    assert [(group.number, group.step, group.samples) for group in pool.groups[:2]] == [
        (4, 0, []),
        (5, 0, []),
    ]
    _, samples = over.take(pool.draw, 4, 2, 0)
    assert {t.prompt.index: t.versions for t in samples.trajectories} == {4: [], 5: [], 6: [], 7: []}


@pytest.mark.parametrize("killed_after", [1, 2, 3])
def test_a_killed_run_continues_with_the_same_tokens(killed_after):
    whole, _, over = build(LENGTHS)
    expected = steps(over, whole, range(1, 6))
    first, pool, before = build(LENGTHS)
    steps(before, first, range(1, killed_after + 1))
    plain, tensors = split(pool.state_dict())
    saved = join(json.loads(json.dumps(plain)), tensors)
    second, resumed, after = build(LENGTHS)
    resumed.load_state_dict(saved)
    unfinished = [(g.number, g.step, g.samples) for g in resumed.groups]
    assert unfinished == [(g.number, g.step, g.samples) for g in pool.groups]
    assert steps(after, second, range(killed_after + 1, 6)) == expected[killed_after:]
    for row, streams in second.asked.items():
        assert streams <= whole.asked[row], "the same random streams"


@pytest.mark.parametrize("batch", [1, 8, 10])
def test_no_row_is_lost_or_repeated_if_the_batch_size_changes_at_a_resume(batch):
    first, pool, before = build(LENGTHS)
    trained = [row for rows in steps(before, first, [1, 2, 3]) for row in rows]
    _, resumed, after = build(LENGTHS, batch=batch)
    resumed.load_state_dict(pool.state_dict())
    for step in range(4, 4 + (40 - len(trained)) // batch):
        _, samples = after.take(resumed.draw, batch, step, 0)
        trained += [t.prompt.index for t in samples.trajectories[::2]]
    assert len(set(trained)) == len(trained) > 30


@pytest.mark.parametrize(("samples", "length"), [(3, 64), (1, 64), (2, 4)])
def test_samples_of_other_settings_are_sampled_again(samples, length, caplog):
    """Groups of two sizes would make more updates than planned, and answers over the limit cannot go on."""
    engine, pool, over = build(LENGTHS)
    steps(over, engine, [1])
    carried = [group.prompt.index for group in pool.groups if group.samples]
    resumed = OpenPrompts(Loader(PROMPTS, 4, shuffle=False), samples, length)
    resumed.load_state_dict(pool.state_dict())
    assert carried and [group.prompt.index for group in resumed.groups][: len(carried)] == carried
    assert not any(group.samples or group.step for group in resumed.groups)
    assert f"{len(carried)} prompts" in caplog.text


def test_tokens_are_never_continued_for_another_row():
    """The draw of rows 36 to 39 is repeated; with batches of 16 these are left out, and row 0 comes."""
    engine, pool, over = build([5] * 39 + [50])
    steps(over, engine, range(1, 11))
    assert pool.groups[0].prompt.index == 39 and pool.groups[0].samples
    with pytest.raises(
        ValueError, match=r"unfinished prompt of row 39, where row 3 is drawn now.*batch_size"
    ):
        build(LENGTHS, batch=16)[1].load_state_dict(pool.state_dict())


def test_a_checkpoint_without_over_sampling_is_taken_over():
    plain = Loader(PROMPTS, 4, shuffle=False)
    plain.draw()
    engine, pool, over = build(LENGTHS)
    pool.load_state_dict(plain.state_dict())
    assert steps(over, engine, [2]) == [[5, 6, 8, 9]]


def test_long_rows_of_earlier_epochs_start_first():
    order = AnswerLengths({0: 5.0, 3: 40.0, 4: 10.0, 2: 5.0})
    engine, pool, over = build([5] * 40, rows=4, order=order)
    steps(over, engine, [1])
    assert engine.admitted[:4] == [3, 1, 5, 4], "rows 1 and 5 are unknown, and are taken for 15 tokens"
    recorder = LengthRecorder(pool, order)
    _, samples = over.take(pool.draw, 4, 2, 0)
    assert engine.admitted[4:6] == [0, 2], "short rows that waited in step 1 come before new rows"
    recorder.update(samples.trajectories)
    assert order.by_row[0] == order.by_row[7] == 5.0
    restored = AnswerLengths()
    LengthRecorder(OpenPrompts(Loader(PROMPTS, 4, shuffle=False), 2, 64), restored).load_state_dict(
        recorder.state_dict()
    )
    assert restored.by_row == order.by_row


def test_factor_one_is_the_plain_loop(overrides):
    trainer = build_ppo(load("ppo_trainer", [*overrides, f"{OVER}1"]))
    assert trainer.collector.run_ahead is None and type(trainer.loader) is Loader
    assert not trainer.facts.needs_old_log_probs, "on-policy: nothing is corrected"
    trainer.close()


LONG = ["data.max_response_length=12", "trainer.test_freq=-1", "trainer.val_before_train=false"]


def test_a_real_run_over_samples_and_resumes_bit_for_bit(overrides, tmp_path):
    """The native engine with one cut per step. A run of two steps that goes on to four equals one of four."""
    rows_at_once = "actor_rollout_ref.rollout.max_num_seqs=20"  # of 48, so that some are cut half-way
    settings = [*LONG, rows_at_once, f"{OVER}1.5", "actor_rollout_ref.rollout.admission_order=longest_first"]
    rows = {}
    for name, ends in {"whole": [4], "killed": [2, 4]}.items():
        folder = tmp_path / name
        for last in ends:
            said = f"trainer.rollout_data_dir={folder}/said"
            trainer = build_ppo(
                load("ppo_trainer", [*overrides, *settings, said, f"trainer.default_local_dir={folder}"])
            )
            trainer.total_steps = last  # the plan still has four steps, as in a run that is killed
            trainer.fit()
        rows[name] = [(folder / "said" / f"{step}.jsonl").read_text() for step in range(1, 5)]
    answers = {}
    for name, dumps in rows.items():
        answers[name] = [[json.loads(line)["output"] for line in dump.splitlines()] for dump in dumps]
    assert answers["whole"] == answers["killed"]
    found = metrics(tmp_path / "whole")
    assert found[2]["over_sampling/unfinished_tokens"] > 0 and found[3]["over_sampling/carried_prompts"] > 0
    assert found[3]["staleness/max"] == 1 and 0 < found[3]["staleness/old_tokens"] < 1
    assert "rollout_corr/rollout_is_mean" in found[3] and "staleness/max" in found[1]
    assert same(weights(tmp_path / "whole", 4), weights(tmp_path / "killed", 4))
    trained = [json.loads(line)["index"] for dump in rows["whole"] for line in dump.splitlines()]
    assert max(trained.count(row) for row in trained) == 4, "no row is trained twice in an epoch"


def test_order_of_admission_without_over_sampling():
    """The engine gets long rows first, and the step gets its samples in the order drawn."""
    order = AnswerLengths({0: 5.0, 1: 9.0, 2: 7.0})
    engine = ScriptedEngine([5] * 40)
    rollout = StepRollout(Sampler(engine, 1, 100), Sampling(max_tokens=64), 2, lengths=order)
    samples = rollout.generate(list(enumerate(PROMPTS[:3])), 1)
    assert engine.admitted == [1, 2, 0]
    assert [(t.group, t.prompt.index) for t in samples.trajectories[::2]] == [(0, 0), (1, 1), (2, 2)]
