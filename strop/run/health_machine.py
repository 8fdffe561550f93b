"""What is wrong with the machine under a run, from the seconds and the memory of its steps."""

from __future__ import annotations

from statistics import median

from strop.run.health_history import SETTLED, History, Sight

IDLE_LIMIT, IDLE_SECONDS = 0.6, 0.5
"""Share of a step, and seconds of it, in which no model computes."""
GROWTH_GB, GROWTH_SHARE = 0.5, 0.3
"""What a process may grow by after its first steps."""
STALL_FACTOR, STALL_SECONDS = 10.0, 30.0
"""A phase is stalled that takes this many times its usual seconds, and so many more."""

COMPUTING = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights", "update")
"""Phases in which a model computes all the time."""


def idle_device(history: History) -> Sight | None:
    step = history.recent("timing_s/step", SETTLED)
    if step is None or step <= 0:
        return None
    sampling = history.recent("timing_s/gen", SETTLED) or 0.0
    engine = history.recent("rollout/seconds", SETTLED)
    if engine is not None:  # in an agent's turn the engine waits for tools
        sampling = min(sampling, engine)
    busy = sampling + sum(history.recent(f"timing_s/{phase}", SETTLED) or 0.0 for phase in COMPUTING)
    idle = 1 - busy / step
    if idle < IDLE_LIMIT or idle * step < IDLE_SECONDS:
        return None
    reward = history.recent("timing_s/reward", SETTLED) or 0.0
    blame = "most of it goes into scoring" if reward > idle * step / 2 else "it waits for tools, data or the disk"
    return Sight(
        f"No model computes in {idle:.0%} of a step of {step:.3g} s: {blame}.", {"idle": idle, "timing_s/reward": reward}
    )


def memory_growth(history: History) -> Sight | None:
    held = history.course("perf/process_memory_gb")[SETTLED // 2 :]
    if len(held) < 2 * SETTLED:
        return None
    third = len(held) // 3
    early, middle, late = (median(held[i * third : (i + 1) * third]) for i in range(3))
    now = median(held[-SETTLED:])  # a save takes memory for a moment
    grown, steady = now - early, late - middle > 0.5 * (middle - early) > 0
    if not steady or grown < GROWTH_GB or grown < GROWTH_SHARE * early:
        return None
    return Sight(
        f"This process holds {now:.2f} GiB, {grown:.2f} more than after its first steps, and grows steadily.",
        {"perf/process_memory_gb": now, "first": early},
    )


def stalled_phase(history: History) -> Sight | None:
    for name in history.names("timing_s/"):
        if name.count("/") > 1 or name == "timing_s/step":  # a part of a phase, or all of them
            continue
        seconds = history.last(name, 21)
        if len(seconds) < SETTLED:
            continue
        usual = median(seconds[:-1])
        if seconds[-1] > STALL_FACTOR * usual and seconds[-1] > usual + STALL_SECONDS:
            phase = name.removeprefix("timing_s/")
            return Sight(
                f"The phase {phase} took {seconds[-1]:.0f} s; {usual:.3g} s is usual.", {name: seconds[-1], "usual": usual}
            )
    return None
