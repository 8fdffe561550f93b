"""What `strop ppo` shows: its plan first, then a line per step; on a terminal tables and a live view."""

from __future__ import annotations

import logging
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from strop.cli import dispatch
from strop.config.compose import load
from strop.ppo.trainer import PpoTrainer
from strop.preflight.examine import examine
from strop.preflight.report import lines
from strop.rollout import external_host
from strop.shared.process_setup import OneLine
from tests.forked import Forked
from tests.ppo.runs import run

SHORT = ["trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.logger=[console,file]"]


def test_a_log_file_gets_plain_lines(overrides):
    command = [sys.executable, "-m", "strop.cli", "ppo", *overrides, *SHORT]
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_VERBOSITY")
    }
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in said[:3]] == ["plan", "objective", "roles"]
    assert "total steps 2" in said[0] and "grpo" in said[1] and "critic no" in said[2]
    steps = [line.split(" - ") for line in said if line.startswith("step:")]
    assert [parts[0] for parts in steps] == ["step:0/2", "step:1/2", "step:2/2"]
    assert [part.split(":")[0] for part in steps[1][:4]] == ["step", "reward", "length", "KL"]
    assert steps[1][4].endswith(" s") and steps[1][-1].startswith("ETA ")
    assert "Loading weights" not in done.stderr and "\x1b" not in done.stdout
    assert all(line.startswith("strop: ") for line in done.stderr.splitlines()), done.stderr


def test_a_terminal_gets_tables_and_the_live_view(overrides):
    ours, theirs = pty.openpty()
    terminal = {"TERM": "xterm-256color", "COLUMNS": "160", "LINES": "60"}
    process = Forked("strop.cli", ["ppo", *overrides, *SHORT], Path(os.ttyname(theirs)), **terminal)
    said = b""
    try:
        while process.poll() is None or select.select([ours], [], [], 0)[0]:
            if select.select([ours], [], [], 0.05)[0]:
                said += os.read(ours, 65536)
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)
    assert process.poll() == 0, said[-2000:]
    text = said.decode()
    assert "ready to run" in text and "sequences per step" in text
    assert "strop / default" in text and "2/2" in text and "response length" in text
    assert "step:2" not in text


def test_one_line_for_everything(overrides):
    report = examine(load("ppo_trainer", [*overrides, "algorithm.kl_ctrl.kl_coef=0.1", "data.use_shm=true"]))
    said = lines(report)
    assert all("\n" not in line for line in said)
    assert any(line.startswith("note: data.use_shm has no effect") for line in said)
    assert any(line.startswith("warning: algorithm.kl_ctrl.kl_coef") for line in said)
    assert any(line.startswith("train_files: 64 rows") for line in said)


@pytest.mark.parametrize(
    ("name", "level", "text"),
    [
        ("strop.run.checkpoint.resume", logging.INFO, "strop: hello 3"),
        ("strop.run.checkpoint.resume", logging.WARNING, "strop: warning: hello 3"),
        ("urllib3.pool", logging.ERROR, "urllib3: error: hello 3"),
    ],
)
def test_the_form_of_a_note(name, level, text):
    assert OneLine().format(logging.LogRecord(name, level, "file", 1, "hello %d", (3,), None)) == text


def test_a_run_says_where_it_goes_on_and_when_nothing_is_left(overrides, caplog):
    run(overrides, "trainer.total_training_steps=2")
    with caplog.at_level(logging.INFO, logger="strop"):
        run(overrides)
        assert (
            "Resuming from" in caplog.text
            and "step 2 of 4" in caplog.text
            and "All steps are done" not in caplog.text
        )
        caplog.clear()
        steps = run(overrides)
    assert "step 4 of 4" in caplog.text and "All steps are done" in caplog.text
    assert set(steps) == {0, 1, 2, 3, 4}  # and nothing that was there is lost


def test_output_of_dead_engines_goes_to_the_run_only_while_it_lasts(overrides, monkeypatch):
    folders = []
    ended = PpoTrainer.fit

    def fit(trainer):
        folders.extend(external_host._kept_in)
        return ended(trainer)

    monkeypatch.setattr(PpoTrainer, "fit", fit)
    assert dispatch(["ppo", *overrides, "trainer.total_training_steps=1"]) == 0
    assert len(folders) == 1 and folders[0].is_absolute() and folders[0].name == "workers"
    assert external_host._kept_in == []
