"""Memory of one model in training, or frozen, on one rank: at rest, in a pass, in an update.

Two backends are modelled: one device (`backends/single.py`: master weights and their low-precision copies,
gradients accumulated in the precision of the master weights) and FSDP2 (`backends/fsdp/`: everything is
sharded, layers are gathered while they compute, embedding and head for the whole pass). A peak is the largest
of a few moments, each a sum of named parts. `model_sections.py` reads models from a configuration.
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
    layers_kept,
    recomputed,
)
from strop.planning.adapters import adapter_weights
from strop.planning.shape import Shape

Parts = dict[str, int]
"""Bytes by what they are for."""
BACKWARD_GATHERS = 3
"""Layers that FSDP2 holds gathered at a time: the running one, the next one, and the buffer it arrives in."""
PREFETCHED = 1 << 29
"""Bytes of offloaded activations that are copied back ahead of their use (backends/activation_offload.py)."""


@dataclass(frozen=True)
class Placement:
    """How a model is distributed over ranks and host memory."""

    ranks: int = 1
    shards: int = 1
    """Ranks that share one copy of the weights (fsdp_size)."""
    tensor: int = 1
    """Ranks among them with tensor parallelism (tensor_parallel_size)."""
    in_host: bool = False
    """Many ranks: weights, gradients and optimizer state are always offloaded to host memory."""
    offloads_module: bool = False
    """One device: the module is offloaded between passes."""
    offloads_optimizer: bool = False
    """One device: master weights and optimizer state are offloaded between updates."""
    keeps_gathered: bool = False
    """reshard_after_forward=false."""
    reduce: int = 4
    """Bytes of a number in the reduce-scatter of gradients."""

    @property
    def sharded(self) -> bool:
        return self.ranks > 1


@dataclass(frozen=True)
class TrainedModel:
    """A role with its own weights, trained or frozen."""

    shape: Shape
    numbers: Numbers = field(default_factory=Numbers)
    placement: Placement = field(default_factory=Placement)
    frozen: bool = False
    checkpointing: str = "full"
    """model.gradient_checkpointing: none, full or selective."""
    offloads_activations: bool = False
    """What the layers keep waits in host memory."""
    lora_rank: int = 0
    four_bit: bool = False
    """model.quantization: linear layers are stored in 4 bits, and dequantised one at a time."""
    kernels: bool = False
    """Norms, gates and the head use Triton kernels (on a GPU)."""
    moments: float = 2
    """Numbers that the optimizer remembers of each weight: 2 for Adam."""

    @property
    def trained(self) -> int:
        """Number of weights that the optimizer updates."""
        if self.frozen:
            return 0
        if self.lora_rank:
            return adapter_weights(self.shape, self.lora_rank)
        return self.shape.parameters

    @property
    def fixed(self) -> int:
        """Number of weights that never change."""
        if self.frozen or self.lora_rank:
            return self.shape.parameters
        return 0

    # --- at rest --------------------------------------------------------------------------------------------

    @property
    def module(self) -> int:
        """Weights for computation on one device: low-precision copies, or the master weights if both have one
        precision."""
        compute = self.numbers.compute
        if not self.fixed:
            return compute * self.trained
        return compute * self.trained + self.shape.stored(compute, four_bit=self.four_bit)

    @property
    def dequantized(self) -> int:
        """The weight of one layer for computation, where it is stored in 4 bits."""
        return self.numbers.compute * self.shape.biggest_linear * self.four_bit

    @property
    def masters(self) -> int:
        """Master weights of one device that only the optimizer uses."""
        if self.numbers.compute == self.numbers.master:
            return 0
        return self.numbers.master * self.trained

    @property
    def weights(self) -> int:
        """Weights on the device while the model learns."""
        numbers = self.numbers
        if not self.placement.sharded:
            return self.module + self.masters
        if self.placement.in_host:
            return 0
        return (numbers.master * self.trained + numbers.compute * self.fixed) // self.placement.shards

    @property
    def optimizer(self) -> int:
        """Optimizer state on the device."""
        if self.placement.in_host:
            return 0
        return int(self.moments * self.numbers.master * self.trained) // self.placement.shards

    @property
    def gradients(self) -> int:
        """All accumulated gradients on the device."""
        if self.placement.in_host:
            return 0
        return self.numbers.master * self.trained // self.placement.shards

    @property
    def in_host(self) -> int:
        """Offloaded state in host memory, of this rank."""
        numbers = self.numbers
        place = self.placement
        if not place.sharded:
            module = self.module * place.offloads_module
            return module + (self.masters + self.optimizer) * place.offloads_optimizer
        if not place.in_host:
            return 0
        each = numbers.master * (2 + self.moments)
        return int(each * self.trained + numbers.compute * self.fixed) // place.shards

    @property
    def at_rest(self) -> Parts:
        """On the device while other models compute."""
        return self.present(computes=False)

    def present(self, *, computes: bool = True, learns: bool = False) -> Parts:
        """Weights and optimizer state on the device while the model computes, or learns."""
        place = self.placement
        if place.sharded:
            return {"weights": self.weights, "optimizer": self.optimizer}
        weights = 0
        optimizer = 0
        if computes or learns or not place.offloads_module:
            weights += self.module
        if learns or not place.offloads_optimizer:
            weights += self.masters
            optimizer = self.optimizer
        return {"weights": weights, "optimizer": optimizer}

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint, over all ranks."""
        return int(self.numbers.master * (1 + self.moments) * self.trained)

    @property
    def loading(self) -> int:
        """Additional memory while the weights are loaded to the device. One device gets them in float32
        first."""
        if self.placement.sharded:
            return self.numbers.compute * self.shape.biggest_matrix
        return max(0, self.shape.stored(4, four_bit=self.four_bit) - self.weights)

    # --- passes ---------------------------------------------------------------------------------------------

    def gathered(self, *, backward: bool) -> int:
        """Gathered weights of FSDP2 at a time."""
        place = self.placement
        if not place.sharded:
            return 0
        layers = BACKWARD_GATHERS * self.shape.largest_layer
        if backward and place.keeps_gathered:
            layers = self.shape.body
        return self.numbers.compute * (layers // place.tensor + self.shape.root)

    def forward(self, tokens: Tokens, *, entropy: bool = True, tempered: bool = False) -> Parts:
        """The peak of a pass without gradients: the largest layer, or the head."""
        layer = layer_forward(self.shape, tokens.all, self.numbers, tensor=self.placement.tensor)
        layer += self.dequantized
        head = head_forward(
            self.shape, tokens, self.numbers, entropy=entropy, tempered=tempered, kernels=self.kernels
        )
        return {"gathered": self.gathered(backward=False), "activations": max(layer, head)}

    def update(self, tokens: Tokens, *, accumulated: bool, entropy: bool = False) -> Parts:
        """The peak of an update. `accumulated`: there are gradients of earlier micro-batches."""
        moments = self.moments_of_update(tokens, accumulated=accumulated, entropy=entropy)
        return max(moments.values(), key=lambda parts: sum(parts.values()))

    def moments_of_update(self, tokens: Tokens, *, accumulated: bool, entropy: bool) -> dict[str, Parts]:
        """The moments of an update that can be its peak."""
        shape = self.shape
        numbers = self.numbers
        tensor = self.placement.tensor
        kernels = self.kernels
        kept = self.kept(tokens)
        one_layer = kept // shape.layers
        if self.offloads_activations:  # one layer and what is copied back ahead are on the device
            kept = min(kept, one_layer + PREFETCHED)
        running = layer_backward(shape, tokens.all, numbers, tensor=tensor) + self.dequantized
        running += tokens.all * recomputed(
            shape, numbers, checkpointing=self.checkpointing, tensor=tensor, kernels=kernels
        )
        whole = not self.lora_rank
        head = head_backward(shape, tokens, numbers, entropy=entropy, trained=whole, kernels=kernels)
        end = end_kept(shape, tokens, numbers, kernels=kernels)
        before = 0
        if accumulated:
            before = self.gradients
        return {
            "head": self._parts(before, 0, kept + end + head),
            "last layer": self._parts(before, self._held(outputs=True), kept + running),
            "first layer": self._parts(
                max(before, self._of_layers), self._held(outputs=True), one_layer + running
            ),
            "embedding": self._parts(self.gradients, self._held(outputs=False), 0),
        }

    def kept(self, tokens: Tokens) -> int:
        """What all layers keep for the backward pass of a micro-batch, on the device or in host memory."""
        return layers_kept(
            self.shape,
            tokens.all,
            self.numbers,
            checkpointing=self.checkpointing,
            tensor=self.placement.tensor,
            kernels=self.kernels,
        )

    def _parts(self, gradients: int, held: int, activations: int) -> Parts:
        return {
            "gradients": gradients + held,
            "gathered": self.gathered(backward=True),
            "activations": activations,
        }

    @property
    def _of_layers(self) -> int:
        """Gradients of all layers, and on one device of an output head that is not tied."""
        if self.lora_rank:
            return self.gradients
        weights = self.shape.body
        if not self.placement.sharded:
            weights += self.shape.head
        return self.gradients * weights // self.shape.parameters

    def _held(self, *, outputs: bool) -> int:
        """Gradients that are not accumulated yet: of the running layer, or of the embedding, which comes
        last."""
        if self.lora_rank:
            return 0
        shape = self.shape
        place = self.placement
        c = self.numbers.compute
        waiting = shape.embedding * (shape.tied or place.sharded) * (not shape.scalar)
        if not place.sharded:
            if outputs:
                return c * (waiting + shape.layer() // 3)
            return c * shape.embedding  # in addition to its float32 sum
        if outputs:
            return c * waiting + (c + 2 * place.reduce) * shape.largest_layer // place.tensor
        return c * (shape.root + shape.embedding) + place.reduce * shape.root

    @property
    def syncing(self) -> int:
        """Memory of a weight sync, layer by layer: the buffer of the all-gather, the weights, and the copy
        for the engine."""
        if not self.placement.sharded:
            return 0
        unit = max(self.shape.largest_layer, self.shape.root)
        return self.numbers.compute * (2 * unit + self.shape.biggest_matrix)
