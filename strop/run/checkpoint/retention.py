"""When a checkpoint is due, and which checkpoints are kept: the newest, the best, and as many more as the
limits allow.

All complete checkpoints of the folder count, also those of earlier processes. A checkpoint is deleted as a
whole: one without its critic or its loader could not be resumed.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.registry import did_you_mean
from strop.run.checkpoint import layout
from strop.run.checkpoint.layout import SavedCheckpoint

log = logging.getLogger(__name__)

GIB = 1024**3
_EXPIRY_VARIABLES = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
_SECONDS_TO_SAVE = 60.0


def save_is_due(
    step: int,
    *,
    save_freq: int,
    last: bool,
    longest_step: float = 0.0,
    spare: float = 0.0,
    now: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> bool:
    """Every `save_freq` steps, after the last one, and before a rented machine ends; never when `save_freq`
    is 0 or less.

    The end of a rented machine is a Unix time in an environment variable. It is near when what is left is at
    most a minute for the save, the longest step so far (seconds), and `spare` seconds
    (trainer.esi_redundant_time).
    """
    if save_freq <= 0:
        return False
    return last or step % save_freq == 0 or _end_is_near(longest_step + spare, now, environment)


def _end_is_near(needed: float, now: float | None, environment: Mapping[str, str] | None) -> bool:
    variables = os.environ if environment is None else environment
    for name in _EXPIRY_VARIABLES:
        text = variables.get(name)
        if text:
            try:
                end = float(text)
            except ValueError:
                raise ValueError(
                    f"The environment variable {name}={text!r} is not a Unix time. Correct or unset it."
                ) from None
            return end - (time.time() if now is None else now) <= _SECONDS_TO_SAVE + needed
    return False


@dataclass(frozen=True)
class RetentionPolicy:
    """Limits on the checkpoints of a run; None is no limit."""

    newest: int | None = None
    """How many of the most recent checkpoints to keep; the best one by metric is kept in addition."""
    max_gb: float | None = None
    """Their total size in GiB, the best one included; the newest is kept however large it is."""
    best_metric: str | None = None
    """The checkpoint with the highest value of this validation metric is always kept; of equal ones the
    first."""
    lowest_is_best: bool = False
    """For losses."""

    def __post_init__(self) -> None:
        if self.newest is not None and self.newest < 1:
            raise ValueError(
                f"RetentionPolicy(newest={self.newest}) would delete what was just saved. Use 1 or more, or "
                "None for all."
            )
        if self.max_gb is not None and not self.max_gb > 0:
            raise ValueError(
                f"RetentionPolicy(max_gb={self.max_gb}) leaves no room for any checkpoint. Use a positive "
                "size, or None."
            )


def retention_from_trainer(
    *,
    max_actor_ckpt_to_keep: int | None = None,
    max_critic_ckpt_to_keep: int | None = None,
    max_ckpt_mem_gb: float | None = None,
    best_metric: str | None = None,
    remove_previous_ckpt_in_save: bool = False,
) -> RetentionPolicy:
    """The limits of the `trainer` section. Actor and critic share a folder, so the larger of their limits
    counts."""
    newest = max_actor_ckpt_to_keep
    if newest is None:
        newest = max_critic_ckpt_to_keep
    elif max_critic_ckpt_to_keep is not None:
        newest = max(newest, max_critic_ckpt_to_keep)
    if remove_previous_ckpt_in_save:
        newest = 1
    return RetentionPolicy(newest=newest, max_gb=max_ckpt_mem_gb, best_metric=best_metric)


def best(checkpoints: Sequence[SavedCheckpoint], keep: RetentionPolicy) -> SavedCheckpoint | None:
    """The best checkpoint by the metric; None without a metric, or where no checkpoint has it."""
    name = keep.best_metric
    if name is None:
        return None
    rated = [c for c in checkpoints if not math.isnan(c.manifest.metrics.get(name, math.nan))]
    sign = -1 if keep.lowest_is_best else 1
    return max(rated, key=lambda c: (sign * c.manifest.metrics[name], -c.manifest.serial), default=None)


def checkpoints_to_delete(
    checkpoints: Sequence[SavedCheckpoint], keep: RetentionPolicy
) -> list[SavedCheckpoint]:
    """What to delete, oldest first; `checkpoints` are in the order in which they were made."""
    best_one = best(checkpoints, keep)
    deleted: list[SavedCheckpoint] = []
    if keep.newest is not None:
        deleted = [checkpoint for checkpoint in checkpoints[: -keep.newest] if checkpoint is not best_one]
    if keep.max_gb is not None:
        kept = [checkpoint for checkpoint in checkpoints if checkpoint not in deleted]
        size = sum(checkpoint.manifest.size for checkpoint in kept)
        for checkpoint in kept[:-1]:
            if size <= keep.max_gb * GIB:
                break
            if checkpoint is not best_one:
                size -= checkpoint.manifest.size
                deleted.append(checkpoint)
    return deleted


def prune(directory: Path, keep: RetentionPolicy) -> list[Path]:
    """Delete the checkpoints that exceed the limits; returns their folders. One that cannot be deleted (a
    reader on a network file system, missing permissions) is no reason to end a run that saves."""
    checkpoints = layout.saved_checkpoints(directory)
    _warn_about_unknown_metric(checkpoints, keep)
    deleted: list[Path] = []
    for checkpoint in checkpoints_to_delete(checkpoints, keep):
        try:
            layout.remove(checkpoint.path)
        except OSError as error:
            log.warning("%s is not needed any more and cannot be deleted: %s", checkpoint.path, error)
            continue
        deleted.append(checkpoint.path)
    return deleted


def _warn_about_unknown_metric(checkpoints: Sequence[SavedCheckpoint], keep: RetentionPolicy) -> None:
    metrics = checkpoints[-1].manifest.metrics if checkpoints else {}
    if keep.best_metric is not None and metrics and keep.best_metric not in metrics:
        hint = did_you_mean(keep.best_metric, metrics)
        log.warning(
            "trainer.best_metric=%s is not among the validation metrics of %s.%s",
            keep.best_metric,
            checkpoints[-1].path,
            hint,
        )
