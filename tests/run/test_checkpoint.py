"""Saving and loading: exact, atomic, checked, in the background."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.run.atomic_files import Fingerprint
from strop.run.checkpoint import layout, shards
from strop.run.checkpoint import store as checkpoint
from strop.run.checkpoint.contents import capture_random_states
from strop.run.checkpoint.layout import DamagedCheckpoint, SaveError
from strop.run.checkpoint.store import Checkpoints, Export, load, save
from tests.run.test_tree import same


def state(seed: int = 0) -> dict[str, Any]:
    """A small run: model, optimizer after a step, loader, counters, random states."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 8).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return {
        "data": {"epoch": 1, "row": 96, "order": [3, 1, 2]},
        "trainer": {
            "step": 20,
            "kl_coef": 0.1 + 0.2,
            "random": capture_random_states(),
            "note": None,
        },
        "actor/model": dict(model.state_dict()),
        "actor/optimizer": optimizer.state_dict(),
        "critic/model": {"head": torch.rand(3, dtype=torch.float64)},
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_checkpoint_comes_back_bit_for_bit_in_the_known_layout(tmp_path: Path) -> None:
    parts = state()
    path = save(tmp_path, 20, parts)
    assert path == tmp_path / "global_step_20"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "20"
    assert {
        "data.json",
        "trainer.json",
        "trainer.safetensors",
        "actor/model.safetensors",
        "critic/model.json",
    } <= set(contents(path))
    assert not (path / "data.safetensors").exists()
    loaded = load(path)
    assert loaded.keys() == parts.keys()
    assert all(same(parts[name], loaded[name]) for name in parts)
    optimizer = torch.optim.AdamW(torch.nn.Linear(8, 8).to(torch.bfloat16).parameters())
    optimizer.load_state_dict(loaded["actor/optimizer"])
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_only_the_chosen_parts_are_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1, state())
    (path / "critic/model.safetensors").write_bytes(b"?" * (path / "critic/model.safetensors").stat().st_size)
    assert set(load(path, only=lambda name: name.startswith("actor/"))) == {"actor/model", "actor/optimizer"}
    with pytest.raises(DamagedCheckpoint, match=r"critic/model\.safetensors was changed"):
        load(path)


def test_background_and_blocking_saves_write_the_same_bytes(tmp_path: Path) -> None:
    parts = state()
    export = {
        "actor/huggingface": Export(
            parts["actor/model"], lambda folder: (folder / "config.json").write_text("{}")
        )
    }
    for name, background in (("a", True), ("b", False)):
        with Checkpoints(tmp_path / name, background=background) as checkpoints:
            checkpoints.save(5, parts, exports=export, metrics={"val/acc": 0.5})
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_training_goes_on_while_the_old_values_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    real = checkpoint.commit
    monkeypatch.setattr(checkpoint, "commit", lambda plan: (gate.wait(60), real(plan))[1])
    weight, rows = torch.zeros(1000), [1]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"actor/model": {"w": weight}, "data": {"rows": rows}})
    weight += 1
    rows.append(2)
    assert layout.saved_checkpoints(tmp_path) == []
    gate.set()
    checkpoints.close()
    loaded = load(tmp_path / "global_step_1")
    assert loaded["actor/model"]["w"].abs().sum() == 0 and loaded["data"] == {"rows": [1]}


def test_saves_wait_for_each_other(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, {"actor/model": {"w": torch.full((1000,), float(step))}})
    assert [c.step for c in layout.saved_checkpoints(tmp_path)] == [1, 2, 3, 4, 5]
    assert [c.manifest.serial for c in layout.saved_checkpoints(tmp_path)] == [1, 2, 3, 4, 5]
    assert all(load(c.path)["actor/model"]["w"][0] == c.step for c in layout.saved_checkpoints(tmp_path))


@pytest.mark.parametrize("call", ["wait", "close"])
def test_an_error_in_the_background_surfaces_at_the_next_call_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    save(tmp_path, 1, state())
    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        checkpoints.save(2, state())
        assert checkpoints._thread is not None
        checkpoints._thread.join()
    assert "Saving step 2 failed" in caplog.text
    with pytest.raises(SaveError, match="Step 2 could not be saved"):
        getattr(checkpoints, call)()
    checkpoints.save(4, state())
    checkpoints.close()
    assert [c.step for c in layout.saved_checkpoints(tmp_path)] == [1, 4]


def test_after_an_error_in_the_background_the_next_save_writes_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        checkpoints.save(1, state())
        with pytest.raises(SaveError, match="Step 2 could not be saved"):
            checkpoints.save(2, state())
    checkpoints.save(3, state())
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        checkpoints.save(4, state())
        assert checkpoints.failed_on_any_rank()
    checkpoints.save(5, state())
    assert [c.step for c in layout.saved_checkpoints(tmp_path)] == [3, 5], "before close"
    checkpoints.close()


def _no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_leaves_earlier_checkpoints_and_no_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    parts = state()
    save(tmp_path, 10, parts)
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_space)
        with pytest.raises(SaveError) as caught, Checkpoints(tmp_path, background=background) as checkpoints:
            checkpoints.save(20, parts)
    assert caught.value.errno == errno.ENOSPC
    for words in (
        "Step 20",
        str(tmp_path),
        "No space left on device",
        "global_step_10",
        "max_actor_ckpt_to_keep",
    ):
        assert words in str(caught.value)
    assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step_10",
        "latest_checkpointed_iteration.txt",
    ]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Any:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount here")
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_cannot_flush_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """SMB and some FUSE file systems refuse it; an error of the disk is another code."""
    fsync = os.fsync

    def flush(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    parts = state()
    if code == errno.EIO:
        with pytest.raises(SaveError, match="Input/output error"):
            save(tmp_path, 20, parts)
        return
    assert same(load(save(tmp_path, 20, parts)), parts)


def test_a_disk_that_is_really_full(tiny_disk: Path) -> None:
    parts = {"actor/model": {"w": torch.rand(100_000)}}
    save(tiny_disk, 1, parts)
    save(tiny_disk, 2, parts)
    with pytest.raises(SaveError, match="No space left on device"):
        save(tiny_disk, 3, parts)
    assert [c.step for c in layout.saved_checkpoints(tiny_disk)] == [1, 2]
    assert same(load(tiny_disk / "global_step_2"), parts)
    assert layout.read_latest(tiny_disk) == 2
    layout.remove(tiny_disk / "global_step_1")
    save(tiny_disk, 3, parts)


@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount here")
@pytest.mark.parametrize("problem", ["full disk", "another error"])
def test_rank_0_does_not_wait_for_a_rank_that_could_not_write(
    tiny_disk: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    """On a full disk there is no room for the receipt of the error either."""
    monkeypatch.setattr(shards, "RECEIPT_TIMEOUT", 0.0)
    file = tiny_disk / shards.shard_file("actor/model", 1)

    def write() -> dict[str, Fingerprint]:
        if problem == "full disk":
            return {"": shards.write_pieces(file, {"w": shards.TensorPiece(torch.zeros(10**6), (0,))})}
        raise RuntimeError("a device failed")

    with pytest.raises((OSError, RuntimeError)):
        shards.write_with_receipt(tiny_disk, 1, write)
    text = {"full disk": "rank 1: .*No space left", "another error": "rank 1: a device failed"}[problem]
    with pytest.raises(OSError, match=text):
        shards.collect_receipts(tiny_disk, 2)
    assert not file.exists()


def test_every_cut_missing_or_changed_file_is_found_and_named(tmp_path: Path) -> None:
    path = save(tmp_path, 3, state(), exports={"actor/huggingface": Export({"w": torch.rand(5)})})
    for name, content in contents(path).items():
        file = path / name
        damages = {"cut": content[: len(content) // 2], "missing": None}
        if name != "manifest.json" and "huggingface" not in name:
            damages["changed"] = content[:-1] + bytes([content[-1] ^ 1])
        for kind, damaged in damages.items():
            file.unlink() if damaged is None else file.write_bytes(damaged)
            with pytest.raises(DamagedCheckpoint, match=file.name):
                load(path)
            file.write_bytes(content)
            assert kind
    assert same(load(path), state())


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        save(tmp_path, 7, {"actor/model": {"w": torch.tensor(value)}})
    assert load(tmp_path / "global_step_7")["actor/model"]["w"] == 2
    assert [c.manifest.serial for c in layout.saved_checkpoints(tmp_path)] == [2]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_failing_export_leaves_nothing(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("no tokenizer")

    with pytest.raises(RuntimeError, match="no tokenizer"):
        Checkpoints(tmp_path).save(1, {}, exports={"actor/huggingface": Export({}, broken)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "/etc/x", "", ".hidden", "a//b", "a/../b", "manifest"])
def test_names_of_parts_stay_inside_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a part"):
        save(tmp_path, 1, {name: {}})


def test_a_missing_or_foreign_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load(tmp_path / "global_step_1")
    (tmp_path / "global_step_1").mkdir()
    with pytest.raises(DamagedCheckpoint, match="not written by Strop"):
        load(tmp_path / "global_step_1")


def test_nothing_that_is_loaded_can_be_code(tmp_path: Path) -> None:
    path = save(tmp_path, 1, state())
    assert {Path(name).suffix for name in contents(path)} == {".json", ".safetensors"}
    for name in contents(path):
        if name.endswith(".json"):
            json.loads((path / name).read_text())


def test_transformers_loads_the_exported_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(
            1, {"data": {}}, exports={"actor/huggingface": Export(model.state_dict(), config.save_pretrained)}
        )
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "global_step_1/actor/huggingface")
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
