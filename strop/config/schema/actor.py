"""The `actor_rollout_ref` section: the policy, its update, and its frozen reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.catalog import AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES
from strop.config.schema.fields import inert, link, section, setting
from strop.config.schema.megatron import Megatron
from strop.config.schema.model import _COMPILE, _FUSED, Checkpoint, Fsdp, Model, Optim, Profiler
from strop.config.schema.rollout import Rollout

STRATEGIES = ("fsdp", "fsdp2", "megatron", "single")


@dataclass(eq=False)
class PolicyLoss:
    """Which surrogate objective, and the settings of the less common ones. Read by algorithms/policy_losses."""

    loss_mode: str = setting("vanilla", one_of=POLICY_LOSSES)
    """Name of the policy loss."""
    clip_cov_ratio: float = setting(0.0002, at_least=0, at_most=1)
    """clip_cov: share of tokens whose update is dropped."""
    clip_cov_lb: float = setting(1.0)
    """clip_cov: lower end of the covariance band."""
    clip_cov_ub: float = setting(5.0)
    """clip_cov: upper end of the covariance band."""
    kl_cov_ratio: float = setting(0.0002, at_least=0, at_most=1)
    """kl_cov: share of tokens that are penalised."""
    ppo_kl_coef: float = setting(0.1, at_least=0)
    """kl_cov: weight of that penalty."""
    dro_beta: float = setting(0.1, above=0)
    """dro: weight of the squared log-ratio."""


@dataclass(eq=False)
class RouterReplay:
    mode: str = inert("disabled", "router replay is not supported")
    """Replay of expert choices: disabled, R2 or R3."""
    record_file: str | None = inert(None, "router replay is not supported")
    """File to record to."""
    replay_file: str | None = inert(None, "router replay is not supported")
    """File to replay from."""


@dataclass(eq=False)
class Actor:
    """How the policy is updated. Read by trainer/ppo.py and backends/."""

    strategy: str = setting("fsdp", choices=STRATEGIES)
    """Training backend: fsdp and fsdp2 both shard with FSDP2 (one device needs no sharding); megatron is not there yet."""
    ppo_mini_batch_size: int = setting(256, at_least=1)
    """PROMPTS per optimizer update, over all devices; each brings rollout.n sequences."""
    ppo_micro_batch_size: int | None = setting(None, at_least=1)
    """Old form of ppo_micro_batch_size_per_gpu, counted over all devices."""
    ppo_micro_batch_size_per_gpu: int | None = setting(None, at_least=1)
    """SEQUENCES per forward and backward on one device. Null: derived. Never changes the result, only memory and speed."""
    use_dynamic_bsz: bool = setting(False)
    """Fill micro-batches by tokens instead of by sequences."""
    ppo_max_token_len_per_gpu: int = setting(16384, at_least=1)
    """Tokens per micro-batch and device when use_dynamic_bsz is on."""
    ppo_epochs: int = setting(1, at_least=1)
    """Passes over each batch of rollouts."""
    shuffle: bool = setting(False)
    """Shuffle sequences between mini-batches."""
    data_loader_seed: int | None = setting(42)
    """Seed of that shuffle."""
    grad_clip: float = setting(1.0, above=0)
    """Largest gradient norm."""
    clip_ratio: float = setting(0.2, at_least=0)
    """PPO clip range, both sides, unless clip_ratio_low or clip_ratio_high is given."""
    clip_ratio_low: float | None = setting(None, at_least=0)
    """Lower side: the ratio is clipped at 1 - clip_ratio_low. Null: clip_ratio."""
    clip_ratio_high: float | None = setting(None, at_least=0)
    """Upper side: the ratio is clipped at 1 + clip_ratio_high. Null: clip_ratio. DAPO uses 0.28."""
    clip_ratio_c: float = setting(3.0, above=1)
    """Dual clip: bound on the ratio of tokens with a negative advantage."""
    tau_pos: float = setting(1.0, above=0)
    """sapo: temperature of tokens with a positive advantage."""
    tau_neg: float = setting(1.05, above=0)
    """sapo: temperature of the others."""
    policy_loss: PolicyLoss = section(PolicyLoss)
    """Surrogate objective."""
    loss_agg_mode: str = setting("token-mean", one_of=AGGREGATIONS)
    """How token losses become one number: token-mean, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm."""
    loss_scale_factor: float | None = setting(None, above=0)
    """Divisor of seq-mean-token-sum-norm. Null: max_response_length."""
    entropy_coeff: float = setting(0.0)
    """Weight of the entropy bonus."""
    calculate_entropy: bool = setting(True)
    """Log the entropy of every update even when its weight is 0."""
    skip_zero_advantages: bool = setting(True)
    """Compute no pass for sequences whose advantages are all 0 (groups that all failed or all succeeded). They still count in
    the denominators, so weights and loss stay the same; with sparse rewards the update takes a fraction of the time. Applies
    where nothing but the policy loss is trained: no KL term, entropy bonus or load balancing."""
    use_kl_loss: bool = setting(False)
    """Add kl_loss_coef * KL(policy, reference) to the loss. Needs a reference model."""
    kl_loss_coef: float = setting(0.001, at_least=0)
    """Weight of that term."""
    kl_loss_type: str = setting("low_var_kl", one_of=KL_ESTIMATORS)
    """Estimator of that KL."""
    aux_loss_coef: float = setting(0.0, at_least=0)
    """Weight of the load-balancing loss of mixture-of-experts models."""
    ulysses_sequence_parallel_size: int = setting(1, at_least=1)
    """Devices that share one sequence. Needs use_remove_padding."""
    tensor_parallel_size: int = setting(1, at_least=1)
    """Devices that share each weight matrix while training, by the plan that transformers ships for the model. It must divide
    the attention heads and the key-value heads. Not together with LoRA or ulysses_sequence_parallel_size."""
    calculate_sum_pi_squared: bool | None = setting(None)
    """Collect sum of squared probabilities per token. Null: when the advantage estimator needs it."""
    use_rollout_log_probs: bool = setting(False)
    """Take the engine's log-probs as the old ones instead of recomputing them."""
    freeze_vision_tower: bool = setting(False)
    """Do not train the vision part."""
    optim: Optim = section(Optim)
    """Optimizer and schedule."""
    fsdp_config: Fsdp = section(Fsdp)
    """Precision, sharding, offloading."""
    checkpoint: Checkpoint = section(Checkpoint)
    """Contents of checkpoints."""
    profiler: Profiler = section(Profiler)
    """Profiling of this role."""
    megatron: Megatron = section(Megatron)
    """Settings of the Megatron backend."""
    use_torch_compile: bool = inert(True, _COMPILE)
    """Compile the entropy function."""
    entropy_from_logits_with_chunking: bool = inert(False, _FUSED)
    """Entropy in chunks."""
    entropy_checkpointing: bool = inert(False, _FUSED)
    """Recompute entropy in the backward pass."""
    sum_pi_squared_checkpointing: bool = inert(False, _FUSED)
    """Recompute that sum in the backward pass."""
    use_remove_padding: bool = inert(True, "set actor_rollout_ref.model.use_remove_padding")
    """Mirror of the model's key."""
    use_fused_kernels: bool = inert(False, _FUSED)
    """Mirror of the model's key."""
    use_prefix_grouper: bool = inert(False, "packing already shares the work; prompts are not computed twice in rollouts")
    """Share the prompt's forward among the responses of a group."""
    rollout_n: int | None = inert(None, "set actor_rollout_ref.rollout.n")
    """Mirror of rollout.n."""
    router_replay: RouterReplay = section(RouterReplay)
    """Replay of expert choices."""


@dataclass(eq=False)
class Ref:
    """The frozen reference. It exists when algorithm.use_kl_in_reward or actor.use_kl_loss is on. Read by trainer/build.py."""

    strategy: str = link("actor_rollout_ref.actor.strategy", choices=STRATEGIES)
    """Backend that holds it."""
    model: dict[str, Any] = setting({})
    """Changes to actor_rollout_ref.model for the reference alone, for instance {path: another/model}."""
    fsdp_config: Fsdp = section(Fsdp)
    """Precision, sharding, offloading."""
    log_prob_micro_batch_size: int | None = setting(None, at_least=1)
    """Old form of the next key, counted over all devices."""
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, at_least=1)
    """Sequences per forward on one device. Null: derived."""
    log_prob_use_dynamic_bsz: bool = link("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill forwards by tokens."""
    log_prob_max_token_len_per_gpu: int = link("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", at_least=1)
    """Tokens per forward then."""
    tensor_parallel_size: int = link("actor_rollout_ref.actor.tensor_parallel_size", at_least=1)
    """Devices that share each weight matrix."""
    ulysses_sequence_parallel_size: int = link("actor_rollout_ref.actor.ulysses_sequence_parallel_size", at_least=1)
    """Devices that share one sequence."""
    nnodes: int = setting(0, at_least=0)
    """Machines of its own, with a whole copy of the reference on each device (trainer.runtime=ray). 0: those of the actor."""
    n_gpus_per_node: int = setting(1, at_least=1)
    """Devices of each of them."""
    profiler: Profiler = section(Profiler)
    """Profiling of this role."""
    megatron: Megatron = section(Megatron)
    """Settings of the Megatron backend."""
    use_torch_compile: bool = inert(True, _COMPILE)
    """Compile the entropy function."""
    rollout_n: int | None = inert(None, "set actor_rollout_ref.rollout.n")
    """Mirror of rollout.n."""
    entropy_from_logits_with_chunking: bool = inert(False, _FUSED)
    """Entropy in chunks."""
    entropy_checkpointing: bool = inert(False, _FUSED)
    """Recompute entropy."""
    router_replay: RouterReplay = section(RouterReplay)
    """Replay of expert choices."""


@dataclass(eq=False)
class ActorRolloutRef:
    """The policy and everything that is made of it."""

    hybrid_engine: bool = inert(True, "the engine lives beside the trainer unless trainer.async_training moves it")
    """Share devices between training and rollout."""
    nccl_timeout: int = setting(600, at_least=1)
    """Seconds until a collective operation gives up."""
    model: Model = section(Model)
    """Weights and tokenizer."""
    actor: Actor = section(Actor)
    """How the policy is updated."""
    ref: Ref = section(Ref)
    """The frozen reference."""
    rollout: Rollout = section(Rollout)
    """How responses are sampled."""
    profiler: Profiler = section(Profiler)
    """Profiling of the rollout phase."""
