"""Saves and loads checkpoints: the whole state of a run, exact, atomic, and without anything that could run
code.

    with Checkpoints("checkpoints/gsm8k/grpo", keep=RetentionPolicy(newest=3)) as checkpoints:
        ...
        checkpoints.save(20, {"data": loader.state_dict(), "trainer": {...}, "actor/model": weights})

    load("checkpoints/gsm8k/grpo/global_step_20")  # the same trees, bit for bit

A part is a tree (see tensor_files.py) with a name; it becomes `<name>.json` and, where it has tensors,
`<name>.safetensors`.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from strop.ranks import Ranks
from strop.run.atomic_files import Fingerprint, flush_file, flush_tree, write_file
from strop.run.checkpoint import layout, remote
from strop.run.checkpoint.layout import (
    DamagedCheckpoint,
    Manifest,
    SaveError,
    read_manifest,
    removed_on_failure,
    save_errors,
    verify,
    write_manifest,
)
from strop.run.checkpoint.retention import RetentionPolicy, prune
from strop.run.checkpoint.shards import (
    TensorPiece,
    collect_receipts,
    copy_pieces_to_host,
    is_shard_file,
    local_piece,
    open_tensors,
    shard_file,
    write_pieces,
    write_with_receipt,
)
from strop.run.checkpoint.tensor_files import Tree, copy_to_host, join, read_tensors, split, write_tensors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Export:
    """A folder that another library loads, such as `actor/huggingface`."""

    weights: Mapping[str, Tensor]
    """Written as model.safetensors."""
    write_files: Callable[[Path], object] = lambda folder: None
    """Writes the small files (config, tokenizer) into the given folder. Called before `save` returns."""


@dataclass
class PendingCheckpoint:
    """A checkpoint that is being saved: everything that `commit` writes."""

    folder: Path
    step: int
    texts: dict[str, Tree]
    """JSON values by part."""
    tensors: dict[str, Mapping[str, Tensor]]
    """Tensors by path of their file."""
    pieces: dict[str, dict[str, TensorPiece]] = field(default_factory=dict)
    """This rank's pieces of sharded tensors, by path of their file."""
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
    """Write `directory/global_step_<step>` and make it the latest; returns when it is flushed to the disk.

    `metrics` are the validation results of these weights, which decide about the best checkpoint later.
    """
    return commit(
        prepare_checkpoint(Path(directory), step, parts, exports=exports, metrics=metrics, copy=False)
    )


def load(
    path: str | Path,
    *,
    only: Callable[[str], bool] = lambda part: True,
    later: Callable[[str], bool] = lambda part: False,
    check: bool = True,
) -> dict[str, Tree]:
    """The parts of a checkpoint, on the CPU; `only` chooses them by name. The error names a damaged file.

    In the parts that `later` chooses, each tensor is a SavedTensor, which is read on demand. Without `check`
    the checksums are not compared, because another rank does it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"There is no checkpoint {folder}: the folder does not exist.")
    manifest = read_manifest(folder)
    names = [name for name in manifest.parts if only(name)]

    def is_read(file: str) -> bool:
        return any(_belongs(file, name) for name in names)

    verify(folder, manifest.files, contents=lambda file: check and is_read(file))
    return {name: _read_part(folder, name, manifest.files, later(name)) for name in names}


def prepare_checkpoint(
    directory: Path,
    step: int,
    parts: Mapping[str, Tree],
    *,
    exports: Mapping[str, Export] | None = None,
    metrics: Mapping[str, float] | None = None,
    copy: bool,
    ranks: Ranks | None = None,
) -> PendingCheckpoint:
    """Collect everything that is saved. With `copy`, training may continue before `commit`.

    Rank 0 writes plain values and unsharded tensors; of sharded tensors every rank writes its pieces.
    """
    ranks = ranks or Ranks()
    exports = exports or {}
    _check_names([*parts, *exports])
    texts: dict[str, Tree] = {}
    tensors: dict[str, Mapping[str, Tensor]] = {}
    pieces: dict[str, dict[str, TensorPiece]] = {}
    for name, tree in parts.items():
        texts[name], found = split(tree, name=name)
        unsharded, sharded = _separate(found)
        if sharded:
            pieces[shard_file(name, ranks.rank)] = sharded
        if unsharded:
            tensors[f"{name}.safetensors"] = unsharded
    for name, export in exports.items():
        _, tensors[f"{name}/model.safetensors"] = split(dict(export.weights), name=name)
    if not ranks.is_rank0:
        tensors = {}
    if copy:
        for path, group in tensors.items():
            tensors[path] = copy_to_host(group)
        for path, shards in pieces.items():
            pieces[path] = copy_pieces_to_host(shards)
    staged = ranks.run_or_raise_on_all(
        lambda: _stage(directory, step, exports) if ranks.is_rank0 else None, "starting a checkpoint"
    )
    folder = ranks.broadcast_object(staged)
    assert folder is not None
    return PendingCheckpoint(folder, step, texts, tensors, pieces, dict(metrics or {}), ranks)


def _separate(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, TensorPiece]]:
    """Unsharded tensors, and the pieces of sharded ones that this rank writes."""
    unsharded: dict[str, Tensor] = {}
    pieces: dict[str, TensorPiece] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            unsharded[name] = tensor
            continue
        piece = local_piece(tensor)
        if piece is not None:
            pieces[name] = piece
    return unsharded, pieces


def _stage(directory: Path, step: int, exports: Mapping[str, Export]) -> Path:
    with save_errors(directory, step):
        staged = layout.create_staging_folder(directory, step)
        with removed_on_failure(staged):
            for name, export in exports.items():
                (staged / name).mkdir(parents=True)
                export.write_files(staged / name)
    return staged


def commit(plan: PendingCheckpoint) -> Path:
    """Write a checkpoint, flush it to the disk, rename it to its final name, then update the tracker file.

    Ranks other than 0 leave a receipt of what they wrote; rank 0 waits for all receipts before the rename.
    """
    directory = plan.folder.parent
    with save_errors(directory, plan.step):
        if not plan.ranks.is_rank0:
            write_with_receipt(plan.folder, plan.ranks.rank, lambda: _write_pieces(plan))
            return layout.checkpoint_folder(directory, plan.step)
        with removed_on_failure(plan.folder):
            files = {
                **_write_parts(plan),
                **_write_pieces(plan),
                **collect_receipts(plan.folder, plan.ranks.world),
            }
            for path in plan.folder.rglob("*"):
                name = path.relative_to(plan.folder).as_posix()
                if path.is_file() and name not in files:
                    files[name] = flush_file(path)
            serial = layout.next_serial(directory)
            write_manifest(plan.folder, Manifest(plan.step, serial, files, list(plan.texts), plan.metrics))
            flush_tree(plan.folder)
            final = layout.publish(plan.folder, plan.step)
        layout.write_latest(directory, plan.step)
    return final


class Checkpoints:
    """The checkpoints of one run: saved in the background, pruned, and copied to a remote address.

    `save` copies the state to host memory and returns; a thread writes it. `wait` and `close` wait for that
    thread and raise its error. The next `save` waits, too; after an error it writes before it returns, so
    that a disk that was full for a while costs no run.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        background: bool = True,
        keep: RetentionPolicy | None = None,
        copy_to: str | None = None,
        ranks: Ranks | None = None,
    ):
        """`copy_to` is any fsspec address. A failed copy is retried with the next save; `close` raises if it
        is still missing."""
        self.directory = Path(directory)
        self.background = background
        self.keep = keep or RetentionPolicy()
        self.ranks = ranks or Ranks()
        self.copy_to = copy_to
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None  # of the save in the background
        self._not_copied: dict[Path, Exception] = {}

    def save(
        self,
        step: int,
        parts: Mapping[str, Tree],
        *,
        exports: Mapping[str, Export] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        background = self.background and not self.failed_on_any_rank()
        self.failure = None
        plan = prepare_checkpoint(
            self.directory,
            step,
            parts,
            exports=exports,
            metrics=metrics,
            copy=background,
            ranks=self.ranks,
        )
        if not background:
            self.ranks.run_or_raise_on_all(lambda: self._finish(plan), "writing a checkpoint")
            return
        self._thread = threading.Thread(
            target=self._finish_in_background, args=(plan,), name=f"save step {step}"
        )
        self._thread.start()

    def failed_on_any_rank(self) -> bool:
        """Wait for the save in the background of all ranks; whether one failed. A collective operation."""
        self._join()
        return any(self.ranks.all_gather_object(self.failure is not None))

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait for the save in the background; raises its error."""
        self._join()
        failure = self.failure
        self.failure = None
        if failure is not None:
            raise failure

    def close(self) -> None:
        self.wait()
        if self._not_copied:
            self._upload()
        if self._not_copied:
            path, error = next(iter(self._not_copied.items()))
            raise SaveError(
                f"{len(self._not_copied)} checkpoint(s) could not be copied to {self.copy_to}; {path} and "
                f"the others are complete on this machine: {error}"
            ) from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _finish_in_background(self, plan: PendingCheckpoint) -> None:
        try:
            self._finish(plan)
        except BaseException as error:  # noqa: BLE001 - the next call of wait() raises it
            log.warning("Saving step %d failed: %s", plan.step, error)
            self.failure = error

    def _finish(self, plan: PendingCheckpoint) -> None:
        path = commit(plan)
        if not self.ranks.is_rank0:
            return
        if self.copy_to is not None:
            self._upload(path)
        prune(self.directory, self.keep)

    def _upload(self, *new: Path) -> None:
        assert self.copy_to is not None
        pending = [*self._not_copied, *new]
        self._not_copied = {}
        for path in pending:
            if not path.exists():
                log.warning("%s was deleted before it could be copied to %s.", path, self.copy_to)
                continue
            try:
                remote.upload(path, self.copy_to)
            except Exception as error:  # noqa: BLE001 - an error of any file system; close() raises it
                log.warning("%s was not copied to %s and will be tried again: %s", path, self.copy_to, error)
                self._not_copied[path] = error


def _write_parts(plan: PendingCheckpoint) -> dict[str, Fingerprint]:
    files = {}
    for name, content in plan.texts.items():
        path = plan.folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        files[f"{name}.json"] = write_file(path, [json.dumps(content).encode()])
    for name, tensors in plan.tensors.items():
        files[name] = write_tensors(plan.folder / name, tensors)
    return files


def _write_pieces(plan: PendingCheckpoint) -> dict[str, Fingerprint]:
    return {name: write_pieces(plan.folder / name, pieces) for name, pieces in plan.pieces.items()}


def _belongs(file: str, part: str) -> bool:
    return file in (f"{part}.json", f"{part}.safetensors") or is_shard_file(file, part)


def _read_part(folder: Path, name: str, files: Mapping[str, Fingerprint], later: bool) -> Tree:
    path = folder / f"{name}.safetensors"
    shards = [folder / file for file in files if is_shard_file(file, name)]
    try:
        plain = json.loads((folder / f"{name}.json").read_text())
        has_tensors = f"{name}.safetensors" in files
        if later:
            return join(plain, open_tensors([path, *shards] if has_tensors else shards))
        tensors = read_tensors(path) if has_tensors else {}
        for key, saved in open_tensors(shards).items():
            tensors[key] = saved.read()
        return join(plain, tensors)
    except (SafetensorError, ValueError, LookupError, TypeError, OSError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"The part {name!r} of {folder} cannot be read: {repr(error)[:300]}"
        ) from error


def _check_names(names: list[str]) -> None:
    for name in names:
        if not layout.PART.fullmatch(name) or name == "manifest":
            allowed = "letters, digits, _ . - and / between folders"
            raise ValueError(f"{name!r} cannot name a part of a checkpoint. Use {allowed}.")
