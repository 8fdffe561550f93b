"""The root of every configuration, by the name of its file."""

from __future__ import annotations

from dataclasses import dataclass

from strop.config.schema.actor import ActorRolloutRef
from strop.config.schema.algorithm import Algorithm
from strop.config.schema.critic import Critic
from strop.config.schema.data import Data
from strop.config.schema.fields import section, setting
from strop.config.schema.inference import (
    EvaluationData,
    EvaluationSettings,
    GenerationActor,
    GenerationData,
    GenerationModel,
    GenerationRollout,
    GenerationTrainer,
)
from strop.config.schema.reward import CustomRewardFunction, RewardManager, RewardModel
from strop.config.schema.supervised import DpoLoss, DpoRef, PairData, RmLoss, SftData, Supervised
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


@dataclass(eq=False)
class SftTrainer(Supervised):
    """Supervised fine-tuning."""

    data: SftData = section(SftData)
    """Rows."""


@dataclass(eq=False)
class RmTrainer(Supervised):
    """Training of a reward model from preferences."""

    data: PairData = section(PairData)
    """Pairs."""
    loss: RmLoss = section(RmLoss)
    """Loss."""


@dataclass(eq=False)
class DpoTrainer(Supervised):
    """Direct preference optimisation."""

    data: PairData = section(PairData)
    """Pairs."""
    loss: DpoLoss = section(DpoLoss)
    """Loss."""
    ref: DpoRef = section(DpoRef)
    """The frozen reference."""


@dataclass(eq=False)
class Generation:
    """Answers for a file of prompts."""

    data: GenerationData = section(GenerationData)
    """What to answer."""
    model: GenerationModel = section(GenerationModel)
    """Weights and tokenizer."""
    rollout: GenerationRollout = section(GenerationRollout)
    """How answers are sampled."""
    actor: GenerationActor = section(GenerationActor)
    """Sharding of the model."""
    trainer: GenerationTrainer = section(GenerationTrainer)
    """The machine."""
    ray_kwargs: RayKwargs = section(RayKwargs)
    """Ray."""
    plugins: list[str] = setting([])
    """Python files imported by every process before anything else."""


@dataclass(eq=False)
class Evaluation:
    """Scores for a file of answers."""

    data: EvaluationData = section(EvaluationData)
    """What to score."""
    custom_reward_function: CustomRewardFunction = section(CustomRewardFunction)
    """A scorer of your own."""
    evaluation: EvaluationSettings = section(EvaluationSettings)
    """How scores are summed up."""
    ray_kwargs: RayKwargs = section(RayKwargs)
    """Ray."""
    plugins: list[str] = setting([])
    """Python files imported by every process before anything else."""


ROOTS: dict[str, type] = {
    "ppo_trainer": PpoTrainer,
    "ppo_megatron_trainer": PpoTrainer,
    "sft_trainer": SftTrainer,
    "rm_trainer": RmTrainer,
    "dpo_trainer": DpoTrainer,
    "generation": Generation,
    "evaluation": Evaluation,
}
