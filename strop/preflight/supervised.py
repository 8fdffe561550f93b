"""The preflight of supervised training: tokenizer, chat template, model folder, and every row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from strop.config.rules import ConfigFinding, error, warning
from strop.config.rules.megatron import supervised_role
from strop.config.schema.model import ModelConfig
from strop.config.schema.supervised import DpoConfig, RmConfig, SupervisedDataConfig
from strop.data.examples import PreferencePair
from strop.data.files import FileRows
from strop.data.selection import Split
from strop.data.supervised.conversations import UnusableRow
from strop.data.supervised.datasets import SupervisedDataset, build_supervised
from strop.data.supervised.labelled import dataset_class
from strop.models.vision.processor import processor_loader
from strop.preflight.megatron_checks import megatron_findings
from strop.preflight.model_checks import (
    EVERY_ROW_UP_TO,
    count_file_rows,
    expert_findings,
    find_tokenizer,
    head_findings,
    local_model_config,
    lora_findings,
)
from strop.preflight.position_checks import row_position_findings
from strop.preflight.report import PreflightReport
from strop.preflight.template_checks import template_findings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from strop.config.schema.roots import AnySupervisedConfig

NAMED = 3
"""Unusable rows that are quoted; the others are counted."""


@dataclass
class Survey:
    """What reading the rows showed."""

    read: int = 0
    unusable: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    taught: int = 0
    emptied: int = 0
    """Sequences of which data.max_length leaves no trained token."""
    images: int = 0
    """Rows that have some."""
    highest: int = -1
    """Of the token ids."""


def examine_supervised(config: AnySupervisedConfig, report: PreflightReport) -> int | None:
    """Add findings and facts to the report; returns the number of training rows where it is known."""
    tokenizer, findings = find_tokenizer(config.model, "model.path")
    named = {finding.key for finding in findings if finding.level == "error"}
    report.findings += [found for found in model_findings(config) if found.key not in named] + findings
    if tokenizer is not None:
        report.findings += template_findings(
            tokenizer,
            config.model,
            config.data,
            template=config.data.chat_template or config.model.custom_chat_template,
            learns_to_stop=not isinstance(config, RmConfig),
        )
    rows = _examine_split(config, "train", tokenizer, report)
    _examine_split(config, "val", tokenizer, report)
    return rows


def _examine_split(
    config: AnySupervisedConfig,
    split: Split,
    tokenizer: PreTrainedTokenizerBase | None,
    report: PreflightReport,
) -> int | None:
    """The number of rows where it is known."""
    paths = config.data.train_files if split == "train" else config.data.val_files
    if not paths:
        return None
    if tokenizer is not None and report.ok:
        return _rows(config, tokenizer, split, report)
    # An error of the model is reported once, not again for each file.
    if config.data.custom_cls.path:
        return None
    rows, findings = count_file_rows(paths, f"data.{split}_files")
    report.findings += findings
    return rows


def model_findings(config: AnySupervisedConfig) -> list[ConfigFinding]:
    """Folders whose config.json says that they hold something else; a hub name is taken on trust."""
    wanted = "scalar" if isinstance(config, RmConfig) else "language"
    paths = {"model.path": config.model.path}
    if isinstance(config, DpoConfig) and config.ref.path != config.model.path:
        paths["ref.path"] = config.ref.path
    findings: list[ConfigFinding] = []
    for key, path in paths.items():
        try:
            findings += head_findings(key, path, wanted)
        except ValueError as refused:
            findings.append(error(key, str(refused).replace(f"model.path={path!r}", str(path), 1)))
    findings = findings or lora_findings(config.model, "model")
    findings = findings or megatron_findings(supervised_role(config))
    return findings or expert_findings(config.model, config.model.fsdp_config, "model.fsdp_config")


def _rows(
    config: AnySupervisedConfig, tokenizer: PreTrainedTokenizerBase, split: Split, report: PreflightReport
) -> int | None:
    key = f"data.{split}_files"
    try:
        dataset = build_supervised(
            config.data,
            tokenizer,
            split=split,
            kind=dataset_class(config),
            load_processor=processor_loader(config.model),
        )
        survey = survey_rows(dataset)
    except (ValueError, OSError) as problem:
        report.findings.append(error(key, str(problem)))
        return None
    report.findings += row_findings(survey, config.data, key) + vocabulary_findings(survey, config.model, key)
    report.findings += margin_findings(config, dataset)
    if report.ok:
        report.findings += row_position_findings(config, survey.lengths, key)
    report.datasets[split] = dataset
    tokens = sum(survey.lengths)
    shown = f", {survey.images} rows with images" if survey.images else ""
    share = f", {survey.taught / tokens:.0%} trained" if tokens else ""
    longest = max(survey.lengths, default=0)
    report.data[f"{split}_files"] = (
        f"{len(dataset)} rows; {survey.read} read: {tokens} tokens{share}, longest row {longest}{shown}"
    )
    return len(dataset)


def survey_rows(dataset: SupervisedDataset) -> Survey:
    """Read all rows, or an even sample of many."""
    survey = Survey()
    even = np.linspace(0, len(dataset) - 1, min(len(dataset), EVERY_ROW_UP_TO))
    for place in np.unique(even.astype(np.int64)):
        survey.read += 1
        try:
            item, _ = dataset.untruncated(int(place))
        except UnusableRow as problem:
            survey.unusable.append(str(problem))
            continue
        sides = [item]
        if isinstance(item, PreferencePair):
            sides = [item.chosen, item.rejected]
        survey.images += bool(sides[0].images)
        for side in sides:
            survey.lengths.append(len(side.ids))
            survey.taught += sum(side.mask)
            survey.emptied += _is_emptied(side.mask, dataset.config)
            highest_id = max(side.ids)
            survey.highest = max(survey.highest, highest_id)
    return survey


def _is_emptied(mask: list[int], data: SupervisedDataConfig) -> bool:
    """Whether a sequence is cut, and has nothing to learn afterwards."""
    kept = mask[: data.max_length] if data.truncation == "right" else mask[-data.max_length :]
    return len(mask) > data.max_length and not any(kept[1:])  # the first token is not predicted


def vocabulary_findings(survey: Survey, model: ModelConfig, key: str) -> list[ConfigFinding]:
    """Tokens that the model has no embedding for: the tokenizer is that of another model."""
    try:
        known = getattr(local_model_config(model), "vocab_size", None)
    except ValueError as problem:
        return [error("model.path", str(problem))]
    if known is None or survey.highest < known:
        return []
    message = (
        f"{key} has the token id {survey.highest}, but the model knows {known} tokens: its tokenizer is "
        "another one. Give a model and a tokenizer that belong together."
    )
    return [error("model.tokenizer_path", message)]


def margin_findings(config: AnySupervisedConfig, dataset: SupervisedDataset) -> list[ConfigFinding]:
    """Files without the column that loss.margin subtracts."""
    if not isinstance(config, RmConfig) or not isinstance(dataset.rows, FileRows):
        return []
    if not config.loss.margin or config.loss.type != "logsigmoid":
        return []
    name = config.data.margin_key
    for file in dataset.rows.files:
        if name not in file.columns:
            message = (
                f"true, but {file.address} has no column {name!r} (data.margin_key); all its margins would "
                "be 0. Name the column, or set it to false."
            )
            return [error("loss.margin", message)]
    return []


def row_findings(survey: Survey, data: SupervisedDataConfig, key: str) -> list[ConfigFinding]:
    """Rows that cannot be used, and rows over data.max_length."""
    findings = []
    bad = len(survey.unusable)
    read = survey.read
    if bad == read:
        message = f"none of the {read} rows can be learned from. The first: {survey.unusable[0]}"
        findings.append(error(key, message))
    elif bad and data.bad_rows == "error":
        for problem in survey.unusable[:NAMED]:
            findings.append(error(key, problem))
        message = (
            f"{bad} of {read} rows cannot be learned from. Mend them, or set data.bad_rows=skip to leave "
            "them out."
        )
        findings.append(error(key, message))
    elif bad:
        message = f"{bad} of {read} rows are left out, for instance: {survey.unusable[0]}"
        findings.append(warning(key, message))
    too_long = sum(length > data.max_length for length in survey.lengths)
    if not too_long:
        return findings
    message = f"{too_long} of {len(survey.lengths)} sequences are over data.max_length={data.max_length}"
    longest = max(survey.lengths)
    if data.truncation == "error":
        fix = (
            f"Set it to {longest}, or cut them: data.truncation=left (keeps their end) or right (keeps their "
            "beginning)."
        )
        findings.append(error(key, f"{message} (the longest has {longest} tokens). {fix}"))
    elif survey.emptied == len(survey.lengths):
        message += f", and data.truncation={data.truncation} leaves nothing to learn of any."
        findings.append(error(key, f"{message} Set data.max_length higher."))
    else:
        lost = f"; nothing to learn is left of {survey.emptied}" if survey.emptied else ""
        findings.append(warning(key, f"{message} and will be cut ({data.truncation}){lost}."))
    return findings
