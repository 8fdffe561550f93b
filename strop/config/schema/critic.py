"""The `critic` section: the value model of actor-critic methods."""

from __future__ import annotations

from dataclasses import dataclass

from strop.catalog import AGGREGATIONS
from strop.config.schema.actor import STRATEGIES
from strop.config.schema.fields import FreeForm, inert, link, section, setting
from strop.config.schema.megatron import MegatronConfig
from strop.config.schema.model import CheckpointConfig, FsdpConfig, ModelConfig, OptimConfig, ProfilerConfig


@dataclass(eq=False)
class CriticModelConfig(ModelConfig):
    """Weights of the value model."""

    path: str | None = link("actor_rollout_ref.model.path")
    """Initial weights of the value model: a language model (with a new value head), a value model or a reward
    model."""
    tokenizer_path: str | None = link("actor_rollout_ref.model.path")
    """Folder of the tokenizer."""
    trust_remote_code: bool = link("actor_rollout_ref.model.trust_remote_code")
    """Run model code from the model's own repository."""
    external_lib: str | None = link("actor_rollout_ref.model.external_lib")
    """Modules to import before the model is loaded, comma separated."""
    value_head_prefix: str = link("actor_rollout_ref.model.value_head_prefix")
    """Attribute name of the scalar head in OpenRLHF-style models."""
    use_remove_padding: bool = link("actor_rollout_ref.model.use_remove_padding")
    """Pack sequences without padding tokens."""
    fsdp_config: FsdpConfig = section(FsdpConfig)
    """Precision, sharding and offloading."""


@dataclass(eq=False)
class CriticConfig:
    """The value model and its update."""

    enable: bool | None = setting(None)
    """Train a critic. Null: only when the advantage estimator needs values."""
    strategy: str = link("actor_rollout_ref.actor.strategy", choices=STRATEGIES)
    """Training backend."""
    optim: OptimConfig = section(OptimConfig, lr=1e-5)
    """Optimizer and schedule."""
    model: CriticModelConfig = section(CriticModelConfig)
    """Weights of the value model."""
    ppo_mini_batch_size: int = link("actor_rollout_ref.actor.ppo_mini_batch_size", at_least=1)
    """PROMPTS per optimizer update."""
    ppo_micro_batch_size: int | None = setting(None, at_least=1)
    """Deprecated form of the next key, counted over all devices."""
    ppo_micro_batch_size_per_gpu: int | None = setting(None, at_least=1)
    """SEQUENCES per forward and backward on one device. Null: derived."""
    forward_micro_batch_size: int | None = setting(None, at_least=1)
    """Deprecated form of the next key, counted over all devices."""
    forward_micro_batch_size_per_gpu: int | None = link("critic.ppo_micro_batch_size_per_gpu", at_least=1)
    """Sequences per forward pass when values are computed. Null: derived."""
    use_dynamic_bsz: bool = link("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill micro-batches by tokens instead of by sequences."""
    ppo_max_token_len_per_gpu: int = setting(32768, at_least=1)
    """Tokens per micro-batch when use_dynamic_bsz is on."""
    forward_max_token_len_per_gpu: int = link("critic.ppo_max_token_len_per_gpu", at_least=1)
    """Tokens per forward pass when use_dynamic_bsz is on."""
    ppo_epochs: int = link("actor_rollout_ref.actor.ppo_epochs", at_least=1)
    """Passes over each batch of rollouts."""
    shuffle: bool = link("actor_rollout_ref.actor.shuffle")
    """Shuffle sequences between mini-batches."""
    data_loader_seed: int | None = link("actor_rollout_ref.actor.data_loader_seed")
    """Seed of the shuffle."""
    grad_clip: float = setting(1.0, above=0)
    """Gradients are clipped to this norm."""
    cliprange_value: float = setting(0.5, at_least=0)
    """Clip range of the value loss: maximum change from the old value."""
    loss_agg_mode: str = link("actor_rollout_ref.actor.loss_agg_mode", one_of=AGGREGATIONS)
    """How token losses are reduced to one number."""
    tensor_parallel_size: int = setting(1, at_least=1)
    """Devices that split each weight matrix in training. It cannot be combined with LoRA or
    ulysses_sequence_parallel_size."""
    ulysses_sequence_parallel_size: int = setting(1, at_least=1)
    """Devices that split each sequence (Ulysses). Needs use_remove_padding."""
    nnodes: int = setting(0, at_least=0)
    """Dedicated nodes that train the critic together (trainer.runtime=ray). 0: it shares the actor's
    devices."""
    n_gpus_per_node: int = setting(1, at_least=1)
    """Devices per dedicated node."""
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    """Contents of checkpoints."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Profiling of this role."""
    megatron: MegatronConfig = section(MegatronConfig)
    """Settings of the Megatron backend."""
    nccl_timeout: int = inert(600, "set actor_rollout_ref.nccl_timeout")
    """Timeout of a collective operation, in seconds."""
    kl_ctrl: FreeForm = inert({}, "set algorithm.kl_ctrl")
    """Deprecated Megatron key."""
    rollout_n: int | None = inert(None, "set actor_rollout_ref.rollout.n")
    """Mirror of rollout.n."""
