"""Keys of verl that have no counterpart: families that are accepted without effect, and switches that are
refused.

They are declared here and not in the schema because Strop has nothing to say about their types and defaults.
The first row that matches counts. A row applies only to keys that the schema does not have.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import translate as as_regex

from strop.config.typed import ConfigError


@dataclass(frozen=True)
class WithoutEffect:
    """`pattern`: a path in which `*` stands for any text. `why`: why the key changes nothing, or why other
    values than `accepted` are refused."""

    pattern: str
    why: str
    accepted: tuple[object, ...] | None = None

    def matches(self, path: str) -> bool:
        return _compiled(self.pattern).match(path) is not None

    def refuses(self, value: object) -> bool:
        """Whether the value asks for something that does not exist."""
        if self.accepted is None or value is None:
            return False
        if isinstance(value, str) and value.startswith("${"):
            return False  # a link to a key that is checked itself
        return value not in self.accepted


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(as_regex(pattern))


_OFF = (False,)
_MEGATRON = "not an option of strategy=megatron here"
_FUSED = "log-probs and entropy are always computed without keeping the logits"
_NO_PADDING = "sequences are packed; nothing is padded to a length"
_ASCEND = "Ascend devices are not supported"
_QAT = "quantization-aware training is not supported; train in bf16 and quantize the exported model"
_MTP = (
    "training of multi-token prediction heads is not supported; to sample with the head of the weights set "
    "actor_rollout_ref.rollout.speculation.mtp"
)
_SERVER = "the url in actor_rollout_ref.rollout.engine_kwargs.vllm or .sglang names a server"
_SKIP = "use trainer.record_steps and strop replay"
_HOOKS = "traces are written to global_profiler.save_path; run your command after the run"
_SCHEDULE = "global_profiler.steps chooses the steps"
_FUNCTION_TOOLS = (
    "list functions in actor_rollout_ref.rollout.multi_turn.tool_config_path, as tools: "
    "[{function: my_tools.py:add}]"
)
_DISTILLATION = "distillation.enabled is not true"
_ONE_POOL = (
    "async training has one engine pool: actor_rollout_ref.rollout.nnodes and "
    "actor_rollout_ref.rollout.n_gpus_per_node"
)
_OTHER_OPTIMIZER = "an option of the Megatron, torchtitan, VeOmni or AutoModel optimizer"
_ASYNC_BOUND = "trainer.async_training.max_policy_age limits how far sampling runs ahead"

WITHOUT_EFFECT: tuple[WithoutEffect, ...] = (
    WithoutEffect("distillation.*", _DISTILLATION),  # aliases/distillation.py reads the section
    WithoutEffect("*_target_", "every section has its type already"),  # verl's files name dataclasses
    # Switches of features that do not exist.
    WithoutEffect("*qat.enable", _QAT, _OFF),
    WithoutEffect("*qat.*", _QAT),
    WithoutEffect("*rollout.qat", _QAT),
    WithoutEffect("*.disaggregation.enabled", "prefill and decode run in one engine", _OFF),
    WithoutEffect("*.disaggregation.*", "prefill and decode run in one engine"),
    WithoutEffect("*function_tool_path", _FUNCTION_TOOLS, ()),
    WithoutEffect(
        "*.checkpoint_engine.custom_backend_module",
        "choose a transport with actor_rollout_ref.rollout.checkpoint_engine.backend",
        (),
    ),
    WithoutEffect(
        "trainer.v1.sampler.custom_sampler.*", "set data.sampler.class_path and data.sampler.class_name", ()
    ),
    WithoutEffect(
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
        "write both bounds in algorithm.rollout_correction.rollout_rs_threshold, as low_high",
        (),
    ),
    WithoutEffect(
        "algorithm.rollout_correction.rollout_token_veto_threshold",
        "use algorithm.rollout_correction.rollout_rs with seq_max_k2 or seq_max_k3",
        (),
    ),
    WithoutEffect("data.mm_processor_kwargs", "arguments of the image processor are not passed on", ({},)),
    WithoutEffect("data.mm_processor_kwargs.*", "arguments of the image processor are not passed on", ()),
    WithoutEffect("env.*", "simulators (vision-language-action models) are not supported", ()),
    WithoutEffect("trainer.n_env_gpus_per_node", "simulators are not supported", ()),
    WithoutEffect("trainer.n_rollout_gpus_per_node", "set actor_rollout_ref.rollout.n_gpus_per_node", ()),
    # Groups of other backends.
    WithoutEffect("*.megatron.*", _MEGATRON),
    WithoutEffect("*.torchtitan.*", "the torchtitan backend is not supported"),
    WithoutEffect("*.veomni.*", "the VeOmni backend is not supported"),
    WithoutEffect("*.turbo_config.*", _ASCEND),
    WithoutEffect("*.turbo_config", _ASCEND),
    WithoutEffect("actor_rollout_ref.*.engine.*", _MEGATRON),
    WithoutEffect("actor_rollout_ref.*.model_engine", _MEGATRON),
    WithoutEffect("*checkpoint.mbridge_config*", _MEGATRON),
    WithoutEffect("*.load_weight", _MEGATRON),
    WithoutEffect("engine.*", "an option of the Megatron, torchtitan, VeOmni or AutoModel engine"),
    # Options of the optimizer.
    WithoutEffect(
        "*optim.zero_indexed_step",
        "warm-up starts with lr / lr_warmup_steps; with algorithm.compat=verl it starts with 0",
    ),
    WithoutEffect("actor_rollout_ref.ref.optim.*", "the reference is not trained"),
    WithoutEffect("*optim.muon_*", _OTHER_OPTIMIZER),
    WithoutEffect("*optim.exp_avg*", _OTHER_OPTIMIZER),
    WithoutEffect("*optim.main_*", _OTHER_OPTIMIZER),
    WithoutEffect("*optim.master_*", _OTHER_OPTIMIZER),
    WithoutEffect("*optim.store_*", _OTHER_OPTIMIZER),
    WithoutEffect("*optim.use_*", _OTHER_OPTIMIZER),
    WithoutEffect("*optim.name", _OTHER_OPTIMIZER),
    WithoutEffect("*optim.decay_type", _OTHER_OPTIMIZER + "; set lr_scheduler_type of the optimizer"),
    WithoutEffect("*optim.min_lr_factor", _OTHER_OPTIMIZER + "; set min_lr_ratio of the optimizer"),
    WithoutEffect("*optim.lr_min", _OTHER_OPTIMIZER + "; set min_lr_ratio of the optimizer"),
    WithoutEffect("*optim.lr_start", _OTHER_OPTIMIZER),
    WithoutEffect("*optim.init_lr_ratio", _OTHER_OPTIMIZER),
    WithoutEffect("*optim.lr_decay_ratio", _OTHER_OPTIMIZER + "; set total_training_steps of the optimizer"),
    # Models and their passes.
    WithoutEffect("*entropy_from_logits_chunk_size", _FUSED),
    WithoutEffect("*pad_to_length*", _NO_PADDING),
    WithoutEffect("*checkpoint.strict", "a checkpoint is complete, or it is refused"),
    WithoutEffect(
        "actor_rollout_ref.model.torch_dtype",
        "set actor_rollout_ref.actor.fsdp_config.model_dtype and actor_rollout_ref.actor.fsdp_config.dtype",
    ),
    WithoutEffect("*model.torch_dtype", "set model.fsdp_config.model_dtype and model.fsdp_config.dtype"),
    WithoutEffect("*rollout.mtp", _MTP),
    WithoutEffect("*rollout.mtp.*", _MTP),
    WithoutEffect("critic.loss_scale_factor", "the critic uses actor_rollout_ref.actor.loss_scale_factor"),
    WithoutEffect("reward_model.nccl_timeout", "set actor_rollout_ref.nccl_timeout"),
    # The engine.
    WithoutEffect("*rollout.skip.*", _SKIP),
    WithoutEffect("skip.*", _SKIP),
    WithoutEffect("*rollout.trace.*", "trajectories are kept in full; see trainer.rollout_data_dir"),
    WithoutEffect("*rollout.full_determinism", "set actor_rollout_ref.actor.fsdp_config.full_determinism"),
    WithoutEffect("*rollout.moe_*", "the engine has no settings of its own for experts"),
    WithoutEffect("*rollout.server", _SERVER),
    WithoutEffect("*rollout.server.*", _SERVER),
    WithoutEffect("*rollout.sglang_rollout_mode", "the engine always has an asynchronous interface"),
    WithoutEffect(
        "*rollout.single_turn_response_length", "data.max_response_length limits all turns together"
    ),
    WithoutEffect(
        "*rollout.standalone_gpu_memory_utilization", "set actor_rollout_ref.rollout.gpu_memory_utilization"
    ),
    WithoutEffect("*rollout.limit_images", "the engine takes all images of a prompt"),
    # Asynchronous training.
    WithoutEffect("trainer.use_v1", "there is one trainer; False only turns trainer.v1 off"),
    WithoutEffect("trainer.v1.*.num_warmup_batches", _ASYNC_BOUND),
    WithoutEffect("trainer.v1.sampler.max_off_policy_strategy", _ASYNC_BOUND + "; no response is dropped"),
    WithoutEffect("trainer.v1.sampler.sync_refill_failed_groups", "failed samples are masked and counted"),
    WithoutEffect("trainer.v1.*", "trainer.async_training has the settings of asynchronous training"),
    WithoutEffect("trainer.async_training.use_dynamic_resource_scheduling", _ONE_POOL),
    WithoutEffect("trainer.async_training.dynamic_schedule_*", _ONE_POOL),
    WithoutEffect(
        "trainer.async_training.concurrent_samples_per_replica", "set actor_rollout_ref.rollout.max_num_seqs"
    ),
    WithoutEffect("trainer.async_training.use_trainer_do_validate", "the engine of the run validates"),
    WithoutEffect(
        "trainer.async_training.checkpoint_engine*", "set actor_rollout_ref.rollout.checkpoint_engine"
    ),
    WithoutEffect("rollout.n", "set actor_rollout_ref.rollout.n"),
    WithoutEffect("transfer_queue.*", "batches already stay out of the driver"),
    # Data and dynamic sampling.
    WithoutEffect("data.audio_key", "audio is not supported"),
    WithoutEffect("data.continuous_token.*", "token ids are never made twice"),
    WithoutEffect("algorithm.filter_groups.max_inflight_gen_batches", "data.gen_batch_size sets the batch"),
    # Profiling.
    WithoutEffect("*profiler.*precision_debugger.*", _ASCEND),
    WithoutEffect("*profiler.relocate_results", "traces are written to global_profiler.save_path"),
    WithoutEffect("*profiler.finish_hook_*", _HOOKS),
    WithoutEffect("*profiler.tool_config.torch.schedule.*", _SCHEDULE),
    WithoutEffect("*profiler.tool_config.torch.step_*", _SCHEDULE),
    WithoutEffect("*profiler.*.profile_token_*", _SCHEDULE),
    WithoutEffect("*profiler.*.name", "the section names the tool"),
)


def reason_for(path: str) -> WithoutEffect | None:
    """The row of a key that the schema does not have; None for an unknown key."""
    for row in WITHOUT_EFFECT:
        if row.matches(path):
            return row
    return None


def drop_without_effect(
    leaves: Mapping[str, object], in_schema: Callable[[str], bool]
) -> tuple[dict[str, object], list[str]]:
    """The other leaves, and one notice per reason. ConfigError for values that are refused."""
    kept: dict[str, object] = {}
    dropped: dict[str, list[str]] = {}
    refused: list[str] = []
    for path, value in leaves.items():
        row = None if in_schema(path) else reason_for(path)
        if row is None:
            kept[path] = value
        elif row.refuses(value):
            refused.append(f"{path}={value}: {row.why}.")
        else:
            dropped.setdefault(row.why, []).append(path)
    if refused:
        raise ConfigError(refused)
    return kept, [notice(paths, why) for why, paths in dropped.items()]


def notice(paths: list[str], why: str) -> str:
    """The sentence about keys that are set and have no effect."""
    if len(paths) == 1:
        return f"{paths[0]} has no effect: {why}."
    more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
    return f"{paths[0]}, {paths[1]}{more} have no effect: {why}."
