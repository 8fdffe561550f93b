"""Attention during a rollout: a function registered with transformers, and the kinds of step behind it.

The model computes queries, keys and values and calls this function for the rest. What the function does is
decided by the object passed to the model as `rollout=`: `Prefill` (chunks of prompts packed into one row),
`Decode` (one token for each running row) or `SharedDecode` (the same, computed once for rows with equal
tokens). All of them write to the KV cache and read from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from strop.models.layouts.mixers import MixerForward
from strop.models.layouts.sequences import PackedSequences
from strop.models.layouts.states import RowStates
from strop.models.varlen import DEVICES, flash_kernels, varlen_kernel
from strop.rollout.native.cpu.decode_attention import decode_attention
from strop.rollout.native.decode_rows import SharedRows
from strop.rollout.native.kv_cache import KVCache, kernels
from strop.rollout.native.pages import PagedKVCache
from strop.rollout.native.requests import Member, PaddedChunks, PrefillChunk, similar_lengths

NAME = "strop_rollout"

Cache = KVCache | PagedKVCache


@dataclass(frozen=True)
class AttentionOptions:
    """Options of one layer's attention."""

    scale: float | None = None
    window: int | None = None
    """A query sees the last `window` positions, itself included."""
    softcap: float | None = None
    """Scores become softcap · tanh(scores / softcap)."""
    sinks: Tensor | None = None
    """One score per head that takes part in the softmax and has no value."""

    @property
    def is_plain(self) -> bool:
        """Whether the scores go into the softmax as they are."""
        return self.softcap is None and self.sinks is None

    @property
    def arguments(self) -> dict[str, float | int | Tensor | None]:
        """For decode_attention."""
        return {name: getattr(self, name) for name in ("scale", "window", "softcap", "sinks")}


class Step(Protocol):
    """One forward pass of a rollout."""

    def mix(self, mixer: MixerForward, hidden: Tensor) -> Tensor: ...

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor: ...


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
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface. Queries, keys and values are [B, heads, T, D] with
    positions already applied; the result is [B, T, heads, D]."""
    if rollout is None:
        raise ValueError(
            f"{type(module).__name__} is not given the engine's step: its model does not pass arguments on "
            "to attention, or it is run while the native engine samples from it"
        )
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} masks keys by a rule of its own; set rollout.name=hf.")
    options = AttentionOptions(scaling, sliding_window, softcap, s_aux)
    layer = module.layer_idx
    assert isinstance(layer, int)
    return rollout.attend(layer, query, key, value, options), None


AttentionInterface.register(NAME, rollout_attention)


@dataclass
class ShapeProbe:
    """Finds in one forward pass which layers attend, with how many heads of which size."""

    layers: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    states: RowStates = field(default_factory=RowStates)

    def mix(self, mixer: MixerForward, hidden: Tensor) -> Tensor:
        return self.states.probe(mixer, hidden)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        self.layers[layer] = (key.shape[1], key.shape[3], value.shape[3])
        self.dtype = key.dtype
        return attention_output(query, key, value, options, causal=True)


class Prefill:
    """Chunks of prompts in one packed row; each attends to its own sequence only."""

    def __init__(self, cache: Cache, chunks: Sequence[PrefillChunk], device: torch.device) -> None:
        self.cache = cache
        self._device = device
        self._members: list[Member] = []
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        bounds = [0]
        for chunk in chunks:
            self._members.append((len(ids), chunk))
            ids += chunk.tokens
            positions += range(chunk.start, chunk.end)
            rows += [chunk.row] * len(chunk.tokens)
            bounds.append(len(ids))
        self.ids = torch.tensor(ids, device=device)[None]
        self.positions = torch.tensor(positions, device=device)
        self.slots = cache.slots(torch.tensor(rows, device=device), self.positions)
        self.last = torch.tensor([end - 1 for end in bounds[1:]], device=device)
        """Index of the last token of each chunk."""
        self._bounds = torch.tensor(bounds, dtype=torch.int32, device=device)
        self._longest = max(len(chunk.tokens) for chunk in chunks)
        self._from_start = all(chunk.start == 0 for chunk in chunks)
        self._causal = all(chunk.reach is None for chunk in chunks)

    def mix(self, mixer: MixerForward, hidden: Tensor) -> Tensor:
        return self.cache.states.start(mixer, hidden, self._sequences)

    @cached_property
    def _sequences(self) -> PackedSequences:
        places = [(chunk.row, offset, len(chunk.tokens)) for offset, chunk in self._members]
        continued = [chunk.start > 0 for _, chunk in self._members]
        slots = [chunk.slot for _, chunk in self._members]
        return PackedSequences(places, self._device, continued, slots)

    @cached_property
    def groups(self) -> list[PaddedChunks]:
        return [PaddedChunks(members, self._device) for members in similar_lengths(self._members)]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        q = query[0].transpose(0, 1)  # [T, heads, D]
        k = key[0].transpose(0, 1)
        v = value[0].transpose(0, 1)
        k, v = self.cache.tensors.write(layer, self.slots, k, v)
        fits = options.is_plain and k.shape[2] == v.shape[2] and self._causal
        if fits and (q.device.type in DEVICES or (self._from_start and q.dtype == torch.bfloat16)):
            out = self._in_one_kernel(layer, q, k, v, options)
            if out is not None:
                return out[None]
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        for group in self.groups:
            queries = q[group.take].transpose(1, 2)
            if group.is_causal and (options.window is None or group.end <= options.window):
                keys = k[group.take].transpose(1, 2)
                values = v[group.take].transpose(1, 2)
                part = attention_output(queries, keys, values, options, causal=True)
            else:
                keys, values = self.cache.read(layer, group.rows, group.end)
                part = attention_output(queries, keys, values, options, mask=group.mask(options.window))
            out[group.put] = part.flatten(0, 1)[group.valid]
        return out[None]

    def _in_one_kernel(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor | None:
        """All chunks in one kernel, or None if there is no kernel for such heads."""
        more = {"scale": options.scale, "window": options.window}
        if self._from_start:
            kernel: Callable[..., Tensor] | None = varlen_kernel(q, k, v, options.window)
            if kernel is None:
                return None
            return kernel(q, k, v, self._bounds, self._longest, **more)
        flash: ModuleType | None = flash_kernels(q, k, v)
        if flash is None:
            return None
        keys, values = self.cache.whole(layer)
        starts, tables = self._starts_and_tables
        powers = self.cache.tensors.exponents(layer)
        out: Tensor = flash.continued_attention(
            q, keys, values, self._bounds, self._longest, starts, tables, powers, **more
        )
        return out

    @cached_property
    def _starts_and_tables(self) -> tuple[Tensor, Tensor]:
        """Start position and pages of each chunk."""
        starts = [chunk.start for _, chunk in self._members]
        rows = [chunk.row for _, chunk in self._members]
        both = torch.tensor([starts, rows], device=self._device)
        return both[0], self.cache.tables(both[1])


class Decode:
    """One token for each of the first rows of the cache.

    `spans` are (first row, end row, used length): rows are read in spans so that short rows do not pay for
    long ones.
    """

    def __init__(
        self,
        cache: Cache,
        rows: Tensor,
        positions: Tensor,
        spans: Sequence[tuple[int, int, int]],
        running: Tensor | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        """`running`: rows whose states are updated; None: all. `compiled`: with the C function of a CPU."""
        self.cache = cache
        self._running = running
        self._compiled = compiled
        self.rows = rows
        self.positions = positions
        self.spans = spans
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def mix(self, mixer: MixerForward, hidden: Tensor) -> Tensor:
        return self.cache.states.step(mixer, hidden, self._running)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        fast = kernels(query.device.type)
        if fast is not None:
            keys, values = self.cache.whole(layer)
            out: Tensor = fast.decode_attention(
                query,
                key.to(self.cache.dtype),
                value.to(self.cache.dtype),
                keys,
                values,
                self.positions,
                self.cache.tables(slice(0, len(self.positions))),
                max(used for *_, used in self.spans),
                exponents=self.cache.tensors.exponents(layer),
                **options.arguments,
            )
            return out
        # Query heads that share a key head become its queries: keys are read once and never repeated.
        folded = query[:, :, 0].unflatten(1, (key.shape[1], -1))
        if self._compiled and options.is_plain:
            keys, values = self.cache.whole(layer)
            newest = (key[:, :, 0], value[:, :, 0])
            return decode_attention(folded, keys, values, self.rows, self.positions, options, newest)
        self.cache.tensors.write(layer, self.slots, key[:, :, 0], value[:, :, 0])
        parts = []
        for span, (first, end, used) in enumerate(self.spans):
            keys, values = self.cache.read(layer, slice(first, end), used)
            mask = self._mask(span, options.window)
            queries = folded[first:end]
            parts.append(attention_output(queries, keys, values, options, mask=mask, folded=True))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts)

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        return self.cache.slots(self.rows, self.positions)

    def _mask(self, span: int, window: int | None) -> Tensor:
        if (span, window) not in self._masks:
            first, end, used = self.spans[span]
            keys = torch.arange(used, device=self.positions.device)
            self._masks[span, window] = causal_mask(self.positions[first:end, None], keys, window)[
                :, None, None
            ]
        return self._masks[span, window]


class SharedDecode:
    """One token for each of the first rows, computed once for rows that hold exactly the same tokens; each
    row keeps its own cache."""

    def __init__(
        self,
        cache: Cache,
        rows: Tensor,
        positions: Tensor,
        used: int,
        shared: SharedRows,
        *,
        compiled: bool = False,
    ) -> None:
        self.cache = cache
        self._compiled = compiled
        self.slots = cache.slots(rows, positions)
        self.positions = positions
        self.used = used
        self.shared = shared
        self._masks: dict[int | None, Tensor] = {}

    def mix(self, mixer: MixerForward, hidden: Tensor) -> Tensor:
        raise NotImplementedError("rows of models with states are not shared")

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        first = self.shared.first
        group = self.shared.group
        self.cache.tensors.write(layer, self.slots, key[group, :, 0], value[group, :, 0])
        folded = query[:, :, 0].unflatten(1, (key.shape[1], -1))
        if self._compiled and options.is_plain:
            keys, values = self.cache.whole(layer)
            return decode_attention(folded, keys, values, first, self.positions[first], options)
        keys, values = self.cache.read(layer, first, self.used)
        mask = self._masks.get(options.window)
        if mask is None:
            columns = torch.arange(self.used, device=self.positions.device)
            mask = causal_mask(self.positions[first, None], columns, options.window)[:, None, None]
            self._masks[options.window] = mask
        return attention_output(folded, keys, values, options, mask=mask, folded=True)


def causal_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Whether a query at a position sees a key: not in the future, and within the window."""
    seen = keys <= queries
    if window is not None:
        seen = seen & (queries - keys < window)
    return seen


def attention_output(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    folded: bool = False,
) -> Tensor:
    """softmax(q·k·scale)·v as [B, T, heads, D].

    `folded`: query is [B, key heads, heads per key head, D], a single position, instead of [B, heads, T, D].
    """
    if not options.is_plain:
        out = _eager_attention(query, key, value, options, mask, causal, folded)
    else:
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=options.scale, enable_gqa=grouped
        )
    if folded:
        return out.flatten(1, 2)[:, None]
    return out.transpose(1, 2)


def _eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    mask: Tensor | None,
    causal: bool,
    folded: bool,
) -> Tensor:
    """Attention by its definition, for options that fused kernels do not have."""
    repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeats, 1)
    value = value.repeat_interleave(repeats, 1)
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = (query @ key.transpose(2, 3)).float() * scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.float()
        sinks = sinks.view(query.shape[1], query.shape[2], 1) if folded else sinks.view(-1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
        return scores.softmax(-1)[..., :-1].to(value.dtype) @ value
    return scores.softmax(-1).to(value.dtype) @ value
