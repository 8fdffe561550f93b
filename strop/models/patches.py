"""Everything that changes a Hugging Face module, as one ordered list of patches.

`MODEL_PATCHES` are applied when a model is built (models/build.py), `DEVICE_PATCHES` when its device and
precision are known (backends, the native rollout engine). Kernels are checked against plain torch at that
moment, once, before any training pass. The rollout engine adds patches of its own while it samples; they are
listed in the same way in rollout/native/borrowed_model.py. `model.patches` of the configuration switches
patches off; `undo_patches` restores a module.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from strop.extras import require
from strop.models import fused_modules
from strop.models.attention import SetAttention, padded_attention
from strop.models.changes import Change, SetAttribute, SetClass, done, evaluating, undo_changes
from strop.models.layouts.delta_rule import DELTA_RULE
from strop.models.layouts.wide_stream import widened
from strop.models.lora import base_model
from strop.models.lora_cpu.layers import lean_lora_layers
from strop.models.lora_gpu.layers import fused_lora_layers
from strop.models.projections.fused import fused_qkv_layers
from strop.models.residual import AddingLinear, adding_layer, fused_residual_adds
from strop.models.self_check import refused
from strop.models.varlen import UseFlash, checked_flash, head_shapes
from strop.models.vision.passes import find_vision_part, towers_of
from strop.models.vision.tower import divided_products, tower_changes
from strop.registry import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

Chosen = str | Sequence[str]
"""The key model.patches: auto, off, or names of patches."""


@dataclass(frozen=True)
class PatchContext:
    """What a patch depends on besides the module."""

    attention: str | None = None
    """The attention function that override_config names."""
    fp32_residual: bool = False
    use_liger: bool = False
    device: torch.device = torch.device("cpu")
    """Where the module computes."""
    dtype: torch.dtype = torch.float32
    """In which precision it computes."""
    sequence_parallel: int = 1


@dataclass(frozen=True)
class Patch:
    """A named change to modules. `apply` makes it and returns what it changed, for `undo`."""

    name: str
    applies: Callable[[nn.Module, PatchContext], bool]
    """Whether it can be used for this module at all. Runs no kernel."""
    apply: Callable[[nn.Module, PatchContext], list[Change]]
    undo: Callable[[Sequence[Change]], None] = undo_changes
    required: bool = False
    """The results would be wrong without it: model.patches cannot switch it off."""


# --- changes of single patches ------------------------------------------------------------------------------


_rotary_users: Counter[str] = Counter()
"""Models that use the fused rotary function, by the Python module that has it."""


class SetRotary:
    """The rotary function of a Python module. Models of one family share it: the last one restores it."""

    def __init__(self, home: ModuleType, function: fused_modules.Rotate) -> None:
        self._home = home
        self._function = function

    def do(self) -> None:
        _rotary_users[self._home.__name__] += 1
        setattr(self._home, fused_modules.ROTARY, self._function)

    def undo(self) -> None:
        _rotary_users[self._home.__name__] -= 1
        current = getattr(self._home, fused_modules.ROTARY)
        if not _rotary_users[self._home.__name__] and current is self._function:
            setattr(self._home, fused_modules.ROTARY, vars(self._function)["replaced"])

    def can_undo(self) -> bool:
        return True


# --- the patches --------------------------------------------------------------------------------------------


def always(model: nn.Module, context: PatchContext) -> bool:
    """For patches that every module can have."""
    return True


def on_gpu(model: nn.Module, context: PatchContext) -> bool:
    """For patches that pay on a GPU only."""
    return context.device.type in fused_modules.DEVICES and context.dtype != torch.float64


def _with_kernels(model: nn.Module, context: PatchContext) -> bool:
    return fused_modules.has_kernels(context.device, context.dtype)


def _set_attention(model: nn.Module, context: PatchContext) -> list[Change]:
    return done([SetAttention(model, context.attention or padded_attention(cast("PreTrainedModel", model)))])


def _no_dropout(model: nn.Module, context: PatchContext) -> list[Change]:
    """With dropout, the policy that is trained would not be the policy that sampled."""
    return done(_dropouts(model))


def _dropouts(model: nn.Module) -> Iterator[Change]:
    """Modules of dropout, and rates that other modules keep (`residual_dropout`, `router_jitter_noise`)."""
    for module in model.modules():
        if type(module).__name__ == "PhimoeTopKRouter":  # draws experts in training; its rate is no noise
            yield SetClass(module, evaluating(type(module)))
            continue
        if isinstance(module, nn.Dropout) and module.p:
            yield SetAttribute(module, "p", 0.0)
        rates = [name for name, value in vars(module).items() if isinstance(value, float) and value]
        for name in rates:
            if "drop" in name or "jitter" in name:
                yield SetAttribute(module, name, 0.0)


def _liger(model: nn.Module, context: PatchContext) -> list[Change]:
    """Liger changes modules in ways of its own: what is different afterwards is recorded."""
    liger = require("liger_kernel.transformers.monkey_patch", extra="liger", why="model.use_liger")
    owners: list[nn.Module | ModuleType] = list(model.modules())
    owners += [sys.modules[name] for name in sorted({type(part).__module__ for part in model.modules()})]
    before = [dict(vars(owner)) for owner in owners]
    liger._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
    changes: list[Change] = []
    for owner, attributes in zip(owners, before, strict=True):
        after = dict(vars(owner))
        for name in after.keys() | attributes.keys():
            if after.get(name) is attributes.get(name):
                continue
            if name in attributes:
                setattr(owner, name, attributes[name])
            else:
                del vars(owner)[name]
            changes += done([SetAttribute(owner, name, after.get(name))])
    return changes


def _residual_add(model: nn.Module, context: PatchContext) -> list[Change]:
    changes: list[Change] = []
    for layer, branch, inner in list(fused_residual_adds(model)):
        changes.append(SetClass(layer, adding_layer(type(layer))))
        changes.append(SetClass(branch, AddingLinear))
        changes.append(SetClass(inner, AddingLinear))
        # What the second product adds to was made inside the layer.
        changes.append(SetAttribute(inner, "overwrites", True))
    return done(changes)


def _rms_norm(model: nn.Module, context: PatchContext) -> list[Change]:
    found = fused_modules.fused_norms(model, context.device, context.dtype)
    return done(SetClass(part, fused) for part, fused in found)


def _gated_mlp(model: nn.Module, context: PatchContext) -> list[Change]:
    found = fused_modules.fused_gated_mlps(model, context.device, context.dtype)
    return done(SetClass(part, fused) for part, fused in found)


def _rotary(model: nn.Module, context: PatchContext) -> list[Change]:
    found = fused_modules.fused_rotary(model, context.device, context.dtype)
    return done(SetRotary(home, function) for home, function in found)


def _lora_linear(model: nn.Module, context: PatchContext) -> list[Change]:
    find = fused_lora_layers if on_gpu(model, context) else lean_lora_layers
    return done(SetClass(layer, faster) for layer, faster in list(find(model)))


def _fused_qkv(model: nn.Module, context: PatchContext) -> list[Change]:
    narrow = context.dtype in (torch.bfloat16, torch.float16)
    return done(list(fused_qkv_layers(model))) if narrow else []


def _shapes(model: nn.Module, context: PatchContext) -> list[Any]:
    found = head_shapes(model, context.device, context.dtype, context.sequence_parallel)
    return sorted(found, key=lambda shape: (shape.group, shape.size))


def _flash_attention(model: nn.Module, context: PatchContext) -> list[Change]:
    checked = [shape for shape in _shapes(model, context) if checked_flash(shape) is not None]
    return done(UseFlash(shape) for shape in checked)


def _tower(model: nn.Module, context: PatchContext) -> list[Change]:
    changes: list[Change] = []
    for tower in towers_of(model):
        changes += done(tower_changes(tower, context.device, context.dtype))
    part = find_vision_part(model)
    if part is not None and on_gpu(model, context) and context.dtype != torch.float32:
        changes += done(divided_products(part.module))
    return changes


MODEL_PATCHES = (
    Patch("attention_function", always, _set_attention, required=True),
    Patch("no_dropout", always, _no_dropout, required=True),
    Patch("fp32_residual", lambda model, context: context.fp32_residual, lambda model, _: widened(model)),
    Patch("liger", lambda model, context: context.use_liger, _liger),
)
DEVICE_PATCHES = (
    Patch("residual_add", on_gpu, _residual_add),
    Patch("rms_norm", _with_kernels, _rms_norm),
    Patch("gated_mlp", _with_kernels, _gated_mlp),
    Patch("rotary", _with_kernels, _rotary),
    Patch("fused_qkv_training", on_gpu, _fused_qkv),
    Patch("lora_linear", always, _lora_linear),
    Patch("flash_attention", lambda model, context: bool(_shapes(model, context)), _flash_attention),
    Patch("tower", always, _tower),
)
ROLLOUT_NAMES = (
    "rollout_attention",
    "eval_mode",
    "residual_in_place",
    "fp32_head",
    *("few_rows", "fused_qkv", "fused_lora"),
    "state_precision",
    *("rms_norm_cpu", "gated_mlp_cpu", "rotary_cpu", "packed_linear", "decode_attention"),
    DELTA_RULE,
)
"""The patches of rollout/native/borrowed_model.py, rollout/native/cpu and layouts/delta_rule.py."""


# --- applying and undoing -----------------------------------------------------------------------------------


@dataclass
class _Record:
    """What was applied to one model."""

    chosen: Chosen = "auto"
    applied: list[tuple[Patch, list[Change]]] = field(default_factory=list)
    sampling: list[str] = field(default_factory=list)
    """Names of the patches that the rollout engine uses."""

    @property
    def names(self) -> list[str]:
        return [patch.name for patch, _ in self.applied]


_records: weakref.WeakKeyDictionary[nn.Module, _Record] = weakref.WeakKeyDictionary()


def _record_of(model: nn.Module) -> _Record:
    """The record of a model, also of one that adapters are wrapped around."""
    for part in model.modules():
        if part in _records:
            return _records[part]
    return _records.setdefault(model, _Record())


def choose_patches(model: nn.Module, chosen: Chosen) -> None:
    """Remember model.patches for a model; unknown names are refused."""
    known = [patch.name for patch in (*MODEL_PATCHES, *DEVICE_PATCHES)] + list(ROLLOUT_NAMES)
    if isinstance(chosen, str) and chosen not in ("auto", "off"):
        hint = did_you_mean(chosen, ["auto", "off", *known])
        raise ValueError(f"model.patches={chosen!r} must be auto, off or a list of names.{hint}")
    for name in [] if isinstance(chosen, str) else chosen:
        if name not in known:
            raise ValueError(
                f"model.patches names {name!r}, which is no patch.{did_you_mean(name, known)} The patches "
                f"are: {', '.join(known)}."
            )
    _record_of(model).chosen = chosen


def is_chosen(model: nn.Module, patch: Patch) -> bool:
    """Whether model.patches allows this patch for this model."""
    return patch.required or is_named(model, patch.name)


def is_named(model: nn.Module, name: str) -> bool:
    """Whether model.patches has this name, or all of them."""
    chosen = _record_of(model).chosen
    return chosen == "auto" or (not isinstance(chosen, str) and name in chosen)


def apply_patches(model: nn.Module, patches: Sequence[Patch], context: PatchContext) -> None:
    """Apply those of `patches` that were chosen for this model, fit it, and are not applied yet."""
    record = _record_of(model)
    for patch in patches:
        if patch.name in record.names or not is_chosen(model, patch) or not patch.applies(model, context):
            continue
        changes = patch.apply(model, context)
        if changes:
            record.applied.append((patch, changes))


def patch_for_device(
    model: nn.Module,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    sequence_parallel: int = 1,
    only: Sequence[str] | None = None,
) -> None:
    """Apply the patches that depend on device and precision (or `only` some of them), and log all patches of
    the model. `device` and `dtype`: what the module computes with, if it is stored otherwise."""
    first = next(model.parameters())
    context = PatchContext(
        device=device or first.device, dtype=dtype or first.dtype, sequence_parallel=sequence_parallel
    )
    if dtype == torch.float32 and _record_of(model).chosen == "auto":
        # The stream is in float32 anyway, and hooks take time in every pass.
        _undo_named(model, "fp32_residual")
    wanted = [patch for patch in DEVICE_PATCHES if only is None or patch.name in only]
    apply_patches(model, wanted, context)
    _log_once(type(base_model(model)).__name__, _listed(applied_patches(model), [one.name for one in wanted]))


def _undo_named(model: nn.Module, name: str) -> None:
    record = _record_of(model)
    for patch, changes in record.applied:
        if patch.name == name:
            patch.undo(changes)
    record.applied = [one for one in record.applied if one[0].name != name]


def _listed(names: Sequence[str], possible: Sequence[str]) -> str:
    """Names of patches, and of `possible` ones whose kernels failed their self-check."""
    off = [f"{name} (off: {refused[name]})" for name in possible if name in refused and name not in names]
    return ", ".join([*names, *off]) or "none"


def record_sampling(model: nn.Module, names: Sequence[str]) -> None:
    """Remember the patches that the rollout engine uses for this model."""
    _record_of(model).sampling = list(names)


def record_kernels(model: nn.Module, name: str, used: bool) -> None:
    """The engine runs kernels of this name, or they failed their self-check. Logs all patches of the
    engine."""
    names = _record_of(model).sampling
    if used:
        names.append(name)
    if used or name in refused:
        _log_once(f"{type(base_model(model)).__name__} while it samples", _listed(names, [name]))


def sampling_patches(model: nn.Module) -> list[str]:
    """Names of the patches that the rollout engine uses for a model, in order."""
    return list(_record_of(model).sampling)


@cache
def _log_once(model: str, names: str) -> None:
    log.info("Patches of %s: %s", model, names)


def applied_patches(model: nn.Module) -> list[str]:
    """Names of the patches that are applied to a model, in order."""
    return _record_of(model).names


def undo_patches(model: nn.Module) -> None:
    """Restore the module. A patch under a sharded module stays: FSDP2 has built on it."""
    record = _record_of(model)
    kept = []
    for patch, changes in reversed(record.applied):
        if all(change.can_undo() for change in changes):
            patch.undo(changes)
        else:
            kept.append((patch, changes))
    record.applied = kept[::-1]


def undo_all_patches() -> None:
    """Restore every module of this process, at the end of a run."""
    for model in list(_records):
        undo_patches(model)
