"""Where checkpoints are: `global_step_N` folders in the run's folder, each with a manifest, and the tracker
file.

    latest_checkpointed_iteration.txt
    global_step_20/manifest.json                              size and checksum of every file
                   data.json                                  position of the loader
                   trainer.json, trainer.safetensors          counters, random states, KL controller ...
                   actor/model.safetensors, actor/optimizer.safetensors, actor/extra.json ...
                   actor/huggingface/                         when hf_model is among the contents
                   critic/...

A checkpoint is written in a hidden folder in the same place and then renamed, so a visible folder is
complete. Hidden folders were left by a killed process.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from strop.run.atomic_files import Fingerprint, fingerprint, flush_folder, replace_text, write_file

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files are not what was written."""


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint."""

    step: int
    serial: int
    """Counts the saves in a run's folder over all its processes. It orders checkpoints where steps cannot: a
    run that resumed from an earlier checkpoint saves smaller steps later."""
    files: dict[str, Fingerprint]
    """By path inside the checkpoint."""
    parts: list[str]
    """Names of the saved trees."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Validation metrics of these weights."""

    @property
    def size(self) -> int:
        """Bytes on the disk, without the manifest."""
        return sum(file.size for file in self.files.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    files = {}
    for path, file in sorted(manifest.files.items()):
        files[path] = {"bytes": file.size, "crc32": file.crc32}
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "serial": manifest.serial,
        "parts": manifest.parts,
        "metrics": manifest.metrics,
        "files": files,
    }
    write_file(folder / MANIFEST, [json.dumps(content, indent=1).encode()])


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; DamagedCheckpoint where it is missing, unreadable or of another
    format."""
    try:
        text = (folder / MANIFEST).read_text()
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{folder} has no {MANIFEST}: it was not written by Strop, or only a part of it was copied here."
        ) from None
    try:
        content = json.loads(text)
        version = content["format"]
        files = {}
        for path, facts in content["files"].items():
            files[path] = Fingerprint(facts["bytes"], facts["crc32"])
        manifest = Manifest(
            step=content["step"],
            serial=content["serial"],
            parts=content["parts"],
            metrics=content["metrics"],
            files=files,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(
            f"{folder / MANIFEST} cannot be read ({error!r}, {len(text)} characters)."
        ) from error
    if version != FORMAT:
        raise DamagedCheckpoint(
            f"{folder / MANIFEST} has format {version}; this version of Strop reads format {FORMAT}."
        )
    return manifest


def verify(
    folder: Path, files: Mapping[str, Fingerprint], *, contents: Callable[[str], bool] = lambda path: True
) -> None:
    """Refuse a checkpoint with a missing, truncated or changed file. `contents` chooses the files whose
    checksum is computed."""
    for path, expected in files.items():
        file = folder / path
        if not file.is_file():
            raise DamagedCheckpoint(f"{file} is missing.")
        size = file.stat().st_size
        if size != expected.size:
            raise DamagedCheckpoint(
                f"{file} was cut or changed: it has {size} bytes, {expected.size} were written."
            )
        if contents(path) and fingerprint(file) != expected:
            raise DamagedCheckpoint(
                f"{file} was changed: it has the right size but another checksum than what was written."
            )


LATEST = "latest_checkpointed_iteration.txt"
RECORDED = "recorded"
"""Folder of a run with its recorded steps (strop replay); each has a checkpoint of its own."""
_STEP = re.compile(r"global_step_(\d+)")
_SAVING = ".saving_"
_REPLACED = ".replaced_"
_REMOVING = ".removing_"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint with a readable manifest."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def checkpoint_folder(directory: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return directory / f"global_step_{step}"


def step_of(path: Path) -> int | None:
    """The step in a folder's name; None for any other name."""
    match = _STEP.fullmatch(path.name)
    if match is None:
        return None
    return int(match[1])


def step_folders(directory: Path) -> list[Path]:
    """All `global_step_N` folders, complete or not, by step."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: step_of(path) or 0)


def saved_checkpoints(directory: Path) -> list[SavedCheckpoint]:
    """The checkpoints with a readable manifest, in the order in which they were saved."""
    found = []
    for path in step_folders(directory):
        try:
            found.append(SavedCheckpoint(path, read_manifest(path)))
        except DamagedCheckpoint:
            continue
    return sorted(found, key=lambda checkpoint: checkpoint.manifest.serial)


def next_serial(directory: Path) -> int:
    """The serial number of the next checkpoint: one more than that of the newest."""
    checkpoints = saved_checkpoints(directory)
    if not checkpoints:
        return 1
    return max(checkpoints[-1].manifest.serial, 0) + 1


def read_latest(directory: Path) -> int | None:
    """The step in the tracker file; None where there is no such file or it holds no step."""
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
    """Point the tracker file at a step."""
    replace_text(directory / LATEST, str(step))


def candidates(directory: Path) -> list[Path]:
    """Folders to resume from, best first: the latest one, those saved before it, then the rest."""
    latest = read_latest(directory)
    readable = saved_checkpoints(directory)
    limit = math.inf
    for checkpoint in readable:
        if checkpoint.step == latest:
            limit = checkpoint.manifest.serial
            break
    before: list[Path] = []
    after: list[Path] = []
    for checkpoint in reversed(readable):
        target = before if checkpoint.manifest.serial <= limit else after
        target.append(checkpoint.path)
    folders = list(reversed(step_folders(directory)))
    named = [path for path in folders if step_of(path) == latest]
    return list(dict.fromkeys(named + before + after + folders))


def create_staging_folder(directory: Path, step: int) -> Path:
    """Create the hidden folder in which the checkpoint of a step is written."""
    directory.mkdir(parents=True, exist_ok=True)
    clean_up_leftovers(directory)
    path = directory / f"{_SAVING}global_step_{step}"
    path.mkdir()
    return path


def publish(staged: Path, step: int) -> Path:
    """Rename a finished folder to its final name; an older checkpoint of the same step is replaced."""
    directory = staged.parent
    final = checkpoint_folder(directory, step)
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


def clean_up_leftovers(directory: Path) -> None:
    """Delete what a killed process left, and restore a checkpoint that it was about to replace."""
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


class SaveError(OSError):
    """A checkpoint could not be written. Earlier ones are unchanged."""


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Delete the folder if the block raises."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def save_errors(directory: Path, step: int) -> Iterator[None]:
    """Turn an OSError into a SaveError that says what to do."""
    try:
        yield
    except OSError as error:
        kept = ", ".join(checkpoint.path.name for checkpoint in saved_checkpoints(directory)) or "none"
        cause = f"{error.strerror or error}"
        if error.filename:
            cause += f" ({error.filename})"
        failure = SaveError(
            f"Step {step} could not be saved in {directory}: {cause}. Complete checkpoints in that folder: "
            f"{kept}.{_disk_advice(directory, error.errno)}"
        )
        failure.errno = error.errno
        raise failure from error


def _disk_advice(directory: Path, code: int | None) -> str:
    if code not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    free = "disk full"
    if directory.exists():
        free = f"{shutil.disk_usage(directory).free / 1024**3:.2f} GiB free"
    return (
        f" There: {free}. Make room, or keep fewer checkpoints (trainer.max_actor_ckpt_to_keep, "
        "trainer.max_ckpt_mem_gb)."
    )
