"""docs/training.md tells the truth: its keys exist, its metrics are logged."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path

from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys
from tests.ppo.runs import run

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()


def words(text):
    return [word for group in re.findall(r"`([^`\n]+)`", text) for word in re.split(r"[ ,×]+", group)]


def test_every_key_exists():
    known = {key.path for key in keys(ROOTS["ppo_trainer"])}
    text = PAGE.partition("## Metrics")[0]
    asked = {
        word.partition("=")[0] for word in words(text) if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+(=.*)?", word)
    }
    asked = {
        word
        for word in asked
        if not word.endswith((".py", ".json", ".jsonl", ".txt")) and not word.startswith("strop.")
    }
    assert len(asked) > 25
    for word in sorted(asked):
        found = [
            path for path in known if path == word or path.endswith(f".{word}") or path.startswith(f"{word}.")
        ]
        sections = [path for path in known if f".{word}." in path]
        free = re.match(r".*\.(ref\.model)\.path", word)  # an open section: changes to the model
        assert found or sections or free, word


def test_every_metric_is_logged(overrides, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "1+1=2"}) + "\n")
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(solution_str):\n    return {'score': len(solution_str) % 2, 'pred': solution_str[:1]}\n"
    )
    steps = run(
        overrides,
        f"custom_reward_function.path={reward}",
        f"algorithm.pretrain_files={texts}",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.use_pf_ppo=true",
        "algorithm.filter_groups.enable=true",
        "algorithm.rollout_correction.rollout_is=token",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1",
        "trainer.total_training_steps=2",
    )
    logged = {name for metrics in steps.values() for name in metrics} | {"actor/empty_updates"}
    table = PAGE.partition("## Metrics")[2]
    first = "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    promised = [word for word in words(first) if "/" in word]
    assert len(promised) > 20
    for name in promised:
        pattern = re.sub(r"<\w+>", "*", name).replace("@N", "@*")
        assert any(fnmatch(found, pattern) for found in logged), name


def test_the_phases_are_those_of_the_loop(overrides):
    steps = run(
        overrides,
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "trainer.total_training_steps=2",
    )
    table = PAGE.partition("| phase")[2].partition("\n\n")[0]
    phases = [phase.strip() for line in table.splitlines()[2:] for phase in line.split("|")[1].split(",")]
    assert len(phases) == 12
    phases.remove("teacher")  # only with algorithm.distillation: tests/ppo/test_teacher.py
    for phase in phases:
        assert f"timing_s/{phase}" in steps[2], phase
