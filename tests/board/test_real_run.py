"""The board over what a real run of two ranks leaves: samples of both, alerts of the health code, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.board.scene import serving
from tests.board.test_app import ask
from tests.runtime.started import Started

STEPS, PROMPTS, SAMPLES = 6, 8, 4
RUN = [
    f"trainer.total_training_steps={STEPS}",
    "trainer.test_freq=3",
    "trainer.save_freq=6",
    "trainer.n_gpus_per_node=2",
    "trainer.device=cpu",
    "actor_rollout_ref.actor.skip_zero_advantages=false",  # what is not computed cannot be shown
]


@pytest.fixture
def board(overrides: list[str], tmp_path: Path) -> Iterator[tuple[str, Path]]:
    words = [word for word in overrides if "default_local_dir" not in word]
    run = Started([*words, *RUN], tmp_path / "runs")
    assert run.end() == 0, run.said()
    with serving(run.folder) as url:
        yield url, run.folder


def get(url: str, path: str) -> Any:
    status, found, _ = ask(url, path)
    assert status == 200, found
    return found


def test_two_ranks_are_shown_as_one_run(board: tuple[str, Path]) -> None:
    url, folder = board
    (run,) = get(url, "/api/runs")["runs"]
    assert (run["step"], run["total"], run["state"], run["damaged"]) == (STEPS, STEPS, "finished", [])
    assert run["samples"] == {"train": STEPS, "validation": 3} and run["checkpoints"] == 1
    base = f"/api/runs/{run['id']}"
    samples_of_both_ranks(url, f"{base}/samples")
    alerts_of_the_health_code(url, base, folder)
    (checkpoint,) = get(url, f"{base}/checkpoints")["checkpoints"]
    assert checkpoint["latest"] and "problem" not in checkpoint and checkpoint["bytes"] > 0
    assert get(url, f"{base}/config")["values"]["trainer.n_gpus_per_node"] == 2


def samples_of_both_ranks(url: str, base: str) -> None:
    assert get(url, base) == {"train": [1, 2, 3, 4, 5, 6], "validation": [0, 3, 6]}
    listed = get(url, f"{base}/train?step=5")
    assert listed["total"] == PROMPTS and len({group["index"] for group in listed["groups"]}) == PROMPTS
    for place in listed["groups"]:
        group = get(url, f"{base}/train/5/{place['group']}")
        assert [sample["sample"] for sample in group["samples"]] == list(range(SAMPLES))
        assert all(sample["version"] == 4 and not sample["failed"] for sample in group["samples"])
        tokens = get(url, f"{base}/train/5/{place['group']}/{SAMPLES - 1}/tokens")
        assert tokens["trained_log_probs"] == pytest.approx(tokens["rollout_log_probs"], abs=1e-3)
        assert None not in tokens["advantages"] and len(tokens["tokens"]) == tokens["length"] > 0
    row = listed["groups"][0]
    assert row["mean"] == pytest.approx(sum(row["scores"]) / SAMPLES)
    first, last = (get(url, f"{base}/validation?step={step}")["groups"] for step in (0, 6))
    assert [group["index"] for group in first] == [group["index"] for group in last]


def alerts_of_the_health_code(url: str, base: str, folder: Path) -> None:
    """An untrained model never ends its answers, and nobody taught it to."""
    written = [json.loads(line) for line in (folder / "alerts.jsonl").read_text().splitlines()]
    shown = get(url, f"{base}/alerts")
    assert shown == {"alerts": written[::-1], "damaged": 0}
    alert = next(alert for alert in written if alert["name"] == "truncation")
    assert alert["step"] == 5 and "data.max_response_length" in alert["advice"]
    drawn = get(
        url,
        f"/api/curves?run={base.rsplit('/', 1)[1]}&metric=health/truncation&metric=response_length/clip_ratio",
    )
    curves = drawn[base.rsplit("/", 1)[1]]
    assert (
        curves["health/truncation"]["step"] == [5, 6]
        and min(curves["response_length/clip_ratio"]["value"]) > 0.5
    )
