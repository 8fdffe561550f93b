"""A scorer of the user's own, or the rule of each data source: called by name with what it asks for.

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **reward_kwargs): ...

It may leave out arguments, may be async, and returns a number or a dict with `score`. For the manager `batch` it takes lists:
data_sources, solution_strs, ground_truths, extra_infos.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from strop.config.schema.reward import SandboxFusion
from strop.registry import Entry, did_you_mean, load_attribute
from strop.rewards.calls import BackgroundLoop
from strop.rewards.dispatch import TIME_LIMIT, check_truth, scorer_for
from strop.rewards.sample import Sample
from strop.rewards.timelimit import shared_pool

ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
MANY = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


class Call(NamedTuple):
    """A function and the arguments of one call; all of it can be sent to a worker process."""

    function: Callable[..., Any]
    values: tuple[Any, ...] = ()
    named: Mapping[str, Any] = {}


class RewardFunction:
    """A user's function. Calling it with a Sample gives what the function returns, awaited where needed."""

    def __init__(
        self,
        function: Callable[..., Any],
        options: Mapping[str, Any] | None = None,
        *,
        takes_lists: bool = False,
        timeout: float | None = None,
    ):
        """`options` are further arguments of every call and win over the others; `timeout` limits what is awaited."""
        if not callable(function):
            raise ValueError(f"The reward function is {function!r}, which cannot be called.")
        self.function, self.options, self.timeout = function, dict(options or {}), timeout
        self.takes_lists = takes_lists
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - the method itself is looked at, not whether there is one
        )
        self._names = self._accepted()
        self._loop = BackgroundLoop()

    def __call__(self, sample: Sample) -> Any:
        return self.run(self.call_for(sample))

    def call_for(self, sample: Sample) -> Call:
        return self._call(dict(zip(ONE, (sample.data_source, sample.solution_str, sample.ground_truth, sample.extra_info))))

    def call_with_lists(self, samples: Sequence[Sample]) -> Any:
        """One call for all samples; the function returns a list."""
        columns = (
            [s.data_source for s in samples],
            [s.solution_str for s in samples],
            [s.ground_truth for s in samples],
            [s.extra_info for s in samples],
        )
        limit = None if self.timeout is None else self.timeout * len(samples)
        return self.run(self._call(dict(zip(MANY, columns))), limit)

    def run(self, call: Call, timeout: float | None = None) -> Any:
        result = call.function(*call.values, **call.named)
        return self._loop.run(_finished(result), timeout or self.timeout) if inspect.isawaitable(result) else result

    def close(self) -> None:
        self._loop.close()

    def _call(self, given: dict[str, Any]) -> Call:
        given |= self.options
        wanted = given if self._names is None else {name: value for name, value in given.items() if name in self._names}
        return Call(self.function, named=wanted)

    def _accepted(self) -> set[str] | None:
        """Names the function takes, None when it takes all; what cannot fit is refused before the first sample."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # some functions written in C do not tell
            return None
        given = {*(MANY if self.takes_lists else ONE), *self.options}
        missing = [
            p.name
            for p in parameters
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in given
        ]
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if missing or positional:
            raise ValueError(self._misfit(missing or positional, given))
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return None
        names = {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}
        strange = sorted(set(self.options) - names)
        if strange:
            raise ValueError(
                f"custom_reward_function.reward_kwargs has {strange}, but {self.name} does not take it."
                f"{did_you_mean(strange[0], names)} It takes: {', '.join(sorted(names)) or 'nothing'}."
            )
        return names

    def _misfit(self, names: Sequence[str], given: set[str]) -> str:
        hint = ""
        if not self.takes_lists and set(names) & set(MANY):
            hint = " Functions that take lists need reward_model.reward_manager=batch."
        elif self.takes_lists and set(names) & set(ONE):
            hint = " The manager batch calls with lists; set reward_model.reward_manager=naive for one sample at a time."
        return (
            f"{self.name} wants {', '.join(names)}, which it is not given by name. Arguments: "
            f"{', '.join(sorted(given))}; add your own with custom_reward_function.reward_kwargs.{hint}"
        )


class Rules:
    """The built-in or registered scorer of each data source, under the same face as a user's function."""

    is_async = False

    def __init__(self, timeout: float = TIME_LIMIT, sandbox: SandboxFusion | None = None):
        self.timeout, self.sandbox = min(timeout, TIME_LIMIT), sandbox or SandboxFusion()
        self._entries: dict[str, Entry] = {}

    def __call__(self, sample: Sample) -> Any:
        function, values, named = self.call_for(sample)
        if self._entry(sample.data_source).facts["slow"]:
            return shared_pool().call(function, *values, timeout=self.timeout, **named)
        return function(*values, **named)

    def call_for(self, sample: Sample) -> Call:
        """The bare rule: whoever runs it in a process of its own needs no second one for slow rules."""
        entry = self._entry(sample.data_source)
        check_truth(entry, sample.data_source, sample.ground_truth)
        named = {"sandbox": self.sandbox} if entry.facts["runs_programs"] else {}
        return Call(entry.load(), (sample.solution_str, sample.ground_truth), named)

    def at_once(self, samples: Sequence[Sample]) -> int:
        """How many samples are worth scoring at a time: rules that run programs wait for them, others keep Python busy."""
        if not any(self._entry(source).facts["runs_programs"] for source in {sample.data_source for sample in samples}):
            return 1
        return self.sandbox.max_concurrent if self.sandbox.url else os.cpu_count() or 1

    def _entry(self, source: str) -> Entry:
        if source not in self._entries:  # matching patterns costs more than most rules do
            self._entries[source] = scorer_for(source)
        return self._entries[source]

    def close(self) -> None:
        """Nothing is held."""


def load_function(
    path: str, name: str, options: Mapping[str, Any] | None = None, *, takes_lists: bool = False, timeout: float | None = None
) -> RewardFunction:
    """`name` in the file or module `path`; a file that does not parse, or has no such function, is a ValueError."""
    try:
        return RewardFunction(load_attribute(path, name), options, takes_lists=takes_lists, timeout=timeout)
    except ValueError as error:
        raise ValueError(f"custom_reward_function.path={path}: {error}") from error


async def _finished(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
