"""Damaged and hostile checkpoints: what is read is what was written, or the error is a DamagedCheckpoint."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from strop.run.checkpoint import layout, remote
from strop.run.checkpoint.layout import DamagedCheckpoint, read_manifest, saved_checkpoints
from strop.run.checkpoint.resume import resume
from strop.run.checkpoint.shards import TensorPiece, open_tensors, write_pieces
from strop.run.checkpoint.store import load, save
from tests.run.hostile_files import sign
from tests.run.test_tree import same

PARTS: dict[str, Any] = {
    "data": {"epoch": 1, "order": [3, 1, 2], "pair": (1, 2.5)},
    "trainer": {"step": 3, "nothing": None, "noise": torch.arange(4), 5: "five"},
    "actor/model": {"weight": torch.arange(6.0).reshape(2, 3)},
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("run"), 3, PARTS)


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "global_step_3")


def rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


# --- manifests ----------------------------------------------------------------------------------------------

WRONG: list[object] = [None, True, -1, 1.5, 10**400, float("nan"), "x", "../../x", [], [1], {}, {"a": 1}]
WRONG += [{"a": "x"}, {"a": False}]


@pytest.mark.parametrize("key", ["format", "step", "serial", "parts", "metrics", "files"])
def test_wrong_values_in_a_manifest(checkpoint: Path, key: str) -> None:
    right = json.loads((checkpoint / layout.MANIFEST).read_text())[key]
    for value in WRONG:
        harmless = (key in ("metrics", "files") and value == {}) or (key == "parts" and value == [])
        if harmless or (type(value) is type(right) is int and value >= 0 and value < 2**63):
            continue
        rewrite(checkpoint / layout.MANIFEST, lambda content, value=value: content.update({key: value}))
        if (key, value) == ("metrics", {"a": 1}):
            assert read_manifest(checkpoint).metrics == {"a": 1}
            continue
        with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
            load(checkpoint)
        assert saved_checkpoints(checkpoint.parent) == []
        assert layout.candidates(checkpoint.parent) == [checkpoint], "it is named when a run cannot resume"


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": ' + b"9" * 5000]
)
def test_manifests_that_are_no_manifests(checkpoint: Path, text: bytes) -> None:
    (checkpoint / layout.MANIFEST).write_bytes(text)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json cannot be read"):
        load(checkpoint)
    with pytest.raises(DamagedCheckpoint, match="resume_mode=disable"):
        resume(checkpoint.parent, mode="auto")


def test_a_folder_in_the_place_of_the_manifest(checkpoint: Path) -> None:
    (checkpoint / layout.MANIFEST).unlink()
    (checkpoint / layout.MANIFEST).mkdir()
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json cannot be read"):
        read_manifest(checkpoint)


OUTSIDE = [
    "../outside",
    "/etc/passwd",
    "a/../../outside",
    "a//b",
    "./a",
    "",
    "a\\..\\b",
    "a\0b",
    "manifest.json",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_files_outside_of_the_checkpoint(checkpoint: Path, name: str) -> None:
    facts = {"bytes": 1, "crc32": 1}
    rewrite(checkpoint / layout.MANIFEST, lambda content: content["files"].update({name: facts}))
    with pytest.raises(DamagedCheckpoint, match="is no file inside a checkpoint"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["../data", "/etc/passwd", "a/../data", "", "$", ".hidden"])
def test_parts_outside_of_the_checkpoint(checkpoint: Path, name: str) -> None:
    rewrite(checkpoint / layout.MANIFEST, lambda content: content["parts"].append(name))
    with pytest.raises(DamagedCheckpoint, match="is no name of a part"):
        load(checkpoint)


def test_a_hostile_copy_writes_nothing_outside(original: Path, tmp_path: Path) -> None:
    """The files of a copy are created by the names in its manifest."""
    bucket = f"memory://{tmp_path.name}"
    remote.upload(original, bucket)
    system, root = fsspec.core.url_to_fs(bucket)
    place = f"{root}/global_step_3/{layout.MANIFEST}"
    manifest = json.loads(system.cat_file(place))
    manifest["files"]["../../written"] = {"bytes": 4, "crc32": 0}
    system.pipe_file(place, json.dumps(manifest).encode())
    system.pipe_file(f"{root}/written", b"evil")
    home = tmp_path / "runs" / "mine"
    with pytest.raises(DamagedCheckpoint, match="is no file inside a checkpoint"):
        remote.fetch(f"{bucket}/global_step_3", home)
    assert not (tmp_path / "written").exists() and not (tmp_path / "runs" / "written").exists()
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("text", [b"", b"x", b"\xff\xfe", b"9" * 5000, b"-1", b"nan"])
def test_a_tracker_file_without_a_step(checkpoint: Path, text: bytes) -> None:
    (checkpoint.parent / layout.LATEST).write_bytes(text)
    found = resume(checkpoint.parent, mode="auto")
    assert found is not None and found.step == 3


# --- parts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"a": ' * 600 + b"1" + b"}" * 600,
        b"9" * 5000,
        b'{"$tensor": "nowhere"}',
        b'{"$tensor": [1]}',
        b'{"$tuple": 3}',
        b'{"$dict": [1, 2]}',
        b'{"$dict": [[[1], 2]]}',
        b'{"$dict": {"a": 1}}',
        b'{"$float": {}}',
        b'{"$float": "x"}',
        b'{"$code": "import os"}',
    ],
    ids=range(15),
)
def test_parts_with_right_checksums_that_no_run_wrote(checkpoint: Path, text: bytes) -> None:
    (checkpoint / "trainer.json").write_bytes(text)
    sign(checkpoint)
    with pytest.raises(DamagedCheckpoint, match=r"The part 'trainer' of .* cannot be read"):
        load(checkpoint)


def test_a_part_without_its_file(checkpoint: Path) -> None:
    rewrite(checkpoint / layout.MANIFEST, lambda content: content["parts"].append("critic/model"))
    with pytest.raises(DamagedCheckpoint, match=r"The part 'critic/model' of .* cannot be read"):
        load(checkpoint)


@pytest.mark.parametrize(
    "offsets",
    [
        {"saved_offsets": [10**15, 0]},
        {"saved_offsets": [-1, 0]},
        {"saved_offsets": [10**400, 0]},
        {"saved_offsets": [0]},
        {"saved_offsets": "x"},
        {"saved_offsets": [0.5, 0]},
        {},
        [],
        None,
    ],
)
def test_offsets_of_shards(tmp_path: Path, offsets: object) -> None:
    """An offset of 10**15 must not allocate that many numbers."""
    file = tmp_path / "shard.safetensors"
    write_pieces(file, {"weight": TensorPiece(torch.ones(2, 3), (0, 0))})
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps({"weight": offsets})
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises((ValueError, LookupError, TypeError)):  # the store names the part
        open_tensors([file])["weight"].read()


# --- mutations ----------------------------------------------------------------------------------------------


def damage(file: Path, chance: random.Random) -> None:
    data = file.read_bytes()
    kind = chance.choice(["flip", "flip", "cut", "remove", "repeat", "absent", "empty", "folder"])
    place = chance.randrange(len(data))
    length = chance.randrange(1, 40)
    if kind == "flip":
        changed = bytearray(data)
        changed[place] = chance.randrange(256)
        file.write_bytes(bytes(changed))
    elif kind == "cut":
        file.write_bytes(data[:place])
    elif kind == "remove":
        file.write_bytes(data[:place] + data[place + length :])
    elif kind == "repeat":
        file.write_bytes(data[:place] + data[place : place + length] + data[place:])
    elif kind == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        if kind == "folder":
            file.mkdir()


def test_damaged_files_are_refused(checkpoint: Path) -> None:
    """150 damaged checkpoints; a flipped byte may be the one that was there, or white space of the manifest."""
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    refused = 0
    for case in range(150):
        chance = random.Random(case)
        victim = chance.choice([*files, checkpoint / layout.MANIFEST])
        before = victim.read_bytes()
        damage(victim, chance)
        try:
            found = load(checkpoint)
            # Metrics, the step and the list of parts have no checksum.
            assert victim.name == layout.MANIFEST or same(found, PARTS), f"case {case}: {victim.name}"
        except DamagedCheckpoint:
            refused += 1
        if victim.is_dir():
            victim.rmdir()
        victim.write_bytes(before)
    assert refused > 120


def test_changed_parts_with_right_checksums(checkpoint: Path) -> None:
    """200 changed JSON and safetensors files, signed anew: trees of plain values, or DamagedCheckpoint."""
    names = ["trainer.json", "trainer.safetensors", "actor/model.safetensors", "data.json"]
    refused = 0
    for case in range(200):
        chance = random.Random(case)
        victim = checkpoint / chance.choice(names)
        before = victim.read_bytes()
        data = bytearray(before)
        for _ in range(chance.choice([1, 2, 8])):
            data[chance.randrange(min(len(data), 400))] = chance.randrange(256)
        victim.write_bytes(bytes(data))
        sign(checkpoint)
        try:
            assert set(load(checkpoint)) == set(PARTS)
        except DamagedCheckpoint:
            refused += 1
        victim.write_bytes(before)
    assert refused > 80
