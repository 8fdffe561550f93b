"""The attention of a rollout: a function registered with transformers, and the two shapes of step that stand behind it.

A model that takes a registered attention function computes queries, keys and values itself and asks this function for the
rest. What the function does is decided by the object passed to the model as `rollout=`: `Prefill` (ragged pieces of prompts
packed into one row) or `Decode` (one token for each running row). Both write to the cache and read from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from strop.models.varlen import flash_kernels, varlen_kernel
from strop.rollout.native.accelerated import kernels
from strop.rollout.native.cache import Cache
from strop.rollout.native.twins import Twins

NAME = "strop_rollout"


@dataclass(frozen=True)
class Flavour:
    """How one layer attends, beside the causal rule."""

    scale: float | None = None
    window: int | None = None
    """A query sees the last `window` positions, itself included."""
    softcap: float | None = None
    """Scores become softcap · tanh(scores / softcap)."""
    sinks: Tensor | None = None
    """One score per head that takes part in the softmax and has no value."""


class Step(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, flavour: Flavour) -> Tensor: ...


def rollout_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    rollout: Step | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Queries, keys and values are [B, heads, T, D] with positions already applied; the result is [B, T, heads, D]."""
    if rollout is None:
        raise ValueError("The module is on loan to the native rollout engine; run other forward passes before or after it.")
    flavour = Flavour(scaling, sliding_window, softcap, s_aux)
    layer = module.layer_idx
    assert isinstance(layer, int)
    return rollout.attend(layer, query, key, value, flavour), None


AttentionInterface.register(NAME, rollout_attention)


@dataclass
class Shapes:
    """Learns from one forward pass which layers attend, with how many heads of which size."""

    layers: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, flavour: Flavour) -> Tensor:
        self.layers[layer] = (key.shape[1], key.shape[3], value.shape[3])
        self.dtype = key.dtype
        return scored(query, key, value, flavour, causal=True)


@dataclass(frozen=True)
class Piece:
    """Tokens `start ..` of the sequence in a row, to be computed in one go."""

    row: int
    start: int
    tokens: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class _Group:
    """Pieces of similar length, padded to one rectangle for attention alone."""

    def __init__(self, members: list[tuple[int, Piece]], device: torch.device) -> None:
        """`members`: offset in the packed row, and the piece."""
        longest = max(len(piece.tokens) for _, piece in members)
        columns = torch.arange(longest)[None]
        count = torch.tensor([[len(piece.tokens)] for _, piece in members])
        # Padding repeats the last token of the same piece, so that a sequence with NaN spoils no other.
        inside = torch.minimum(columns, count - 1)
        offsets = torch.tensor([[offset] for offset, _ in members])
        starts = torch.tensor([[piece.start] for _, piece in members])
        self.take = (offsets + inside).to(device)
        self.valid = (columns < count).flatten().nonzero()[:, 0].to(device)
        self.put = self.take.flatten()[self.valid]
        self.rows = torch.tensor([piece.row for _, piece in members], device=device)
        self.positions = (starts + inside).to(device)
        self.end = max(piece.end for _, piece in members)
        self.fresh = all(piece.start == 0 for _, piece in members)
        self._masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            keys = torch.arange(self.end, device=self.positions.device)
            self._masks[window] = visible(self.positions[..., None], keys, window)[:, None]
        return self._masks[window]


class Prefill:
    """Pieces of prompts in one packed row; each sees its own sequence only."""

    def __init__(self, cache: Cache, pieces: Sequence[Piece], device: torch.device) -> None:
        self.cache = cache
        offsets, total = [], 0
        for piece in pieces:
            offsets.append(total)
            total += len(piece.tokens)
        self.ids = torch.tensor([token for piece in pieces for token in piece.tokens], device=device)[None]
        self.positions = torch.tensor([at for piece in pieces for at in range(piece.start, piece.end)], device=device)
        self.rows = torch.tensor([piece.row for piece in pieces for _ in piece.tokens], device=device)
        self.last = torch.tensor([offset + len(p.tokens) - 1 for offset, p in zip(offsets, pieces)], device=device)
        self._members, self._device = list(zip(offsets, pieces)), device
        self._bounds = torch.tensor([*offsets, total], dtype=torch.int32, device=device)
        self._longest = max(len(piece.tokens) for piece in pieces)
        self._fresh = all(piece.start == 0 for piece in pieces)

    @cached_property
    def groups(self) -> list[_Group]:
        return [_Group(members, self._device) for members in _alike(self._members)]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, flavour: Flavour) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
        self.cache.write(layer, self.rows, self.positions, k, v)
        if flavour.softcap is None and flavour.sinks is None and k.shape[2] == v.shape[2]:
            out = self._in_one_kernel(layer, q, k, v, flavour)
            if out is not None:
                return out[None]
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        for group in self.groups:
            queries = q[group.take].transpose(1, 2)
            if group.fresh and (flavour.window is None or group.end <= flavour.window):
                part = scored(queries, k[group.take].transpose(1, 2), v[group.take].transpose(1, 2), flavour, causal=True)
            else:
                keys, values = self.cache.read(layer, group.rows, group.end)
                part = scored(queries, keys, values, flavour, mask=group.mask(flavour.window))
            out[group.put] = part.flatten(0, 1)[group.valid]
        return out[None]

    def _in_one_kernel(self, layer: int, q: Tensor, k: Tensor, v: Tensor, flavour: Flavour) -> Tensor | None:
        """All pieces at once, where there is a kernel for such heads."""
        more = {"scale": flavour.scale, "window": flavour.window}
        out: Tensor | None = None
        if self._fresh:
            kernel = varlen_kernel(q, k, v)
            if kernel is not None:
                out = kernel(q, k, v, self._bounds, self._longest, **more)
            return out
        flash = flash_kernels(q, k, v)
        if flash is not None:
            out = flash.continued_attention(q, *self.cache.whole(layer), self._bounds, self._longest, *self._going_on, **more)
        return out

    @cached_property
    def _going_on(self) -> tuple[Tensor, Tensor]:
        """At which position of which row each piece goes on."""
        pieces = [piece for _, piece in self._members]
        starts, rows = torch.tensor([[p.start for p in pieces], [p.row for p in pieces]], device=self._device)
        return starts, rows


class Decode:
    """One token for each of the first rows of the cache.

    `spans` are (first row, end row, used length): rows are read in spans so that short ones do not pay for long ones. `lent`
    are rows in which kernels may read beginnings, and how much of them.
    """

    def __init__(
        self,
        cache: Cache,
        rows: Tensor,
        positions: Tensor,
        spans: Sequence[tuple[int, int, int]],
        lent: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        self.cache, self.rows, self.positions, self.spans, self.lent = cache, rows, positions, spans, lent
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, flavour: Flavour) -> Tensor:
        fast = kernels(query.device.type)
        if fast is not None:
            return fast.decode_attention(
                query,
                key.to(self.cache.dtype),
                value.to(self.cache.dtype),
                *self.cache.whole(layer),
                self.positions,
                lenders=self.lent[0],
                borrowed=self.lent[1],
                scale=flavour.scale,
                window=flavour.window,
                softcap=flavour.softcap,
                sinks=flavour.sinks,
            )
        self.cache.write(layer, self.rows, self.positions, key[:, :, 0], value[:, :, 0])
        heads = query.shape[1] // key.shape[1]
        parts = []
        for span, (first, end, used) in enumerate(self.spans):
            keys, values = self.cache.read(layer, slice(first, end), used)
            # The heads that share a key head become its queries: keys are read once and never repeated.
            folded = query[first:end, :, 0].unflatten(1, (key.shape[1], heads))
            mask = self._mask(span, flavour.window)
            parts.append(scored(folded, keys, values, flavour, mask=mask, folded=True))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mask(self, span: int, window: int | None) -> Tensor:
        if (span, window) not in self._masks:
            first, end, used = self.spans[span]
            keys = torch.arange(used, device=self.positions.device)
            self._masks[span, window] = visible(self.positions[first:end, None], keys, window)[:, None, None]
        return self._masks[span, window]


class TwinDecode:
    """One token for each of the first rows, computed once for rows that hold the very same tokens; each keeps its own cache."""

    def __init__(self, cache: Cache, rows: Tensor, positions: Tensor, used: int, twins: Twins) -> None:
        self.cache, self.rows, self.positions, self.used, self.twins = cache, rows, positions, used, twins
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, flavour: Flavour) -> Tensor:
        first, which = self.twins.first, self.twins.which
        self.cache.write(layer, self.rows, self.positions, key[which, :, 0], value[which, :, 0])
        keys, values = self.cache.read(layer, first, self.used)
        folded = query[:, :, 0].unflatten(1, (key.shape[1], -1))
        if flavour.window not in self._masks:
            columns = torch.arange(self.used, device=self.positions.device)
            self._masks[flavour.window] = visible(self.positions[first, None], columns, flavour.window)[:, None, None]
        return scored(folded, keys, values, flavour, mask=self._masks[flavour.window], folded=True)


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Whether a query at a position sees a key: not the future, and not what left the window."""
    seen = keys <= queries
    return seen if window is None else seen & (queries - keys < window)


def scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    flavour: Flavour,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    folded: bool = False,
) -> Tensor:
    """softmax(q·k·scale)·v as [B, T, heads, D].

    `folded`: query is [B, key heads, heads per key head, D], a single position, instead of [B, heads, T, D].
    """
    if flavour.softcap is not None or flavour.sinks is not None:
        out = _explicit(query, key, value, flavour, mask, causal, folded)
    else:
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=flavour.scale, enable_gqa=grouped
        )
    return out.flatten(1, 2)[:, None] if folded else out.transpose(1, 2)


def _explicit(
    query: Tensor, key: Tensor, value: Tensor, flavour: Flavour, mask: Tensor | None, causal: bool, folded: bool
) -> Tensor:
    """The definition, for what the fused kernels do not know."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scale = query.shape[-1] ** -0.5 if flavour.scale is None else flavour.scale
    scores = (query @ key.transpose(2, 3)).float() * scale
    if flavour.softcap is not None:
        scores = flavour.softcap * torch.tanh(scores / flavour.softcap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if flavour.sinks is not None:
        sinks = flavour.sinks.float()
        sinks = sinks.view(query.shape[1], query.shape[2], 1) if folded else sinks.view(-1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
        return scores.softmax(-1)[..., :-1].to(value.dtype) @ value
    return scores.softmax(-1).to(value.dtype) @ value


def _alike(members: list[tuple[int, Piece]]) -> Iterator[list[tuple[int, Piece]]]:
    """Groups in which padding adds at most a half, and in which all pieces start at 0 or all read the cache."""
    group: list[tuple[int, Piece]] = []
    for member in sorted(members, key=lambda m: (m[1].start > 0, len(m[1].tokens))):
        if group and (
            len(member[1].tokens) > 1.5 * len(group[0][1].tokens) + 8 or (member[1].start > 0) != (group[0][1].start > 0)
        ):
            yield group
            group = []
        group.append(member)
    yield group
