"""Checks of data before a run: `probe_template` tests a chat template, `inspect_files` the rows of prompt
files.

Both return findings and load no weights.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from strop.config.schema.data import DataConfig
from strop.data.chat import Chat, Tools, stop_ids
from strop.data.files import FileRows, RowFile, open_file
from strop.data.files import addresses as listed
from strop.data.images import LoadProcessor, counted
from strop.data.prompts import ToolListing, build_chat, chat_of, listed_tools, prompt_lengths
from strop.data.schema import ColumnKeys, RowFields, check_columns, read_row
from strop.data.selection import Indices, select_rows
from strop.data.templates.turn_end import turn_end, turn_end_token
from strop.data.workers import CHUNK
from strop.types import ImageInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Level = Literal["error", "warning", "info"]
SAMPLE = 2000  # rows that are read
MAX_NAMED_ROWS = 3  # bad rows that are named


@dataclass(frozen=True)
class DataFinding:
    """A message; a run cannot start with an error."""

    level: Level
    message: str


# --- Chat templates -----------------------------------------------------------------------------------------


CONVERSATION: list[dict[str, str]] = [
    {"role": "user", "content": "What is 2 plus 3?"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "That makes 6."},
]


def probe_template(
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str | None = None,
    kwargs: Mapping[str, object] | None = None,
    tools: Tools | None = None,
    plain: bool = False,
    further_stop_ids: Sequence[int] | int | None = None,
    learns_to_stop: bool = False,
) -> list[DataFinding]:
    """Render a short conversation and check prefix stability, the generation prompt and the stop token.

    `learns_to_stop`: training adds the token that ends a turn to those that stop the model. An empty list
    means that the template has no problems.
    """
    found: list[DataFinding] = []
    try:
        chat = Chat(tokenizer, template=template, kwargs=dict(kwargs or {}), tools=tools, plain=plain)
        ids = chat.ids(CONVERSATION[:1])
        chat.text(CONVERSATION)
    except ValueError as error:
        return [DataFinding("error", str(error))]
    if not ids:
        found.append(DataFinding("error", "A prompt renders to no tokens at all."))
    if "2 plus 3" not in chat.text(CONVERSATION[:1]):
        found.append(DataFinding("error", "The chat template loses what the user said."))
    if tokenizer.eos_token_id is not None and tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        message = (
            f"The tokenizer has no pad token of its own; {tokenizer.eos_token!r} pads batches, without loss."
        )
        found.append(DataFinding("info", message))
    if not plain and _lacks_generation_prompt(chat):
        message = (
            "The chat template ignores add_generation_prompt: the model must open its own turn before it "
            "answers."
        )
        found.append(DataFinding("warning", message))
    found += _check_prefix_stability(chat)
    stops = stop_ids(tokenizer, further_stop_ids)
    if not stops or not learns_to_stop or turn_end_token(chat) is None:
        found += _check_stop_token(chat, stops)
    return found


def _lacks_generation_prompt(chat: Chat) -> bool:
    """Whether answers start with a role or marker that the generation prompt does not contain."""
    prompt = chat.text(CONVERSATION[:1])
    with_answer = chat.text(CONVERSATION[:2])
    if with_answer.startswith(prompt + CONVERSATION[1]["content"]):
        return False
    return chat.text(CONVERSATION[:1], generate=True) == prompt


GENERATION = "the generation prompt"


def _check_prefix_stability(chat: Chat) -> list[DataFinding]:
    """Each rendering must begin with the ids of the one before."""
    for count in range(1, len(CONVERSATION)):
        after = chat.ids(CONVERSATION[: count + 1], generate=False)
        before = chat.ids(CONVERSATION[:count], generate=False)
        if after[: len(before)] != before:
            return [_instability(chat, f"{count} messages", before, after)]
        if CONVERSATION[count]["role"] == "assistant":
            before = chat.ids(CONVERSATION[:count], generate=True)
            if after[: len(before)] != before:
                return [_instability(chat, GENERATION, before, after)]
    return []


def _instability(chat: Chat, what: str, before: list[int], after: list[int]) -> DataFinding:
    position = 0
    while position < min(len(before), len(after)) and before[position] == after[position]:
        position += 1
    old = chat.tokenizer.decode(before[position : position + 12])
    new = chat.tokenizer.decode(after[position : position + 12])
    rows = "answers without thoughts" if what == GENERATION else "conversations of several turns"
    return DataFinding(
        "warning",
        f"The chat template is not prefix-stable: {what} rendered {old!r} at token {position}, but with one "
        f"more message it is {new!r}. Supervised training on {rows} needs another one (data.chat_template); "
        "agents keep each turn as it was sampled.",
    )


def _check_stop_token(chat: Chat, stops: set[int]) -> list[DataFinding]:
    """The last token with loss in an assistant turn must be one that ends a generation."""
    if not stops:
        message = "The tokenizer has no end-of-text token, so no answer would ever stop. Set eos_token."
        return [DataFinding("error", message)]
    end = turn_end(chat)
    if end is None or end in stops:  # without an end it is reported already: it is not prefix-stable
        return []
    shown = repr(chat.tokenizer.decode([end]))
    known = ", ".join(repr(chat.tokenizer.decode([token])) for token in sorted(stops))
    return [
        DataFinding(
            "warning",
            f"The chat template ends the assistant's turn with {shown}, which does not stop generation "
            f"({known} would). A model trained with it does not learn to stop. Add that token to the stop "
            "tokens, or set eos_token to it.",
        )
    ]


# --- Prompt files -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceReport:
    """Number of rows of one data_source, and the first of them, to try its scorer with."""

    rows: int
    example: RowFields | None


@dataclass
class DataReport:
    """What `inspect_files` found."""

    rows: int = 0
    """Rows of an epoch: those that data.*_max_samples and data.prompt_probs select."""
    columns: list[str] = field(default_factory=list)
    data_sources: dict[str, SourceReport] = field(default_factory=dict)
    agents: dict[str, int] = field(default_factory=dict)
    """Rows per agent loop; rows without agent_name are not counted."""
    measured: int = 0
    """Rows that were read and rendered: all, or an evenly spread sample."""
    too_long: int = 0
    """How many of these prompts are over data.max_prompt_length."""
    too_long_images: int = 0
    """How many of those have images."""
    longest: int = 0
    """Tokens of the longest of these prompts."""
    images: str = ""
    """How many images and videos these prompts have, how large they are, and their tokens."""
    videos: int = 0
    findings: list[DataFinding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no finding is an error."""
        return not any(finding.level == "error" for finding in self.findings)


def inspect_files(
    files: str | Sequence[str] | None,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    key: str = "data.train_files",
    chat_template: str | None = None,
    listing: ToolListing | None = None,
    load_processor: LoadProcessor | None = None,
    sample: int = SAMPLE,
) -> DataReport:
    """Read a sample of those rows of prompt files that a run uses; problems become findings, not exceptions.
    Rendering needs a tokenizer."""
    report = DataReport()
    try:
        keys = ColumnKeys.from_config(config)
        rows = _open(listed(files, key=key), keys, report)
    except ValueError as error:
        report.findings.append(DataFinding("error", str(error)))
        return report
    report.rows = len(rows)
    report.columns = rows.columns
    if not report.ok:
        return report
    chat = None
    if tokenizer is not None:
        try:
            chat = build_chat(config, tokenizer, chat_template, load_processor)
        except ValueError as error:
            report.findings.append(DataFinding("error", str(error)))
    try:
        selected = select_rows(config, rows, "val" if key == "data.val_files" else "train")
        report.rows = len(selected)
        first_rows = _describe_columns(rows, selected, keys, report)
        used = np.unique(selected)
        spread = np.linspace(0, len(used) - 1, min(sample, len(used))).astype(np.int64)
        sampled = np.unique([*used[spread], *first_rows]).tolist()
        parsed = _read_sample(rows, keys, sampled, report)
        if len(sampled) < len(used):
            read = f"{len(sampled)} of {len(used)} rows were read, spread evenly over the files."
            report.findings.append(DataFinding("info", read))
        if chat is not None:
            _measure(parsed, chat, config, report, listing)
    except ValueError as error:
        report.findings.append(DataFinding("error", str(error)))
    return report


def _open(addresses: list[str], keys: ColumnKeys, report: DataReport) -> FileRows:
    """Open all usable files, and report the others."""
    opened = []
    for address in addresses:
        try:
            file = open_file(address)
            check_columns(file.columns, keys, where=address)
            opened.append(file)
        except ValueError as error:
            report.findings.append(DataFinding("error", str(error)))
    return FileRows(opened)


def _describe_columns(rows: FileRows, selected: Indices, keys: ColumnKeys, report: DataReport) -> list[int]:
    """Count data sources and agents of the selected rows; return the first row of each source."""
    counts: Counter[str] = Counter()
    first: dict[str, int] = {}
    agents: Counter[str] = Counter()
    times = np.bincount(selected, minlength=len(rows)).tolist()  # a small file of a mixture repeats
    start = 0
    for file in rows.files:
        columns = zip(_source_values(file, keys), file.column("agent_name"))
        for row, (source, agent) in enumerate(columns, start):
            if source is not None and times[row]:
                counts[str(source)] += times[row]
                first.setdefault(str(source), row)
            if agent and times[row]:
                agents[str(agent)] += times[row]
        start += len(file)
    for name, count in counts.items():
        example = None
        with contextlib.suppress(ValueError):  # reported when the sample is read
            example = read_row(rows, first[name], keys)
        report.data_sources[name] = SourceReport(count, example)
    report.agents = dict(agents)
    if not any({"reward_model", keys.label} & set(file.columns) for file in rows.files):
        known = sorted({name for file in rows.files for name in file.columns})
        message = (
            "No reward_model column and no data.label_key: ground_truth is None in reward functions and on "
            f"the board. If a column has the answers, name it in data.label_key: {', '.join(known)}."
        )
        report.findings.append(DataFinding("warning", message))
    return list(first.values())


def _source_values(file: RowFile, keys: ColumnKeys) -> Iterable[object]:
    """Return the data source of every row of a file; its name if it has no such column."""
    if keys.source in file.columns:
        return file.column(keys.source)
    if keys.source == "data_source" and "datasource" in file.columns:
        return file.column("datasource")
    return [file.stem] * len(file)


def _read_sample(
    rows: FileRows, keys: ColumnKeys, indices: list[int], report: DataReport
) -> dict[str, RowFields]:
    """Parse the rows at `indices`; return the good ones by name, and report the bad ones."""
    bad: list[str] = []
    good: dict[str, RowFields] = {}
    for index in indices:
        try:
            good[rows.where(index)] = read_row(rows, index, keys)
        except ValueError as error:
            bad.append(str(error))
    report.measured = len(indices)
    report.findings += bad_row_findings(bad, "rows")
    return good


def bad_row_findings(messages: Sequence[str], what: str) -> list[DataFinding]:
    """The first messages about rows, and how many more there are."""
    found = list(messages[:MAX_NAMED_ROWS])
    if len(messages) > len(found):
        found.append(f"{len(messages) - len(found)} further {what} cannot be used either.")
    return [DataFinding("error", message) for message in found]


def _measure(
    named: dict[str, RowFields],
    chat: Chat,
    config: DataConfig,
    report: DataReport,
    listing: ToolListing | None,
) -> None:
    """Report prompts that are empty or too long."""
    lengths: list[int] = []
    rows = [row for row in named.values() if not row.images and not row.videos]
    for start in range(0, len(rows), CHUNK):
        lengths += prompt_lengths(rows[start : start + CHUNK], chat, listing)
    shown = [row for row in named.values() if row.images or row.videos]
    with_images = _measure_images(shown, chat, report, listing)
    report.too_long_images = sum(length > config.max_prompt_length for length in with_images)
    lengths += with_images
    named = {row.where: row for row in (*rows, *shown)}
    report.longest = max(lengths, default=0)
    report.too_long = sum(length > config.max_prompt_length for length in lengths)
    if 0 in lengths:
        first = list(named)[lengths.index(0)]
        message = f"{lengths.count(0)} prompts render to no tokens at all; the first: {first}."
        report.findings.append(DataFinding("error", message))
    if report.too_long:
        report.findings.append(too_long_finding(report, config, len(lengths)))


def _measure_images(
    rows: list[RowFields], chat: Chat, report: DataReport, listing: ToolListing | None
) -> list[int]:
    """Lengths of prompts with images; unreadable images become findings, and count as one token."""
    lengths: list[int] = []
    bad: dict[str, None] = {}  # what is wrong with the model is said once
    found: list[ImageInput] = []
    for row in rows:
        try:
            own, images = chat_of(chat, row)
            lengths.append(len(own.ids(row.messages, tools=listed_tools(listing, row))))
            found += images
        except ValueError as error:
            bad[str(error)] = None
            lengths.append(1)
    report.findings += bad_row_findings(list(bad), "rows with images")
    counts = []
    for kind in ("image", "video"):
        of_kind = [image for image in found if image.video == (kind == "video")]
        if of_kind:
            counts.append(counted(kind, of_kind, len(rows)))
    report.images = "; ".join(counts)
    report.videos = sum(image.video for image in found)
    return lengths


def too_long_finding(report: DataReport, config: DataConfig, count: int) -> DataFinding:
    """Return the finding about prompts over data.max_prompt_length, of `count` that were measured."""
    problem = (
        f"{report.too_long} of {count} prompts are over data.max_prompt_length={config.max_prompt_length} "
        f"(the longest has {report.longest} tokens)"
    )
    if config.filter_overlong_prompts:
        level: Level = "info"
        if report.too_long == count == report.rows:
            level = "error"
        return DataFinding(level, f"{problem} and will be left out.")
    if config.truncation == "error":
        return DataFinding(
            "error",
            f"{problem}. Set it to {report.longest}, or data.filter_overlong_prompts=true, or "
            "data.truncation=left|right|middle.",
        )
    cut = f"{problem} and will be cut ({config.truncation})"
    if report.too_long_images:
        cut += f", except {report.too_long_images} with images, whose samples will be masked"
    return DataFinding("warning", f"{cut}.")
