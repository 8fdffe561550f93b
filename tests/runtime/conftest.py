"""A run of the tiny task that others are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.started import SAVE_AT_ONCE, Started

STEPS = 6
SETTINGS = [
    "trainer.device=cpu",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=2",
    f"trainer.test_freq={STEPS}",
    "trainer.logger=[file,console]",
    SAVE_AT_ONCE,
]
REWARD = """
import threading

lock = threading.Lock()

def with_lock(held):
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        with held:
            return sum(letter in ground_truth for letter in solution_str) / 4
    return compute_score

compute_score = with_lock(lock)
"""
"""A function that cannot be pickled, which does not matter: every rank reads the file."""


@pytest.fixture
def settings(overrides: list[str], tmp_path: Path) -> list[str]:
    (tmp_path / "reward.py").write_text(REWARD)
    own = [*SETTINGS, f"custom_reward_function.path={tmp_path}/reward.py"]
    replaced = {word.partition("=")[0] for word in [*own, "trainer.default_local_dir="]}
    return [*(word for word in overrides if word.partition("=")[0] not in replaced), *own]


@pytest.fixture
def local_run(settings: list[str], tmp_path: Path) -> Path:
    """Two ranks of this machine."""
    run = Started([*settings, "trainer.n_gpus_per_node=2"], tmp_path / "local")
    assert run.end() == 0, run.said()
    return run.folder
