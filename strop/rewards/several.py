"""Several reward functions as one: their scores are multiplied by weights and added.

    reward = Several([correct, short], weights=[1.0, 0.2])

Each function may have any form of `signatures.py`, and may be async. Each score is reported under the name of
its function. A function may return None for a sample that it does not apply to, as in TRL; a sample to which
no function applies is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from strop.concurrency import call_each
from strop.registry import load_attribute
from strop.rewards.base import RewardSample, parse_verdict
from strop.rewards.function import RewardFunction
from strop.rewards.signatures import ListScorer, style_of

MAX_ASYNC_CALLS = 256


@dataclass
class Several(ListScorer):
    """Reward functions with their weights. It is called with lists: the reward manager is `batch`."""

    functions: Sequence[Callable[..., object]]
    weights: Sequence[float] | None = None
    options: Mapping[str, object] | None = None
    """Arguments of every call of every function."""

    def __post_init__(self) -> None:
        if not self.functions:
            raise ValueError("There is no reward function in the list.")
        weights = self.weights or [1.0] * len(self.functions)
        if len(weights) != len(self.functions):
            raise ValueError(
                f"There are {len(self.functions)} reward functions and {len(weights)} weights. Give one "
                "weight for each."
            )
        self.weights = [float(weight) for weight in weights]
        self._calls: list[RewardFunction] = []
        for function in self.functions:
            name = str(getattr(function, "__name__", type(function).__name__))
            style = style_of(function, name)
            lists = style is not None and style.takes_lists
            self._calls.append(RewardFunction(function, self.options, takes_lists=lists))
        self.names = _unique([call.name.rpartition(".")[2] for call in self._calls])

    def __call__(self, samples: Sequence[RewardSample]) -> list[object]:
        """A dict with `score` and one entry per function for each sample, or the error of the sample."""
        columns = [_scores(call, samples) for call in self._calls]
        return [self._total([column[place] for column in columns]) for place in range(len(samples))]

    def _total(self, values: Sequence[object]) -> object:
        parts: dict[str, object] = {}
        total = 0.0
        assert self.weights is not None
        for name, weight, value in zip(self.names, self.weights, values, strict=True):
            if isinstance(value, Exception):
                return value
            if value is None:
                continue
            try:
                score = parse_verdict(value).score
            except ValueError as error:
                return ValueError(f"{name}: {error}")
            parts[name] = score
            total += weight * score
        if not parts:
            return ValueError(f"None of {', '.join(self.names)} gave a score for this sample (all: None).")
        return {"score": total, **parts}

    def limit(self, seconds: float | None) -> None:
        for call in self._calls:
            call.timeout = seconds

    def close(self) -> None:
        """Stop the event loops of async functions."""
        for call in self._calls:
            call.close()


def _scores(call: RewardFunction, samples: Sequence[RewardSample]) -> Sequence[object]:
    """What one function says of each sample."""
    if call.takes_lists:
        return call.call_with_lists(samples)
    workers = MAX_ASYNC_CALLS if call.is_async else 1
    # In a list, because `call_each` takes None for a forgotten return.
    answers = call_each(lambda sample: [call(sample)], samples, workers=workers, timeout=call.thread_timeout)
    return [answer[0] if isinstance(answer, list) else answer for answer in answers]


def _unique(names: Sequence[str]) -> list[str]:
    """The names, numbered where one occurs twice; `score` is the name of the sum."""
    seen = Counter({"score": 1})
    made = []
    for name in names:
        seen[name] += 1
        made.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return made


def load_several(places: Sequence[tuple[str, str]], weights: Sequence[float]) -> Several:
    """The functions of files, as (path, name)."""
    return Several([load_attribute(path, name) for path, name in places], weights)
