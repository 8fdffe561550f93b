"""Quantised copies of the linear layers of a model, for rollout.quantization.

Copied are the weights of fused projections, of products that add to the residual stream, and of plain linear
layers, base layers of LoRA included. The output head, embeddings, norms, routers, adapters and experts that
are kept as one tensor stay as they are. The copies are used while the engine samples; training does not see
them. When weights change they are written again at the same addresses, because recorded CUDA graphs read
them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.models.changes import Change, SetAttribute
from strop.models.lora import base_model
from strop.models.projections.fused import Forward, FusedProjection
from strop.models.residual import AddingLinear
from strop.rollout.native.cpu.frozen_weights import SeenWeight
from strop.rollout.native.cpu.int8_rows import PackedInt8, packed_int8
from strop.rollout.native.cpu.packed_adapter import PackedAdapter
from strop.rollout.native.quantization.formats import (
    INT8,
    Format,
    add_product,
    format_for,
    product,
    quantize_rows,
)
from strop.rollout.native.quantization.producers import producers

log = logging.getLogger(__name__)

_ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Names of modules that choose experts: small, and a wrong choice costs more than a rounding. Some are a
linear layer, some have one inside (`gate.wg`, `router.layer`)."""
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedWeight:
    """The weights of one product in 8 bits: those of one layer, or of several with the same inputs."""

    def __init__(self, form: Format, layers: Sequence[nn.Linear]) -> None:
        self._format = form
        self._layers = list(layers)
        self.num_weights = sum(layer.weight.numel() for layer in layers)
        self.outputs = sum(layer.out_features for layer in layers)
        self._values = torch.empty(0)
        self._scales = torch.empty(0)

    @property
    def num_bytes(self) -> int:
        """Memory of values and scales."""
        return self.num_weights + 4 * self.outputs

    @property
    def allocated(self) -> bool:
        return len(self._values) > 0

    def refresh(self) -> None:
        """Quantise the weights as they are now, at the old addresses."""
        if not self.allocated:
            shape = (self.outputs, self._layers[0].in_features)
            device = self._layers[0].weight.device
            self._values = torch.empty(shape, dtype=self._format.dtype, device=device)
            self._scales = torch.empty(self.outputs, dtype=torch.float32, device=device)
        start = 0
        for layer in self._layers:
            end = start + layer.out_features
            weight = layer.weight.detach()
            quantize_rows(self._format, weight, self._values[start:end], self._scales[start:end])
            start = end

    def free(self) -> None:
        self._values = torch.empty(0)
        self._scales = torch.empty(0)

    def __call__(self, states: Tensor, bias: Tensor | None) -> Tensor:
        return product(self._format, states, self._values, self._scales, bias)

    def add_to(self, stream: Tensor, states: Tensor, bias: Tensor | None, *, in_place: bool) -> Tensor:
        """The stream plus the product."""
        return add_product(self._format, stream, states, self._values, self._scales, bias, in_place=in_place)


class CompiledWeight(QuantizedWeight):
    """The same on a CPU, in the layout of cpu/int8_rows.c."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__(INT8, layers)
        self._packed: PackedInt8 | None = None
        self._seen: list[SeenWeight] = []

    def refresh(self) -> None:
        if self._packed is None:
            self._packed = _room(self._layers)
            assert self._packed is not None
            self._values, self._scales = self._packed.values, self._packed.scales
            self._seen = [SeenWeight() for _ in self._layers]
        start = 0
        for layer, seen in zip(self._layers, self._seen):
            if layer.weight.requires_grad or not seen.is_unchanged(layer.weight):
                self._packed.fill(layer.weight, start)
                seen.remember(layer.weight)
            start += layer.out_features

    def free(self) -> None:
        super().free()
        self._packed = None

    def takes(self, states: Tensor, rank: int = 0) -> bool:
        """Whether it can multiply these states, and add an adapter of this rank."""
        return states.dtype == self._layers[0].weight.dtype

    def adapter(self, a: Tensor, b: Tensor, scale: float) -> PackedAdapter:
        assert self._packed is not None
        return self._packed.adapter(a, b, scale)

    def __call__(self, states: Tensor, bias: Tensor | None, adapter: PackedAdapter | None = None) -> Tensor:
        assert self._packed is not None
        return self._packed(states, bias, adapter)

    def add_to(self, stream: Tensor, states: Tensor, bias: Tensor | None, *, in_place: bool) -> Tensor:
        added = self(states, bias)
        return stream.add_(added) if in_place else stream + added


def _room(layers: Sequence[nn.Linear]) -> PackedInt8 | None:
    """Room for the weights of layers, where their products can be compiled."""
    weight = layers[0].weight
    if weight.device.type != "cpu":
        return None
    return packed_int8(weight.dtype, sum(layer.out_features for layer in layers), layers[0].in_features)


def _quantized_weight(form: Format, layers: Sequence[nn.Linear]) -> QuantizedWeight:
    compiled = form is INT8 and _room(layers) is not None
    return CompiledWeight(layers) if compiled else QuantizedWeight(form, layers)


class _SetProduct:
    """The matrix product of a fused projection."""

    def __init__(self, fused: FusedProjection, weight: QuantizedWeight) -> None:
        self._fused = fused
        self._weight = weight

    def do(self) -> None:
        self._fused.multiply = self._weight

    def undo(self) -> None:
        self._fused.multiply = None

    def can_undo(self) -> bool:
        return True


class QuantizedLayers:
    """The copies of one model. Without a format (`name` is None) there are none."""

    def __init__(self, model: nn.Module, name: str | None) -> None:
        self._model = model
        self._format: Format | None = None
        divided = getattr(model, "divided", None)
        if name is not None and divided is not None:
            raise ValueError(
                f"rollout.quantization={name} with weights divided over {divided.parts} ranks is not "
                "supported. Set rollout.tensor_model_parallel_size=1, or rollout.quantization=null."
            )
        if name is not None:
            self._format = format_for(name, next(model.parameters()).device)
        self._weights: list[QuantizedWeight] = []
        self._changes: list[Change] = []
        self._is_current = False
        self._applied = False
        self.compiled: dict[nn.Module, CompiledWeight] = {}
        """Copies of plain linear layers that can add an adapter in their product."""

    @property
    def num_bytes(self) -> int:
        """Memory of the copies, once they were made for the first time."""
        return sum(weight.num_bytes for weight in self._weights)

    @property
    def missing_bytes(self) -> int:
        """Memory of copies that were freed and will be made again."""
        return sum(weight.num_bytes for weight in self._weights if not weight.allocated)

    def apply(self, fused: Sequence[FusedProjection]) -> None:
        """Use the copies; make them if weights changed. `fused`: the projections of the model."""
        if self._format is None or self._applied:
            return
        if not self._weights:
            self._find(self._format, fused)
        self._refresh()
        for change in self._changes:
            change.do()
        self._applied = True

    def undo(self) -> None:
        """The layers compute with their own weights again."""
        if self._applied:
            for change in reversed(self._changes):
                change.undo()
            self._applied = False

    def drop(self) -> None:
        """The weights changed, or are about to: the copies are out of date."""
        self._is_current = False

    def refresh(self) -> None:
        """Make copies in use again after weights changed."""
        if self._applied:
            self._refresh()

    def free(self) -> None:
        """Free the memory of the copies if no layer uses them. No CUDA graph that was recorded before may be
        used afterwards."""
        self._is_current = False
        if self._applied:
            return
        for weight in self._weights:
            weight.free()

    def _refresh(self) -> None:
        if self._is_current:
            return
        with torch.no_grad():
            for weight in self._weights:
                weight.refresh()
        first = next(self._model.parameters())
        if first.device.type == "cuda":  # the engine may sample in another stream
            torch.cuda.current_stream(first.device).synchronize()
        self._is_current = True

    def _find(self, form: Format, fused: Sequence[FusedProjection]) -> None:
        for projection in fused:
            if _fits(form, projection.layers):
                weight = _quantized_weight(form, projection.layers)
                self._weights.append(weight)
                self._changes.append(_SetProduct(projection, weight))
        for layer in _single_layers(self._model):
            if _fits(form, [layer]):
                weight = _quantized_weight(form, [layer])
                self._weights.append(weight)
                self._changes.append(SetAttribute(layer, "forward", _forward(layer, weight)))
                if isinstance(weight, CompiledWeight) and type(layer) is nn.Linear:
                    self.compiled[layer] = weight
        self._changes += producers(self._model, form)
        total = sum(weight.numel() for weight in self._model.parameters())
        copied = sum(weight.num_weights for weight in self._weights)
        if copied == 0:
            raise ValueError(
                f"rollout.quantization={form.name}: {type(base_model(self._model)).__name__} has no linear "
                f"layer whose sizes are multiples of {form.multiple}. Set rollout.quantization=null."
            )
        log.info(
            "rollout.quantization=%s: %.1f%% of the weights (%d of %d) are quantised for sampling, %.2f GiB; "
            "the others (embeddings, head, norms, routers, experts in one tensor) keep their precision.",
            form.name,
            100 * copied / total,
            copied,
            total,
            self.num_bytes / 2**30,
        )


def _single_layers(model: nn.Module) -> Iterator[nn.Linear]:
    """Linear layers that compute on their own: not the output head, and nothing that has another forward."""
    head = base_model(model).get_output_embeddings()
    heads = {head, getattr(head, "base_layer", None)}
    for path, part in model.named_modules():
        if type(part) not in (nn.Linear, AddingLinear) or part in heads or "forward" in part.__dict__:
            continue
        if ".lora_" not in path and _ROUTERS.isdisjoint(path.split(".")):
            assert isinstance(part, nn.Linear)
            yield part


def _fits(form: Format, layers: Sequence[nn.Linear]) -> bool:
    """Whether a product of this format can replace that of these layers."""
    for layer in layers:
        weight = layer.weight
        if isinstance(weight, DTensor) or weight.dtype not in _PLAIN:
            return False
    outputs = sum(layer.out_features for layer in layers)
    return layers[0].in_features % form.multiple == 0 and outputs % form.multiple == 0


def _forward(layer: nn.Linear, weight: QuantizedWeight) -> Forward:
    if not isinstance(layer, AddingLinear):
        return lambda states: weight(states, layer.bias)

    def forward(states: Tensor) -> Tensor:
        stream = layer.__dict__.pop("stream", None)
        if stream is None:
            return weight(states, layer.bias)
        return weight.add_to(stream, states, layer.bias, in_place=layer.overwrites)

    return forward
