"""The RL data set: rows of files as `Prompt`s, which are rendered on access."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.config.schema.data import DataConfig
from strop.config.schema.supervised import SupervisedDataConfig
from strop.data.chat import Chat, Tools
from strop.data.files import FileRows, Row, RowSource, open_rows
from strop.data.image_files import UnusableImages
from strop.data.images import ImageProcessor, LoadProcessor
from strop.data.schema import ColumnKeys, RowFields, check_columns, parse_row
from strop.data.selection import Indices, Split, select_rows
from strop.data.workers import measure_prompts
from strop.registry import load_attribute
from strop.types import Images, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CACHED_PROMPTS = 1024
UNUSABLE_LENGTH = 1
"""Tokens of the prompt of a row whose images cannot be read; its samples are masked."""


def truncate(
    ids: list[int], limit: int, mode: str, *, where: str = "a prompt", setting: str = "data.max_prompt_length"
) -> list[int]:
    """Cut ids to `limit`: left keeps the end, right the beginning, middle both ends (an odd token at the
    end).

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
    """Tool schemas that the chat template lists in the prompts of some agents."""

    schemas: Tools
    agents: frozenset[str | None]
    """Names of these agents; None stands for rows without agent_name."""

    def for_agent(self, agent_name: str | None) -> Tools | None:
        """Return the schemas if the agent's prompts list them, else None."""
        return self.schemas if agent_name in self.agents else None


class PromptDataset(Sequence[Prompt]):
    """Prompts by index. `rows` are files, or any sequence of dictionaries or finished `Prompt`s."""

    def __init__(
        self,
        rows: RowSource,
        chat: Chat,
        *,
        keys: ColumnKeys | None = None,
        max_prompt_length: int = DataConfig.max_prompt_length,
        truncation: str = DataConfig.truncation,
        indices: Indices | None = None,
        listing: ToolListing | None = None,
    ):
        self.rows = rows
        self.chat = chat
        self.keys = keys or ColumnKeys()
        self.max_prompt_length = max_prompt_length
        self.truncation = truncation
        if indices is None:
            indices = np.arange(len(rows), dtype=np.int64)
        self.indices = indices
        """The rows that are used, in order."""
        self.listing = listing
        self._cache: OrderedDict[int, Prompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        row = int(self.indices[index])
        if row in self._cache:
            return self._cache[row]
        prompt = self._render(row)
        if not prompt.images:  # pixels of a thousand prompts would not fit
            self._cache[row] = prompt
            if len(self._cache) > CACHED_PROMPTS:
                self._cache.popitem(last=False)
        return prompt

    def where(self, row: int) -> str:
        """Return the name of a row, for messages."""
        return row_name(self.rows, row)

    def fields(self, row: int, content: Row | None = None) -> RowFields:
        """Return a row, by its number in the files, parsed but not rendered; `content` if it was read
        already."""
        stem = "custom"
        folder = None
        columns: list[str] = []
        if isinstance(self.rows, FileRows):
            file = self.rows.place(row)[0]
            stem = file.stem
            folder = file.path.parent
            columns = file.columns
        if content is None:
            content = self.rows[row]
        return parse_row(content, self.keys, where=self.where(row), stem=stem, folder=folder, columns=columns)

    def lengths(self, indices: Sequence[int] | None = None) -> list[int]:
        """Return the number of tokens of prompts, before truncation."""
        chosen = self.indices
        if indices is not None:
            chosen = self.indices[list(indices)]
        lengths: dict[int, int] = {}
        unrendered: dict[int, RowFields] = {}
        for row in map(int, chosen):
            if row in lengths or row in unrendered:
                continue
            content = self.rows[row]
            if isinstance(content, Prompt):
                lengths[row] = len(content.ids)
                continue
            try:
                unrendered[row] = self.fields(row, content)
            except UnusableImages:
                lengths[row] = UNUSABLE_LENGTH
        measured = prompt_lengths(list(unrendered.values()), self.chat, self.listing)
        lengths.update(zip(unrendered, measured))
        return [lengths[int(row)] for row in chosen]

    def without_overlong(self, *, workers: int = 1) -> PromptDataset:
        """Return the data set without prompts over the limit."""
        lengths = measure_prompts(self, workers=workers)
        keep = lengths <= self.max_prompt_length
        dropped = int((~keep).sum())
        if not keep.any():
            raise ValueError(
                f"All {len(self)} prompts are longer than data.max_prompt_length={self.max_prompt_length} "
                f"(the shortest has {lengths.min()} tokens), so nothing is left. Raise it."
            )
        if dropped:
            logger.info(
                "%d of %d prompts are longer than %d tokens and are dropped.",
                dropped,
                len(self),
                self.max_prompt_length,
            )
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
        """Return a hash of the files and the selected rows; a saved position is valid for the same hash
        only."""
        return selection_fingerprint(self.rows, self.indices)

    def _render(self, row: int) -> Prompt:
        content = self.rows[row]
        if isinstance(content, Prompt):
            return dataclasses.replace(content, ids=self._truncate(content.ids, row))
        try:
            fields = self.fields(row, content)
            chat, images = chat_of(self.chat, fields)
            ids = chat.ids(fields.messages, tools=listed_tools(self.listing, fields))
            if images:
                self._refuse_cut(ids, row)
        except UnusableImages as problem:
            logger.warning("%s Its samples are masked.", problem)
            source = str(content.get(self.keys.source) or "unusable")
            return Prompt(
                row, [int(self.chat.tokenizer.eos_token_id or 0)], [], source, unusable=str(problem)
            )
        return Prompt(
            index=row,
            ids=self._truncate(ids, row),
            messages=fields.messages,
            data_source=fields.data_source,
            ground_truth=fields.ground_truth,
            extra_info=fields.extra_info,
            columns=fields.columns,
            agent_name=fields.agent_name,
            images=images,
        )

    def _refuse_cut(self, ids: list[int], row: int) -> None:
        """A prompt with images is never cut: an image would lose some of its tokens."""
        if len(ids) > self.max_prompt_length:
            raise UnusableImages(
                f"{self.where(row)} has {len(ids)} tokens with its images, over "
                f"data.max_prompt_length={self.max_prompt_length}. Raise it, set data.max_pixels, or drop "
                "such rows (data.filter_overlong_prompts=true)."
            )

    def _truncate(self, ids: list[int], row: int) -> list[int]:
        return truncate(ids, self.max_prompt_length, self.truncation, where=self.where(row))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_cache": OrderedDict()}


def prompt_lengths(rows: Sequence[RowFields], chat: Chat, listing: ToolListing | None = None) -> list[int]:
    """Return the number of tokens of each prompt, including listed tools and images."""
    with_tools: list[int] = []
    without_tools: list[int] = []
    lengths = [0] * len(rows)
    for index, row in enumerate(rows):
        if row.images or row.videos:
            try:
                shown, _ = chat_of(chat, row)
                lengths[index] = len(shown.ids(row.messages, tools=listed_tools(listing, row)))
            except UnusableImages:
                lengths[index] = UNUSABLE_LENGTH
        elif listed_tools(listing, row) is None:
            without_tools.append(index)
        else:
            with_tools.append(index)
    for index, length in zip(without_tools, chat.lengths([rows[i].messages for i in without_tools])):
        lengths[index] = length
    if listing is not None:
        measured = chat.lengths([rows[i].messages for i in with_tools], tools=listing.schemas)
        for index, length in zip(with_tools, measured):
            lengths[index] = length
    return lengths


def chat_of(chat: Chat, fields: RowFields) -> tuple[Chat, Images]:
    """Return the chat that renders a row, and its images for the model."""
    if not fields.images and not fields.videos:
        return chat, ()
    return chat.with_images(fields.images, fields.videos, where=fields.where, folder=fields.folder)


def listed_tools(listing: ToolListing | None, fields: RowFields) -> Tools | None:
    """Return the tools that the prompt of a row lists."""
    return None if listing is None else listing.for_agent(fields.agent_name)


def build_chat(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None = None,
    load_processor: LoadProcessor | None = None,
) -> Chat:
    """Return the chat that renders the prompts of a configuration."""
    images = None
    if load_processor is not None:
        images = ImageProcessor.of(load_processor, config)
    return Chat(
        tokenizer,
        template=chat_template,
        kwargs=dict(config.apply_chat_template_kwargs or {}),
        plain=not config.apply_chat_template,
        images=images,
    )


def build_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Split = "train",
    chat_template: str | None = None,
    listing: ToolListing | None = None,
    load_processor: LoadProcessor | None = None,
) -> PromptDataset:
    """Build the training or validation prompts of a configuration."""
    files = config.train_files if split == "train" else config.val_files
    keys = ColumnKeys.from_config(config)
    rows = load_custom_dataset(config, files, tokenizer) or open_rows(files, key=f"data.{split}_files")
    if isinstance(rows, FileRows):
        for file in rows.files:
            check_columns(file.columns, keys, where=file.address)
    dataset = PromptDataset(
        rows,
        build_chat(config, tokenizer, chat_template, load_processor),
        keys=keys,
        max_prompt_length=config.max_prompt_length,
        truncation=config.truncation,
        indices=select_rows(config, rows, split),
        listing=listing,
    )
    if config.filter_overlong_prompts:
        dataset = dataset.without_overlong(workers=config.filter_overlong_prompts_workers)
    return dataset


# --- Shared with supervised data sets -----------------------------------------------------------------------


def row_name(rows: RowSource, row: int) -> str:
    """Return the name of a row, for messages."""
    if isinstance(rows, FileRows):
        return rows.where(row)
    return f"row {row}"


def selection_fingerprint(rows: RowSource, indices: Indices) -> str:
    """Return a hash of the content of `rows` and of the selected rows."""
    content = content_fingerprint(rows)
    return hashlib.sha256(content.encode() + indices.tobytes()).hexdigest()[:16]


def content_fingerprint(rows: RowSource) -> str:
    """Return `rows.fingerprint()` if there is such a method, else the type and the length."""
    fingerprint = getattr(rows, "fingerprint", None)
    if callable(fingerprint):
        return str(fingerprint())
    return f"{type(rows).__qualname__} of {len(rows)}"


def load_custom_dataset(
    config: DataConfig | SupervisedDataConfig,
    files: str | list[str] | None,
    tokenizer: PreTrainedTokenizerBase,
) -> RowSource | None:
    """Build the user's data set (data.custom_cls) from (files, tokenizer, config); None if there is none.

    Its items are rows (dictionaries) or finished items.
    """
    path = config.custom_cls.path
    name = config.custom_cls.name
    if not path:
        return None
    if not name:
        raise ValueError(
            f"data.custom_cls.path={path} is set but data.custom_cls.name is not; name the class in that "
            "file."
        )
    rows = load_attribute(path, name)(files, tokenizer, config)
    missing = [method for method in ("__len__", "__getitem__") if not hasattr(rows, method)]
    if missing:
        raise ValueError(f"{name} in {path} has no {' and no '.join(missing)}; a data set needs both.")
    if not len(rows):
        raise ValueError(f"{name} in {path} holds no rows.")
    return rows
