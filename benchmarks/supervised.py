"""Rows per second of supervised training: `strop sft|rm|dpo` beside TRL's trainers, on the same model, rows
and batch.

    python benchmarks/supervised.py sft-tiny --peer PYTHON_WITH_TRL
    python benchmarks/supervised.py dpo-smollm2 --peer PYTHON_WITH_TRL --gsm8k train.jsonl \\
        --rounds 2 --steps 2
    python benchmarks/supervised.py mfu     # one GPU: share of its measured bf16 matmul peak

The two systems take turns for `--rounds` rounds, each time as a process of its own, so that a noisy moment
hits both; the first `--warm-up` steps of every turn are left out. A step is the time from the end of one to
the end of the next. On a machine with other work to do, `--threads 1 --clock processor` counts the
processor's time, which does not include the waiting. Neither recomputes activations; both compute in fp32 and
take the rows in their order; DPO asks its reference in every step. Of several micro-batch sizes of the peer
the fastest counts. Prints one JSON line per system and the ratio last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CLOCKS = ("wall", "processor")


@dataclass(frozen=True)
class Work:
    verb: str
    model: str
    rows: int
    """Rows or pairs per update."""
    peer_micro: tuple[int, ...]
    """Of the peer, rows per forward; 0: the whole update."""


WORKS = {
    "sft-tiny": Work("sft", "tiny", 256, (0, 64)),
    "rm-tiny": Work("rm", "tiny", 128, (0, 32)),
    "dpo-tiny": Work("dpo", "tiny", 128, (0, 32)),
    "sft-smollm2": Work("sft", "smollm2", 4, (0, 1)),
    "rm-smollm2": Work("rm", "smollm2", 4, (0, 1)),
    "dpo-smollm2": Work("dpo", "smollm2", 4, (0, 1)),
}


# --- what both are given ------------------------------------------------------------------------------------


def prepare(folder: Path, work: Work, gsm8k: str | None) -> None:
    """model/, and the same rows in both systems' forms: <verb>.jsonl and <verb>_trl.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model" / "config.json").exists():
        save_model(folder / "model", work.model)
    questions = sums(4096) if work.model == "tiny" else word_problems(gsm8k)
    for verb in ("sft", "rm", "dpo"):
        ours, theirs = rows_of(verb, questions, chat=work.model != "tiny")
        for name, rows in ((f"{verb}.jsonl", ours), (f"{verb}_trl.jsonl", theirs)):
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_model(folder: Path, name: str) -> None:
    from strop.config.schema.model import ModelConfig
    from strop.models.build import build_policy, build_tokenizer
    from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer

    if name == "tiny":
        tokenizer = tiny_tokenizer()
        model = tiny_model(tokenizer, hidden=128, layers=4)
    else:
        settings = ModelConfig(path="smollm2-135m")
        model, tokenizer = build_policy(settings), build_tokenizer(settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


Question = tuple[str, str, str]
"""Prompt, right answer, wrong answer."""


def sums(count: int) -> list[Question]:
    """Sums of two to six numbers: rows of 6 to 24 characters."""
    chance = random.Random(0)
    made = []
    for _ in range(count):
        numbers = [chance.randint(0, 99) for _ in range(chance.randint(2, 6))]
        made.append(
            ("+".join(map(str, numbers)) + "=", str(sum(numbers)), str(sum(numbers) + chance.randint(1, 20)))
        )
    return made


def word_problems(gsm8k: str | None) -> list[Question]:
    """Problems of GSM8K with their solutions; the wrong one is the solution of the next problem."""
    if gsm8k is None:
        raise SystemExit(
            "--gsm8k FILE: name the training split of GSM8K, a jsonl file with question and answer."
        )
    rows = [json.loads(line) for line in Path(gsm8k).read_text().splitlines()[:512]]
    return [(row["question"], row["answer"], other["answer"]) for row, other in pairwise(rows)]


def rows_of(
    verb: str, questions: list[Question], *, chat: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    def turn(role: str, text: str) -> Any:
        return [{"role": role, "content": text}] if chat else text

    if verb == "sft":
        ours = [{"prompt": q, "response": a} for q, a, _ in questions]
        return ours, [
            {"prompt": turn("user", q), "completion": turn("assistant", a)} for q, a, _ in questions
        ]
    ours = [{"prompt": q, "chosen": a, "rejected": b} for q, a, b in questions]
    theirs = [
        {"prompt": turn("user", q), "chosen": turn("assistant", a), "rejected": turn("assistant", b)}
        for q, a, b in questions
    ]
    return ours, theirs


# --- one turn each ------------------------------------------------------------------------------------------


def strop_keys(work: Work, folder: Path, run: Path, steps: int, lr: float) -> list[str]:
    return [
        f"model.path={folder}/model",
        "model.enable_gradient_checkpointing=false",
        "model.fsdp_config.dtype=float32",
        f"data.train_files={folder}/{work.verb}.jsonl",
        *([] if work.verb == "sft" else ["data.prompt_key=prompt"]),
        *(["loss.precompute_ref=false"] if work.verb == "dpo" else []),
        "data.shuffle=false",
        f"data.train_batch_size={work.rows}",
        f"data.micro_batch_size_per_gpu={work.rows}",
        f"optim.lr={lr}",
        "optim.lr_scheduler=constant",
        "optim.lr_warmup_steps=0",
        "optim.betas=[0.9,0.999]",
        "optim.weight_decay=0",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={run}",
        f"plugins=[{HERE / 'rl_step_clock.py'}]",
        "trainer.logger=clock",
        "trainer.checkpoint.save_contents=[]",
        "trainer.resume_mode=disable",
    ]


def strop_turn(work: Work, folder: Path, steps: int, lr: float) -> dict[str, Any]:
    run = folder / f"run-{os.getpid()}-{time.time_ns()}"
    answer([sys.executable, "-m", "strop.cli", work.verb, *strop_keys(work, folder, run, steps, lr)])
    lines = [json.loads(line) for line in (run / "clock.jsonl").read_text().splitlines()]
    return {
        **{clock: [line[clock] for line in lines] for clock in CLOCKS},
        "tokens": statistics.mean(line["data"]["train/global_tokens"] for line in lines),
        "loss": [line["data"]["train/loss"] for line in lines],
    }


def peer_turn(work: Work, folder: Path, steps: int, lr: float, peer: str, micro: int) -> dict[str, Any]:
    flags = {"verb": work.verb, "folder": folder, "rows": work.rows, "micro": micro, "steps": steps, "lr": lr}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return json.loads(answer([peer, str(HERE / "supervised_trl.py"), *words]).splitlines()[-1])


def answer(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def seconds(turn: dict[str, Any], clock: str, warm_up: int) -> list[float]:
    """Of each step but the first ones: nothing says when the very first began."""
    return [after - before for before, after in pairwise(turn[clock])][max(warm_up - 1, 0) :]


# --- the comparison -----------------------------------------------------------------------------------------


def summary(system: str, turns: list[dict[str, Any]], work: Work, clock: str, warm_up: int) -> dict[str, Any]:
    rounds = [seconds(turn, clock, warm_up) for turn in turns]
    every = [second for each in rounds for second in each]
    step, tokens = statistics.median(every), statistics.mean(turn["tokens"] for turn in turns)
    return {
        "system": system,
        "seconds": round(step, 4),
        "least": round(min(every), 4),
        "most": round(max(every), 4),
        "by_round": [round(statistics.median(each), 4) for each in rounds],
        "steps": len(every),
        ("rows_per_second" if work.verb == "sft" else "pairs_per_second"): float(f"{work.rows / step:.4g}"),
        "tokens_per_second": float(f"{tokens / step:.4g}"),
        "tokens": round(tokens, 1),
        "first_loss": round(turns[0]["loss"][0], 4),
    }


def compare(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    work = replace(WORKS[name], rows=asked.rows or WORKS[name].rows)
    folder = Path(asked.out) / work.model
    prepare(folder, work, asked.gsm8k)
    steps = asked.steps + max(asked.warm_up, 1)
    tried = {}
    if len(work.peer_micro) > 1 and not asked.micro:
        for micro in work.peer_micro:
            turn = peer_turn(work, folder, steps, asked.lr, asked.peer, micro)
            tried[micro] = round(statistics.median(seconds(turn, asked.clock, asked.warm_up)), 4)
    best = min(tried, key=lambda micro: tried[micro]) if tried else asked.micro or work.peer_micro[0]
    ours, theirs = [], []
    for _ in range(asked.rounds):
        theirs.append(peer_turn(work, folder, steps, asked.lr, asked.peer, best))
        ours.append(strop_turn(work, folder, steps, asked.lr))
    lines = [
        summary("strop", ours, work, asked.clock, asked.warm_up),
        {
            **summary("trl", theirs, work, asked.clock, asked.warm_up),
            "micro": best,
            "versions": theirs[0]["versions"],
        },
    ]
    unit = "tokens_per_second" if work.verb == "sft" else "pairs_per_second"
    last = {
        "work": name,
        "rows": work.rows,
        "clock": asked.clock,
        "threads": asked.threads,
        f"strop/trl {unit}": round(lines[0][unit] / lines[1][unit], 2),
        "by_round": [round(b / a, 2) for a, b in zip(lines[0]["by_round"], lines[1]["by_round"])],
        "peer_micro": tried,
    }
    for line in (*lines, last):
        print(json.dumps(line), flush=True)
    return {"date": time.strftime("%Y-%m-%d"), "systems": lines, **last}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=[*sorted(WORKS), "mfu"])
    parser.add_argument("--peer", help="the Python interpreter that has TRL")
    parser.add_argument("--micro", type=int, default=0, help="the peer's rows per forward; 0: try several")
    parser.add_argument("--rows", type=int, default=0, help="rows or pairs per update; 0: as the work says")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of a turn")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--lr", type=float, default=1e-7)
    parser.add_argument("--gsm8k", help="train.jsonl of GSM8K, for SmolLM2")
    parser.add_argument("--out", default="runs/supervised_benchmark", help="folder for models, rows and runs")
    parser.add_argument("--save", help="JSON file to which the result is added")
    asked, rest = parser.parse_known_args()
    if asked.work == "mfu":
        from supervised_mfu import main as utilisation

        utilisation(rest, steps=asked.steps, warm_up=asked.warm_up, save=asked.save)
        return
    if rest or not asked.peer:
        parser.error(f"not understood: {rest}" if rest else "--peer is needed")
    os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    found = compare(asked.work, asked)
    if asked.save:
        file = Path(asked.save)
        known = json.loads(file.read_text()) if file.exists() else {}
        entry = f"{asked.work} micro {asked.micro}" if asked.micro else asked.work
        file.write_text(json.dumps({**known, entry: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
