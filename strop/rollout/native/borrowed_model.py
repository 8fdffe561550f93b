"""The trainer's module while the native engine samples from it: which patches it gets, and when they are
undone.

`ROLLOUT_PATCHES` continue the list of models/patches.py: rollout attention, eval mode, and on a GPU a float32
output head (bf16 has steps of 1/8 at the usual size of a logit), fused projections (q/k/v and gate/up, also
of LoRA layers) and residual sums in place. They are applied when sampling begins and undone when it ends. So
are quantized copies of the weights (quantization/), and on a CPU copies of linear weights in a layout for few
rows (cpu/).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from strop.models import fused_modules
from strop.models.attention import SetAttention
from strop.models.changes import Change, SetAttribute, done, undo_changes
from strop.models.layouts.state_space import wide_steps
from strop.models.lora import base_model
from strop.models.lora_gpu.fused_projection import AdaptedProjection, adapted_projections
from strop.models.patches import Patch, PatchContext, always, is_chosen, patch_for_device, record_sampling
from strop.models.projections.divided import divides
from strop.models.projections.few_rows import UseFewRows
from strop.models.projections.fused import FusedProjection, fused_forwards
from strop.models.residual import AddingLinear
from strop.rollout.native.attention import NAME
from strop.rollout.native.cpu.adapted_linear import adapted_changes
from strop.rollout.native.cpu.elementwise import ELEMENTWISE
from strop.rollout.native.cpu.frozen_weights import FrozenLinear
from strop.rollout.native.cpu.packed_linear import (
    FEW,
    LONG,
    PACKED_LINEAR,
    STEPS,
    compiled_weights,
    find_frozen,
    refreshed,
)
from strop.rollout.native.lora_bank import LoraBank
from strop.rollout.native.meter import cache_memory
from strop.rollout.native.quantization import QuantizedLayers

_NARROW = (torch.bfloat16, torch.float16)

# --- rollout patches ----------------------------------------------------------------------------------------


class _EvalMode:
    """Every part of a model in eval mode; afterwards each as it was."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._training: list[nn.Module] = []

    def do(self) -> None:
        self._training = [part for part in self._model.modules() if part.training]
        for part in self._training:
            part.training = False

    def undo(self) -> None:
        for part in self._training:
            part.training = True
        self._training = []

    def can_undo(self) -> bool:
        return True


class _LayOut:
    """Weights of a fused projection side by side. They may stay so."""

    def __init__(self, product: FusedProjection | AdaptedProjection) -> None:
        self.product = product

    def do(self) -> None:
        self.product.lay_out()

    def undo(self) -> None:
        pass

    def can_undo(self) -> bool:
        return True


def _on_gpu(model: nn.Module, context: PatchContext) -> bool:
    return context.device.type in fused_modules.DEVICES


def _rollout_attention(model: nn.Module, context: PatchContext) -> list[Change]:
    core = base_model(model)
    if not core._can_set_attn_implementation():
        raise ValueError(
            f"The attention function of {type(core).__name__} cannot be exchanged, so the native engine "
            "cannot drive it. Set rollout.name=hf."
        )
    return done([SetAttention(model, NAME)])


def _eval_mode(model: nn.Module, context: PatchContext) -> list[Change]:
    return done([_EvalMode(model)])


def _residual_in_place(model: nn.Module, context: PatchContext) -> list[Change]:
    """While sampling, the states of a layer are read by the next layer alone."""
    products = [part for part in model.modules() if isinstance(part, AddingLinear) and not part.overwrites]
    return done(SetAttribute(part, "overwrites", True) for part in products)


def _fp32_head(model: nn.Module, context: PatchContext) -> list[Change]:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear or head.weight.dtype not in _NARROW:
        return []
    return done([SetAttribute(head, "forward", _wide_forward(head))])


def _wide_forward(head: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(hidden: Tensor) -> Tensor:
        logits = torch.mm(hidden.reshape(-1, hidden.shape[-1]), head.weight.t(), out_dtype=torch.float32)
        if head.bias is not None:
            logits += head.bias
        return logits.view(*hidden.shape[:-1], -1)

    return forward


def _state_precision(model: nn.Module, context: PatchContext) -> list[Change]:
    return done(wide_steps(model)) if context.dtype in _NARROW else []


def _few_rows(model: nn.Module, context: PatchContext) -> list[Change]:
    """Products of few rows and large weights. Comes before fused_qkv, to find what that fuses."""
    products = dict.fromkeys(fused.product for fused in fused_forwards(model))
    uses = [UseFewRows(product.whole_weight, parts=1) for product in products]
    ends = [part for part in model.modules() if isinstance(part, AddingLinear) and divides(part.in_features)]
    uses += [UseFewRows(partial(getattr, part, "weight"), parts=2) for part in ends]
    return done(use for use in uses if use.fits())


def _fused_qkv(model: nn.Module, context: PatchContext) -> list[Change]:
    found = list(fused_forwards(model))
    products = list(dict.fromkeys(fused.product for fused in found))
    changes: list[Change] = [_LayOut(product) for product in products]
    changes += [SetAttribute(fused.module, "forward", fused.forward) for fused in found]
    return done(changes)


def _fused_lora(model: nn.Module, context: PatchContext) -> list[Change]:
    changes: list[Change] = []
    for product in adapted_projections(model):
        first, *others = product.layers
        changes += [_LayOut(product), SetAttribute(first, "forward", product.first)]
        for place, layer in enumerate(others, 1):
            changes.append(SetAttribute(layer, "forward", product.later(place)))
    return done(changes)


ROLLOUT_PATCHES = (
    Patch("rollout_attention", always, _rollout_attention, required=True),
    Patch("eval_mode", always, _eval_mode, required=True),
    Patch("residual_in_place", _on_gpu, _residual_in_place),
    Patch("fp32_head", _on_gpu, _fp32_head),
    Patch("few_rows", _on_gpu, _few_rows),
    Patch("fused_qkv", _on_gpu, _fused_qkv),
    Patch("fused_lora", _on_gpu, _fused_lora),
    Patch("state_precision", always, _state_precision),
    *ELEMENTWISE,
)


class RolloutPatches:
    """The rollout patches of one model: found once, applied and undone for each rollout."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._changes: list[Change] | None = None

    def apply(self) -> None:
        if self._changes is None:
            self._changes = self._found()
            return
        with _undone_on_error(self._changes):
            for change in self._changes:
                change.do()

    def undo(self) -> None:
        for change in reversed(self._changes or []):
            change.undo()

    @property
    def fused(self) -> list[FusedProjection]:
        """The fused projections of the model, once applied."""
        products = [change.product for change in self._changes or [] if isinstance(change, _LayOut)]
        return [product for product in products if isinstance(product, FusedProjection)]

    def _found(self) -> list[Change]:
        """Find and make the changes, after those of training."""
        first = next(self._model.parameters())
        context = PatchContext(device=first.device, dtype=first.dtype)
        if _on_gpu(self._model, context):
            patch_for_device(self._model)
        changes: list[Change] = []
        names = []
        with _undone_on_error(changes):
            for patch in ROLLOUT_PATCHES:
                if is_chosen(self._model, patch) and patch.applies(self._model, context):
                    made = patch.apply(self._model, context)
                    changes += made
                    if made:
                        names.append(patch.name)
        record_sampling(self._model, names)
        return changes


@contextmanager
def _undone_on_error(changes: list[Change]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        undo_changes(changes)
        raise


# --- packed linear layers on a CPU --------------------------------------------------------------------------


class PackedLinear:
    """Copies of the weights of one model: of frozen ones from the first step on, of all others as soon as
    they pay."""

    def __init__(self, model: nn.Module, quantized: QuantizedLayers) -> None:
        self._model = model
        self._quantized = quantized
        self._steps = 0
        self._decided = False
        self._applied = False
        self.changes: Sequence[Change] = ()
        self._searched = False
        self.frozen: list[FrozenLinear] = []
        """The layers with copies of frozen weights."""
        self._frozen_changes: list[Change] = []

    def before_step(self, rows: int, left: int) -> None:
        """Make the copies if they pay: a decode step of so many rows comes, and a response may have up to
        `left` more tokens."""
        if self._decided or rows > FEW:
            return
        if self._steps < STEPS and left < LONG:
            self._steps += 1
            return
        self._decided = True
        if is_chosen(self._model, PACKED_LINEAR):
            self.changes = PACKED_LINEAR.apply(self._model, PatchContext())
            self._applied = bool(self.changes)

    def apply(self) -> None:
        """Use the copies again, in the next rollout under the same weights. Those of frozen weights are made
        by the first call, and again if the weights changed all the same."""
        if not self._searched:
            self.frozen = find_frozen(self._model)
            self._searched = True
        if (self.frozen or self._quantized.compiled) and not self._frozen_changes:
            self.frozen = refreshed(self.frozen)
            self._frozen_changes = done(
                SetAttribute(one.layer, "forward", one.forward) for one in self.frozen
            )
            compiled = {**self._quantized.compiled, **compiled_weights(self.frozen)}
            self._frozen_changes += done(adapted_changes(self._model, compiled))
        if self.changes and not self._applied:
            done(self.changes)
            self._applied = True

    def undo(self) -> None:
        if self._applied:
            PACKED_LINEAR.undo(self.changes)
            self._applied = False
        if self._frozen_changes:
            undo_changes(self._frozen_changes)
            self._frozen_changes = []

    def drop(self) -> None:
        """Forget the copies of weights that may have changed; those of frozen weights are compared with
        them by the next `apply`."""
        self.undo()
        self.changes = ()
        self._steps = 0
        self._decided = False


# --- borrowing ----------------------------------------------------------------------------------------------


class BorrowedModel:
    """The trainer's module, patched for rollouts while at least one caller in the engine uses it."""

    def __init__(
        self,
        model: nn.Module,
        lock: threading.RLock,
        on_change: Callable[[], None],
        lora: LoraBank,
        quantization: str | None = None,
    ) -> None:
        """`on_change` is called when a rollout begins under other weights than the last one. `lora`
        adds loaded adapters to the rows that have one."""
        self._model = model
        self._lock = lock
        self._on_change = on_change
        self._users = 0
        self._patches = RolloutPatches(model)
        self._quantizes = quantization is not None
        self.quantized = QuantizedLayers(model, quantization)
        self.packed = PackedLinear(model, self.quantized)
        self._lora = lora
        self._seen: tuple[tuple[int, int], ...] = ()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._begin()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._seen = _fingerprint(self._model)
                    if self._lora.hooks:
                        self._lora.remove_hooks()
                    self.packed.undo()
                    if self._quantizes:
                        self.quantized.undo()
                    self._patches.undo()

    @property
    def in_use(self) -> bool:
        return self._users > 0

    def cache_memory(self, share: float, held: int) -> int:
        """Bytes for a KV cache that has `held` bytes, if weights, their copies and the cache take `share` of
        the device."""
        device = next(self._model.parameters()).device
        if not self._quantizes:
            return cache_memory(self._model, device, share, held)
        copies = self.quantized
        return cache_memory(self._model, device, share, held - copies.missing_bytes, copies.num_bytes)

    def drop_copies(self) -> None:
        """The weights may change: packed and quantised copies are made again."""
        self.packed.drop()
        if self._quantizes:
            self.quantized.drop()

    def refresh_copies(self) -> None:
        """The weights changed, perhaps during a rollout."""
        if self._quantizes:
            self.quantized.refresh()
        if self.in_use:
            self.packed.apply()

    def free_copies(self) -> None:
        """See QuantizedLayers.free."""
        if self._quantizes:
            self.quantized.free()

    def _begin(self) -> None:
        self._patches.apply()
        if self._seen and self._seen != _fingerprint(self._model):
            self._on_change()
        if self._quantizes:
            self._apply_quantized()
        self.packed.apply()
        if self._lora.loaded:
            self._lora.install_hooks()

    def _apply_quantized(self) -> None:
        try:
            self.quantized.apply(self._patches.fused)
        except BaseException:
            self._patches.undo()
            raise


def _fingerprint(model: nn.Module) -> tuple[tuple[int, int], ...]:
    """Address and version of each weight: they show that the weights changed."""
    return tuple((weight.data_ptr(), weight._version) for weight in model.parameters())
