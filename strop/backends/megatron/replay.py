"""Router replay in the layers of megatron-core: the experts of tokens, and updates that take them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from strop.backends.megatron.topology import Topology
from strop.models.layouts.routing import Chosen, LayerExperts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class _RouterReplay:
    """The `router_replay` of a router, by the interface of megatron-core."""

    def __init__(self, layer: LayerExperts) -> None:
        self.layer = layer

    def get_replay_topk(
        self,
        scores: Tensor,
        count: int,
        groups: int | None,
        groups_of_token: int | None,
        choose: Callable[..., Chosen],
    ) -> Chosen:
        return self.layer.choose(scores, lambda: choose(scores, count, groups, groups_of_token))


class ChunkExperts:
    """The routers of the layers of a chunk. The number of a layer counts those with experts."""

    def __init__(self, gpt: Any, config: PreTrainedConfig, topology: Topology) -> None:
        self.topology = topology
        self.shares_tokens = bool(gpt.config.sequence_parallel)
        self.layers: dict[int, LayerExperts] = {}
        dense = getattr(config, "first_k_dense_replace", None) or 0
        for layer in gpt.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is not None:
                found = LayerExperts(int(config.num_experts_per_tok))
                self.layers[layer.layer_number - 1 - dense] = found
                router.router_replay = _RouterReplay(found)

    def begin(self, experts: Tensor | None, length: int, *, learn: bool) -> None:
        """Before the forward pass of a row, padded to `length` tokens: routers take `experts` [n, layers, k].
        With `learn` passes over further rows may come before the backward pass of this one."""
        if experts is None:
            return
        padding = torch.arange(experts.shape[2], device=experts.device)
        padding = padding.expand(length - len(experts), *experts.shape[1:])
        given = torch.cat([experts, padding])
        if self.shares_tokens:
            given = given.chunk(self.topology.sizes.tensor)[self.topology.tensor_rank]
        for number, layer in self.layers.items():
            layer.given = given[:, number]
            if learn and layer.waiting is None:
                layer.waiting = deque()

    def end(self) -> None:
        """After the forward pass. What is computed again later takes its experts from the queue."""
        for layer in self.layers.values():
            layer.given = None

    def forget(self) -> None:
        """After all passes."""
        for layer in self.layers.values():
            layer.end()

    def record(self) -> None:
        """From now on routers note what they choose."""
        for layer in self.layers.values():
            layer.records = True

    def noted(self, tokens: int) -> Iterator[tuple[int, Tensor]]:
        """The experts of a row of so many tokens [tokens, k], by layer; every tensor-parallel rank must
        call it."""
        for number, layer in self.layers.items():
            assert layer.noted is not None
            found = layer.noted.contiguous()
            if self.shares_tokens:
                parts = [torch.empty_like(found) for _ in range(self.topology.sizes.tensor)]
                dist.all_gather(parts, found, group=self.topology.tensor_group)
                found = torch.cat(parts)
            yield number, found[:tokens].cpu()


def routed_layers(config: PreTrainedConfig) -> tuple[int, int]:
    """Layers with experts, and experts of a token."""
    dense = getattr(config, "first_k_dense_replace", None) or 0
    return config.num_hidden_layers - dense, int(config.num_experts_per_tok)
