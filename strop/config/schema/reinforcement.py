"""The root of reinforcement learning: ppo_trainer and ppo_megatron_trainer."""

from __future__ import annotations

from dataclasses import dataclass

from strop.config.schema.actor import ActorRolloutRef
from strop.config.schema.algorithm import Algorithm
from strop.config.schema.critic import Critic
from strop.config.schema.data import Data
from strop.config.schema.fields import section, setting
from strop.config.schema.reward import CustomRewardFunction, RewardManager, RewardModel
from strop.config.schema.trainer import GlobalProfiler, RayKwargs, Trainer, TransferQueue


@dataclass(eq=False)
class PpoTrainer:
    """Reinforcement learning: PPO, GRPO and their family."""

    actor_rollout_ref: ActorRolloutRef = section(ActorRolloutRef)
    """The policy, its rollouts and its reference."""
    critic: Critic = section(Critic)
    """The value model."""
    reward_model: RewardModel = section(RewardModel)
    """A model in the reward loop, and how scores are collected."""
    custom_reward_function: CustomRewardFunction = section(CustomRewardFunction)
    """A scorer of your own."""
    reward_manager: RewardManager = section(RewardManager)
    """Another place for reward_model.reward_manager."""
    algorithm: Algorithm = section(Algorithm)
    """From rewards to advantages."""
    data: Data = section(Data)
    """What is learned from."""
    trainer: Trainer = section(Trainer)
    """The run."""
    global_profiler: GlobalProfiler = section(GlobalProfiler)
    """Profiling."""
    ray_kwargs: RayKwargs = section(RayKwargs)
    """Ray."""
    transfer_queue: TransferQueue = section(TransferQueue)
    """Separate data plane."""
    plugins: list[str] = setting([])
    """Python files imported by every process before anything else; they may register estimators, losses, scorers ..."""
