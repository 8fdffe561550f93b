"""Samples to look at: some groups of every step as columns, in `<run>/samples/train_000012.parquet` and `validation_...`.

The loop hands over what it has and goes on; a thread decodes, compresses and writes. What goes wrong here never ends a run, it
is told once. A file appears under its name only when it is whole.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.run.sample_table import Job, TextOf, sample_table
from strop.types import Batch, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

log = logging.getLogger(__name__)

FOLDER = "samples"
ROWS_PER_GROUP = 128
"""Of a file: a reader who wants one sample decompresses so many."""
UNIQUE = ("rollout_log_probs", "trained_log_probs", "ref_log_probs", "entropy", "values")
WAITING = 2
"""Steps that may wait for the disk; more would be memory that training needs."""
_NAME = re.compile(r"(train|validation)_(\d{6,})\.parquet")


def file_name(split: str, step: int) -> str:
    return f"{split}_{step:06d}.parquet"


def parse_name(name: str) -> tuple[str, int] | None:
    """(split, step) of a sample file; None for any other file.

    >>> parse_name("train_000012.parquet"), parse_name(".train_000012.parquet.new")
    (('train', 12), None)
    """
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2])) if match else None


@dataclass(frozen=True)
class Known:
    """What an update found out on the way about some rows of the step."""

    rows: Tensor
    """Their positions in the step's first order."""
    log_probs: Tensor
    entropy: Tensor | None = None


class SampleWriter:
    """Writes at most `most` samples of each step, whole groups of one prompt, spread evenly over the step."""

    def __init__(self, directory: Path, *, most: int, texts: TextOf):
        self.folder = directory / FOLDER
        self.most = most
        self.texts = texts
        self._known: Known | None = None
        self._told = False
        self._jobs: queue.Queue[Job | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None

    def begin(self, resumed_from: int | None) -> None:
        """A resumed run forgets what was sampled after the step it goes on from; a new one leaves older files beside."""
        try:
            if resumed_from is None:
                set_folder_aside(self.folder)
            for file in self.folder.glob("*.parquet"):
                found = parse_name(file.name)
                if found and resumed_from is not None and found[1] > resumed_from:
                    file.unlink()
        except OSError as error:
            self._tell(f"older samples could not be put away: {error}")

    def remember(self, known: Known | None) -> None:
        """What the update of this step found out about its rows; belongs to the next `keep`."""
        self._known = known

    def keep(self, split: str, step: int, trajectories: Sequence[Trajectory], batch: Batch | None = None) -> None:
        """Hand over a step. `batch` has the same rows, in the same order."""
        known, self._known = self._known, None
        rows = spread(trajectories, self.most)
        if not rows:
            return
        chosen = [trajectories[row] for row in rows]
        tables = {} if batch is None else tables_of(batch, rows, known)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="samples", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait(Job(split, step, chosen, tables))
        except queue.Full:
            self._tell(f"the disk is slower than the run, so those of step {step} are left out")

    def close(self) -> None:
        """Wait until everything that was handed over is on the disk."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                write_samples(self.folder, job.split, job.step, sample_table(job, self.texts))
            except Exception as error:  # noqa: BLE001 - the border of the run: samples are worth less than it
                self._tell(f"step {job.step}: {type(error).__name__}: {error}")

    def _tell(self, problem: str) -> None:
        if not self._told:
            log.warning("Samples for the board: %s. Training goes on; this is told once.", problem)
        self._told = True


def spread(trajectories: Sequence[Trajectory], most: int) -> list[int]:
    """Rows of whole groups, about `most` in all, at even distances: the same positions every time, with no taste for any score.

    The first group is always there, however large it is.
    """
    groups: dict[int, list[int]] = {}
    for row, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group, []).append(row)
    if not groups or most < 1:
        return []
    largest = max(len(rows) for rows in groups.values())
    count = min(len(groups), max(1, most // largest))
    order = list(groups.values())
    return [row for i in range(count) for row in order[i * len(order) // count]]


def tables_of(batch: Batch, rows: Sequence[int], known: Known | None) -> dict[str, Tensor]:
    """What the trainer knows about the tokens of these rows, copied to the host; [rows, T] each."""
    import torch

    index = torch.as_tensor(list(rows), dtype=torch.long)
    fields = {
        "trained_log_probs": batch.old_log_probs,
        "ref_log_probs": batch.ref_log_probs,
        "entropy": batch.entropy,
        "advantages": batch.advantages,
        "values": batch.values,
        "mask": batch.mask,
    }
    found = {name: table[index.to(table.device)].float().cpu() for name, table in fields.items() if table is not None}
    if batch.old_log_probs is None and known is not None:
        found["trained_log_probs"] = _placed(known.rows, known.log_probs, index)
        if known.entropy is not None:
            found["entropy"] = _placed(known.rows, known.entropy, index)
    return found


def _placed(rows: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """The rows of the table in the order of `index`; NaN where a row was not computed."""
    import torch

    place = torch.full((int(max(rows.max(), index.max())) + 1,), -1)
    place[rows.cpu()] = torch.arange(len(rows))
    known = place[index]
    return torch.where((known >= 0)[:, None], table.float().cpu()[known], float("nan"))


def write_samples(folder: Path, split: str, step: int, table: pa.Table) -> Path:
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / file_name(split, step)
    aside = target.with_name(f".{target.name}.new")
    try:
        # Real numbers hardly repeat: a dictionary of them is larger than they are.
        unique = [f"{name}.list.element" for name in table.column_names if name in UNIQUE]
        repeated = [leaf for leaf in leaves(table.schema) if leaf not in unique]
        pq.write_table(
            table,
            aside,
            compression="zstd",
            row_group_size=ROWS_PER_GROUP,
            use_dictionary=repeated,
            use_byte_stream_split=unique,
        )
        return aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def leaves(schema: pa.Schema) -> list[str]:
    """Columns of a table as parquet names them."""
    import pyarrow as pa

    def below(name: str, kind: pa.DataType) -> list[str]:
        if pa.types.is_list(kind):
            return below(f"{name}.list.element", kind.value_type)
        if pa.types.is_struct(kind):
            return [leaf for field in kind for leaf in below(f"{name}.{field.name}", field.type)]
        return [name]

    return [leaf for field in schema for leaf in below(field.name, field.type)]


def set_folder_aside(folder: Path) -> None:
    """Give an existing folder the next free number: samples becomes samples.1."""
    if folder.is_dir():
        count = 1
        while (other := folder.with_name(f"{folder.name}.{count}")).exists():
            count += 1
        folder.rename(other)
