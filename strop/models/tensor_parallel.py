"""Tensor parallelism (Shoeybi et al. 2019): weight matrices divided over ranks, by the plan that transformers
ships for a model.

The first matrices of a layer are divided by outputs, so every rank computes some heads and some of the inner
states; the last ones are divided by inputs, and an all-reduce sums the results. Between layers every rank has
the same states.

For training the plan becomes torch's parallel styles: weights are DTensors, which sharding, checkpoints and
clipping support. An engine needs no gradients and runs a step many times, so there the same plan gives plain
modules with a part of each matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from strop.models.lora import has_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTPUTS = "colwise"
INPUTS = "rowwise"
PER_HEAD = "replicated_with_grad_allreduce"
"""How a module is divided, in the words of transformers. PER_HEAD: a norm that every rank applies to its own
heads."""
_HEAD_DIMENSION = 2  # states that a norm per head sees are [batch, tokens, heads, width]


def plan_of(model: nn.Module, size: int, key: str = "tensor_parallel_size") -> dict[str, str]:
    """How each divided module of the decoder's layers is divided, by name. Refuses a model or a `size` that
    does not fit, and names the `key` of the configuration."""
    if has_adapters(model):
        raise ValueError(
            f"{key}={size} does not go together with LoRA. Set it to 1: adapters are small, and frozen "
            "weights are sharded by fsdp_config."
        )
    patterns: dict[re.Pattern[str], str] = {}
    for name, style in (getattr(model, "tp_plan", None) or {}).items():
        if ".layers." in name:
            patterns[re.compile(re.escape(name).replace(r"\*", r"\d+"))] = style
    if not patterns:
        raise ValueError(f"transformers has no tensor-parallel plan for {type(model).__name__}. Set {key}=1.")
    strange = sorted(set(patterns.values()) - {OUTPUTS, INPUTS, PER_HEAD})
    if strange:
        raise ValueError(
            f"{type(model).__name__} divides its layers in ways that are not supported "
            f"({', '.join(strange)}). Set {key}=1; fsdp_config and ulysses_sequence_parallel_size divide it "
            "too."
        )
    modules: dict[str, nn.Module] = {}
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        for pattern, style in patterns.items():
            if ".layers." in name and pattern.fullmatch(name):
                modules[name] = module
                found[name] = style
    _refuse_uneven(cast("PreTrainedModel", model), modules, found, size, key)
    return found


def _refuse_uneven(
    model: PreTrainedModel, modules: dict[str, nn.Module], plan: dict[str, str], size: int, key: str
) -> None:
    """Refuse a `size` that does not divide the heads or the matrices of the model."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    counts = {
        "attention heads": heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
    }
    for name, style in plan.items():
        module = modules[name]
        if isinstance(module, nn.Linear):
            short = name.rsplit(".", 1)[-1]
            if style == OUTPUTS:
                counts[f"outputs of {short}"] = module.out_features
            else:
                counts[f"inputs of {short}"] = module.in_features
    for what, count in counts.items():
        if count % size:
            fitting = [one for one in range(1, size) if all(other % one == 0 for other in counts.values())]
            raise ValueError(
                f"{key}={size} does not divide the {count} {what} of the model. Set one of {fitting}."
            )


# --- training -----------------------------------------------------------------------------------------------


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the matrices of `model` over the ranks of a mesh of one dimension, in place."""
    styles: dict[str, Any] = {
        OUTPUTS: ColwiseParallel,
        INPUTS: RowwiseParallel,
        PER_HEAD: lambda: SequenceParallel(sequence_dim=_HEAD_DIMENSION, use_local_output=True),
    }
    plan = plan_of(model, mesh.size())
    # Every rank has all weights (or none: the module is on the meta device), so nothing need be sent.
    parallelize_module(
        model, mesh, {name: styles[style]() for name, style in plan.items()}, src_data_rank=None
    )
    for block in dict.fromkeys(name.rpartition(".")[0] for name, style in plan.items() if style == OUTPUTS):
        model.get_submodule(block).register_forward_pre_hook(_enter_once(mesh), with_kwargs=True)


Arguments = tuple[Tensor, ...]
Keywords = dict[str, Tensor]


def _enter_once(mesh: DeviceMesh) -> Callable[[nn.Module, Arguments, Keywords], tuple[Arguments, Keywords]]:
    """A hook by which the states enter attention (or the gated MLP) as one DTensor instead of one per matrix:
    their gradients are then summed over ranks once, and not for queries, keys and values separately."""

    def replicated(states: Tensor) -> Tensor:
        return DTensor.from_local(states, mesh, [Replicate()], run_check=False)

    def enter(_: nn.Module, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        if args:
            return (replicated(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": replicated(kwargs["hidden_states"])}

    return enter


def team_of(rank: int, world: int, size: int) -> dist.ProcessGroup:
    """The process group of `size` neighbouring ranks that this one belongs to. All ranks must call it at the
    same time."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return groups[rank // size]


# --- sampling -----------------------------------------------------------------------------------------------


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
    """A model of which every rank of `group` holds a part of each matrix. All ranks must call it alike, and
    get the same outputs.

    The output head is divided as well where the vocabulary allows it: each logit is then computed by one
    rank, so that all of them see the same bits and sample the same token.
    """

    def __init__(self, model: PreTrainedModel, group: dist.ProcessGroup):
        self.group = group
        self.parts = dist.get_world_size(group)
        self.part = dist.get_rank(group)
        self.slices: dict[str, Slice] = {}
        self._once: set[str] = set()
        """Biases after an all-reduce: the first rank adds them."""
        self._tied: dict[str, str] = {}
        """Names of embeddings that the output head is tied to."""
        modules: dict[str, Any] = dict(model.named_modules())
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

    def _divide_head(self, model: PreTrainedModel) -> None:
        head = model.get_output_embeddings()
        embeddings = model.get_input_embeddings()
        if not isinstance(head, nn.Linear) or head.out_features % self.parts:
            return
        names = {id(module): name for name, module in model.named_modules()}
        if head.weight is embeddings.weight:
            self._tied = {f"{names[id(embeddings)]}.weight": f"{names[id(head)]}.weight"}
            model.config.get_text_config().tie_word_embeddings = False
            model.config.tie_word_embeddings = False
        self._cut(names[id(head)], head, 0)
        head.register_forward_hook(self._join)

    def _add_up(self, module: nn.Module, _: object, output: Tensor) -> Tensor:
        dist.all_reduce(output, group=self.group)
        return output

    def _join(self, module: nn.Module, _: object, output: Tensor) -> Tensor:
        """Logits of the whole vocabulary, by an all-gather of every rank's part."""
        parts = [torch.empty_like(output) for _ in range(self.parts)]
        dist.all_gather(parts, output.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def smallest(self, number: int) -> int:
        """The minimum over the ranks of the group."""
        minimum = torch.tensor(number)
        dist.all_reduce(minimum, dist.ReduceOp.MIN, group=self.group)
        return int(minimum)

    def own(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The parts of whole weights that this rank holds, by name."""
        for name, weight in weights:
            yield name, self._own(name, weight)
            if name in self._tied:
                yield self._tied[name], self._own(self._tied[name], weight)
