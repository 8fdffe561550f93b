"""Attention over a packed row: many sequences one after the other, none of which sees another.

A packed row has no padding token, so every matrix product of the model works on real tokens only. Attention alone needs the
sequences apart. On CUDA a variable-length kernel takes their boundaries. Elsewhere queries, keys and values are laid out as
[sequences, heads, longest, D] with padding on the right, attended causally, and put back: a padded key stands behind every
real query of its sequence, so causality keeps it out and no mask is needed.

`set_attention(model, PACKED)` switches a model to the function registered here; the layout travels as the keyword `packing` of
the model's forward. Another function (the rollout engine's) can be set on the same module between two passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import AttentionInterface

from strop.models.sequence_parallel import Slicing
from strop.models.varlen import varlen_kernel
from strop.registry import did_you_mean

PACKED = "strop_packed"

# Sequences shorter than this share of the longest one of their group get a group of their own: padding costs at most as much
# as an extra call.
_SIMILAR = 0.7
_SHORT = 64

# Queries attended at a time on a CPU. Its kernel multiplies a query with all keys it is given (up to 512), those behind it too.
_SLICE = 64


@dataclass(frozen=True)
class Group:
    """Sequences of similar length, attended in one call."""

    rows: int
    width: int


@dataclass(frozen=True)
class Padded:
    """A packed row as padded rows, and back. Both ways gather, and so do their gradients: that of plain indexing is added up
    number by number on a CPU."""

    take: Tensor
    """[all padded rows] positions in the packed row; padding repeats some token."""
    place: Tensor
    """[N] where each token of the packed row stands among them, the first time if it is shared."""
    others: tuple[Tensor, Tensor] | None
    """Where shared tokens stand beside that, and their positions in the packed row."""
    blank: Tensor
    """[all padded rows, 1, 1] whether nobody's `place` is there."""

    def spread(self, row: Tensor) -> Tensor:
        """[N, ...] to padded rows. What comes after has no gradient to its padding."""
        result: Tensor = _Spread.apply(row, self)
        return result

    def gather(self, rows: Tensor) -> Tensor:
        """Padded rows to [N, ...]."""
        result: Tensor = _Gather.apply(rows, self)
        return result


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row: Tensor, padded: Padded) -> Tensor:
        ctx.padded = padded
        return row.index_select(0, padded.take)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> Any:
        gradient = above.index_select(0, ctx.padded.place)
        if ctx.padded.others is not None:
            places, tokens = ctx.padded.others
            gradient.index_add_(0, tokens, above.index_select(0, places))
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, padded: Padded) -> Tensor:
        ctx.padded = padded
        return rows.index_select(0, padded.place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> Any:
        return above.index_select(0, ctx.padded.take).masked_fill_(ctx.padded.blank, 0), None


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a packed row begin and end."""

    groups: tuple[Group, ...]
    bounds: Tensor
    """[B + 1] int32, cumulative lengths."""
    longest: int
    spread: Tensor | None = None
    """Positions in the packed row of all tokens of all sequences in turn, where some share a beginning; otherwise None."""
    slicing: Slicing | None = None
    """Set where several ranks share the row, and each has a slice of it."""
    first: Tensor | None = None
    """[N] where each token of the packed row first stands in `spread`."""
    padded: Padded | None = None
    """All groups one after the other. None: they are the packed row."""


def packing(places: Tensor, device: torch.device | str = "cpu") -> Packing:
    """The layout of a packed row, from where in it the tokens of each sequence stand: [B, longest], -1 behind the end of each.

    Sequences that begin alike may share the tokens of their beginning: each attends to them as its own, and the matrix products
    see them once.
    """
    inside = places >= 0
    lengths = inside.sum(1).tolist()
    if not lengths or min(lengths) < 1:
        raise ValueError(f"Every packed sequence needs at least one token; the lengths are {lengths}.")
    spread = places[inside]
    shared = int(spread.max()) + 1 < len(spread)
    groups, takes, reals = [], [], []
    for members in _similar(lengths):
        width = max(lengths[i] for i in members)
        table, within = places[members, :width], inside[members, :width]
        groups.append(Group(len(members), width))
        takes.append(torch.where(within, table, table[:, :1]).flatten())
        reals.append(within.flatten())
    take, real = torch.cat(takes), torch.cat(reals)
    in_order = bool(real.all()) and not shared and bool((take == torch.arange(len(take))).all())
    return Packing(
        tuple(groups),
        torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32),
        max(lengths),
        spread=spread.to(device) if shared else None,
        first=_first_places(spread).to(device) if shared else None,
        padded=None if in_order else _padded(take, real.nonzero().squeeze(1), device),
    )


def _padded(take: Tensor, standing: Tensor, device: torch.device | str) -> Padded:
    """`take`: the token of each place in the padded rows; `standing`: the places that are no padding."""
    first = _first_places(take[standing])
    blank = torch.ones(len(take), 1, 1, dtype=torch.bool)
    blank[standing[first]] = False
    again = torch.ones(len(standing), dtype=torch.bool)
    again[first] = False
    others = standing[again]
    return Padded(
        take.to(device),
        standing[first].to(device),
        (others.to(device), take[others].to(device)) if len(others) else None,
        blank.to(device),
    )


def _first_places(targets: Tensor) -> Tensor:
    """For each number from 0 to the largest: where it stands first in `targets`."""
    first = torch.full((int(targets.max()) + 1,), len(targets))
    return first.scatter_reduce(0, targets, torch.arange(len(targets)), "amin")


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences grouped so that little of a group is padding, longest first; inside a group in their own order."""
    groups: list[list[int]] = []
    widest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not groups or (widest > _SHORT and lengths[i] < _SIMILAR * widest):
            groups.append([])
            widest = lengths[i]
        groups[-1].append(i)
    return [sorted(group) for group in groups]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence. query [1, H, N, D], key and value [1, Hkv, N, D] -> [1, N, H, D].

    A token sees itself and, with a sliding window W, the W - 1 tokens before it. A soft cap c bounds the scores: c tanh(s / c).
    """
    assert attention_mask is None and query.shape[0] == 1, "a packed row stands alone and needs no mask"
    if packing.slicing is not None:
        alone: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window, "softcap": softcap}
        row = dataclasses.replace(packing, slicing=None)

        def whole_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return packed_attention(module, q, k, v, None, packing=row, **alone, **others)[0]

        return packing.slicing.attend(whole_row, query, key, value), None
    if others.get("s_aux") is not None:
        raise ValueError(
            f"{type(module).__name__} uses attention sinks, which packed attention does not know; set use_remove_padding=False."
        )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [N, heads, D]
    window = sliding_window if sliding_window is not None and sliding_window < packing.longest else None
    kernel = None if softcap or dropout else varlen_kernel(q, k, v)
    if kernel is not None:
        if packing.spread is not None:
            q, k, v = q[packing.spread], k[packing.spread], v[packing.spread]
        out = kernel(q, k, v, packing.bounds, packing.longest, scale=scaling, window=window)
        return (out if packing.first is None else out[packing.first])[None], None
    sizes = [group.rows * group.width for group in packing.groups]
    rows = (tensor if packing.padded is None else packing.padded.spread(tensor) for tensor in (q, k, v))
    parts = zip(*(tensor.split(sizes) for tensor in rows), strict=True)
    pieces = [_attend(q, k, v, group, scaling, dropout, window, softcap) for (q, k, v), group in zip(parts, packing.groups)]
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return (out if packing.padded is None else packing.padded.gather(out))[None], None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Queries, keys and values of the padded rows of a group, one after the other, and so the result."""
    q, k, v = (tensor.view(group.rows, group.width, *tensor.shape[1:]).transpose(1, 2) for tensor in (q, k, v))
    if softcap:
        mask = _sight(0, 0, group.width, window, q.device)
        out = _capped_attention(q, k, v, mask, scaling, dropout, softcap).transpose(1, 2)
    else:
        shared = q.shape[1] != k.shape[1]
        pieces = []
        for begin, end in _slices(group.width) if q.device.type == "cpu" else [(0, group.width)]:
            first = 0 if window is None else max(0, begin - window + 1)
            causal = begin == 0 and (window is None or window >= end)
            piece = F.scaled_dot_product_attention(
                q[:, :, begin:end],
                k[:, :, first:end],
                v[:, :, first:end],
                attn_mask=None if causal else _sight(first, begin, end, window, q.device),
                is_causal=causal,
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=shared,
            )
            pieces.append(piece.transpose(1, 2))
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    return out.reshape(group.rows * group.width, *out.shape[2:])


def _slices(width: int) -> list[tuple[int, int]]:
    """Where slices of about `_SLICE` queries begin and end."""
    count = max(1, round(width / _SLICE))
    return list(pairwise(width * i // count for i in range(count + 1)))


def _sight(first: int, begin: int, end: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] which of the tokens from `first` to `end` those from `begin` to `end` see."""
    distance = torch.arange(begin, end, device=device)[:, None] - torch.arange(first, end, device=device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float | None, dropout: float, cap: float
) -> Tensor:
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, dropout) @ v


AttentionInterface.register(PACKED, packed_attention)


def packing_obstacle(model: Any) -> str | None:
    """Why sequences of this model cannot share a row, or None."""
    config = model.config.get_text_config()
    if getattr(model, "_is_stateful", False):
        return "it carries a recurrent state along the row, which would run from one sequence into the next"
    if getattr(config, "attention_chunk_size", None):
        return "it attends in chunks counted from the beginning of the row"
    if not model._can_set_attn_implementation():
        return "its attention function cannot be exchanged"
    return None


def padded_attention(model: Any) -> str:
    """The attention function of the padded layout when nobody chose one. sdpa leaves a soft cap of the scores out."""
    return "eager" if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) else "sdpa"


def set_attention(model: Any, name: str) -> None:
    """Make `name` the attention function of every layer. About 0.1 ms when it changes, nothing when it does not."""
    if model.config._attn_implementation == name:
        return
    if not model._can_set_attn_implementation():
        raise ValueError(f"The attention function of {type(model).__name__} cannot be exchanged, so it cannot become {name!r}.")
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        known = sorted({"eager", *AttentionInterface().valid_keys()} - {PACKED})
        raise ValueError(
            f"attn_implementation={name!r} cannot be used with {type(model).__name__}: {error}{did_you_mean(name, known)} "
            f"Always there: sdpa, eager."
        ) from error
