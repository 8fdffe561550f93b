"""Experts that the routers of a mixture chose in a pass, and passes that take them again (router replay).

A small change of the weights, or another order of a sum, moves a token to another expert, and its log-prob
jumps. With `router_replay.mode=R2` an update sends every token to the experts that it had when the old
log-probs were computed; with R3 the old log-probs and the update send it to those that it had in the rollout
engine. The weights of these experts in the sum are recomputed, so routers are trained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strop.models.packing import NOTHING, Inputs
from strop.types import Batch

Chosen = tuple[Tensor, Tensor]
"""Scores and numbers of the experts of each token, [n, k] each."""


class LayerExperts:
    """The experts of one layer in the current pass."""

    def __init__(self, count: int) -> None:
        self.count = count
        """Experts of a token."""
        self.records = False
        self.noted: Tensor | None = None
        self.given: Tensor | None = None
        self.waiting: deque[Tensor] | None = None
        """Set where a pass over further rows comes before the backward pass of these: what was given, for
        layers that are computed again."""

    def choose(self, scores: Tensor, own: Callable[[], Chosen]) -> Chosen:
        """The given experts, or those that `own` chooses by `scores` [n, experts]."""
        indices = self.given
        if indices is not None and self.waiting is not None:
            self.waiting.append(indices)
        elif indices is None and self.waiting:
            indices = self.waiting.popleft()
        if indices is not None:
            assert len(indices) == len(scores), (indices.shape, scores.shape)
            return scores.gather(-1, indices), indices
        values, indices = own()
        if self.records:
            self.noted = indices.detach()
        return values, indices

    def end(self) -> None:
        self.records = False
        self.noted = None
        self.given = None
        self.waiting = None


class _Choice(TorchFunctionMode):
    """Inside it the router of a layer takes the experts that `LayerExperts` says."""

    def __init__(self, layer: LayerExperts, experts: int) -> None:
        super().__init__()
        self.layer = layer
        self.experts = experts
        self.calls = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in (torch.topk, Tensor.topk):
            return function(*args, **kwargs)
        scores: Tensor = args[0]
        count = args[1] if len(args) > 1 else kwargs["k"]
        # Routers with groups of experts choose groups before, by other scores.
        if scores.dim() != 2 or scores.shape[1] != self.experts or count != self.layer.count:
            return function(*args, **kwargs)
        self.calls += 1
        return torch.return_types.topk(self.layer.choose(scores, lambda: function(*args, **kwargs)))


class ModelRouting:
    """The routers of a Hugging Face model, by layer."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[LayerExperts] = []
        self.count = 0
        self.experts = 0
        """Of the layer that has most."""
        for part in model.modules():
            if _is_router(part):
                self.layers.append(_watch(part))
                self.count = self.layers[-1].count
                self.experts = max(self.experts, _experts_of(part) or 0)
        if not self.layers:
            raise ValueError(
                f"router_replay.mode: {type(model).__name__} has no router of experts that is known here. "
                "Set router_replay.mode=disabled."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Layers with experts, and experts of a token."""
        return len(self.layers), self.count


def _is_router(part: nn.Module) -> bool:
    has_sizes = isinstance(getattr(part, "top_k", None), int) and _experts_of(part) is not None
    return has_sizes and isinstance(getattr(part, "weight", None), Tensor)


def _experts_of(part: Any) -> int | None:
    found = getattr(part, "num_experts", None) or getattr(part, "n_routed_experts", None)
    return found if isinstance(found, int) else None


def _watch(router: Any) -> LayerExperts:
    """Let the router ask `LayerExperts` from now on."""
    layer = LayerExperts(int(router.top_k))
    own = router.forward
    experts = _experts_of(router)
    assert experts is not None

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not layer.records and layer.given is None and not layer.waiting:
            return own(*args, **kwargs)
        with _Choice(layer, experts) as mode:
            found = own(*args, **kwargs)
        if mode.calls != 1:
            raise ValueError(
                f"router_replay.mode: {type(router).__name__} chooses experts in a way that is not known "
                "here. Set router_replay.mode=disabled."
            )
        return found

    router.forward = forward
    return layer


routings: WeakKeyDictionary[nn.Module, ModelRouting] = WeakKeyDictionary()


def routing_of(model: nn.Module) -> ModelRouting:
    """The routers of a model; made once."""
    if model not in routings:
        routings[model] = ModelRouting(model)
    return routings[model]


def begin_routing(model: nn.Module, batch: Batch, inputs: Inputs, *, records: bool) -> None:
    """Before a pass: routers record what they choose, or take the experts of the batch, also where layers are
    computed again in the backward pass."""
    end_routing(model)
    if batch.experts is None and not records:
        return
    routing = routing_of(model)
    for layer in routing.layers:
        layer.records = records
    if batch.experts is not None:
        given = spread_experts(batch.experts, inputs).to(inputs.ids.device)
        for number, layer in enumerate(routing.layers):
            layer.given = given[:, number]


def end_routing(model: nn.Module) -> None:
    """Routers choose for themselves again."""
    known = routings.get(model)
    for layer in known.layers if known is not None else ():
        layer.end()


def recorded_experts(model: nn.Module, inputs: Inputs) -> Tensor:
    """After a pass that recorded: the experts of each token [B, longest, layers, k]."""
    layers = routing_of(model).layers
    noted = [layer.noted for layer in layers if layer.noted is not None]
    assert len(noted) == len(layers), "every router was called"
    table = torch.stack(noted, 1).cpu()
    return of_tokens(table, inputs)


def of_tokens(table: Tensor, inputs: Inputs) -> Tensor:
    """Numbers of experts by place [n, layers, k] -> by token of each sequence [B, longest, layers, k]."""
    found = table[inputs.places.clamp(min=0)]
    found[inputs.places == NOTHING] = 0
    return found


def spread_experts(experts: Tensor, inputs: Inputs) -> Tensor:
    """The experts of each place [n, layers, k] of experts by token. Padding visits the first experts: a
    token's experts must be different."""
    layers, count = experts.shape[2:]
    spread = torch.arange(count).expand(inputs.ids.numel(), layers, count).clone()
    real = inputs.places != NOTHING
    spread[inputs.places[real]] = experts[:, : real.shape[1]][real].long()
    return spread


def auxiliary_loss(model: nn.Module, output: object) -> Tensor:
    """The load-balancing loss that a mixture of experts returned."""
    loss = getattr(output, "aux_loss", None)
    if not isinstance(loss, Tensor):
        raise ValueError(f"{type(model).__name__} is not a mixture of experts: no load-balancing loss.")
    return loss
