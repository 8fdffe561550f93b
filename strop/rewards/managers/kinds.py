"""How scorers are called: in order, in processes, once with lists, or no faster than a service allows.

A manager is made as `Manager(function, settings, **reward_kwargs)`, where `function(sample)` is the configured scorer, and has
one method: `score(samples)`, which gives for every sample what its scorer returned, or the exception that kept it from
returning. Reading those values, retries, penalties and counting are the same for all managers and stand in `scorer.py`.

    @REWARD_MANAGERS.register("shy")
    class Shy:
        def __init__(self, function, settings): self.function = function
        def score(self, samples): return [self.function(sample) / 2 for sample in samples]
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from strop.config.schema.reward import RewardModel
from strop.rewards.calls import call_each
from strop.rewards.function import RewardFunction, Rules
from strop.rewards.sample import Sample
from strop.rewards.timelimit import TimeLimitedPool

ASYNC_AT_ONCE = 256
LOOP_GRACE = 1.0  # an awaited call ends itself in time, unless it blocks the loop
Function = RewardFunction | Rules


class Naive:
    """In order, by `num_workers` threads; the calls of an async function wait together."""

    def __init__(self, function: Function, settings: RewardModel):
        self.function, self.workers = function, ASYNC_AT_ONCE if function.is_async else settings.num_workers
        self.timeout = settings.timeout + (LOOP_GRACE if function.is_async else 0.0)

    def score(self, samples: Sequence[Sample]) -> list[Any]:
        workers = max(self.workers, self._at_once(samples))
        return call_each(self.function, samples, workers=workers, timeout=self.timeout)

    def _at_once(self, samples: Sequence[Sample]) -> int:
        try:
            return self.function.at_once(samples) if isinstance(self.function, Rules) else 1
        except ValueError:  # a data source without a rule: its samples say so one by one
            return 1


class Prime:
    """In `num_workers` worker processes, which are killed when a sample takes too long, and started anew.

    verl's `remote` is the same. (A reward server is asked because of reward_model.remote_url, whatever the manager.)
    """

    def __init__(self, function: Function, settings: RewardModel):
        if function.is_async:
            raise ValueError(
                "reward_model.reward_manager=prime runs functions in processes, but the reward function is async. Use naive "
                "(all calls wait together) or rate_limited."
            )
        if isinstance(function, RewardFunction) and {"timeout", "function"} & set(function.options):
            raise ValueError(
                "custom_reward_function.reward_kwargs has `timeout` or `function`, names that reward_manager=prime uses. "
                "Rename the argument of your function."
            )
        self.function, self.timeout = function, settings.timeout
        self.pool = TimeLimitedPool(settings.num_workers)
        weakref.finalize(self, self.pool.close)

    def score(self, samples: Sequence[Sample]) -> list[Any]:
        return call_each(self._in_process, samples, workers=self.pool.workers)

    def _in_process(self, sample: Sample) -> Any:
        function, values, named = self.function.call_for(sample)
        return self.pool.call(function, *values, timeout=self.timeout, **named)

    def close(self) -> None:
        self.pool.close()


class Lists:
    """One call of the user's function with lists of everything. Rules have no such form and are called in order."""

    def __init__(self, function: Function, settings: RewardModel):
        self.function, self.settings = function, settings

    def score(self, samples: Sequence[Sample]) -> Sequence[Any]:
        if isinstance(self.function, Rules):
            return Naive(self.function, self.settings).score(samples)
        limit = self.settings.timeout * len(samples) + LOOP_GRACE
        [values] = call_each(self.function.call_with_lists, [samples], timeout=limit)
        if isinstance(values, Exception):
            return [values] * len(samples)
        return _one_per_sample(values, len(samples), self.function.name)


def _one_per_sample(values: Any, count: int, name: str) -> Sequence[Any]:
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple) or len(values) != count:
        got = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
        return [ValueError(f"{name} was called with {count} samples and returned {got}; a list of {count} is needed.")] * count
    return values


class RateLimited:
    """At most `max_concurrent` calls at the same time, `max_rpm` calls and `max_tpm` tokens in any minute."""

    def __init__(self, function: Function, settings: RewardModel):
        self.function, self.workers = function, settings.max_concurrent
        self.timeout = settings.timeout + (LOOP_GRACE if function.is_async else 0.0)
        tokens = settings.estimated_tokens_per_request
        if settings.max_tpm is not None and tokens > settings.max_tpm:
            raise ValueError(
                f"reward_model.max_tpm={settings.max_tpm:g} is below reward_model.estimated_tokens_per_request={tokens}, so no "
                "request could ever be sent. Raise the first or lower the second."
            )
        self.budgets: list[tuple[float, Budget]] = []
        if settings.max_rpm is not None:  # less than one a minute is one in a longer time
            self.budgets.append((1, Budget(max(settings.max_rpm, 1.0), 60.0 / min(settings.max_rpm, 1.0))))
        if settings.max_tpm is not None:
            self.budgets.append((tokens, Budget(settings.max_tpm, 60.0)))

    def score(self, samples: Sequence[Sample]) -> list[Any]:
        return call_each(self.function, samples, workers=self.workers, timeout=self.timeout, before=self._wait)

    def _wait(self) -> None:
        for amount, budget in self.budgets:
            budget.spend(amount)


class Budget:
    """Lets through at most `limit` in any `window` seconds; `spend` sleeps until there is room."""

    def __init__(self, limit: float, window: float):
        self.limit, self.window = limit, window
        self._spent: deque[tuple[float, float]] = deque()
        self._sum = 0.0
        self._lock = threading.Lock()

    def spend(self, amount: float) -> None:
        with self._lock:  # held while sleeping: whoever comes later waits behind
            while self._sum + amount > self.limit and self._spent:
                moment, old = self._spent[0]
                pause = moment + self.window - time.monotonic()
                if pause > 0:
                    time.sleep(pause)
                self._spent.popleft()
                self._sum -= old
            self._spent.append((time.monotonic(), amount))
            self._sum += amount
