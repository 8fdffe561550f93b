"""When to save."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

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
    """Every `save_freq` steps, after the last one, and before a rented machine ends; never when `save_freq` is 0 or less.

    The end of a rented machine is a Unix time in an environment variable. It is near when what is left is at most a minute for
    the save, the longest step so far (seconds), and `spare` seconds (trainer.esi_redundant_time).
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
                raise ValueError(f"The environment variable {name}={text!r} is not a Unix time. Correct or unset it.") from None
            return end - (time.time() if now is None else now) <= _SECONDS_TO_SAVE + needed
    return False
