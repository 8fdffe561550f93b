"""The data set of reinforcement learning: rows of files become `Prompt`s, rendered when they are asked for."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from strop.config.schema.data import Data
from strop.data.chat import Chat
from strop.data.custom import custom_rows, order_seed
from strop.data.files import Rows, open_rows
from strop.data.measure import measure
from strop.data.schema import Fields, Keys, check_columns, row_fields
from strop.data.selection import Indices, select
from strop.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Split = Literal["train", "val"]
CACHED_PROMPTS = 1024


def truncate(
    ids: list[int], limit: int, mode: str, *, where: str = "a prompt", setting: str = "data.max_prompt_length"
) -> list[int]:
    """Cut ids to `limit`: left keeps the end, right the beginning, middle both ends (the odd token at the end).

    >>> truncate([1, 2, 3, 4, 5], 3, "middle")
    [1, 4, 5]
    """
    if len(ids) <= limit:
        return ids
    if mode == "left":
        return ids[len(ids) - limit :]
    if mode == "right":
        return ids[:limit]
    if mode == "middle":
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]
    if mode == "error":
        raise ValueError(
            f"{where} has {len(ids)} tokens, over {setting}={limit}. Raise it, drop such rows "
            "(data.filter_overlong_prompts=true), or cut them (data.truncation=left|right|middle)."
        )
    raise ValueError(f"data.truncation={mode!r}; choose error, left, right or middle.")


@dataclasses.dataclass(frozen=True)
class ToolListing:
    """Schemas of tools that the chat template lists in the prompts of some agents."""

    schemas: Sequence[dict[str, Any]]
    agents: frozenset[str | None]
    """Agent names of such rows; None stands for rows that name none."""

    def of(self, agent_name: str | None) -> Sequence[dict[str, Any]] | None:
        return self.schemas if agent_name in self.agents else None


class PromptDataset(Sequence[Prompt]):
    """Prompts by place. `rows` are files, or any sequence that gives dictionaries (or finished `Prompt`s)."""

    def __init__(
        self,
        rows: Rows | Sequence[Any],
        chat: Chat,
        *,
        keys: Keys | None = None,
        max_prompt_length: int = 512,
        truncation: str = "error",
        indices: Indices | None = None,
        listing: ToolListing | None = None,
    ):
        self.rows = rows
        self.chat = chat
        self.keys = keys or Keys()
        self.max_prompt_length = max_prompt_length
        self.truncation = truncation
        self.indices = np.arange(len(rows), dtype=np.int64) if indices is None else indices
        self.listing = listing
        self._cache: OrderedDict[int, Prompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: Any) -> Any:
        index = int(self.indices[place])
        if index not in self._cache:
            self._cache[index] = self._render(index)
            if len(self._cache) > CACHED_PROMPTS:
                self._cache.popitem(last=False)
        return self._cache[index]

    def where(self, index: int) -> str:
        return self.rows.where(index) if isinstance(self.rows, Rows) else f"row {index}"

    def fields(self, index: int, row: Any = None) -> Fields:
        """A row by its number in the files, understood but not rendered."""
        stem = self.rows.place(index)[0].stem if isinstance(self.rows, Rows) else "custom"
        return row_fields(self.rows[index] if row is None else row, self.keys, where=self.where(index), stem=stem)

    def lengths(self, places: Sequence[int] | None = None) -> list[int]:
        """Tokens of prompts before truncation."""
        wanted = [int(index) for index in (self.indices if places is None else self.indices[list(places)])]
        rows = {index: self.rows[index] for index in wanted}
        finished = {index: len(row.ids) for index, row in rows.items() if isinstance(row, Prompt)}
        others = [index for index in rows if index not in finished]
        fields = [self.fields(index, rows[index]) for index in others]
        measured = dict(zip(others, prompt_lengths(fields, self.chat, self.listing)))
        return [finished.get(index, measured.get(index, 0)) for index in wanted]

    def without_overlong(self, *, workers: int = 1) -> PromptDataset:
        """The same data set without prompts over the limit."""
        lengths = measure(self, workers=workers)
        keep = lengths <= self.max_prompt_length
        dropped = int((~keep).sum())
        if not keep.any():
            raise ValueError(
                f"All {len(self)} prompts are longer than data.max_prompt_length={self.max_prompt_length} "
                f"(the shortest has {lengths.min()} tokens), so nothing is left. Raise it."
            )
        if dropped:
            logger.info("%d of %d prompts are over %d tokens and left out.", dropped, len(self), self.max_prompt_length)
        return PromptDataset(
            self.rows,
            self.chat,
            keys=self.keys,
            max_prompt_length=self.max_prompt_length,
            truncation=self.truncation,
            indices=self.indices[keep],
            listing=self.listing,
        )

    def fingerprint(self) -> str:
        """Changes when the files or the choice of rows do; a saved position in other data means nothing."""
        own = getattr(self.rows, "fingerprint", None)
        content = own() if callable(own) else f"{type(self.rows).__qualname__} of {len(self.rows)}"
        return hashlib.sha256(str(content).encode() + self.indices.tobytes()).hexdigest()[:16]

    def _render(self, index: int) -> Prompt:
        row = self.rows[index]
        if isinstance(row, Prompt):
            return dataclasses.replace(row, ids=self._cut(row.ids, index))
        fields = self.fields(index, row)
        return Prompt(
            index=index,
            ids=self._cut(self.chat.ids(fields.messages, tools=self._tools(fields)), index),
            messages=fields.messages,
            data_source=fields.data_source,
            ground_truth=fields.ground_truth,
            extra_info=fields.extra_info,
            agent_name=fields.agent_name,
            images=fields.images,
        )

    def _tools(self, fields: Fields) -> Sequence[dict[str, Any]] | None:
        return None if self.listing is None else self.listing.of(fields.agent_name)

    def _cut(self, ids: list[int], index: int) -> list[int]:
        return truncate(ids, self.max_prompt_length, self.truncation, where=self.where(index))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": OrderedDict()}


def prompt_lengths(rows: Sequence[Fields], chat: Chat, listing: ToolListing | None = None) -> list[int]:
    """Tokens of each prompt, the listed tools included."""
    lengths = [0] * len(rows)
    for tools in (None,) if listing is None else (None, listing.schemas):
        places = [place for place, row in enumerate(rows) if (listing and listing.of(row.agent_name)) is tools]
        for place, length in zip(places, chat.lengths([rows[place].messages for place in places], tools=tools)):
            lengths[place] = length
    return lengths


def chat_of(config: Data, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> Chat:
    """How the prompts of a configuration are rendered."""
    return Chat(
        tokenizer,
        template=chat_template,
        kwargs=dict(config.apply_chat_template_kwargs or {}),
        plain=not config.apply_chat_template,
    )


def build_prompts(
    config: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Split = "train",
    chat_template: str | None = None,
    listing: ToolListing | None = None,
) -> PromptDataset:
    """The training or validation prompts of a configuration."""
    train = split == "train"
    files = config.train_files if train else config.val_files
    most = config.train_max_samples if train else config.val_max_samples
    shuffle = config.shuffle if train else config.validation_shuffle
    keys = Keys.of(config)
    rows = custom_rows(config, files, tokenizer) or open_rows(files, key=f"data.{split}_files")
    counts, weights = [len(rows)], None
    if isinstance(rows, Rows):
        for file in rows.files:
            check_columns(file.columns, keys, where=file.address)
        counts, weights = rows.counts, config.prompt_probs if train else None
    dataset = PromptDataset(
        rows,
        chat_of(config, tokenizer, chat_template),
        keys=keys,
        max_prompt_length=config.max_prompt_length,
        truncation=config.truncation,
        indices=select(counts, weights=weights, most=most, shuffle=shuffle, seed=order_seed(config)),
        listing=listing,
    )
    if not len(dataset):
        raise ValueError(f"data.{split}_max_samples={most} leaves no rows. Set it to -1 for all of them.")
    if config.filter_overlong_prompts:
        dataset = dataset.without_overlong(workers=config.filter_overlong_prompts_workers)
    return dataset
