"""An agent of the OpenAI Agents SDK, unmodified, is trained (examples/agents_sdk). Needs `make .venv-agents/.ready`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from strop.agents.endpoint.recording import RecordedCall, Recording
from strop.config.compose import load
from strop.ppo.build import build_ppo
from strop.ppo.trainer import PpoTrainer
from strop.types import Trajectory
from tests.ppo.runs import metrics

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "agents_sdk"
PYTHON = ROOT / ".venv-agents" / "bin" / "python"


@pytest.mark.agents
@pytest.mark.slow
def test_an_agent_of_the_sdk_learns_from_the_tokens_of_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PYTHON.exists(), "run `make .venv-agents/.ready`"
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("prepare_agents_sdk", EXAMPLE / "prepare.py")
    assert spec is not None and spec.loader is not None
    prepare: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    prepare.prepare(tmp_path)
    calls: list[RecordedCall] = []
    trained: list[Trajectory] = []
    record, sample = Recording.record, PpoTrainer.sample_and_score

    def keep_call(self: Recording, *given: Any) -> RecordedCall:
        calls.append(record(self, *given))
        return calls[-1]

    def keep_rows(self: PpoTrainer, *given: Any) -> list[Trajectory]:
        calls.clear()  # those of a validation
        rows = sample(self, *given)
        trained.extend(rows)
        check_identity(calls, rows)
        return rows

    monkeypatch.setattr(Recording, "record", keep_call)
    monkeypatch.setattr(PpoTrainer, "sample_and_score", keep_rows)
    overrides = [
        f"data.train_files={tmp_path}/data/train.parquet",
        f"data.val_files={tmp_path}/data/test.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        f"trainer.default_local_dir={tmp_path}/run",
        f"trainer.rollout_data_dir={tmp_path}/samples",
    ]
    build_ppo(load("ppo_trainer", overrides, str(EXAMPLE / "grpo.yaml"))).fit()
    steps = metrics(tmp_path / "run")
    name = next(key for key in steps[0] if key.startswith("val-core/"))
    assert steps[0][name] < 0.3 and steps[12][name] > 0.6
    assert len(trained) == 12 * 16 * 8
    for step in range(1, 13):
        assert steps[step]["training/rollout_logprobs_diff_max"] < 1e-4, (
            "recomputed log-probs are those sampled"
        )
        assert steps[step]["agent/failed"] < 13


def check_identity(calls: list[RecordedCall], rows: list[Trajectory]) -> None:
    """Every call of the step is trained with its own ids, after exactly the ids that it was sampled after."""
    expected = sorted((tuple(call.prompt.ids), tuple(call.ids), tuple(call.log_probs)) for call in calls)
    found = []
    for row in rows:
        for turn in row.turns:
            if turn.role == "assistant":
                before = (*row.prompt.ids, *row.response[: turn.start])
                own = slice(turn.start, turn.end)
                found.append((before, tuple(row.response[own]), tuple(row.log_probs[own])))
    assert calls and sorted(found) == expected
