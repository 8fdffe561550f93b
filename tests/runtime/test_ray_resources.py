"""What machines of a cluster lack is said with numbers, names and what to do."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from strop.runtime.launch import interface_of_address, network_environment
from strop.runtime.ray.placement import (
    ResourceRequest,
    check_machines,
    forwarded_environment,
    local_paths,
    missing_resources,
)
from strop.runtime.ray.rank_launcher import Machine, RankLauncher, package_versions, thread_environment

HERE = {"python": "3.11", "strop": "1", "torch": "2.13"}


def machine(**more):
    return Machine(**{"host": "node7", "address": "10.0.0.7", "pid": 1, "versions": HERE, **more})


def test_machines_are_counted_one_by_one():
    demand = ResourceRequest(2, {"CPU": 4, "GPU": 4})
    big, small, bare = {"CPU": 8, "GPU": 8}, {"CPU": 8, "GPU": 2}, {"CPU": 64}
    assert missing_resources(demand, [("a", big), ("b", big)]) is None
    assert missing_resources(demand, [("a", big), ("b", small), ("c", bare)]) == (
        "The run asks for 2 machine(s) with 4 CPUs and 4 GPUs each, and 1 of 3 can give that: "
        "a has 8 CPU, 8 GPU; b has 8 CPU, 2 GPU; c has 64 CPU, 0 GPU."
    )
    assert "there is none" in (missing_resources(demand, []) or "")


def test_other_versions_are_refused():
    check_machines([machine(), machine()], HERE)
    with pytest.raises(
        ValueError,
        match=r"Rank 1 on host node7 \(10.0.0.7\) has torch 2.9, this command has 2.13. Install the",
    ):
        check_machines([machine(), machine(versions={**HERE, "torch": "2.9"})], HERE)


def test_a_machine_without_the_files_is_named():
    with pytest.raises(
        ValueError,
        match=r"Rank 0 on host node7 \(10.0.0.7\) does not see /data/model. Models, data and the run",
    ):
        check_machines([machine(missing=["/data/model"])], HERE)


def test_paths_of_a_configuration(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    model = {"path": f"{tmp_path}/model", "tokenizer_path": "org/hub-name"}
    tree = {
        "model": model,
        "train_files": [f"{tmp_path}/none", str(tmp_path)],
        "n": 3,
        "save_path": str(tmp_path),
    }
    assert list(local_paths(tree)) == [f"{tmp_path}/model", str(tmp_path)]
    monkeypatch.chdir(tmp_path)  # the launcher changes to it, and this goes back
    found = RankLauncher(0).machine("10.0.0.1", str(tmp_path), ["model", "other"])
    assert found.missing == ["other"] and found.host == socket.gethostname()


def test_variables_that_ranks_get():
    shell = {
        "HF_HOME": "/x",
        "HOME": "/root",
        "OMP_NUM_THREADS": "3",
        "PYTHONPATH": "p",
        "RAY_ADDRESS": "a",
        "NCCL_DEBUG": "WARN",
    }
    expected = {"HF_HOME", "OMP_NUM_THREADS", "PYTHONPATH", "NCCL_DEBUG"}
    assert forwarded_environment(shell, {}).keys() == expected
    shell |= {"TENSORBOARD_DIR": "t", "VERL_FILE_LOGGER_PATH": "f", "MY_KEY": "k", "OPENAI_API_KEY": "o"}
    judge = {"url": "https://judge", "api_key_env": "MY_KEY"}
    tree = {"reward_model": {"judge": judge}, "teacher": {"url": None, "api_key_env": "OPENAI_API_KEY"}}
    added = {"TENSORBOARD_DIR", "VERL_FILE_LOGGER_PATH", "MY_KEY"}
    assert forwarded_environment(shell, tree).keys() == expected | added
    assert int(thread_environment({"LOCAL_WORLD_SIZE": "1000"})["OMP_NUM_THREADS"]) == 1


def test_ranks_get_ctrl_c_though_workers_of_ray_block_it(tmp_path: Path):
    """A process inherits the signals that its parent blocks, whatever handlers it installs."""
    shown = "import signal; print('blocked', *signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    launcher = RankLauncher(0)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        arguments = ["-n1", "-r1", shown]
        end = launcher.run("timeit", arguments, "127.0.0.1", str(tmp_path), {"LOCAL_WORLD_SIZE": "1"})
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert end.code == 0, end.lines
    assert launcher.take_output()[0][1].split() == ["blocked"]


def test_the_interface_of_an_address(monkeypatch):
    assert interface_of_address("127.0.0.1") == "lo"
    assert interface_of_address("203.0.113.1") is None
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    assert network_environment("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}


def test_versions_are_those_of_this_environment():
    import torch

    assert (
        package_versions()["torch"] == torch.__version__.partition("+")[0]
        or package_versions()["torch"] == torch.__version__
    )
