"""The functions that score one response: the rule scorer of a data source, or the user's reward function.

A user's function is called by keyword, with the arguments that it accepts:

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **reward_kwargs): ...

It may omit arguments, may be async, and returns a number or a dict with `score`. For the reward manager
`batch` it takes lists: data_sources, solution_strs, ground_truths, extra_infos. A function with a parameter
`completion` or `completions` gets the columns of the row by name (`signatures.py`).
"""

from __future__ import annotations

import fnmatch
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from strop.catalog import SCORERS
from strop.concurrency import BackgroundLoop
from strop.config.schema.reward import SandboxFusionConfig
from strop.host import cores_per_rank
from strop.registry import Entry, did_you_mean, load_attribute, nearest
from strop.rewards.base import RewardSample
from strop.rewards.signatures import (
    LIST_ARGUMENTS,
    SAMPLE_ARGUMENTS,
    ListScorer,
    column_arguments,
    is_required,
    list_arguments,
    own_copy,
    parameters_of,
    select_arguments,
    style_of,
    without_facts,
)
from strop.rewards.standard_streams import reopen_streams
from strop.rewards.timelimit import shared_pool

TIME_LIMIT = 10.0  # seconds for one response, in scorers that can hang
LOOP_GRACE = 1.0  # an awaited call times out by itself, unless it blocks the event loop

Result = TypeVar("Result")


# --- The rule scorer of a data source -----------------------------------------------------------------------


def find_scorer(data_source: str) -> Entry:
    """Return the rule scorer whose pattern matches; one without wildcards wins, then the longest pattern."""
    matches = []
    for name, pattern in _source_patterns():
        if fnmatch.fnmatchcase(data_source, pattern):
            is_exact = "*" not in pattern and "?" not in pattern and "[" not in pattern
            matches.append((is_exact, len(pattern), name))
    if not matches:
        raise ValueError(_unknown_source(data_source))
    return SCORERS.entry(max(matches)[2])


def _source_patterns() -> Iterator[tuple[str, str]]:
    """Yield the name of each scorer with each of its data source patterns."""
    for name in SCORERS.names():
        for pattern in SCORERS.entry(name).facts["sources"]:
            yield name, pattern


def _unknown_source(data_source: str) -> str:
    sources = sorted({pattern for _, pattern in _source_patterns()})
    suggestion = ""
    close = nearest(data_source, sources)
    if close:
        suggestion = f" Did you mean {' or '.join(map(repr, close))}?"
    return (
        f"No rule scorer knows the data source {data_source!r}.{suggestion} Known: {', '.join(sources)}. "
        "Give your own with custom_reward_function.path=my_reward.py "
        "custom_reward_function.name=compute_score, or register a scorer with `sources` in a file listed "
        "under `plugins`."
    )


def check_ground_truth(entry: Entry, data_source: str, ground_truth: object) -> None:
    """Raise ValueError if the scorer needs a ground truth and the row has none; else every score would be
    0."""
    missing = ground_truth is None or (isinstance(ground_truth, float) and math.isnan(ground_truth))
    if missing and entry.facts["needs_truth"]:
        raise ValueError(
            f"The row has no ground truth, with which the scorer {entry.name!r} of the data source "
            f"{data_source!r} compares. Put it into the column reward_model as ground_truth, or name its "
            "column in data.label_key. (A scorer of your own that needs none is registered with "
            "needs_truth=False.)"
        )


def score_response(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: dict[str, object] | None = None,
    *,
    timeout: float = TIME_LIMIT,
    compat: str | None = None,
    **options: object,
) -> object:
    """Return the rule score of a response, a number or a dict with `score`; `options` go to the scorer.

    `compat="verl"` gives the score of verl where the scorer has such a mode. The function has the signature
    of a custom reward function and can be used as one; rules do not read `extra_info`. A scorer declared
    slow runs in a worker process and raises TimeoutError after `timeout` seconds.
    """
    if not isinstance(solution_str, str):
        raise ValueError(
            f"`solution_str` must be the text of the response, it is {type(solution_str).__name__}."
        )
    entry = find_scorer(data_source)
    check_ground_truth(entry, data_source, ground_truth)
    compute_score: Callable[..., object] = entry.load()
    if compat in entry.facts["compat"]:
        options["compat"] = compat
    if entry.facts["slow"]:
        return shared_pool().call(compute_score, solution_str, ground_truth, timeout=timeout, **options)
    return compute_score(solution_str, ground_truth, **options)


# --- One interface for rule scorers and user functions ------------------------------------------------------


class ScorerCall(NamedTuple):
    """A function and the arguments of one call; it can be pickled for a worker process."""

    function: Callable[..., object]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = {}


class _Rule(NamedTuple):
    """The function of a rule, and the settings that every call has."""

    function: Callable[..., object]
    settings: Mapping[str, object]


class RuleScorer:
    """Scores each sample with the built-in or registered rule of its data source."""

    is_async = False

    def __init__(
        self,
        timeout: float = TIME_LIMIT,
        sandbox: SandboxFusionConfig | None = None,
        *,
        compat: str | None = None,
    ):
        """`compat` is algorithm.compat; rules that have a mode of this name run in it."""
        self.compat = compat
        self.timeout = min(timeout, TIME_LIMIT)
        self.sandbox = sandbox or SandboxFusionConfig()
        self._entries: dict[str, Entry] = {}
        self._rules: dict[str, _Rule] = {}

    def __call__(self, sample: RewardSample) -> object:
        function, args, kwargs = self.call_for(sample)
        if self._entry(sample.data_source).facts["slow"]:
            return shared_pool().call(function, *args, timeout=self.timeout, **kwargs)
        return function(*args, **kwargs)

    def call_for(self, sample: RewardSample) -> ScorerCall:
        """Return the call of the bare rule, for callers that run it in their own worker process."""
        entry = self._entry(sample.data_source)
        check_ground_truth(entry, sample.data_source, sample.ground_truth)
        function, kwargs = self._rule(entry)
        return ScorerCall(function, (sample.solution_str, sample.ground_truth), kwargs)

    def concurrency(self, samples: Sequence[RewardSample]) -> int:
        """Return how many samples to score at the same time: more than 1 only for rules that run programs.

        Those wait for other processes; the other rules hold the GIL.
        """
        sources = {sample.data_source for sample in samples}
        if not any(self._entry(source).facts["runs_programs"] for source in sources):
            return 1
        if self.sandbox.url:
            return self.sandbox.max_concurrent
        return cores_per_rank()

    def _entry(self, data_source: str) -> Entry:
        if data_source not in self._entries:  # matching patterns costs more than most rules do
            self._entries[data_source] = find_scorer(data_source)
        return self._entries[data_source]

    def _rule(self, entry: Entry) -> _Rule:
        if entry.name not in self._rules:
            settings: dict[str, object] = {}
            if entry.facts["runs_programs"]:
                settings["sandbox"] = self.sandbox
            if self.compat in entry.facts["compat"]:
                settings["compat"] = self.compat
            self._rules[entry.name] = _Rule(entry.load(), settings)
        return self._rules[entry.name]

    def close(self) -> None:
        """There is nothing to close."""


class RewardFunction:
    """A user's reward function; calling it with a sample returns its result, awaited if it is async."""

    def __init__(
        self,
        function: Callable[..., object],
        options: Mapping[str, object] | None = None,
        *,
        takes_lists: bool | None = False,
        timeout: float | None = None,
    ):
        """`options` are further arguments of every call and override the sample's; `timeout` limits an
        await. Without `takes_lists` (None), the function itself says whether it takes lists."""
        if not callable(function):
            raise ValueError(f"The reward function is {function!r}, which cannot be called.")
        self.function = function
        self.options = dict(options or {})
        self.timeout = timeout
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self.style = style_of(function, self.name)
        says_lists = isinstance(function, ListScorer) or bool(self.style and self.style.takes_lists)
        self.takes_lists = says_lists if takes_lists is None else takes_lists
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - the method is inspected
        )
        self._parameters = parameters_of(function)
        self._accepted = self._accepted_names()
        self._loop = BackgroundLoop("strop-reward-loop")
        if isinstance(function, ListScorer):
            function.limit(timeout)

    def __call__(self, sample: RewardSample) -> object:
        return self.run(self.call_for(sample))

    def call_for(self, sample: RewardSample) -> ScorerCall:
        """Return the call for one sample."""
        if self.takes_columns:
            return self._call_with_columns(column_arguments(sample))
        extra_info = without_facts(sample.extra_info)
        values = (sample.data_source, sample.solution_str, own_copy(sample.ground_truth), extra_info)
        return self._call(SAMPLE_ARGUMENTS, values)

    def call_with_lists(self, samples: Sequence[RewardSample]) -> Sequence[object]:
        """Call the function once for all samples; ValueError if it does not return one value for each."""
        timeout = None
        if self.timeout is not None:
            timeout = self.timeout * len(samples)
        values = self.run(self._list_call(samples), timeout)
        if hasattr(values, "tolist"):
            values = values.tolist()
        returned = f"a {type(values).__name__}"
        if isinstance(values, list | tuple):
            if len(values) == len(samples):
                return values
            returned = f"{len(values)} values"
        raise ValueError(
            f"{self.name} was called with {len(samples)} samples and returned {returned}; it must return a "
            f"list of {len(samples)}."
        )

    @property
    def thread_timeout(self) -> float | None:
        """Seconds for a thread that makes one call."""
        if self.timeout is None or not self.is_async:
            return self.timeout
        return self.timeout + LOOP_GRACE

    @property
    def takes_columns(self) -> bool:
        """Whether the function gets the columns of the row by name."""
        return self.style is not None and self.style.takes_columns

    def _list_call(self, samples: Sequence[RewardSample]) -> ScorerCall:
        if isinstance(self.function, ListScorer):
            return ScorerCall(self.function, (samples,))
        if self.takes_columns:
            return self._call_with_columns(list_arguments(samples))
        columns = (
            [sample.data_source for sample in samples],
            [sample.solution_str for sample in samples],
            [own_copy(sample.ground_truth) for sample in samples],
            [without_facts(sample.extra_info) for sample in samples],
        )
        return self._call(LIST_ARGUMENTS, columns)

    def _call_with_columns(self, given: Mapping[str, object]) -> ScorerCall:
        arguments = select_arguments(self.name, self._parameters, {**given, **self.options})
        return ScorerCall(self.function, kwargs=arguments)

    def run(self, call: ScorerCall, timeout: float | None = None) -> object:
        """Make the call; an awaitable result is awaited on a background event loop."""
        try:
            result = call.function(*call.args, **call.kwargs)
            if inspect.isawaitable(result):
                return self._loop.run(_as_coroutine(result), timeout or self.timeout)
            return result
        finally:
            reopen_streams(self.name)

    def close(self) -> None:
        """Stop the background event loop."""
        self._loop.close()
        if isinstance(self.function, ListScorer):
            self.function.close()

    def _call(self, names: Sequence[str], values: Sequence[object]) -> ScorerCall:
        arguments = dict(zip(names, values)) | self.options
        if self._accepted is not None:
            arguments = {name: value for name, value in arguments.items() if name in self._accepted}
        return ScorerCall(self.function, kwargs=arguments)

    def _accepted_names(self) -> set[str] | None:
        """Return the argument names that the function takes, None if it takes all; ValueError if it cannot
        fit."""
        parameters = self._parameters
        if parameters is None:
            return None
        given = {*SAMPLE_ARGUMENTS, *self.options}
        if self.takes_lists:
            given = {*LIST_ARGUMENTS, *self.options}
        missing = [p.name for p in parameters if is_required(p) and p.name not in given]
        if self.style is not None and self.style.takes_columns:
            missing = []  # the rest are columns of rows that are not known yet
            if self.style.takes_lists != self.takes_lists:
                missing = [self.style.value]
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if missing or positional:
            raise ValueError(self._signature_error(missing or positional, given))
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return None
        names = {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}
        unknown = sorted(set(self.options) - names)
        if unknown:
            raise ValueError(
                f"custom_reward_function.reward_kwargs has {unknown}, but {self.name} does not take "
                f"it.{did_you_mean(unknown[0], names)} It takes: {', '.join(sorted(names)) or 'nothing'}."
            )
        return names

    def _signature_error(self, names: Sequence[str], given: set[str]) -> str:
        hint = ""
        if not self.takes_lists and set(names) & {*LIST_ARGUMENTS, "completions"}:
            hint = " Functions that take lists need reward_model.reward_manager=batch."
        elif self.takes_lists and set(names) & {*SAMPLE_ARGUMENTS, "completion"}:
            hint = (
                " The reward manager batch calls with lists; set reward_model.reward_manager=naive for one "
                "sample at a time."
            )
        return (
            f"{self.name} requires {', '.join(names)}, which it is not given by keyword. Arguments: "
            f"{', '.join(sorted(given))}; add your own with custom_reward_function.reward_kwargs.{hint}"
        )


def load_function(
    path: str,
    name: str,
    options: Mapping[str, object] | None = None,
    *,
    takes_lists: bool | None = False,
    timeout: float | None = None,
    given: Callable[..., object] | None = None,
) -> RewardFunction:
    """Load the function `name` of the file or module `path`; ValueError if that is not possible. `given` is
    the function itself, where the caller has it."""
    try:
        function = given or load_attribute(path, name, "custom_reward_function.name")
        return RewardFunction(function, options, takes_lists=takes_lists, timeout=timeout)
    except ValueError as error:
        raise ValueError(f"custom_reward_function.path={path}: {error}") from error


async def _as_coroutine(awaitable: Awaitable[Result]) -> Result:
    return await awaitable
