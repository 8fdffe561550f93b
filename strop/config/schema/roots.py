"""The root class of every configuration, by the name of its file.

A root is imported only when it is looked up: `strop sft` does not import the schema of PPO.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.config.schema.inference import EvaluationConfig, GenerationConfig, RewardServerConfig
    from strop.config.schema.ppo import PpoConfig
    from strop.config.schema.supervised import DpoConfig, RmConfig, SftConfig
    from strop.config.schema.training_service import TrainingServiceConfig

    # For annotations only: at run time these would import every schema.
    AnySupervisedConfig = SftConfig | RmConfig | DpoConfig
    TrainingConfig = PpoConfig | AnySupervisedConfig
    InferenceConfig = GenerationConfig | EvaluationConfig | RewardServerConfig | TrainingServiceConfig
    RootConfig = TrainingConfig | InferenceConfig

_CLASS_OF_ROOT = {
    "ppo_trainer": "ppo:PpoConfig",
    "ppo_megatron_trainer": "ppo:PpoConfig",
    "sft_trainer": "supervised:SftConfig",
    "rm_trainer": "supervised:RmConfig",
    "dpo_trainer": "supervised:DpoConfig",
    "generation": "inference:GenerationConfig",
    "evaluation": "inference:EvaluationConfig",
    "reward_server": "inference:RewardServerConfig",
    "training_service": "training_service:TrainingServiceConfig",
}


class Roots(Mapping[str, "type[RootConfig]"]):
    """Root name -> class, imported on first access."""

    def __getitem__(self, name: str) -> type[RootConfig]:
        module_name, _, class_name = _CLASS_OF_ROOT[name].partition(":")
        module = importlib.import_module(f"strop.config.schema.{module_name}")
        root: type[RootConfig] = getattr(module, class_name)
        return root

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASS_OF_ROOT)

    def __len__(self) -> int:
        return len(_CLASS_OF_ROOT)


ROOTS = Roots()
