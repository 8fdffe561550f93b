"""Time every algorithm that verl also has beside verl's own function, and GAE and GRPO beside the plain
Python loop.

    python benchmarks/algorithms.py --repeats 5 --out benchmarks/results/algorithms.json

Prints one JSON line per function: the seconds of each system over the repeats, as median, least and most, and
the ratio of the medians. Systems take turns, so that a noisy moment hits all of them. Without verl installed
only the loops are compared. `error` is the largest difference of our result from the other's, relative to its
largest entry.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from algorithm_pairs import PAIRS, Inputs, Side, response_inputs, vocabulary_inputs
from torch import Tensor

from strop.algorithms.aggregation import masked_whiten


def gae_loop(x: Inputs) -> Tensor:
    """The definition, one column at a time."""
    rewards, mask, values = x["rewards"], x["mask"], x["values"]
    next_value, running = torch.zeros(len(rewards)), torch.zeros(len(rewards))
    columns = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + 0.99 * next_value - values[:, t]
        valid = mask[:, t].bool()
        running = torch.where(valid, delta + 0.99 * 0.95 * running, running)
        next_value = torch.where(valid, values[:, t], next_value)
        columns.append(running)
    return masked_whiten(torch.stack(columns[::-1], dim=1), mask)


def grpo_loop(x: Inputs) -> Tensor:
    """Groups gathered in a dictionary, one sample at a time."""
    scores = x["rewards"].sum(-1)
    members = defaultdict(list)
    for uid, score in zip(x["uids"], scores):
        members[uid].append(score)
    statistics_of = {
        uid: (torch.stack(group).mean(), torch.stack(group).std()) for uid, group in members.items()
    }
    for i, uid in enumerate(x["uids"]):
        mean, std = statistics_of[uid]
        scores[i] = (scores[i] - mean) / (std + 1e-6)
    return scores[:, None] * x["mask"]


LOOPS: dict[str, Side] = {"gae": gae_loop, "gae, masks with holes": gae_loop, "grpo": grpo_loop}


def make_inputs(size: str, holes: bool, shapes: dict[str, tuple[int, int]]) -> Inputs:
    return (
        vocabulary_inputs(*shapes[size])
        if size == "vocabulary"
        else response_inputs(*shapes[size], holes=holes)
    )


def difference(ours: Any, theirs: Any) -> float:
    if isinstance(ours, list):
        return 0.0 if ours == theirs else float("nan")
    scale = theirs.abs().max().clamp(min=1e-12)
    return float((ours - theirs).abs().max() / scale)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def measure(
    systems: dict[str, Side], inputs: Inputs, repeats: int, clock: str
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of every repeat by system, after one warm-up whose results are compared."""
    first = {name: system(inputs) for name, system in systems.items()}
    errors = {name: difference(first["ours"], made) for name, made in first.items() if name != "ours"}
    del first
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, system in systems.items():
            start = CLOCKS[clock]()
            system(inputs)
            seconds[name].append(CLOCKS[clock]() - start)
    return seconds, errors


def report(
    name: str, shape: tuple[int, int], seconds: dict[str, list[float]], errors: dict[str, float]
) -> dict[str, Any]:
    medians = {key: statistics.median(times) for key, times in seconds.items()}
    return {
        "function": name,
        "shape": list(shape),
        **{
            key: {"median_s": medians[key], "min_s": min(times), "max_s": max(times)}
            for key, times in seconds.items()
        },
        **{f"{key}_over_ours": medians[key] / medians["ours"] for key in medians if key != "ours"},
        "error": errors,
    }


def circumstances(threads: int, repeats: int, clock: str) -> dict[str, Any]:
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    cpu = next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")),
        platform.machine(),
    )
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{cpu}, {os.cpu_count()} cores, {threads} thread(s)",
        "repeats": repeats,
        "clock": clock,
        "versions": {name: installed.get(name) for name in ("torch", "numpy", "verl", "tensordict")}
        | {"python": platform.python_version()},
    }


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--large", type=int, nargs=2, default=(4096, 4096), help="batch and length of GAE, GRPO, vanilla"
    )
    parser.add_argument(
        "--medium", type=int, nargs=2, default=(1024, 2048), help="batch and length of the others"
    )
    parser.add_argument(
        "--vocabulary", type=int, nargs=2, default=(2048, 32768), help="rows and vocabulary of logits"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--clock", choices=sorted(CLOCKS), default="wall", help="cpu: for a busy machine, with --threads 1"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="parts of function names; all of them if left out"
    )
    parser.add_argument("--out", type=Path, help="also write everything to this JSON file")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    shapes = {
        "large": tuple(chosen.large),
        "medium": tuple(chosen.medium),
        "vocabulary": tuple(chosen.vocabulary),
    }
    with_verl = importlib.util.find_spec("verl") is not None
    lines, made_of, inputs = [], None, None
    for name, pair in PAIRS.items():
        systems = (
            {"ours": pair.ours}
            | ({"loop": LOOPS[name]} if name in LOOPS else {})
            | ({"verl": pair.verl} if with_verl else {})
        )
        if len(systems) == 1 or (chosen.only and not any(part in name for part in chosen.only)):
            continue
        if made_of != (pair.size, pair.holes):
            made_of, inputs = (pair.size, pair.holes), make_inputs(pair.size, pair.holes, shapes)
        seconds, errors = measure(systems, inputs, chosen.repeats, chosen.clock)
        lines.append(report(name, shapes[pair.size], seconds, {} if pair.random else errors))
        print(json.dumps(lines[-1]), flush=True)
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(
            json.dumps(
                {**circumstances(chosen.threads, chosen.repeats, chosen.clock), "functions": lines}, indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
