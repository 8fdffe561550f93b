"""GRPO steps of Strop, TRL, verl and OpenRLHF on one GPU: same model, data, reward and settings, in turns.

    python benchmarks/peers/compare.py --model FOLDER --train train.jsonl --test test.jsonl \\
        --peers strop,trl,verl,openrlhf --python-verl PYTHON --path-verl FOLDER --steps 10 --save FILE

Each framework runs in a process of its own through `run_NAME.py`. One JSON line per run is added to `--save`:
seconds of a step by phase (medians without the first steps), the peak of GPU memory (of the whole device, by
nvidia-smi), tokens per second, greedy accuracy on held-out questions, training seconds up to `--goal`, and
how far the log-probs of sampler and trainer differ where the framework reports it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import task

HERE = Path(__file__).resolve().parent
PEERS = {"strop": "strop", "trl": "trl", "verl": "verl", "openrlhf": "openrlhf"}
SHAPE = ("prompts", "samples", "tokens", "prompt_tokens", "lr", "seed")
DIFFERENCES = ("difference_mean", "difference_signed_mean", "difference_max")


class Memory(threading.Thread):
    """The largest use of GPU memory by all processes together, in MiB; nothing without nvidia-smi."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak: float | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        if not shutil.which("nvidia-smi"):
            return
        ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self.ended.wait(0.3):
            answer = subprocess.run(ask, capture_output=True, text=True, check=False)
            numbers = [float(word) for word in answer.stdout.split() if word.replace(".", "").isdigit()]
            if numbers:
                self.peak = max(self.peak or 0.0, *numbers)

    def stop(self) -> float | None:
        self.ended.set()
        self.join()
        return self.peak


def median_and_range(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def seconds_to(goal: float, records: list[dict[str, Any]]) -> float | None:
    """Training seconds up to the first evaluation that reaches the goal; evaluations cost nothing here."""
    spent = 0.0
    for record in records:
        spent += record.get("seconds", 0.0)
        if record.get("accuracy", -1.0) >= goal:
            return spent
    return None


def summary(records: list[dict[str, Any]], warm_up: int, goal: float) -> dict[str, Any]:
    """Medians over the steps after `warm_up`; the largest difference is over all steps."""
    steps = [record for record in records if "seconds" in record]
    timed = steps[warm_up:]
    if not timed:
        raise ValueError(f"{len(steps)} steps recorded, {warm_up} of them for warm-up: raise --steps")
    evaluations = [record for record in records if "accuracy" in record]
    phases = {name: statistics.median(step["phases"][name] for step in timed) for name in task.PHASES}
    found: dict[str, Any] = {
        "steps": len(timed),
        "seconds": median_and_range([step["seconds"] for step in timed]),
        "phases": phases,
        "tokens_per_step": statistics.mean(step["tokens"] for step in timed),
        "tokens_per_second": statistics.median(step["tokens"] / step["seconds"] for step in timed),
        "reward": [step["reward"] for step in steps],
        "accuracy": {record["step"]: record["accuracy"] for record in evaluations},
        f"seconds_to_{goal:g}": seconds_to(goal, records),
    }
    for name in DIFFERENCES:
        reported = [step[name] for step in steps if step.get(name) is not None]
        if reported:
            found[name] = max(reported) if name.endswith("max") else statistics.mean(reported)
    return found


def environment(options: argparse.Namespace, peer: str) -> dict[str, str]:
    """The variables of a framework's process: its own folders of packages come first."""
    folders = [getattr(options, f"path_{peer}"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder)}


def is_installed(options: argparse.Namespace, peer: str) -> bool:
    question = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{PEERS[peer]}') is None)"
    python = getattr(options, f"python_{peer}")
    answer = subprocess.run([python, "-c", question], env=environment(options, peer), check=False)
    return not answer.returncode


def command(options: argparse.Namespace, peer: str, out: Path, rest: list[str]) -> list[str]:
    words = [getattr(options, f"python_{peer}"), str(HERE / f"run_{peer}.py")]
    for name in ("model", "steps", "eval_every", *SHAPE):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if options.log_probs:
        words.append("--log-probs")
    return [*words, "--out", str(out), *rest]


def processes_of(mark: str) -> list[int]:
    """Processes with `PEERS_RUN=mark` in their environment: Ray starts some in sessions of their own."""
    wanted = f"PEERS_RUN={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def end_all(mark: str) -> None:
    """Ends all processes of a run, so that the next one has the whole GPU."""
    while left := processes_of(mark):
        for number in left:
            with contextlib.suppress(ProcessLookupError):  # it has ended in the meantime
                os.kill(number, signal.SIGKILL)
        time.sleep(0.2)


def limited(words: list[str], env: dict[str, str], log: Path, limit: float) -> int:
    """Runs with all output in `log`; what started with it ends with it. At the limit the runner is asked to
    end (SIGTERM) and writes the records of the steps that it has."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    with log.open("w") as file:
        process = subprocess.Popen(
            words, env={**env, "PEERS_RUN": mark}, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            print(f"stopped after {limit:.0f} s: {log}", flush=True)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it did not answer: killed below
                process.wait(timeout=15)
            return 124
        finally:
            end_all(mark)


def run(options: argparse.Namespace, peer: str, turn: int, rest: list[str]) -> dict[str, Any]:
    out = options.work.resolve() / f"{peer}-{turn}"
    shutil.rmtree(out, ignore_errors=True)
    rows = options.steps * options.prompts
    task.write_data(out / "data", options.train, options.test, rows, options.held_out, options.seed)
    log = out / "output.log"
    memory = Memory()
    memory.start()
    start = time.perf_counter()
    code = limited(command(options, peer, out, rest), environment(options, peer), log, options.limit)
    wall = time.perf_counter() - start
    line: dict[str, Any] = {"peer": peer, "turn": turn, "wall_seconds": wall, "memory_mib": memory.stop()}
    written = out / "records.jsonl"
    head, *records = task.jsonl(written) if written.exists() else [{}]
    if sum("seconds" in record for record in records) <= options.warm_up:
        tail = log.read_text(errors="replace").splitlines()[-15:]
        print("\n".join(tail), flush=True)
        return {**line, "failed": code, "last_lines": tail}
    if code:
        line["ended_early"] = code
    return {**line, **summary(records, options.warm_up, options.goal), "versions": head["versions"]}


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common = task.arguments(None)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder with safetensors, config and tokenizer")
    add("--train", type=Path, required=True, help="GSM8K as JSON lines, or the parquet of `strop data gsm8k`")
    add("--test", type=Path, required=True)
    add("--peers", default=",".join(PEERS))
    add("--save", type=Path, required=True, help="one JSON line per run is added")
    add("--work", type=Path, default=Path("runs/peers"), help="folder for logs")
    add("--rounds", type=int, default=1, help="turns of each framework")
    add("--warm-up", type=int, default=2, help="first steps of a run, left out of the medians")
    add("--held-out", type=int, default=512, help="questions of each evaluation")
    add("--goal", type=float, default=0.35, help="accuracy whose time is measured")
    add("--limit", type=float, default=560.0, help="seconds of one run")
    add("--steps", type=int, default=8)
    add("--eval-every", type=int, default=0, help="steps between evaluations; 0: none")
    add("--log-probs", action="store_true", help="also measure how far sampler and trainer differ (slower)")
    for name in SHAPE:
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=type(common.get_default(name)), default=common.get_default(name))
    for peer in PEERS:
        add(f"--python-{peer}", default=sys.executable, help=f"interpreter with {peer}")
        add(f"--path-{peer}", default="", help=f"folders with {peer}, for PYTHONPATH")
    return parser.parse_known_args()


def device() -> str:
    if not shutil.which("nvidia-smi"):
        return platform.processor() or platform.machine()
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    options, rest = parse()
    options.model = options.model.resolve()
    peers = options.peers.split(",")
    unknown = sorted(set(peers) - set(PEERS))
    if unknown:
        raise SystemExit(f"--peers has {', '.join(unknown)}; known are {', '.join(PEERS)}")
    shape = f"{options.prompts} x {options.samples} x {options.tokens}"
    options.save.parent.mkdir(parents=True, exist_ok=True)
    for turn in range(options.rounds):
        for peer in peers:
            head = {"date": time.strftime("%Y-%m-%d"), "device": device(), "shape": shape}
            line: dict[str, Any] = {"peer": peer, "skipped": "not installed"}
            if is_installed(options, peer):
                line = run(options, peer, turn, rest)
            with options.save.open("a") as file:
                file.write(json.dumps({**head, **line}) + "\n")
            print(json.dumps({**head, **line}), flush=True)


if __name__ == "__main__":
    main()
