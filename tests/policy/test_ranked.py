"""A policy over several ranks: the numbers of one process, and a rank that is gone is said at once."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from strop.backends.base import Outputs
from strop.policy.batches import Datum
from strop.policy.policy import Policy
from strop.policy.ranked import LocalWorkers, PolicyRankLost, RayWorkers
from strop.runtime.local import StartedRanks
from strop.runtime.ray.model_actors import TrainingWorkerLost
from strop.types import Batch, Trajectory
from tests.forked import Forked

KEYS: dict[str, Any] = {"lr": 1e-2, "enable_gradient_checkpointing": False, "seed": 3}
KEYS["actor_rollout_ref.actor.fsdp_config.dtype"] = "float32"
PROMPTS = ["1+2=", "3+4=", "5+5="]


class Lines:
    """The stderr of a forked rank."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def last_lines(self, timeout: float = 1.0) -> tuple[str, ...]:
        return tuple(self._file.read_text().splitlines()[-3:])


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Forked]:
    """Ranks begin with their libraries imported."""
    started: list[Forked] = []

    def start(workers: LocalWorkers, address: str) -> StartedRanks:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "WORLD_SIZE": str(workers.world),
            "LOCAL_WORLD_SIZE": str(workers.world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        logs = [tmp_path / f"rank{rank}" for rank in range(workers.world)]
        for rank, log in enumerate(logs):
            log.touch()
            facts = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(Forked("strop.policy.worker", [address], log, **facts))
        processes: Any = started[-workers.world :]
        tails: Any = [Lines(log) for log in logs]
        return StartedRanks(processes, tails, store)

    monkeypatch.setattr(LocalWorkers, "start", start)
    return started


def own_loss(outputs: Outputs, batch: Batch) -> torch.Tensor:
    assert outputs.log_probs is not None
    return -(outputs.log_probs * batch.mask).sum() / batch.mask.sum()


def learned(policy: Policy) -> tuple[list[float], list[Trajectory]]:
    """Two steps of GRPO and one of a loss of one's own."""
    numbers: list[float] = []
    for _ in range(2):
        groups = policy.sample(PROMPTS, n=3, max_tokens=4)
        for t in itertools.chain(*groups):
            t.score = float(sum(t.response) % 5)
        output = policy.forward_backward(policy.batch(groups, advantages="grpo"), "vanilla")
        numbers += [output.loss, output.metrics["actor/entropy"], policy.optim_step()["grad_norm"]]
    samples = list(itertools.chain(*groups))
    numbers.append(policy.forward_backward([Datum(t.prompt.ids, t.response) for t in samples], own_loss).loss)
    numbers.append(policy.optim_step()["grad_norm"])
    return numbers, samples


@pytest.mark.parametrize("lora_rank", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_two_ranks_have_the_numbers_of_one_process(
    task: Path, tmp_path: Path, forked_ranks: list[Forked], lora_rank: int
) -> None:
    with Policy(task / "model", lora_rank=lora_rank, **KEYS) as alone:
        expected, samples = learned(alone)
        log_probs = alone.log_probs(samples)
    with Policy(task / "model", lora_rank=lora_rank, ranks=2, **KEYS) as policy:
        numbers, found = learned(policy)
        assert [t.response for t in found] == [t.response for t in samples]
        assert numbers == pytest.approx(expected, rel=1e-4, abs=1e-6)
        for a, b in zip(policy.log_probs(samples), log_probs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        together = [
            threading.Thread(target=lambda: [policy.adapters for _ in range(50)], daemon=True),
            threading.Thread(target=lambda: [policy.log_probs(samples) for _ in range(5)], daemon=True),
        ]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join(60)
            assert not thread.is_alive(), "a thread took the answers to the call of the other one"
        policy.save_state(tmp_path / "state")
        policy.save_for_sampling(tmp_path / "folder")
        before = policy.log_probs(samples)
        with pytest.raises(ValueError, match="There is no loss 'vanila'"):
            policy.forward_backward([Datum([1], [2])], "vanila")
        policy.forward_backward([Datum([1], [2, 3])], "cross_entropy")
        policy.optim_step()
        policy.load_state(tmp_path / "state")
        assert all(torch.equal(a, b) for a, b in zip(policy.log_probs(samples), before, strict=True))
        forked_ranks[1].kill()
        with pytest.raises(PolicyRankLost, match=r"Rank 1 of 2 has ended \(SIGKILL\)"):
            policy.log_probs(samples)
        with pytest.raises(PolicyRankLost, match="have ended"):
            policy.log_probs(samples)
    assert forked_ranks[0].wait(10) is not None
    with Policy(task / "model", lora_rank=lora_rank, **KEYS) as one:
        one.load_state(tmp_path / "state")
        for a, b in zip(one.log_probs(samples), before, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_loaded_model_is_not_sent_to_ranks(task: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(task / "model")
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    for keys in ({"ranks": 2}, {"runtime": "ray"}):
        with pytest.raises(ValueError, match="give its folder"):
            Policy(model, tokenizer, **keys)  # type: ignore[arg-type]


SCRIPT = """
import json, sys
from pathlib import Path
from strop.policy.policy import Policy
from tests.policy.test_ranked import KEYS, learned
with Policy(sys.argv[1], lora_rank=4, ranks=2, runtime=sys.argv[2], **KEYS) as policy:
    numbers, samples = learned(policy)
    log_probs = [row.tolist() for row in policy.log_probs(samples)]
found = {"numbers": numbers, "responses": [t.response for t in samples], "log_probs": log_probs}
Path(sys.argv[3]).write_text(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_plain_script_on_ranks_has_the_numbers_of_one_process(
    task: Path, tmp_path: Path, runtime: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    result = tmp_path / "found.json"
    command = [sys.executable, str(tmp_path / "script.py"), str(task / "model"), runtime, str(result)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.exists(), done.stderr[-3000:]
    found = json.loads(result.read_text())
    with Policy(task / "model", lora_rank=4, **KEYS) as alone:
        numbers, samples = learned(alone)
        log_probs = alone.log_probs(samples)
    assert found["responses"] == [t.response for t in samples]
    assert found["numbers"] == pytest.approx(numbers, rel=1e-4, abs=1e-6)
    for row, expected in zip(found["log_probs"], log_probs, strict=True):
        assert row == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-4)


def test_an_optimizer_of_one_device_is_refused_before_ranks_start(task: Path) -> None:
    with pytest.raises(ValueError, match="AdamW8bit works on one device, but there are 2"):
        Policy(task / "model", ranks=2, optimizer="AdamW8bit")


RANK = """
import pickle, socket, sys, time
from multiprocessing.connection import Connection
channel = socket.socket(socket.AF_UNIX)
channel.connect(sys.argv[1])
connection = Connection(channel.detach())
connection.send_bytes(b"0")
while True:
    method, (argument,) = pickle.loads(connection.recv_bytes())
    if method == "end":
        break
    if method == "sleep":
        time.sleep(argument)
    connection.send_bytes(pickle.dumps((None, len(argument) if method == "length" else None)))
connection.close()
time.sleep(0.3)
sys.exit(argument)
"""


@pytest.fixture
def plain_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The only rank is a process without a model, which ends a while after it has closed its connection."""

    def start(workers: LocalWorkers, address: str) -> StartedRanks:
        process = subprocess.Popen([sys.executable, "-c", RANK, address])
        (tmp_path / "log").touch()
        tails: Any = [Lines(tmp_path / "log")]
        return StartedRanks([process], tails, None)

    monkeypatch.setattr(LocalWorkers, "start", start)


@pytest.mark.usefixtures("plain_rank")
@pytest.mark.parametrize(("code", "said"), [(3, "exit code 3"), (0, "exit code 0")])
def test_the_exit_code_of_a_lost_rank_is_said(code: int, said: str) -> None:
    workers = LocalWorkers(1)
    with pytest.raises(PolicyRankLost, match=rf"Rank 0 of 1 has ended \({said}\), and the policy with it"):
        workers.call("end", code)


class LostWorkers:
    """Two Ray actors, of which one is lost."""

    first_failed = 1

    def __init__(self, error: Exception, unanswered: list[int]) -> None:
        self.error = error
        self.unanswered = unanswered

    def call(self, method: str, *arguments: object) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "unanswered", "said"),
    [
        (TrainingWorkerLost("Training worker 1 is gone"), [], "has ended. Training worker 1 is gone"),
        (RuntimeError("no memory"), [0], "Rank 1 failed and rank 0 waits for it.* RuntimeError: no memory"),
    ],
)
def test_a_lost_rank_on_ray_is_told_as_on_this_machine(
    error: Exception, unanswered: list[int], said: str
) -> None:
    closed: list[bool] = []
    lost: Any = LostWorkers(error, unanswered)
    workers = RayWorkers(lost, lambda: closed.append(True))
    with pytest.raises(PolicyRankLost, match=said):
        workers.call("sample")
    with pytest.raises(PolicyRankLost, match="Make a new one, and load its state"):
        workers.call("sample")
    assert closed == [True]


def test_an_error_of_all_ranks_on_ray_leaves_the_policy() -> None:
    lost: Any = LostWorkers(ValueError("There is no loss"), [])
    workers = RayWorkers(lost, lambda: pytest.fail("closed"))
    for _ in range(2):
        with pytest.raises(ValueError, match="There is no loss"):
            workers.call("forward_backward")


RAY_SCRIPT = """
import os, signal, sys
from strop.policy.policy import Policy
from strop.policy.ranked import PolicyRankLost
from tests.policy.test_ranked import KEYS
policy = Policy(sys.argv[1], ranks=2, runtime="ray", **KEYS)
os.kill(policy._core._workers._workers.machines[1][1], signal.SIGKILL)
try:
    policy.sample(["1+2="], max_tokens=2)
except PolicyRankLost as error:
    print("lost:", error)
again = Policy(sys.argv[1], ranks=1, runtime="ray", **KEYS)
print("tokens:", len(again.sample(["1+2="], max_tokens=2)[0][0].response))
"""


@pytest.mark.slow
def test_after_a_lost_rank_on_ray_a_new_policy_can_be_made(task: Path, tmp_path: Path) -> None:
    """And nothing is complained of at the end of a script that leaves its policy open."""
    (tmp_path / "script.py").write_text(RAY_SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(task / "model")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "lost: The policy has ended. Training worker 1 of 2 of the policy" in done.stdout
    assert "tokens: " in done.stdout
    assert "Exception ignored" not in done.stderr


@pytest.mark.usefixtures("plain_rank")
def test_an_interrupted_call_leaves_no_half_of_a_message() -> None:
    """Ctrl-C while a rank is busy, and again while a large message waits for it."""
    workers = LocalWorkers(1)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for method, argument in (("sleep", 1.0), ("length", "a" * 2**22)):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                workers.call(method, argument)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    start = time.monotonic()
    assert workers.call("length", "abc") == 3
    assert time.monotonic() - start < 30
    workers.close()
