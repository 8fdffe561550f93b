"""What all tests share: one thread per worker, a tiny task on the disk, and the count of golden cases after the run."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


with contextlib.suppress(ImportError):  # a machine that only runs the tests of a GPU may lack it
    import hypothesis

    # The same examples in every run, however slow the machine is: what fails once fails always.
    hypothesis.settings.register_profile(
        "strop",
        derandomize=True,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("strop")


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/train.parquet, data/test.parquet and model/ (two layers, untrained)."""
    # Imported here: most test files need neither torch nor transformers.
    from strop.data.make import arithmetic, write
    from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("task")
    for split, rows in arithmetic(64, 16, digits=1, seed=0).items():
        write(rows, folder / "data" / f"{split}.parquet")
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, hidden=32, layers=2).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture
def overrides(task: Path, tmp_path: Path) -> list[str]:
    """A run of four steps in a folder of its own."""
    return [
        f"data.train_files={task}/data/train.parquet",
        f"data.val_files={task}/data/test.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        f"actor_rollout_ref.model.path={task}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=4",
        "critic.model.fsdp_config.dtype=float32",
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.logger=file",
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    total: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", []):
                if name == "golden" and report.when == "call":
                    total.update(value[1])
    if total:
        terminalreporter.write_line(
            "golden cases: " + ", ".join(f"{n} {kind}" for kind, n in sorted(total.items()))
        )


def pytest_collection_finish() -> None:
    """Thousands of tests and all imported modules stay until the end: the garbage collector need not visit them
    again and again, which took a third of the time of small tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Whatever tests ran before in this process."""
    random.seed(0)
    # Not imported for it: most test files need neither.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def working_folder_kept() -> Iterator[None]:
    """Relative paths of the next test begin in the same folder."""
    before = os.getcwd()
    yield
    after = os.getcwd()
    if after != before:
        os.chdir(before)
        pytest.fail(f"The test left the working folder at {after}: use monkeypatch.chdir.")
