"""Names of verl 0.3 to 0.7.0 that later versions do not have."""

from __future__ import annotations

from collections.abc import Container, Mapping

from strop.config.aliases.row import SUPERVISED, Alias, Translation, under
from strop.config.typed import ConfigError

_CAP = "actor_rollout_ref.actor.tis_imp_ratio_cap"


def _ratio_cap(prefix: str, cap: object) -> dict[str, object]:
    correction = "algorithm.rollout_correction."
    try:
        on = float(str(cap)) > 0
    except ValueError:
        raise ConfigError(f"{_CAP}: expected number, got {cap!r}.") from None
    if on:
        return {f"{correction}rollout_is": "token", f"{correction}rollout_is_threshold": cap}
    return {f"{correction}rollout_is": None}


def _adapter(name: str) -> Translation:
    """Keys of Megatron's section of adapters; a rank of 0 and a path of null say that there are none."""
    return lambda prefix, value: {f"{prefix}.lora_{name}": value} if value else {}


_MEGATRON_MODULES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
}
"""Linear modules of Megatron by the names of Hugging Face."""


def _adapted_modules(name: str) -> Translation:
    """Modules of Megatron in a list of modules with (or without) adapters."""

    def translate(prefix: str, value: object) -> dict[str, object]:
        if not isinstance(value, list):
            return {f"{prefix}.{name}": value} if value else {}
        found: list[str] = []
        for module in value:
            found += _MEGATRON_MODULES.get(str(module), (str(module),))
        return {f"{prefix}.{name}": found} if found else {}

    return translate


_ADAPTER_KEYS = {
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
}
_ADAPTER_ALPHA = 32
"""verl's default of lora.alpha, which is not that of lora_alpha."""


def adapter_sections(leaves: Mapping[str, object], overrides: Container[str]) -> dict[str, object]:
    """verl's files have two sections of adapters for one model: that of Megatron (lora.rank ...) counts if it
    has a rank, and the keys beside it if not. Without a rank anywhere its other keys say nothing."""
    found = dict(leaves)
    for prefix in {path[: path.index(".lora.") + 1] for path in leaves if ".lora." in path}:
        rank = leaves.get(f"{prefix}lora.rank") or leaves.get(f"{prefix}lora.adapter_path")
        if rank and f"{prefix}lora_alpha" not in overrides:
            found.setdefault(f"{prefix}lora.alpha", _ADAPTER_ALPHA)
        if f"{prefix}lora.rank" not in leaves:
            rank = rank or leaves.get(f"{prefix}lora_rank")
        for own, other in _ADAPTER_KEYS.items():
            if not rank:
                found.pop(f"{prefix}lora.{own}", None)
            elif f"{prefix}lora.{own}" in found and f"{prefix}{other}" not in overrides:
                found.pop(f"{prefix}{other}", None)
    return found


NSYS = "global_profiler.global_tool_config.nsys."

VERL_0_7: tuple[Alias, ...] = (
    Alias(
        "*.checkpoint.contents",
        ("{prefix}.checkpoint.save_contents", "{prefix}.checkpoint.load_contents"),
        "split in two",
    ),
    Alias("ray_init.timeline_json_file", ("ray_kwargs.timeline_json_file",), "moved"),
    Alias("ray_init.*", under("ray_kwargs.ray_init.{prefix}"), "moved"),
    Alias("trainer.profile_steps", ("global_profiler.steps",), "moved"),
    Alias("trainer.controller_nsight_options.*", under(NSYS + "controller_nsight_options.{prefix}"), "moved"),
    Alias("trainer.worker_nsight_options.*", under(NSYS + "worker_nsight_options.{prefix}"), "moved"),
    Alias("trainer.val_generations_to_log_to_wandb", ("trainer.log_val_generations",), "renamed"),
    Alias(
        "*.engine_kwargs.swap_space",
        ("{prefix}.engine_kwargs.vllm.swap_space",),
        "engine arguments now name their engine",
    ),
    Alias(
        "*.update_weights_bucket_megabytes",
        lambda prefix, value: (
            None
            if prefix.endswith("checkpoint_engine")
            else {f"{prefix}.checkpoint_engine.update_weights_bucket_megabytes": value}
        ),
        "moved",
    ),
    Alias("*.lora.rank", _adapter("rank"), "one name for every strategy"),
    Alias("*.lora.adapter_path", _adapter("adapter_path"), "one name for every strategy"),
    Alias("*.lora.alpha", _adapter("alpha"), "one name for every strategy"),
    Alias("*.lora.dropout", _adapter("dropout"), "one name for every strategy"),
    Alias("*.lora.target_modules", _adapted_modules("target_modules"), "one name for every strategy"),
    Alias("*.lora.exclude_modules", _adapted_modules("exclude_modules"), "one name for every strategy"),
    Alias("optim.warmup_steps_ratio", ("optim.lr_warmup_steps_ratio",), "renamed"),
    Alias("*.optim.warmup_steps_ratio", ("{prefix}.optim.lr_warmup_steps_ratio",), "renamed"),
    Alias("optim.warmup_style", ("optim.lr_scheduler",), "renamed"),
    Alias("*.optim.warmup_style", ("{prefix}.optim.lr_scheduler_type",), "renamed"),
    Alias("optim.lr_scheduler_type", ("optim.lr_scheduler",), "its name in supervised training", SUPERVISED),
    Alias("*.profiler.discrete", ("{prefix}.profiler.tool_config.nsys.discrete",), "moved"),
    Alias("*.fsdp_config.min_num_params", ("{prefix}.fsdp_config.wrap_policy.min_num_params",), "moved"),
    Alias("*.fsdp_config.cpu_offload", ("{prefix}.fsdp_config.offload_policy",), "renamed"),
    Alias("*.fsdp_config.offload_params", ("{prefix}.fsdp_config.param_offload",), "renamed"),
    Alias(_CAP, _ratio_cap, "now part of rollout_correction"),
    Alias(
        "algorithm.rollout_correction.use_policy_gradient",
        lambda _, value: {"algorithm.rollout_correction.loss_type": "reinforce" if value else "ppo_clip"},
        "renamed",
    ),
    Alias("async_training.*", under("trainer.async_training.{prefix}"), "moved"),
    Alias(
        "reward_model.reward_kwargs.overlong_buffer_cfg.*",
        under("reward_model.overlong_buffer.{prefix}"),
        "a section of its own",
    ),
    Alias("model.partial_pretrain", ("model.path",), "one name for every trainer", SUPERVISED),
    Alias(
        "data.messages_key",
        lambda _, value: {"data.multiturn.enable": True, "data.multiturn.messages_key": value},
        "rows are whole conversations",
        SUPERVISED,
    ),
    Alias("data.tools_key", ("data.multiturn.tools_key",), "moved", ("sft_trainer",)),
    Alias("data.enable_thinking_key", ("data.multiturn.enable_thinking_key",), "moved", SUPERVISED),
)
