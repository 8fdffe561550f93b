"""Pages of samples for the browser. Only the columns and row groups that a page shows are read.

The samples of a step are one file, whose name holds split and step, so the cost of opening them does not
depend on the number of samples. A search over all steps reads files from the newest to the oldest until its
time is over; the answer says where to continue.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from strop.board.run_index import SPLITS, NotFound, RunFolder, StepListingCache
from strop.board.sample_file import (
    SAMPLE_FACTS,
    TEXTS,
    DamagedSampleFile,
    groups_of,
    images_of,
    open_samples,
    read_rows,
    row_groups_with,
    rows_of,
)
from strop.board.worker_pool import MAX_SEARCH_SECONDS
from strop.run.sample_table import FOLDER, TOKEN_TABLES, file_name

MAX_TEXT = 20_000
"""Characters of a text in one answer; the rest is requested in pieces."""
PREVIEW = 240
"""Characters of a prompt in a list of groups."""
MAX_TOKENS = 4096
"""Tokens in one answer."""
MAX_CACHED_FILES = 250_000
"""Over all searches in the cache, about 100 bytes each; the least recently used ones are dropped first."""


# A cache of searches: the files in which a search found nothing. Sample files never change, so the same
# search can skip them next time. A search for a longer text that contains the first one can skip them too: a
# user who types on, or adds a filter, does not wait for the same files again.


@dataclass(frozen=True)
class SearchKey:
    """A search over all files of a folder."""

    folder: Path
    split: str
    show: str = "all"
    search: str = ""
    row: tuple[int, str] | None = None
    """Index and data source of a row of the dataset."""

    @property
    def text(self) -> str:
        """The search text in lower case if it is ASCII; other characters may have no single lower case."""
        if self.search.isascii():
            return self.search.lower()
        return self.search

    def is_narrower(self, other: SearchKey) -> bool:
        """Whether every match of this search is a match of the other one."""
        same = (self.folder, self.split, self.row) == (other.folder, other.split, other.row)
        return same and other.show in ("all", self.show) and other.text in self.text


class FilesWithoutMatch:
    """The files without a match of one search: the step of each, and an id that changes with the file."""

    def __init__(self, exact: dict[int, int], wider: list[dict[int, int]]):
        """`exact` are the files of this search, `wider` those of wider searches."""
        self._exact = exact
        self._wider = wider

    def has(self, step: int, file: int) -> bool:
        """Whether this file is known to have no match."""
        if self._exact.get(step) == file:
            return True
        return any(files.get(step) == file for files in self._wider)

    def add(self, step: int, file: int) -> None:
        """Remember that this file has no match."""
        self._exact[step] = file


class SearchMissCache:
    """The files without a match, for the most recent searches."""

    def __init__(self, limit: int = MAX_CACHED_FILES) -> None:
        self.limit = limit
        self._searches: OrderedDict[SearchKey, dict[int, int]] = OrderedDict()
        self._lock = threading.Lock()

    def lookup(self, key: SearchKey) -> FilesWithoutMatch:
        """The files that this search can skip."""
        with self._lock:
            exact = self._searches.setdefault(key, {})
            self._searches.move_to_end(key)
            while len(self._searches) > 1 and sum(map(len, self._searches.values())) > self.limit:
                self._searches.popitem(last=False)
            wider: list[dict[int, int]] = []
            for other, files in self._searches.items():
                if other != key and key.is_narrower(other):
                    wider.append(files)
        return FilesWithoutMatch(exact, wider)


@dataclass(frozen=True)
class Query:
    """Which groups a page shows, and in which order."""

    show: str = "all"
    sort: str = "order"
    search: str = ""
    offset: int = 0
    limit: int = 30


class SampleFolder:
    """The samples of a run."""

    def __init__(
        self, run: RunFolder, listings: StepListingCache | None = None, misses: SearchMissCache | None = None
    ):
        self.folder = run.file(FOLDER)
        self._listings = listings or StepListingCache()
        self._misses = misses or SearchMissCache()

    def steps(self) -> dict[str, list[int]]:
        """Steps of each split, from the names of the files."""
        return {split: steps.tolist() for split, steps in self._listings.steps(self.folder).items()}

    def page(self, split: str, step: int, query: Query) -> dict[str, object]:
        """Some groups of one step."""
        with self._open(split, step) as file:
            groups = groups_of(file, query.show, query.sort, query.search)
            shown = groups.slice(query.offset, query.limit)
            return {"total": groups.num_rows, "groups": _group_rows(file, shown, step)}

    def scan(
        self,
        split: str,
        query: Query,
        start: tuple[int, int] | None = None,
        seconds: float = MAX_SEARCH_SECONDS,
    ) -> dict[str, object]:
        """Groups of all steps, newest first, until a page is full or the time is over.

        `start` is (step, number of its groups to skip): the value under `next` in an earlier answer.
        """
        steps = [step for step in reversed(self._steps_of(split)) if start is None or step <= start[0]]
        misses = self._misses.lookup(SearchKey(self.folder, split, query.show, query.search))
        deadline = time.monotonic() + seconds
        found: list[dict[str, object]] = []
        damaged: list[str] = []

        def answer(left: int, next_start: tuple[int, int] | None) -> dict[str, object]:
            return {"groups": found, "damaged": damaged, "left": left, "next": next_start}

        for position, step in enumerate(steps):
            left = len(steps) - position
            if len(found) >= query.limit or (position and time.monotonic() > deadline):
                return answer(left, (step, 0))
            identity = self._identity(split, step)
            if identity is None or misses.has(step, identity):
                continue
            skipped = 0
            if start is not None and step == start[0]:
                skipped = start[1]
            try:
                with self._open(split, step) as file:
                    groups = groups_of(file, query.show, query.sort, query.search)
                    shown = groups.slice(skipped, query.limit - len(found))
                    found += _group_rows(file, shown, step)
            except DamagedSampleFile as error:
                damaged.append(str(error))
                continue
            end = skipped + shown.num_rows
            if not groups.num_rows:
                misses.add(step, identity)
            elif groups.num_rows > end:
                return answer(left, (step, end))
        return answer(0, None)

    def group(self, split: str, step: int, group: int) -> dict[str, object]:
        """All samples of one prompt; long texts are cut."""
        with self._open(split, step) as file:
            rows = rows_of(file, group)
            samples = read_rows(file, rows, [*SAMPLE_FACTS, "response"]).to_pylist()
            prompt = read_rows(file, rows[:1], ["prompt"])["prompt"][0].as_py()
            images, own = images_of(file, rows)
        first = samples[0]
        return {
            "step": step,
            "group": group,
            "index": first["index"],
            "data_source": first["data_source"],
            "ground_truth": _cut(first["ground_truth"]),
            "prompt": _cut(prompt),
            "prompt_tokens": first["prompt_tokens"],
            "images": images,
            "samples": [{**_sample(row), "images": places} for row, places in zip(samples, own, strict=True)],
        }

    def text(
        self, split: str, step: int, group: int, sample: int, column: str, start: int
    ) -> dict[str, object]:
        """A further piece of a long text."""
        if column not in TEXTS:
            raise NotFound(f"There is no text {column[:40]!r}.")
        with self._open(split, step) as file:
            text = read_rows(file, rows_of(file, group, sample), [column])[column][0].as_py() or ""
        return {"text": text[start : start + MAX_TEXT], "start": start, "length": len(text)}

    def tokens(self, split: str, step: int, group: int, sample: int, start: int) -> dict[str, object]:
        """Text and numbers of MAX_TOKENS tokens from `start` on. A list that was not computed is null."""
        names = ["ids", "tokens", "role", "rollout_log_probs", *TOKEN_TABLES]
        with self._open(split, step) as file:
            table = read_rows(file, rows_of(file, group, sample), names)
        page: dict[str, object] = {"start": start, "length": 0}
        for name in names:
            values = table[name][0].values if name in table.column_names else None
            page[name] = None
            if values is not None:
                page[name] = values.slice(start, MAX_TOKENS).to_pylist()
            if name == "ids" and values is not None:
                page["length"] = len(values)
        return page

    def numbers(self, split: str, step: int, columns: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns of numbers of all samples of a step; what is missing is NaN."""
        with self._open(split, step) as file:
            table = file.read(list(columns), use_threads=False)
        return {name: table[name].to_numpy().astype(np.float64) for name in columns}

    def history(
        self, split: str, index: int, source: str, seconds: float = MAX_SEARCH_SECONDS
    ) -> dict[str, object]:
        """The scores of one row of the dataset at every step that kept samples of it."""
        misses = self._misses.lookup(SearchKey(self.folder, split, row=(index, source)))
        found: list[dict[str, object]] = []
        damaged: list[str] = []
        deadline = time.monotonic() + 2 * seconds
        steps = list(self._steps_of(split))
        while steps and time.monotonic() < deadline:
            step = steps.pop()
            identity = self._identity(split, step)
            if identity is None or misses.has(step, identity):
                continue
            try:
                with self._open(split, step) as file:
                    scores = _scores_of(file, step, index, source)
            except DamagedSampleFile as error:
                damaged.append(str(error))
                continue
            found += scores
            if not scores:
                misses.add(step, identity)
        return {"steps": found[::-1], "damaged": damaged, "left": len(steps)}

    def _steps_of(self, split: str) -> Sequence[int]:
        return self.steps().get(split, [])

    def _identity(self, split: str, step: int) -> int | None:
        """An id that changes when the file is replaced; None if there is no file, or a link, which is not
        followed."""
        try:
            facts = os.lstat(f"{self.folder}/{file_name(split, step)}")
        except OSError:
            return None
        if not stat.S_ISREG(facts.st_mode):
            return None
        return hash((facts.st_ino, facts.st_size, facts.st_mtime_ns))

    @contextmanager
    def _open(self, split: str, step: int) -> Iterator[pq.ParquetFile]:
        if split not in SPLITS:
            raise NotFound(f"There are samples of {' and '.join(SPLITS)}, not of {split[:40]!r}.")
        if self._identity(split, step) is None:
            raise NotFound(f"No {split} samples of step {step} are here.")
        with open_samples(self.folder / file_name(split, step)) as file:
            yield file


def _group_rows(file: pq.ParquetFile, groups: pa.Table, step: int) -> list[dict[str, object]]:
    """Groups for a list: the aggregates, the score of every sample, the beginning of the prompt."""
    if not groups.num_rows:
        return []
    firsts = groups["row_min"].to_pylist()
    rows: list[int] = []
    for first, count in zip(firsts, groups["row_count"].to_pylist()):
        rows.extend(range(first, first + count))
    scores = read_rows(file, rows, ["score"])["score"].to_pylist()
    prompts = pc.utf8_slice_codeunits(read_rows(file, firsts, ["prompt"])["prompt"], 0, PREVIEW).to_pylist()
    described: list[dict[str, object]] = []
    end = 0
    for group, prompt in zip(groups.to_pylist(), prompts):
        start = end
        end += group["row_count"]
        described.append(
            {
                "step": step,
                "group": group["group"],
                "index": group["index_min"],
                "data_source": group["data_source_min"],
                "prompt": prompt,
                "scores": scores[start:end],
                "mean": group["score_mean"],
                "spread": group["score_stddev"],
                "zero_variance": group["zero_variance_max"],
                "failed": group["failed_sum"],
                "truncated": group["truncated_sum"],
                "tokens": group["response_tokens_mean"],
            }
        )
    return described


def _scores_of(file: pq.ParquetFile, step: int, index: int, source: str) -> list[dict[str, object]]:
    row_groups = row_groups_with(file, "index", index)
    if not row_groups:
        return []
    table = file.read_row_groups(row_groups, ["index", "data_source", "group", "score"], use_threads=False)
    rows = table.filter((pc.field("index") == index) & (pc.field("data_source") == source))
    if not rows.num_rows:
        return []
    return [{"step": step, "group": rows["group"][0].as_py(), "scores": rows["score"].to_pylist()}]


def _sample(row: Mapping[str, object]) -> dict[str, object]:
    left_out = ("group", "index", "data_source", "ground_truth", "response", "reported", "prompt_tokens")
    facts = {name: value for name, value in row.items() if name not in left_out}
    return {**facts, "response": _cut(row["response"]), "reported": _reported(row["reported"])}


def _reported(text: object) -> dict[str, object]:
    """The extras of the scorer and the agent: numbers unchanged, other values as a short text."""
    text = text or ""
    assert isinstance(text, str)
    try:
        extras = json.loads(text or "{}")
    except ValueError:
        return {"unreadable": text[:PREVIEW]}
    if not isinstance(extras, dict):
        return {"value": str(extras)[:PREVIEW]}
    reported: dict[str, object] = {}
    for key, value in islice(extras.items(), 100):
        if not isinstance(value, int | float):
            value = _short(value)
        reported[str(key)] = value
    return reported


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]} …"


def _cut(text: object) -> dict[str, object] | None:
    """The beginning of a text and its full length."""
    if text is None:
        return None
    assert isinstance(text, str)
    return {"text": text[:MAX_TEXT], "length": len(text)}
