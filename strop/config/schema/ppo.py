"""The root of reinforcement learning: ppo_trainer and ppo_megatron_trainer."""

from __future__ import annotations

from dataclasses import dataclass

from strop.config.schema.actor import ActorRolloutRefConfig
from strop.config.schema.algorithm import AlgorithmConfig
from strop.config.schema.critic import CriticConfig
from strop.config.schema.data import DataConfig
from strop.config.schema.fields import section, setting
from strop.config.schema.reward import CustomRewardFunctionConfig, RewardManagerConfig, RewardModelConfig
from strop.config.schema.trainer import (
    GlobalProfilerConfig,
    RayKwargsConfig,
    TrainerConfig,
    TransferQueueConfig,
)


@dataclass(eq=False)
class PpoConfig:
    """Reinforcement learning: PPO, GRPO and their family."""

    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    """The policy, its rollouts and its reference."""
    critic: CriticConfig = section(CriticConfig)
    """The value model."""
    reward_model: RewardModelConfig = section(RewardModelConfig)
    """The reward model, and how scores are collected."""
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig)
    """A custom scorer function."""
    reward_manager: RewardManagerConfig = section(RewardManagerConfig)
    """Alternative to reward_model.reward_manager."""
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    """Computation of advantages from rewards."""
    data: DataConfig = section(DataConfig)
    """Training and validation data."""
    trainer: TrainerConfig = section(TrainerConfig)
    """Length, logging, checkpoints and devices of the run."""
    global_profiler: GlobalProfilerConfig = section(GlobalProfilerConfig)
    """Profiling."""
    ray_kwargs: RayKwargsConfig = section(RayKwargsConfig)
    """Settings of Ray."""
    transfer_queue: TransferQueueConfig = section(TransferQueueConfig)
    """Separate data plane."""
    plugins: list[str] = setting([])
    """Python files imported by every process before anything else; they may register estimators, losses,
    scorers ..."""
