"""What the preflight says about files of prompts: rows, columns, scorers needed, lengths, and everything that is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.config.schema.data import Data
from strop.data.chat import Chat
from strop.data.files import Rows, open_file
from strop.data.files import addresses as listed
from strop.data.findings import Finding
from strop.data.measure import CHUNK
from strop.data.prompts import ToolListing, chat_of, prompt_lengths
from strop.data.schema import Fields, Keys, check_columns, fields_at

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE = 2000
NAMED = 3  # bad rows that are named, of each kind


@dataclass(frozen=True)
class SourceReport:
    """Rows of one data_source, and the first of them: what its scorer will be asked with."""

    rows: int
    example: Fields | None


@dataclass
class DataReport:
    rows: int = 0
    columns: list[str] = field(default_factory=list)
    data_sources: dict[str, SourceReport] = field(default_factory=dict)
    agents: dict[str, int] = field(default_factory=dict)
    """Rows per agent loop they name; rows that name none are not counted."""
    measured: int = 0
    """Rows that were read and rendered; all, or an evenly spread sample."""
    too_long: int = 0
    """Of those, prompts over data.max_prompt_length."""
    longest: int = 0
    """Tokens of the longest of them."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)


def inspect(
    files: str | Sequence[str] | None,
    config: Data,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    key: str = "data.train_files",
    chat_template: str | None = None,
    listing: ToolListing | None = None,
    sample: int = SAMPLE,
) -> DataReport:
    """Look at files of prompts. What is wrong becomes a finding, never an exception. Without tokenizer nothing is rendered."""
    report = DataReport()
    try:
        keys = Keys.of(config)
        rows = _open(listed(files, key=key), keys, report)
    except ValueError as error:
        report.findings.append(Finding("error", str(error)))
        return report
    report.rows, report.columns = len(rows), rows.columns
    if not report.ok:
        return report
    chat = None
    if tokenizer is not None:
        try:
            chat = chat_of(config, tokenizer, chat_template)
        except ValueError as error:
            report.findings.append(Finding("error", str(error)))
    try:
        firsts = _describe_columns(rows, keys, report)
        spread = np.linspace(0, len(rows) - 1, min(sample, len(rows))).astype(np.int64)
        _read_sample(rows, keys, np.unique([*spread, *firsts]), chat, config, report, listing)
    except ValueError as error:
        report.findings.append(Finding("error", str(error)))
    return report


def _open(addresses: list[str], keys: Keys, report: DataReport) -> Rows:
    """All files that can be used; a finding for each that cannot."""
    opened = []
    for address in addresses:
        try:
            file = open_file(address)
            check_columns(file.columns, keys, where=address)
            opened.append(file)
        except ValueError as error:
            report.findings.append(Finding("error", str(error)))
    return Rows(opened)


def _describe_columns(rows: Rows, keys: Keys, report: DataReport) -> list[int]:
    """Data sources and agents of all rows, from these two columns alone; gives the first row of each source."""
    counts: Counter[str] = Counter()
    first: dict[str, int] = {}
    names: Counter[str] = Counter()
    start = 0
    for file in rows.files:
        by_name = keys.source if keys.source in file.columns or keys.source != "data_source" else "datasource"
        values = file.column(by_name) if by_name in file.columns else iter([file.stem] * len(file))
        for row, value in enumerate(values):
            if value is not None:
                counts[str(value)] += 1
                first.setdefault(str(value), start + row)
        names.update(str(name) for name in file.column("agent_name") if name)
        start += len(file)
    for source, count in counts.items():
        try:
            report.data_sources[source] = SourceReport(count, fields_at(rows, first[source], keys))
        except ValueError:
            report.data_sources[source] = SourceReport(count, None)  # the sample names the row
    report.agents = dict(names)
    if not any({"reward_model", keys.label} & set(file.columns) for file in rows.files):
        said = "No reward_model column and no data.label_key: scorers get no ground truth, only a model can score."
        report.findings.append(Finding("warning", said))
    return list(first.values())


def _read_sample(
    rows: Rows,
    keys: Keys,
    places: Any,
    chat: Chat | None,
    config: Data,
    report: DataReport,
    listing: ToolListing | None = None,
) -> None:
    bad: list[str] = []
    good: dict[str, Fields] = {}
    for place in places:
        try:
            good[rows.where(int(place))] = fields_at(rows, int(place), keys)
        except ValueError as error:
            bad.append(str(error))
    report.measured = len(places)
    report.findings += [Finding("error", message) for message in bad[:NAMED]]
    if len(bad) > NAMED:
        report.findings.append(Finding("error", f"{len(bad) - NAMED} further rows cannot be used either."))
    if len(places) < len(rows):
        report.findings.append(Finding("info", f"{len(places)} of {len(rows)} rows were read, spread evenly over the files."))
    if chat is not None:
        _measure(good, chat, config, report, listing)


def _measure(named: dict[str, Fields], chat: Chat, config: Data, report: DataReport, listing: ToolListing | None) -> None:
    lengths: list[int] = []
    rows = list(named.values())
    for start in range(0, len(rows), CHUNK):
        lengths += prompt_lengths(rows[start : start + CHUNK], chat, listing)
    report.longest = max(lengths, default=0)
    report.too_long = sum(length > config.max_prompt_length for length in lengths)
    if 0 in lengths:
        first = list(named)[lengths.index(0)]
        report.findings.append(Finding("error", f"{lengths.count(0)} prompts render to no tokens at all; the first: {first}."))
    if not report.too_long:
        return
    said = (
        f"{report.too_long} of {len(lengths)} prompts are over data.max_prompt_length={config.max_prompt_length} "
        f"(the longest has {report.longest} tokens)"
    )
    if config.filter_overlong_prompts:
        nothing_left = report.too_long == len(lengths) == report.rows
        report.findings.append(Finding("error" if nothing_left else "info", f"{said} and will be left out."))
    elif config.truncation == "error":
        fix = f"Set it to {report.longest}, or data.filter_overlong_prompts=true, or data.truncation=left|right|middle."
        report.findings.append(Finding("error", f"{said}. {fix}"))
    else:
        report.findings.append(Finding("warning", f"{said} and will be cut ({config.truncation})."))
