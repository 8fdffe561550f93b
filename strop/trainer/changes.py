"""What the configuration of a resumed run says otherwise than the one its checkpoint was saved with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from strop.config.aliases import flatten

log = logging.getLogger(__name__)

ABOUT_THE_RESUME = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.default_local_dir")
SHOWN = 8


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Values that differ, by key. Keys that only one side knows belong to another version, and are no change of the user's.

    >>> changes({"optim": {"lr": 0.1}, "old": 1}, {"optim": {"lr": 0.2}, "new": 2})
    {'optim.lr': (0.1, 0.2)}
    """
    then, today = flatten(before), flatten(now)
    both = [key for key in today if key in then and key not in ABOUT_THE_RESUME]
    return {key: (then[key], today[key]) for key in both if then[key] != today[key]}


def tell_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Other settings are a user's right, and are told; other weights are not read at all, which nobody expects."""
    found = changes(before, now)
    said = [f"{key} was {was!r} and is {value!r}" for key, (was, value) in found.items()]
    if said:
        more = [f"and {len(said) - SHOWN} more"] if len(said) > SHOWN else []
        log.info("Changed since the checkpoint: %s.", "; ".join([*said[:SHOWN], *more]))
    for key, (was, value) in found.items():
        if key in ("model.path", "actor_rollout_ref.model.path", "critic.model.path"):
            log.warning(
                "%s is %s, but the run goes on with the weights of its checkpoint, which began as %s. To train the new model "
                "set trainer.experiment_name to a name of its own, or trainer.resume_mode=disable.",
                key,
                value,
                was,
            )
