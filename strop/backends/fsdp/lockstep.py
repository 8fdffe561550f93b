"""Keeps ranks in lockstep when one of them is out of memory (OOM) in the middle of a pass.

A pass has many collectives: all-gathers of weights, reduce-scatters of gradients. A rank that stops must
still take part in all collectives that are left, or the other ranks would wait forever. So collectives are
counted, and the rank makes its pass again over a single short row, without the collectives that are done
already. All ranks discard the result and start over with smaller micro-batches.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule


class _Collectives:
    """Of one pass: how many were done, and how many are not to be done again."""

    done = skipped = 0

    def due(self) -> bool:
        if self.skipped:
            self.skipped -= 1
            return False
        self.done += 1
        return True


class _Collective:
    """Replaces a collective of FSDP2; runs only while it is due."""

    def __init__(self, collectives: _Collectives):
        self.collectives = collectives

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self.collectives.due():
            return cast(
                "dist.Work | None", dist.all_gather_single(output_tensor, input_tensor, group, async_op)
            )
        output_tensor.zero_()
        return None


class _ReduceScatter(_Collective):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.collectives.due():
            work = dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)
            return cast("dist.Work | None", work)
        output_tensor.zero_()
        return None


class Lockstep:
    """Of one sharded module. `out_of_memory`: this rank stopped a pass since the flag was last cleared."""

    def __init__(self, units: list[FSDPModule], *, counted: bool):
        """`units` of FSDP2, the module itself last. `counted` is false where ranks also have collectives
        outside these units; then OOM remains an error."""
        self.out_of_memory = False
        self._root = units[-1]
        self._collectives = _Collectives()
        self._able = counted and hasattr(self._root, "reset_iter_state")  # torch 2.13
        if self._able:
            for unit in units:
                # They have the methods of torch's classes, which are not public.
                unit.set_custom_all_gather(cast(Any, _AllGather(self._collectives)))
                unit.set_custom_reduce_scatter(cast(Any, _ReduceScatter(self._collectives)))

    def run(self, work: Callable[[], None], stand_in: Callable[[], None]) -> None:
        """One pass of this rank: `work`, or where it is out of memory the rest of it by `stand_in`, a pass
        over little."""
        self._collectives.done = 0
        if self.out_of_memory:
            stand_in()
            return
        try:
            work()
            return
        except torch.OutOfMemoryError:
            if not self._able:
                raise
        self.out_of_memory = True
        self._root.reset_iter_state()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._collectives.skipped = self._collectives.done
        stand_in()
