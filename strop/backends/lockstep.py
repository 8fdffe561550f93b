"""A rank that runs out of memory in the middle of a pass keeps step with the others.

Ranks meet many times in a pass: weights are gathered, gradients added up. A rank that breaks off must still come to all
meetings that are left, or the others would wait for it for ever. So they are counted, and the rank makes its pass again over a
single short row, without the meetings that took place already. What comes of it is thrown away by all, who then begin anew with
smaller micro-batches.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SharedLack(torch.OutOfMemoryError):
    """Some ranks had not enough memory, and all of them know."""

    def __init__(self, ranks: list[int]):
        super().__init__(f"out of memory on rank {', '.join(map(str, ranks))}")
        self.ranks = ranks


class _Meetings:
    """Of one pass: how many were held, and how many are not to be held again."""

    held = skipped = 0

    def due(self) -> bool:
        if self.skipped:
            self.skipped -= 1
            return False
        self.held += 1
        return True


class _Exchange:
    """What FSDP2 calls in the place of its own exchange, as long as the meeting is due."""

    def __init__(self, meetings: _Meetings):
        self.meetings = meetings

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Exchange):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        if self.meetings.due():
            return dist.all_gather_single(output_tensor, input_tensor, group, async_op)
        output_tensor.zero_()
        return None


class _Scatter(_Exchange):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if self.meetings.due():
            return dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)
        output_tensor.zero_()
        return None


class Lockstep:
    """Of one sharded module. `lacking` says whether this rank broke off a pass since it was last cleared."""

    def __init__(self, units: list[Any], *, counted: bool):
        """`units` of FSDP2, the module itself last. `counted` is false where ranks also meet elsewhere than in these units'
        own exchanges; then a lack of memory remains an error."""
        self.lacking = False
        self._root, self._meetings = units[-1], _Meetings()
        self._able = counted and hasattr(self._root, "reset_iter_state")  # torch 2.13
        if self._able:
            for unit in units:
                unit.set_custom_all_gather(_Gather(self._meetings))
                unit.set_custom_reduce_scatter(_Scatter(self._meetings))

    def made(self, work: Callable[[], None], stand_in: Callable[[], None]) -> None:
        """One pass of this rank: `work`, or where it lacks memory the rest of it by `stand_in`, a pass over little."""
        self._meetings.held = 0
        if self.lacking:
            stand_in()
            return
        try:
            work()
            return
        except torch.OutOfMemoryError:
            if not self._able:
                raise
        self.lacking = True
        self._root.reset_iter_state()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._meetings.skipped = self._meetings.held
        stand_in()
