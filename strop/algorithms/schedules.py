"""Learning-rate schedules: pure functions step -> factor of the base rate.

`step` counts from 0: the factor at `step` is what the (step + 1)-th update uses. Warm-up rises as (step + 1) / warmup_steps, so
the first update already moves the weights; `compat="verl"` gives step / warmup_steps (first update at `init_ratio`, which is 0)
and lets the cosine swing up again past `total_steps`, where ours stays at the floor.
"""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from strop.catalog import SCHEDULES


def constant(step: int, *, warmup_steps: int = 0, init_ratio: float = 0.0, compat: Literal["verl"] | None = None) -> float:
    """Warm-up, then 1."""
    return _warmup(step, warmup_steps, init_ratio, compat) if step < warmup_steps else 1.0


def cosine(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
    init_ratio: float = 0.0,
    num_cycles: float = 0.5,
    compat: Literal["verl"] | None = None,
) -> float:
    """Warm-up, then (1 + m)/2 + (1 - m)/2 · cos(2π · num_cycles · p), p the share of the steps after it, m = min_ratio."""
    if step < warmup_steps:
        return _warmup(step, warmup_steps, init_ratio, compat)
    return _cosine(_progress(step, warmup_steps, total_steps, bounded=compat != "verl"), min_ratio, num_cycles)


def linear(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
    init_ratio: float = 0.0,
    compat: Literal["verl"] | None = None,
) -> float:
    """Warm-up, then a straight line from 1 to min_ratio at total_steps."""
    if step < warmup_steps:
        return _warmup(step, warmup_steps, init_ratio, compat)
    return 1.0 - (1.0 - min_ratio) * _progress(step, warmup_steps, total_steps)


def wsd(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
    init_ratio: float = 0.0,
    stable_ratio: float = 0.9,
    num_cycles: float = 0.5,
    compat: Literal["verl"] | None = None,
) -> float:
    """Warm-up, stable, decay (MiniCPM): 1 for `stable_ratio` of the steps after warm-up, then a cosine to min_ratio."""
    if step < warmup_steps:
        return _warmup(step, warmup_steps, init_ratio, compat)
    decay_from = warmup_steps + int(stable_ratio * (total_steps - warmup_steps))
    if step < decay_from:
        return 1.0
    return _cosine(_progress(step, decay_from, total_steps), min_ratio, num_cycles) if step < total_steps else min_ratio


def warmup_length(total_steps: int, *, steps: int = -1, ratio: float = 0.0) -> int:
    """Warm-up steps: `steps` if it is not negative (0 means none), else that share of the whole run."""
    if steps >= 0:
        return steps
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"The warm-up ratio must lie between 0 and 1, it is {ratio}; give steps with lr_warmup_steps instead.")
    return int(ratio * total_steps)


def make_scheduler(optimizer: Optimizer, name: str, *, last_step: int = -1, **settings: Any) -> LambdaLR:
    """A torch scheduler over the schedule `name`.

    The settings are the keyword arguments of the built-in schedules (total_steps, warmup_steps, min_ratio, ...); those that
    this schedule does not take are left out, so one configuration serves all of them.
    """
    for setting in ("min_ratio", "init_ratio", "stable_ratio"):
        if not 0.0 <= settings.get(setting, 0.0) <= 1.0:
            raise ValueError(f"{setting} must lie between 0 and 1, it is {settings[setting]}.")
    if settings.get("total_steps", 1) < 1 or settings.get("warmup_steps", 0) < 0:
        raise ValueError(
            f"A schedule needs total_steps >= 1 and warmup_steps >= 0, got {settings.get('total_steps')} and "
            f"{settings.get('warmup_steps')}; `warmup_length` turns a ratio into steps."
        )
    schedule = SCHEDULES.get(name)
    taken = inspect.signature(schedule).parameters
    strange = sorted(settings.keys() - taken.keys() - inspect.signature(wsd).parameters.keys())
    if strange:
        raise ValueError(f"The schedule {name!r} takes {sorted(set(taken) - {'step'})}, not {strange}.")
    if "total_steps" in taken and "total_steps" not in settings:
        raise ValueError(f"The schedule {name!r} needs total_steps: the number of updates of the whole run.")
    factor = partial(schedule, **{key: value for key, value in settings.items() if key in taken})
    return LambdaLR(optimizer, factor, last_epoch=last_step)


def _warmup(step: int, warmup_steps: int, init_ratio: float, compat: Literal["verl"] | None) -> float:
    done = (step if compat == "verl" else step + 1) / max(1, warmup_steps)
    return init_ratio + (1.0 - init_ratio) * done


def _progress(step: int, start: int, end: int, *, bounded: bool = True) -> float:
    done = (step - start) / max(1, end - start)
    return min(done, 1.0) if bounded else done


def _cosine(progress: float, min_ratio: float, num_cycles: float) -> float:
    wave = math.cos(2 * math.pi * num_cycles * progress)
    return max(min_ratio, (1.0 + min_ratio) / 2 + (1.0 - min_ratio) / 2 * wave)
