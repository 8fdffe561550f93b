"""From a configuration to a trainer: the one place that wires rooms together."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strop.agents.build import Cast
from strop.algorithms.ema import EMA
from strop.algorithms.kl import kl_controller
from strop.backends.base import Backend, MicroBatching, Outputs
from strop.backends.sharded import fill
from strop.backends.single import SingleBackend
from strop.catalog import ENGINES
from strop.config.arithmetic import micro_batch, plan_ppo
from strop.config.asynchrony import Ahead, ahead_of
from strop.config.compose import Loaded
from strop.config.engine import engine_name, holds_weights
from strop.config.objective import has_critic, has_reference, needs, uses_lora
from strop.config.pools import pools
from strop.data.chat import Chat, stop_ids
from strop.data.loader import build_loader
from strop.data.prompts import build_prompts, chat_of
from strop.models.build import build_critic, build_policy, build_reference, build_tokenizer, compute_dtype
from strop.models.hollow import give_memory
from strop.models.tensor_parallel import Divided, team_of
from strop.ranks import Ranks
from strop.registry import load_plugins
from strop.rewards.managers.build import build_scorer
from strop.rewards.model import load_model
from strop.rollout.base import Engine, Sampling
from strop.rollout.build import build_engine
from strop.rollout.interruptible import Interruptible
from strop.run.retention import keep_from_trainer
from strop.run.sample_table import TextOf
from strop.run.samples import SampleWriter
from strop.trainer.ahead import DrawnAhead
from strop.trainer.backends import BackendMaker
from strop.trainer.collect import Collector, GroupFilter
from strop.trainer.export import exports, masters_of
from strop.trainer.judge import TEMPLATE_TOKENS, judge_here
from strop.trainer.keeper import Keeper
from strop.trainer.pool import far_critic, far_reference, far_reward_model, replicas_for
from strop.trainer.ppo import PpoTrainer, Roles
from strop.trainer.pretrain import build_pretraining
from strop.trainer.recording import RecordingTrainer
from strop.trainer.validate import Validator
from strop.trainer.window import Window
from strop.types import Batch


def build_ppo(loaded: Loaded, ranks: Ranks | None = None, kind: type[PpoTrainer] | None = None) -> PpoTrainer:
    """Every part of a reinforcement-learning run, ready for `fit`; each of `ranks` builds its own."""
    config, ranks = loaded.config, ranks or Ranks()
    kind = kind or (RecordingTrainer if config.trainer.record_steps else PpoTrainer)
    load_plugins(config.plugins)
    torch.manual_seed(config.trainer.seed)
    device = device_of(config.trainer.device)
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    cast = Cast(config.actor_rollout_ref.rollout, chat_of(config.data, tokenizer))
    prompts = build_prompts(config.data, tokenizer, split="train", listing=cast.listing())
    plan = plan_ppo(config, rows=len(prompts))
    assert plan.total_steps is not None
    roles, rollout = build_roles(config, device, plan.total_steps, ranks), config.actor_rollout_ref.rollout
    sampled = sampled_module(config, roles.actor, device)
    engine = replicas_for(config, ranks, longest(rollout)) if rollout.nnodes else engine_for(rollout, sampled)
    lend_memory(engine, roles)
    loader: Any = build_loader(config.data, prompts)
    ahead = ahead_of(config)
    if ahead.off_policy:
        loader = DrawnAhead(loader)
    window = window_for(ahead, engine, loader, plan.total_steps)
    collector = collector_for(config, engine, tokenizer, sampled, device, cast, ranks)
    collector = dataclasses.replace(collector, window=window)
    pretraining = build_pretraining(
        config, tokenizer, config.actor_rollout_ref.actor.ppo_mini_batch_size * plan.samples_per_prompt
    )
    average = average_of(roles.actor, config.trainer)
    controller = kl_controller(
        config.algorithm.kl_ctrl.type,
        coef=config.algorithm.kl_ctrl.kl_coef,
        target=config.algorithm.kl_ctrl.target_kl,
        horizon=int(config.algorithm.kl_ctrl.horizon),
    )
    stateful: dict[str, Any] = {"kl": controller, "ema": average, "pretrain_files": pretraining and pretraining.loader}
    keeper = keeper_for(loaded, roles, tokenizer, plan.total_steps, average, stateful)
    return kind(
        config=config,
        plan=plan,
        roles=roles,
        loader=loader,
        collector=collector,
        validator=validator_for(config, collector, tokenizer),
        keeper=keeper,
        kl_controller=controller,
        micro=micro_batches(config, plan.sequences_per_step, plan.sequences_per_device),
        publish=publisher(
            window.engine if window.engine is not None and window.beside else engine,
            roles.actor,
            copies=sampled is not roles.actor.module or holds_weights(rollout),
            every=ahead.sync_steps,
            last=plan.total_steps,
            published=window.published,
        ),
        total_steps=plan.total_steps,
        beside=pretraining,
        after_update=[] if average is None else [lambda: average.update(masters_of(roles.actor))],
    )


def keeper_for(
    loaded: Loaded, roles: Roles, tokenizer: Any, total_steps: int, average: EMA | None, stateful: dict[str, Any]
) -> Keeper:
    """What the run leaves behind; of `stateful`, what exists belongs into checkpoints."""
    config, trainer = loaded.config, loaded.config.trainer
    return Keeper(
        config,
        loaded.tree(),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        total_steps=total_steps,
        models={"actor": roles.actor, **({} if roles.critic is None else {"critic": roles.critic})},
        contents={"actor": config.actor_rollout_ref.actor.checkpoint, "critic": config.critic.checkpoint},
        keep=keep_from_trainer(
            max_actor_ckpt_to_keep=trainer.max_actor_ckpt_to_keep,
            max_critic_ckpt_to_keep=trainer.max_critic_ckpt_to_keep,
            max_ckpt_mem_gb=trainer.max_ckpt_mem_gb,
            best_metric=trainer.best_metric,
            remove_previous_ckpt_in_save=trainer.remove_previous_ckpt_in_save,
        ),
        save_freq=trainer.save_freq,
        stateful={name: thing for name, thing in stateful.items() if thing is not None},
        exports=lambda: exports(config, roles, tokenizer, average),
        ranks=roles.actor.ranks,
        samples=sample_writer(trainer, tokenizer) if roles.actor.ranks.lead else None,
    )


def sample_writer(trainer: Any, tokenizer: Any) -> SampleWriter | None:
    """Who keeps samples for the board; with a tokenizer of its own, because it works in a thread of its own."""
    if trainer.samples_to_keep == 0:
        return None
    directory = Path(trainer.default_local_dir).expanduser()
    return SampleWriter(directory, most=trainer.samples_to_keep, texts=TextOf.of(copy.deepcopy(tokenizer)))


def average_of(backend: Backend, trainer: Any) -> EMA | None:
    """The average over time of what is trained, where the configuration asks for one."""
    return EMA(masters_of(backend), decay=trainer.ema_beta, fill=fill) if trainer.enable_ema else None


def tokenizer_of(model: Any) -> Any:
    """The policy's tokenizer, with the chat template that was asked for: a text, or the content of a .jinja file."""
    tokenizer = build_tokenizer(model)
    if model.custom_chat_template is not None:
        tokenizer.chat_template = Chat(tokenizer, template=model.custom_chat_template).template
    return tokenizer


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.device=cuda, but torch sees no GPU here. Set trainer.device=cpu or auto.")
    return torch.device(name)


def build_roles(config: Any, device: torch.device, total_steps: int, ranks: Ranks | None = None) -> Roles:
    """Actor, critic and reference, as the configuration needs them."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    make = BackendMaker(device, total_steps, ranks or Ranks(), temperature_of(config))
    lent = not holds_weights(config.actor_rollout_ref.rollout)
    policy = make(
        build_policy, model, actor.fsdp_config, actor.strategy, actor.optim, actor.grad_clip, **sharing(actor), lent=lent
    )
    roles = Roles(policy)
    if "critic" in pools(config):
        roles.critic = far_critic(config, make.ranks, make.temperature, total_steps)
    elif has_critic(config):
        roles.critic = critic_here(config, make)
    if has_reference(config):
        if uses_lora(config):
            roles.reference = WithoutAdapters(policy)  # type: ignore[assignment]
        else:
            far = "reference" in pools(config)
            roles.reference = far_reference(make.ranks) if far else reference_here(config, make)  # type: ignore[assignment]
    return roles


def lend_memory(engine: Any, roles: Roles) -> None:
    """A model that runs out of memory makes an engine on its device give back what it kept."""
    models: list[Any] = [roles.actor, roles.critic, roles.reference]
    for model in models:
        if hasattr(engine, "let_go") and hasattr(model, "thrift"):
            model.thrift.relief = engine.let_go


def temperature_of(config: Any) -> float:
    """Log-probs are those of the distribution that was sampled from."""
    return config.actor_rollout_ref.rollout.temperature or 1.0


def critic_here(config: Any, make: BackendMaker) -> SingleBackend:
    critic, own = config.critic, config.critic.model
    return make(build_critic, own, own.fsdp_config, critic.strategy, critic.optim, critic.grad_clip, **sharing(critic))


def reference_here(config: Any, make: BackendMaker) -> SingleBackend:
    ref = config.actor_rollout_ref.ref
    other = dataclasses.replace(config.actor_rollout_ref.model, **ref.model)
    return make(build_reference, other, ref.fsdp_config, ref.strategy, **sharing(ref))


def sharing(section: Any) -> dict[str, Any]:
    """How many neighbouring ranks share rows or weight matrices of a role."""
    return {
        "sequence_parallel": section.ulysses_sequence_parallel_size,
        "tensor_parallel": section.tensor_parallel_size,
    }


@dataclass
class WithoutAdapters:
    """The reference of a model trained by LoRA: the same weights with the adapters off."""

    actor: SingleBackend

    def forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        with self.actor.reference():
            return self.actor.forward(batch, want, micro)


def sampled_module(config: Any, actor: Backend, device: torch.device) -> Any:
    """What the engine samples from: the actor's own module, or where that is divided over ranks, or learns while the engine
    samples, a whole one in the precision of computing. `publish` brings its weights."""
    own_copy = ahead_of(config).beside and not holds_weights(config.actor_rollout_ref.rollout)
    if (actor.ranks.world == 1 and not own_copy) or config.actor_rollout_ref.rollout.nnodes:
        return actor.module
    dtype = compute_dtype(config.actor_rollout_ref.actor.fsdp_config.dtype, device)
    module = build_reference(config.actor_rollout_ref.model, dtype=dtype, weights=False)
    size = team_size(config.actor_rollout_ref.rollout)
    if size > 1:
        module.divided = Divided(module, team_of(actor.ranks.rank, actor.ranks.world, size))
    give_memory(module, device)
    return module


def team_size(rollout: Any) -> int:
    """Neighbouring ranks that sample together, each with a part of every matrix; engines with weights of their own see to
    that themselves."""
    return 1 if holds_weights(rollout) else int(rollout.tensor_model_parallel_size)


def engine_for(rollout: Any, module: Any) -> Engine:
    """The engine that the `rollout` section describes."""
    return build_engine(engine_name(rollout), module, **engine_settings(rollout))


def engine_settings(rollout: Any) -> dict[str, Any]:
    return {
        "max_model_len": longest(rollout),
        "bucket_megabytes": rollout.checkpoint_engine.update_weights_bucket_megabytes,
        "seed": rollout.seed or 0,
        **{name: getattr(rollout, name) for name in ENGINE_SETTINGS},
    }


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
"""Keys of the `rollout` section that engines know by the same name; each takes those that concern it."""


def publisher(
    engine: Engine,
    actor: Any,
    *,
    copies: bool,
    every: int = 1,
    last: int | None = None,
    published: Callable[[], None] = lambda: None,
) -> Callable[[int], None]:
    """Hands the actor's weights to the engine, as a version; one that samples from the actor's own module has them already.

    Versions are steps. `every` steps, and for step `last`, they are handed over; `published` is told of it.
    """
    latest: int | None = None

    def publish(version: int) -> None:
        nonlocal latest
        if latest is not None and version - latest < every and version != last:
            return
        engine.update_weights(actor.export_weights() if copies else (), version)
        latest = version
        published()

    return publish


def window_for(ahead: Ahead, engine: Engine, loader: Any, total_steps: int) -> Window:
    """How far sampling runs ahead of training."""
    if not (ahead.beside or ahead.cut):
        return Window()
    if ahead.beside and torch.cuda.is_available() and hasattr(engine, "stream"):
        engine.stream = torch.cuda.Stream()
    return Window(
        ahead.between_updates,
        last_step=total_steps,
        engine=Interruptible(engine, cut=ahead.cut),
        beside=ahead.beside,
        used=loader.used if isinstance(loader, DrawnAhead) else lambda draws: None,
    )


def longest(rollout: Any) -> int:
    return rollout.max_model_len or rollout.prompt_length + rollout.response_length


def sampling_for(rollout: Any, tokenizer: Any, module: Any) -> Sampling:
    """How the `rollout` section draws tokens; stop tokens are the tokenizer's and those of the model's generation_config."""
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


def collector_for(
    config: Any,
    engine: Engine,
    tokenizer: Any,
    module: Any,
    device: torch.device,
    cast: Cast | None = None,
    ranks: Ranks | None = None,
) -> Collector:
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    sampling = sampling_for(rollout, tokenizer, module)
    groups = algorithm.filter_groups
    group_filter = None
    if groups.enable:
        bounds = None if groups.range is None else (groups.range[0], groups.range[1])
        group_filter = GroupFilter(groups.metric or "score", bounds, groups.max_num_gen_batches)
    reward, ranks = config.reward_model, ranks or Ranks()
    model: Any = None
    judge = None
    if reward.judge.enable and not reward.judge.url:
        judge = judge_here(reward, device, prompt_length=2 * longest(rollout) + TEMPLATE_TOKENS)
    if "reward" in pools(config):
        model = far_reward_model(ranks)
    elif reward.enable and not reward.remote_url:
        model = load_model(reward, device=device, dtype=compute_dtype(reward.model.fsdp_config.dtype, device))
    scorer = build_scorer(
        reward,
        config.custom_reward_function,
        config.reward_manager,
        tokenizer,
        model,
        judge=judge,
        max_response_length=rollout.response_length,
    )
    return Collector(
        engine,
        scorer,
        sampling,
        samples_per_prompt=rollout.n,
        seed=config.trainer.seed if rollout.seed is None else rollout.seed,
        longest=longest(rollout),
        group_filter=group_filter,
        greedy_baseline="greedy_baseline" in needs(config),
        free_cache=rollout.free_cache_engine and not ahead_of(config).beside,
        cast=cast,
        weights=rollout.multi_turn.reward_weights,
        team=team_size(rollout),
        ranks=ranks,
        rows=rollout.max_num_seqs if ENGINES.entry(engine_name(rollout)).facts["fed"] and not rollout.nnodes else 0,
    )


def validator_for(config: Any, collector: Collector, tokenizer: Any) -> Validator | None:
    if not config.data.val_files:
        return None
    val = config.actor_rollout_ref.rollout.val_kwargs
    sampling = dataclasses.replace(collector.sampling, temperature=val.temperature, top_k=val.top_k, top_p=val.top_p)
    listing = None if collector.cast is None else collector.cast.listing()
    prompts = build_prompts(config.data, tokenizer, split="val", listing=listing)
    return Validator(build_loader(config.data, prompts, split="val"), collector, sampling, val.n)


def micro_batches(config: Any, sequences: int, update_sequences: int) -> dict[str, MicroBatching]:
    """How each pass over a model is cut. It never changes a result."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    rollout, ref = config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref

    def cut(section: Any, name: str, rows: int, dynamic: bool, tokens: int) -> MicroBatching:
        return MicroBatching(rows=micro_batch(section, name, rows, 1), max_tokens=tokens if dynamic else None)

    return {
        "actor": cut(actor, "ppo_micro_batch_size", update_sequences, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu),
        "log_prob": cut(
            rollout,
            "log_prob_micro_batch_size",
            sequences,
            rollout.log_prob_use_dynamic_bsz,
            rollout.log_prob_max_token_len_per_gpu,
        ),
        "ref": cut(
            ref, "log_prob_micro_batch_size", sequences, ref.log_prob_use_dynamic_bsz, ref.log_prob_max_token_len_per_gpu
        ),
        "critic": cut(
            critic, "ppo_micro_batch_size", update_sequences, critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu
        ),
        "values": cut(
            critic, "forward_micro_batch_size", sequences, critic.use_dynamic_bsz, critic.forward_max_token_len_per_gpu
        ),
    }
