"""Training with a judge: a model in an engine of the run, and a server."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from strop.config.compose import load
from strop.ppo.build import build_ppo
from strop.preflight.examine import examine
from strop.quickstart.tiny_model import tiny_tokenizer
from tests.ppo.runs import run
from tests.rewards.test_judge import ChatDouble

SHORT = [
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
]


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_a_model_in_an_engine_judges_as_transformers_does(overrides, task, engine):
    judged = [
        *overrides,
        *SHORT,
        "reward_model.judge.enable=true",
        f"reward_model.model.path={task}/model",
        "reward_model.model.fsdp_config.dtype=float32",
        f"reward_model.rollout={{name: {engine}, max_num_seqs: 8}}",
        "reward_model.judge.template='{answer}={ground_truth}'",
        "reward_model.judge.score_pattern='^(.)'",
        "reward_model.judge.score_range=[0, 9]",
        "reward_model.judge.max_tokens=3",
    ]
    trainer = build_ppo(load("ppo_trainer", judged))
    seen = []
    real = trainer.collector.collect
    trainer.collector.collect = lambda *a: seen.append(real(*a)) or seen[-1]
    trainer.fit()
    tokenizer, model = tiny_tokenizer(), AutoModelForCausalLM.from_pretrained(task / "model").eval()
    scored = [t for t in seen[0] if t.score is not None]
    assert scored
    for trajectory in scored[:6]:
        answer = tokenizer.decode(trajectory.response, skip_special_tokens=True)
        messages = [{"role": "user", "content": f"{answer}={trajectory.prompt.ground_truth}"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        with torch.no_grad():
            first = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        assert trajectory.score == pytest.approx(int(tokenizer.decode([first])) / 9)
        assert trajectory.extras["judge_mark"] == trajectory.score * 9


def test_a_server_judges_a_run(overrides, tmp_path):
    double = ChatDouble(lambda prompt: f"Score: {10 * (prompt.count('7') > 0)}")
    cache = tmp_path / "judged.jsonl"
    steps = run(
        overrides,
        *SHORT,
        "reward_model.judge.enable=true",
        f"reward_model.judge.url={double.url}",
        f"reward_model.judge.cache_path={cache}",
    )
    assert steps[1]["reward/judge_mark/mean"] == pytest.approx(10 * steps[1]["critic/score/mean"])
    kept = [json.loads(line) for line in cache.open()]
    assert len(kept) == len({entry["key"] for entry in kept}) == len(double.questions)
    double.http.shutdown()
    double.http.server_close()


def test_the_preflight_reads_the_judges_settings(overrides):
    report = examine(
        load(
            "ppo_trainer",
            [*overrides, "reward_model.judge.enable=true", "reward_model.judge.url=http://127.0.0.1:9/v1"],
        )
    )
    assert any(
        finding.key == "reward_model.judge" and "Is it running" in finding.message
        for finding in report.findings
    )


def test_the_preflight_takes_a_language_model_as_judge_but_not_as_reward_model(overrides, task):
    path = f"reward_model.model.path={task}/model"
    judged = examine(load("ppo_trainer", [*overrides, path, "reward_model.judge.enable=true"]))
    assert judged.ok, judged.errors
    scored = examine(load("ppo_trainer", [*overrides, path, "reward_model.enable=true"]))
    [problem] = [finding for finding in scored.errors if finding.key == "reward_model.model.path"]
    assert "without a score head" in problem.message and "reward_model.judge.enable=true" in problem.message
