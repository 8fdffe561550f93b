"""Weight matrices divided over ranks (tensor parallelism, Shoeybi et al. 2019), by the plan transformers ships for a model.

The first matrices of a layer are cut by outputs, so every rank computes some heads and some of the inner states; the last ones
are cut by inputs, and what the ranks find is added up. Between layers every rank holds the same states.

For training the plan becomes torch's parallel styles: weights are DTensors, which sharding, checkpoints and clipping know. An
engine needs no gradients and runs a step many times, so there the same plan gives plain modules with a part of each matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from strop.models.lora import has_adapters

OUTPUTS, INPUTS, PER_HEAD = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""How a module is divided, in the words of transformers. PER_HEAD: a norm that every rank applies to its own heads."""
_HEAD_DIMENSION = 2  # states that a norm per head sees are [batch, tokens, heads, width]


def plan_of(model: Any, size: int, key: str = "tensor_parallel_size") -> dict[str, str]:
    """How each divided module of the decoder's layers is divided, by name. Refuses a model or a `size` that does not fit, and
    names the `key` behind it."""
    if has_adapters(model):
        raise ValueError(
            f"{key}={size} does not go together with LoRA. Set it to 1: adapters are small, and frozen weights "
            "are sharded by fsdp_config."
        )
    plan = getattr(model, "tp_plan", None) or {}
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items() if ".layers." in name}
    if not patterns:
        raise ValueError(f"transformers has no tensor-parallel plan for {type(model).__name__}. Set {key}=1.")
    strange = sorted(set(patterns.values()) - {OUTPUTS, INPUTS, PER_HEAD})
    if strange:
        raise ValueError(
            f"{type(model).__name__} divides its layers in ways that are not supported ({', '.join(strange)}). Set "
            f"{key}=1; fsdp_config and ulysses_sequence_parallel_size divide it too."
        )
    named = {name: module for name, module in model.named_modules() if ".layers." in name}
    found = {name: style for name in named for pattern, style in patterns.items() if pattern.fullmatch(name)}
    _refuse_uneven(model, {name: named[name] for name in found}, found, size, key)
    return found


def _refuse_uneven(model: Any, modules: dict[str, nn.Module], plan: dict[str, str], size: int, key: str) -> None:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    counts = {"attention heads": heads, "key-value heads": getattr(config, "num_key_value_heads", None) or heads}
    for name, style in plan.items():
        module = modules[name]
        if isinstance(module, nn.Linear):
            short = name.rsplit(".", 1)[-1]
            counts[f"{'outputs' if style == OUTPUTS else 'inputs'} of {short}"] = (
                module.out_features if style == OUTPUTS else module.in_features
            )
    for what, count in counts.items():
        if count % size:
            fitting = [one for one in range(1, size) if all(other % one == 0 for other in counts.values())]
            raise ValueError(
                f"tensor_parallel_size={size} does not divide the {count} {what} of the model. Set one of {fitting}."
            )


# --- training -----------------------------------------------------------------------------------------------------------------


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    """Divide the matrices of `model` over the ranks of a mesh of one dimension, in place."""
    styles: dict[str, Any] = {
        OUTPUTS: ColwiseParallel,
        INPUTS: RowwiseParallel,
        PER_HEAD: lambda: SequenceParallel(sequence_dim=_HEAD_DIMENSION, use_local_output=True),
    }
    plan = plan_of(model, mesh.size())
    # Every rank has all numbers (or none: a hollow module), so nothing need be sent.
    parallelize_module(model, mesh, {name: styles[style]() for name, style in plan.items()}, src_data_rank=None)
    for block in dict.fromkeys(name.rpartition(".")[0] for name, style in plan.items() if style == OUTPUTS):
        model.get_submodule(block).register_forward_pre_hook(_enter_once(mesh), with_kwargs=True)


def _enter_once(mesh: DeviceMesh) -> Callable[..., Any]:
    """The states enter attention (or the gated block) as one DTensor instead of one per matrix: their gradients are then added
    up over ranks once, and not for queries, keys and values apart."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def same(states: Tensor) -> Tensor:
            return DTensor.from_local(states, mesh, [Replicate()], run_check=False)

        if args:
            return (same(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": same(kwargs["hidden_states"])}

    return enter


def team_of(rank: int, world: int, size: int) -> Any:
    """The group of `size` neighbouring ranks that this one belongs to. All ranks must ask at the same time."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return groups[rank // size]


# --- sampling -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """This rank's part of dimension `dim` of a weight: part number `part` of `parts`."""

    dim: int
    part: int
    parts: int

    def of(self, weight: Tensor) -> Tensor:
        size = weight.shape[self.dim] // self.parts
        return weight.narrow(self.dim, self.part * size, size)


class Divided:
    """A model of which every rank of `group` holds a part of each matrix. They must be called alike, and say the same.

    The output head is divided as well where the vocabulary allows it: each logit is then computed by one rank, so that all of
    them see the same bits and sample the same token.
    """

    def __init__(self, model: Any, group: Any):
        self.group = group
        self.parts, self.part = dist.get_world_size(group), dist.get_rank(group)
        self.slices: dict[str, Slice] = {}
        self._once: set[str] = set()
        """Biases behind a sum over ranks: the first rank adds them."""
        self._tied: dict[str, str] = {}
        """Names of embeddings whose numbers the output head has too."""
        modules = dict(model.named_modules())
        for name, style in plan_of(model, self.parts, "rollout.tensor_model_parallel_size").items():
            if style == OUTPUTS:
                self._cut(name, modules[name], 0)
            elif style == INPUTS:
                self._cut(name, modules[name], 1)
                modules[name].register_forward_hook(self._add_up)
        self._divide_head(model)

    def _cut(self, name: str, module: nn.Linear, dim: int) -> None:
        for short, weight in list(module.named_parameters(recurse=False)):
            if weight.dim() <= dim:
                self._once.add(f"{name}.{short}")
            else:
                self.slices[f"{name}.{short}"] = Slice(dim, self.part, self.parts)
            own = self._own(f"{name}.{short}", weight.detach())
            module.register_parameter(short, nn.Parameter(own.clone(), requires_grad=False))
        module.out_features, module.in_features = module.weight.shape

    def _own(self, name: str, weight: Tensor) -> Tensor:
        if name in self._once and self.part:
            return torch.zeros_like(weight)
        return self.slices[name].of(weight) if name in self.slices else weight

    def _divide_head(self, model: Any) -> None:
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        if not isinstance(head, nn.Linear) or head.out_features % self.parts:
            return
        names = {id(module): name for name, module in model.named_modules()}
        if head.weight is embeddings.weight:
            self._tied = {f"{names[id(embeddings)]}.weight": f"{names[id(head)]}.weight"}
            model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
        self._cut(names[id(head)], head, 0)
        head.register_forward_hook(self._join)

    def _add_up(self, module: Any, _: Any, output: Tensor) -> Tensor:
        dist.all_reduce(output, group=self.group)
        return output

    def _join(self, module: Any, _: Any, output: Tensor) -> Tensor:
        """Logits of the whole vocabulary, from every rank's part of it."""
        parts = [torch.empty_like(output) for _ in range(self.parts)]
        dist.all_gather(parts, output.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def smallest(self, number: int) -> int:
        """The least of what the ranks of the group say."""
        told = torch.tensor(number)
        dist.all_reduce(told, dist.ReduceOp.MIN, group=self.group)
        return int(told)

    def own(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Of whole weights by name, what this rank holds."""
        for name, weight in weights:
            yield name, self._own(name, weight)
            if name in self._tied:
                yield self._tied[name], self._own(self._tied[name], weight)
