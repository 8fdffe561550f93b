"""How a user's reward function is called. The names of its parameters say it:

    completion                    once per response: the text, and the columns of its row by name
    completions                   once per batch, with lists (TRL's form): prompts, completions, the columns
    solution_str, ground_truth    once per response: verl's arguments
    solution_strs, ground_truths  once per batch, with lists: verl's arguments

    def reward(completion, answer, **row): ...
    def reward(prompts, completions, answer, **columns): ...
    def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...

The columns of a row are those of its file, and the keys of its `extra_info`, which win. Next to them a
function of the first two forms may ask for `prompt` (`prompts`): the text or the messages of the row;
`ground_truth`, `data_source`, and `completion_ids`.

In TRL's form, completions are texts where the prompt of the row is a text, and lists of messages where it is
one.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar, cast

from strop.rewards.base import RewardSample

Value = TypeVar("Value")
SAMPLE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
LIST_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
ROW_FACTS = "strop"
"""Key of extra_info with facts about the row that a file cannot say otherwise (`RowFacts`)."""


class ListScorer(ABC):
    """Scores samples as they are. In the place of a function, it is called once per batch."""

    @abstractmethod
    def __call__(self, samples: Sequence[RewardSample]) -> Sequence[object]:
        """What a reward function returns, or the error, for each sample."""

    @abstractmethod
    def limit(self, seconds: float | None) -> None:
        """Give the score of one sample at most so many seconds. A sample that takes longer fails alone."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds."""


class CallStyle(Enum):
    """The form of a call."""

    VERL = "solution_str"
    VERL_LISTS = "solution_strs"
    COLUMNS = "completion"
    COLUMN_LISTS = "completions"

    @property
    def takes_lists(self) -> bool:
        return self in (CallStyle.VERL_LISTS, CallStyle.COLUMN_LISTS)

    @property
    def takes_columns(self) -> bool:
        return self in (CallStyle.COLUMNS, CallStyle.COLUMN_LISTS)


def parameters_of(function: Callable[..., object]) -> list[inspect.Parameter] | None:
    """The parameters of a function; None for a ListScorer, and for some functions written in C."""
    if isinstance(function, ListScorer):
        return None
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def style_of(function: Callable[..., object], name: str) -> CallStyle | None:
    """The form that the names of the parameters say; None if they do not say it, a ValueError if they name
    two forms."""
    given = {parameter.name for parameter in parameters_of(function) or ()}
    found = [style for style in CallStyle if style.value in given]
    if len(found) > 1:
        both = " and ".join(style.value for style in found)
        raise ValueError(
            f"{name} takes {both}, which belong to different forms of a reward function. Keep one of them: "
            "completion (one response), completions (a batch, as in TRL), solution_str (verl) or "
            "solution_strs (verl, a batch)."
        )
    if found:
        return found[0]
    if given & set(LIST_ARGUMENTS):
        return CallStyle.VERL_LISTS
    if given & set(SAMPLE_ARGUMENTS):
        return CallStyle.VERL
    return None


@dataclass(frozen=True)
class RowFacts:
    """What the file of a row cannot say by itself."""

    text_prompt: bool = False
    """Whether the prompt was a text; the file has messages for it."""
    null_columns: tuple[str, ...] = ()
    """Columns that are null in this row; reading a file drops them."""

    @classmethod
    def of(cls, extra_info: Mapping[str, object]) -> RowFacts:
        found = extra_info.get(ROW_FACTS)
        if not isinstance(found, Mapping):
            return cls()
        return cls(bool(found.get("text_prompt")), tuple(found.get("null_columns") or ()))


def own_copy(value: Value) -> Value:
    """Lists and dicts copied at every depth: a function may change what it is given, and the next sample of
    the row has the same. Other objects are shared."""
    copied: object = value
    if isinstance(value, dict):
        copied = {name: own_copy(item) for name, item in value.items()}
    elif isinstance(value, list):
        copied = [own_copy(item) for item in value]
    return cast(Value, copied)


def without_facts(extra_info: Mapping[str, object]) -> dict[str, object]:
    """`extra_info` as the user wrote it."""
    return {name: own_copy(value) for name, value in extra_info.items() if name != ROW_FACTS}


def column_arguments(sample: RewardSample) -> dict[str, object]:
    """Everything that a function of the form `completion` may ask for."""
    facts = RowFacts.of(sample.extra_info)
    columns: dict[str, object] = dict.fromkeys(facts.null_columns)
    columns |= own_copy(sample.trajectory.prompt.columns)
    columns |= without_facts(sample.extra_info)
    return {
        "data_source": sample.data_source,
        "ground_truth": own_copy(sample.ground_truth),
        "completion_ids": list(sample.trajectory.response),
        **columns,
        "prompt": prompt_of(sample),
        "completion": sample.solution_str,
    }


def prompt_of(sample: RewardSample) -> object:
    """The prompt as the row has it: a text, or messages."""
    messages = sample.trajectory.prompt.messages
    if _has_text_prompt(sample) and len(messages) == 1:
        return messages[0]["content"]
    return own_copy(messages)


def _has_text_prompt(sample: RewardSample) -> bool:
    """Whether the prompt of the row is a text: in its file, or in what the file was made of."""
    return "prompt" in sample.trajectory.prompt.columns or RowFacts.of(sample.extra_info).text_prompt


def list_arguments(samples: Sequence[RewardSample]) -> dict[str, object]:
    """Everything that a function of the form `completions` may ask for. A column that only other rows have is
    None."""
    rows = [column_arguments(sample) for sample in samples]
    names = dict.fromkeys(name for row in rows for name in row)
    lists: dict[str, object] = {name: [row.get(name) for row in rows] for name in names}
    lists["prompts"] = lists.pop("prompt")
    del lists["completion"]
    lists["completions"] = [_completion_in_form_of_prompt(sample) for sample in samples]
    return lists


def _completion_in_form_of_prompt(sample: RewardSample) -> object:
    if _has_text_prompt(sample):
        return sample.solution_str
    return [{"role": "assistant", "content": sample.solution_str}]


def select_arguments(
    name: str, parameters: Sequence[inspect.Parameter] | None, given: Mapping[str, object]
) -> dict[str, object]:
    """Those of the `given` arguments that a function takes; a ValueError names a column that is missing."""
    if parameters is None:
        return dict(given)
    missing = [parameter.name for parameter in parameters if is_required(parameter)]
    missing = [wanted for wanted in missing if wanted not in given]
    if missing:
        raise ValueError(
            f"{name} needs {', '.join(map(repr, missing))}, but the row has no such column. It has: "
            f"{', '.join(sorted(given))}."
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(given)
    names = {parameter.name for parameter in parameters}
    return {argument: value for argument, value in given.items() if argument in names}


def is_required(parameter: inspect.Parameter) -> bool:
    """Whether a call must give this parameter."""
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return False
    return parameter.default is parameter.empty
