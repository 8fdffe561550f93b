"""A cluster that is not here: 1,024 rollout replicas and 256 trainer ranks, simulated with measured times of
the driver.

    python benchmarks/simulate_cluster.py

What the Python of this project costs each rank per prompt, request and token is measured on this machine, on
the functions that a run calls. Devices are assumed (see ASSUMED). The simulation then lets replicas sample
long-tailed answers in rows, ranks take what the window hands out, and everybody wait for whom they wait in a
run. The cluster grows with its work: `--seqs` samples per replica in each step. One JSON line for the service
times, one per size and way of training, and the size (a power of two times the largest of them) at which a
rank's own work would take half of a step, since nothing else of a step grows with the cluster.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import pickle
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from strop.algorithms.advantages.base import estimate
from strop.algorithms.metrics.training import staleness
from strop.ppo.rank_sharing import PackedTrajectories, prompt_checksum
from strop.ppo.sampler import single_turn_trajectory
from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.interruptible import Interruptible
from strop.types import Prompt, batch_of

PROMPT, SAMPLES = 256, 8


@dataclass(frozen=True)
class Service:
    """Seconds of one rank's Python."""

    prompt: float
    """Per prompt of the step: dealt and compared by every rank."""
    request: float
    """Per own request: asked, answered, made into trajectories (8 samples)."""
    own_token: float
    """Per own token: packed for the others."""
    token: float
    """Per token of the step: unpacked, in tensors, with an advantage; every rank does this for all."""


@dataclass(frozen=True)
class Assumed:
    """Devices. Numbers of a 7B model on one H100 each, rounded."""

    rows: int = 64
    token_seconds: float = 0.02
    """Of a decode step of all rows."""
    prefill_tokens_per_second: float = 30_000
    train_seconds_per_token: float = 1.4e-4
    """On one rank: update and log-probs at 40% of the peak."""
    weights_seconds: float = 15.0
    """To bring 14 GB to all replicas."""
    network_bytes_per_second: float = 10e9
    """What a rank receives from the others."""
    median: float = 1500.0
    spread: float = 1.0
    longest: int = 16384

    def answer(self, draw: random.Random) -> int:
        """Tokens of one answer: most are short, and a batch is as wide as the longest."""
        return min(self.longest, int(self.median * math.exp(self.spread * draw.gauss(0.0, 1.0))) + 1)


ASSUMED = Assumed()
BYTES_PER_TOKEN = 9


def best(work: Callable[[], Any], times: int = 5) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


class Immediate:
    """An engine that has its answers already."""

    version = 0
    same_stream = False

    def __init__(self, answers: list[list[Completion]]) -> None:
        self.answers = answers

    def generate(self, requests: list[Request], sampling: Sampling) -> list[list[Completion]]:
        return self.answers[: len(requests)]

    def abort(self) -> None: ...


def measure(groups: int = 32) -> Service:
    draw = random.Random(0)
    prompts = [Prompt(i, [draw.randrange(150_000) for _ in range(PROMPT)], [], "x") for i in range(groups)]

    def completion() -> Completion:
        ids = [draw.randrange(150_000) for _ in range(ASSUMED.answer(draw))]
        return Completion(ids, [-draw.random() for _ in ids], "stop")

    answers = [[completion() for _ in range(SAMPLES)] for _ in prompts]
    engine: Any = Interruptible(Immediate(answers), cut=True)  # type: ignore[arg-type]

    def ask() -> list[Any]:
        requests = [Request(prompt.ids, SAMPLES, seed=i) for i, prompt in enumerate(prompts)]
        found = engine.generate(requests, Sampling())
        return [single_turn_trajectory(prompts[i], i, c) for i, group in enumerate(found) for c in group]

    made = ask()
    for i, t in enumerate(made):
        t.score = float(i % 2)
    known = dict(enumerate(prompts))
    sent = pickle.dumps(PackedTrajectories.pack(made))

    def take() -> None:
        arrived = list(pickle.loads(sent).unpack(known))
        staleness(arrived, 1)
        batch = batch_of(arrived)
        assert batch.scores is not None
        estimate(
            "grpo",
            rewards=batch.scores,
            mask=batch.mask,
            groups=torch.unique(batch.groups, return_inverse=True)[1],
        )

    tokens = sum(len(t.response) for t in made)
    return Service(
        prompt=best(lambda: prompt_checksum(list(known.items()))) / groups,
        request=best(ask) / groups,
        own_token=best(lambda: pickle.dumps(PackedTrajectories.pack(made))) / tokens,
        token=best(take) / tokens,
    )


class Replica:
    """Rows that take samples in order; time is the replicas' own, which stands still while weights are
    exchanged."""

    def __init__(self, rows: int) -> None:
        self.free = [0.0] * rows

    def run(self, now: float, seconds: float) -> float:
        start = max(now, heapq.heappop(self.free))
        heapq.heappush(self.free, start + seconds)
        return start + seconds


@dataclass
class Cluster:
    replicas: int
    ranks: int
    seqs: int
    service: Service
    age: float
    """0: synchronous; else as in trainer.async_training with partial_rollout."""
    device: Assumed = ASSUMED

    def driver_seconds(self, tokens: int) -> tuple[float, float]:
        """(a rank's Python, its network) in a step of so many tokens."""
        prompts = self.replicas * self.seqs // SAMPLES
        service, share = self.service, 1 / self.ranks
        python = prompts * service.prompt + prompts * share * service.request
        python += tokens * share * service.own_token + tokens * service.token
        return python, tokens * BYTES_PER_TOKEN / self.device.network_bytes_per_second

    def simulate(self, steps: int, seed: int = 0) -> dict[str, float]:
        device, draw = self.device, random.Random(seed)
        replicas = [Replica(device.rows) for _ in range(self.replicas)]
        ends: list[float] = []
        tokens: list[int] = []
        wall = paused = since = 0.0
        spent: Counter[str] = Counter()

        def order() -> None:
            """A step's samples, dealt to the replicas."""
            last, total = 0.0, 0
            for replica in replicas:
                for _ in range(self.seqs):
                    length = device.answer(draw)
                    last = max(last, replica.run(wall - paused, length * device.token_seconds))
                    total += length
            ends.append(last)
            tokens.append(total)

        for step in range(steps):
            if step == steps // 2:  # the window is full from here on
                since, spent = wall, Counter()
            while len(ends) < step + 1 + math.floor(self.age):
                order()
            ready = max(wall, ends[step] + paused)
            python, wire = self.driver_seconds(tokens[step])
            learning = tokens[step] * device.train_seconds_per_token / self.ranks
            spent += Counter(
                waiting=ready - wall, python=python, wire=wire, learning=learning, tokens=tokens[step]
            )  # type: ignore[arg-type]
            again = device.rows * device.median / device.prefill_tokens_per_second if self.age else 0.0
            wall = ready + python + wire + learning + device.weights_seconds
            paused += device.weights_seconds + again
        steps, wall = steps - steps // 2, wall - since
        return {
            "step_seconds": wall / steps,
            "waiting_for_samples": spent["waiting"] / steps,
            "driver_python": spent["python"] / steps,
            "driver_network": spent["wire"] / steps,
            "training": spent["learning"] / steps,
            "weights": device.weights_seconds,
            "replica_rows_busy": spent["tokens"]
            * device.token_seconds
            / (self.replicas * device.rows * wall),
            "tokens_per_second": spent["tokens"] / wall,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seqs", type=int, default=64, help="samples per replica and step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--sizes", default="16,64,256,1024", help="numbers of replicas; a quarter as many ranks"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    service = measure()
    print(
        json.dumps(
            {"service_seconds": {name: float(f"{value:.3g}") for name, value in asdict(service).items()}}
        ),
        flush=True,
    )
    for size in (int(text) for text in asked.sizes.split(",")):
        for age in (0, 1, 2, 4):
            cluster = Cluster(size, max(1, size // 4), asked.seqs, service, age)
            found = cluster.simulate(asked.steps)
            line = {"replicas": size, "ranks": cluster.ranks, "age": age} | {
                k: float(f"{v:.4g}") for k, v in found.items()
            }
            print(json.dumps(line), flush=True)
    print(json.dumps(half_of_a_step(cluster, found)))


def half_of_a_step(cluster: Cluster, found: dict[str, float]) -> dict[str, int]:
    """Where the Python of a rank takes as long as everything else in a step, given what was `found` for a
    cluster."""
    rest = found["step_seconds"] - found["driver_python"]
    tokens = found["tokens_per_second"] * found["step_seconds"] / cluster.replicas
    while True:
        python, _ = cluster.driver_seconds(int(tokens * cluster.replicas))
        if python > rest:
            return {
                "driver_is_half_of_a_step_at_replicas": cluster.replicas,
                "step_seconds": round(python + rest),
            }
        cluster = replace(cluster, replicas=2 * cluster.replicas, ranks=2 * cluster.ranks)


if __name__ == "__main__":
    main()
