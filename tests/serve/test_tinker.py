"""The unmodified Tinker client against `strop serve-train`: losses by hand, four users at once, kill -9."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.serve.losses import LOSSES, summed_loss
from tests.serve.tiny import write_tiny_model

pytestmark = pytest.mark.tinker

REPOSITORY = Path(__file__).parents[2]
CLIENT = REPOSITORY / ".venv-tinker" / "bin" / "python"
TOKENS = [f"tml-user{number}-0123456789" for number in range(4)]
ALPHA = 32.0


class ServiceProcess:
    """`strop serve-train` in a process of its own, which can be killed and started again."""

    def __init__(self, model: Path, state: Path, *settings: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [
            sys.executable,
            "-m",
            "strop.cli",
            "serve-train",
            f"model.path={model}",
            f"server.port={self.port}",
            f"server.state_dir={state}",
            *settings,
        ]
        self.start()

    def start(self) -> None:
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # so small a model is fastest so
        nothing = subprocess.DEVNULL
        self.process = subprocess.Popen(self.command, stdout=nothing, stderr=nothing, env=one_thread)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait(self) -> None:
        while self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=120):
                    return
            except OSError:  # the port is not open yet
                time.sleep(0.1)
        raise AssertionError("the service ended")


def client_environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**kept, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0", **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not CLIENT.exists():
        pytest.fail("make test-tinker makes the environment of the client")
    return tmp_path_factory.mktemp("tinker")


@pytest.fixture(scope="module")
def said(folder: Path) -> Iterator[dict[str, Any]]:
    """What the client reported, by phase. The service is killed in the middle of its last phase."""
    model = write_tiny_model(folder / "model")
    tokens = folder / "tokens"
    tokens.write_text("".join(f"user{number} {token}\n" for number, token in enumerate(TOKENS)))
    service = ServiceProcess(
        model,
        folder / "state",
        f"server.tokens_file={tokens}",
        "server.base_model=tiny",
        "server.snapshot_steps=2",
        "server.max_adapters_per_user=32",
    )
    try:
        yield report_of_client(service)
    finally:
        service.kill()


def report_of_client(service: ServiceProcess) -> dict[str, Any]:
    """Run the client to its end, and kill and restart the service twice in its last phase."""
    service.wait()
    command = [str(CLIENT), str(Path(__file__).with_name("tinker_client.py")), service.url, "tiny", *TOKENS]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=client_environment())
    found: dict[str, Any] = {}
    steps = 0
    assert client.stdout is not None
    for line in client.stdout:
        report = json.loads(line)
        found[report["phase"]] = report["content"]
        if "kill" in found and report["phase"] == "step":
            steps += 1
            if steps in (2, 5):
                service.kill()  # the client has sent a whole step, and waits for a sample
                service.start()
    assert client.wait() == 0
    return found


def lora_log_probs(
    model: Any, weights: dict[str, torch.Tensor], tokens: list[int], rank: int
) -> torch.Tensor:
    """Log-probs of all tokens after each position, with W + alpha / rank * B A in every adapted layer."""
    changed = {}
    for name, value in model.named_parameters():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in weights:
            product = weights[f"{key}.lora_B.weight"] @ weights[f"{key}.lora_A.weight"]
            changed[name] = value.detach() + ALPHA / rank * product
    logits = torch.func.functional_call(model, changed, (torch.tensor([tokens]),)).logits[0]
    return torch.log_softmax(logits.float(), -1)


def adapter_weights(folder: Path, path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    model, kind, name = path.removeprefix("tinker://").split("/")
    return load_file(folder / "state" / "models" / model / kind / name / "adapter_model.safetensors")


def test_losses_and_steps_are_those_computed_by_hand(said: dict[str, Any], folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokens = [[5, 6, 7, 8, 30, 31], [9, 10, 11, 12]]
    factors = [[0.0, 1.0, 2.0, 0.5, 1.0, -1.0], [1.0, 0.0, 0.25, 1.0]]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model.requires_grad_(False)
    changed = {"ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}, "dro": {"beta": 0.1}}
    assert set(said["losses"]) == {*LOSSES, "custom"}
    for name, found in said["losses"].items():
        weights = adapter_weights(folder, found["before"])
        leaves = {key: value.clone().requires_grad_() for key, value in weights.items()}
        total = torch.zeros(())
        for row, (ids, values) in enumerate(zip(tokens, factors, strict=True)):
            targets = torch.tensor([*ids[1:], 40])
            log_probs = lora_log_probs(model, leaves, ids, rank=4).gather(1, targets[:, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor(found["log_probs"][row]), log_probs.detach(), rtol=1e-5, atol=2e-5
            )
            if name == "custom":
                total = total + (log_probs**2).sum()
                continue
            sampled = torch.tensor([-4.4 - 0.1 * place for place in range(len(ids))])
            inputs = {"weights": values, "advantages": values, "logprobs": sampled.tolist()}
            arrays = {key: torch.tensor(value).numpy() for key, value in inputs.items()}
            settings = {**LOSSES[name].settings, **changed.get(name, {})}
            total = total + summed_loss(LOSSES[name], settings, log_probs, arrays)
        assert found["loss"] == pytest.approx(float(total.detach()), rel=1e-5)
        total.backward()
        torch.nn.utils.clip_grad_norm_(leaves.values(), 0.5)
        torch.optim.AdamW(leaves.values(), lr=0.01, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1).step()
        after = adapter_weights(folder, found["after"])
        for key, leaf in leaves.items():
            torch.testing.assert_close(after[key], leaf.detach(), rtol=1e-3, atol=2e-5)
        scores = lora_log_probs(model, after, tokens[0], rank=4)
        expected = scores[:-1].gather(1, torch.tensor(tokens[0][1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found["scores"]), expected, rtol=1e-5, atol=2e-5)


def test_four_users_at_once_get_the_numbers_that_each_gets_alone(said: dict[str, Any]) -> None:
    assert len(said["alone"]) == 4 and said["alone"][0] != said["alone"][1]
    for together, alone in zip(said["together"], said["alone"], strict=True):
        assert together["trained"] == alone["trained"]
        assert together["tokens"] == alone["tokens"]
        # In the engine, products of few and of many rows differ in their last bits.
        assert together["sampled"] == pytest.approx(alone["sampled"], abs=1e-5)


def test_a_client_goes_on_after_kill_9(said: dict[str, Any]) -> None:
    assert said["interrupted"] == said["uninterrupted"]


def test_an_unknown_key_is_told_so(said: dict[str, Any]) -> None:
    assert "The key is not known" in said["stranger"]
