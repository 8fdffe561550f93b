"""The rows that a run reads: those of files, or of a data set of the user's own (data.custom_cls).

Files of such a data set may have any format and columns, so they are not opened here: the class is built as
in a run, and a sample of its rows is read."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from strop.config.rules import ConfigFinding, error
from strop.config.schema.data import DataConfig
from strop.config.schema.ppo import PpoConfig
from strop.data.images import LoadProcessor
from strop.data.prompts import PromptDataset, ToolListing, build_chat, build_prompts
from strop.data.report import (
    CONVERSATION,
    DataFinding,
    DataReport,
    SourceReport,
    bad_row_findings,
    inspect_files,
    too_long_finding,
)
from strop.data.schema import RowFields
from strop.preflight.model_checks import local_model_config
from strop.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def inspect_rows(
    config: DataConfig,
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    chat_template: str | None,
    listing: ToolListing | None,
    load_processor: LoadProcessor,
    sample: int,
) -> DataReport | None:
    """Read a sample of the rows of `data.<name>`; problems become findings. None: a class of the user's needs
    a tokenizer, which is not on this machine."""
    if not config.custom_cls.path:
        return inspect_files(
            getattr(config, name),
            config,
            tokenizer,
            key=f"data.{name}",
            chat_template=chat_template,
            listing=listing,
            load_processor=load_processor,
            sample=sample,
        )
    if tokenizer is None:
        return None
    report = DataReport()
    try:
        dataset = build_prompts(
            dataclasses.replace(config, filter_overlong_prompts=False),
            tokenizer,
            split="train" if name == "train_files" else "val",
            chat_template=chat_template,
            listing=listing,
            load_processor=load_processor,
        )
        _read_rows(dataset, config, sample, report)
    except Exception as problem:  # noqa: BLE001 - a user's class may raise anything; it becomes a finding
        report.findings.append(DataFinding("error", f"data.custom_cls: {_told(problem)}"))
    return report


def _read_rows(dataset: PromptDataset, config: DataConfig, sample: int, report: DataReport) -> None:
    report.rows = len(dataset)
    places = np.unique(np.linspace(0, len(dataset) - 1, min(sample, len(dataset))).astype(np.int64)).tolist()
    report.measured = len(places)
    read: list[int] = []
    bad: list[str] = []
    sources: Counter[str] = Counter()
    agents: Counter[str] = Counter()
    examples: dict[str, RowFields] = {}
    for place in places:
        try:
            row = _fields(dataset, int(dataset.indices[place]))
        except ValueError as problem:
            bad.append(str(problem))
            continue
        read.append(place)
        sources[row.data_source] += 1
        agents[row.agent_name or ""] += 1
        examples.setdefault(row.data_source, row)
    report.findings += bad_row_findings(bad, "rows")
    report.data_sources = {name: SourceReport(count, examples[name]) for name, count in sources.items()}
    del agents[""]
    report.agents = dict(agents)
    lengths = dataset.lengths(read)
    report.longest = max(lengths, default=0)
    report.too_long = sum(length > config.max_prompt_length for length in lengths)
    if 0 in lengths:
        first = dataset.where(int(dataset.indices[read[lengths.index(0)]]))
        message = f"{lengths.count(0)} prompts have no tokens at all; the first: {first}."
        report.findings.append(DataFinding("error", message))
    if report.too_long:
        report.findings.append(too_long_finding(report, config, len(lengths)))


def _fields(dataset: PromptDataset, row: int) -> RowFields:
    """A row of the data set, which may be a finished prompt."""
    content = dataset.rows[row]
    if not isinstance(content, Prompt):
        return dataset.fields(row, content)
    return RowFields(
        content.messages,
        content.data_source,
        content.ground_truth,
        extra_info=dict(content.extra_info),
        agent_name=content.agent_name,
        columns=dict(content.columns),
        where=dataset.where(row),
    )


def unknown_token_findings(config: PpoConfig, tokenizer: PreTrainedTokenizerBase) -> list[ConfigFinding]:
    """An error if the chat template, or the end of a response, has a token that the model has no embedding
    for: tokens were added to the tokenizer alone."""
    model = config.actor_rollout_ref.model
    known = getattr(local_model_config(model), "vocab_size", None)
    ids = build_chat(config.data, tokenizer, model.custom_chat_template).ids(CONVERSATION[:1])
    highest = max([*ids, tokenizer.eos_token_id or 0])
    if known is None or highest < known:
        return []
    message = (
        f"{tokenizer.decode([highest])!r} of the tokenizer is token {highest}, but the model knows {known} "
        "tokens. Give a model and a tokenizer that belong together."
    )
    return [error("actor_rollout_ref.model.path", message)]


def _told(problem: Exception) -> str:
    return str(problem) if isinstance(problem, ValueError) else f"{type(problem).__name__}: {problem}"
