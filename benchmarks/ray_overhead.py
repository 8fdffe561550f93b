"""What Ray costs: the same run, started by this machine and by a Ray cluster of this machine, in turns of one
step.

    python benchmarks/ray_overhead.py [--steps 24] [--hidden 128] [--ranks 1]

Both runs live at the same time and take turns (`ray_overhead_turns.py`), so neighbouring steps meet the same
machine; the ratio is the median over pairs of neighbours, of the seconds on the wall and of those that the
rank itself used. Ray's own processes work in the other's turns as well, so what they use is measured apart:
processor seconds per second of the run, by process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WARM = 4
"""Steps that are left out."""
TICKS = os.sysconf("SC_CLK_TCK")


def make_task(folder: Path, hidden: int, ranks: int, steps: int) -> list[str]:
    from strop.data.make import arithmetic, write
    from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer

    for split, rows in arithmetic(512, 16, digits=2, seed=0).items():
        write(rows, folder / "data" / f"{split}.parquet")
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, hidden=hidden, layers=4).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return [
        f"data.train_files={folder}/data/train.parquet",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.rollout.n=16",
        "data.train_batch_size=32",
        "data.max_prompt_length=16",
        "data.max_response_length=24",
        "algorithm.adv_estimator=grpo",
        f"plugins=[{HERE / 'ray_overhead_turns.py'}]",
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.total_training_steps={steps}",
        "trainer.logger=file",
    ]


def start(settings: list[str], runtime: str, folder: Path) -> subprocess.Popen[bytes]:
    more = [f"trainer.runtime={runtime}", f"trainer.default_local_dir={folder / runtime}"]
    turns = {
        "STROP_TURNS": str(folder),
        "STROP_TURN_NAME": runtime,
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
    }
    with (folder / f"{runtime}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "strop.cli", "ppo", *settings, *more],
            env={**os.environ, **turns}, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def steps_of(folder: Path, runtime: str) -> list[dict[str, float]]:
    path = folder / f"{runtime}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def used_by(root: int) -> dict[str, float]:
    """Processor seconds of all processes under `root`, by what they are."""
    parents, seconds, names = {}, {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        pid = int(entry.name)
        parents[pid], seconds[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS
        names[pid] = kind_of(b" ".join(words).decode(errors="replace"))
    under = {root}
    while more := {pid for pid, parent in parents.items() if parent in under} - under:
        under |= more
    found: dict[str, float] = {}
    for pid in under & seconds.keys():
        name = "driver" if pid == root else names[pid]
        found[name] = found.get(name, 0.0) + seconds[pid]
    return found


def kind_of(command: str) -> str:
    signs = {
        "strop.trainer.main_ppo": "rank",
        "strop.rewards": "rank",
        "ray::Agent": "agent",
        "gcs_server": "gcs_server",
        "raylet/raylet": "raylet",
        "log_monitor": "log_monitor",
        "ray::": "node_agents_and_idle_workers",
        "default_worker": "node_agents_and_idle_workers",
    }
    return next((name for sign, name in signs.items() if sign in command), "other")


def watch(runs: dict[str, subprocess.Popen[bytes]], folder: Path) -> dict[str, float]:
    """Wait for both; processor seconds per second of Ray's processes after the first steps."""
    before: dict[str, float] | None = None
    began = latest = time.monotonic()
    after: dict[str, float] = {}
    while any(run.poll() is None for run in runs.values()):
        failed = [name for name, run in runs.items() if run.poll()]
        if failed:
            raise RuntimeError((folder / f"{failed[0]}.log").read_text()[-3000:])
        if (
            runs["ray"].poll() is None
            and len(steps_of(folder, "ray")) >= WARM
            and len(steps_of(folder, "local")) >= WARM
        ):
            now = used_by(runs["ray"].pid)
            if "rank" in now:  # else Ray is about to end its processes
                after, latest = now, time.monotonic()
                if before is None:
                    before, began = after, latest
        time.sleep(0.5)
    assert before is not None
    return {
        name: round((after[name] - before.get(name, 0.0)) / (latest - began), 4) for name in sorted(after)
    }


def compare(folder: Path) -> dict[str, Any]:
    """Each step of one run beside the step of the other that followed it."""
    local, ray = (steps_of(folder, runtime)[WARM:] for runtime in ("local", "ray"))
    ratios = {
        unit: sorted(b[unit] / a[unit] for a, b in zip(local, ray, strict=True))
        for unit in ("wall", "processor")
    }
    return {
        "pairs": len(local),
        "local_step_s": round(statistics.median(row["wall"] for row in local), 3),
        "ray_step_s": round(statistics.median(row["wall"] for row in ray), 3),
        **{f"{unit}_ratio": round(statistics.median(found), 4) for unit, found in ratios.items()},
        **{
            f"{unit}_quartiles": [round(q, 4) for q in statistics.quantiles(found)[::2]]
            for unit, found in ratios.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = make_task(folder, asked.hidden, asked.ranks, asked.steps)
        (folder / "turn").write_text("ray")
        runs = {runtime: start(settings, runtime, folder) for runtime in ("ray", "local")}
        try:
            background = watch(runs, folder)
        finally:
            for run in runs.values():
                run.terminate()
                run.wait()
        print(json.dumps({"benchmark": "ray_overhead", "ranks": asked.ranks, **compare(folder)}))
        print(json.dumps({"benchmark": "ray_overhead", "processor_seconds_per_second": background}))


if __name__ == "__main__":
    main()
