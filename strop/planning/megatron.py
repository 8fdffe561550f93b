"""Memory and time of a model with strategy=megatron: what each rank holds of it, the passes of its
pipeline, and its communication.

A rank has the layers of its stage. Their matrices are divided over `tensor` ranks, their experts over
`experts` ranks of the stage. Masters and moments are divided over data-parallel ranks
(use_distributed_optimizer). With LoRA only adapters have masters, gradients and moments. Communication is not
overlapped with computation here: megatron-core overlaps it only with Transformer Engine.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from strop.config.checkpointing import checkpointing_of
from strop.config.schema.actor import ActorConfig, RefConfig
from strop.config.schema.critic import CriticConfig
from strop.config.schema.megatron import MegatronConfig
from strop.config.schema.model import FsdpConfig, ModelConfig, OptimConfig
from strop.planning.activations import (
    FLOAT32,
    Numbers,
    Tokens,
    end_kept,
    head_backward,
    layer_backward,
    layers_kept,
    recomputed,
)
from strop.planning.adapters import dense_adapters, expert_adapters
from strop.planning.devices import PlannedCluster
from strop.planning.model_sections import (
    BYTES,
    frozen_model,
    lora_rank_of,
    optimizer_moments,
    planned_shape,
    trained_model,
)
from strop.planning.shape import Shape
from strop.planning.training import Parts, Placement, TrainedModel

Section = ActorConfig | RefConfig | CriticConfig


@dataclass(frozen=True)
class Division:
    """How ranks share a model (the sizes of a `megatron` section)."""

    ranks: int
    tensor: int = 1
    stages: int = 1
    context: int = 1
    experts: int = 1
    virtual: int = 1

    @property
    def data(self) -> int:
        """Copies of the model, each with rows of its own."""
        return max(1, self.ranks // (self.tensor * self.stages * self.context))

    @property
    def expert_copies(self) -> int:
        """Ranks of a stage with the same experts."""
        return max(1, self.ranks // (self.stages * self.experts))


def division_of(settings: MegatronConfig, ranks: int) -> Division:
    return Division(
        ranks,
        settings.tensor_model_parallel_size,
        settings.pipeline_model_parallel_size,
        settings.context_parallel_size,
        settings.expert_model_parallel_size,
        settings.virtual_pipeline_model_parallel_size or 1,
    )


def stage_layers(shape: Shape, division: Division) -> int:
    """Layers of a stage; the last one may have fewer."""
    return -(-shape.layers // division.stages)


def last_stage_layers(shape: Shape, division: Division) -> int:
    """Layers of the last stage (num_layers_in_last_pipeline_stage where it differs)."""
    return shape.layers - (division.stages - 1) * stage_layers(shape, division)


def dense_share(shape: Shape, division: Division) -> int:
    """Weights of one rank that are not experts. The embedding is on the first stage, the head on the last."""
    layers = shape.body - shape.sparse_layers * shape.expert_weights
    root = shape.embedding + shape.head
    if division.stages > 1:
        root = max(shape.embedding, shape.head)
    return (layers * stage_layers(shape, division) // shape.layers + root) // division.tensor


def expert_share(shape: Shape, division: Division) -> int:
    """Weights of one rank that are experts."""
    return stage_sparse_layers(shape, division) * shape.expert_weights // division.experts


def stage_sparse_layers(shape: Shape, division: Division) -> int:
    """Layers of a stage with experts, at most."""
    return min(shape.sparse_layers, stage_layers(shape, division))


@dataclass(frozen=True)
class MegatronModel(TrainedModel):
    """A role with strategy=megatron, on one rank."""

    division: Division = Division(1)
    divides_optimizer: bool = True
    """use_distributed_optimizer."""
    divides_rows: bool = True
    """sequence_parallel."""
    offloads_weights: bool = False
    """param_offload: between passes."""
    offloads_moments: bool = False
    """optimizer_offload: between updates."""

    @property
    def own(self) -> int:
        """Weights that this rank computes with, without adapters."""
        return dense_share(self.shape, self.division) + expert_share(self.shape, self.division)

    @property
    def dense_trained(self) -> int:
        """Weights of this rank that are trained and no experts."""
        shape = self.shape
        division = self.division
        if self.frozen:
            return 0
        if not self.lora_rank:
            return dense_share(shape, division)
        sparse = stage_sparse_layers(shape, division)
        return dense_adapters(shape, self.lora_rank, stage_layers(shape, division), sparse, division.tensor)

    @property
    def experts_trained(self) -> int:
        """Weights of experts on this rank that are trained."""
        if self.frozen:
            return 0
        if not self.lora_rank:
            return expert_share(self.shape, self.division)
        sparse = stage_sparse_layers(self.shape, self.division)
        return sparse * expert_adapters(self.shape, self.lora_rank, self.division.experts)

    @property
    def trained_here(self) -> int:
        """Weights of this rank that have gradients."""
        return self.dense_trained + self.experts_trained

    @property
    def optimized(self) -> int:
        """Weights whose masters and moments this rank has."""
        if not self.divides_optimizer:
            return self.trained_here
        division = self.division
        dense = self.dense_trained // (division.data * division.context)
        return dense + self.experts_trained // division.expert_copies

    @property
    def computes_with(self) -> int:
        """Bytes of the weights that passes use, adapters included."""
        weights = self.own
        if self.lora_rank:
            weights += self.trained_here
        return self.numbers.compute * weights

    @property
    def weights(self) -> int:
        return self.computes_with + self.numbers.master * self.optimized

    @property
    def optimizer(self) -> int:
        return int(self.moments * self.numbers.master * self.optimized)

    @property
    def gradients(self) -> int:
        """They are summed in the precision of the masters, and divided at the end of an update."""
        return self.numbers.master * (self.trained_here + self.optimized)

    @property
    def adapted_experts(self) -> int:
        """Bytes of this rank's experts of one layer with their adapters added, which exist while the layer
        computes, and until its backward pass if it is not computed again."""
        if self.frozen or not self.lora_rank or self.shape.experts is None or not self.shape.experts.adapted:
            return 0
        return self.numbers.compute * self.shape.expert_weights // self.division.experts

    @property
    def in_host(self) -> int:
        waiting = self.computes_with * self.offloads_weights
        masters = self.numbers.master * self.optimized
        return waiting + (masters + self.optimizer) * self.offloads_moments

    def present(self, *, computes: bool = True, learns: bool = False) -> Parts:
        weights = 0
        optimizer = 0
        if computes or learns or not self.offloads_weights:
            weights += self.computes_with
        if learns or not self.offloads_moments:
            weights += self.numbers.master * self.optimized
            optimizer = self.optimizer
        return {"weights": weights, "optimizer": optimizer}

    def gathered(self, *, backward: bool) -> int:
        """Weights are never gathered for a pass."""
        return 0

    def kept(self, tokens: Tokens) -> int:
        """The first stage starts a pass of each stage before the first one comes back (1F1B); with virtual
        stages one more for each part but the first."""
        division = self.division
        kept = layers_kept(
            self.shape,
            tokens.all,
            self.numbers,
            checkpointing=self.checkpointing,
            tensor=division.tensor,
            kernels=self.kernels,
        )
        if self.checkpointing == "full" and self.divides_rows:
            kept //= division.tensor
        if self.checkpointing == "none":
            kept += self.adapted_experts * self.shape.sparse_layers
        if division.virtual > 1:
            kept += kept * (division.stages - 1) // (division.stages * division.virtual)
        return kept

    def moments_of_update(self, tokens: Tokens, *, accumulated: bool, entropy: bool) -> dict[str, Parts]:
        shape = self.shape
        tensor = self.division.tensor
        running = layer_backward(shape, tokens.all, self.numbers, tensor=tensor)
        running += tokens.all * recomputed(
            shape, self.numbers, checkpointing=self.checkpointing, tensor=tensor, kernels=self.kernels
        )
        running += 2 * self.adapted_experts  # and their gradient, of which those of A and B are made
        # Logits and the gradient of the head are those of this rank's share of the vocabulary.
        whole = not self.lora_rank
        head = head_backward(
            shape, tokens, self.numbers, entropy=entropy, trained=whole, kernels=self.kernels
        )
        head = head // tensor + end_kept(shape, tokens, self.numbers, kernels=self.kernels)
        kept = self.kept(tokens)
        last = kept // self.division.stages
        return {
            "first stage": {"gradients": self.gradients, "activations": kept + running},
            "last stage": {"gradients": self.gradients, "activations": last + max(head, running)},
        }

    @property
    def syncing(self) -> int:
        """Weights are sent one at a time, whole. What an adapter adds is computed in float32."""
        biggest = max(self.shape.biggest_matrix, self.shape.expert_weights // 3)
        added = 0
        if self.lora_rank:
            added = FLOAT32 * biggest
        return 2 * self.numbers.compute * biggest + added


# --- time ---------------------------------------------------------------------------------------------------


def bubble(division: Division, micro_batches: int) -> float:
    """Time of a pipeline in relation to one without stages: each device waits for the others at the start and
    at the end (Narayanan et al. 2021)."""
    return 1 + (division.stages - 1) / (max(1, micro_batches) * division.virtual)


def tensor_bytes(shape: Shape, numbers: Numbers, division: Division, tokens: int) -> float:
    """Bytes that one rank sends in a forward pass for tensor parallelism: states are gathered and
    reduce-scattered around attention and around the feed-forward part."""
    layers = shape.layers / division.stages
    return 4 * numbers.compute * shape.hidden * tokens * layers * (division.tensor - 1) / division.tensor


def context_bytes(shape: Shape, numbers: Numbers, division: Division, tokens: int) -> float:
    """Bytes that one rank sends in a forward pass for context parallelism: queries, keys and values of its
    tokens to the ranks of their heads, and results back."""
    layers = shape.layers / division.stages
    states = 2 * (shape.queries + shape.keys) / division.tensor
    return numbers.compute * states * tokens * layers * (division.context - 1) / division.context


def expert_bytes(shape: Shape, numbers: Numbers, division: Division, tokens: int) -> float:
    """Bytes that one rank sends in a forward pass for expert parallelism: every token to its experts and
    back. With tensor parallelism each of its ranks has a part of the tokens."""
    if shape.experts is None:
        return 0.0
    layers = shape.sparse_layers / division.stages
    away = (division.experts - 1) / division.experts
    copies = 2 * shape.experts.chosen * numbers.compute * shape.hidden
    return copies * tokens / division.tensor * layers * away


def update_bytes(model: MegatronModel) -> float:
    """Bytes that one rank sends in an update for data parallelism: gradients are reduced, and weights
    gathered."""
    return (model.numbers.master + model.numbers.compute) * model.trained_here


# --- from a configuration -----------------------------------------------------------------------------------


def trained_role(
    section: ActorConfig | CriticConfig,
    model: ModelConfig,
    fsdp: FsdpConfig,
    cluster: PlannedCluster,
    *,
    scalar: bool = False,
    on_device: bool = False,
) -> TrainedModel:
    """A model with an optimizer, by the strategy of its section."""
    if section.strategy == "megatron":
        return megatron_role(section.megatron, model, section.optim, cluster, scalar=scalar)
    parts = section.tensor_parallel_size
    return trained_model(model, fsdp, section.optim, cluster, parts, scalar=scalar, on_device=on_device)


def megatron_role(
    settings: MegatronConfig,
    model: ModelConfig,
    optim: OptimConfig,
    cluster: PlannedCluster,
    *,
    scalar: bool = False,
) -> MegatronModel:
    """A model with an optimizer and strategy=megatron."""
    plain = _megatron_model(settings, model, cluster, scalar=scalar)
    return dataclasses.replace(plain, moments=optimizer_moments(optim), lora_rank=lora_rank_of(model))


def frozen_role(
    section: RefConfig, model: ModelConfig, fsdp: FsdpConfig, cluster: PlannedCluster
) -> TrainedModel:
    """A model that only runs forward passes, by the strategy of its section."""
    if section.strategy == "megatron":
        return frozen_megatron(section.megatron, model, cluster)
    return frozen_model(model, fsdp, cluster, section.tensor_parallel_size)


def frozen_megatron(settings: MegatronConfig, model: ModelConfig, cluster: PlannedCluster) -> MegatronModel:
    """A model with strategy=megatron that only runs forward passes."""
    return dataclasses.replace(_megatron_model(settings, model, cluster), frozen=True)


def _megatron_model(
    settings: MegatronConfig, model: ModelConfig, cluster: PlannedCluster, *, scalar: bool = False
) -> MegatronModel:
    compute = BYTES[settings.dtype]
    residual = compute
    if model.fp32_residual:
        residual = 4
    return MegatronModel(
        planned_shape(model, scalar=scalar),
        Numbers(compute, 4, residual),
        Placement(ranks=cluster.ranks, shards=cluster.ranks, tensor=settings.tensor_model_parallel_size),
        checkpointing=checkpointing_of(model),
        kernels=not cluster.device.is_cpu,
        division=division_of(settings, cluster.ranks),
        divides_optimizer=settings.use_distributed_optimizer,
        divides_rows=settings.sequence_parallel,
        offloads_weights=settings.param_offload,
        offloads_moments=settings.optimizer_offload,
    )
