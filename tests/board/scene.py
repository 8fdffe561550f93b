"""Runs on the disk as the board finds them, without training anything."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn

from strop.board.app import Board, build_app
from strop.config.compose import load
from strop.run.checkpoint.store import save
from strop.run.sample_table import FOLDER, SampleJob, TokenTexts, sample_table, write_samples
from strop.types import Prompt, Trajectory, Turn

BASE = float(int(time.time()) - 600)
"""When runs here began."""
QUESTION = "Mara packs 12 boxes with 4 cups each and gives away 7 cups. How many cups are left?"
LETTERS = TokenTexts(lambda ids: "".join(chr(i) for i in ids))
"""A tokenizer whose tokens are characters."""
LONG = TokenTexts(lambda ids: "0123456789" * len(ids))
"""One whose tokens are ten characters each."""
CONFIG = load(
    "ppo_trainer",
    [
        "data.train_files=data/train.parquet",
        "data.train_batch_size=8",
        "actor_rollout_ref.model.path=models/tiny",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        "trainer.project_name=sums",
        "trainer.experiment_name=one",
        "trainer.total_training_steps=40",
    ],
).tree()


def line(step: int, **data: Any) -> str:
    return json.dumps({"step": step, "time": BASE + 10 * step, "data": data}) + "\n"


def metrics(step: int, total: int = 40, shift: float = 0.0) -> dict[str, float]:
    """A step of a run that learns."""
    noise = np.random.default_rng(step + int(1000 * shift)).normal()
    found = {
        "critic/score/mean": 1 - 0.8 * 0.5 ** ((step + 1) / (total / 4)) + 0.03 * noise - shift,
        "actor/entropy": 1.2 * 0.5 ** (step / total) + 0.02 * noise,
        "actor/ppo_kl": 0.001 * abs(noise),
        "actor/grad_norm": 0.4 + 0.1 * abs(noise),
        "response_length/mean": 120 + step + 4 * noise,
        "perf/throughput": 4000 + 200 * noise,
        "perf/max_memory_allocated_gb": 11 + 0.01 * step,
        "timing_s/gen": 6 + 0.4 * noise,
        "timing_s/reward": 0.5,
        "timing_s/old_log_prob": 1.1,
        "timing_s/update_actor": 3.2 + 0.1 * noise,
        "timing_s/step": 11 + 0.5 * noise,
    }
    if step % 10 == 0:
        found |= {"val-core/sums/acc/mean@1": 0.3 + 0.6 * step / total - shift, "timing_s/testing": 4.0}
    return found


def answer(
    text: str,
    *,
    prompt: str = QUESTION,
    group: int = 0,
    index: int = 0,
    score: float | None = 1.0,
    **facts: Any,
) -> Trajectory:
    ids = [ord(letter) for letter in text]
    turns = facts.pop("turns", [])
    mask = facts.pop("mask", [1] * len(ids))
    noise = np.random.default_rng(len(ids) + group).exponential(0.6, len(ids))
    return Trajectory(
        prompt=Prompt(
            index,
            [ord(letter) for letter in prompt],
            [],
            facts.pop("source", "sums"),
            ground_truth=facts.pop("truth", "41"),
            images=facts.pop("images", ()),
        ),
        group=group,
        response=ids,
        mask=mask,
        log_probs=[-float(x) * m for x, m in zip(noise, mask)],
        score=score,
        turns=turns,
        num_turns=1 + len(turns) if turns else 2,
        extras=facts.pop("extras", {"acc": score, "format": 1.0}),
        **facts,
    )


def conversation(group: int, index: int) -> Trajectory:
    """The policy calls a tool, is told a number, and answers."""
    said = [
        'I will ask. <tool_call>{"name": "add", "arguments": [2, 2]}</tool_call>',
        "<tool_response>4</tool_response>",
        "It is 4.",
    ]
    ends = np.cumsum([len(text) for text in said]).tolist()
    turns = [
        Turn(role, end - len(text), end)
        for role, text, end in zip(("assistant", "tool", "assistant"), said, ends)
    ]
    mask = [int(turn.role == "assistant") for turn in turns for _ in range(turn.start, turn.end)]
    return answer(
        "".join(said),
        prompt="Use the tool: 2 + 2?",
        group=group,
        index=index,
        turns=turns,
        mask=mask,
        turn_rewards={ends[0] - 1: 0.1},
    )


def write_step(
    run: Path,
    split: str,
    step: int,
    answers: Sequence[Trajectory],
    *,
    trained: bool | None = None,
    texts: TokenTexts = LETTERS,
) -> Path:
    trained = split == "train" if trained is None else trained
    width = max(len(t.response) for t in answers)
    tables: dict[str, torch.Tensor] = {}
    if trained:
        log_probs = torch.zeros(len(answers), width)
        for row, t in enumerate(answers):
            log_probs[row, : len(t.response)] = torch.tensor(t.log_probs)
        scores = {t.group: [peer.reward or 0.0 for peer in answers if peer.group == t.group] for t in answers}
        centred = torch.tensor([(t.reward or 0.0) - float(np.mean(scores[t.group])) for t in answers])
        tables = {
            "mask": (log_probs != 0).float(),
            "trained_log_probs": log_probs + 0.05 * torch.sin(torch.arange(width) / 3.0),
            "entropy": -log_probs.clamp(min=-3),
            "advantages": centred[:, None].expand(-1, width) * (log_probs != 0),
        }
    return write_samples(
        run / FOLDER, split, step, sample_table(SampleJob(split, step, answers, tables), texts)
    )


def write_run(
    run: Path, *, steps: int = 40, shift: float = 0.0, config: dict[str, Any] | None = None
) -> Path:
    """A whole run: metrics, configuration, alerts, samples, checkpoints."""
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text(
        "".join(line(step, **metrics(step, steps, shift)) for step in range(steps + 1))
    )
    (run / "metrics.config.json").write_text(json.dumps(config or CONFIG))
    alert = {
        "step": 31,
        "time": BASE + 310,
        "name": "entropy_collapse",
        "severity": "warning",
        "message": "The entropy fell to 0.05, a tenth of what it was at the start.",
        "advice": "Raise entropy_coeff, or lower the learning rate.",
        "values": {"actor/entropy": 0.05},
    }
    (run / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
    for step in range(max(1, steps - 3), steps + 1):
        write_step(run, "train", step, groups_of(step))
    for step in range(0, steps + 1, 10):
        better = step / steps
        rows = [validation_answer(i, better > i / 4) for i in range(4)]
        write_step(run, "validation", step, rows)
    for step in (20, 40):
        save(
            run,
            step,
            {"trainer": {"step": step}, "actor/model": {"weight": torch.zeros(8)}},
            metrics={"val-core/sums/acc/mean@1": step / 50},
        )
    return run


def validation_answer(row: int, right: bool) -> Trajectory:
    end = "48 - 7 = 41, so forty-one cups are left." if right else "12 + 4 = 16, so nine cups are left."
    return answer(f"First I count the cups. {end}", group=row, index=row, score=float(right))


def groups_of(step: int) -> list[Trajectory]:
    """Prompts of every kind a filter knows: mixed, all right, truncated, failed, a conversation."""
    made = [
        answer(
            f"12 boxes hold 12 x 4 = 48 cups. She gives away 7, so 48 - 7 = {41 if i % 2 else 40}.",
            index=10 * step,
            score=float(i % 2),
        )
        for i in range(4)
    ]
    made += [
        answer("It is 4.", prompt="What is 1 + 3?", group=1, index=10 * step + 1, score=1.0) for _ in range(4)
    ]
    made += [
        answer(
            "Well, " * (20 + 5 * i),
            prompt="Count to 1000.",
            group=2,
            index=10 * step + 2,
            score=0.0,
            finish="length",
        )
        for i in range(4)
    ]
    made += [
        answer(
            "No idea.",
            prompt="Prove it.",
            group=3,
            index=10 * step + 3,
            score=None if i < 2 else 0.5 * i,
            extras={},
        )
        for i in range(4)
    ]
    made += [conversation(4, 10 * step + 4) for _ in range(4)]
    return made


@contextmanager
def serving(root: Path, **options: Any) -> Iterator[str]:
    """A real server on a real port; its address."""
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(Board(root), **options), host="127.0.0.1", port=0, log_level="warning", lifespan="off"
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
