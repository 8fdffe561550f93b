"""Attention over a packed row: many sequences one after the other, none of which sees another.

A packed row has no padding token, so every matrix product of the model computes real tokens only. Attention
alone needs the sequences apart. A variable-length kernel takes their boundaries, on CUDA and, in bf16, on
CPUs with AMX (models/varlen.py). On other CPUs queries, keys and values are laid out as [sequences, heads,
longest, D] with padding on the right, attended causally, and put back: a padded key comes after every real
query of its sequence, so causality hides it and no mask is needed.

`set_attention(model, PACKED)` switches a model to the function registered here; the layout is the keyword
`packing` of the model's forward. Another function (the rollout engine's) can be set on the same module
between two passes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from strop.models import varlen
from strop.models.lora import base_model
from strop.models.packing import AttentionGroup, Packing
from strop.registry import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PACKED = "strop_packed"
SINKS_UNDIVIDED = (
    "has attention sinks, which sequence parallelism does not divide; set ulysses_sequence_parallel_size=1."
)

_SLICE = 64
"""Queries attended at a time on a CPU. Its kernel multiplies a query with all keys it is given (up to 512),
also those after it."""


@dataclass(frozen=True)
class _Options:
    """How one layer attends, besides the causal rule."""

    scaling: float | None
    dropout: float
    window: int | None
    """A token sees itself and the window - 1 tokens before it."""
    softcap: float | None
    """c bounds the scores: c tanh(s / c)."""
    sinks: Tensor | None = None
    """One score per head that takes part in the softmax and has no value."""

    @property
    def plain(self) -> bool:
        """Whether sdpa has all of it."""
        return not self.softcap and self.sinks is None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence. query [1, H, N, D], key and value [1, Hkv, N, D] -> [1, N, H,
    D].

    A token sees itself and, with a sliding window W, the W - 1 tokens before it; `packing.reach` lets it see
    later ones. A soft cap c bounds the scores: c tanh(s / c).
    """
    assert query.shape[0] == 1, "a packed row is alone"
    problem = None
    if packing is None:
        problem = "is not given the borders of packed sequences by its model"
    elif attention_mask is not None:
        problem = "masks keys by a rule of its own, which packed attention does not know"
    elif s_aux is not None and packing.slicing is not None:
        raise ValueError(f"{type(module).__name__} {SINKS_UNDIVIDED}")
    if packing is None or problem is not None:
        raise ValueError(f"{type(module).__name__} {problem}; set use_remove_padding=False.")
    window = None
    if sliding_window is not None and sliding_window < packing.longest:
        window = sliding_window
    options = _Options(scaling, dropout, window, softcap, s_aux)
    if packing.slicing is None:
        return _attend_row(query, key, value, packing, options), None
    row = dataclasses.replace(packing, slicing=None)
    attend = partial(_attend_row, packing=row, options=options)
    return packing.slicing.attend(attend, query, key, value), None


def _attend_row(query: Tensor, key: Tensor, value: Tensor, packing: Packing, options: _Options) -> Tensor:
    """Attention over the whole row, by a kernel where there is one."""
    q = query[0].transpose(0, 1)  # [N, heads, D]
    k = key[0].transpose(0, 1)
    v = value[0].transpose(0, 1)
    kernel = None
    plain = options.plain and not options.dropout and packing.reach is None
    if plain and (q.device.type in varlen.DEVICES or q.dtype == torch.bfloat16):
        kernel = varlen.varlen_kernel(q, k, v, options.window)
    if kernel is None:
        return _attend_groups(q, k, v, packing, options)[None]
    if packing.spread is not None:
        q = q[packing.spread]
        k = k[packing.spread]
        v = v[packing.spread]
    out = kernel(q, k, v, packing.bounds, packing.longest, scale=options.scaling, window=options.window)
    if packing.first is not None:
        out = out[packing.first]
    return out[None]


def _attend_groups(q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: _Options) -> Tensor:
    """Attention over padded groups of sequences. [N, heads, D] each, and so the result."""
    if packing.padded is not None:
        q = packing.padded.spread(q)
        k = packing.padded.spread(k)
        v = packing.padded.spread(v)
    sizes = [group.rows * group.width for group in packing.groups]
    masks: list[Tensor | None] = [None] * len(sizes)
    if packing.reach is not None:
        reach = packing.reach
        if packing.padded is not None:
            reach = reach.index_select(0, packing.padded.take)
        tables = zip(reach.split(sizes), packing.groups, strict=True)
        masks = [_reached(table.view(group.rows, group.width), options.window) for table, group in tables]
    parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), packing.groups, masks, strict=True)
    pieces = [_attend(*part, options) for part in parts]
    out = pieces[0]
    if len(pieces) > 1:
        out = torch.cat(pieces)
    if packing.padded is not None:
        out = packing.padded.gather(out)
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup, mask: Tensor | None, options: _Options
) -> Tensor:
    """Queries, keys and values of the padded rows of a group, one after the other, and so the result.
    `mask`: None is the causal rule."""
    q = _by_sequence(q, group)
    k = _by_sequence(k, group)
    v = _by_sequence(v, group)
    if not options.plain:
        out = _defined_attention(q, k, v, mask, options).transpose(1, 2)
    elif mask is not None:
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=options.dropout, scale=options.scaling, enable_gqa=grouped
        ).transpose(1, 2)
    else:
        slices = [(0, group.width)]
        if q.device.type == "cpu":
            slices = _slices(group.width)
        pieces = [_attend_slice(q, k, v, begin, end, options) for begin, end in slices]
        out = pieces[0]
        if len(pieces) > 1:
            out = torch.cat(pieces, dim=1)
    return out.reshape(group.rows * group.width, *out.shape[2:])


def _by_sequence(states: Tensor, group: AttentionGroup) -> Tensor:
    """[rows x width, heads, D] -> [rows, heads, width, D]."""
    return states.view(group.rows, group.width, *states.shape[1:]).transpose(1, 2)


def _attend_slice(q: Tensor, k: Tensor, v: Tensor, begin: int, end: int, options: _Options) -> Tensor:
    """The queries from `begin` to `end`, with the keys they see. -> [rows, end - begin, heads, D]"""
    window = options.window
    first = 0
    if window is not None:
        first = max(0, begin - window + 1)
    causal = begin == 0 and (window is None or window >= end)
    out = F.scaled_dot_product_attention(
        q[:, :, begin:end],
        k[:, :, first:end],
        v[:, :, first:end],
        attn_mask=None if causal else _visible(first, begin, end, window, q.device),
        is_causal=causal,
        dropout_p=options.dropout,
        scale=options.scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2)


def _slices(width: int) -> list[tuple[int, int]]:
    """Begin and end of slices of about `_SLICE` queries."""
    count = max(1, round(width / _SLICE))
    return list(pairwise(width * i // count for i in range(count + 1)))


def _visible(first: int, begin: int, end: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] which of the tokens from `first` to `end` those from `begin` to `end` see."""
    distance = torch.arange(begin, end, device=device)[:, None] - torch.arange(first, end, device=device)
    seen = distance >= 0
    if window is not None:
        seen = seen & (distance < window)
    return seen


def _reached(reach: Tensor, window: int | None) -> Tensor:
    """[rows, 1, queries, keys] which keys are seen, where the query at a position of a row sees those up to
    its `reach` [rows, queries]."""
    places = torch.arange(reach.shape[1], device=reach.device)
    seen = places <= reach[..., None]
    if window is not None:
        seen = seen & (places[:, None] - places < window)
    return seen[:, None]


def _defined_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: _Options) -> Tensor:
    """The definition with a soft cap and sinks, which sdpa does not have."""
    if mask is None:
        mask = _visible(0, 0, q.shape[2], options.window, q.device)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    scaling = options.scaling
    if scaling is None:
        scaling = q.shape[-1] ** -0.5
    scores = q @ k.transpose(-1, -2) * scaling
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).view(-1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]]
    return F.dropout(weights, options.dropout) @ v


AttentionInterface.register(PACKED, packed_attention)


PLAIN_KINDS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers (`layer_types` of a configuration) in which tokens meet in causal attention alone, with or
without a window."""


def other_kinds(config: PreTrainedConfig) -> list[str]:
    """The kinds of layers of a model in which tokens meet in another way: convolutions, recurrent states,
    chunks, keys that an indexer selects."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    return sorted(set(kinds) - PLAIN_KINDS)


def padded_attention(model: PreTrainedModel) -> str:
    """The default attention function of the padded layout: sdpa, or eager where sdpa leaves something out (a
    soft cap of the scores, sinks); the model's own where it cannot be exchanged."""
    if not model._can_set_attn_implementation():
        return str(model.config._attn_implementation)
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if capped or not base_model(model)._supports_sdpa:
        return "eager"
    return "sdpa"


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Make `name` the attention function of every layer. Takes about 0.1 ms when it changes."""
    if model.config._attn_implementation == name:
        return
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"The attention function of {type(model).__name__} cannot be exchanged, so it cannot become "
            f"{name!r}."
        )
    try:
        model.set_attn_implementation(_for_language(model, name))
    except (ValueError, ImportError) as error:
        known = sorted({"eager", *AttentionInterface().valid_keys()} - {PACKED})
        similar = "" if name in known else did_you_mean(name, known)
        raise ValueError(
            f"attn_implementation={name!r} cannot be used with {type(model).__name__}: "
            f"{error}{similar} Always there: sdpa, eager."
        ) from error


def _for_language(model: PreTrainedModel, name: str) -> str | dict[str, str]:
    """`name` for the language model alone where there is a vision tower, whose attention is not causal."""
    if getattr(model.config, "vision_config", None) is None:
        return name
    return {"": name, "text_config": name}


class SetAttention:
    """`set_attention` as a change that can be undone (models/changes.py)."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model = ref(cast("PreTrainedModel", model))
        self.name = name
        self._before = name

    def do(self) -> None:
        model = self._model()
        assert model is not None
        self._before = str(model.config._attn_implementation)
        set_attention(model, self.name)

    def undo(self) -> None:
        model = self._model()
        if model is not None:
            set_attention(model, self._before)

    def can_undo(self) -> bool:
        return True
