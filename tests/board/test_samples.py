"""Pages of samples: what is found, in which order, and what a damaged file does to the rest."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image

from strop.board.run_index import NotFound, RunFolder
from strop.board.sample_file import DamagedSampleFile
from strop.board.sample_pages import MAX_TEXT, MAX_TOKENS, Query, SampleFolder
from strop.run.sample_images import MAX_SIDE
from strop.run.sample_table import FOLDER, ROWS_PER_GROUP
from strop.types import ImageInput
from tests.board.scene import LONG, answer, groups_of, write_step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_step(tmp_path, "train", 7, groups_of(7))
    return tmp_path


def folder(run: Path) -> SampleFolder:
    return SampleFolder(RunFolder("id", "run", run))


def found(run: Path, **query: Any) -> list[int]:
    return [group["group"] for group in folder(run).page("train", 7, Query(**query))["groups"]]


def test_filters_and_orders(run: Path) -> None:
    assert found(run) == [0, 1, 2, 3, 4]
    assert found(run, show="zero_variance") == [1, 2, 4]
    assert found(run, show="mixed") == [0, 3]
    assert found(run, show="truncated") == [2]
    assert found(run, show="failed") == [3]
    assert found(run, sort="worst")[0] == 2
    assert found(run, sort="best")[:2] == [3, 4]  # failed samples are left out of a mean: (1.0 + 1.5) / 2
    assert found(run, sort="longest")[0] == 2
    assert found(run, sort="best", offset=1, limit=2) == [4, 1]


def test_search_is_of_prompts_answers_and_truths_and_takes_no_patterns(run: Path) -> None:
    assert found(run, search="COUNT to") == [2]
    assert found(run, search="48 - 7 = 40") == [0]
    assert found(run, search="tool_call") == [4]
    assert found(run, search="48 . 7") == [] == found(run, search="(unclosed[")
    assert found(run, search="41", show="failed") == [3]


def test_a_group_has_every_sample_with_its_numbers(run: Path) -> None:
    group = folder(run).group("train", 7, 3)
    assert [sample["score"] for sample in group["samples"]] == [None, None, 1.0, 1.5]
    assert [sample["failed"] for sample in group["samples"]] == [True, True, False, False]
    assert group["prompt"]["text"] == "Prove it." and group["index"] == 73
    first = folder(run).group("train", 7, 0)["samples"][1]
    assert first["reported"] == {"acc": 1.0, "format": 1.0} and first["response"]["text"].endswith("= 41.")


def test_tokens_of_a_conversation_know_who_wrote_them(run: Path) -> None:
    sample = folder(run).group("train", 7, 4)["samples"][0]
    tokens = folder(run).tokens("train", 7, 4, 0, 0)
    roles = ["".join(tokens["tokens"][turn["start"] : turn["end"]]) for turn in sample["turns"]]
    assert [turn["role"] for turn in sample["turns"]] == ["assistant", "tool", "assistant"]
    assert roles[1] == "<tool_response>4</tool_response>" and roles[2] == "It is 4."
    assert sample["turns"][0]["reward"] == 0.1 and sample["score"] == 1.1 and sample["tool_results"] == 1
    middle = sample["turns"][1]
    assert set(tokens["role"][middle["start"] : middle["end"]]) == {0}
    assert {0, 1} == set(tokens["role"]) and tokens["values"] is None
    assert len(tokens["entropy"]) == len(tokens["advantages"]) == tokens["length"]


def test_what_is_not_there_is_said(run: Path) -> None:
    for question in (
        lambda f: f.page("train", 8, Query()),
        lambda f: f.page("other", 7, Query()),
        lambda f: f.page("../train", 7, Query()),
        lambda f: f.group("train", 7, 99),
        lambda f: f.tokens("train", 7, 0, 99, 0),
        lambda f: f.text("train", 7, 0, 0, "reported", 0),
    ):
        with pytest.raises(NotFound):
            question(folder(run))


def test_huge_texts_come_in_pieces(tmp_path: Path) -> None:
    made = [answer("short", group=0), answer("x" * 500_000, group=1), answer("short", group=2)]
    write_step(tmp_path, "train", 1, made, texts=LONG)
    samples = folder(tmp_path)
    group = samples.group("train", 1, 1)
    response = group["samples"][0]["response"]
    assert response["length"] == 5_000_000 and len(response["text"]) == MAX_TEXT
    last = samples.text("train", 1, 1, 0, "response", 4_999_990)
    assert last == {"text": "0123456789", "start": 4_999_990, "length": 5_000_000}
    tokens = samples.tokens("train", 1, 1, 0, 499_999)
    assert (
        tokens["tokens"] == ["0123456789"] and len(samples.tokens("train", 1, 1, 0, 0)["ids"]) == MAX_TOKENS
    )
    assert len(str(samples.page("train", 1, Query()))) < 3000


def test_a_scan_over_all_steps_finds_everything_once(tmp_path: Path) -> None:
    for step in range(1, 8):
        write_step(tmp_path, "train", step, groups_of(step))
    samples, start, seen = folder(tmp_path), None, []
    for _ in range(20):
        page = samples.scan("train", Query(show="zero_variance", limit=4), start)
        assert len(page["groups"]) <= 4
        seen += [(group["step"], group["group"]) for group in page["groups"]]
        if (start := page["next"]) is None:
            break
    assert seen == [(step, group) for step in range(7, 0, -1) for group in (1, 2, 4)]
    assert samples.scan("train", Query(search="nowhere"), None) == {
        "groups": [],
        "damaged": [],
        "left": 0,
        "next": None,
    }


def test_a_scan_stops_in_time_and_says_where_to_go_on(tmp_path: Path) -> None:
    for step in range(1, 4):
        write_step(tmp_path, "train", step, groups_of(step))
    page = folder(tmp_path).scan("train", Query(show="failed"), None, seconds=0.0)
    assert [group["step"] for group in page["groups"]] == [3] and page["next"] == (2, 0) and page["left"] == 2


def test_a_damaged_file_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    for step in range(1, 5):
        write_step(tmp_path, "train", step, groups_of(step))
    whole = (tmp_path / FOLDER / "train_000002.parquet").read_bytes()
    (tmp_path / FOLDER / "train_000002.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / FOLDER / "train_000003.parquet").write_bytes(whole[:200] + b"\xff" * 400 + whole[600:])
    (tmp_path / FOLDER / "train_000009.parquet").write_bytes(b"")
    samples = folder(tmp_path)
    assert samples.steps()["train"] == [1, 2, 3, 4, 9]
    with pytest.raises(DamagedSampleFile, match=r"train_000002\.parquet is damaged"):
        samples.page("train", 2, Query())
    page = samples.scan("train", Query(search="It is 4"), None)
    assert {group["step"] for group in page["groups"]} >= {1, 4}
    assert any("train_000009" in text for text in page["damaged"]) and any(
        "train_000002" in text for text in page["damaged"]
    )
    assert [entry["step"] for entry in samples.history("train", 11, "sums")["steps"]] == [1]


def test_a_table_of_somebody_else_is_refused_by_name(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / FOLDER).mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / FOLDER / "train_000001.parquet")
    with pytest.raises(DamagedSampleFile, match="has no column"):
        folder(tmp_path).page("train", 1, Query())


def test_the_history_of_a_prompt(tmp_path: Path) -> None:
    for step in (0, 10, 20):
        write_step(
            tmp_path,
            "validation",
            step,
            [answer("x", group=i, index=i, score=step / 20 + i) for i in range(3)],
        )
        write_step(tmp_path, "validation", step + 1, [answer("x", group=0, index=1, source="other")])
    assert folder(tmp_path).history("validation", 1, "sums") == {
        "steps": [{"step": step, "group": 1, "scores": [step / 20 + 1]} for step in (0, 10, 20)],
        "damaged": [],
        "left": 0,
    }


def test_groups_that_lie_over_the_border_of_row_groups(tmp_path: Path) -> None:
    count = ROWS_PER_GROUP + 40
    made = [
        answer(f"sample {i} of {group}", prompt=f"prompt {group}", group=group)
        for group in range(2)
        for i in range(count)
    ]
    write_step(tmp_path, "train", 1, made)
    texts = [sample["response"]["text"] for sample in folder(tmp_path).group("train", 1, 1)["samples"]]
    assert texts == [f"sample {i} of 1" for i in range(count)]
    page = folder(tmp_path).page("train", 1, Query(sort="order"))
    assert [group["prompt"] for group in page["groups"]] == ["prompt 0", "prompt 1"]
    assert len(page["groups"][1]["scores"]) == count


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    write_step(tmp_path / "elsewhere", "train", 1, groups_of(1))
    run = tmp_path / "run"
    (run / FOLDER).mkdir(parents=True)
    (run / FOLDER / "train_000001.parquet").symlink_to(
        tmp_path / "elsewhere" / FOLDER / "train_000001.parquet"
    )
    with pytest.raises(NotFound):
        folder(run).page("train", 1, Query())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FOLDER).symlink_to(tmp_path / "elsewhere" / FOLDER)
    with pytest.raises(NotFound, match="is a link"):
        folder(tmp_path / "other")


def shown(colour: tuple[int, int, int], width: int, token: str) -> ImageInput:
    """An image whose placeholder tokens are a letter."""
    picture = Image.new("RGB", (width, 64), colour)
    return ImageInput(f"{colour}", {}, 3, picture.size, ord(token), picture=picture)


def test_images_are_kept_once_in_a_group_and_small(tmp_path: Path) -> None:
    large, tool = shown((255, 0, 0), 2000, "§"), shown((0, 0, 255), 64, "§")
    plain = [answer("41", prompt="see §§§ now", images=(large,)) for _ in range(7)]
    with_tool = answer("40", prompt="see §§§ now", images=(large, tool))
    path = write_step(tmp_path, "train", 7, [*plain, with_tool, answer("1", group=1)])
    group = folder(tmp_path).group("train", 7, 0)
    assert group["prompt"]["text"] == "see § now", "one placeholder stands for the tokens of an image"
    assert [(one["width"], one["video"]) for one in group["images"]] == [(2000, False), (64, False)]
    assert [sample["images"] for sample in group["samples"]] == [[0]] * 7 + [[0, 1]]
    pixels = []
    for image in group["images"]:
        head, _, content = image["source"].partition(",")
        assert head == "data:image/jpeg;base64"
        opened = Image.open(io.BytesIO(base64.b64decode(content)))
        assert max(opened.size) <= MAX_SIDE
        pixels.append(opened.getpixel((5, 5)))
    assert pixels[0][0] > 240 > 20 > pixels[0][2] and pixels[1][2] > 240
    kept = pq.read_table(path, columns=["images"])["images"].to_pylist()
    assert sum(image["jpeg"] is not None for row in kept for image in row) == 2
    assert folder(tmp_path).group("train", 7, 1)["images"] == []


def test_files_without_images_have_no_such_column(run: Path) -> None:
    group = folder(run).group("train", 7, 0)
    assert group["images"] == [] and all(sample["images"] == [] for sample in group["samples"])
    assert "images" not in pq.read_schema(run / FOLDER / "train_000007.parquet").names


def test_a_list_of_tokens_that_a_file_does_not_have_is_null(run: Path) -> None:
    file = run / FOLDER / "train_000007.parquet"
    table = pq.read_table(file)
    whole = folder(run).tokens("train", 7, 0, 0, 0)
    pq.write_table(table.drop_columns(["role", "entropy"]), file)
    page = folder(run).tokens("train", 7, 0, 0, 0)
    assert page["role"] is None and page["entropy"] is None
    assert page["length"] == whole["length"] > 0 and page["tokens"] == whole["tokens"]
