"""LoRA adapters of the divided linear layers of megatron-core.

The adapters are those of peft: one pair A and B for each linear module of Hugging Face. Where a matrix is
divided by rows, every rank has all of A and its rows of B; where it is divided by columns, every rank has its
columns of A and all of B. Ranks exchange A x, which has `lora_rank` numbers per token.

Experts and routers are parameters without a linear module: as in peft, B A is added to the weight before it
is used. A rank has A of its own experts, and all of B, in whose rows peft has the experts last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import register_parametrization

from strop.backends.megatron.library import megatron
from strop.backends.megatron.names import Part, Place
from strop.backends.megatron.stage import StageChunk
from strop.models.lora import FIRST_ADAPTER, adapted_layers, adapted_weight, base_name


@dataclass(frozen=True)
class MatrixAdapter:
    """A [rank, in] and B [out, rank]."""

    a: nn.Parameter
    b: nn.Parameter
    scale: float

    def product(self) -> Tensor:
        """This rank's part of what the adapter adds to the weight, in float32, without a gradient."""
        return self.scale * (self.b.detach().float() @ self.a.detach().float())

    def added_to(self, weight: Tensor) -> Tensor:
        """This rank's part of the weight with the adapter."""
        return torch.addmm(weight, self.b, self.a, alpha=self.scale)


@dataclass(frozen=True)
class ExpertAdapter:
    """A [own experts x rank, in] and B [out, rank x all experts]."""

    a: nn.Parameter
    b: nn.Parameter
    scale: float
    experts: int
    """Of this rank."""
    first: int

    def _factors(self) -> tuple[Tensor, Tensor]:
        """B [own experts, out, rank] and A [own experts, rank, in]."""
        a = self.a.unflatten(0, (self.experts, -1))
        b = self.b.unflatten(1, (a.shape[1], -1))[..., self.first : self.first + self.experts]
        return b.permute(2, 0, 1), a

    def product(self) -> Tensor:
        b, a = self._factors()
        return self.scale * (b.detach().float() @ a.detach().float())

    def added_to(self, weight: Tensor) -> Tensor:
        return torch.baddbmm(weight, *self._factors(), alpha=self.scale)


Adapter = MatrixAdapter | ExpertAdapter


class Switch:
    """Whether the adapters of a model take part."""

    on = True


class AdaptedLinear(nn.Module):
    """A linear layer with adapters for ranges of its outputs: a fused projection has several."""

    def __init__(self, base: Any, switch: Switch):
        super().__init__()
        self.base = base
        self.switch = switch
        self.divided = _division(base)
        self.shares_tokens = bool(getattr(base, "sequence_parallel", False))
        self.adapters: list[tuple[int, MatrixAdapter]] = []
        """By the first of their outputs."""
        self.weights = nn.ParameterList()

    def add(self, start: int, adapter: MatrixAdapter) -> None:
        self.adapters.append((start, adapter))
        self.adapters.sort(key=lambda found: found[0])
        self.weights.extend([adapter.a, adapter.b])

    def forward(self, states: Tensor) -> Any:
        found = self.base(states)
        if not self.switch.on:
            return found
        if self.divided is None:
            return found + self._added(states, found.shape[-1])
        product, bias = found
        return product + self._added(states, product.shape[-1]), bias

    def _added(self, states: Tensor, width: int) -> Tensor:
        """What the adapters add: [N, 1, width]."""
        adapters = [adapter for _, adapter in self.adapters]
        inner = self._exchanged(F.linear(states, torch.cat([adapter.a for adapter in adapters])))
        parts = inner.split([len(adapter.a) for adapter in adapters], -1)
        added: list[Tensor] = []
        done = 0
        for (start, adapter), part in zip(self.adapters, parts, strict=True):
            if start > done:
                added.append(inner.new_zeros(*inner.shape[:-1], start - done))
            added.append(F.linear(part, adapter.b) * adapter.scale)
            done = start + len(adapter.b)
        if done < width:
            added.append(inner.new_zeros(*inner.shape[:-1], width - done))
        return torch.cat(added, -1)

    def _exchanged(self, inner: Tensor) -> Tensor:
        """A x of the tokens that B is applied to. Each tensor-parallel rank has a term of it where the inputs
        are divided, and a term of its gradient where the outputs are."""
        if self.divided is None or self.base.tp_group.size() == 1:
            return inner
        regions = megatron("tensor_parallel")
        exchange = {
            ("outputs", False): regions.copy_to_tensor_model_parallel_region,
            ("outputs", True): regions.gather_from_sequence_parallel_region,
            ("inputs", False): regions.reduce_from_tensor_model_parallel_region,
            ("inputs", True): regions.reduce_scatter_to_sequence_parallel_region,
        }[self.divided, self.shares_tokens]
        found: Tensor = exchange(inner, group=self.base.tp_group)
        return found


def _division(layer: Any) -> str | None:
    """What of a linear layer is divided over tensor-parallel ranks."""
    if isinstance(layer, megatron("tensor_parallel").ColumnParallelLinear):
        return "outputs"
    if isinstance(layer, megatron("tensor_parallel").RowParallelLinear):
        return "inputs"
    return None


class AddedToWeight(nn.Module):
    """The parametrization of a weight with an adapter."""

    def __init__(self, adapter: Adapter, switch: Switch):
        super().__init__()
        self.adapter = adapter
        self.switch = switch
        self.weights = nn.ParameterList([adapter.a, adapter.b])

    def forward(self, weight: Tensor) -> Tensor:
        return self.adapter.added_to(weight) if self.switch.on else weight


class StageAdapters:
    """The adapters of this rank's stage."""

    def __init__(self, module: Any, chunks: Sequence[StageChunk], places: Mapping[str, Place]) -> None:
        """Add the adapters of a peft model to the layers of these chunks. `places` are those of the weights
        of the stage, by their names in the peft model."""
        self.switch = Switch()
        self.by_weight: dict[str, Adapter] = {}
        """By the name of the weight that they are added to."""
        self.places: dict[str, Place] = {}
        self._owners = _owners(chunks)
        self._linears: dict[int, AdaptedLinear] = {}
        paths = {part: name for name, part in module.named_modules()}
        for layer in adapted_layers(module):
            weight = adapted_weight(paths, layer)
            if weight not in places:
                continue  # of another stage
            place = places[weight]
            if hasattr(layer, "parameter_name"):
                adapter = self._add_to_weight(paths[layer], layer, place)
            else:
                adapter = self._add_to_linear(paths[layer], layer, place)
            self.by_weight[weight] = adapter

    def _add_to_linear(self, name: str, layer: Any, place: Place) -> Adapter:
        parameter = place.part.parameter
        if id(parameter) not in self._linears:
            parent, attribute, linear, _ = self._owners[id(parameter)]
            self._linears[id(parameter)] = AdaptedLinear(linear, self.switch)
            setattr(parent, attribute, self._linears[id(parameter)])
        adapted = self._linears[id(parameter)]
        adapter = _new_matrices(place.read(), layer)
        adapted.add(place.part.start, adapter)
        a_dim = 1 if adapted.divided == "inputs" else None
        b_dim = 0 if adapted.divided == "outputs" else None
        # What every rank has whole gets a term of its gradient on each, where they share the tokens.
        shares = adapted.shares_tokens
        a_place = Place(Part(adapter.a), dim=a_dim, partial_gradient=shares and a_dim is None)
        b_place = Place(Part(adapter.b), dim=b_dim, partial_gradient=shares and b_dim is None)
        self._note(name, a_place, b_place)
        return adapter

    def _add_to_weight(self, name: str, layer: Any, place: Place) -> Adapter:
        parameter = place.part.parameter
        _, _, owner, attribute = self._owners[id(parameter)]
        if place.expert:
            adapter: Adapter = _new_experts(parameter, layer)
            self._note(
                name,
                Place(Part(adapter.a), dim=0, expert=True),
                Place(Part(adapter.b), partial_gradient=True),
            )
        else:
            adapter = _new_matrices(parameter, layer)
            partial = place.partial_gradient
            self._note(
                name,
                Place(Part(adapter.a), partial_gradient=partial),
                Place(Part(adapter.b), partial_gradient=partial),
            )
        register_parametrization(owner, attribute, AddedToWeight(adapter, self.switch), unsafe=True)
        return adapter

    def _note(self, name: str, a: Place, b: Place) -> None:
        self.places[f"{name}.lora_A.{FIRST_ADAPTER}.weight"] = a
        self.places[f"{name}.lora_B.{FIRST_ADAPTER}.weight"] = b


def _owners(chunks: Sequence[StageChunk]) -> dict[int, tuple[nn.Module, str, nn.Module, str]]:
    """By the id of a parameter of a layer: the module that has it, the module that has that one, and their
    names there."""
    found: dict[int, tuple[nn.Module, str, nn.Module, str]] = {}
    for chunk in chunks:
        for parent in chunk.gpt.decoder.modules():
            for attribute, part in parent.named_children():
                for name, parameter in part.named_parameters(recurse=False):
                    found[id(parameter)] = (parent, attribute, part, name)
    return found


def refuse_other_adapters(module: nn.Module) -> None:
    """Refuse a model with adapters that the divided layers do not have."""
    for name, layer in module.named_modules():
        if isinstance(getattr(layer, "lora_B", None), nn.ModuleDict):
            _refuse(name, layer)


def _refuse(name: str, layer: Any) -> None:
    plain = base_name(name)
    if not plain.startswith("model.layers."):
        raise ValueError(
            f"strategy=megatron has adapters for the layers of the decoder, not for {plain}. Leave it out of "
            "model.target_modules, or set strategy=fsdp."
        )
    dropout = getattr(layer.lora_dropout[FIRST_ADAPTER], "p", 0.0)
    if dropout:
        raise ValueError(
            f"lora_dropout={dropout} with strategy=megatron: tensor-parallel ranks would drop different "
            "inputs. Set lora_dropout=0, or strategy=fsdp."
        )
    if layer.lora_variant.get(FIRST_ADAPTER) is not None or layer.lora_B[FIRST_ADAPTER].bias is not None:
        raise ValueError(
            f"The adapter of {plain} is more than the matrices A and B of LoRA (DoRA, or a bias). Set "
            "strategy=fsdp."
        )


def _new_matrices(weight: Tensor, layer: Any) -> MatrixAdapter:
    rank = layer.lora_A[FIRST_ADAPTER].weight.shape[0]
    scale = float(layer.scaling[FIRST_ADAPTER])
    return MatrixAdapter(_zeros(weight, rank, weight.shape[1]), _zeros(weight, weight.shape[0], rank), scale)


def _new_experts(weight: Tensor, layer: Any) -> ExpertAdapter:
    own, outputs, inputs = weight.shape
    ranks = layer.lora_A[FIRST_ADAPTER].weight.shape[0]  # of all experts together
    return ExpertAdapter(
        _zeros(weight, ranks // layer.num_experts * own, inputs),
        _zeros(weight, outputs, ranks),
        float(layer.scaling[FIRST_ADAPTER]),
        experts=own,
        first=own * megatron("parallel_state").get_expert_model_parallel_rank(),
    )


def _zeros(weight: Tensor, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device))
