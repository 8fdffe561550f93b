"""strategy=megatron: the model families that it builds, and what follows from choosing it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.config.schema.actor import ActorConfig, RefConfig
    from strop.config.schema.critic import CriticConfig
    from strop.config.schema.megatron import MegatronConfig
    from strop.config.schema.model import OptimConfig
    from strop.config.schema.ppo import PpoConfig
    from strop.config.schema.roots import AnySupervisedConfig


def training_dtype(actor: ActorConfig) -> str:
    """The precision that the policy computes in, which is that of the engine's copy of its weights."""
    if actor.strategy == "megatron":
        return actor.megatron.dtype
    return actor.fsdp_config.dtype


def model_parallel_size(section: ActorConfig | CriticConfig) -> int:
    """Devices that share one copy of a model's layers, or one row: what is left of all devices is data
    parallelism."""
    if section.strategy != "megatron":
        return section.ulysses_sequence_parallel_size * section.tensor_parallel_size
    return devices_per_copy(section.megatron)


def devices_per_copy(sizes: MegatronConfig) -> int:
    """The product of the sizes that divide layers and rows."""
    return sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size


def divides_reward_model(config: PpoConfig) -> bool:
    """Whether ranks have parts of the reward model. Otherwise each of them has all of it."""
    reward = config.reward_model
    sizes = reward.megatron
    divided = devices_per_copy(sizes) > 1 or sizes.expert_model_parallel_size > 1
    return divided and reward.enable and not reward.remote_url and reward.strategy == "megatron"


def ranks_per_row(config: AnySupervisedConfig) -> int:
    """Devices that work on the same rows in sft, rm and dpo."""
    if config.model.strategy == "megatron":
        return devices_per_copy(config.model.megatron)
    return config.ulysses_sequence_parallel_size * config.tensor_parallel_size


def row_ranks(section: ActorConfig | RefConfig | CriticConfig) -> int:
    """Devices that share each row."""
    if section.strategy == "megatron":
        return section.megatron.context_parallel_size
    return section.ulysses_sequence_parallel_size


def supervised_row_ranks(config: AnySupervisedConfig) -> int:
    """The same in sft, rm and dpo."""
    if config.model.strategy == "megatron":
        return config.model.megatron.context_parallel_size
    return config.ulysses_sequence_parallel_size


SCHEDULE = {
    "lr_warmup_init": 0.0,
    "lr_decay_steps": None,
    "lr_decay_style": "constant",
    "min_lr": 0.0,
    "lr_wsd_decay_style": "exponential",
    "lr_wsd_decay_steps": None,
}
"""Keys of Megatron's learning-rate schedule, with the values that leave it to lr_scheduler_type."""


def megatron_schedule_keys(optim: OptimConfig) -> list[str]:
    """Those of them that are set."""
    return [name for name, plain in SCHEDULE.items() if getattr(optim, name) != plain]


@dataclass(frozen=True)
class MegatronFamily:
    """How the layers of a family differ."""

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    latent: bool = False
    """Multi-head latent attention; the first layers may be without experts, the others have shared ones."""


FAMILIES = {
    "llama": MegatronFamily(),
    "mistral": MegatronFamily(),
    "qwen2": MegatronFamily(qkv_bias=True),
    "qwen3": MegatronFamily(qk_norm=True),
    "mixtral": MegatronFamily(experts=True),
    "qwen3_moe": MegatronFamily(qk_norm=True, experts=True),
    "deepseek_v3": MegatronFamily(experts=True, latent=True),
}
"""By `model_type` of config.json."""

_OUTSIDE = ("model.embed_tokens", "lm_head")
"""Linear modules and tables of all families that are outside the layers. A scalar head has no adapter."""


def adapted_outside_layers(
    targets: str | Sequence[str], excluded: str | Sequence[str] | None, *, scalar: bool
) -> list[str]:
    """Modules outside the layers that peft would adapt for these target_modules and exclude_modules.
    `scalar`: the model has a scalar head and no lm_head."""
    if targets == "all-linear":  # of the layers
        return []
    modules = _OUTSIDE[:1] if scalar else _OUTSIDE
    return [name for name in modules if _matches(name, targets) and not _matches(name, excluded or ())]


def _matches(name: str, modules: str | Sequence[str]) -> bool:
    """As peft matches names: a pattern as a whole, names at their end."""
    if isinstance(modules, str):
        return re.fullmatch(modules, name) is not None
    return any(name == module or name.endswith(f".{module}") for module in modules)
