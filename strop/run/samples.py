"""Writes some sample groups of every step for the board, in the background.

The training loop submits a step and continues; a thread decodes, compresses and writes (sample_table.py). A
failure here never stops a run: it is logged once. A file appears under its name only when it is complete.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.run.sample_table import FOLDER, SampleJob, TokenTexts, parse_name, sample_table, write_samples
from strop.types import Batch, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

MAX_PENDING_STEPS = 2
"""Steps that may wait for the disk; more would take memory that training needs."""


@dataclass(frozen=True)
class UpdateLogProbs:
    """Log-probs that the update of a step computed for some of its rows."""

    rows: Tensor
    """Their positions in the step's original order."""
    log_probs: Tensor
    entropy: Tensor | None = None


class SampleWriter:
    """Writes at most `max_samples` samples of each step: whole groups of one prompt, evenly spaced in the
    step."""

    def __init__(self, directory: Path, *, max_samples: int, texts: TokenTexts):
        self.folder = directory / FOLDER
        self.max_samples = max_samples
        self.texts = texts
        self._update_log_probs: UpdateLogProbs | None = None
        self._warned = threading.Lock()
        """Held from the first warning on."""
        self._jobs: queue.Queue[SampleJob | None] = queue.Queue(MAX_PENDING_STEPS)
        self._thread: threading.Thread | None = None

    def begin(self, resumed_from: int | None) -> None:
        """Delete samples of later steps when a run resumes; rename the folder of an older run for a new
        one."""
        try:
            if resumed_from is None:
                set_folder_aside(self.folder)
                return
            for file in self.folder.glob("*.parquet"):
                parsed = parse_name(file.name)
                if parsed is not None and parsed[1] > resumed_from:
                    file.unlink()
        except OSError as error:
            self._warn_once(f"older samples could not be put away: {error}")

    def set_update_log_probs(self, log_probs: UpdateLogProbs | None) -> None:
        """Log-probs from the update of this step; they belong to the next `submit`."""
        self._update_log_probs = log_probs

    def submit(
        self, split: str, step: int, trajectories: Sequence[Trajectory], batch: Batch | None = None
    ) -> None:
        """Queue a step for writing. `batch` has the same rows, in the same order."""
        log_probs = self._update_log_probs
        self._update_log_probs = None
        rows = choose_rows(trajectories, self.max_samples)
        if not rows:
            return
        chosen = [trajectories[row] for row in rows]
        tables = {} if batch is None else token_tables(batch, rows, log_probs)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="samples", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait(SampleJob(split, step, chosen, tables))
        except queue.Full:
            self._warn_once(f"the disk is slower than the run, so those of step {step} are left out")

    def close(self) -> None:
        """Wait until every submitted step is on the disk."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                write_samples(self.folder, job.split, job.step, sample_table(job, self.texts))
            except Exception as error:  # noqa: BLE001 - samples must not stop a run
                self._warn_once(f"step {job.step}: {type(error).__name__}: {error}")

    def _warn_once(self, problem: str) -> None:
        if self._warned.acquire(blocking=False):
            log.warning("Samples for the board: %s. Training goes on; this is told once.", problem)


def choose_rows(trajectories: Sequence[Trajectory], max_samples: int) -> list[int]:
    """Rows of whole groups, about `max_samples` in all, evenly spaced: independent of any score.

    The first group is always chosen, however large it is.
    """
    groups: dict[int, list[int]] = {}
    for row, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group, []).append(row)
    if not groups or max_samples < 1:
        return []
    largest = max(map(len, groups.values()))
    count = min(len(groups), max(1, max_samples // largest))
    rows_by_group = list(groups.values())
    chosen: list[int] = []
    for i in range(count):
        chosen += rows_by_group[i * len(rows_by_group) // count]
    return chosen


def token_tables(batch: Batch, rows: Sequence[int], log_probs: UpdateLogProbs | None) -> dict[str, Tensor]:
    """What the trainer computed for the tokens of these rows, copied to the host; [rows, T] each."""
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
    tables = {}
    for name, table in fields.items():
        if table is not None:
            tables[name] = table[index.to(table.device)].float().cpu()
    if batch.old_log_probs is None and log_probs is not None:
        tables["trained_log_probs"] = _select_rows(log_probs.rows, log_probs.log_probs, index)
        if log_probs.entropy is not None:
            tables["entropy"] = _select_rows(log_probs.rows, log_probs.entropy, index)
    return tables


def _select_rows(rows: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """The rows of the table in the order of `index`; NaN where a row was not computed."""
    import torch

    positions = torch.full((int(max(rows.max(), index.max())) + 1,), -1)
    positions[rows.cpu()] = torch.arange(len(rows))
    found = positions[index]
    return torch.where((found >= 0)[:, None], table.float().cpu()[found], float("nan"))


def set_folder_aside(folder: Path) -> None:
    """Give an existing folder the next free number: samples becomes samples.1."""
    if folder.is_dir():
        count = 1
        while (other := folder.with_name(f"{folder.name}.{count}")).exists():
            count += 1
        folder.rename(other)
