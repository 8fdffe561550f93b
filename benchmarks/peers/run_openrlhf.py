"""OpenRLHF's side of `compare.py`: `python -m openrlhf.cli.train_ppo_ray`, its metrics read from its log.

PYTHON_WITH_OPENRLHF benchmarks/peers/run_openrlhf.py --model FOLDER --out FOLDER --steps 10
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import task

HERE = Path(__file__).resolve().parent
STEP = re.compile(r"Global step (\d+): (\{.*\})")
EVALUATION = re.compile(r"global_step (\d+), eval_metrics: (\{.*\})")


def command(options: argparse.Namespace) -> list[str]:
    data = options.out.resolve() / "data"
    samples = options.prompts * options.samples
    flags: dict[str, Any] = {
        "--actor.model_name_or_path": options.model.resolve(),
        "--actor.num_nodes": 1,
        "--actor.num_gpus_per_node": 1,
        "--ref.num_gpus_per_node": 1,
        "--vllm.num_engines": 1,
        "--vllm.tensor_parallel_size": 1,
        "--vllm.gpu_memory_utilization": options.engine_memory,
        "--vllm.sync_backend": "nccl",
        "--reward.remote_url": HERE / "task.py",
        "--data.prompt_dataset": data / "train.jsonl",
        "--data.input_key": "prompt",
        "--data.label_key": "answer",
        "--data.max_len": options.prompt_tokens + options.tokens,
        "--data.max_samples": options.steps * options.prompts,
        "--rollout.batch_size": options.prompts,
        "--rollout.n_samples_per_prompt": options.samples,
        "--rollout.max_new_tokens": options.tokens,
        "--rollout.temperature": 1.0,
        "--rollout.max_tokens_per_gpu": 2 * options.tokens_per_pass,
        "--train.max_tokens_per_gpu": options.tokens_per_pass,
        "--train.batch_size": samples,
        "--train.num_episodes": 1,
        "--train.max_epochs": 1,
        "--train.seed": options.seed,
        "--algo.advantage.estimator": "group_norm",
        "--algo.kl.init_coef": 0.0,
        "--actor.loss_agg_mode": "token-mean",
        "--actor.eps_clip": 0.2,
        "--actor.adam.lr": options.lr,
        "--actor.lr_scheduler": "constant",
        "--actor.lr_warmup_ratio": 0.0,
        "--actor.max_norm": 1.0,
        "--ds.zero_stage": 2,
        "--ds.param_dtype": "bf16",
        "--ds.attn_implementation": task.attention(options),
        "--ckpt.output_dir": options.out.resolve() / "run",
        "--ckpt.path": options.out.resolve() / "run" / "checkpoints",
        "--ckpt.best_metric_key": "none",
        "--logger.logging_steps": 1,
    }
    switches = [
        "--train.colocate_all",
        "--vllm.enable_prefix_caching",
        "--data.apply_chat_template",
        "--ds.packing_samples",
        "--train.dynamic_batch_enable",
    ]
    if options.eval_every:
        flags["--eval.dataset"] = data / "test.jsonl"
        flags["--eval.steps"] = options.eval_every
        flags["--eval.temperature"] = 0.0
        flags["--eval.n_samples_per_prompt"] = 1
    if options.log_probs:
        # Bounds that change nothing: the correction is switched on only because it reports the difference.
        flags["--algo.advantage.is_correction_level"] = "token"
        flags["--algo.advantage.is_correction_mode"] = "clip"
    words = [str(word) for pair in flags.items() for word in pair]
    betas = ["--actor.adam.betas", "0.9", "0.999"]
    if options.log_probs:
        betas += ["--algo.advantage.is_correction_threshold", "0.0", "1000.0"]
    module = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray"]
    return [*module, *words, *switches, *betas, *options.extra]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # not packed
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
        # DeepSpeed compiles its Adam and does not read names such as 9.0a.
        "TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace("a", ""),
    }


def records(log: str, samples: int) -> Iterator[dict[str, Any]]:
    """The lines that OpenRLHF prints for each step and evaluation as records of the comparison.

    `timing/make_experience` is the pass for the log-probs and the advantages.
    """
    for line in log.splitlines():
        step = STEP.search(line)
        if step:
            found = read(step[2])
            phases = {
                "rollout": found["timing/generation"],
                "log_probs": found["timing/make_experience"],
                "update": found["timing/ppo_train"],
                "weight_sync": found["timing/broadcast"],
            }
            # The mean of signed differences: all that OpenRLHF reports.
            yield task.step_record(
                int(step[1]),
                found["timing/step_total"],
                phases,
                tokens=found["rollout/response_length_mean"] * samples,
                reward=found["rollout/reward_mean"],
                difference_signed_mean=found.get("vllm_kl"),
            )
        evaluation = EVALUATION.search(line)
        if evaluation:
            metrics = read(evaluation[2])
            accuracy = [value for key, value in metrics.items() if key.endswith("_pass1")]
            yield {"step": int(evaluation[1]), "accuracy": accuracy[0]}


def read(text: str) -> dict[str, float]:
    """A dict as Python prints it; `nan` and `inf` are no literals."""
    return ast.literal_eval(re.sub(r"\b(nan|inf)\b", "None", text))


def check(options: argparse.Namespace) -> None:
    """OpenRLHF parses and validates the command; training is replaced by a print."""
    import runpy

    import ray

    def stop(*_: Any, **__: Any) -> None:
        raise SystemExit("the arguments are accepted")

    ray.init = stop
    sys.argv = command(options)[2:]
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")


def main() -> None:
    options = task.arguments(__doc__).parse_args()
    if options.dry:
        print(" ".join(command(options)))
        check(options)
        return
    log = options.out / "openrlhf.log"
    packages = ("openrlhf", "deepspeed", "vllm", "ray", "transformers", "torch")
    task.end_on_sigterm()
    try:
        run(options, log)
    finally:
        found = records(log.read_text(), options.prompts * options.samples)
        task.write_records(options.out, found, task.versions_of(*packages))


def run(options: argparse.Namespace, log: Path) -> None:
    with log.open("w") as file:
        process = subprocess.Popen(
            command(options), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for line in process.stdout or ():
            file.write(line)
            print(line, end="", flush=True)
    if process.wait():
        raise SystemExit(f"OpenRLHF ended with {process.returncode}: {log}")


if __name__ == "__main__":
    main()
