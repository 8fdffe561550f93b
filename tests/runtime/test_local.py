"""Ranks as processes of this machine: they learn what one process learns, and nobody waits for a rank that is gone."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from strop.backends.fsdp import shard
from strop.backends.fsdp.shard import make_mesh
from strop.errors import REFUSED
from strop.run.heartbeat import Heartbeat
from strop.runtime import local
from strop.runtime.launch import LAUNCHED, omp_threads_per_rank, torchrun_sizes
from tests.backends.ranks import pytest_as_ranks

LOOP = str(Path(__file__).parent / "ranks_loop.py")


FAST = "(grpo and (sharded or shared-matrices)) or other_data or does_not_have or holds_its_share or read_by_torch or taken or fewer_sequences"


@pytest.mark.slow
def test_two_ranks_learn_what_one_process_learns():
    pytest_as_ranks(2, [LOOP, "-k", FAST])


@pytest.mark.slow
def test_supervised_training_runs_as_ranks():
    pytest_as_ranks(2, [str(Path(LOOP).with_name("ranks_supervised.py"))])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_ranks_learns_and_resumes(world):
    pytest_as_ranks(world, [LOOP, *(["-k", "not shared_matrices"] if world == 3 else [])], timeout=1500)


def test_a_rank_that_fails_ends_the_others(monkeypatch, capfd):
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.5)
    program = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(600)"
    start = time.monotonic()
    assert local.launch([sys.executable, "-c", program], 2) == 3
    killed = program.replace("sys.exit(3)", "os.kill(os.getpid(), 9)")
    assert local.launch([sys.executable, "-c", killed], 2) == 137
    assert time.monotonic() - start < 300
    said = capfd.readouterr().err
    assert re.search(
        r"Rank 1 of 2 \(host \S+\) was ended by SIGKILL before its first heartbeat; the others were stopped",
        said,
    )


STUBBORN = """
import os, pathlib, signal, sys, time
if os.environ["RANK"] == "0":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
else:
    signal.signal(signal.SIGINT, lambda *_: sys.exit(3))
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
time.sleep(600)
"""


def test_a_second_signal_also_ends_ranks_that_are_left_when_one_has_ended(tmp_path):
    command = [sys.executable, "-c", STUBBORN, str(tmp_path)]
    start = (
        "from pathlib import Path; from strop.runtime.local import run_ranks; "
        f"print(run_ranks({command!r}, 2, Path({str(tmp_path)!r}, 'run'), grace=600))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not all((tmp_path / rank).exists() for rank in "01") and time.monotonic() < deadline:
        time.sleep(0.1)
    launcher.send_signal(signal.SIGINT)
    time.sleep(2.0)  # closer signals count as one
    assert launcher.poll() is None, "rank 0 has its grace period"
    launcher.send_signal(signal.SIGINT)
    assert "interrupted=True" in launcher.communicate(timeout=8)[0]


def test_ranks_run_on_when_their_output_cannot_be_shown():
    """As with `2> file` on a full disk. Ranks whose output nobody reads would fail with a broken pipe."""
    command = [sys.executable, "-c", "import sys; [print('x' * 99, file=sys.stderr) for _ in range(3000)]"]
    start = f"import sys; from strop.runtime.local import launch; sys.exit(launch({command!r}, 2))"
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", start], stderr=full, timeout=100)
    assert ended.returncode == 0


def test_ranks_share_the_cores_that_the_job_has(monkeypatch):
    """A scheduler gives a job some cores of a large machine; threads for all of them would wait for each other."""
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2)))
    assert [omp_threads_per_rank(ranks) for ranks in (1, 2, 4)] == ["2", "1", "1"]


def test_a_port_in_use_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        facts = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in facts.items():
            monkeypatch.setenv(name, value)
        with (
            pytest.raises(
                ValueError, match=rf"Rank 0 of 2 cannot meet the others at 127.0.0.1:{port}.*port in use"
            ),
            local.joined(2, torch.device("cpu"), timeout=5),
        ):
            pass


def test_no_port_at_all_is_an_error_and_not_a_wait(monkeypatch):
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"Rank 1 of 2 .* port 0 .*torchrun --standalone"):
        local.joined(2, torch.device("cpu"), timeout=60).__enter__()


def test_sizes_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        ValueError, match=r"4 ranks were started, but trainer.nnodes x trainer.n_gpus_per_node is 2"
    ):
        local.joined(2, torch.device("cpu"), timeout=5).__enter__()
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(ValueError, match=r"but not MASTER_ADDR\. .*unset RANK and WORLD_SIZE"):
        local.joined(4, torch.device("cpu"), timeout=5).__enter__()
    with pytest.raises(ValueError, match=r"fsdp_size=4 does not divide the 6 ranks.*one of \[1, 2, 3\]"):
        make_mesh(torch.device("cpu"), 6, 4)


@pytest.mark.parametrize("fsdp_size", [-1, 6, 8])
def test_one_copy_of_the_weights_may_be_asked_for_by_more_ranks_than_there_are(monkeypatch, fsdp_size):
    monkeypatch.setattr(shard, "init_device_mesh", lambda device, sizes, mesh_dim_names: sizes)
    assert make_mesh(torch.device("cpu"), 6, fsdp_size) == (6,)


def test_the_ranks_of_torchrun_set_the_sizes(monkeypatch):
    assert torchrun_sizes() == []
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert torchrun_sizes() == ["trainer.nnodes=2", "trainer.n_gpus_per_node=8"]
    monkeypatch.setenv(LAUNCHED, "1")
    assert torchrun_sizes() == []


@pytest.mark.slow
def test_torchrun_starts_the_same_run(task, tmp_path, overrides):
    from tests.ppo.runs import metrics, run

    where = f"trainer.default_local_dir={tmp_path}/ranks"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
    done = subprocess.run(
        [
            *command,
            "strop.trainer.main_ppo",
            *overrides,
            where,
            "trainer.device=cpu",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, many = run(overrides), metrics(tmp_path / "ranks")
    assert many[4]["actor/pg_loss"] == pytest.approx(one[4]["actor/pg_loss"], rel=1e-5, abs=1e-6)


def test_ranks_that_start_slowly_say_where_they_are(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "strop")
    monkeypatch.setattr(local, "FIRST_REPORT_SECONDS", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    report = local.StartReport(3, tmp_path)
    assert "Starting 3 ranks" in caplog.text and "They share 1 CPU core, so" in caplog.text
    assert str(tmp_path / "workers") in caplog.text
    workers = tmp_path / "workers"
    workers.mkdir()
    beat = Heartbeat(tmp_path, 1, 3)
    beat.beat(0, "starting")
    caplog.clear()
    report.poll()
    assert "rank 1 starting, step 0; 2 importing libraries" in caplog.text
    beat.beat(1, "gen")
    caplog.clear()
    report.poll()
    report.poll()
    assert caplog.text == "", "from the first step on the steps are logged"


FAILS = """
import atexit, multiprocessing, sys, time, torch
import torch.distributed as dist
from strop.runtime import local
from strop.runtime.launch import LAUNCHED, omp_threads_per_rank, torchrun_sizes

def sleep():
    time.sleep(600)

if __name__ == "__main__":
    local._set_device = lambda rank: None
    local._init_process_group = lambda *_: None
    dist.destroy_process_group = lambda: time.sleep(600)  # as NCCL may, where other ranks do not answer
    atexit.register(time.sleep, 600)
    child = multiprocessing.get_context("fork").Process(target=sleep)
    child.start()
    print(child.pid, flush=True)
    with local.joined(1, torch.device("cuda"), timeout=10):
        raise ValueError("out of memory")
"""


def test_a_rank_that_fails_on_a_gpu_does_not_wait_for_the_others(tmp_path):
    """Neither for its process group nor for what comes at the end of a program; its children end with it."""
    (tmp_path / "fails.py").write_text(FAILS)
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    ended = subprocess.run(
        [sys.executable, tmp_path / "fails.py"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == REFUSED and "ValueError: out of memory" in ended.stderr
    deadline = time.monotonic() + 60
    while Path(f"/proc/{ended.stdout.strip()}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{ended.stdout.strip()}").exists()
