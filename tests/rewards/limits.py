"""Time limits that only calls that hang have: on a busy machine, any other call may take longer than a short one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strop import concurrency
from strop.rewards.function import RewardFunction
from strop.rewards.timelimit import TimeLimitedPool

LONG = 100.0


def limit_items(monkeypatch: pytest.MonkeyPatch, hangs: Callable[[Any], bool]) -> None:
    """Of the items of `call_each`, only those that hang are ever late."""
    time_out = concurrency._CallRound._time_out_late_calls

    def time_out_those_that_hang(round_: Any) -> None:
        others = {i: start for i, start in round_.started.items() if not hangs(round_.items[i])}
        for index in others:
            del round_.started[index]
        time_out(round_)
        round_.started.update(others)

    monkeypatch.setattr(concurrency._CallRound, "_time_out_late_calls", time_out_those_that_hang)


def limit_responses(monkeypatch: pytest.MonkeyPatch, *hanging: str) -> None:
    """Of the samples to score, only those with these responses have the configured limit, in threads, on event loops
    and in worker processes."""
    limit_items(monkeypatch, lambda item: item.solution_str in hanging)

    def hangs(args: Any, kwargs: Any) -> bool:
        return any(isinstance(value, str) and value in hanging for value in (*args, *kwargs.values()))

    in_process, awaited = TimeLimitedPool.run, RewardFunction.run

    def run_in_process(pool: Any, function: Any, args: Any, kwargs: Any, timeout: float) -> object:
        return in_process(pool, function, args, kwargs, timeout if hangs(args, kwargs) else LONG)

    def run_awaited(function: Any, call: Any, timeout: float | None = None) -> object:
        return awaited(function, call, timeout if hangs(call.args, call.kwargs) else LONG)

    monkeypatch.setattr(TimeLimitedPool, "run", run_in_process)
    monkeypatch.setattr(RewardFunction, "run", run_awaited)
