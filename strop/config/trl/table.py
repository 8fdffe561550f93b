"""The arguments of TRL's configurations (TRL 1.16 over transformers 5), and the keys that they become.

`ARGUMENTS` has one row per argument that stands for itself. Arguments that depend on each other (batch sizes,
steps, clipping, KL, losses, schedules, precision) are named in `COMBINED` and converted in convert.py.
`MISSING` gives the reason for those without an equivalent.
"""

from __future__ import annotations

from dataclasses import dataclass

RL = ("grpo", "rloo")
SUPERVISED = ("sft", "dpo", "kto", "reward")
PAIRS = ("dpo", "reward")
ALL = (*RL, *SUPERVISED)
SECTIONS = {"model": "actor_rollout_ref.model", "optim": "actor_rollout_ref.actor.optim"}
"""Sections that reinforcement learning has at another place than supervised training."""
_ROLLOUT = "actor_rollout_ref.rollout"
_LOSS = "actor_rollout_ref.actor.policy_loss.kwargs"


@dataclass(frozen=True)
class Argument:
    """An argument of a configuration class that becomes one key, with the same value."""

    name: str
    key: str
    """`model.` and `optim.` are put under actor_rollout_ref in reinforcement learning."""
    default: object = None
    """TRL's default. It is written out if `always` is set."""
    always: bool = False
    """Our default differs and changes results."""
    trainers: tuple[str, ...] = ALL

    def target(self, trainer: str) -> str:
        """The full key."""
        section, _, rest = self.key.partition(".")
        if trainer in RL and section in SECTIONS:
            return f"{SECTIONS[section]}.{rest}"
        return self.key


ARGUMENTS = (
    Argument("output_dir", "trainer.default_local_dir"),
    Argument("run_name", "trainer.experiment_name"),
    Argument("seed", "trainer.seed", 42),
    Argument("trust_remote_code", "model.trust_remote_code", False),
    Argument("gradient_checkpointing", "model.enable_gradient_checkpointing", True),
    Argument("activation_offloading", "model.enable_activation_offload", False),
    Argument("use_liger_kernel", "model.use_liger", False),
    Argument("learning_rate", "optim.lr", always=True),
    Argument("weight_decay", "optim.weight_decay", 0.0, always=True),
    Argument("adam_epsilon", "optim.eps", 1e-8),
    Argument("dataloader_num_workers", "data.dataloader_num_workers", 0),
    Argument("max_completion_length", "data.max_response_length", 512, trainers=RL),
    Argument("max_prompt_length", "data.max_prompt_length", trainers=RL),
    Argument("num_generations", f"{_ROLLOUT}.n", always=True, trainers=RL),
    Argument("temperature", f"{_ROLLOUT}.temperature", 1.0, trainers=RL),
    Argument("top_p", f"{_ROLLOUT}.top_p", 1.0, trainers=RL),
    Argument("min_p", f"{_ROLLOUT}.min_p", trainers=RL),
    Argument("repetition_penalty", f"{_ROLLOUT}.repetition_penalty", 1.0, trainers=RL),
    Argument("num_generations_eval", f"{_ROLLOUT}.val_kwargs.n", trainers=RL),
    Argument("shuffle_dataset", "data.shuffle", True, trainers=RL),
    Argument("chat_template_kwargs", "data.apply_chat_template_kwargs", trainers=RL),
    Argument("num_iterations", "actor_rollout_ref.actor.ppo_epochs", 1, trainers=RL),
    Argument("entropy_coef", "actor_rollout_ref.actor.entropy_coeff", 0.0, trainers=RL),
    Argument("sapo_temperature_pos", "actor_rollout_ref.actor.tau_pos", 1.0, trainers=("grpo",)),
    Argument("sapo_temperature_neg", "actor_rollout_ref.actor.tau_neg", 1.05, trainers=("grpo",)),
    Argument("vespo_k_pos", f"{_LOSS}.k_pos", 2.0, trainers=("grpo",)),
    Argument("vespo_lambda_pos", f"{_LOSS}.lambda_pos", 3.0, trainers=("grpo",)),
    Argument("vespo_k_neg", f"{_LOSS}.k_neg", 3.0, trainers=("grpo",)),
    Argument("vespo_lambda_neg", f"{_LOSS}.lambda_neg", 2.0, trainers=("grpo",)),
    Argument("reward_clip_range", "reward_model.clip_range", trainers=("rloo",)),
    Argument("max_length", "data.max_length", 1024, trainers=SUPERVISED),
    Argument("chat_template_path", "data.chat_template", trainers=("sft", "reward")),
    Argument("beta", "loss.beta", 0.1, trainers=("dpo", "kto")),
    Argument("desirable_weight", "loss.desirable_weight", 1.0, trainers=("kto",)),
    Argument("undesirable_weight", "loss.undesirable_weight", 1.0, trainers=("kto",)),
    Argument("label_smoothing", "loss.label_smoothing", 0.0, trainers=("dpo",)),
    Argument("rpo_alpha", "loss.nll_coef", trainers=("dpo",)),
    Argument("reference_free", "loss.reference_free", trainers=("dpo",)),
    Argument("precompute_ref_log_probs", "loss.precompute_ref", trainers=("dpo", "kto")),
)
LEARNING_RATES = {"grpo": 1e-6, "rloo": 1e-6, "sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "reward": 1e-4}
GENERATIONS = {"grpo": 8, "rloo": 2}
BETAS = {"grpo": 0.0, "rloo": 0.05}

COMBINED = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "generation_batch_size": None,
    "steps_per_generation": None,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "save_steps": 500,
    "save_strategy": "steps",
    "eval_steps": None,
    "eval_strategy": "no",
    "eval_on_start": False,
    "logging_steps": 10,
    "save_total_limit": None,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "bf16": None,
    "fp16": False,
    "report_to": None,
    "top_k": 0,
    "beta": 0.0,
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "loss_type": None,
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 1,
    "router_aux_loss_coef": None,
    "truncation_mode": "keep_start",
    "completion_only_loss": None,
    "assistant_only_loss": False,
    "loss_weights": None,
    "train_sampling_strategy": None,
    "optim": "adamw_torch_fused",
}
"""Arguments that convert.py reads together with others, with TRL's defaults (None: none, or by trainer)."""

_VLLM = "the native engine needs no such setting; rollout.engine_kwargs.vllm has those of vLLM"
_SAMPLES = "samples of every step are kept and shown by `strop board`"
_PACKED = "rows are always packed without padding, and never see each other"
_SERVER = "set rollout.engine_kwargs.vllm.url for a vLLM server"
_ENTROPY = "the weight of the entropy bonus is constant"
_SPEED = "it changes speed or memory only"
_LAUNCH = "it is for accelerate: set trainer.n_gpus_per_node, and trainer.nnodes for several machines"
MISSING = {
    "num_processes": _LAUNCH,
    "num_machines": _LAUNCH,
    "accelerate_config": _LAUNCH,
    "packing": _PACKED + "; a packed row of TRL holds several, so that data.train_batch_size is too small",
    "shuffle_dataset": "rows are shuffled in every epoch, as in transformers; data.shuffle=false keeps them",
    "padding_free": _PACKED,
    "packing_strategy": _PACKED,
    "eval_packing": _PACKED,
    "pad_to_multiple_of": _PACKED,
    "remove_unused_columns": "reward functions always get every column",
    "log_completions": _SAMPLES,
    "log_multimodal": _SAMPLES,
    "num_completions_to_print": _SAMPLES,
    "log_unique_prompts": _SAMPLES,
    "log_completions_hub_repo": _SAMPLES,
    "logging_steps": "every step is logged",
    "logging_strategy": "every step is logged",
    "logging_first_step": "every step is logged",
    "disable_dropout": "dropout is always off",
    "ds3_gather_for_generation": _SPEED,
    "torch_empty_cache_steps": _SPEED,
    "tf32": _SPEED,
    "dataset_num_proc": _SPEED,
    "dataloader_pin_memory": _SPEED,
    "cache_implementation": _VLLM,
    "use_transformers_paged": _VLLM,
    "use_transformers_continuous_batching": _VLLM,
    "vllm_model_impl": _VLLM,
    "vllm_enable_sleep_mode": _VLLM,
    "vllm_max_model_length": _VLLM,
    "vllm_server_base_url": _SERVER,
    "vllm_server_host": _SERVER,
    "vllm_server_port": _SERVER,
    "vllm_importance_sampling_correction": "set algorithm.rollout_correction (the native engine needs none)",
    "vllm_importance_sampling_mode": "set algorithm.rollout_correction (the native engine needs none)",
    "vllm_importance_sampling_clip_max": "set algorithm.rollout_correction.rollout_is_threshold",
    "vllm_importance_sampling_cap": "set algorithm.rollout_correction.rollout_is_threshold",
    "use_bias_correction_kl": "the KL term is not weighted by the ratio; with one update per step it is 1",
    "mask_truncated_completions": "set reward_model.overlong_buffer, which lowers the score of long answers",
    "reward_weights": "the reward function weighs its parts; gdpo has algorithm.gdpo_reward_weights",
    "multi_objective_aggregation": "algorithm.adv_estimator=gdpo normalises each reward by itself",
    "sync_ref_model": "the reference does not change during a run",
    "ref_model_mixup_alpha": "the reference does not change during a run",
    "ref_model_sync_steps": "the reference does not change during a run",
    "top_entropy_quantile": "there is no loss on a quantile of tokens by entropy",
    "use_adaptive_entropy": _ENTROPY,
    "entropy_coef_min": _ENTROPY,
    "entropy_coef_max": _ENTROPY,
    "entropy_coef_delta": _ENTROPY,
    "entropy_target": _ENTROPY,
    "lr_scheduler_kwargs": "set optim.min_lr_ratio, optim.num_cycles or optim.wsd_stable_ratio",
    "precompute_ref_batch_size": _SPEED,
    "transformers_continuous_batching_config": _VLLM,
    "vllm_group_port": _SERVER,
    "vllm_server_timeout": _SERVER,
    "vllm_importance_sampling_clip_min": "set algorithm.rollout_correction.rollout_is_threshold=low_high",
    "vllm_structured_outputs_regex": "sampling is not constrained by a grammar",
    "off_policy_mask_threshold": "set algorithm.rollout_correction.rollout_rs",
    "cast_lm_head_to_fp32": "log-probs are always computed in float32",
    "max_tool_calling_iterations": "set actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
    "push_to_hub": "`strop merge` writes a Hugging Face folder; push it with huggingface-cli",
    "hub_model_id": "`strop merge` writes a Hugging Face folder; push it with huggingface-cli",
    "per_device_eval_batch_size": "set data.val_batch_size",
    "deepspeed": "training is sharded with FSDP2: set trainer.n_gpus_per_node",
    "fsdp": "training is sharded with FSDP2: set trainer.n_gpus_per_node",
    "fsdp_config": "training is sharded with FSDP2: set trainer.n_gpus_per_node",
    "ddp_find_unused_parameters": "training is sharded with FSDP2: set trainer.n_gpus_per_node",
    "center_rewards_coefficient": "there is no term that centres rewards; rewards are compared in pairs only",
    "f_divergence_type": "only the reverse KL is supported",
    "f_alpha_divergence_coef": "only the reverse KL is supported",
    "use_weighting": "there is no weighting of pairs (WPO)",
    "ld_alpha": "there is no length desensitisation (LD-DPO)",
    "discopop_tau": "there is no discopop loss",
    "normalize_advantages": "adv_estimator=reinforce_plus_plus_baseline whitens over the batch",
    "model_init_kwargs": "set keys of the model section, for instance model.override_config",
    "generation_kwargs": "set keys of actor_rollout_ref.rollout",
    "eos_token": "the tokenizer's stop tokens are used",
    "pad_token": "rows are never padded with a token that is trained on",
    "dataset_text_field": "set data.prompt_key, and data.pretrain_mode=true to train on every token",
    "dataset_kwargs": "rows need no preparation",
    "do_train": "the verb says what is done",
    "do_eval": "the verb says what is done",
    "dataset_config": "read the dataset with the datasets library and write a parquet file",
    "dataset_train_split": "read the dataset with the datasets library and write a parquet file",
    "attn_implementation": "attention is chosen by the model; set model.override_config.attn_implementation",
    "dtype": "set fsdp_config.model_dtype and fsdp_config.dtype",
    "torch_dtype": "set fsdp_config.model_dtype and fsdp_config.dtype",
}
