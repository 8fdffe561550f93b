"""verl's side of `compare.py`: `python -m verl.trainer.main_ppo`, its own metrics read from its file logger.

    PYTHON_WITH_VERL benchmarks/peers/run_verl.py --model FOLDER --out FOLDER --steps 10

With `--dry` the command is composed by verl's own Hydra configuration and checked, without a GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import task

HERE = Path(__file__).resolve().parent


def keys(options: argparse.Namespace) -> dict[str, Any]:
    data = options.out.resolve() / "data"
    kernel = task.attention(options)
    actor = "actor_rollout_ref.actor"
    rollout = "actor_rollout_ref.rollout"
    return {
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "test.parquet",
        "data.train_batch_size": options.prompts,
        "data.max_prompt_length": options.prompt_tokens,
        "data.max_response_length": options.tokens,
        "data.shuffle": False,
        "actor_rollout_ref.model.path": options.model.resolve(),
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        # Packed rows need the varlen kernel of flash_attn.
        "actor_rollout_ref.model.use_remove_padding": kernel == "flash_attention_2",
        "+actor_rollout_ref.model.override_config.attn_implementation": kernel,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.reshard_after_forward": False,
        f"{actor}.ppo_mini_batch_size": options.prompts,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": options.tokens_per_pass,
        f"{actor}.optim.lr": options.lr,
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.use_kl_loss": False,
        f"{actor}.entropy_coeff": 0,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": options.samples,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": options.engine_memory,
        f"{rollout}.max_num_seqs": options.prompts * options.samples,
        f"{rollout}.max_num_batched_tokens": options.tokens_per_pass,
        f"{rollout}.max_model_len": options.prompt_tokens + options.tokens,
        f"{rollout}.enforce_eager": False,
        # Its vLLM process kept 101 GiB after the first rollout otherwise, and the update had no memory left.
        f"{rollout}.free_cache_engine": True,
        f"{rollout}.calculate_log_probs": options.log_probs,
        f"{rollout}.temperature": 1.0,
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "reward.custom_reward_function.path": HERE / "task.py",
        "reward.custom_reward_function.name": "compute_score",
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.logger": "[console,file]",
        "trainer.total_training_steps": options.steps,
        "trainer.total_epochs": 1,
        "trainer.test_freq": options.eval_every or -1,
        "trainer.val_before_train": bool(options.eval_every),
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": options.out.resolve() / "run",
    }


def command(options: argparse.Namespace) -> list[str]:
    pairs = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in keys(options).items()
    ]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *pairs, *options.extra]


def environment(options: argparse.Namespace) -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # not packed
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HYDRA_FULL_ERROR": "1",
        "VERL_FILE_LOGGER_PATH": str(options.out.resolve() / "verl.jsonl"),
        # verl imports this module in each of its processes; it adds the differences of log-probs.
        "VERL_USE_EXTERNAL_MODULES": "verl_additions",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }


def records(lines: list[dict[str, Any]], samples: int) -> Iterator[dict[str, Any]]:
    """The lines of verl's file logger as records of the comparison.

    `timing_s/gen` is the trainer's wait for the samples, whose rewards are computed as they finish.
    """
    for line in lines:
        found = line["data"]
        if "timing_s/step" in found:
            phases = {
                "rollout": found["timing_s/gen"],
                "log_probs": found.get("timing_s/old_log_prob", 0.0),
                "update": found["timing_s/update_actor"],
                "weight_sync": found.get("timing_s/update_weights", 0.0),
            }
            yield task.step_record(
                line["step"],
                found["timing_s/step"],
                phases,
                tokens=found["response_length/mean"] * samples,
                reward=found["critic/score/mean"],
                difference_mean=found.get("training/rollout_log_probs_diff_mean"),
                difference_max=found.get("training/rollout_log_probs_diff_max"),
            )
        accuracy = [value for key, value in found.items() if key.startswith("val-core/") and "@1" in key]
        if accuracy:
            yield {"step": line["step"], "accuracy": accuracy[0]}


def check(options: argparse.Namespace) -> None:
    """verl composes and validates the configuration; nothing is started."""
    import hydra
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    pairs = command(options)[3:]
    folder = Path(__import__("verl").__file__).parent / "trainer" / "config"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        config = hydra.compose("ppo_trainer", overrides=pairs)
    validate_config(config, need_reference_policy(config), need_critic(config))
    print(" ".join(command(options)))


def main() -> None:
    options = task.arguments(__doc__).parse_args()
    if options.dry:
        check(options)
        return
    log = options.out / "verl.jsonl"
    packages = ("verl", "vllm", "ray", "tensordict", "transformers", "torch")
    task.end_on_sigterm()
    try:
        subprocess.run(command(options), check=True, env=environment(options))
    finally:
        if log.exists():
            found = records(task.jsonl(log), options.prompts * options.samples)
            task.write_records(options.out, found, task.versions_of(*packages))


if __name__ == "__main__":
    main()
