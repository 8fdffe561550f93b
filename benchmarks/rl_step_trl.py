"""TRL's side of `rl_step.py`: one of its trainers on a prepared work, seconds and tokens of each step as one
JSON line.

    PYTHON_WITH_TRL benchmarks/rl_step_trl.py --algorithm grpo --folder runs/rl_step/tiny \\
        --prompts 64 --samples 8 --tokens 8 --steps 10

Needs TRL and its own dependencies alone, and peft for `--lora`. GRPO is trl.GRPOTrainer; PPO is
trl.experimental.ppo, which TRL shipped up to 1.12.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
import trl
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)


def right(completion: str, answer: str) -> float:
    """1.0 where the completion is the answer, or ends with it after an explanation."""
    numbers = re.findall(r"-?\d[\d,]*", completion)
    return float(bool(numbers) and numbers[-1].replace(",", "") == answer)


class Clock(TrainerCallback):
    """Time from the end of one step to the end of the next, logging included, by the wall and by the
    processor."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []
        self.logs: list[dict[str, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        self.logs.append(dict(logs or {}))

    @property
    def times(self) -> dict[str, list[float]]:
        wall, processor = ([after - before for before, after in pairwise(side)] for side in zip(*self.ends))
        return {"wall": wall, "processor": processor}

    def logged(self, name: str) -> list[float]:
        return [log[name] for log in self.logs if name in log]


def common(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": not torch.cuda.is_available(),
        "learning_rate": options.lr,
        "lr_scheduler_type": "constant",
        "temperature": 1.0,
        "bf16": options.precision == "bf16-mixed",
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
    }


def grpo(options: argparse.Namespace, rows: list[dict[str, Any]]) -> tuple[Clock, list[float]]:
    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [
            right(text.replace(" ", "") if options.characters else text, a) for text, a in zip(texts, answer)
        ]

    batch = options.prompts * options.samples
    config = trl.GRPOConfig(
        **common(options),
        per_device_train_batch_size=options.micro or batch,
        gradient_accumulation_steps=batch // (options.micro or batch),
        num_generations=options.samples,
        max_completion_length=options.tokens,
        max_steps=options.steps,
        top_k=0,
        beta=0.0,
        model_init_kwargs={"dtype": "bfloat16" if options.precision == "bf16" else "float32"},
    )
    clock = Clock()
    adapters = None
    if options.lora:
        from peft import LoraConfig

        adapters = LoraConfig(
            r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    trainer = trl.GRPOTrainer(
        model=str(options.folder / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(options.folder / "model", padding_side="left"),
        callbacks=[clock],
        peft_config=adapters,
    )
    trainer.train()
    return clock, [length * batch for length in clock.logged("completions/mean_length")]


def ppo(options: argparse.Namespace, rows: list[dict[str, Any]]) -> tuple[Clock, list[float]]:
    """The reward is a rule, but this trainer takes only a model: a stand-in for one is answered by the
    rule."""
    import trl.experimental.ppo.ppo_trainer as module
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    class Rule(torch.nn.Module):
        pass

    tokenizer = AutoTokenizer.from_pretrained(options.folder / "model", padding_side="left")
    prompts = tokenizer([row["prompt"] for row in rows])["input_ids"]
    answers = {row["prompt"]: row["answer"] for row in rows}
    ask_model = module.get_reward
    lengths: list[float] = []

    def get_reward(model: Any, sequences: torch.Tensor, pad: int, context: int) -> Any:
        if not isinstance(model, Rule):
            return ask_model(model, sequences, pad, context)
        texts = [text.replace(" ", "").replace("<pad>", "") for text in tokenizer.batch_decode(sequences)]
        split = [text.partition("=") for text in texts]
        lengths.append(float((sequences[:, context:] != pad).sum()))
        scores = [float(after.partition("<eos>")[0] == answers[before + "="]) for before, _, after in split]
        return None, torch.tensor(scores), None

    module.get_reward = get_reward
    batch = options.prompts * options.samples
    config = PPOConfig(
        **common(options),
        per_device_train_batch_size=options.micro or batch,
        gradient_accumulation_steps=batch // (options.micro or batch),
        num_mini_batches=1,
        num_ppo_epochs=1,
        local_rollout_forward_batch_size=options.micro or batch,
        response_length=options.tokens,
        stop_token="eos",
        total_episodes=batch * options.steps,
        num_sample_generations=0,
    )
    # One prompt per episode: as many samples of each as the other side takes.
    episodes = [
        {"input_ids": ids}
        for ids in prompts[: options.prompts * options.steps]
        for _ in range(options.samples)
    ]
    clock = Clock()
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(options.folder / "model", dtype=torch.float32),
        ref_model=None,
        reward_model=Rule(),
        value_model=AutoModelForSequenceClassification.from_pretrained(
            options.folder / "model", num_labels=1, dtype=torch.float32
        ),
        train_dataset=Dataset.from_list(episodes),
        eval_dataset=Dataset.from_list(episodes[:8]),
        callbacks=[clock],
    )
    trainer.train()
    return clock, lengths


RUN: dict[str, Callable[..., tuple[Clock, list[float]]]] = {"grpo": grpo, "ppo": ppo}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", choices=sorted(RUN), required=True)
    parser.add_argument("--folder", type=Path, required=True, help="with model/ and prompts.jsonl")
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--precision", choices=("fp32", "bf16-mixed", "bf16"), default="fp32")
    parser.add_argument("--micro", type=int, default=0, help="sequences per micro-batch; 0: all at once")
    parser.add_argument("--lora", type=int, default=0, help="rank of LoRA adapters; 0: all weights")
    parser.add_argument("--characters", action="store_true", help="one token per character")
    options = parser.parse_args()
    rows = [json.loads(line) for line in (options.folder / "prompts.jsonl").read_text().splitlines()]
    clock, tokens = RUN[options.algorithm](options, rows)
    found = {
        **clock.times,
        "tokens": statistics.mean(tokens),
        "versions": {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
