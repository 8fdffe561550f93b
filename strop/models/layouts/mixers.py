"""Mixers: modules that carry a state along the row (linear attention, state spaces, short convolutions).

In a packed row a mixer would carry its state from one sequence into the next. So it runs over padded rows,
one per sequence: padding is on the right, and no token sees what comes after it. All other modules compute
the packed row. While the rollout engine samples, the engine runs the mixer with the states of its rows.

A mixer is found by what it does: it updates a state in transformers' cache.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from strop.models.lora import base_model
from strop.models.packing import Packing

_UPDATES = frozenset({"update_conv_state", "update_recurrent_state"})
"""Methods of transformers' cache that only mixers call."""
_CACHE_NAMES = ("cache_params", "past_key_values")
"""Names under which mixers take that cache."""


class MixingStep(Protocol):
    """A pass of a rollout engine, which has the states."""

    def mix(self, mixer: MixerForward, hidden: Tensor) -> Tensor: ...


class MixerForward:
    """In the place of the forward of a mixer."""

    def __init__(self, mixer: nn.Module, number: int) -> None:
        self.mixer = mixer
        self.number = number
        """Of the mixers of the model."""
        self.packing: Packing | None = None
        self.rollout: MixingStep | None = None
        parameters = inspect.signature(type(mixer).forward).parameters
        self._cache_name = next(name for name in _CACHE_NAMES if name in parameters)

    @property
    def layer(self) -> int:
        """The number of its layer in transformers' cache."""
        layer = self.mixer.layer_idx
        assert isinstance(layer, int)
        return layer

    @property
    def num_states(self) -> int:
        """Entries of its layer in transformers' cache: several mixers of one layer have one each."""
        return int(getattr(self.mixer, "conv_idx", 0)) + 1

    def __call__(self, hidden_states: Tensor, *arguments: object, **options: Any) -> Tensor:
        packing = options.pop("packing", self.packing)
        options.pop("rollout", None)
        if self.rollout is not None:
            return self.rollout.mix(self, hidden_states)
        if packing is None:
            return self._own(hidden_states, *arguments, **options)
        if packing.slicing is not None:
            raise ValueError(
                f"{type(self.mixer).__name__} carries a state along the row, which ranks cannot share; set "
                "ulysses_sequence_parallel_size=1."
            )
        return self._by_sequence(hidden_states, packing)

    def run(self, hidden: Tensor, cache: object | None) -> Tensor:
        """The mixer over rows [B, T, H] that continue the states in `cache`, which it updates."""
        return self._own(hidden, **{self._cache_name: cache})

    def _own(self, *arguments: object, **options: object) -> Tensor:
        forward: Callable[..., Tensor] = type(self.mixer).forward
        return forward(self.mixer, *arguments, **options)

    def _by_sequence(self, hidden: Tensor, packing: Packing) -> Tensor:
        """Each sequence of the packed row [1, N, H] by itself."""
        rows = hidden[0][:, None]
        if packing.padded is not None:
            rows = packing.padded.spread(rows)
        sizes = [group.rows * group.width for group in packing.groups]
        pieces = []
        for part, group in zip(rows.split(sizes), packing.groups, strict=True):
            out = self._own(part.reshape(group.rows, group.width, -1))
            pieces.append(out.reshape(group.rows * group.width, 1, -1))
        out = torch.cat(pieces)
        if packing.padded is not None:
            out = packing.padded.gather(out)
        return out.transpose(0, 1)


class _PassOn:
    """Before a layer runs: its mixers get the layout that the layer is given, also where the layer does not
    give it to them, and also when gradient checkpointing runs the layer again."""

    def __init__(self) -> None:
        self.mixers: list[MixerForward] = []

    def __call__(self, layer: nn.Module, arguments: tuple[object, ...], options: dict[str, Any]) -> None:
        packing = options.get("packing")
        mask = options.get("attention_mask")
        if packing is None and isinstance(mask, Packing):
            packing = mask
        for mixer in self.mixers:
            mixer.packing = packing


class _Borrow:
    """While the engine runs a model, its mixers have the step: not all models pass it on to their layers."""

    def __init__(self, mixers: list[MixerForward]) -> None:
        self.mixers = mixers

    def begin(self, model: nn.Module, arguments: tuple[object, ...], options: dict[str, Any]) -> None:
        for mixer in self.mixers:
            mixer.rollout = options.get("rollout")

    def end(self, model: nn.Module, arguments: tuple[object, ...], output: object) -> None:
        for mixer in self.mixers:
            mixer.rollout = None


class _Inject:
    """Some models with a head (Mamba2) do not pass the layout on to the model inside, which would give it to
    its layers: it is added to that call. Where that model does not give it to its layers either (Mamba,
    Falcon-Mamba), it takes the place of the attention mask, which a packed row has none of and layers do get:
    a hook of the layers would not know the layout when gradient checkpointing runs them again."""

    def __init__(self, name: str) -> None:
        """`name`: the argument of the model inside."""
        self._name = name
        self._packing: Packing | None = None

    def begin(self, model: nn.Module, arguments: tuple[object, ...], options: dict[str, Any]) -> None:
        self._packing = options.get("packing")

    def end(self, model: nn.Module, arguments: tuple[object, ...], output: object) -> None:
        self._packing = None

    def add(
        self, inner: nn.Module, arguments: tuple[object, ...], options: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]] | None:
        if self._packing is None or "packing" in options:
            return None
        return arguments, {**options, self._name: self._packing}


def _layout_argument(model: nn.Module) -> str | None:
    """The argument of its forward that reaches its layers: `packing` if it passes on what it does not name,
    else its mask."""
    forward = inspect.unwrap(type(model).forward)
    parameters = inspect.signature(forward).parameters
    read: set[object] = set()
    for step in dis.get_instructions(forward):
        if "LOAD" in step.opname:  # from Python 3.13 on, one instruction may load two names
            read.update(step.argval if isinstance(step.argval, tuple) else [step.argval])
    for name, one in parameters.items():
        if one.kind is one.VAR_KEYWORD and name in read:
            return "packing"
    return "attention_mask" if "attention_mask" in parameters else None


_prepared: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a model has mixers, of those that were asked for."""


def prepare_mixers(model: nn.Module) -> bool:
    """Have the mixers of a model run sequence by sequence from now on, wherever it is given packed rows.
    Whether there are any."""
    core = base_model(model)
    if core not in _prepared:
        hooks: dict[nn.Module, _PassOn] = {}
        forwards = []
        for number, (layer, mixer) in enumerate(list(_mixers(core))):
            if layer not in hooks:
                hooks[layer] = _PassOn()
                layer.register_forward_pre_hook(hooks[layer], with_kwargs=True)
            forward = MixerForward(mixer, number)
            hooks[layer].mixers.append(forward)
            mixer.forward = forward
            forwards.append(forward)
        if forwards:
            borrow = _Borrow(forwards)
            core.register_forward_pre_hook(borrow.begin, with_kwargs=True)
            core.register_forward_hook(borrow.end, always_call=True)
            inner = core.base_model
            argument = _layout_argument(inner)
            if inner is not core and argument is not None:
                inject = _Inject(argument)
                core.register_forward_pre_hook(inject.begin, with_kwargs=True)
                core.register_forward_hook(inject.end, always_call=True)
                inner.register_forward_pre_hook(inject.add, with_kwargs=True)
        _prepared[core] = bool(hooks)
    return _prepared[core]


def mixers_of(model: nn.Module) -> list[nn.Module]:
    """The mixers of a model."""
    return [part for part in base_model(model).modules() if _is_mixer(part)]


def mixer_names(model: nn.Module) -> list[str]:
    """Paths of the mixers in the model."""
    return [name for name, part in base_model(model).named_modules() if _is_mixer(part)]


def _mixers(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Mixers, each with the module that calls it."""
    for parent in model.modules():
        for child in parent.children():
            if _is_mixer(child):
                yield parent, child


def _is_mixer(part: nn.Module) -> bool:
    return isinstance(getattr(part, "layer_idx", None), int) and _updates_states(type(part))


def _updates_states(kind: type[nn.Module]) -> bool:
    for function in vars(kind).values():
        if not isinstance(function, FunctionType):
            continue
        if _UPDATES & set(inspect.unwrap(function).__code__.co_names):
            return True
    return False
