"""Scores from a reward model in the loop, from a manager of one's own, clipped and normalised; a critic that starts from it."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from strop.config.compose import load
from strop.models.heads import RewardStatistics, new_scalar_model, set_reward_statistics
from strop.ppo.build import build_ppo
from strop.quickstart.tiny_model import tiny_tokenizer
from tests.ppo.runs import run


@pytest.fixture(scope="module")
def judge(task, tmp_path_factory):
    """A folder as transformers writes it, with statistics of its scores."""
    folder = tmp_path_factory.mktemp("judge")
    config = AutoConfig.from_pretrained(task / "model")
    torch.manual_seed(5)
    model = new_scalar_model(config)
    with torch.no_grad():
        model.score.weight.normal_(0, 0.3)
    set_reward_statistics(model.config, RewardStatistics(mean=0.5, std=2.0))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def judged(overrides, judge):
    return [
        *overrides,
        "reward_model.enable=true",
        f"reward_model.model.path={judge}",
        "reward_model.model.fsdp_config.dtype=float32",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ]


def test_scores_are_those_of_transformers(judged, judge, tmp_path):
    trainer = build_ppo(load("ppo_trainer", judged))
    seen = []
    real = trainer.collector.collect
    trainer.collector.collect = lambda *a: seen.append(real(*a)) or seen[-1]
    trainer.fit()
    model = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    pad = (
        model.config.pad_token_id
    )  # transformers scores at the last token that is not padding, even where it was sampled
    compared = [trajectory for trajectory in seen[0] if trajectory.response[-1] != pad][:8]
    assert len(compared) == 8
    for trajectory in compared:
        with torch.no_grad():
            expected = float(model(torch.tensor([trajectory.prompt.ids + trajectory.response])).logits)
        assert trajectory.score == pytest.approx(expected, abs=1e-5)
    assert len({t.score for t in seen[0]}) > 4


def test_normalised_and_clipped(judged, tmp_path):
    def scores(name, *more):
        folder = tmp_path / name
        run(judged, *more, f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/said")
        return [json.loads(line)["score"] for line in (folder / "said" / "1.jsonl").open()]

    plain = scores("plain")
    normal = scores("normal", "reward_model.normalize=true")
    assert normal == pytest.approx([(score - 0.5) / 2.0 for score in plain], abs=1e-6)
    low, high = sorted(plain)[8], sorted(plain)[24]
    clipped = scores("clipped", f"reward_model.clip_range=[{low},{high}]")
    assert clipped == pytest.approx([min(max(score, low), high) for score in plain], abs=1e-6)


def test_a_function_has_the_last_word_over_the_model(judged, tmp_path):
    file = tmp_path / "last.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 2 * extra_info['rm_score'], 'seen': 1}\n"
    )
    steps = run(judged, f"custom_reward_function.path={file}")
    assert steps[1]["critic/score/mean"] == pytest.approx(2 * steps[1]["reward/rm_score/mean"], rel=1e-5)
    assert steps[1]["reward/seen/mean"] == 1


def test_a_manager_of_ones_own(overrides, tmp_path):
    file = tmp_path / "manager.py"
    file.write_text(
        "class Lengths:\n"
        "    def __init__(self, function, config, bonus=0.0):\n        self.bonus = bonus\n"
        "    def score(self, samples):\n"
        "        return [{'score': len(s.trajectory.response) + self.bonus, 'length': len(s.trajectory.response)} for s in samples]\n"
    )
    steps = run(
        overrides,
        "reward_manager.source=importlib",
        f"reward_manager.module.path={file}",
        "reward_manager.module.name=Lengths",
        "reward_model.reward_kwargs={bonus: 10.0}",
        "trainer.total_training_steps=1",
    )
    assert steps[1]["critic/score/mean"] == pytest.approx(10 + steps[1]["response_length/mean"])
    assert steps[1]["reward/length/mean"] == pytest.approx(steps[1]["response_length/mean"])


def test_a_critic_starts_from_the_reward_model(judged, judge):
    trainer = build_ppo(
        load("ppo_trainer", [*judged, "algorithm.adv_estimator=gae", f"critic.model.path={judge}"])
    )
    head = AutoModelForSequenceClassification.from_pretrained(judge).score.weight
    assert torch.equal(trainer.roles.critic.module.score.weight, head)
    trainer.fit()
    assert not torch.equal(trainer.roles.critic.module.score.weight, head)
