"""Where a run goes on: from the latest checkpoint that is whole, from a named one, or from the beginning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from strop.run import layout, remote
from strop.run.checkpoint import load
from strop.run.manifest import DamagedCheckpoint, read_manifest
from strop.run.tree import Tree

log = logging.getLogger(__name__)

Reader = Callable[[Path], dict[str, Tree]]
MODES = ("auto", "disable", "resume_path")


@dataclass(frozen=True)
class Resumed:
    path: Path
    step: int
    parts: dict[str, Tree]


def resume(
    directory: str | Path,
    *,
    mode: str = "auto",
    path: str | None = None,
    copied_to: str | None = None,
    only: Callable[[str], bool] = lambda part: True,
    later: Callable[[str], bool] = lambda part: False,
    delete_after_load: bool = False,
) -> Resumed | None:
    """What a run starts from; None for the beginning.

    auto: the latest checkpoint in `directory`, or where it is damaged the one before it; without any whole one there, the
    copies at `copied_to`. resume_path: the folder or address `path` and no other. disable: the beginning. `only` and
    `later` are those of `load`.
    """
    home = Path(directory)
    if mode not in MODES:
        raise ValueError(f"trainer.resume_mode={mode!r} is not one of {', '.join(MODES)}.")
    if mode == "disable":
        return None
    read = partial(load, only=only, later=later)
    found = _named(home, path, read) if mode == "resume_path" else _automatic(home, copied_to, read)
    if found is not None and delete_after_load:
        delete(found.path)
    return found


def _named(home: Path, path: str | None, read: Reader) -> Resumed:
    if path is None:
        raise ValueError("trainer.resume_mode=resume_path needs trainer.resume_from_path, a global_step_N folder.")
    folder = remote.fetch(path, home) if remote.is_address(path) else Path(path)
    if (folder / layout.LATEST).exists():
        inside = ", ".join(found.name for found in layout.step_folders(folder)) or "nothing"
        raise ValueError(
            f"trainer.resume_from_path={path} is the folder of a run; name one checkpoint inside it ({inside}), or set "
            f"trainer.default_local_dir={path} and trainer.resume_mode=auto."
        )
    return _load(folder, read)


def _automatic(home: Path, copied_to: str | None, read: Reader) -> Resumed | None:
    layout.recover(home)
    problems: list[str] = []
    found = _first_whole((partial(Path, folder) for folder in layout.candidates(home)), read, problems)
    if found is None and copied_to is not None:
        copies = remote.candidates(copied_to)
        found = _first_whole((partial(remote.fetch, address, home) for address in copies), read, problems)
    if found is not None:
        if problems:
            log.warning("GOING BACK to %s (step %d), because of damage: %s", found.path, found.step, " ".join(problems))
        return found
    if problems:
        raise DamagedCheckpoint(
            f"No checkpoint in {home} can be resumed: {' '.join(problems)} Restore one, or set trainer.resume_mode=disable to "
            "start over."
        )
    latest = layout.read_latest(home)
    if latest is not None:
        raise ValueError(
            f"{home / layout.LATEST} names step {latest}, but there is no checkpoint. "
            f"Restore {layout.folder_of(home, latest)}, or set trainer.resume_mode=disable to start over."
        )
    return None


def _first_whole(folders: Iterable[Callable[[], Path]], read: Reader, problems: list[str]) -> Resumed | None:
    for folder in folders:
        try:
            return _load(folder(), read)
        except DamagedCheckpoint as error:
            problems.append(str(error))
    return None


def _load(folder: Path, read: Reader) -> Resumed:
    parts = read(folder)
    return Resumed(folder.absolute(), read_manifest(folder).step, parts)


def delete(path: Path) -> None:
    """Remove a checkpoint that was loaded, and let the tracker file name the one before it."""
    layout.remove(path)
    directory = path.parent
    remaining = layout.saved(directory)
    if not remaining:
        (directory / layout.LATEST).unlink(missing_ok=True)
    elif layout.read_latest(directory) == layout.step_of(path):
        layout.write_latest(directory, remaining[-1].step)
