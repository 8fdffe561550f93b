"""Memory of one model in training, or frozen, on one rank: at rest, in a pass, in an update.

Two backends are followed: one device (`backends/single.py`: masters beside rounded weights, gradients summed in the masters'
precision) and FSDP2 (`backends/fsdp.py`: pieces of everything, layers gathered while they compute, embedding and head gathered
for the whole pass). A peak is the largest of a few moments; each is written down as its parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from strop.planning.activations import (
    Numbers,
    Tokens,
    end_kept,
    head_backward,
    head_forward,
    layer_backward,
    layer_forward,
    layer_kept,
    layers_kept,
)
from strop.planning.shape import Shape

Parts = dict[str, int]
"""Bytes by what they are for."""
BACKWARD_GATHERS = 3
"""Layers that FSDP2 holds gathered at a time: the running one, the next one, and the buffer it arrives in."""


@dataclass(frozen=True)
class Placement:
    """How a model lies on the ranks."""

    ranks: int = 1
    shards: int = 1
    """Ranks that share one copy of the weights (fsdp_size); each has a piece of its own."""
    tensor: int = 1
    """Neighbours among them that compute each layer's matrices together (tensor_parallel_size)."""
    in_host: bool = False
    """Many ranks: weights, gradients and optimizer rest in host memory, always."""
    parks_module: bool = False
    """One device: the module waits in host memory between passes."""
    parks_optimizer: bool = False
    """One device: masters and optimizer wait in host memory between updates."""
    keeps_gathered: bool = False
    """reshard_after_forward=false."""
    reduce: int = 4
    """Bytes of a number while gradients are added up over ranks."""

    @property
    def sharded(self) -> bool:
        return self.ranks > 1


@dataclass(frozen=True)
class TrainedModel:
    """A role with weights of its own."""

    shape: Shape
    numbers: Numbers = field(default_factory=Numbers)
    placement: Placement = field(default_factory=Placement)
    frozen: bool = False
    checkpointed: bool = True
    lora_rank: int = 0
    kernels: bool = False
    """Norms, gates and the head's passes over logits are kernels: on a GPU with Triton."""
    moments: int = 2
    """Numbers that the optimizer remembers of each weight: 2 for Adam."""

    @property
    def trained(self) -> int:
        """Weights that the optimizer moves."""
        if self.frozen:
            return 0
        return self.shape.adapters(self.lora_rank) if self.lora_rank else self.shape.parameters

    @property
    def fixed(self) -> int:
        return self.shape.parameters if self.frozen or self.lora_rank else 0

    # --- at rest -----------------------------------------------------------------------------------------------------------

    @property
    def module(self) -> int:
        """Weights that compute, as one device holds them: rounded copies, or the masters where those need no rounding."""
        return self.numbers.compute * (self.trained + self.fixed)

    @property
    def masters(self) -> int:
        """Weights of one device that only the optimizer sees."""
        return 0 if self.numbers.compute == self.numbers.master else self.numbers.master * self.trained

    @property
    def weights(self) -> int:
        """On the device while it learns."""
        numbers, place = self.numbers, self.placement
        if not place.sharded:
            return self.module + self.masters
        return 0 if place.in_host else (numbers.master * self.trained + numbers.compute * self.fixed) // place.shards

    @property
    def optimizer(self) -> int:
        return 0 if self.placement.in_host else self.moments * self.numbers.master * self.trained // self.placement.shards

    @property
    def gradients(self) -> int:
        """All of them, as they wait for the optimizer."""
        return 0 if self.placement.in_host else self.numbers.master * self.trained // self.placement.shards

    @property
    def in_host(self) -> int:
        """What rests in the memory of the machine, for this rank."""
        numbers, place = self.numbers, self.placement
        if not place.sharded:
            return self.module * place.parks_module + (self.masters + self.optimizer) * place.parks_optimizer
        if not place.in_host:
            return 0
        each = numbers.master * (2 + self.moments)
        return (each * self.trained + numbers.compute * self.fixed) // place.shards

    @property
    def at_rest(self) -> Parts:
        """On the device while others compute."""
        return self.present(computes=False)

    def present(self, *, computes: bool = True, learns: bool = False) -> Parts:
        """On the device while it computes, or learns."""
        place = self.placement
        if place.sharded:
            return {"weights": self.weights, "optimizer": self.optimizer}
        module = self.module if computes or learns or not place.parks_module else 0
        beside = learns or not place.parks_optimizer
        return {"weights": module + self.masters * beside, "optimizer": self.optimizer * beside}

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint, over all ranks."""
        return self.numbers.master * (1 + self.moments) * self.trained

    @property
    def loading(self) -> int:
        """Beside the weights themselves, while they are brought to the device. One device gets them in float32 first."""
        if self.placement.sharded:
            return self.numbers.compute * self.shape.biggest_matrix
        return max(0, 4 * self.shape.parameters - self.weights)

    # --- passes ------------------------------------------------------------------------------------------------------------

    def gathered(self, *, backward: bool) -> int:
        place, c = self.placement, self.numbers.compute
        if not place.sharded:
            return 0
        layers = self.shape.body if backward and place.keeps_gathered else BACKWARD_GATHERS * self.shape.largest_layer
        return c * (layers // place.tensor + self.shape.root)

    def forward(self, tokens: Tokens, *, entropy: bool = True, tempered: bool = False) -> Parts:
        """A pass without gradients: the largest layer, or the head."""
        layer = layer_forward(self.shape, tokens.all, self.numbers, tensor=self.placement.tensor)
        head = head_forward(self.shape, tokens, self.numbers, entropy=entropy, tempered=tempered, kernels=self.kernels)
        return {"gathered": self.gathered(backward=False), "activations": max(layer, head)}

    def update(self, tokens: Tokens, *, accumulated: bool, entropy: bool = False) -> Parts:
        """The largest moment of an update. `accumulated`: micro-batches before this one have left gradients."""
        moments = self.moments_of_update(tokens, accumulated=accumulated, entropy=entropy)
        return max(moments.values(), key=lambda parts: sum(parts.values()))

    def moments_of_update(self, tokens: Tokens, *, accumulated: bool, entropy: bool) -> dict[str, Parts]:
        shape, numbers, tensor = self.shape, self.numbers, self.placement.tensor
        kernels = self.kernels
        kept = layers_kept(shape, tokens.all, numbers, checkpointed=self.checkpointed, tensor=tensor, kernels=kernels)
        running = layer_backward(shape, tokens.all, numbers, tensor=tensor)
        if self.checkpointed:  # one layer in full; what enters it is kept already
            again = layer_kept(shape, numbers, sparse=shape.sparse_layers > 0, tensor=tensor, kernels=kernels)
            running += tokens.all * (again - numbers.residual * shape.hidden)
        whole = not self.lora_rank
        head = head_backward(shape, tokens, numbers, entropy=entropy, trained=whole, kernels=kernels)
        before = self.gradients if accumulated else 0
        return {
            "head": self._parts(before, 0, kept + end_kept(shape, tokens, numbers, kernels=kernels) + head),
            "last layer": self._parts(before, self._held(outputs=True), kept + running),
            "first layer": self._parts(max(before, self._of_layers), self._held(outputs=True), kept // shape.layers + running),
            "embedding": self._parts(self.gradients, self._held(outputs=False), 0),
        }

    def _parts(self, gradients: int, held: int, activations: int) -> Parts:
        return {"gradients": gradients + held, "gathered": self.gathered(backward=True), "activations": activations}

    @property
    def _of_layers(self) -> int:
        """Gradients of all layers, and of a head of its own on one device."""
        if self.lora_rank:
            return self.gradients
        own_head = 0 if self.placement.sharded else self.shape.head
        return self.gradients * (self.shape.body + own_head) // self.shape.parameters

    def _held(self, *, outputs: bool) -> int:
        """Gradients that are not added up yet: of the running layer, or of the embedding, which comes last."""
        if self.lora_rank:
            return 0
        shape, place, c = self.shape, self.placement, self.numbers.compute
        waiting = shape.embedding * (shape.tied or place.sharded) * (not shape.scalar)
        if not place.sharded:  # in the end the embedding's gradient beside its float32 sum
            return c * (waiting + shape.layer() // 3 if outputs else shape.embedding)
        if outputs:
            return c * waiting + (c + 2 * place.reduce) * shape.largest_layer // place.tensor
        return c * (shape.root + shape.embedding) + place.reduce * shape.root

    @property
    def syncing(self) -> int:
        """While gathered weights are handed to an engine, unit by unit: the buffer, the weights, the copy that is given out."""
        if not self.placement.sharded:
            return 0
        unit = max(self.shape.largest_layer, self.shape.root)
        return self.numbers.compute * (2 * unit + self.shape.biggest_matrix)
