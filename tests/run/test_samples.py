"""Samples in columns: which are kept, what they hold, and that nothing about them can end a run."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from strop.run.sample_table import (
    ENVIRONMENT,
    FOLDER,
    SAMPLED_ONLY,
    TRAINED,
    SampleJob,
    TokenTexts,
    parse_name,
    sample_table,
)
from strop.run.samples import SampleWriter, UpdateLogProbs, choose_rows, token_tables
from strop.types import Prompt, Trajectory, Turn, batch_of

BYTES = TokenTexts(lambda ids: bytes(ids).decode("utf-8", "replace"))
"""A tokenizer whose tokens are bytes, so that most characters of the world have several."""


def trajectory(group: int, text: str = "four", score: float | None = 1.0, **facts) -> Trajectory:
    ids = list(text.encode())
    facts.setdefault("mask", [1] * len(ids))
    return Trajectory(
        Prompt(10 + group, list(b"2+2="), [], "sums", "4"),
        group,
        ids,
        log_probs=[-0.5] * len(ids),
        score=score,
        **facts,
    )


@pytest.mark.parametrize(
    ("groups", "size", "most", "kept"),
    [(8, 4, 16, 4), (8, 4, 1000, 8), (8, 4, 1, 1), (3, 4, 8, 2), (5, 1, 5, 5), (4, 4, 0, 0)],
)
def test_whole_groups_are_kept_at_even_distances(groups: int, size: int, most: int, kept: int) -> None:
    made = [trajectory(group) for group in range(groups) for _ in range(size)]
    rows = choose_rows(made, most)
    found = [made[row].group for row in rows]
    assert len(rows) == kept * size and found == sorted(found)
    assert [found.count(group) for group in dict.fromkeys(found)] == [size] * kept
    assert list(dict.fromkeys(found)) == [i * groups // kept for i in range(kept)]
    assert rows == choose_rows(made, most)


def test_tokens_that_share_a_character_are_shown_together() -> None:
    assert BYTES.each(list("aé€😀b".encode())) == ["a", "", "", "", "", "", "", "", "", "é€😀", "b"]
    assert "".join(BYTES.each(list("naïve 数学".encode()))) == "naïve 数学"
    assert BYTES.each(b"\xff") == ["\N{REPLACEMENT CHARACTER}"] and BYTES.each([]) == []


def test_a_space_that_a_tokenizer_drops_at_the_beginning_is_seen() -> None:
    words = {1: "▁two", 2: "▁four", 3: "s"}
    texts = TokenTexts(
        lambda ids: "".join(words[i] for i in ids).replace("▁", " ").lstrip(), lambda i: words[i]
    )
    assert texts.each([1, 2, 3]) == [" two", " four", "s"]


def test_columns_say_what_was_sampled_trained_and_masked() -> None:
    talk = trajectory(0, "ask|4|so", mask=[1] * 4 + [0] * 2 + [1] * 2, turn_rewards={3: 0.25})
    talk.turns = [Turn("assistant", 0, 4), Turn("tool", 4, 6), Turn("assistant", 6, 8)]
    made = [
        talk,
        trajectory(0, "no", score=0.0, finish="length"),
        trajectory(1, "x", score=None),
        trajectory(1, "é", score=2.0),
    ]
    batch = batch_of(made)
    advantages = torch.arange(4.0)[:, None].expand(-1, 8) * batch.mask
    batch = batch.replace(advantages=advantages, old_log_probs=batch.rollout_log_probs - 0.1)
    table = sample_table(SampleJob("train", 3, made, token_tables(batch, range(4), None)), BYTES)
    rows = table.to_pylist()
    assert [row["score"] for row in rows] == [1.25, 0.0, None, 2.0]
    assert [row["failed"] for row in rows] == [False, False, True, False] and rows[1]["truncated"]
    assert [row["group_mean"] for row in rows] == [0.625, 0.625, 2.0, 2.0] and not any(
        row["zero_variance"] for row in rows
    )
    assert rows[0]["role"] == [TRAINED] * 4 + [ENVIRONMENT] * 2 + [TRAINED] * 2 and rows[2]["role"] == [
        SAMPLED_ONLY
    ]
    assert rows[0]["turns"] == [
        {"role": "assistant", "start": 0, "end": 4, "reward": 0.25},
        {"role": "tool", "start": 4, "end": 6, "reward": None},
        {"role": "assistant", "start": 6, "end": 8, "reward": None},
    ]
    assert [row["advantage"] for row in rows] == [0.0, 1.0, None, 3.0]
    assert rows[1]["trained_log_probs"] == pytest.approx([-0.6, -0.6]) and rows[3]["tokens"] == ["", "é"]
    assert rows[0]["entropy"] is None and rows[0]["prompt"] == "2+2=" and rows[0]["index"] == 10


def test_what_an_update_found_goes_to_the_rows_it_was_found_for() -> None:
    made = [trajectory(group) for group in range(4)]
    known = UpdateLogProbs(
        torch.tensor([3, 1]), torch.tensor([[-3.0] * 4, [-1.0] * 4]), torch.tensor([[0.3] * 4, [0.1] * 4])
    )
    found = token_tables(batch_of(made), [0, 1, 3], known)
    assert (
        found["trained_log_probs"][1:].tolist() == [[-1.0] * 4, [-3.0] * 4]
        and found["trained_log_probs"][0].isnan().all()
    )
    assert found["entropy"][2].tolist() == pytest.approx([0.3] * 4)
    rows = sample_table(
        SampleJob("train", 1, [made[0]], {name: table[:1] for name, table in found.items()}), BYTES
    ).to_pylist()
    assert rows[0]["trained_log_probs"] == [None] * 4


def writer(folder: Path, **settings) -> SampleWriter:
    return SampleWriter(folder, max_samples=settings.pop("most", 100), texts=settings.pop("texts", BYTES))


def kept(folder: Path) -> list[tuple[str, int]]:
    return sorted(found for path in (folder / FOLDER).iterdir() if (found := parse_name(path.name)))


def test_files_are_there_when_the_writer_is_closed(tmp_path: Path) -> None:
    samples = writer(tmp_path)
    samples.begin(None)
    made = [trajectory(0), trajectory(0, "five", 0.0)]
    for step in (1, 2):
        samples.submit("train", step, made, batch_of(made))
        samples.close()
    samples.submit("validation", 2, made)
    samples.close()
    assert kept(tmp_path) == [("train", 1), ("train", 2), ("validation", 2)]
    assert pq.read_table(tmp_path / FOLDER / "train_000002.parquet")["response"].to_pylist() == [
        "four",
        "five",
    ]
    assert not list((tmp_path / FOLDER).glob(".*"))


def test_a_resumed_run_forgets_what_came_later_and_a_new_one_begins_anew(tmp_path: Path) -> None:
    samples = writer(tmp_path)
    for step in (1, 2, 3):
        samples.submit("train", step, [trajectory(0)])
        samples.close()
    samples.begin(2)
    assert kept(tmp_path) == [("train", 1), ("train", 2)]
    samples.begin(None)
    assert not (tmp_path / FOLDER).exists() and len(list((tmp_path / "samples.1").iterdir())) == 2


def test_a_disk_that_refuses_is_told_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    samples = writer(tmp_path)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            samples.submit("train", step, [trajectory(0)])
        samples.close()
    assert len(caplog.records) == 1 and "Training continues" in caplog.text


def test_a_slow_disk_loses_samples_and_not_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    free = threading.Event()

    def decode(ids: list[int]) -> str:
        free.wait(100)
        return "text"

    samples = writer(tmp_path, texts=TokenTexts(decode))
    with caplog.at_level(logging.WARNING):
        for step in range(1, 9):
            samples.submit("train", step, [trajectory(0)])
    free.set()
    samples.close()
    assert 2 <= len(kept(tmp_path)) <= 4 and caplog.text.count("the disk is slower than the run") == 1
