"""What stays and what goes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strop.run.atomic_files import Fingerprint
from strop.run.checkpoint.layout import Manifest, SavedCheckpoint
from strop.run.checkpoint.retention import (
    GIB,
    RetentionPolicy,
    best,
    checkpoints_to_delete,
    retention_from_trainer,
)
from strop.run.checkpoint.store import Checkpoints, layout, save


def made(*steps: int, size: float = 1.0, metrics: dict[int, float] | None = None) -> list[SavedCheckpoint]:
    """Checkpoints of `size` GiB in the order given."""
    metrics = metrics or {}
    return [
        SavedCheckpoint(
            Path(f"global_step_{step}"),
            Manifest(
                step,
                serial,
                {"x": Fingerprint(int(size * GIB), 0)},
                [],
                {"val/acc": metrics[step]} if step in metrics else {},
            ),
        )
        for serial, step in enumerate(steps, 1)
    ]


def steps(checkpoints: list[SavedCheckpoint]) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints]


def test_without_limits_all_stay() -> None:
    assert checkpoints_to_delete(made(1, 2, 3), RetentionPolicy()) == []


def test_the_oldest_go_first() -> None:
    assert steps(checkpoints_to_delete(made(10, 20, 30, 40), RetentionPolicy(newest=2))) == [10, 20]


def test_after_rewinding_the_newest_is_what_was_saved_last() -> None:
    assert steps(checkpoints_to_delete(made(30, 40, 10), RetentionPolicy(newest=1))) == [30, 40]


def test_the_best_stays_beside_the_newest() -> None:
    checkpoints = made(10, 20, 30, 40, metrics={10: 0.2, 20: 0.9, 30: 0.9, 40: 0.1})
    assert steps(checkpoints_to_delete(checkpoints, RetentionPolicy(newest=1, best_metric="val/acc"))) == [
        10,
        30,
    ]
    assert steps(
        checkpoints_to_delete(
            checkpoints, RetentionPolicy(newest=1, best_metric="val/acc", lowest_is_best=True)
        )
    ) == [
        10,
        20,
        30,
    ]
    assert steps(checkpoints_to_delete(checkpoints, RetentionPolicy(newest=3, best_metric="val/acc"))) == [10]


def test_a_metric_that_is_missing_or_nan_is_never_the_best() -> None:
    keep = RetentionPolicy(best_metric="val/acc")
    found = best(made(1, 2, 3, metrics={1: float("nan"), 2: 0.0}), keep)
    assert found is not None and found.step == 2
    assert best(made(1, 2), keep) is None


def test_size_limit_spares_the_newest_and_the_best() -> None:
    checkpoints = made(1, 2, 3, 4, metrics={1: 1.0})
    assert steps(checkpoints_to_delete(checkpoints, RetentionPolicy(max_gb=2.5))) == [1, 2]
    assert steps(checkpoints_to_delete(checkpoints, RetentionPolicy(max_gb=2.5, best_metric="val/acc"))) == [
        2,
        3,
    ]
    assert steps(checkpoints_to_delete(checkpoints, RetentionPolicy(max_gb=0.1))) == [1, 2, 3]
    assert steps(checkpoints_to_delete(checkpoints, RetentionPolicy(newest=3, max_gb=2.0))) == [1, 2]


def test_limits_of_the_trainer_section() -> None:
    assert retention_from_trainer() == RetentionPolicy()
    assert retention_from_trainer(max_actor_ckpt_to_keep=2, max_critic_ckpt_to_keep=3).newest == 3
    assert retention_from_trainer(max_actor_ckpt_to_keep=4, max_critic_ckpt_to_keep=3).newest == 4
    assert retention_from_trainer(max_actor_ckpt_to_keep=2).newest == 2
    assert retention_from_trainer(max_critic_ckpt_to_keep=3).newest == 3
    others = retention_from_trainer(max_ckpt_mem_gb=1.5, best_metric="val/acc")
    assert others == RetentionPolicy(max_gb=1.5, best_metric="val/acc")
    assert retention_from_trainer(max_actor_ckpt_to_keep=5, remove_previous_ckpt_in_save=True).newest == 1


@pytest.mark.parametrize("wrong", [{"newest": 0}, {"max_gb": 0.0}])
def test_limits_that_would_delete_everything_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="RetentionPolicy"):
        RetentionPolicy(**wrong)  # type: ignore[arg-type]


def test_checkpoints_of_earlier_processes_count_and_go_as_a_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, {"data": {}, "actor/model": {"w": torch.ones(2)}})
    foreign = tmp_path / "global_step_0"
    (foreign / "actor").mkdir(parents=True)
    with Checkpoints(tmp_path, keep=RetentionPolicy(newest=2)) as checkpoints:
        checkpoints.save(4, {"data": {}})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["global_step_0", "global_step_3", "global_step_4", "latest_checkpointed_iteration.txt"]


def test_after_a_rewind_the_newest_on_the_disk_is_what_was_saved_last(tmp_path: Path) -> None:
    for step in (3, 10, 2):
        save(tmp_path, step, {"data": {}})
    (tmp_path / "global_step_7").touch()  # no folder
    with Checkpoints(tmp_path, keep=RetentionPolicy(newest=2)) as checkpoints:
        checkpoints.save(4, {"data": {}})
    assert [c.step for c in layout.saved_checkpoints(tmp_path)] == [2, 4]
    assert [path.name for path in layout.step_folders(tmp_path)] == ["global_step_2", "global_step_4"]
    for step in (30, 200):  # not written by Strop
        layout.checkpoint_folder(tmp_path, step).mkdir()
    assert [layout.step_of(path) for path in layout.step_folders(tmp_path)] == [2, 4, 30, 200]
    assert [layout.step_of(path) for path in layout.candidates(tmp_path)] == [4, 2, 200, 30]


def test_the_best_survives_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep = RetentionPolicy(newest=1, best_metric="val/acc")
    for step, accuracy in ((1, 0.1), (2, 0.8), (3, 0.3), (4, 0.5)):
        with Checkpoints(tmp_path, keep=keep) as checkpoints:
            checkpoints.save(step, {"data": {}}, metrics={"val/acc": accuracy})
    assert [c.step for c in layout.saved_checkpoints(tmp_path)] == [2, 4]
    assert not caplog.text, "the metric is known"


def test_a_misspelt_metric_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpoints(tmp_path, keep=RetentionPolicy(best_metric="val/ac")) as checkpoints:
        checkpoints.save(1, {"data": {}}, metrics={"val/acc": 0.5})
    assert (
        "trainer.best_metric=val/ac is not among" in caplog.text and "Did you mean 'val/acc'?" in caplog.text
    )


def test_a_checkpoint_that_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rmtree = layout.shutil.rmtree

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if "removing" not in path.name:
            rmtree(path, ignore_errors)
        elif not ignore_errors:
            raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(layout.shutil, "rmtree", busy)
    with Checkpoints(tmp_path, keep=RetentionPolicy(newest=1)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"trainer": {"step": step}})
    assert layout.read_latest(tmp_path) == 3
    assert [path.name for path in layout.step_folders(tmp_path)] == ["global_step_3"]
    assert "cannot be deleted" in caplog.text and "busy" in caplog.text


def test_of_a_checkpoint_that_was_moved_away_only_the_link_is_deleted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 1, {"trainer": {"step": 1}})
    (run / "global_step_1").rename(tmp_path / "elsewhere")
    (run / "global_step_1").symlink_to(tmp_path / "elsewhere")
    with Checkpoints(run, keep=RetentionPolicy(newest=1)) as checkpoints:
        checkpoints.save(2, {"trainer": {"step": 2}})
    assert sorted(path.name for path in run.iterdir()) == ["global_step_2", layout.LATEST]
    assert (tmp_path / "elsewhere" / layout.MANIFEST).exists()
