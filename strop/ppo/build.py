"""Builds all parts of a reinforcement-learning run from a configuration and connects them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import torch

from strop.agents.runner import AgentSetup
from strop.algorithms.kl import KLController, kl_controller
from strop.backends.base import Roles
from strop.catalog import ENGINES
from strop.compat import conventions
from strop.config.arithmetic import plan_ppo
from strop.config.compose import Loaded
from strop.config.derived import (
    AsyncPlan,
    async_plan,
    engine_name,
    estimator_needs,
    has_task_reward,
    holds_weights,
    records_experts,
    resource_pools,
)
from strop.config.megatron import divides_reward_model
from strop.config.schema.data import DataConfig
from strop.config.schema.ppo import PpoConfig
from strop.config.schema.rollout import RolloutConfig
from strop.data.loader import Loader, PromptLoader, build_loader
from strop.data.prompts import build_chat, build_prompts
from strop.models.build import build_tokenizer
from strop.models.vision.processor import processor_loader
from strop.ppo.admission import AnswerLengths, LengthRecorder
from strop.ppo.collect import Collector, GroupFilter, TrajectoryScorer, Validator
from strop.ppo.critic_update import CriticUpdate
from strop.ppo.episodes.policies import PolicySet, build_policies
from strop.ppo.experience import ExperienceFacts
from strop.ppo.local_judge import TEMPLATE_TOKENS, local_judge
from strop.ppo.micro_batching import micro_batches
from strop.ppo.output import build_output
from strop.ppo.over_sampling import OpenPrompts, OverSampling
from strop.ppo.pretrain import build_pretraining
from strop.ppo.rank_sharing import RankSampler, RankScorer
from strop.ppo.roles import (
    EngineMemory,
    build_roles,
    divided_reward_model,
    make_reward_model,
    remote_reward_model,
    replica_engine,
    rollout_module,
)
from strop.ppo.run_ahead import AsyncRollout, DrawnAhead
from strop.ppo.sampler import PromptSampler, Sampler, StepRollout, WeightSync
from strop.ppo.trainer import PpoTrainer
from strop.ppo.update import ActorUpdate
from strop.ranks import Ranks
from strop.registry import load_plugins
from strop.rewards.managers import build_scorer
from strop.rewards.model import HeadModel
from strop.rollout.base import Engine
from strop.rollout.interruptible import Interruptible
from strop.run.checkpoint.contents import seed_random_states
from strop.runtime.remote_models import RemoteTokenScorer
from strop.shared.build import (
    DividedRewardModel,
    engine_for,
    max_model_len,
    sampling_for,
    tensor_parallel_size,
    use_device,
)
from strop.shared.export import average_of, masters_of
from strop.shared.in_process import NOTHING_GIVEN, InProcess

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


def build_ppo(
    loaded: Loaded,
    ranks: Ranks | None = None,
    trainer_class: type[PpoTrainer] = PpoTrainer,
    given: InProcess = NOTHING_GIVEN,
) -> PpoTrainer:
    """Every part of a reinforcement-learning run, ready for `fit`. Each of the `ranks` builds its own."""
    config: PpoConfig = loaded.config
    ranks = ranks or Ranks()
    rollout = config.actor_rollout_ref.rollout
    load_plugins(config.plugins)
    seed_random_states(config.trainer.seed)
    device = use_device(config.trainer.device)
    tokenizer = build_tokenizer(config.actor_rollout_ref.model)
    load_processor = processor_loader(config.actor_rollout_ref.model)
    chat = build_chat(config.data, tokenizer, load_processor=load_processor)
    agents = AgentSetup(rollout, chat, given.tools)
    prompts = build_prompts(
        config.data, tokenizer, split="train", listing=agents.listing(), load_processor=load_processor
    )
    rows = build_loader(training_data(config), prompts)
    plan = plan_ppo(config, rows=rows.rows)
    assert plan.total_steps is not None
    engine_memory = EngineMemory()
    roles = build_roles(config, device, plan.total_steps, ranks, engine_memory.release)
    policies = build_policies(config, roles.actor)
    module = rollout_module(config, roles.actor, device)
    if rollout.nnodes:
        engine = replica_engine(config, module, ranks)
    else:
        engine = engine_for(rollout, module, record_experts=records_experts(config))
    engine_memory.engine = engine
    loader = training_loader(config, rows)
    sampler = Sampler(engine, rollout_seed(config), max_model_len(rollout), agents)
    collector = build_collector(config, sampler, tokenizer, module, device, ranks, given)
    run_ahead = build_run_ahead(config, sampler, collector.rollout, loader, plan.total_steps, ranks)
    collector.run_ahead = run_ahead
    if isinstance(loader, OpenPrompts):
        collector.run_ahead = build_over_sampling(
            config, sampler, collector.rollout, loader, plan.total_steps, ranks
        )
    if collector.rollout.lengths is not None:
        loader = LengthRecorder(loader, collector.rollout.lengths)
    sequences_per_update = config.actor_rollout_ref.actor.ppo_mini_batch_size * plan.samples_per_prompt
    pretraining = build_pretraining(config, tokenizer, sequences_per_update)
    average = average_of(roles.actor, config.trainer)
    controller = build_kl_controller(config)
    output = build_output(
        loaded, roles, policies, tokenizer, plan.total_steps, average, controller, pretraining, given.observer
    )
    width = config.actor_rollout_ref.actor.loss_scale_factor or config.data.max_response_length
    copies = module is not roles.actor.module or holds_weights(rollout)
    return trainer_class(
        config=config,
        plan=plan,
        facts=ExperienceFacts.of(config, plan.on_policy),
        roles=roles,
        loader=loader,
        collector=collector,
        validator=build_validator(config, collector, agents, tokenizer),
        output=output,
        kl_controller=controller,
        micro=micro_batches(config, plan),
        actor_objective=ActorUpdate(config, width),
        critic_objective=CriticUpdate(config, width),
        sync_weights=build_weight_sync(config, engine, run_ahead, roles, policies, copies, plan.total_steps),
        total_steps=plan.total_steps,
        policies=policies,
        extra_loss=pretraining,
        after_update=[] if average is None else [lambda: average.update(masters_of(roles.actor))],
    )


def rollout_seed(config: PpoConfig) -> int:
    """The seed of all random streams of sampling."""
    seed = config.actor_rollout_ref.rollout.seed
    return config.trainer.seed if seed is None else seed


def training_data(config: PpoConfig) -> DataConfig:
    """The settings of the training loader. Only dynamic sampling draws other batches than those of a step."""
    if config.algorithm.filter_groups.enable:
        return config.data
    return dataclasses.replace(config.data, gen_batch_size=None)


def training_loader(config: PpoConfig, loader: Loader) -> PromptLoader:
    """The loader, or its wrapper that keeps its state right when prompts are drawn ahead of training."""
    ahead = async_plan(config)
    if ahead.over_sampling > 1:
        rollout = config.actor_rollout_ref.rollout
        return OpenPrompts(loader, rollout.n, rollout.response_length)
    return DrawnAhead(loader) if ahead.off_policy else loader


def build_kl_controller(config: PpoConfig) -> KLController:
    """The coefficient of the KL penalty in rewards: fixed or adaptive."""
    settings = config.algorithm.kl_ctrl
    kind = cast(Literal["fixed", "adaptive"], settings.type)
    return kl_controller(
        kind, coef=settings.kl_coef, target=settings.target_kl, horizon=int(settings.horizon)
    )


def build_run_ahead(
    config: PpoConfig,
    sampler: Sampler,
    rollout: StepRollout,
    loader: PromptLoader,
    total_steps: int,
    ranks: Ranks,
) -> AsyncRollout | None:
    """Sampling ahead of training (trainer.async_training); None: every step samples when it begins."""
    ahead = async_plan(config)
    if not (ahead.concurrent or ahead.interrupts):
        return None
    engine = sampler.engine
    if ahead.concurrent and torch.cuda.is_available():
        engine.use_stream(torch.cuda.Stream())
    interruptible = Interruptible(engine, cut=ahead.interrupts)
    return AsyncRollout(
        interruptible,
        dataclasses.replace(rollout, sampler=dataclasses.replace(sampler, engine=interruptible)),
        between_syncs=ahead.between_updates,
        last_step=total_steps,
        overlaps_training=ahead.concurrent,
        ranks=ranks,
        tensor_parallel=tensor_parallel_size(config.actor_rollout_ref.rollout),
        on_use=loader.used if isinstance(loader, DrawnAhead) else None,
    )


def build_over_sampling(
    config: PpoConfig,
    sampler: Sampler,
    rollout: StepRollout,
    prompts: OpenPrompts,
    total_steps: int,
    ranks: Ranks,
) -> OverSampling:
    """More prompts per step than it trains on (rollout.over_sampling)."""
    settings = config.actor_rollout_ref.rollout
    return OverSampling(
        sampler,
        rollout,
        prompts,
        factor=settings.over_sampling,
        max_age=config.trainer.async_training.max_policy_age,
        last_step=total_steps,
        calls_back=ENGINES.entry(engine_name(settings)).facts["fed"] and not settings.nnodes,
        ranks=ranks,
        tensor_parallel=tensor_parallel_size(settings),
    )


def build_weight_sync(
    config: PpoConfig,
    engine: Engine,
    run_ahead: AsyncRollout | None,
    roles: Roles,
    policies: PolicySet | None,
    copies: bool,
    total_steps: int,
) -> WeightSync:
    """Passes the actor's weights to the engine. `copies`: the engine has its own module."""
    every = async_plan(config).sync_steps
    if policies is not None:
        on_sync = partial(policies.load_into, engine)
        return WeightSync(engine, roles.actor, copies, every, total_steps, on_sync=on_sync)
    if run_ahead is None:
        return WeightSync(engine, roles.actor, copies, every, total_steps)
    if run_ahead.overlaps_training:  # requests must be interrupted for the sync
        engine = run_ahead.engine
    return WeightSync(engine, roles.actor, copies, every, total_steps, on_sync=run_ahead.on_weight_sync)


def build_collector(
    config: PpoConfig,
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    module: nn.Module,
    device: torch.device,
    ranks: Ranks,
    given: InProcess,
) -> Collector:
    """Sampling and scoring, shared between ranks where there are several."""
    rollout = config.actor_rollout_ref.rollout
    ahead = async_plan(config)
    shared_sampler: PromptSampler = sampler
    scorer: TrajectoryScorer = build_trajectory_scorer(config, tokenizer, device, ranks, given)
    if ranks.world > 1:
        rows = rows_at_once(rollout, ahead)
        shared_sampler = RankSampler(sampler, ranks, tensor_parallel_size(rollout), rows)
        if not divides_reward_model(config):
            scorer = RankScorer(scorer, ranks)
    return Collector(
        sampler.engine,
        StepRollout(
            shared_sampler,
            sampling_for(rollout, tokenizer, module),
            rollout.n,
            greedy_baseline="greedy_baseline" in estimator_needs(config),
            lengths=AnswerLengths() if rollout.admission_order == "longest_first" else None,
        ),
        scorer,
        group_filter=build_group_filter(config),
        free_cache=rollout.free_cache_engine and not ahead.concurrent,
        weights=rollout.multi_turn.reward_weights,
        credit=rollout.agent.credit,
        task_reward=has_task_reward(config),
        ranks=ranks,
        tensor_parallel=tensor_parallel_size(rollout),
    )


def rows_at_once(rollout: RolloutConfig, ahead: AsyncPlan) -> int:
    """Samples that an engine runs at once, if ranks can give each other the prompts beyond them; else 0."""
    takes_requests = ENGINES.entry(engine_name(rollout)).facts["fed"]
    if not takes_requests or rollout.nnodes or ahead.concurrent or ahead.interrupts:
        return 0
    return rollout.max_num_seqs


def build_group_filter(config: PpoConfig) -> GroupFilter | None:
    """Dynamic sampling, where algorithm.filter_groups asks for it."""
    groups = config.algorithm.filter_groups
    if not groups.enable:
        return None
    bounds = None if groups.range is None else (groups.range[0], groups.range[1])
    return GroupFilter(groups.metric or "score", bounds, groups.max_num_gen_batches)


def build_trajectory_scorer(
    config: PpoConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    ranks: Ranks,
    given: InProcess,
) -> TrajectoryScorer:
    """The scorer of the configuration, with its reward model or judge."""
    reward = config.reward_model
    rollout = config.actor_rollout_ref.rollout
    judge = None
    if reward.judge.enable and not reward.judge.url:
        judge = local_judge(reward, device, prompt_length=2 * max_model_len(rollout) + TEMPLATE_TOKENS)
    model: RemoteTokenScorer | HeadModel | DividedRewardModel | None = None
    if "reward" in resource_pools(config):
        model = remote_reward_model(ranks)
    elif divides_reward_model(config):
        model = divided_reward_model(config, device, ranks)
    elif reward.enable and not reward.remote_url:
        model = make_reward_model(config, device)
    return build_scorer(
        reward,
        config.custom_reward_function,
        config.reward_manager,
        tokenizer,
        model,
        judge=judge,
        max_response_length=rollout.response_length,
        compat=config.algorithm.compat,
        given=given.reward,
    )


def build_validator(
    config: PpoConfig, collector: Collector, agents: AgentSetup, tokenizer: PreTrainedTokenizerBase
) -> Validator | None:
    """Validation on data.val_files; None: there are none."""
    if not config.data.val_files:
        return None
    val = config.actor_rollout_ref.rollout.val_kwargs
    sampling = dataclasses.replace(
        collector.rollout.sampling, temperature=val.temperature, top_k=val.top_k, top_p=val.top_p
    )
    load_processor = processor_loader(config.actor_rollout_ref.model)
    prompts = build_prompts(
        config.data, tokenizer, split="val", listing=agents.listing(), load_processor=load_processor
    )
    loader = build_loader(config.data, prompts, split="val")
    best_of_n = conventions(config.algorithm.compat).best_of_n
    return Validator(loader, collector, sampling, val.n, best_of_n)
