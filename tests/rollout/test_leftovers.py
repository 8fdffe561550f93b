"""Temporary folders, shared memory and processes of an engine end with it, and with the process that made it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from strop.rollout.buckets import Buckets
from strop.rollout.external import model_source
from strop.rollout.vllm.engine import VllmEngine
from tests.rollout import tiny

TRAINER = """
import sys, time
from strop.rollout.external_host import HostProcess

host = HostProcess("vllm", ["sh", "-c", "sleep 600 & echo $!; wait"])
log = host._log
while not log.read_text():
    time.sleep(0.01)
print(host.pid, log.read_text(), flush=True)
if sys.argv[1] == "raises":
    raise RuntimeError("the trainer failed")
time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_folder_of_a_model_is_deleted(temporary: Path) -> None:
    model = tiny.make()
    source = model_source(model, None)
    assert Path(source.folder).parent == temporary
    source.close()
    assert not list(temporary.iterdir())
    source = model_source(model, None)
    assert list(temporary.iterdir())
    del source  # nobody closed it
    assert not list(temporary.iterdir())


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_engine_that_does_not_start_leaves_nothing(temporary: Path) -> None:
    python = {"python": str(temporary / "no" / "python")}
    with pytest.raises(ValueError, match="max_model_len"):
        VllmEngine(tiny.make(), max_model_len=1 << 30, engine_kwargs=python)
    with pytest.raises(FileNotFoundError):
        VllmEngine(tiny.make(), engine_kwargs=python)
    assert not list(temporary.iterdir())


def test_buckets_have_no_name_that_a_killed_process_would_leave(temporary: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    buckets = Buckets(1)
    found: list[str] = []
    buckets.send([("weight", torch.ones(4))], lambda contents, last: found.append(contents))
    assert len(found) == 1
    assert not list(temporary.iterdir()) and not {
        name for name in set(os.listdir("/dev/shm")) - before if name.startswith("strop")
    }
    buckets.close()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("end", ["raises", signal.SIGTERM, signal.SIGKILL])
def test_the_process_of_an_engine_ends_with_the_trainer(end: str | int, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(end)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        host, child = map(int, trainer.stdout.readline().split())
        if isinstance(end, int):
            trainer.send_signal(end)
        trainer.wait(100)
    deadline = time.monotonic() + 60
    while (_runs(host) or _runs(child) or list(tmp_path.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(host) and not _runs(child)
    assert not list(tmp_path.iterdir())
