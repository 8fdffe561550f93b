"""Where checkpoints lie: `global_step_N` folders in the run's folder, and a small file that names the latest.

    latest_checkpointed_iteration.txt
    global_step_20/manifest.json
                   data.json                                  position of the loader
                   trainer.json, trainer.safetensors          counters, random states, KL controller ...
                   actor/model.safetensors, actor/optimizer.safetensors, actor/extra.json ...
                   actor/huggingface/                         when hf_model is among the contents
                   critic/...

A checkpoint is written in a hidden folder beside and renamed, so a visible folder is a complete one. Hidden folders are what a
killed process left.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from strop.run.durable import flush_folder, replace_text
from strop.run.manifest import DamagedCheckpoint, Manifest, read_manifest

log = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
RECORDED = "recorded"
"""Folder of a run with the steps that were stored whole; each has a checkpoint of its own."""
_STEP = re.compile(r"global_step_(\d+)")
_SAVING, _REPLACED, _REMOVING = ".saving_", ".replaced_", ".removing_"


@dataclass(frozen=True)
class Saved:
    """A checkpoint on the disk whose manifest can be read."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def folder_of(directory: Path, step: int) -> Path:
    return directory / f"global_step_{step}"


def step_of(path: Path) -> int | None:
    """The step in a folder's name; None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def step_folders(directory: Path) -> list[Path]:
    """All `global_step_N` folders, complete or not, by step."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: step_of(path) or 0)


def saved(directory: Path) -> list[Saved]:
    """The checkpoints with a readable manifest, in the order in which they were made."""
    found = []
    for path in step_folders(directory):
        try:
            found.append(Saved(path, read_manifest(path)))
        except DamagedCheckpoint:
            continue
    return sorted(found, key=lambda checkpoint: checkpoint.manifest.serial)


def read_latest(directory: Path) -> int | None:
    """The step the tracker file names; None when there is no such file or it names none."""
    try:
        text = (directory / LATEST).read_text()
    except FileNotFoundError:
        return None
    try:
        return int(text)
    except ValueError:
        log.warning("%s holds %r instead of a step; it is ignored.", directory / LATEST, text[:40])
        return None


def write_latest(directory: Path, step: int) -> None:
    replace_text(directory / LATEST, str(step))


def candidates(directory: Path) -> list[Path]:
    """Folders to resume from, best first: the latest one, those made before it, then the rest."""
    latest = read_latest(directory)
    readable = saved(directory)
    limit = next((checkpoint.manifest.serial for checkpoint in readable if checkpoint.step == latest), math.inf)
    before = [checkpoint.path for checkpoint in reversed(readable) if checkpoint.manifest.serial <= limit]
    after = [checkpoint.path for checkpoint in reversed(readable) if checkpoint.manifest.serial > limit]
    folders = list(reversed(step_folders(directory)))
    named = [path for path in folders if step_of(path) == latest]
    return list(dict.fromkeys(named + before + after + folders))


def stage(directory: Path, step: int) -> Path:
    """A new hidden folder in which the checkpoint of a step is written."""
    directory.mkdir(parents=True, exist_ok=True)
    recover(directory)
    path = directory / f"{_SAVING}global_step_{step}"
    path.mkdir()
    return path


def publish(staged: Path, step: int) -> Path:
    """Give a finished folder its name. An older checkpoint of the same step is there until the new one is."""
    directory = staged.parent
    final = folder_of(directory, step)
    old = directory / f"{_REPLACED}{final.name}"
    if final.exists():
        final.rename(old)
    staged.rename(final)
    flush_folder(directory)
    if old.exists():
        shutil.rmtree(old)
    return final


def remove(path: Path) -> None:
    """Delete a whole checkpoint; a crash halfway leaves nothing that looks like one."""
    hidden = path.with_name(f"{_REMOVING}{path.name}")
    path.rename(hidden)
    flush_folder(path.parent)
    shutil.rmtree(hidden)


def recover(directory: Path) -> None:
    """Clear away what a killed process left, and bring back a checkpoint that it was about to replace."""
    if not directory.is_dir():
        return
    for path in list(directory.iterdir()):
        if path.name.startswith(_REPLACED):
            final = directory / path.name.removeprefix(_REPLACED)
            if not final.exists():
                path.rename(final)
                continue
        if path.name.startswith((_SAVING, _REPLACED, _REMOVING)):
            log.info("Removing %s, left by a process that did not finish.", path)
            shutil.rmtree(path, ignore_errors=True)
