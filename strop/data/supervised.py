"""Rows of supervised training: one answer or conversation to imitate, or a better and a worse one to tell apart."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from strop.config.schema.supervised import PairData, SftData, SupervisedData
from strop.data.chat import Chat, Message, Rendered
from strop.data.custom import custom_rows, order_seed
from strop.data.files import Rows, open_rows
from strop.data.prompts import Split, truncate
from strop.data.schema import as_messages, dig, plain, require_column
from strop.data.selection import Indices, select

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SAID = 5
"""Rows that are named while training."""
KEPT_TOKENS = 50_000_000
"""Tokens of rendered rows that stay in memory: 250 MB. Rendering a row again costs more than many models need to learn it."""


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt; the masks cover the answers."""

    chosen: Rendered
    rejected: Rendered
    margin: float = 0.0
    reference: tuple[float, float] | None = None
    """Log-probs of the two answers under a reference, where they are known."""


class UnusableRow(ValueError):
    """A row that cannot be learned from."""


class SupervisedDataset(Sequence[Any]):
    """What `SftRows` and `PairRows` share: files, the choice of rows, the limit of tokens.

    An item is None where a row cannot be used and data.bad_rows=skip.
    """

    def __init__(self, rows: Rows | Sequence[Any], chat: Chat, config: Any, *, indices: Indices | None = None):
        self.rows = rows
        self.chat = chat
        self.config = config
        self.indices = np.arange(len(rows), dtype=np.int64) if indices is None else indices
        self._kept, self._said = _Kept(), 0
        for file in rows.files if isinstance(rows, Rows) else ():
            for setting, name in self.needed().items():
                require_column(file.columns, name, setting=setting, where=file.address)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: Any) -> Any:
        try:
            item, where = self.whole(place)
            return self.cut(item, where)
        except UnusableRow as problem:
            if self.config.bad_rows == "error":
                raise ValueError(f"{problem} Mend or remove it, or set data.bad_rows=skip to leave such rows out.") from problem
            self._say("%s It is left out.", problem)
            return None

    def whole(self, place: int) -> tuple[Any, str]:
        """An item before it is cut to data.max_length, and where it comes from; UnusableRow if nothing can be made of it."""
        index = int(self.indices[place])
        where = self.rows.where(index) if isinstance(self.rows, Rows) else f"row {index}"
        item = self._kept.get(index)
        if item is None:
            row = self.rows[index]
            item = self._kept.put(index, self.render(row, where)) if isinstance(row, dict) else row
        return item, where

    def needed(self) -> dict[str, str]:
        """Columns that must be there, by the setting that names them."""
        raise NotImplementedError

    def render(self, row: dict[str, Any], where: str) -> Any:
        raise NotImplementedError

    def fingerprint(self) -> str:
        own = getattr(self.rows, "fingerprint", None)
        content = own() if callable(own) else f"{type(self.rows).__qualname__} of {len(self.rows)}"
        return hashlib.sha256(str(content).encode() + self.indices.tobytes()).hexdigest()[:16]

    def cut(self, item: Any, where: str) -> Any:
        """At most data.max_length tokens."""
        if isinstance(item, Pair):
            better, worse = (f"{where}, column {key!r}" for key in (self.config.chosen_key, self.config.rejected_key))
            return dataclasses.replace(item, chosen=self._cut(item.chosen, better), rejected=self._cut(item.rejected, worse))
        return self._cut(item, where) if isinstance(item, Rendered) else item

    def _say(self, message: str, *arguments: Any) -> None:
        """A warning about a row, for the first few: the loop counts them all."""
        self._said += 1
        if self._said <= SAID:
            logger.warning(message, *arguments)
        elif self._said == SAID + 1:
            logger.warning("More rows like these are counted in train/skipped_rows and not named.")

    def _cut(self, rendered: Rendered, where: str) -> Rendered:
        limit, mode = self.config.max_length, self.config.truncation
        if len(rendered.ids) <= limit:
            return rendered
        if mode == "error":
            raise ValueError(
                f"{where} has {len(rendered.ids)} tokens, over data.max_length={limit}. Raise it, or cut such rows "
                "(data.truncation=left keeps their end, right their beginning)."
            )
        kept = Rendered(truncate(rendered.ids, limit, mode), truncate(rendered.mask, limit, mode))
        if not any(kept.mask):
            self._say(
                "%s teaches nothing: data.truncation=%s at data.max_length=%d of its %d tokens leaves only the prompt.",
                *(where, mode, limit, len(rendered.ids)),
            )
        return kept


class _Kept:
    """Rows that were rendered once, five bytes a token, as long as they fit into KEPT_TOKENS."""

    def __init__(self) -> None:
        self.items: dict[int, tuple[float, list[NDArray[Any]]]] = {}
        self.tokens = 0

    def put(self, index: int, item: Any) -> Any:
        """Remember an item; returns it."""
        sides, margin = ((item.chosen, item.rejected), item.margin) if isinstance(item, Pair) else ((item,), 0.0)
        size = sum(len(side.ids) for side in sides)
        if self.tokens + size <= KEPT_TOKENS:
            self.tokens += size
            arrays = [array for side in sides for array in (np.array(side.ids, np.int32), np.array(side.mask, np.uint8))]
            self.items[index] = margin, arrays
        return item

    def get(self, index: int) -> Any:
        if index not in self.items:
            return None
        margin, arrays = self.items[index]
        lists = [array.tolist() for array in arrays]
        if len(lists) == 2:
            return Rendered(*lists)
        return Pair(Rendered(*lists[:2]), Rendered(*lists[2:]), margin)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Kept, ()  # a copy in another process begins with nothing


class SftRows(SupervisedDataset):
    """Rows as `Rendered`: ids, and 1 where the loss falls."""

    config: SftData

    def needed(self) -> dict[str, str]:
        if self.config.multiturn.enable:
            return {"data.multiturn.messages_key": self.config.multiturn.messages_key}
        columns = {"data.prompt_key": self.config.prompt_key}
        return columns | ({"data.response_key": self.config.response_key} if self.config.response_key else {})

    def render(self, row: dict[str, Any], where: str) -> Rendered:
        config = self.config
        chat, tools, learn_from = self.chat, None, 0
        if config.multiturn.enable:
            messages: Sequence[Message] = _messages(row.get(config.multiturn.messages_key), where)
            tools = plain(row.get(config.multiturn.tools_key))
            thinking = row.get(config.multiturn.enable_thinking_key)
            if thinking is not None:
                chat = dataclasses.replace(chat, kwargs={**chat.kwargs, "enable_thinking": bool(thinking)})
        else:
            messages, learn_from = self._prompt_and_response(row, where)
        if config.pretrain_mode:  # whoever speaks first
            ids = chat.ids(messages, generate=False, tools=tools)
            return Rendered(ids, [1] * len(ids))
        return _rendered(chat, messages, learn_from, where, tools=tools)

    def _prompt_and_response(self, row: dict[str, Any], where: str) -> tuple[list[Any], int]:
        """The conversation, and where in it the answer begins."""
        config = self.config
        prompt = dig(row, config.prompt_key, config.prompt_dict_keys, where=where)
        place = f"{where}, column {config.prompt_key!r}"
        if prompt is None:
            raise UnusableRow(f"{place} is empty.")
        messages = _messages(prompt, place, config.input_template)
        if config.response_key is None:
            return messages, len(messages) - 1
        response = dig(row, config.response_key, config.response_dict_keys, where=where)
        return [*messages, *_answer(response, f"{where}, column {config.response_key!r}")], len(messages)


class PairRows(SupervisedDataset):
    """Rows as `Pair`."""

    config: PairData

    def needed(self) -> dict[str, str]:
        columns = {"data.chosen_key": self.config.chosen_key, "data.rejected_key": self.config.rejected_key}
        return columns | ({"data.prompt_key": self.config.prompt_key} if self.config.prompt_key else {})

    def render(self, row: dict[str, Any], where: str) -> Pair:
        better, worse = self.config.chosen_key, self.config.rejected_key
        chosen, rejected = self._side(row, better, where), self._side(row, worse, where)
        if chosen.ids == rejected.ids:
            raise UnusableRow(f"{where}: {better!r} and {worse!r} say the same, so there is nothing to prefer.")
        return Pair(chosen, rejected, margin=self._margin(row, where))

    def _margin(self, row: dict[str, Any], where: str) -> float:
        """How much better the chosen answer is; 0 where the row does not say."""
        said = row.get(self.config.margin_key)
        try:
            margin = 0.0 if said is None else float(said)
        except (TypeError, ValueError):
            margin = math.nan
        if not math.isfinite(margin):
            raise UnusableRow(f"{where}, column {self.config.margin_key!r} is {said!r}, not a number.")
        return margin

    def _side(self, row: dict[str, Any], key: str, where: str) -> Rendered:
        place = f"{where}, column {key!r}"
        said = plain(row.get(key))
        if self.config.prompt_key:
            prompt = row.get(self.config.prompt_key)
            if prompt is None:
                raise UnusableRow(f"{where}, column {self.config.prompt_key!r} is empty.")
            messages = _messages(prompt, where, self.config.input_template)
            whole, learn_from = [*messages, *_answer(said, place)], len(messages)
        else:
            if isinstance(said, str):
                raise ValueError(
                    f"{place} is text, but without data.prompt_key it must hold a whole conversation (a list of messages). "
                    "Set data.prompt_key to the column with the prompt."
                )
            whole = _messages(said, place)
            learn_from = len(whole) - 1
        return _rendered(self.chat, whole, learn_from, place)


def build_supervised(
    config: SupervisedData, tokenizer: PreTrainedTokenizerBase, *, split: Split = "train"
) -> SftRows | PairRows:
    """The training or validation rows of an sft, rm or dpo configuration."""
    train = split == "train"
    files = config.train_files if train else config.val_files
    most = config.train_max_samples if train else config.val_max_samples
    rows = custom_rows(config, files, tokenizer) or open_rows(files, key=f"data.{split}_files")
    counts, weights = [len(rows)], None
    if isinstance(rows, Rows):
        counts, weights = rows.counts, config.prompt_probs if train else None
    indices = select(counts, weights=weights, most=most, shuffle=train and config.shuffle, seed=order_seed(config))
    if not len(indices):
        raise ValueError(f"data.{split}_max_samples={most} leaves no rows. Set it to -1 for all of them.")
    chat = Chat(
        tokenizer,
        template=config.chat_template,
        kwargs=dict(config.apply_chat_template_kwargs or {}),
        plain=not config.apply_chat_template,
    )
    kind = PairRows if isinstance(config, PairData) else SftRows
    return kind(rows, chat, config, indices=indices)


def _messages(value: Any, where: str, input_template: str | None = None) -> list[Any]:
    try:
        return as_messages(value, where=where, input_template=input_template)
    except ValueError as error:
        raise UnusableRow(str(error)) from error


def _rendered(chat: Chat, messages: Sequence[Message], learn_from: int, where: str, **more: Any) -> Rendered:
    """Ids and mask of a conversation that begins with the user, after an optional system message."""
    roles = [message["role"] for message in messages]
    spoken = [role for role in roles if role != "system"]
    if spoken and spoken[0] != "user":
        raise UnusableRow(
            f"{where}: the conversation begins with {spoken[0]!r}, but it must begin with 'user' ({', '.join(roles)})."
        )
    try:
        return chat.conversation(messages, learn_from=learn_from, **more)
    except ValueError as error:
        raise UnusableRow(f"{where}: {error}") from error


def _answer(value: Any, place: str) -> list[Any]:
    """An answer as messages: text is one assistant turn."""
    if value is None or value == "" or value == []:
        raise UnusableRow(f"{place} is empty.")
    return [{"role": "assistant", "content": value}] if isinstance(value, str) else _messages(value, place)
