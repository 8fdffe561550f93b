"""Which checkpoints stay: the newest, the best, and as many others as the limits allow.

All complete checkpoints of the folder count, those of earlier processes too, and a checkpoint goes as a whole: one without its
critic or its loader could not be resumed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.registry import did_you_mean
from strop.run import layout
from strop.run.layout import Saved

log = logging.getLogger(__name__)

GIB = 1024**3


@dataclass(frozen=True)
class Keep:
    """Limits; None is no limit."""

    newest: int | None = None
    """The most recent checkpoints to keep; the best one by metric stays beside them."""
    max_gb: float | None = None
    """Their size in GiB, the best one included; the newest stays however large it is."""
    best_metric: str | None = None
    """The checkpoint with the highest value of this validation metric always stays; of equal ones the first."""
    lowest_is_best: bool = False
    """For losses."""

    def __post_init__(self) -> None:
        if self.newest is not None and self.newest < 1:
            raise ValueError(f"Keep(newest={self.newest}) would delete what was just saved. Use 1 or more, or None for all.")
        if self.max_gb is not None and not self.max_gb > 0:
            raise ValueError(f"Keep(max_gb={self.max_gb}) leaves no room for any checkpoint. Use a positive size, or None.")


def keep_from_trainer(
    *,
    max_actor_ckpt_to_keep: int | None = None,
    max_critic_ckpt_to_keep: int | None = None,
    max_ckpt_mem_gb: float | None = None,
    best_metric: str | None = None,
    remove_previous_ckpt_in_save: bool = False,
) -> Keep:
    """The limits of the `trainer` section. Actor and critic share a folder, so the more generous of their limits counts."""
    limits = [limit for limit in (max_actor_ckpt_to_keep, max_critic_ckpt_to_keep) if limit is not None]
    newest = 1 if remove_previous_ckpt_in_save else max(limits, default=None)
    return Keep(newest=newest, max_gb=max_ckpt_mem_gb, best_metric=best_metric)


def best(checkpoints: Sequence[Saved], keep: Keep) -> Saved | None:
    """The best checkpoint by the metric; None when it is not asked for or no checkpoint has it."""
    name = keep.best_metric
    if name is None:
        return None
    rated = [c for c in checkpoints if not math.isnan(c.manifest.metrics.get(name, math.nan))]
    sign = -1 if keep.lowest_is_best else 1
    return max(rated, key=lambda c: (sign * c.manifest.metrics[name], -c.manifest.serial), default=None)


def surplus(checkpoints: Sequence[Saved], keep: Keep) -> list[Saved]:
    """What to delete, oldest first; `checkpoints` are in the order in which they were made."""
    treasured = best(checkpoints, keep)
    too_old = checkpoints[: -keep.newest] if keep.newest is not None else []
    gone = [checkpoint for checkpoint in too_old if checkpoint is not treasured]
    if keep.max_gb is not None:
        staying = [checkpoint for checkpoint in checkpoints if checkpoint not in gone]
        size = sum(checkpoint.manifest.size for checkpoint in staying)
        rest = [checkpoint for checkpoint in staying[:-1] if checkpoint is not treasured]
        while size > keep.max_gb * GIB and rest:
            size -= rest[0].manifest.size
            gone.append(rest.pop(0))
    return gone


def prune(directory: Path, keep: Keep) -> list[Path]:
    """Delete what the limits do not allow to stay; returns the folders."""
    checkpoints = layout.saved(directory)
    _notice_unknown_metric(checkpoints, keep)
    gone = [checkpoint.path for checkpoint in surplus(checkpoints, keep)]
    for path in gone:
        layout.remove(path)
    return gone


def _notice_unknown_metric(checkpoints: Sequence[Saved], keep: Keep) -> None:
    metrics = checkpoints[-1].manifest.metrics if checkpoints else {}
    if keep.best_metric is not None and metrics and keep.best_metric not in metrics:
        hint = did_you_mean(keep.best_metric, metrics)
        log.warning(
            "trainer.best_metric=%s is not among the validation metrics of %s.%s", keep.best_metric, checkpoints[-1].path, hint
        )
