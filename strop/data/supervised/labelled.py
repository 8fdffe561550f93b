"""Responses with labels, good or bad, for KTO: rows with a label, or pairs, of which each gives one good and
one bad response."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.catalog import PREFERENCE_LOSSES
from strop.config.schema.supervised import DpoConfig, DpoDataConfig
from strop.data.chat import Chat, Rendered, Tools
from strop.data.examples import PreferencePair
from strop.data.files import Row
from strop.data.prompts import row_name
from strop.data.schema import Message, to_plain
from strop.data.supervised.conversations import (
    UnusableRow,
    answer_messages,
    parse_messages,
    render_conversation,
    row_tools,
)
from strop.data.supervised.datasets import SupervisedDataset

if TYPE_CHECKING:
    from strop.config.schema.roots import AnySupervisedConfig

MAX_STEPS_BACK = 100
"""Rows that are searched for a response to another prompt."""


@dataclass(frozen=True)
class LabelledAnswer(PreferencePair):
    """An answer with a label: `chosen` is the answer, good or bad; `rejected` is the same prompt with the
    answer to another one, which estimates the KL divergence; `margin` is 1 for a good answer and 0 for a bad
    one."""


def reads_labels(config: AnySupervisedConfig) -> bool:
    """Whether the loss of the configuration is one of labelled responses."""
    if not isinstance(config, DpoConfig):
        return False
    return "labels" in PREFERENCE_LOSSES.entry(config.loss.type).facts["needs"]


def dataset_class(config: AnySupervisedConfig) -> type[SupervisedDataset] | None:
    """The class of the data set, where it is not the one that belongs to the section."""
    return LabelledDataset if reads_labels(config) else None


class LabelledDataset(SupervisedDataset):
    """Rows as `LabelledAnswer`. Of pairs, item 2i is the good response of row i, item 2i + 1 its bad one."""

    config: DpoDataConfig

    def __len__(self) -> int:
        return len(self.indices) * self._answers_per_row

    @property
    def _answers_per_row(self) -> int:
        return 1 if self.config.label_key else 2

    def required_columns(self) -> dict[str, str]:
        config = self.config
        columns = {}
        if config.prompt_key:
            columns["data.prompt_key"] = config.prompt_key
        if config.label_key:
            columns |= {"data.label_key": config.label_key, "data.response_key": config.response_key}
        else:
            columns |= {"data.chosen_key": config.chosen_key, "data.rejected_key": config.rejected_key}
        return columns

    def untruncated(self, index: int) -> tuple[LabelledAnswer, str]:
        """Return an item before truncation to data.max_length, and the name of its row; may raise
        UnusableRow."""
        known = self._cache.get(index)
        where = row_name(self.rows, self._row(index))
        if isinstance(known, PreferencePair):
            return LabelledAnswer(known.chosen, known.rejected, known.margin), where
        prompt, answer, column = self._conversation(index)
        chat, images = self.chat_with_images(self.rows[self._row(index)], where, self._row(index))
        tools = row_tools(self.rows[self._row(index)], self.config.tools_key, where)
        own = render_conversation(chat, [*prompt, *answer], len(prompt), column, tools=tools)
        other = self._with_other_answer(index, prompt, chat, tools)
        if images:  # pixels are not cached
            own, other = (dataclasses.replace(side, images=images) for side in (own, other))
        item = LabelledAnswer(own, other, float(self._is_good(index)))
        if not images:
            self._cache.put(index, item)
        return item, where

    def _row(self, index: int) -> int:
        return int(self.indices[index // self._answers_per_row])

    def _is_good(self, index: int) -> bool:
        key = self.config.label_key
        if not key:
            return index % 2 == 0
        row = self._row(index)
        value = to_plain(self.rows[row].get(key))
        if value not in (True, False, 0, 1):
            raise UnusableRow(
                f"{row_name(self.rows, row)}, column {key!r} is {value!r}; expected true or false, 1 or 0."
            )
        return bool(value)

    def _conversation(self, index: int) -> tuple[list[Message], list[Message], str]:
        """The messages of the prompt, those of the response, and the name of the response's column."""
        config = self.config
        number = self._row(index)
        row: Row = self.rows[number]
        if not isinstance(row, dict):
            raise ValueError(
                f"data.custom_cls gives a {type(row).__name__} as row {number}; kto needs rows with columns, "
                "as dicts."
            )
        key = config.response_key
        if not config.label_key:
            key = config.rejected_key if index % 2 else config.chosen_key
        where = row_name(self.rows, number)
        column = f"{where}, column {key!r}"
        answer = to_plain(row.get(key))
        if not config.prompt_key:
            if isinstance(answer, str):
                raise ValueError(
                    f"{column} is text, but without data.prompt_key it must hold a whole conversation (a "
                    "list of messages). Set data.prompt_key to the column with the prompt."
                )
            whole = parse_messages(answer, column)
            return whole[:-1], whole[-1:], column
        prompt = row.get(config.prompt_key)
        prompt_column = f"{where}, column {config.prompt_key!r}"
        if prompt is None:
            raise UnusableRow(f"{prompt_column} is empty.")
        messages = parse_messages(prompt, prompt_column, config.input_template)
        return messages, answer_messages(answer, messages, column), column

    def _with_other_answer(
        self, index: int, prompt: list[Message], chat: Chat, tools: Tools | None
    ) -> Rendered:
        """A prompt with the first of the other responses that can be rendered: a response that makes its own
        row unusable must not cost this one."""
        where = row_name(self.rows, self._row(index))
        for answer in self._other_answers(index, prompt):
            with contextlib.suppress(UnusableRow):
                return render_conversation(chat, [*prompt, *answer], len(prompt), where, tools=tools)
        raise UnusableRow(
            f"{where}: no other row has a response, so that kto cannot estimate the KL divergence."
        )

    def _other_answers(self, index: int, prompt: list[Message]) -> Iterator[list[Message]]:
        """The response of the row before it (of pairs: on the same side), that of the row before that and so
        on; those to the same prompt last."""
        step = self._answers_per_row
        same_prompt = []
        for back in range(1, min(len(self.indices), MAX_STEPS_BACK + 1)):
            try:
                other, answer, _ = self._conversation((index - back * step) % len(self))
            except UnusableRow:
                continue
            if other == prompt:
                same_prompt.append(answer)
            else:
                yield answer
        yield from same_prompt  # many responses to one prompt: better than none
