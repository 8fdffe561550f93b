"""docs/metrics.md explains every metric that runs log, and names none that nobody logs."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from strop.run.health.rules import RULES
from tests.ppo.runs import run
from tests.supervised.runs import VERBS, make_task, settings, train

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"


def patterns() -> list[str]:
    """The names of the first column; <anything> and * stand for one or more words."""
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [re.sub(r"<[^>]*>", "*", name) for row in rows for name in re.findall(r"`([^`]+)`", row)]


def unexplained(steps: dict[int, dict[str, float]]) -> list[str]:
    known = patterns()
    names = {name for metrics in steps.values() for name in metrics}
    assert len(names) > 10
    return sorted(name for name in names if not any(fnmatchcase(name, pattern) for pattern in known))


def test_everything_a_run_with_all_roles_logs_is_explained(overrides, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "1+1=2"}) + "\n")
    steps = run(
        overrides,
        f"algorithm.pretrain_files={texts}",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.use_pf_ppo=true",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1",
        f"trainer.rollout_data_dir={tmp_path}/dump",
        "trainer.total_training_steps=2",
    )
    assert unexplained(steps) == []


@pytest.mark.parametrize("estimator", ["remax", "optimal_token_baseline"])
def test_what_estimators_need_is_explained(overrides, estimator):
    assert (
        unexplained(run(overrides, f"algorithm.adv_estimator={estimator}", "trainer.total_training_steps=2"))
        == []
    )


@pytest.mark.parametrize("verb", VERBS)
def test_what_supervised_runs_log_is_explained(verb, tmp_path):
    task = tmp_path / "task"
    task.mkdir()
    assert unexplained(train(verb, settings(make_task(task), tmp_path / "run", verb))) == []


def test_nothing_is_explained_that_the_code_does_not_know():
    code = "\n".join(path.read_text() for path in (ROOT / "strop").rglob("*.py"))
    names = patterns()
    assert len(names) > 120
    for name in names:
        for word in re.findall(r"[a-z0-9_]+", name.partition("/")[2] or name):
            put_together = word.rpartition("_")[0]  # such as rollout_probs_diff_{max}
            assert word in code or (put_together and put_together in code), f"{name}: nobody says {word!r}"


def test_alerts_are_listed_with_their_names():
    page = (ROOT / "docs" / "watching.md").read_text()
    assert all(f"`{rule.name}`" in page for rule in RULES)
