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
PART = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)*")
"""Names of saved trees: letters, digits, _ . - and / between folders."""


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
    if (folder / MANIFEST).is_fifo():  # its reader would wait for ever
        raise DamagedCheckpoint(f"{folder / MANIFEST} is no file.")
    try:
        data = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{folder} has no {MANIFEST}: it was not written by Strop, or only a part of it was copied here."
        ) from None
    except OSError as error:
        raise DamagedCheckpoint(f"{folder / MANIFEST} cannot be read: {error.strerror}.") from error
    try:
        content = json.loads(data)
        version = content["format"]
        manifest = None
        if type(version) is int and version == FORMAT:
            manifest = _checked(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"{folder / MANIFEST} cannot be read ({repr(error)[:300]}, {len(data)} bytes)."
        ) from error
    if manifest is None:
        raise DamagedCheckpoint(
            f"{folder / MANIFEST} has format {str(version)[:40]}; this version of Strop reads format "
            f"{FORMAT}."
        )
    return manifest


def _checked(content: Mapping[str, object]) -> Manifest:
    """The manifest, if every value has the type and range of what `write_manifest` writes. Paths must stay
    inside the checkpoint: `remote.fetch` creates files by these names."""
    files: dict[str, Fingerprint] = {}
    for path, facts in _mapping(content, "files").items():
        if not _is_inside(path) or path == MANIFEST:
            raise ValueError(f"{path[:80]!r} is no file inside a checkpoint")
        if not isinstance(facts, Mapping):
            raise TypeError(f"the facts of {path[:80]!r} are a {type(facts).__name__}")
        files[path] = Fingerprint(_count(facts, "bytes"), _count(facts, "crc32"))
    parts = content["parts"]
    if not isinstance(parts, list):
        raise TypeError("parts is no list")
    for part in parts:
        if not isinstance(part, str) or not PART.fullmatch(part):
            raise ValueError(f"{str(part)[:80]!r} is no name of a part")
    metrics: dict[str, float] = {}
    for name, value in _mapping(content, "metrics").items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"the metric {name[:80]!r} is no number")
        metrics[name] = value
    return Manifest(
        step=_count(content, "step"),
        serial=_count(content, "serial"),
        parts=parts,
        metrics=metrics,
        files=files,
    )


def _mapping(content: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = content[key]
    if not isinstance(value, dict):
        raise TypeError(f"{key} has no keys and values")
    return value


def _count(content: Mapping[str, object], key: str) -> int:
    value = content[key]
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{key} is {str(value)[:40]}")
    return value


def _is_inside(path: str) -> bool:
    """Whether a path with slashes names a file below the folder that it is relative to."""
    names = path.split("/")
    return not any(name in ("", ".", "..") or "\0" in name or "\\" in name for name in names)


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
    if (directory / LATEST).is_fifo():
        return None
    try:
        text = (directory / LATEST).read_bytes()
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
        _delete(old, ignore_errors=True)  # if something holds it, the next save tries again
    return final


def remove(path: Path) -> None:
    """Delete a whole checkpoint; a crash halfway leaves nothing that looks like one. Of a link, the folder
    that it names stays."""
    hidden = path.with_name(f"{_REMOVING}{path.name}")
    path.rename(hidden)
    flush_folder(path.parent)
    _delete(hidden)


def _delete(path: Path, *, ignore_errors: bool = False) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=ignore_errors)


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
            _delete(path, ignore_errors=True)


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
        "max_ckpt_to_keep in supervised training; or trainer.max_ckpt_mem_gb)."
    )
