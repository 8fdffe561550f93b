"""What each tracker writes, also over a kill and a resume."""

from __future__ import annotations

import csv
import io
import json
import os
import posixpath
import pty
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from strop.config.compose import load
from strop.config.rules import check
from strop.extras import install_command
from strop.run.trackers.base import TrackedRun, get_or_create_id, save_id, saved_id, start
from strop.run.trackers.console import ConsoleTracker, LiveView
from strop.run.trackers.files import CsvTracker, JsonlTracker
from strop.run.trackers.mlflow import Names, allowed_name

NAN = float("nan")


def lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_jsonl_writes_each_step_at_once(tmp_path: Path) -> None:
    tracker = JsonlTracker(TrackedRun(tmp_path), clock=lambda: 12.5)
    tracker.log({"loss": 0.1 + 0.2, "bad": NAN, "worse": -float("inf"), "note": "é"}, 1)
    written = [
        {
            "step": 1,
            "time": 12.5,
            "data": {"loss": 0.1 + 0.2, "bad": "NaN", "worse": "-Infinity", "note": "é"},
        }
    ]
    assert lines(tmp_path / "metrics.jsonl") == written
    tracker.log_generations([{"input": "2+2", "output": "4", "score": 1.0}], 1)
    assert lines(tmp_path / "metrics.generations.jsonl")[0]["rows"] == [
        {"input": "2+2", "output": "4", "score": 1.0}
    ]


def test_a_disk_that_is_full_for_a_while_costs_no_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit of the file size acts as a full disk does: the line that exceeds it is written in part."""
    caplog.set_level("INFO")
    file = tmp_path / "metrics.jsonl"
    trackers = start("file", TrackedRun(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(8):
        if step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, hard))
        trackers.log({"a": step}, step)
        trackers.log_generations([{"input": "x" * 40}], step)
        if step == 5:
            assert [line["step"] for line in lines(file)] == [0, 1], "and no half line"
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    trackers.close()
    assert [(line["step"], line["data"]["a"]) for line in lines(file)] == [(step, step) for step in range(8)]
    assert [line["step"] for line in lines(tmp_path / "metrics.generations.jsonl")] == [*range(8)]
    assert (
        caplog.text.count("its lines wait in memory") == 2 == caplog.text.count("written again, without gaps")
    )


@pytest.mark.parametrize("kind", [JsonlTracker, CsvTracker])
def test_a_resumed_curve_has_no_duplicates_and_no_torn_lines(tmp_path: Path, kind: type) -> None:
    first = kind(TrackedRun(tmp_path))
    for step in range(6):
        first.log({"a": step}, step)
        first.log_generations([{"input": "x"}], step)
    file = tmp_path / ("metrics.jsonl" if kind is JsonlTracker else "metrics.csv")
    with file.open("a") as torn:
        torn.write('{"step": 2, "ti' if kind is JsonlTracker else "2,17")
    second = kind(TrackedRun(tmp_path, resumed_from=3))
    for step in (4, 5):
        second.log({"a": 10 * step}, step)
    second.close()
    if kind is JsonlTracker:
        curve = [(record["step"], record["data"]["a"]) for record in lines(file)]
        samples = [record["step"] for record in lines(tmp_path / "metrics.generations.jsonl")]
    else:
        curve = [(int(row["step"]), int(row["a"])) for row in table(file)]
        samples = [int(row["step"]) for row in table(tmp_path / "generations.csv")]
    assert curve == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40), (5, 50)]
    assert samples == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [JsonlTracker, CsvTracker])
def test_a_new_run_in_an_old_folder_loses_nothing(tmp_path: Path, kind: type) -> None:
    for run in range(3):
        kind(TrackedRun(tmp_path)).log({"a": run}, 1)
    file = tmp_path / ("metrics.jsonl" if kind is JsonlTracker else "metrics.csv")
    texts = [
        path.read_text() for path in (file, *(file.with_name(f"metrics.{n}{file.suffix}") for n in (2, 1)))
    ]
    assert all(text.count("1") >= 1 for text in texts) and len(set(texts)) == 3


def test_jsonl_place_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "logs"))
    JsonlTracker(TrackedRun(tmp_path / "run", project="p", experiment="e")).log({"a": 1}, 1)
    assert lines(tmp_path / "logs/p/e.jsonl")[0]["data"] == {"a": 1}


def test_csv_columns_grow(tmp_path: Path) -> None:
    tracker = CsvTracker(TrackedRun(tmp_path), clock=lambda: 1.0)
    tracker.log({"a": 1}, 1)
    tracker.log({"b": 'quoted "text", with\nlines', "a": 2}, 2)
    tracker.log({"c": 0.1 + 0.2}, 3)
    rows = table(tmp_path / "metrics.csv")
    assert list(rows[0]) == ["step", "time", "a", "b", "c"]
    assert [row["a"] for row in rows] == ["1", "2", ""]
    assert rows[1]["b"] == 'quoted "text", with\nlines' and float(rows[2]["c"]) == 0.1 + 0.2
    resumed = CsvTracker(TrackedRun(tmp_path, resumed_from=2), clock=lambda: 1.0)
    resumed.log({"d": 5}, 3)
    rows = table(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == ["1", "2", "3"] and rows[2]["d"] == "5" and rows[2]["c"] == ""


def test_csv_reads_a_long_sample_back(tmp_path: Path) -> None:
    """A response of 32k tokens is longer than the csv module reads by default."""
    tracker = CsvTracker(TrackedRun(tmp_path))
    tracker.log_generations([{"input": "half \ud83d", "output": "y" * 200_000}], 1)
    tracker.log_generations([{"input": "x", "output": "y", "acc": 1.0}], 2)
    CsvTracker(TrackedRun(tmp_path, resumed_from=1))
    [row] = table(tmp_path / "generations.csv")
    assert (row["input"], len(row["output"]), row["acc"]) == ("half ?", 200_000, "")


def test_the_full_line_is_that_of_verl() -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(TrackedRun(Path("."), console="full"), stream=stream)
    tracker.log(
        {"actor/lr": 1e-6, "critic/score/mean": 0.123456789, "tokens": 1234567, "note": "x", "total": 2e6}, 7
    )
    tracker.log_generations([{"input": "a\nb", "output": "c", "prompt_tokens": 6}], 7)
    tracker.close()
    first, *rest = stream.getvalue().splitlines()
    assert first == "step:7 - actor/lr:1e-06 - critic/score/mean:0.123457 - tokens:1234567 - total:2000000.0"
    assert rest == ["step:7 - sample", "  input: a", "    b", "  output: c"]


def test_the_short_line_has_the_first_numbers_and_the_time_left() -> None:
    stream = io.StringIO()
    now = [0.0]
    run = TrackedRun(Path("."), resumed_from=4, total_steps=20)
    tracker = ConsoleTracker(run, stream=stream, clock=lambda: now[0])
    now[0] = 100.0
    tracker.log({"val-core/sums/acc/mean@1": 0.5, "val-aux/sums/x": 1.0}, 4)
    now[0] = 110.0
    tracker.log({**METRICS, "actor/lr": 1e-6, "timing_s/step": 9.5, "note": "x"}, 5)
    assert stream.getvalue().splitlines() == [
        "step:4/20 - sums/acc/mean@1:0.5",
        "step:5/20 - reward:0.75 - length:64 - KL:0.0125 - gsm8k/acc/mean@1:0.41 - 9.5 s - ETA 0:02:30",
    ]


def test_the_short_line_of_a_run_without_rewards() -> None:
    stream = io.StringIO()
    tracker = ConsoleTracker(TrackedRun(Path(".")), stream=stream)
    tracker.log({"train/loss": 1.25, "train/lr": 1e-5}, 3)
    tracker.log({"train/loss": 1.0, "val/loss": 1.5}, 4)
    assert stream.getvalue() == "step:3 - loss:1.25\nstep:4 - loss:1 - val/loss:1.5\n"


METRICS = {
    "critic/score/mean": 0.75,
    "actor/kl_loss": 0.0125,
    "actor/entropy": 1.5,
    "response_length/mean": 64.0,
    "perf/throughput": 5120.0,
    "val-core/gsm8k/acc/mean@1": 0.41,
}


def test_live_view_shows_progress_and_the_first_numbers() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    view = LiveView(console, title="gsm8k / grpo[lora][/x]", total=20, start=4)
    view.update({**METRICS, "val-core/[/math]/acc": 0.125}, 5)
    view.close()
    text = stream.getvalue()
    for words in (
        "gsm8k / grpo[lora][/x]",
        "[/math]/acc",
        "5/20",
        "left",
        "reward",
        "0.75",
        "KL",
        "0.0125",
        "entropy",
        "1.5",
        "response length",
        "64",
    ):
        assert words in text, words
    for words in ("tokens/s", "5120", "gsm8k/acc/mean@1", "0.41"):
        assert words in text, words


def test_time_left_counts_the_steps_of_this_process_only() -> None:
    now = [0.0]
    console = Console(file=io.StringIO(), force_terminal=True, get_time=lambda: now[0])
    view = LiveView(console, title="", total=100, start=90)
    for step in (91, 92, 93):
        now[0] += 10
        view.update({}, step)
    remaining = view.progress.tasks[0].time_remaining
    view.close()
    assert remaining == 70


@pytest.mark.parametrize("console", ["short", "full"])
def test_on_a_terminal_there_is_the_view_and_above_it_full_lines(console: str) -> None:
    script = (
        "from pathlib import Path; from strop.run.trackers.base import TrackedRun, start\n"
        f"run = TrackedRun(Path('.'), total_steps=3, console={console!r})\n"
        f"with start('console', run) as t: [t.log({METRICS!r}, step) for step in (1, 2, 3)]"
    )
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    seen = b""
    while True:
        try:
            piece = os.read(leader, 4096)
        except OSError:  # Linux reports the closed other side this way
            break
        if not piece:
            break
        seen += piece
    os.close(leader)
    text = seen.decode()
    assert process.wait() == 0, text
    assert "3/3" in text and "tokens/s" in text
    if console == "short":
        assert "step:" not in text
    else:
        assert text.rindex("step:3 - critic/score/mean:0.75") < text.rindex("tokens/s")


def test_a_pipe_gets_lines_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with start("console", TrackedRun(tmp_path, total_steps=3)) as trackers:
        trackers.log({"a": 1.0}, 1)
    assert capsys.readouterr().out.startswith("step:1/3 - ETA ")


def test_tensorboard_can_be_read_back(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resumed_from, steps in ((None, range(1, 6)), (3, range(4, 6))):
        with start(
            "tensorboard", TrackedRun(tmp_path, config={"lr": 1e-6}, resumed_from=resumed_from)
        ) as trackers:
            for step in steps:
                trackers.log(
                    {"critic/score/mean": step * (10.0 if resumed_from else 1.0), "note": "text"}, step
                )
            trackers.log_generations([{"input": "2+2=", "output": "4"}], 5)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    curve = [(event.step, event.value) for event in events.Scalars("critic/score/mean")]
    assert curve == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0)]
    config = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"lr": 1e-06' in config
    sample = events.Tensors("val/generations/0/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "2+2=" in sample


def test_a_tracker_without_its_library_is_known_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = check(load("ppo_trainer", ["trainer.logger=[console,wandb]"]))
    assert f"wandb is not installed here: {install_command('wandb')}" in "\n".join(map(str, found))


def test_ids_are_kept_by_a_resumed_run_only(tmp_path: Path) -> None:
    first = get_or_create_id(TrackedRun(tmp_path), "wandb")
    save_id(TrackedRun(tmp_path), "mlflow", "x")
    assert (
        get_or_create_id(TrackedRun(tmp_path, resumed_from=3), "wandb") == first
        and saved_id(TrackedRun(tmp_path, resumed_from=3), "mlflow") == "x"
    )
    assert (
        get_or_create_id(TrackedRun(tmp_path), "wandb") != first
        and saved_id(TrackedRun(tmp_path), "mlflow") is None
    )
    (tmp_path / "trackers.json").write_text("torn")
    assert len(get_or_create_id(TrackedRun(tmp_path, resumed_from=3), "swanlab", length=21)) == 21


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("val-core//data/./math/../acc/", "val-core/data/math/acc"),
        ("/abs/mean@1", "abs/mean_at_1"),
        ("reward/a+b", "reward/a_b"),
        ("n" * 300, "n" * 250),
        ("n" * 249 + "/tail", "n" * 249),
        ("//", "_"),
        ("..hidden/mean", "_..hidden/mean"),
        ("...", "_..."),
        ("../..x", "_..x"),
        ("n" * 248 + "/.hidden", "n" * 248),
        ("n" * 247 + "/..hidden", "n" * 247),
    ],
)
def test_names_that_mlflow_refuses(name: str, allowed: str) -> None:
    """It takes names for paths: one that is not a normal path, or too long, would end its logging."""
    assert allowed_name(name) == allowed
    assert posixpath.normpath(allowed) == allowed and not allowed.startswith(("/", ".."))


def test_two_names_that_mlflow_would_take_for_one_stay_two() -> None:
    """It refuses to begin a run with two parameters of one name, and draws metrics of one name as one curve."""
    names = Names()
    raw = ["kw.a+b", "kw.a_b", "kw.a-b", "kw.a=b", "n" * 300, "n" * 301]
    expected = ["kw.a_b", "kw.a_b_2", "kw.a-b", "kw.a_b_3", "n" * 250, "n" * 242 + "_2"]
    assert [names[name] for name in raw] == expected
    assert [names[name] for name in reversed(raw)] == expected[::-1]  # from step to step
