"""Checkpoints: a run's whole state on the disk, exact, atomic, and free of anything that could run code when it is loaded.

    with Checkpoints("checkpoints/gsm8k/grpo", keep=Keep(newest=3)) as checkpoints:
        ...
        checkpoints.save(20, {"data": loader.state_dict(), "trainer": {...}, "actor/model": weights, "actor/optimizer": ...})

    load("checkpoints/gsm8k/grpo/global_step_20")  # the same trees, bit for bit

A part is a tree (see tree.py) with a name; it becomes `<name>.json` and, where it has tensors, `<name>.safetensors`.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from strop.ranks import Ranks
from strop.run import layout, remote
from strop.run.durable import Fingerprint, flush_file, flush_tree, write_file
from strop.run.handover import leave_note, notes
from strop.run.manifest import DamagedCheckpoint, Manifest, read_manifest, verify, write_manifest
from strop.run.retention import Keep, prune
from strop.run.shards import Piece, open_tensors, piece_of, shard_file, write_pieces
from strop.run.tensor_file import read_tensors, write_tensors
from strop.run.tree import Tree, host_copies, join, split

log = logging.getLogger(__name__)

_PART = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)*")


class SaveError(OSError):
    """A checkpoint could not be written. Earlier ones are as they were."""


@dataclass(frozen=True)
class Export:
    """A folder that another library loads, such as `actor/huggingface`."""

    weights: Mapping[str, Tensor]
    """Become model.safetensors."""
    write_files: Callable[[Path], object] = lambda folder: None
    """Writes the small files beside (config, tokenizer) into the folder it is given. Called before `save` returns."""


@dataclass
class Draft:
    """A checkpoint on its way to the disk."""

    folder: Path
    step: int
    texts: dict[str, Any]
    """JSON values by part."""
    tensors: dict[str, Mapping[str, Tensor]]
    """Tensors by path of their file."""
    pieces: dict[str, dict[str, Piece]] = field(default_factory=dict)
    """What this rank has of tensors that are divided, by path of their file."""
    metrics: dict[str, float] = field(default_factory=dict)
    ranks: Ranks = field(default_factory=Ranks)


def save(
    directory: str | Path,
    step: int,
    parts: Mapping[str, Tree],
    *,
    exports: Mapping[str, Export] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Path:
    """Write `directory/global_step_<step>` and name it the latest; returns when it is safe on the disk.

    `metrics` are the validation results of these weights, by which the best checkpoint is known later.
    """
    return commit(draft(Path(directory), step, parts, exports=exports, metrics=metrics, copy=False))


def load(
    path: str | Path,
    *,
    only: Callable[[str], bool] = lambda part: True,
    later: Callable[[str], bool] = lambda part: False,
    check: bool = True,
) -> dict[str, Tree]:
    """The parts of a checkpoint, on the CPU; `only` chooses them by name. A damaged file is named in the error.

    In the parts that `later` names, a SavedTensor stands for each tensor and is read when somebody asks. Without `check` nobody
    looks whether contents are still what was written: another rank does.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"There is no checkpoint {folder}: the folder does not exist.")
    manifest = read_manifest(folder)
    names = [name for name in manifest.parts if only(name)]
    verify(folder, manifest.files, contents=lambda file: check and any(_belongs(file, name) for name in names))
    return {name: _read_part(folder, name, manifest.files, later(name)) for name in names}


def draft(
    directory: Path,
    step: int,
    parts: Mapping[str, Tree],
    *,
    exports: Mapping[str, Export] | None = None,
    metrics: Mapping[str, float] | None = None,
    copy: bool,
    ranks: Ranks | None = None,
) -> Draft:
    """Everything a save needs of the running process. With `copy`, training may go on before `commit`.

    Rank 0 writes what is whole; of tensors that are divided every rank writes its pieces.
    """
    ranks = ranks or Ranks()
    exports = exports or {}
    _check_names([*parts, *exports])
    texts: dict[str, Any] = {}
    tensors: dict[str, Mapping[str, Tensor]] = {}
    pieces: dict[str, dict[str, Piece]] = {}
    for name, tree in parts.items():
        texts[name], found = split(tree, name=name)
        divided = {key: piece_of(tensor) for key, tensor in found.items() if isinstance(tensor, DTensor)}
        mine = {key: piece for key, piece in divided.items() if piece is not None}
        if mine:
            pieces[shard_file(name, ranks.rank)] = mine
        if found.keys() - divided.keys():
            tensors[f"{name}.safetensors"] = {key: tensor for key, tensor in found.items() if key not in divided}
    for name, export in exports.items():
        _, tensors[f"{name}/model.safetensors"] = split(dict(export.weights), name=name)
    tensors = tensors if ranks.lead else {}
    if copy:
        tensors = {path: host_copies(group) for path, group in tensors.items()}
        pieces = {path: _copied(group) for path, group in pieces.items()}
    staged = ranks.together(lambda: _stage(directory, step, exports) if ranks.lead else None, "starting a checkpoint")
    folder = ranks.from_lead(staged)
    assert folder is not None
    return Draft(folder, step, texts, tensors, pieces, dict(metrics or {}), ranks)


def _copied(pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    copies = host_copies({name: piece.tensor for name, piece in pieces.items()})
    return {name: Piece(copies[name], piece.start) for name, piece in pieces.items()}


def _stage(directory: Path, step: int, exports: Mapping[str, Export]) -> Path:
    with _border(directory, step):
        staged = layout.stage(directory, step)
        with _removed_on_failure(staged):
            for name, export in exports.items():
                (staged / name).mkdir(parents=True)
                export.write_files(staged / name)
    return staged


def commit(plan: Draft) -> Path:
    """Write what was drafted, bring it to the disk, give it its name, then point the tracker file at it.

    Ranks other than 0 leave a note that says what they wrote; rank 0 waits for all notes before the checkpoint gets its name.
    """
    directory = plan.folder.parent
    with _border(directory, plan.step):
        if not plan.ranks.lead:
            leave_note(plan.folder, plan.ranks.rank, lambda: _write_pieces(plan))
            return layout.folder_of(directory, plan.step)
        with _removed_on_failure(plan.folder):
            files = {**_write_parts(plan), **_write_pieces(plan), **notes(plan.folder, plan.ranks.world)}
            for path in plan.folder.rglob("*"):
                name = path.relative_to(plan.folder).as_posix()
                if path.is_file() and name not in files:
                    files[name] = flush_file(path)
            serial = max((checkpoint.manifest.serial for checkpoint in layout.saved(directory)), default=0) + 1
            write_manifest(plan.folder, Manifest(plan.step, serial, files, list(plan.texts), plan.metrics))
            flush_tree(plan.folder)
            final = layout.publish(plan.folder, plan.step)
        layout.write_latest(directory, plan.step)
    return final


class Checkpoints:
    """The checkpoints of one run: saved in the background, thinned out, and copied away.

    `save` copies the state to host memory and returns; a thread writes it. The next `save`, `wait` or `close` waits for that
    thread and raises what went wrong in it.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        background: bool = True,
        keep: Keep | None = None,
        copy_to: str | None = None,
        ranks: Ranks | None = None,
    ):
        """`copy_to` is any fsspec address. A copy that fails is tried again with the next save; `close` raises if it is still
        missing then."""
        self.directory = Path(directory)
        self.background = background
        self.keep = keep or Keep()
        self.ranks = ranks or Ranks()
        self.copy_to = copy_to
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._not_copied: dict[Path, Exception] = {}

    def save(
        self,
        step: int,
        parts: Mapping[str, Tree],
        *,
        exports: Mapping[str, Export] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        self.ranks.together(self.wait, "writing a checkpoint")
        plan = draft(self.directory, step, parts, exports=exports, metrics=metrics, copy=self.background, ranks=self.ranks)
        if not self.background:
            self._finish(plan)
            return
        self._thread = threading.Thread(target=self._finish_in_background, args=(plan,), name=f"save step {step}")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        self.wait()
        if self._not_copied:
            self._copy_away()
        if self._not_copied:
            path, error = next(iter(self._not_copied.items()))
            raise SaveError(
                f"{len(self._not_copied)} checkpoint(s) could not be copied to {self.copy_to}; {path} and the others are "
                f"complete on this machine: {error}"
            ) from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _finish_in_background(self, plan: Draft) -> None:
        try:
            self._finish(plan)
        except BaseException as error:  # noqa: BLE001 - it belongs to the thread that calls next, which raises it
            log.warning("Saving step %d failed: %s", plan.step, error)
            self._failure = error

    def _finish(self, plan: Draft) -> None:
        path = commit(plan)
        if not self.ranks.lead:
            return
        if self.copy_to is not None:
            self._copy_away(path)
        prune(self.directory, self.keep)

    def _copy_away(self, *new: Path) -> None:
        assert self.copy_to is not None
        owed, self._not_copied = [*self._not_copied, *new], {}
        for path in owed:
            if not path.exists():
                log.warning("%s was deleted before it could be copied to %s.", path, self.copy_to)
                continue
            try:
                remote.upload(path, self.copy_to)
            except Exception as error:  # noqa: BLE001 - any file system may be behind the address; close() raises it
                log.warning("%s was not copied to %s and will be tried again: %s", path, self.copy_to, error)
                self._not_copied[path] = error


def _write_parts(plan: Draft) -> dict[str, Fingerprint]:
    files = {}
    for name, content in plan.texts.items():
        path = plan.folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        files[f"{name}.json"] = write_file(path, [json.dumps(content).encode()])
    for name, tensors in plan.tensors.items():
        files[name] = write_tensors(plan.folder / name, tensors)
    return files


def _write_pieces(plan: Draft) -> dict[str, Fingerprint]:
    return {name: write_pieces(plan.folder / name, pieces) for name, pieces in plan.pieces.items()}


def _belongs(file: str, part: str) -> bool:
    return file in (f"{part}.json", f"{part}.safetensors") or _is_shard(file, part)


def _is_shard(file: str, part: str) -> bool:
    return file.startswith(f"{part}/shard-") and file.endswith(".safetensors")


def _read_part(folder: Path, name: str, files: Mapping[str, Fingerprint], later: bool) -> Tree:
    path = folder / f"{name}.safetensors"
    shards = [folder / file for file in files if _is_shard(file, name)]
    try:
        plain = json.loads((folder / f"{name}.json").read_text())
        if later:
            return join(plain, open_tensors([*([path] if f"{name}.safetensors" in files else []), *shards]))
        tensors = read_tensors(path) if f"{name}.safetensors" in files else {}
        tensors |= {key: saved.read() for key, saved in open_tensors(shards).items()}
        return join(plain, tensors)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedCheckpoint(f"The part {name!r} of {folder} cannot be read: {error!r}") from error


def _check_names(names: list[str]) -> None:
    for name in names:
        if not _PART.fullmatch(name) or name == "manifest":
            raise ValueError(f"{name!r} cannot name a part of a checkpoint. Use letters, digits, _ . - and / between folders.")


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _border(directory: Path, step: int) -> Iterator[None]:
    """Turn what the operating system says into what to do about it."""
    try:
        yield
    except OSError as error:
        kept = ", ".join(checkpoint.path.name for checkpoint in layout.saved(directory)) or "none"
        cause = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        advice = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = f"{shutil.disk_usage(directory).free / 1024**3:.2f} GiB free" if directory.exists() else "disk full"
            advice = (
                f" There: {free}. Make room, or keep fewer checkpoints "
                "(trainer.max_actor_ckpt_to_keep, trainer.max_ckpt_mem_gb)."
            )
        failure = SaveError(
            f"Step {step} could not be saved in {directory}: {cause}. Complete checkpoints in that folder: {kept}.{advice}"
        )
        failure.errno = error.errno
        raise failure from error
