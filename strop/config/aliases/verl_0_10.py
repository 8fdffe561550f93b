"""Names of verl 0.7.1 to 0.10 (August 2026), and of its asynchronous trainers and its generation server."""

from __future__ import annotations

from collections.abc import Mapping

from strop.config.aliases.row import PPO, SUPERVISED, Alias, under
from strop.config.aliases.without_effect import notice

ASYNC = "trainer.async_training."
ROLLOUT = "actor_rollout_ref.rollout."
GENERATION = ("generation",)


def without_v1(leaves: Mapping[str, object]) -> tuple[Mapping[str, object], list[str]]:
    """The leaves without trainer.v1 if trainer.use_v1 is off, which in verl chooses the trainer that does not
    read it; and a notice."""
    unread = [path for path in leaves if path.startswith("trainer.v1.")]
    if leaves.get("trainer.use_v1") is not False or not unread:
        return leaves, []
    kept = {path: value for path, value in leaves.items() if path not in unread}
    return kept, [notice(unread, "trainer.use_v1=False, where verl does not read trainer.v1")]


def _trainer_mode(_: str, mode: object) -> dict[str, object]:
    """trainer.v1.trainer_mode."""
    if mode == "colocate_async":
        return {f"{ASYNC}partial_rollout": True}
    if mode == "separate_async":
        return {f"{ASYNC}enable": True, f"{ASYNC}partial_rollout": True}
    return {}


def _separate_engine(_: str, hybrid: object) -> dict[str, object] | None:
    """actor_rollout_ref.hybrid_engine=False: only verl's asynchronous trainers (fully_async_policy,
    one_step_off_policy) set it."""
    return {f"{ASYNC}enable": True} if hybrid is False else None


def _model_engine(_: str, engine: object) -> dict[str, object]:
    """The group `model_engine`: dp is FSDP, which is the default."""
    return {} if engine in ("dp", "fsdp") else {"actor_rollout_ref.actor.strategy": engine}


def _router_replay(name: str, value: object) -> dict[str, object]:
    """actor.megatron.router_replay, which verl reads with strategy=megatron."""
    return {} if value == "disabled" else {f"actor_rollout_ref.actor.router_replay.{name}": value}


def _thinking(_: str, value: object) -> dict[str, object]:
    """data.enable_thinking_default: `none` leaves it to the chat template."""
    if value in (None, "none"):
        return {}
    return {"data.apply_chat_template_kwargs.enable_thinking": value}


def _engine_option(name: str, value: object) -> dict[str, object] | None:
    """`engine.*` of supervised training: the keys of its FSDP and Megatron groups, which have some names in
    common; other engines have more."""
    first = name.partition(".")[0]
    found: dict[str, object] = {}
    if first in FSDP_KEYS:
        found[f"model.fsdp_config.{name}"] = value
    if first in MEGATRON_KEYS:
        found[f"model.megatron.{name}"] = value
    return found or None


MEGATRON_KEYS = frozenset(
    {
        "context_parallel_size",
        "dtype",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "optimizer_offload",
        "override_mcore_model_config",
        "override_transformer_config",
        "param_offload",
        "pipeline_model_parallel_size",
        "sequence_parallel",
        "tensor_model_parallel_size",
        "use_distributed_optimizer",
        "virtual_pipeline_model_parallel_size",
    }
)
FSDP_KEYS = frozenset(
    {
        "dtype",
        "entropy_checkpointing",
        "entropy_from_logits_with_chunking",
        "forward_only",
        "forward_prefetch",
        "fsdp_size",
        "full_determinism",
        "mixed_precision",
        "model_dtype",
        "offload_policy",
        "optimizer_offload",
        "param_offload",
        "reshard_after_forward",
        "seed",
        "use_orig_params",
        "use_torch_compile",
        "wrap_policy",
    }
)

VERL_0_10: tuple[Alias, ...] = (
    # The section `reward` of 0.7.1.
    Alias("reward.custom_reward_function.*", under("custom_reward_function.{prefix}"), "moved", PPO),
    Alias("reward.reward_manager.*", under("reward_manager.{prefix}"), "moved", PPO),
    Alias(
        "reward.reward_kwargs.overlong_buffer_cfg.*",
        under("reward_model.overlong_buffer.{prefix}"),
        "a section of its own",
        PPO,
    ),
    Alias("reward.reward_kwargs.*", under("reward_model.reward_kwargs.{prefix}"), "moved", PPO),
    Alias("reward.reward_model.model_path", ("reward_model.model.path",), "moved", PPO),
    Alias("reward.reward_model.*", under("reward_model.{prefix}"), "moved", PPO),
    Alias("reward.sandbox_fusion.*", under("reward_model.sandbox_fusion.{prefix}"), "moved", PPO),
    Alias("reward.num_workers", ("reward_model.num_workers",), "moved", PPO),
    Alias("sandbox_fusion.*", under("reward_model.sandbox_fusion.{prefix}"), "moved", PPO),
    # Backends of training.
    Alias("model_engine", _model_engine, "the backend is a key of the actor", PPO),
    Alias(
        "actor_rollout_ref.actor.megatron.router_replay.*", _router_replay, "the same for every strategy", PPO
    ),
    Alias("critic.fsdp.*", under("critic.model.fsdp_config.{prefix}"), "moved", PPO),
    Alias("actor_rollout_ref.actor.policy_loss.tau_pos", ("actor_rollout_ref.actor.tau_pos",), "moved", PPO),
    Alias("actor_rollout_ref.actor.policy_loss.tau_neg", ("actor_rollout_ref.actor.tau_neg",), "moved", PPO),
    Alias("trainer.worker_env.*", under("ray_kwargs.ray_init.runtime_env.env_vars.{prefix}"), "moved", PPO),
    # Asynchronous training.
    Alias("actor_rollout_ref.hybrid_engine", _separate_engine, "verl's asynchronous trainers set it", PPO),
    Alias("trainer.v1.trainer_mode", _trainer_mode, "a section of its own", PPO),
    Alias(
        "trainer.v1.separate_async.parameter_sync_step",
        (f"{ASYNC}trigger_parameter_sync_step",),
        "renamed",
        PPO,
    ),
    Alias("trainer.v1.sampler.max_off_policy_threshold", (f"{ASYNC}max_policy_age",), "renamed", PPO),
    Alias("rollout.nnodes", (f"{ROLLOUT}nnodes",), "one section for the engine", PPO),
    Alias("rollout.n_gpus_per_node", (f"{ROLLOUT}n_gpus_per_node",), "one section for the engine", PPO),
    Alias("rollout.total_epochs", ("trainer.total_epochs",), "one length of the run", PPO),
    # Supervised training with engines.
    Alias("engine.strategy", ("model.strategy",), "moved", SUPERVISED),
    Alias("engine.ulysses_sequence_parallel_size", ("ulysses_sequence_parallel_size",), "moved", SUPERVISED),
    Alias("engine.use_remove_padding", ("use_remove_padding",), "moved", SUPERVISED),
    Alias("engine.*", _engine_option, "moved", SUPERVISED),
    Alias("checkpoint.*", under("trainer.checkpoint.{prefix}"), "moved", SUPERVISED),
    Alias("data.num_workers", ("data.dataloader_num_workers",), "renamed", SUPERVISED),
    Alias("data.enable_thinking_default", _thinking, "an argument of the chat template", SUPERVISED),
    # verl.trainer.main_generation_server reads the keys of PPO.
    Alias("data.train_files", ("data.path",), "the name in generation", GENERATION),
    Alias("actor_rollout_ref.rollout.n", ("data.n_samples",), "the name in generation", GENERATION),
    Alias("data.max_prompt_length", ("rollout.prompt_length",), "the name in generation", GENERATION),
    Alias("data.max_response_length", ("rollout.response_length",), "the name in generation", GENERATION),
    Alias("actor_rollout_ref.*", under("{prefix}"), "the name in generation", GENERATION),
)
