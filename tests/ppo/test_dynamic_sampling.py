"""Dynamic sampling whose reward never distinguishes responses says so, and ends."""

from __future__ import annotations

import logging

import pytest

from strop.algorithms.metrics.training import StepRecord
from strop.config.compose import load
from strop.config.rules import check
from strop.config.schema.rollout import RewardWeightsConfig
from strop.ppo.build import build_group_filter
from strop.ppo.collect import Collector, EmptyDraws, GroupFilter, shown_scores, weigh_rewards
from strop.quickstart.tiny_model import tiny_tokenizer
from strop.rewards.scorer import Scorer, Shaping
from strop.types import Prompt, Trajectory, batch_of
from tests.ppo.runs import run


def samples(first, count, scores):
    found = []
    for group in range(first, first + count):
        prompt = Prompt(100 + group, [1, 2], [], "arithmetic")
        found += [Trajectory(prompt, group, [5], [1], [-1.0], score=score) for score in scores]
    return found


class ScriptedCollector(Collector):
    """Draws groups with given scores: the last entry of the script is repeated."""

    def __init__(self, group_filter, script, per_draw):
        super().__init__(None, None, None, group_filter=group_filter)
        self.script = script
        self.per_draw = per_draw
        self.draws = 0

    def _sample_and_score(self, draw, prompts, step, first, record):
        scores = self.script[min(self.draws, len(self.script) - 1)]
        self.draws += 1
        if self.draws > 500:
            raise AssertionError("no end")
        return self.per_draw, samples(first, self.per_draw, scores)

    def filtered(self, prompts):
        record = StepRecord(lambda phase: None)
        return self._collect_filtered(self.group_filter, None, prompts, 1, record), record


def test_equal_rewards_end_the_run_by_default(caplog):
    collector = ScriptedCollector(GroupFilter("score", None, None), [(0.0, 0.0, 0.0)], per_draw=4)
    with pytest.raises(
        ValueError, match=r"kept none of the last 80 prompts \(20 draws in a row\)"
    ) as problem:
        collector.filtered(8)
    text = str(problem.value)
    assert "the step has 0 of 8" in text and "row 179: 0 0 0" in text
    assert "algorithm.filter_groups.max_num_gen_batches" in text and "rollout.n" in text
    notices = [record.getMessage() for record in caplog.records]
    assert ["(3 draws" in notices[0], "(6 draws" in notices[1], "(12 draws" in notices[2]] == [True] * 3
    assert len(notices) == 3 and "last 12 prompts" in notices[0] and "row 111: 0 0 0" in notices[0]


def test_large_draws_end_after_ten():
    collector = ScriptedCollector(GroupFilter("score", None, None), [(1.0, 1.0)], per_draw=24)
    with pytest.raises(ValueError, match="10 draws in a row"):
        collector.filtered(8)
    assert collector.draws == 10


def test_slow_progress_does_not_end_the_run(caplog):
    script = ([(0.0, 0.0)] * 19 + [(0.0, 1.0)]) * 4
    kept, record = ScriptedCollector(GroupFilter("score", None, None), script, per_draw=1).filtered(2)
    assert len(kept) == 4 and record.metrics["train/num_gen_batches"] == 40
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 6


def test_zero_is_no_limit_but_not_silent(caplog):
    collector = ScriptedCollector(GroupFilter("score", None, 0), [(1.0, 1.0)], per_draw=4)
    with pytest.raises(AssertionError, match="no end"):
        collector.filtered(8)
    assert [r.getMessage().partition(" draws")[0].rpartition("(")[2] for r in caplog.records] == [
        str(3 * 2**power) for power in range(8)
    ]


def test_a_limit_of_draws_counts_all_draws():
    collector = ScriptedCollector(GroupFilter("score", None, 2), [(0.0, 1.0), (1.0, 1.0)], per_draw=4)
    with pytest.raises(ValueError, match="After 2 draws only 4 of 8 prompts"):
        collector.filtered(8)


def test_scores_are_shown_shortly():
    assert shown_scores(samples(0, 5, [None, 0.5])) == "; ".join(
        f"row {row}: failed 0.5" for row in (102, 103, 104)
    )
    assert shown_scores(samples(0, 1, [1.0] * 9)).endswith("1 1 ...")
    assert shown_scores([]) == "none"
    EmptyDraws(GroupFilter("score", None, None), 4).count(4, 0, [], found=0)


def scored_answers(scores, lengths, **shaping):
    """The answers to one prompt, scored by a manager that knows `scores`."""

    class Given:
        def score(self, samples):
            return scores

    prompt = Prompt(100, [1, 2], [], "arithmetic")
    answers = [Trajectory(prompt, 0, [5] * length, [1] * length, [-1.0] * length) for length in lengths]
    Scorer(tiny_tokenizer(), manager=Given(), shaping=Shaping(**shaping)).score(answers)
    for answer in answers:
        weigh_rewards(answer, RewardWeightsConfig(score=2.0))
    return answers


@pytest.mark.parametrize(
    "shaping",
    [
        {"overlong_buffer": 4, "max_response_length": 10},
        {"overlong_buffer": 4, "max_response_length": 10, "clip": (-0.25, 1.0)},
    ],
)
def test_wrong_answers_of_different_lengths_do_not_disagree(shaping):
    """The penalty for the length alone would make the shortest wrong answer the best one of its prompt."""
    answers = scored_answers([0.0, 0.0, 0.0], (2, 8, 10), **shaping)
    assert len({answer.reward for answer in answers}) > 1
    assert GroupFilter("score", None, None).keep(answers) == [False] * 3
    assert GroupFilter("seq_reward", None, None).keep(answers) == [True] * 3
    assert shown_scores(answers) == "row 100: 0 0 0"
    mixed = scored_answers([0.0, 1.0, 0.0], (2, 8, 10), **shaping)
    assert GroupFilter("score", None, None).keep(mixed) == [True] * 3


def test_the_range_of_a_filter_is_that_of_unpenalized_scores():
    """With rollout.agent.reward_weights.score=2 a score of 1 counts 2."""
    answers = scored_answers([1.0, 1.0], (10, 10), overlong_buffer=4, max_response_length=10)
    assert [answer.reward for answer in answers] == [0.0, 0.0]
    assert GroupFilter("score", (1.5, 2.5), None).keep(answers) == [True] * 2
    assert GroupFilter("score", (-0.5, 0.5), None).keep(answers) == [False] * 2


def test_scores_that_are_equal_in_a_batch_do_not_disagree():
    answers = scored_answers([0.1 + 0.2, 0.3], (2, 2))
    assert answers[0].score != answers[1].score
    assert not batch_of(answers).scores.diff(dim=0).any()
    assert GroupFilter("score", None, None).keep(answers) == [False] * 2


@pytest.mark.parametrize(("said", "limit"), [([], None), (["=0"], 0), (["=10"], 10)])
def test_the_key(said, limit):
    words = ["algorithm.filter_groups.enable=true"]
    words += [f"algorithm.filter_groups.max_num_gen_batches{value}" for value in said]
    assert build_group_filter(load("ppo_trainer", words).config).max_draws == limit


def test_a_step_without_a_filter_has_the_prompts_of_its_plan(overrides, tmp_path):
    """Other sizes of a draw would make several updates of a step that counts as on-policy."""
    folder = tmp_path / "said"
    run(
        overrides,
        "data.gen_batch_size=12",
        "trainer.total_training_steps=1",
        f"trainer.rollout_data_dir={folder}",
    )
    assert len((folder / "1.jsonl").read_text().splitlines()) == 8 * 4
    findings = check(load("ppo_trainer", [*overrides, "data.gen_batch_size=12"]))
    assert any("gen_batch_size" in finding.key and "no effect" in finding.message for finding in findings)


HALF = """
class Half:
    def __init__(self, dataset, config):
        self.rows = range(len(dataset) // 2)
    def __len__(self):
        return len(self.rows)
    def __iter__(self):
        return iter(self.rows)
"""


def test_an_epoch_of_a_sampler_has_its_rows(overrides, tmp_path):
    (tmp_path / "half.py").write_text(HALF)
    steps = run(
        overrides,
        f"data.sampler.class_path={tmp_path}/half.py",
        "data.sampler.class_name=Half",
        "trainer.total_training_steps=null",
        "trainer.total_epochs=1",
    )
    assert max(steps) == 32 // 8 and steps[4]["training/epoch"] == 0
