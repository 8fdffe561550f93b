"""Which layouts a model computes right, packed or padded rows, found by measuring.

Sequences are computed one by one, packed into one row and padded to one length, and their log-probs compared,
on a small model of the same class (models/layouts/small_model.py), once per class and configuration. A model
in which packed sequences change each other runs padded; one that padding changes too is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from strop.models.attention import PACKED, SINKS_UNDIVIDED, padded_attention, set_attention
from strop.models.layouts.mixers import prepare_mixers
from strop.models.layouts.small_model import (
    VOCABULARY,
    class_of,
    config_key,
    missing_parts,
    part_classes,
    small_model,
)
from strop.models.lora import base_model
from strop.models.packing import NOTHING, lay_out, rectangle

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

TOLERANCE = 1e-3
"""Largest difference of log-probs in float32 that is rounding. Measured: at most 1e-4 where a layout is
right, more than 1e-2 where tokens of different sequences meet."""
_LENGTHS = (9, 5, 17, 2, 14)
_COMMON = 11
"""Tokens that the last sequence begins with as the longest one does."""

FAILURES = (
    ValueError,
    TypeError,
    RuntimeError,
    AttributeError,
    KeyError,
    IndexError,
    NotImplementedError,
    ImportError,
)
"""What the code of a model may raise when it is given a layout or a size that it was not written for."""


@dataclass(frozen=True)
class Measured:
    """How far log-probs of a layout are from those of each sequence alone."""

    difference: float | None
    """None: the model raised an error."""
    error: str = ""
    """What to say instead of the difference."""

    @property
    def right(self) -> bool:
        return self.difference is not None and self.difference <= TOLERANCE

    def __str__(self) -> str:
        if self.error:
            return self.error
        return f"log-probs differ by up to {self.difference:.2g} from those of each sequence alone"


@dataclass(frozen=True)
class Layouts:
    packed: Measured
    padded: Measured


# --- what callers ask ---------------------------------------------------------------------------------------


_layouts: WeakKeyDictionary[nn.Module, Layouts] = WeakKeyDictionary()
_by_class: dict[tuple[type[nn.Module], str], tuple[Layouts, frozenset[type[nn.Module]]]] = {}
"""What was measured, and the classes of the parts of the small model."""


def layouts_of(model: PreTrainedModel) -> Layouts:
    """How right each layout is for this model; measured once per class and configuration."""
    core = base_model(model)
    if core not in _layouts:
        _layouts[core] = _find(core)
    return _layouts[core]


def packing_obstacle(model: PreTrainedModel) -> str | None:
    """Why sequences of this model cannot be packed into one row, or None."""
    packed = layouts_of(model).packed
    if packed.right:
        return None
    return str(packed)


def runs_packed(model: PreTrainedModel, wanted: bool, sequence_parallel: bool = False) -> bool:
    """Whether to pack, where use_remove_padding asks for it. A model with an obstacle runs padded, and a line
    of the log says so; a model that padding changes is refused. A model that packs is prepared for it."""
    layouts = layouts_of(model)
    name = type(base_model(model)).__name__
    if wanted and layouts.packed.right:
        has_mixers = prepare_mixers(model)
        if sequence_parallel and has_mixers:
            raise ValueError(
                f"{name} carries states along the row, which ranks cannot share; set "
                "ulysses_sequence_parallel_size=1."
            )
        if sequence_parallel and any(
            isinstance(getattr(part, "sinks", None), Tensor) for part in model.modules()
        ):
            raise ValueError(f"{name} {SINKS_UNDIVIDED}")
        return True
    if sequence_parallel:
        raise ValueError(
            f"{name} cannot run packed: {layouts.packed}. Sequence parallelism divides packed rows; set "
            "ulysses_sequence_parallel_size=1."
        )
    if not layouts.padded.right:
        raise ValueError(
            f"{name} cannot be trained. Padded rows: {layouts.padded}. Packed rows: {layouts.packed}. Is it "
            "a causal language model (is_decoder in its config.json)?"
        )
    if wanted:
        _log_padded(name, padded_attention(model), str(layouts.packed))
    return False


def _has_sinks(model: nn.Module) -> bool:
    return any(isinstance(getattr(part, "sinks", None), Tensor) for part in model.modules())


@cache
def _log_padded(name: str, attention: str, obstacle: str) -> None:
    """Once, although every pass asks."""
    log.info(
        "%s runs with padded rows (use_remove_padding=False) and attn_implementation=%s. Packed rows: %s.",
        name,
        attention,
        obstacle,
    )


# --- the measurement ----------------------------------------------------------------------------------------


def _find(core: PreTrainedModel) -> Layouts:
    try:
        key = (class_of(core), config_key(core.config))
        layouts, parts = _by_class.get(key, (None, frozenset()))
        if layouts is None or missing_parts(parts, core):
            small = small_model(core)
            layouts = measure_layouts(small)
            _by_class[key] = (layouts, part_classes(small))
        return layouts
    except FAILURES as error:
        return _measured_itself(core, words_of(error))


def _measured_itself(core: PreTrainedModel, problem: str) -> Layouts:
    """The layouts of a model that cannot be made small, measured on its own weights if they are in memory.
    What cannot be measured runs padded, as transformers computes it."""
    if not any(weight.is_meta for weight in core.parameters()):
        try:
            return measure_layouts(core)
        except FAILURES as error:
            problem = f"{problem}; on the model itself: {words_of(error)}"
    unknown = Measured(None, f"they could not be measured on a small model of its class ({problem})")
    return Layouts(unknown, Measured(0.0))


@torch.no_grad()
def measure_layouts(model: PreTrainedModel) -> Layouts:
    """Compare both layouts with sequences alone, on the weights of this very model. Raises what the model
    raises for a sequence alone."""
    sequences = _sequences(model)
    before = model.config._attn_implementation
    training = model.training
    model.eval()
    try:
        expected = [_run(model, [sequence], packed=False)[0] for sequence in sequences]
        packed = _compare(model, sequences, expected, packed=True)
        padded = _compare(model, sequences, expected, packed=False)
        ahead = _seen_ahead(model, sequences, expected)
    finally:
        model.train(training)
        if model.config._attn_implementation != before:
            set_attention(model, before)
    if not ahead.right:
        packed = ahead
        if model.get_output_embeddings() is not None:
            padded = ahead
    return Layouts(packed, padded)


def _seen_ahead(model: PreTrainedModel, sequences: Sequence[Tensor], expected: Sequence[Tensor]) -> Measured:
    """How far later tokens change the log-probs of earlier ones."""
    longest = max(range(len(sequences)), key=lambda i: len(sequences[i]))
    cut = _run(model, [sequences[longest][:_COMMON]], packed=False)[0]
    difference = float((cut - expected[longest][: len(cut)]).abs().max())
    return Measured(difference, f"later tokens change log-probs of earlier ones by up to {difference:.2g}")


def _compare(
    model: PreTrainedModel, sequences: Sequence[Tensor], expected: Sequence[Tensor], packed: bool
) -> Measured:
    if packed and not model._can_set_attn_implementation():
        return Measured(None, "its attention function cannot be exchanged")
    try:
        found = _run(model, sequences, packed=packed)
    except FAILURES as error:
        return Measured(None, reason_of(error) if packed else words_of(error))
    return Measured(max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)))


def _run(model: PreTrainedModel, sequences: Sequence[Tensor], *, packed: bool) -> list[Tensor]:
    """Log-probs of the next token (or values) at each token of each sequence."""
    device = next(model.parameters()).device
    inputs = lay_out(rectangle(sequences), packed=packed, device=device)
    given: dict[str, object] = {}
    if inputs.packing is not None:
        prepare_mixers(model)
        given["packing"] = inputs.packing
    set_attention(model, PACKED if packed else padded_attention(model))
    output = model(
        input_ids=inputs.ids,
        position_ids=inputs.positions,
        attention_mask=inputs.mask,
        use_cache=False,
        **given,
    )
    logits = output.logits.flatten(0, 1).float().cpu()
    found = []
    for sequence, places in zip(sequences, inputs.places, strict=True):
        own = logits[places[places != NOTHING]]
        if own.shape[-1] > 1:
            own = own.log_softmax(-1)[:-1].gather(1, sequence[1:, None])
        found.append(own)
    return found


def _sequences(model: PreTrainedModel) -> list[Tensor]:
    """Random rows of different lengths, two of which begin alike."""
    generator = torch.Generator().manual_seed(0)
    embedding = model.get_input_embeddings()
    size = min(VOCABULARY, int(getattr(embedding, "num_embeddings", VOCABULARY)))
    rows = [torch.randint(3, size, (length,), generator=generator) for length in _LENGTHS]
    rows[-1][:_COMMON] = max(rows, key=len)[:_COMMON]
    return rows


def reason_of(error: BaseException) -> str:
    """Why a model does not run in a packed row or in the rollout engine, from what its code raised there."""
    if isinstance(error, ValueError):
        return words_of(error)
    return (
        "its layers need the attention mask of transformers, or something else that packed rows and the "
        f"native engine do not have; its code raises {words_of(error)}"
    )


def words_of(error: BaseException) -> str:
    """An error in one line, for the inside of a sentence."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")[:200]
