"""Where a run starts: latest, previous, named, copied, or the beginning."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec
import pytest
import torch

from strop.run.checkpoint.layout import DamagedCheckpoint, SaveError
from strop.run.checkpoint.resume import delete_checkpoint, resume
from strop.run.checkpoint.retention import RetentionPolicy
from strop.run.checkpoint.store import Checkpoints, layout, remote, save
from tests.run.test_checkpoint import contents


def saves(directory: Path, *steps: int) -> None:
    for step in steps:
        save(directory, step, {"data": {"row": step}, "actor/model": {"w": torch.full((50,), float(step))}})


def cut(directory: Path, step: int, file: str = "actor/model.safetensors") -> None:
    path = directory / f"global_step_{step}" / file
    path.write_bytes(path.read_bytes()[:-100])


@pytest.fixture
def address() -> str:
    return f"memory://{uuid.uuid4().hex}/runs/one"


def test_nothing_there_is_the_beginning(tmp_path: Path) -> None:
    assert resume(tmp_path, mode="auto") is None
    assert resume(tmp_path / "never made", mode="auto") is None
    assert not (tmp_path / "never made").exists()


def test_auto_takes_what_the_tracker_file_names(tmp_path: Path) -> None:
    saves(tmp_path, 1, 2, 3)
    found = resume(tmp_path, mode="auto")
    assert found is not None and found.step == 3 and found.parts["data"] == {"row": 3}
    layout.write_latest(tmp_path, 2)
    found = resume(tmp_path, mode="auto")
    assert found is not None and found.step == 2


@pytest.mark.parametrize("text", [None, "", "global_step_3", "99"])
def test_without_a_usable_tracker_file_the_newest_is_taken(tmp_path: Path, text: str | None) -> None:
    saves(tmp_path, 2, 10)
    (tmp_path / layout.LATEST).unlink() if text is None else (tmp_path / layout.LATEST).write_text(text)
    found = resume(tmp_path, mode="auto")
    assert found is not None and found.step == 10


def test_a_cut_checkpoint_is_reported_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves(tmp_path, 1, 2, 3)
    cut(tmp_path, 3)
    cut(tmp_path, 2, "data.json")
    found = resume(tmp_path, mode="auto")
    assert found is not None and found.step == 1 and found.parts["actor/model"]["w"][0] == 1
    for words in (
        "GOING BACK",
        "global_step_3/actor/model.safetensors was cut",
        "global_step_2/data.json",
        "global_step_1",
    ):
        assert words in caplog.text


def test_a_rewound_run_falls_back_on_what_it_came_from(tmp_path: Path) -> None:
    saves(tmp_path, 1, 2, 3)
    layout.write_latest(tmp_path, 2)
    cut(tmp_path, 2)
    found = resume(tmp_path, mode="auto")
    assert found is not None and found.step == 1


def test_when_all_are_damaged_nothing_starts_over_by_itself(tmp_path: Path) -> None:
    saves(tmp_path, 1)
    cut(tmp_path, 1)
    with pytest.raises(
        DamagedCheckpoint, match=r"No checkpoint in .* can be resumed.*was cut.*resume_mode=disable"
    ):
        resume(tmp_path, mode="auto")
    assert resume(tmp_path, mode="disable") is None


def test_starting_over_says_what_it_leaves_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert resume(tmp_path, mode="disable") is None and not caplog.text
        saves(tmp_path, 1, 2)
        assert resume(tmp_path, mode="disable") is None
    assert "Starting over (trainer.resume_mode=disable)" in caplog.text
    assert "up to global_step_2" in caplog.text and "trainer.resume_mode=auto continues" in caplog.text


def test_a_tracker_file_without_checkpoints_is_an_error(tmp_path: Path) -> None:
    layout.write_latest(tmp_path, 30)
    with pytest.raises(
        ValueError, match=r"names step 30, but there is no checkpoint\. Restore .*global_step_30"
    ):
        resume(tmp_path, mode="auto")


def test_a_half_written_checkpoint_is_ignored_and_cleared(tmp_path: Path) -> None:
    saves(tmp_path, 1)
    layout.create_staging_folder(tmp_path, 2)
    assert (tmp_path / ".saving_global_step_2").exists()
    found = resume(tmp_path, mode="auto")
    assert found is not None and found.step == 1
    assert not (tmp_path / ".saving_global_step_2").exists()


@pytest.mark.parametrize("folder", ["{home}/old", "~/old"])
def test_named_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    saves(tmp_path / "old", 1, 2)
    path = folder.format(home=tmp_path) + "/global_step_1"
    found = resume(tmp_path / "new", mode="resume_path", path=path)
    assert found is not None and found.step == 1
    monkeypatch.chdir(tmp_path)
    found = resume(tmp_path / "new", mode="resume_path", path="old/global_step_2")
    assert found is not None and found.path == tmp_path / "old/global_step_2"
    cut(tmp_path / "old", 1)
    with pytest.raises(DamagedCheckpoint, match="was cut"):
        resume(tmp_path / "new", mode="resume_path", path=path)


def test_wrong_requests_say_what_to_set(tmp_path: Path) -> None:
    saves(tmp_path, 1, 2)
    with pytest.raises(ValueError, match=r"needs trainer\.resume_from_path"):
        resume(tmp_path, mode="resume_path")
    with pytest.raises(ValueError, match=r"name one checkpoint inside it \(global_step_1, global_step_2\)"):
        resume(tmp_path, mode="resume_path", path=str(tmp_path))
    with pytest.raises(ValueError, match="does not exist"):
        resume(tmp_path, mode="resume_path", path=str(tmp_path / "global_step_9"))
    with pytest.raises(ValueError, match="resume_mode='always' is not one of auto, disable, resume_path"):
        resume(tmp_path, mode="always")


def test_the_checkpoint_before_a_deleted_one_is_the_latest(tmp_path: Path) -> None:
    saves(tmp_path, 1, 2)
    delete_checkpoint(tmp_path / "global_step_2")
    assert [path.name for path in layout.step_folders(tmp_path)] == ["global_step_1"] and layout.read_latest(
        tmp_path
    ) == 1
    delete_checkpoint(tmp_path / "global_step_1")
    assert resume(tmp_path, mode="auto") is None and list(tmp_path.iterdir()) == []


def test_copies_are_made_and_resumed_from_when_the_folder_is_empty(tmp_path: Path, address: str) -> None:
    with Checkpoints(tmp_path / "a", copy_to=address, keep=RetentionPolicy(newest=1)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"data": {"row": step}, "actor/model": {"w": torch.rand(9)}})
    system, root = fsspec.core.url_to_fs(address)
    assert system.cat_file(f"{root}/{layout.LATEST}") == b"2"
    found = resume(tmp_path / "b", mode="auto", copied_to=address)
    assert found is not None and found.step == 2 and found.path == tmp_path / "b/global_step_2"
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    saves(tmp_path / "c", 7)
    found = resume(tmp_path / "c", mode="auto", copied_to=address)
    assert found is not None and found.step == 7
    found = resume(tmp_path / "d", mode="resume_path", path=f"{address}/global_step_1")
    assert found is not None and found.step == 1
    assert resume(tmp_path / "e", mode="auto", copied_to=f"{address}/other") is None


def test_damaged_and_unfinished_copies_are_passed_over(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    saves(tmp_path / "a", 1, 2, 3)
    for step in (1, 2, 3):
        remote.upload(tmp_path / "a" / f"global_step_{step}", address)
    system, root = fsspec.core.url_to_fs(address)
    system.rm_file(f"{root}/global_step_3/manifest.json")
    system.pipe_file(f"{root}/global_step_2/data.json", b"{")
    found = resume(tmp_path / "b", mode="auto", copied_to=address)
    assert found is not None and found.step == 1
    assert "GOING BACK" in caplog.text and "data.json was cut" in caplog.text
    assert [path.name for path in layout.step_folders(tmp_path / "b")] == ["global_step_1"]


def test_a_copy_that_fails_is_made_up_for_with_the_next_save(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, copy_to=address)
    with monkeypatch.context() as patch:
        patch.setattr(remote, "upload", _unreachable)
        checkpoints.save(1, {"data": {}})
        checkpoints.wait()
        assert "will be tried again: no route" in caplog.text
    checkpoints.save(2, {"data": {}})
    checkpoints.close()
    assert [name.rpartition("_")[2] for name in remote.candidates(address)] == ["2", "1"]


def test_a_copy_that_fails_is_made_up_for_at_the_end(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpoints(tmp_path, copy_to=address) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(remote, "upload", _unreachable)
            checkpoints.save(1, {"data": {}})
            checkpoints.wait()
        assert remote.candidates(address) == []
    assert [name.rpartition("_")[2] for name in remote.candidates(address)] == ["1"]


def test_a_copy_that_never_worked_is_an_error_at_the_end(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "upload", _unreachable)
    checkpoints = Checkpoints(tmp_path, copy_to=address)
    checkpoints.save(1, {"data": {}})
    with pytest.raises(
        SaveError, match=r"could not be copied to memory://.* are complete on this machine: no route"
    ):
        checkpoints.close()
    assert resume(tmp_path, mode="auto") is not None


def _unreachable(path: Path, address: str) -> None:
    raise ConnectionError("no route")
