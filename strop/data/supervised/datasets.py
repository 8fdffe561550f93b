"""Rows of supervised training: conversations to imitate (SFT), or a chosen and a rejected answer (RM,
DPO)."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.config.schema.supervised import (
    DpoDataConfig,
    PairDataConfig,
    SftDataConfig,
    SupervisedDataConfig,
)
from strop.data.chat import Chat, Rendered
from strop.data.examples import Example, PreferencePair, RowCache, images_of
from strop.data.files import FileRows, Row, RowSource, open_rows
from strop.data.image_files import UnusableImages
from strop.data.images import ImageProcessor, LoadProcessor
from strop.data.prompts import load_custom_dataset, row_name, selection_fingerprint, truncate
from strop.data.schema import (
    Message,
    check_template,
    nested_value,
    require_column,
    to_plain,
)
from strop.data.selection import Indices, Split, select_rows
from strop.data.supervised.conversations import (
    UnusableRow,
    answer_messages,
    parse_messages,
    render_conversation,
    row_tools,
)
from strop.types import Images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MAX_ROW_WARNINGS = 5
"""Bad rows that are named while training; later ones are only counted."""


class SupervisedDataset(Sequence[Any]):
    """Base of `SftDataset` and `PreferenceDataset`: files, selected rows, the token limit.

    An item is None if its row is unusable and data.bad_rows=skip.
    """

    def __init__(
        self,
        rows: RowSource,
        chat: Chat,
        config: SupervisedDataConfig,
        *,
        indices: Indices | None = None,
    ):
        self.rows = rows
        self.chat = chat
        self.config = config
        if indices is None:
            indices = np.arange(len(rows), dtype=np.int64)
        self.indices = indices
        self._cache = RowCache()
        self._warnings = 0
        if isinstance(rows, FileRows):
            for file in rows.files:
                self.require_columns(file.columns, file.address)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        try:
            item, where = self.untruncated(index)
            return self.truncate(item, where)
        except UnusableRow as problem:
            if self.config.bad_rows == "error" and not isinstance(problem.__cause__, UnusableImages):
                raise ValueError(
                    f"{problem} Fix or remove it, or set data.bad_rows=skip to skip such rows."
                ) from problem
            self._warn("%s It is skipped.", problem)
            return None

    def untruncated(self, index: int) -> tuple[Any, str]:
        """Return an item before truncation to data.max_length, and the name of its row; may raise
        UnusableRow."""
        row = int(self.indices[index])
        where = row_name(self.rows, row)
        item: object = self._cache.get(row)
        if item is None:
            item = self.rows[row]
            if isinstance(item, dict):
                example = self._render(item, where, row)
                if not images_of(example):  # pixels of many rows would not fit
                    self._cache.put(row, example)
                return example, where
            wanted = PreferencePair if isinstance(self.config, PairDataConfig) else Rendered
            if not isinstance(item, wanted):
                raise ValueError(
                    f"{where} of data.custom_cls is a {type(item).__name__}; a row is a dict with columns, "
                    f"or a {wanted.__name__}."
                )
        return item, where

    def chat_with_images(self, item: Row, where: str, row: int) -> tuple[Chat, Images]:
        """Return the chat that renders a row, and its images and videos for the model."""
        images = to_plain(item.get(self.config.image_key)) or []
        videos = to_plain(item.get(self.config.video_key)) or []
        if not images and not videos:
            return self.chat, ()
        folder = self.rows.place(row)[0].path.parent if isinstance(self.rows, FileRows) else None
        try:
            columns = (self.config.image_key, self.config.video_key)
            return self.chat.with_images(images, videos, where=where, columns=columns, folder=folder)
        except ValueError as error:
            raise UnusableRow(str(error)) from error

    def _render(self, item: Row, where: str, row: int) -> Example:
        shown = copy.copy(self)
        shown.chat, inputs = self.chat_with_images(item, where, row)
        example = shown.render(item, where)
        if not inputs:
            return example
        if isinstance(example, Rendered):
            return dataclasses.replace(example, images=inputs)
        chosen = dataclasses.replace(example.chosen, images=inputs)
        rejected = dataclasses.replace(example.rejected, images=inputs)
        return dataclasses.replace(example, chosen=chosen, rejected=rejected)

    def required_columns(self) -> dict[str, str]:
        """Return the columns that every file must have, by the setting that names them."""
        raise NotImplementedError

    def require_columns(self, columns: Sequence[str], where: str) -> None:
        """Raise ValueError if a file lacks a column."""
        for setting, name in self.required_columns().items():
            require_column(columns, name, setting=setting, where=where)

    def render(self, row: Row, where: str) -> Example:
        """Return a row as token ids with a loss mask."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Return a hash of the files and the selected rows."""
        return selection_fingerprint(self.rows, self.indices)

    def truncate(self, item: object, where: str) -> object:
        """Return an item with at most data.max_length tokens."""
        if isinstance(item, Rendered):
            return self._truncate(item, where)
        if isinstance(item, PreferencePair):
            assert isinstance(self.config, PairDataConfig)
            chosen = self._truncate(item.chosen, f"{where}, column {self.config.chosen_key!r}")
            rejected = self._truncate(item.rejected, f"{where}, column {self.config.rejected_key!r}")
            return dataclasses.replace(item, chosen=chosen, rejected=rejected)
        return item

    def _truncate(self, rendered: Rendered, where: str) -> Rendered:
        limit = self.config.max_length
        mode = self.config.truncation
        if len(rendered.ids) <= limit:
            return rendered
        if rendered.images:  # an image would lose some of its tokens
            problem = f"{where} has {len(rendered.ids)} tokens with its images, over data.max_length={limit}."
            raise UnusableRow(problem) from UnusableImages(problem)
        if mode == "error":
            raise ValueError(
                f"{where} has {len(rendered.ids)} tokens, over data.max_length={limit}. Raise it, or cut "
                "such rows (data.truncation=left keeps their end, right their beginning)."
            )
        kept = Rendered(truncate(rendered.ids, limit, mode), truncate(rendered.mask, limit, mode))
        if not any(kept.mask):
            self._warn(
                "%s has no loss: data.truncation=%s at data.max_length=%d of its %d tokens leaves only the "
                "prompt.",
                where,
                mode,
                limit,
                len(rendered.ids),
            )
        return kept

    def _warn(self, message: str, *arguments: object) -> None:
        """Log a warning about a row, for the first few rows; the training loop counts all of them."""
        self._warnings += 1
        if self._warnings <= MAX_ROW_WARNINGS:
            logger.warning(message, *arguments)
        elif self._warnings == MAX_ROW_WARNINGS + 1:
            logger.warning("More rows like these are counted in train/skipped_rows and not named.")


class SftDataset(SupervisedDataset):
    """Rows as `Rendered`: token ids and loss mask."""

    config: SftDataConfig

    def required_columns(self) -> dict[str, str]:
        if self.config.multiturn.enable:
            return {"data.multiturn.messages_key": self.config.multiturn.messages_key}
        columns = {"data.prompt_key": self.config.prompt_key}
        if self.config.response_key:
            columns["data.response_key"] = self.config.response_key
        return columns

    def require_columns(self, columns: Sequence[str], where: str) -> None:
        conversation = self.config.multiturn.messages_key
        lacks_prompts = not self.config.multiturn.enable and self.config.prompt_key not in columns
        if lacks_prompts and conversation in columns:
            raise ValueError(
                f"{where} has no column {self.config.prompt_key!r} (data.prompt_key), but {conversation!r}. "
                "If its rows are whole conversations, set data.multiturn.enable=true."
            )
        super().require_columns(columns, where)

    def render(self, row: Row, where: str) -> Rendered:
        config = self.config
        chat = self.chat
        learn_from = 0
        if (thinking := row.get(config.multiturn.enable_thinking_key)) is not None:
            chat = dataclasses.replace(chat, kwargs={**chat.kwargs, "enable_thinking": bool(thinking)})
        tools = row_tools(row, config.multiturn.tools_key, where)
        if config.multiturn.enable:
            key = config.multiturn.messages_key
            messages = parse_messages(row.get(key), f"{where}, column {key!r}")
        else:
            messages, learn_from = self._prompt_and_response(row, where)
        if config.pretrain_mode:  # any role may come first
            ids = chat.ids(messages, generate=False, tools=tools)
            if not ids:
                raise UnusableRow(f"{where} has no text.")
            end = chat.tokenizer.eos_token_id
            if chat.plain and end is not None and ids[-1] != end:  # else the model would never stop
                ids = [*ids, int(end)]
            return Rendered(ids, [1] * len(ids))
        return render_conversation(chat, messages, learn_from, where, tools=tools)

    def _prompt_and_response(self, row: Row, where: str) -> tuple[list[Message], int]:
        """Return the conversation, and the index of the message where the response begins."""
        config = self.config
        prompt = nested_value(row, config.prompt_key, config.prompt_dict_keys, where=where)
        prompt_column = f"{where}, column {config.prompt_key!r}"
        if prompt is None:
            raise UnusableRow(f"{prompt_column} is empty.")
        messages = parse_messages(prompt, prompt_column, config.input_template)
        if config.response_key is None:
            return messages, len(messages) - 1
        response = nested_value(row, config.response_key, config.response_dict_keys, where=where)
        answer = answer_messages(response, messages, f"{where}, column {config.response_key!r}")
        return [*messages, *answer], len(messages)


class PreferenceDataset(SupervisedDataset):
    """Rows as `PreferencePair`: a chosen and a rejected answer."""

    config: PairDataConfig

    def required_columns(self) -> dict[str, str]:
        columns = {"data.chosen_key": self.config.chosen_key, "data.rejected_key": self.config.rejected_key}
        if self.config.prompt_key:
            columns["data.prompt_key"] = self.config.prompt_key
        return columns

    def render(self, row: Row, where: str) -> PreferencePair:
        chosen_key = self.config.chosen_key
        rejected_key = self.config.rejected_key
        chosen = self._answer(row, chosen_key, where)
        rejected = self._answer(row, rejected_key, where)
        if chosen.ids == rejected.ids:
            raise UnusableRow(
                f"{where}: {chosen_key!r} and {rejected_key!r} say the same, so there is nothing to prefer."
            )
        return PreferencePair(chosen, rejected, margin=self._margin(row, where))

    def _margin(self, row: Row, where: str) -> float:
        """Return the margin of the chosen answer, which reward models read; 0 if the row has none."""
        value = row.get(self.config.margin_key)
        if value is None or isinstance(self.config, DpoDataConfig):
            return 0.0
        try:
            margin = float(value)
        except (TypeError, ValueError):
            margin = math.nan
        if not math.isfinite(margin):
            raise UnusableRow(f"{where}, column {self.config.margin_key!r} is {value!r}, not a number.")
        return margin

    def _answer(self, row: Row, key: str, where: str) -> Rendered:
        """Return the conversation that ends with the answer in the column `key`."""
        column = f"{where}, column {key!r}"
        answer = to_plain(row.get(key))
        tools = row_tools(row, self.config.tools_key, where)
        if self.config.prompt_key:
            prompt = row.get(self.config.prompt_key)
            prompt_column = f"{where}, column {self.config.prompt_key!r}"
            if prompt is None:
                raise UnusableRow(f"{prompt_column} is empty.")
            messages = parse_messages(prompt, prompt_column, self.config.input_template)
            conversation = [*messages, *answer_messages(answer, messages, column)]
            return render_conversation(self.chat, conversation, len(messages), column, tools=tools)
        if isinstance(answer, str):
            raise ValueError(
                f"{column} is text, but without data.prompt_key it must hold a whole conversation (a list of "
                "messages). Set data.prompt_key to the column with the prompt."
            )
        conversation = parse_messages(answer, column)
        return render_conversation(self.chat, conversation, len(conversation) - 1, column, tools=tools)


def build_supervised(
    config: SupervisedDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Split = "train",
    kind: type[SupervisedDataset] | None = None,
    load_processor: LoadProcessor | None = None,
) -> SupervisedDataset:
    """Build the training or validation rows of an sft, rm or dpo configuration, as a data set of class
    `kind`, by default the one that belongs to the section."""
    files = config.train_files if split == "train" else config.val_files
    if config.input_template is not None:
        check_template(config.input_template)
    rows = load_custom_dataset(config, files, tokenizer) or open_rows(files, key=f"data.{split}_files")
    indices = select_rows(config, rows, split)
    images = None
    if load_processor is not None:
        images = ImageProcessor.of(load_processor, config)
    chat = Chat(
        tokenizer,
        template=config.chat_template,
        kwargs=dict(config.apply_chat_template_kwargs or {}),
        plain=not config.apply_chat_template,
        images=images,
    )
    if kind is None:
        kind = PreferenceDataset if isinstance(config, PairDataConfig) else SftDataset
    return kind(rows, chat, config, indices=indices)
