"""Pages of samples: only the columns and row groups that a page shows are read.

A step is one file whose name tells split and step, so a million samples cost no more to open than a thousand. Over all steps,
files are looked through from the newest back until the time of an answer is over; it says where to go on.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from strop.board.crew import LONGEST_TURN
from strop.board.find import NotFound, RunFolder
from strop.board.listing import SPLITS, Listings
from strop.board.misses import Misses, Wanted
from strop.board.sample_file import (
    SAMPLE_FACTS,
    TEXTS,
    Damaged,
    groups_of,
    opened,
    pieces_with,
    read_rows,
    rows_of,
)
from strop.run.sample_table import TOKEN_TABLES
from strop.run.samples import FOLDER, file_name

LONGEST_TEXT = 20_000
"""Characters of a text in one answer; the rest is asked for piece by piece."""
PREVIEW = 240
MOST_TOKENS = 4096


@dataclass(frozen=True)
class Query:
    show: str = "all"
    sort: str = "order"
    search: str = ""
    offset: int = 0
    limit: int = 30


class SampleFolder:
    """The samples of a run."""

    def __init__(self, run: RunFolder, listings: Listings | None = None, misses: Misses | None = None):
        self.folder = run.file(FOLDER)
        self._listings = listings or Listings()
        self._misses = misses or Misses()

    def steps(self) -> dict[str, list[int]]:
        """Steps of each split, known from the names of files alone."""
        return {split: steps.tolist() for split, steps in self._listings.steps(self.folder).items()}

    def page(self, split: str, step: int, query: Query) -> dict[str, Any]:
        """Some groups of one step."""
        with self._open(split, step) as file:
            groups = groups_of(file, query.show, query.sort, query.search)
            shown = groups.slice(query.offset, query.limit)
            return {"total": groups.num_rows, "groups": _described(file, shown, step)}

    def scan(
        self, split: str, query: Query, start: tuple[int, int] | None = None, seconds: float = LONGEST_TURN
    ) -> dict[str, Any]:
        """Groups of all steps, newest first, until a page is full or the time is over. `start` is (step, groups of it to pass
        over), as an earlier answer named it under `next`."""
        steps = [step for step in reversed(self._known(split)) if start is None or step <= start[0]]
        without = self._misses.of(Wanted(self.folder, split, query.show, query.search))
        until = time.monotonic() + seconds
        found: list[dict[str, Any]] = []
        damaged: list[str] = []
        for place, step in enumerate(steps):
            if len(found) >= query.limit or (place and time.monotonic() > until):
                return {"groups": found, "damaged": damaged, "left": len(steps) - place, "next": (step, 0)}
            identity = self._identity(split, step)
            if identity is None or without.has(step, identity):
                continue
            skip = start[1] if start is not None and step == start[0] else 0
            try:
                with self._open(split, step) as file:
                    groups = groups_of(file, query.show, query.sort, query.search)
                    shown = groups.slice(skip, query.limit - len(found))
                    found += _described(file, shown, step)
            except Damaged as error:
                damaged.append(str(error))
                continue
            if not groups.num_rows:
                without.add(step, identity)
            elif groups.num_rows > skip + shown.num_rows:
                after = (step, skip + shown.num_rows)
                return {"groups": found, "damaged": damaged, "left": len(steps) - place, "next": after}
        return {"groups": found, "damaged": damaged, "left": 0, "next": None}

    def group(self, split: str, step: int, group: int) -> dict[str, Any]:
        """All samples of one prompt; long texts are cut."""
        with self._open(split, step) as file:
            rows = rows_of(file, group)
            samples = read_rows(file, rows, [*SAMPLE_FACTS, "response"]).to_pylist()
            prompt = read_rows(file, rows[:1], ["prompt"])["prompt"][0].as_py()
        first = samples[0]
        return {
            "step": step,
            "group": group,
            "index": first["index"],
            "data_source": first["data_source"],
            "ground_truth": _cut(first["ground_truth"]),
            "prompt": _cut(prompt),
            "prompt_tokens": first["prompt_tokens"],
            "samples": [_sample(row) for row in samples],
        }

    def text(self, split: str, step: int, group: int, sample: int, column: str, start: int) -> dict[str, Any]:
        """A further piece of a long text."""
        if column not in TEXTS:
            raise NotFound(f"There is no text {column[:40]!r}.")
        with self._open(split, step) as file:
            text = read_rows(file, rows_of(file, group, sample), [column])[column][0].as_py() or ""
        return {"text": text[start : start + LONGEST_TEXT], "start": start, "length": len(text)}

    def tokens(self, split: str, step: int, group: int, sample: int, start: int) -> dict[str, Any]:
        """Text and numbers of each token, MOST_TOKENS from `start` on. A list that was not computed is null."""
        names = ["ids", "tokens", "role", "rollout_log_probs", *TOKEN_TABLES]
        with self._open(split, step) as file:
            table = read_rows(file, rows_of(file, group, sample), names)
        lists = {name: table[name][0].values for name in names}
        cut = {name: None if found is None else found.slice(start, MOST_TOKENS).to_pylist() for name, found in lists.items()}
        return {"start": start, "length": len(lists["ids"]), **cut}

    def history(self, split: str, index: int, source: str, seconds: float = LONGEST_TURN) -> dict[str, Any]:
        """What one row of the data scored at every step at which it was kept."""
        without = self._misses.of(Wanted(self.folder, split, row=(index, source)))
        found: list[dict[str, Any]] = []
        damaged: list[str] = []
        until = time.monotonic() + 2 * seconds
        steps = list(self._known(split))
        while steps and time.monotonic() < until:
            step = steps.pop()
            identity = self._identity(split, step)
            if identity is None or without.has(step, identity):
                continue
            try:
                with self._open(split, step) as file:
                    scores = _scores_of(file, step, index, source)
            except Damaged as error:
                damaged.append(str(error))
                continue
            found += scores
            if not scores:
                without.add(step, identity)
        return {"steps": found[::-1], "damaged": damaged, "left": len(steps)}

    def _known(self, split: str) -> Sequence[int]:
        return self.steps().get(split, [])

    def _identity(self, split: str, step: int) -> int | None:
        """What tells this file from one that replaces it; None where there is no file, or a link, which is not followed."""
        try:
            facts = os.lstat(f"{self.folder}/{file_name(split, step)}")
        except OSError:
            return None
        return hash((facts.st_ino, facts.st_size, facts.st_mtime_ns)) if stat.S_ISREG(facts.st_mode) else None

    @contextmanager
    def _open(self, split: str, step: int) -> Iterator[pq.ParquetFile]:
        if split not in SPLITS:
            raise NotFound(f"There are samples of {' and '.join(SPLITS)}, not of {split[:40]!r}.")
        if self._identity(split, step) is None:
            raise NotFound(f"No {split} samples of step {step} are here.")
        with opened(self.folder / file_name(split, step)) as file:
            yield file


def _described(file: pq.ParquetFile, groups: pa.Table, step: int) -> list[dict[str, Any]]:
    """Groups for a list: the sums, the score of every sample, the beginning of the prompt."""
    if not groups.num_rows:
        return []
    firsts, counts = groups["row_min"].to_pylist(), groups["row_count"].to_pylist()
    rows = [first + i for first, count in zip(firsts, counts) for i in range(count)]
    scores = read_rows(file, rows, ["score"])["score"].to_pylist()
    prompts = pc.utf8_slice_codeunits(read_rows(file, firsts, ["prompt"])["prompt"], 0, PREVIEW).to_pylist()
    described = []
    for group, prompt in zip(groups.to_pylist(), prompts):
        own, scores = scores[: group["row_count"]], scores[group["row_count"] :]
        described.append(
            {
                "step": step,
                "group": group["group"],
                "index": group["index_min"],
                "data_source": group["data_source_min"],
                "prompt": prompt,
                "scores": own,
                "mean": group["score_mean"],
                "spread": group["score_stddev"],
                "zero_variance": group["zero_variance_max"],
                "failed": group["failed_sum"],
                "truncated": group["truncated_sum"],
                "tokens": group["response_tokens_mean"],
            }
        )
    return described


def _scores_of(file: pq.ParquetFile, step: int, index: int, source: str) -> list[dict[str, Any]]:
    pieces = pieces_with(file, "index", index)
    if not pieces:
        return []
    table = file.read_row_groups(pieces, ["index", "data_source", "group", "score"], use_threads=False)
    rows = table.filter((pc.field("index") == index) & (pc.field("data_source") == source))
    if not rows.num_rows:
        return []
    return [{"step": step, "group": rows["group"][0].as_py(), "scores": rows["score"].to_pylist()}]


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    left_out = ("group", "index", "data_source", "ground_truth", "response", "reported", "prompt_tokens")
    facts = {name: value for name, value in row.items() if name not in left_out}
    return {**facts, "response": _cut(row["response"]), "reported": _reported(row["reported"])}


def _reported(text: str | None) -> dict[str, Any]:
    """What the scorer and the agent said: numbers as they are, anything else as a short text."""
    try:
        said = json.loads(text or "{}")
    except ValueError:
        return {"unreadable": (text or "")[:PREVIEW]}
    if not isinstance(said, dict):
        return {"value": str(said)[:PREVIEW]}
    return {str(key): value if isinstance(value, int | float) else _short(value) for key, value in list(said.items())[:100]}


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} …"


def _cut(text: str | None) -> dict[str, Any] | None:
    return None if text is None else {"text": text[:LONGEST_TEXT], "length": len(text)}
