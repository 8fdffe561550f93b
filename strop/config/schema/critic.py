"""The `critic` section: the value model of actor-critic methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.catalog import AGGREGATIONS
from strop.config.schema.actor import STRATEGIES
from strop.config.schema.fields import inert, link, section, setting
from strop.config.schema.megatron import Megatron
from strop.config.schema.model import Checkpoint, Fsdp, Model, Optim, Profiler


@dataclass(eq=False)
class CriticModel(Model):
    """Weights of the value model. Read by models/build.py."""

    path: str | None = link("actor_rollout_ref.model.path")
    """Where the value model starts from: a language model (its head is new), a value model or a reward model."""
    tokenizer_path: str | None = link("actor_rollout_ref.model.path")
    """Folder of its tokenizer."""
    trust_remote_code: bool = link("actor_rollout_ref.model.trust_remote_code")
    """Run model code from the model's own repository."""
    external_lib: str | None = link("actor_rollout_ref.model.external_lib")
    """Module(s) imported first."""
    value_head_prefix: str = link("actor_rollout_ref.model.value_head_prefix")
    """Attribute name of the scalar head in OpenRLHF-style models."""
    use_remove_padding: bool = link("actor_rollout_ref.model.use_remove_padding")
    """Pack sequences without padding tokens."""
    fsdp_config: Fsdp = section(Fsdp)
    """Precision, sharding, offloading."""


@dataclass(eq=False)
class Critic:
    """The value model and its update. Read by trainer/ppo.py and backends/."""

    enable: bool | None = setting(None)
    """Null: when the advantage estimator needs values. True or false force it."""
    strategy: str = link("actor_rollout_ref.actor.strategy", choices=STRATEGIES)
    """Training backend."""
    optim: Optim = section(Optim, lr=1e-5)
    """Optimizer and schedule."""
    model: CriticModel = section(CriticModel)
    """Weights."""
    ppo_mini_batch_size: int = link("actor_rollout_ref.actor.ppo_mini_batch_size", at_least=1)
    """PROMPTS per optimizer update."""
    ppo_micro_batch_size: int | None = setting(None, at_least=1)
    """Old form of the next key, counted over all devices."""
    ppo_micro_batch_size_per_gpu: int | None = setting(None, at_least=1)
    """SEQUENCES per forward and backward on one device. Null: derived."""
    forward_micro_batch_size: int | None = setting(None, at_least=1)
    """Old form of the next key, counted over all devices."""
    forward_micro_batch_size_per_gpu: int | None = setting(None, at_least=1)
    """Sequences per forward when values are computed. Null: derived."""
    use_dynamic_bsz: bool = link("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill micro-batches by tokens."""
    ppo_max_token_len_per_gpu: int = setting(32768, at_least=1)
    """Tokens per micro-batch then."""
    forward_max_token_len_per_gpu: int = link("critic.ppo_max_token_len_per_gpu", at_least=1)
    """Tokens per forward then."""
    ppo_epochs: int = link("actor_rollout_ref.actor.ppo_epochs", at_least=1)
    """Passes over each batch of rollouts."""
    shuffle: bool = link("actor_rollout_ref.actor.shuffle")
    """Shuffle sequences between mini-batches."""
    data_loader_seed: int | None = link("actor_rollout_ref.actor.data_loader_seed")
    """Seed of that shuffle."""
    grad_clip: float = setting(1.0, above=0)
    """Largest gradient norm."""
    cliprange_value: float = setting(0.5, above=0)
    """How far a value may move from the old one before its loss is clipped."""
    loss_agg_mode: str = link("actor_rollout_ref.actor.loss_agg_mode", one_of=AGGREGATIONS)
    """How token losses become one number."""
    tensor_parallel_size: int = setting(1, at_least=1)
    """Devices that share each weight matrix while training. Not together with LoRA or ulysses_sequence_parallel_size."""
    ulysses_sequence_parallel_size: int = setting(1, at_least=1)
    """Devices that share one sequence. Needs use_remove_padding."""
    nnodes: int = setting(0, at_least=0)
    """Machines of its own, whose devices share the critic and learn together (trainer.runtime=ray). 0: those of the actor."""
    n_gpus_per_node: int = setting(1, at_least=1)
    """Devices of each of them."""
    checkpoint: Checkpoint = section(Checkpoint)
    """Contents of checkpoints."""
    profiler: Profiler = section(Profiler)
    """Profiling of this role."""
    megatron: Megatron = section(Megatron)
    """Settings of the Megatron backend."""
    nccl_timeout: int = inert(600, "set actor_rollout_ref.nccl_timeout")
    """Seconds until a collective operation gives up."""
    kl_ctrl: dict[str, Any] = inert({}, "set algorithm.kl_ctrl")
    """Old Megatron key."""
    rollout_n: int | None = inert(None, "set actor_rollout_ref.rollout.n")
    """Mirror of rollout.n."""
