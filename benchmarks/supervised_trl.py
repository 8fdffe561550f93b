"""One turn of TRL for `supervised.py`: SFTTrainer, RewardTrainer or DPOTrainer. Prints when each step ended,
as JSON."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.wall: list[float] = []
        self.processor: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.wall.append(time.perf_counter())
        self.processor.append(time.process_time())


def trainer_of(asked: argparse.Namespace, rows: list[dict[str, Any]]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(asked.folder / "model")
    micro = asked.micro or asked.rows
    shared = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": asked.rows // micro,
        "max_steps": asked.steps,
        "learning_rate": asked.lr,
        "lr_scheduler_type": "constant",
        "max_length": 1024,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "seed": 0,
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
    }
    data, as_fp32 = Dataset.from_list(rows), {"dtype": "float32"}
    if asked.verb == "rm":
        model = AutoModelForSequenceClassification.from_pretrained(
            asked.folder / "model", num_labels=1, dtype=torch.float32
        )
        model.config.pad_token_id = tokenizer.pad_token_id
        return trl.RewardTrainer(
            model, args=trl.RewardConfig(**shared), train_dataset=data, processing_class=tokenizer
        )
    kind, config = (trl.SFTTrainer, trl.SFTConfig) if asked.verb == "sft" else (trl.DPOTrainer, trl.DPOConfig)
    return kind(
        model=str(asked.folder / "model"),
        args=config(**shared, model_init_kwargs=as_fp32),
        train_dataset=data,
        processing_class=tokenizer,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verb", choices=("sft", "rm", "dpo"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--micro", type=int, default=0, help="rows per forward; 0: all of an update")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rows = [json.loads(line) for line in (asked.folder / f"{asked.verb}_trl.jsonl").read_text().splitlines()]
    trainer, clock = trainer_of(asked, rows), Clock()
    trainer.add_callback(clock)
    tokens = [0]
    plain = trainer.training_step

    def counted(model: Any, inputs: Any, *more: Any, **others: Any) -> Any:
        masks = [value for name, value in inputs.items() if name.endswith("attention_mask")]
        tokens[0] += sum(int(mask.sum()) for mask in masks)
        return plain(model, inputs, *more, **others)

    trainer.training_step = counted
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    versions = {"trl": trl.__version__, "torch": torch.__version__}
    told = {
        "wall": clock.wall,
        "processor": clock.processor,
        "tokens": tokens[0] / asked.steps,
        "loss": losses,
        "versions": versions,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
