"""Histograms of the samples of a run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from strop.board import histograms as module
from strop.board.histograms import counts, histograms, spaced
from strop.board.run_index import RunFolder
from strop.board.sample_pages import Query, SampleFolder
from tests.board.scene import answer, write_step


def test_counts_of_scores_and_lengths_by_step(tmp_path: Path) -> None:
    for step, scores in ((1, [0.0, 0.0, 1.0]), (2, [1.0, 1.0, None])):
        write_step(tmp_path, "train", step, [answer("x" * (step + i), score=s) for i, s in enumerate(scores)])
    (tmp_path / "samples" / "train_000003.parquet").write_bytes(b"PAR1")
    found = histograms(SampleFolder(RunFolder("id", "run", tmp_path)), "train", 10.0)
    assert found["steps"] == [1, 2] and found["left"] == 0
    assert "train_000003.parquet is damaged" in found["damaged"][0]  # type: ignore[index]
    score = found["score"]
    assert isinstance(score, dict) and len(score["edges"]) == module.BINS + 1
    assert [(row[0], row[-1], sum(row)) for row in score["counts"]] == [(2, 1, 3), (0, 2, 2)]
    lengths = found["response_tokens"]
    assert isinstance(lengths, dict) and (lengths["edges"][0], lengths["edges"][-1]) == (1.0, 4.0)


def test_a_file_of_another_program_hides_no_steps(tmp_path: Path) -> None:
    for step in (1, 2):
        write_step(tmp_path, "train", step, [answer("x")])
    file = tmp_path / "samples" / "train_000002.parquet"
    table = pq.read_table(file)
    texts = pa.array(["high"] * table.num_rows)
    pq.write_table(table.set_column(table.column_names.index("score"), "score", texts), file)
    samples = SampleFolder(RunFolder("id", "run", tmp_path))
    found = histograms(samples, "train", 10.0)
    assert found["steps"] == [1]
    assert "train_000002.parquet has other values in score" in found["damaged"][0]  # type: ignore[index]
    assert len(samples.scan("train", Query())["groups"]) == 1  # type: ignore[arg-type]


def test_reading_ends_with_the_time(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_step(tmp_path, "train", step, [answer("x")])
    found = histograms(SampleFolder(RunFolder("id", "run", tmp_path)), "train", 0.0)
    assert (found["steps"], found["left"]) == ([1], 2)


def test_odd_numbers() -> None:
    assert counts([]) == {"edges": [], "counts": []}
    assert counts([np.array([math.nan])]) == {"edges": [], "counts": [[]]}
    same = counts([np.array([2.0, 2.0, math.inf]), np.array([])])
    rows = same["counts"]
    assert isinstance(rows, list) and [sum(row) for row in rows] == [2, 0]
    for numbers in ([0.1 + 0.2, 0.3], [1e16, 1e16], [-1e308, 1e308]):
        (row,) = counts([np.array(numbers)])["counts"]  # type: ignore[misc]
        assert sum(row) == 2
    assert spaced(list(range(1000)), 60)[::59] == [0, 999]
