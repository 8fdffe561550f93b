"""`ray job submit` to a cluster that `ray start` made: the command line of docs/cluster.md."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.run.heartbeat import read_worker_states
from tests.runtime.conftest import STEPS
from tests.runtime.started import assert_same_run

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
RAY = str(Path(sys.executable).with_name("ray"))
QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
PORTS = (
    "port",
    "dashboard-port",
    "ray-client-server-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
    "runtime-env-agent-port",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """The address to which jobs are sent; its cluster ends with its process, since `ray stop` would end those of others."""
    ports = {name: free_port() for name in PORTS}
    address = f"http://127.0.0.1:{ports['dashboard-port']}"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # Ray's sockets need short names
        with (Path(folder) / "head.log").open("w") as log:
            head = subprocess.Popen(
                [RAY, "start", "--head", "--block", "--num-cpus=2", "--object-store-memory=100000000",
                 f"--temp-dir={folder}/ray", "--include-dashboard=true", "--node-ip-address=127.0.0.1",
                 *(f"--{name}={port}" for name, port in ports.items())],
                env={**os.environ, **QUIET}, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while not answers(f"{address}/api/jobs/"):
                assert head.poll() is None and time.monotonic() < deadline, (
                    Path(folder) / "head.log"
                ).read_text()
                time.sleep(0.5)
            yield address
        finally:
            head.terminate()
            head.wait(60)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


def job(verb: str, dashboard: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [RAY, "job", verb, f"--address={dashboard}", *words]
    return subprocess.run(
        command,
        env={**os.environ, **QUIET},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )


def strop(*words: str) -> list[str]:
    return ["--", sys.executable, "-m", "strop.cli", "ppo", *words]


def test_a_submitted_run_learns_what_ranks_of_one_machine_learn(dashboard, settings, local_run, tmp_path):
    done = job(
        "submit",
        dashboard,
        *strop(*settings, "trainer.n_gpus_per_node=2", f"trainer.default_local_dir={tmp_path}/far"),
    )
    assert done.returncode == 0 and "succeeded" in done.stdout, done.stdout
    assert f"step:{STEPS}" in done.stdout
    assert_same_run(local_run, tmp_path / "far", STEPS)


def test_a_mistake_comes_back_with_its_message(dashboard, settings):
    done = job("submit", dashboard, *strop(*settings, "trainer.nodes=2"))
    assert done.returncode != 0 and "trainer.nodes" in done.stdout and "nnodes" in done.stdout


def test_a_stopped_job_leaves_nobody_behind(dashboard, settings, tmp_path):
    long = [
        "trainer.total_training_steps=2000",
        "trainer.n_gpus_per_node=2",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    sent = job("submit", dashboard, "--no-wait", "--submission-id=long", *strop(*settings, *long))
    assert sent.returncode == 0, sent.stdout
    deadline = time.monotonic() + 120
    while not any(beat.step >= 2 for beat in read_worker_states(tmp_path / "run")):
        assert time.monotonic() < deadline, job("logs", dashboard, "long").stdout
        time.sleep(0.2)
    ranks = [beat.pid for beat in read_worker_states(tmp_path / "run")]
    assert job("stop", dashboard, "long").returncode == 0
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < deadline, job("logs", dashboard, "long").stdout
        time.sleep(0.2)
