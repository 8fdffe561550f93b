"""From the `rollout` section of a configuration to an engine and its sampling parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strop.config.derived import engine_name, holds_weights
from strop.config.schema.rollout import RolloutConfig
from strop.data.chat import stop_ids
from strop.rollout.base import Engine, Sampling, build_engine

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

ENGINE_SETTINGS = (
    "dtype",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "free_cache_engine",
    "tensor_model_parallel_size",
    "data_parallel_size",
    "expert_parallel_size",
    "scheduling_policy",
    "load_format",
    "engine_kwargs",
)
"""Keys of the `rollout` section that engines take under the same name. Each engine takes a subset."""


def engine_for(rollout: RolloutConfig, module: nn.Module) -> Engine:
    """The engine that the `rollout` section names."""
    return build_engine(engine_name(rollout), module, **engine_settings(rollout))


def engine_settings(rollout: RolloutConfig) -> dict[str, Any]:
    """The arguments of `build_engine`."""
    return {
        "max_model_len": max_model_len(rollout),
        "bucket_megabytes": rollout.checkpoint_engine.update_weights_bucket_megabytes,
        "seed": rollout.seed or 0,
        **{name: getattr(rollout, name) for name in ENGINE_SETTINGS},
    }


def max_model_len(rollout: RolloutConfig) -> int:
    """Maximum tokens of prompt and response together."""
    return rollout.max_model_len or rollout.prompt_length + rollout.response_length


def sampling_for(
    rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase, module: nn.Module | None
) -> Sampling:
    """The sampling parameters of the `rollout` section. Stop tokens are those of the tokenizer and of the
    model's generation_config."""
    generation = getattr(module, "generation_config", None)
    stops = stop_ids(tokenizer, getattr(generation, "eos_token_id", None))
    return Sampling(
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        max_tokens=rollout.response_length,
        stop_ids=tuple(sorted(stops)),
        ignore_eos=rollout.ignore_eos,
        repetition_penalty=rollout.repetition_penalty,
    )


def tensor_parallel_size(rollout: RolloutConfig) -> int:
    """Neighbouring ranks that sample together, each with a part of every weight matrix. Engines that hold
    their own weights shard them themselves."""
    return 1 if holds_weights(rollout) else int(rollout.tensor_model_parallel_size)
