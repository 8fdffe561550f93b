"""The preflight of supervised training: tokenizer, chat template, model folder, and every row. No weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strop.config.rules import Finding, error, warning
from strop.config.schema.supervised import DpoTrainer, RmTrainer, SftTrainer
from strop.data.probe import probe_template
from strop.data.supervised import Pair, SupervisedDataset, UnusableRow, build_supervised
from strop.trainer.preflight_data import EVERY_ROW_UP_TO, count, find_tokenizer, head_findings, known_config

NAMED = 3
"""Unusable rows that are quoted; the others are counted."""


@dataclass
class Survey:
    """What reading the rows showed."""

    read: int = 0
    unusable: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    taught: int = 0
    highest: int = -1
    """Of the token ids."""


def examine_supervised(config: Any, report: Any) -> int | None:
    """Add findings and facts to the report; returns the number of training rows where it is known."""
    report.findings += model_findings(config)
    tokenizer, findings = find_tokenizer(config.model, "model.path")
    report.findings += findings
    if tokenizer is not None:
        report.findings += template_findings(config, tokenizer)
    rows: int | None = None
    for split in ("train", "val"):
        paths, key = getattr(config.data, f"{split}_files"), f"data.{split}_files"
        if not paths:
            continue
        if tokenizer is None or not report.ok:  # what is wrong with the model is said once, not again for each file
            found, findings = (None, []) if config.data.custom_cls.path else count(paths, key)
            report.findings += findings
        else:
            found = _rows(config, tokenizer, split, report)
        if split == "train":
            rows = found
    return rows


def model_findings(config: Any) -> list[Finding]:
    """Folders whose config.json says that they hold something else; a hub name is taken on trust."""
    wanted = "scalar" if isinstance(config, RmTrainer) else "language"
    paths = {"model.path": config.model.path}
    if isinstance(config, DpoTrainer) and config.ref.path != config.model.path:
        paths["ref.path"] = config.ref.path
    findings: list[Finding] = []
    for key, path in paths.items():
        try:
            findings += head_findings(key, path, wanted)
        except ValueError as refused:
            findings.append(error(key, str(refused).removeprefix(f"model.path={path!r} ")))
    return findings


def template_findings(config: Any, tokenizer: Any) -> list[Finding]:
    data = config.data
    several = data.multiturn.enable if isinstance(config, SftTrainer) else data.prompt_key is None
    found = probe_template(
        tokenizer,
        template=data.chat_template or config.model.custom_chat_template,
        kwargs=data.apply_chat_template_kwargs,
        plain=not data.apply_chat_template,
        multi_turn=several,
    )
    return [Finding(f.level, "chat template", f.message) for f in found]


def _rows(config: Any, tokenizer: Any, split: Any, report: Any) -> int | None:
    key = f"data.{split}_files"
    try:
        dataset = build_supervised(config.data, tokenizer, split=split)
        survey = look(dataset)
    except (ValueError, OSError) as problem:
        report.findings.append(error(key, str(problem)))
        return None
    report.findings += judge(survey, config.data, key) + vocabulary_findings(survey, config.model, key)
    report.datasets[split] = dataset
    tokens = sum(survey.lengths)
    share = f", {survey.taught / tokens:.0%} taught" if tokens else ""
    longest = max(survey.lengths, default=0)
    report.data[f"{split}_files"] = f"{len(dataset)} rows; {survey.read} read: {tokens} tokens{share}, longest row {longest}"
    return len(dataset)


def look(dataset: SupervisedDataset) -> Survey:
    """Read all rows, or an even sample of many."""
    survey = Survey()
    for place in np.unique(np.linspace(0, len(dataset) - 1, min(len(dataset), EVERY_ROW_UP_TO)).astype(np.int64)):
        survey.read += 1
        try:
            item, _ = dataset.whole(int(place))
        except UnusableRow as problem:
            survey.unusable.append(str(problem))
            continue
        sides = (item.chosen, item.rejected) if isinstance(item, Pair) else (item,)
        survey.lengths += [len(side.ids) for side in sides]
        survey.taught += sum(sum(side.mask) for side in sides)
        survey.highest = max(survey.highest, *(max(side.ids) for side in sides))
    return survey


def vocabulary_findings(survey: Survey, model: Any, key: str) -> list[Finding]:
    """Tokens that the model has no embedding for: the tokenizer is that of another model."""
    try:
        known = getattr(known_config(model), "vocab_size", None)
    except ValueError as problem:
        return [error("model.path", str(problem))]
    if known is None or survey.highest < known:
        return []
    said = f"{key} has the token id {survey.highest}, but the model knows {known} tokens: its tokenizer is another one."
    return [error("model.tokenizer_path", f"{said} Give a model and a tokenizer that belong together.")]


def judge(survey: Survey, data: Any, key: str) -> list[Finding]:
    findings = []
    bad, read = len(survey.unusable), survey.read
    if bad == read:
        findings.append(error(key, f"none of the {read} rows can be learned from. The first: {survey.unusable[0]}"))
    elif bad and data.bad_rows == "error":
        findings += [error(key, problem) for problem in survey.unusable[:NAMED]]
        findings.append(
            error(key, f"{bad} of {read} rows cannot be learned from. Mend them, or set data.bad_rows=skip to leave them out.")
        )
    elif bad:
        findings.append(warning(key, f"{bad} of {read} rows are left out, for instance: {survey.unusable[0]}"))
    long = sum(length > data.max_length for length in survey.lengths)
    if long:
        said = f"{long} of {len(survey.lengths)} sequences are over data.max_length={data.max_length}"
        longest = max(survey.lengths)
        if data.truncation == "error":
            fix = f"Set it to {longest}, or cut them: data.truncation=left (keeps their end) or right (keeps their beginning)."
            findings.append(error(key, f"{said} (the longest has {longest} tokens). {fix}"))
        else:
            findings.append(warning(key, f"{said} and will be cut ({data.truncation})."))
    return findings
