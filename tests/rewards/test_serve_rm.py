"""`strop serve-rm` as its own process, a PPO run that asks it, and folders that are no reward model."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from strop.cli import main
from strop.config.compose import load
from strop.models.heads import RewardStatistics, new_scalar_model, set_reward_statistics
from strop.quickstart.tiny_model import tiny_tokenizer
from strop.rewards.server import _listen, load_served_model
from tests.forked import Forked
from tests.ppo.runs import run


@pytest.fixture(scope="module")
def judge(task, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(5)
    model = new_scalar_model(AutoConfig.from_pretrained(task / "model"))
    with torch.no_grad():
        model.score.weight.normal_(0, 0.3)
    set_reward_statistics(model.config, RewardStatistics(mean=0.5, std=2.0))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


class Served:
    """The command in a process of its own."""

    def __init__(self, folder: Path, *words: str):
        log = folder / "serve-rm.log"
        command = ["serve-rm", "server.port=0", "server.dtype=float32", *words]
        self.process = Forked("strop.cli", command, log, OMP_NUM_THREADS="1")
        deadline = time.monotonic() + 120
        while not (said := re.search(r"answers at .*?(http://\S+)", log.read_text() if log.exists() else "")):
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        self.url = said[1]

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(self.url.replace("/get_reward", path), timeout=100) as reply:
            return json.loads(reply.read())


@pytest.fixture(scope="module")
def served(judge, tmp_path_factory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("served"), f"model.path={judge}")
    yield server
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=100) in (0, -signal.SIGTERM)


def test_scores_are_those_of_transformers(served, judge):
    texts = ["1+2=3", "4+4=8<eos>", "9"]
    body = json.dumps({"query": texts}).encode()
    with urllib.request.urlopen(urllib.request.Request(served.url, data=body), timeout=100) as reply:
        rewards = json.loads(reply.read())["rewards"]
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(judge).eval(), tiny_tokenizer()
    with torch.no_grad():
        expected = [
            model(torch.tensor([tokenizer(t, add_special_tokens=False)["input_ids"]])).logits.item()
            for t in texts
        ]
    assert rewards == pytest.approx(expected, abs=1e-5)


def test_ppo_learns_the_same_from_a_server_as_from_the_model(served, judge, overrides, tmp_path):
    base = [
        *overrides,
        "trainer.total_training_steps=3",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ]
    here = run(
        base,
        "reward_model.enable=true",
        f"reward_model.model.path={judge}",
        "reward_model.model.fsdp_config.dtype=float32",
        f"trainer.default_local_dir={tmp_path}/here",
    )
    there = run(
        base,
        f"reward_model.remote_url=[{served.url},{served.url}]",
        "reward_model.num_workers=4",
        f"trainer.default_local_dir={tmp_path}/there",
    )
    for step in (1, 2, 3):
        assert there[step]["critic/score/mean"] == pytest.approx(here[step]["critic/score/mean"], abs=1e-5)
        assert there[step]["actor/pg_loss"] == pytest.approx(here[step]["actor/pg_loss"], abs=1e-4)
        assert there[step]["reward/failed"] == 0
    health = served.get("/health")
    assert health["status"] == "ok" and health["items"] >= 96 and health["failed"] == 0


def test_scores_can_be_normalised(judge):
    plain = load_served_model(load("reward_server", [f"model.path={judge}", "server.dtype=float32"]).config)
    normal = load_served_model(
        load("reward_server", [f"model.path={judge}", "server.dtype=float32", "server.normalize=true"]).config
    )
    ids = plain.encode(["1+2=3"])
    assert normal.score(ids) == pytest.approx([(plain.score(ids)[0] - 0.5) / 2.0])
    assert plain.max_length == 64


def test_folders_that_are_no_reward_model(task, tmp_path):
    def refused(folder: Path) -> str:
        with pytest.raises(ValueError) as problem:
            load_served_model(load("reward_server", [f"model.path={folder}"]).config)
        return str(problem.value)

    assert "holds no head called 'score', so it cannot score" in refused(task / "model")
    config = AutoConfig.from_pretrained(task / "model")
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "three")
    tiny_tokenizer().save_pretrained(tmp_path / "three")
    assert "has shape (3, 32), but a value or reward model has one label: (1, 32)" in refused(
        tmp_path / "three"
    )


def test_the_command_says_what_is_wrong(task, capsys):
    assert main(["serve-rm"]) == 1
    assert "strop: error: model.path: not set" in capsys.readouterr().err
    assert main(["serve-rm", f"model.path={task}/model", "server.dtype=float32"]) == 1
    assert "it holds a language model (LlamaForCausalLM) without a score head" in capsys.readouterr().err


def test_a_port_that_is_taken(served):
    port = int(served.url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(ValueError, match=rf"server\.port={port} cannot be used: Address already in use"):
        _listen("127.0.0.1", port)


def test_a_server_that_is_not_there_stops_the_run_with_a_reason(overrides, monkeypatch):
    monkeypatch.setattr("strop.rewards.remote.GRACE", 100.0)
    with socket.socket() as closed:  # no other program is given its port
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(
            ValueError, match=r"Scoring failed for all 32 samples.*gave no usable answer after"
        ):
            run(
                overrides,
                f"reward_model.remote_url=http://127.0.0.1:{port}/get_reward",
                "reward_model.timeout=1.5",
                "trainer.val_before_train=false",
            )
