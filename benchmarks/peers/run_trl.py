"""TRL's side of `compare.py`: `GRPOTrainer` with vLLM in its process, or `generate` where there is no GPU.

    PYTHON_WITH_TRL benchmarks/peers/run_trl.py --model FOLDER --out FOLDER --steps 10

TRL reports the length of a step, not of its phases: the methods of the trainer are timed here, with the GPU
synchronized at both ends.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import task

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # not packed

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

PACKAGES = ("trl", "vllm", "transformers", "accelerate", "torch")
LOGGED = {
    "difference_mean": "sampling/sampling_logp_difference/mean",
    "difference_max": "sampling/sampling_logp_difference/max",
}


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock(TrainerCallback):
    """Seconds of each step by phase, and greedy accuracy between steps."""

    def __init__(self, options: argparse.Namespace, held_out: list[dict[str, str]]) -> None:
        self.options = options
        self.held_out = held_out
        self.trainer: Any = None
        self.spent: dict[str, float] = {}
        self.begun = 0.0
        self.records: list[dict[str, Any]] = []
        self.step: dict[str, Any] = {}

    def watch(self, owner: Any, method: str, phase: str, only_without_gradient: bool = False) -> None:
        """Adds the seconds of `owner.method` to `phase`."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if only_without_gradient and torch.is_grad_enabled():
                return inner(*args, **kwargs)
            start = now()
            result = inner(*args, **kwargs)
            self.spent[phase] = self.spent.get(phase, 0.0) + now() - start
            return result

        setattr(owner, method, timed)

    def attach(self, trainer: Any) -> None:
        self.trainer = trainer
        if self.options.vllm:
            self.watch(trainer.vllm_generation, "sync_weights", "weight_sync")
            self.watch(trainer.vllm_generation, "generate", "rollout")
        else:
            self.watch(trainer, "_generate_single_turn", "rollout")
        self.watch(trainer, "_get_per_token_logps_and_entropies", "log_probs", only_without_gradient=True)
        self.watch(trainer, "_generate_and_score_completions", "experience")

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        # The first micro-batch of a step generates and scores the whole batch.
        self.spent = {}
        self.begun = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        seconds = now() - self.begun
        spent = dict(self.spent)
        # Backward passes and the optimizer: all of a step but what made its experience.
        spent["update"] = seconds - spent["experience"]
        self.step = {"seconds": seconds, "phases": spent}

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        if not logs or "completions/mean_length" not in logs or not self.step:
            return
        samples = self.options.prompts * self.options.samples
        differences = {name: logs.get(key) for name, key in LOGGED.items()}
        self.records.append(
            task.step_record(
                state.global_step,
                **self.step,
                tokens=logs["completions/mean_length"] * samples,
                reward=logs["reward"],
                **differences,
            )
        )
        self.step = {}
        every = self.options.eval_every
        if every and state.global_step % every == 0:
            self.evaluate(state.global_step)

    def evaluate(self, step: int) -> None:
        start = now()
        tokenizer = self.trainer.processing_class
        chats = [[{"role": "user", "content": row["prompt"]}] for row in self.held_out]
        prompts = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        complete = self.with_vllm if self.options.vllm else self.with_generate
        texts = complete(prompts, tokenizer)
        right = [task.score(text, row["answer"]) for text, row in zip(texts, self.held_out)]
        accuracy = sum(right) / len(right)
        self.records.append({"step": step, "accuracy": accuracy, "evaluation_seconds": now() - start})

    def with_vllm(self, prompts: list[list[int]], tokenizer: Any) -> list[str]:
        from vllm import SamplingParams

        engine = self.trainer.vllm_generation
        engine.sync_weights()
        greedy = SamplingParams(temperature=0.0, max_tokens=self.options.tokens)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        return [answer.outputs[0].text for answer in engine.llm.generate(inputs, greedy, use_tqdm=False)]

    def with_generate(self, prompts: list[list[int]], tokenizer: Any) -> list[str]:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(
            model.device
        )
        with torch.no_grad():
            ids = model.generate(**inputs, do_sample=False, max_new_tokens=self.options.tokens)
        return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [task.score(one[0]["content"], right) for one, right in zip(completions, answer)]


def configuration(options: argparse.Namespace) -> trl.GRPOConfig:
    samples = options.prompts * options.samples
    micro = min(options.sequences_per_pass, samples)
    on_gpu = torch.cuda.is_available()
    engine = {}
    if options.vllm:
        engine = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": options.engine_memory,
            "vllm_max_model_length": options.prompt_tokens + options.tokens,
            # Needs one more pass over the batch. Without it, TRL trains on the log-probs of its own update.
            "vllm_importance_sampling_correction": options.log_probs,
        }
    more = {}
    for item in options.extra:
        key, _, value = item.partition("=")
        more[key] = value
    settings: dict[str, Any] = {
        "output_dir": str(options.out / "run"),
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": samples // micro,
        "num_generations": options.samples,
        "max_completion_length": options.tokens,
        "max_steps": options.steps,
        "learning_rate": options.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "loss_type": "dapo",  # the mean over all tokens of the batch, as in the others
        "scale_rewards": "group",
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused" if on_gpu else "adamw_torch",
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": options.kernel},
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": options.seed,
        **engine,
        **more,
    }
    return trl.GRPOConfig(**settings)


def run(options: argparse.Namespace) -> None:
    clock = Clock(options, task.jsonl(options.out / "data" / "test.jsonl"))
    rows = task.jsonl(options.out / "data" / "train.jsonl")
    table = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows
    ]
    trainer = trl.GRPOTrainer(
        model=str(options.model),
        reward_funcs=reward,
        args=configuration(options),
        train_dataset=Dataset.from_list(table),
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        callbacks=[clock],
    )
    clock.attach(trainer)
    task.end_on_sigterm()
    try:
        if options.eval_every:
            clock.evaluate(0)
        trainer.train()
    finally:
        task.write_records(options.out, clock.records, task.versions_of(*PACKAGES))


def main() -> None:
    parser = task.arguments(__doc__)
    parser.add_argument("--engine", choices=("auto", "vllm", "generate"), default="auto")
    options = parser.parse_args()
    options.vllm = options.engine == "vllm" or (options.engine == "auto" and torch.cuda.is_available())
    # Rows are padded: the kernel of flash_attn would have to remove and add padding in each layer.
    options.kernel = "sdpa" if options.attention == "auto" else options.attention
    if options.dry:
        print(configuration(options))
        return
    run(options)


if __name__ == "__main__":
    main()
