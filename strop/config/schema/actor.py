"""The `actor_rollout_ref` section: the policy, its update, and its frozen reference."""

from __future__ import annotations

from dataclasses import dataclass

from strop.catalog import AGGREGATIONS, KL_ESTIMATORS, POLICY_LOSSES
from strop.config.schema.fields import FreeForm, inert, link, section, setting
from strop.config.schema.megatron import MegatronConfig
from strop.config.schema.model import (
    _COMPILE,
    _FUSED,
    CheckpointConfig,
    FsdpConfig,
    ModelConfig,
    OptimConfig,
    ProfilerConfig,
)
from strop.config.schema.rollout import RolloutConfig

UNSUPPORTED_STRATEGIES = {
    "mlite": "verl's lightweight Megatron is not supported; strategy=megatron is",
    "torchtitan": "the torchtitan backend is not supported",
    "veomni": "the VeOmni backend is not supported",
    "automodel": "the NeMo AutoModel backend is not supported",
    "fsdp_turbo": "Ascend devices are not supported",
}
"""Backends of verl that do not exist here -> the reason."""
STRATEGIES = ("fsdp", "fsdp2", "single", "megatron", *UNSUPPORTED_STRATEGIES)


@dataclass(eq=False)
class PolicyLossConfig:
    """The policy loss, and the settings of the less common losses."""

    loss_mode: str = setting("vanilla", one_of=POLICY_LOSSES)
    """Name of the policy loss."""
    kwargs: FreeForm = setting({})
    """Further keyword arguments of the policy loss, by the names in its signature. They are checked before
    the run."""
    clip_cov_ratio: float = setting(0.0002, at_least=0, at_most=1)
    """clip_cov: share of tokens whose update is dropped."""
    clip_cov_lb: float = setting(1.0)
    """clip_cov: lower end of the covariance band."""
    clip_cov_ub: float = setting(5.0)
    """clip_cov: upper end of the covariance band."""
    kl_cov_ratio: float = setting(0.0002, at_least=0, at_most=1)
    """kl_cov: share of tokens that are penalized."""
    ppo_kl_coef: float = setting(0.1, at_least=0)
    """kl_cov: weight of that penalty."""
    dro_beta: float = setting(0.1, above=0)
    """dro: weight of the squared log-ratio."""


_NO_FILE = "the experts of a step are kept in memory, with its batch"
_FROZEN = "only the actor is updated"


@dataclass(eq=False)
class RouterReplayConfig:
    """Experts of the updates of a mixture of experts."""

    mode: str = setting("disabled", choices=("disabled", "R2", "R3"))
    """R2: updates send every token to the experts that it visited when the old log-probs were computed; the
    weights of these experts are recomputed. With one update per step there is nothing to replay. R3: old
    log-probs and updates send every token to the experts that it visited in the rollout engine."""
    record_file: str | None = inert(None, _NO_FILE)
    """File to record to."""
    replay_file: str | None = inert(None, _NO_FILE)
    """File to replay from."""


@dataclass(eq=False)
class RefRouterReplayConfig:
    mode: str = inert("disabled", _FROZEN)
    """Mode of router replay: disabled, R2 or R3."""
    record_file: str | None = inert(None, _NO_FILE)
    """File to record to."""
    replay_file: str | None = inert(None, _NO_FILE)
    """File to replay from."""


@dataclass(eq=False)
class ActorConfig:
    """How the policy is updated."""

    strategy: str = setting("fsdp", choices=STRATEGIES)
    """Training backend. fsdp and fsdp2 both shard with FSDP2 (one device needs no sharding); megatron divides
    layers and matrices as set in the `megatron` section; the others are not supported."""
    ppo_mini_batch_size: int = setting(256, at_least=1)
    """PROMPTS per optimizer update, over all devices. Each prompt has rollout.n sequences."""
    ppo_micro_batch_size: int | None = setting(None, at_least=1)
    """Deprecated form of ppo_micro_batch_size_per_gpu, counted over all devices."""
    ppo_micro_batch_size_per_gpu: int | None = setting(None, at_least=1)
    """SEQUENCES per forward and backward on one device. Null: derived. It changes memory and speed, never the
    result."""
    use_dynamic_bsz: bool = setting(False)
    """Fill micro-batches by tokens instead of by sequences."""
    ppo_max_token_len_per_gpu: int = setting(16384, at_least=1)
    """Tokens per micro-batch and device when use_dynamic_bsz is on."""
    ppo_epochs: int = setting(1, at_least=1)
    """Passes over each batch of rollouts."""
    shuffle: bool = setting(False)
    """Shuffle sequences between mini-batches."""
    data_loader_seed: int | None = setting(42)
    """Seed of the shuffle."""
    grad_clip: float = setting(1.0, above=0)
    """Gradients are clipped to this norm."""
    clip_ratio: float = setting(0.2, at_least=0)
    """PPO clip range on both sides, unless clip_ratio_low or clip_ratio_high is set."""
    clip_ratio_low: float | None = setting(None, at_least=0)
    """Lower clip range: the ratio is clipped at 1 - clip_ratio_low. Null: clip_ratio."""
    clip_ratio_high: float | None = setting(None, at_least=0)
    """Upper clip range: the ratio is clipped at 1 + clip_ratio_high. Null: clip_ratio. DAPO uses 0.28."""
    clip_ratio_c: float = setting(3.0, above=1)
    """Dual clip: bound on the ratio of tokens with a negative advantage."""
    tau_pos: float = setting(1.0, above=0)
    """sapo: temperature of tokens with a positive advantage."""
    tau_neg: float = setting(1.05, above=0)
    """sapo: temperature of all other tokens."""
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    """The policy loss and its settings."""
    loss_agg_mode: str = setting("token-mean", one_of=AGGREGATIONS)
    """How token losses are reduced to one number: token-mean, seq-mean-token-sum, seq-mean-token-mean,
    seq-mean-token-sum-norm."""
    loss_scale_factor: float | None = setting(None, above=0)
    """Divisor of seq-mean-token-sum-norm. Null: max_response_length."""
    entropy_coeff: float = setting(0.0)
    """Weight of the entropy bonus."""
    calculate_entropy: bool = setting(True)
    """Log the entropy of every update even when its weight is 0."""
    skip_zero_advantages: bool = setting(True)
    """Skip forward and backward for sequences whose advantages are all 0 (groups in which all scores are
    equal). They still count in the denominators, so weights and loss are the same; with sparse rewards the
    update takes a fraction of the time. It applies if the policy loss is the only loss: no KL term, no
    entropy bonus, no load balancing."""
    use_kl_loss: bool = setting(False)
    """Add kl_loss_coef * KL(policy, reference) to the loss. Needs a reference model."""
    kl_loss_coef: float = setting(0.001, at_least=0)
    """Weight of the KL term."""
    kl_loss_type: str = setting("low_var_kl", one_of=KL_ESTIMATORS)
    """Estimator of the KL term."""
    aux_loss_coef: float = setting(0.0, at_least=0)
    """Weight of the load-balancing loss of mixture-of-experts models."""
    ulysses_sequence_parallel_size: int = setting(1, at_least=1)
    """Devices that split each sequence (Ulysses). Needs use_remove_padding."""
    tensor_parallel_size: int = setting(1, at_least=1)
    """Devices that split each weight matrix in training, by the plan that transformers has for the model. It
    must divide the number of attention heads and of key-value heads. It cannot be combined with LoRA or
    ulysses_sequence_parallel_size."""
    calculate_sum_pi_squared: bool | None = setting(None)
    """Compute the sum of squared probabilities per token. Null: only when the advantage estimator needs
    it."""
    use_rollout_log_probs: bool = setting(False)
    """Use the engine's log-probs as old log-probs instead of recomputing them."""
    freeze_vision_tower: bool = setting(False)
    """Train the language model and the projector, but not the vision tower."""
    optim: OptimConfig = section(OptimConfig)
    """Optimizer and schedule."""
    fsdp_config: FsdpConfig = section(FsdpConfig)
    """Precision, sharding and offloading."""
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    """Contents of checkpoints."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Profiling of this role."""
    megatron: MegatronConfig = section(MegatronConfig)
    """Settings of the Megatron backend."""
    use_torch_compile: bool = inert(True, _COMPILE)
    """Compile the entropy function."""
    entropy_from_logits_with_chunking: bool = inert(False, _FUSED)
    """Compute the entropy in chunks."""
    entropy_checkpointing: bool = inert(False, _FUSED)
    """Recompute the entropy in the backward pass."""
    sum_pi_squared_checkpointing: bool = inert(False, _FUSED)
    """Recompute the sum of squared probabilities in the backward pass."""
    use_remove_padding: bool = inert(True, "set actor_rollout_ref.model.use_remove_padding")
    """Mirror of the model's key."""
    use_fused_kernels: bool = inert(False, _FUSED)
    """Mirror of the model's key."""
    use_prefix_grouper: bool = inert(
        False, "packing already shares the work; prompts are not computed twice in rollouts"
    )
    """Compute the prompt once for all responses of a group."""
    rollout_n: int | None = inert(None, "set actor_rollout_ref.rollout.n")
    """Mirror of rollout.n."""
    router_replay: RouterReplayConfig = section(RouterReplayConfig)
    """Router replay of mixture-of-experts models."""


_AS_ACTOR = {
    name: f"${{actor_rollout_ref.actor.megatron.{name}}}"
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "dtype",
        "use_dist_checkpointing",
        "dist_checkpointing_path",
        "dist_checkpointing_prefix",
        "override_transformer_config",
    )
}
"""The reference is divided as the actor is, unless its keys are set."""


@dataclass(eq=False)
class RefConfig:
    """The frozen reference model. It exists when algorithm.use_kl_in_reward or actor.use_kl_loss is on."""

    strategy: str = link("actor_rollout_ref.actor.strategy", choices=STRATEGIES)
    """Backend of the reference model."""
    model: FreeForm = setting({})
    """Changes to actor_rollout_ref.model for the reference only, for instance {path: another/model}."""
    fsdp_config: FsdpConfig = section(FsdpConfig)
    """Precision, sharding and offloading."""
    log_prob_micro_batch_size: int | None = setting(None, at_least=1)
    """Deprecated form of the next key, counted over all devices."""
    log_prob_micro_batch_size_per_gpu: int | None = link(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", at_least=1
    )
    """Sequences per forward pass on one device. Null: derived."""
    log_prob_use_dynamic_bsz: bool = link("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill forward passes by tokens instead of by sequences."""
    log_prob_max_token_len_per_gpu: int = link(
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", at_least=1
    )
    """Tokens per forward pass when log_prob_use_dynamic_bsz is on."""
    tensor_parallel_size: int = link("actor_rollout_ref.actor.tensor_parallel_size", at_least=1)
    """Devices that split each weight matrix."""
    ulysses_sequence_parallel_size: int = link(
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size", at_least=1
    )
    """Devices that split each sequence (Ulysses)."""
    nnodes: int = setting(0, at_least=0)
    """Dedicated nodes for the reference, with a full copy on each device (trainer.runtime=ray). 0: it shares
    the actor's devices."""
    n_gpus_per_node: int = setting(1, at_least=1)
    """Devices per dedicated node."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Profiling of this role."""
    megatron: MegatronConfig = section(MegatronConfig, **_AS_ACTOR)
    """Settings of the Megatron backend."""
    use_torch_compile: bool = inert(True, _COMPILE)
    """Compile the entropy function."""
    rollout_n: int | None = inert(None, "set actor_rollout_ref.rollout.n")
    """Mirror of rollout.n."""
    entropy_from_logits_with_chunking: bool = inert(False, _FUSED)
    """Compute the entropy in chunks."""
    entropy_checkpointing: bool = inert(False, _FUSED)
    """Recompute the entropy in the backward pass."""
    router_replay: RefRouterReplayConfig = section(RefRouterReplayConfig)
    """Router replay of mixture-of-experts models."""


@dataclass(eq=False)
class ActorRolloutRefConfig:
    """The policy, its rollouts and its reference model."""

    hybrid_engine: bool = inert(
        True, "the engine shares the trainer's devices unless trainer.async_training moves it"
    )
    """Share devices between training and rollout."""
    nccl_timeout: int = setting(600, at_least=1)
    """Timeout of a collective operation, in seconds."""
    model: ModelConfig = section(ModelConfig)
    """Weights and tokenizer."""
    actor: ActorConfig = section(ActorConfig)
    """How the policy is updated."""
    ref: RefConfig = section(RefConfig)
    """The frozen reference model."""
    rollout: RolloutConfig = section(RolloutConfig)
    """How responses are sampled."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Profiling of the rollout phase."""
