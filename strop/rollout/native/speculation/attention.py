"""Attention of a pass with several tokens of each row."""

from __future__ import annotations

from functools import cache, cached_property
from types import ModuleType

import torch
from torch import Tensor

from strop.extras import require
from strop.models.layouts.mixers import MixerForward
from strop.rollout.native.attention import AttentionOptions, Cache, attention_output, causal_mask
from strop.rollout.native.kv_cache import kernels


@cache
def draft_kernels(device: str) -> ModuleType | None:
    """The Triton kernels of passes with drafts for a device type, or None."""
    if kernels(device) is None:
        return None
    return require("strop.rollout.native.speculation.kernels", extra="gpu", why="Fast decoding on a GPU")


class AheadDecode:
    """`ahead` tokens for each of the first rows: to the kernels each token is a row of its own, with the
    pages of its sequence, so its bits are those of an ordinary step. All keys and values of the pass are
    stored before any are read."""

    def __init__(self, cache: Cache, rows: Tensor, positions: Tensor, ahead: int, longest: int) -> None:
        """`rows` and `positions`: of each token, those of one row next to each other."""
        self.cache = cache
        self.rows = rows
        self.positions = positions
        self.ahead = ahead
        self.longest = longest
        self._masks: dict[int | None, Tensor] = {}

    def mix(self, mixer: MixerForward, hidden: Tensor) -> Tensor:
        raise NotImplementedError("states cannot be taken back")

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        fast = kernels(query.device.type)
        stores = draft_kernels(query.device.type)
        if fast is not None and stores is not None:
            keys, values = self.cache.whole(layer)
            key = key.to(self.cache.dtype)
            value = value.to(self.cache.dtype)
            exponents = self.cache.tensors.exponents(layer)
            stores.store(key, value, keys, values, self.positions, self._tables, exponents)
            out: Tensor = fast.decode_attention(
                query,
                key,
                value,
                keys,
                values,
                self.positions,
                self._tables,
                self.longest,
                exponents=exponents,
                **options.arguments,
            )
            return out
        self.cache.tensors.write(layer, self.slots, key[:, :, 0], value[:, :, 0])
        count = len(self.rows) // self.ahead
        keys, values = self.cache.read(layer, slice(0, count), self.longest)
        queries = query[:, :, 0].unflatten(0, (count, self.ahead)).transpose(1, 2)
        mask = self._masks.get(options.window)
        if mask is None:
            columns = torch.arange(self.longest, device=self.positions.device)
            mask = causal_mask(self.positions.view(count, 1, -1, 1), columns, options.window)
            self._masks[options.window] = mask
        return attention_output(queries, keys, values, options, mask=mask).flatten(0, 1)[:, None]

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        return self.cache.slots(self.rows, self.positions)

    @cached_property
    def _tables(self) -> Tensor:
        return self.cache.tables(self.rows)
