"""A pass that does not fit into memory is made again: with what others can spare, then with micro-batches of half the size.
Slower, the same result."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from strop.backends.base import MicroBatching
from strop.backends.micro import halved
from strop.ranks import Ranks

T = TypeVar("T")
log = logging.getLogger(__name__)


class Thrift:
    """Remembers which sizes did not fit, so that a step fails once and not every time."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.count = 0
        self._ranks = ranks or Ranks()
        self._fits: dict[MicroBatching, MicroBatching] = {}
        self.relief: Callable[[], bool] = lambda: False
        """Makes others give memory back; whether they had any to give."""

    def tried(
        self, micro: MicroBatching, lengths: Sequence[int], work: Callable[[MicroBatching], T], *, again: bool = True
    ) -> T:
        """What `work` returns, with `micro` or as much smaller as it takes. With `again` false the first lack of memory is an
        error, and so is one that other ranks do not know of: they are in the middle of an exchange and cannot begin anew."""
        asked, micro = micro, self._fits.get(micro, micro)
        while True:
            try:
                return work(micro)
            except torch.OutOfMemoryError as error:
                alone = self._ranks.world > 1 and not hasattr(error, "ranks")
                smaller = micro if again and not alone and self._relieved() else halved(micro, lengths)
                short = getattr(error, "ranks", [self._ranks.rank])
                if smaller is None or not again or alone:
                    raise ValueError(self._advice(micro, smaller, short)) from error
                if smaller != micro:
                    log.warning("%s Going on with the smaller size.", self._advice(micro, smaller, short))
            if smaller != micro:
                self.count += 1
                self._fits[asked] = micro = smaller
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _relieved(self) -> bool:
        """All ranks come to the same answer."""
        gave = any(self._ranks.gather(self.relief()))
        if gave:
            log.info("Out of memory: the rollout engine gave back the cache that it had kept.")
        return gave

    def _advice(self, micro: MicroBatching, smaller: MicroBatching | None, short: Sequence[int]) -> str:
        named = ", ".join(map(str, short))
        who = f"Rank {named} of {self._ranks.world}" if self._ranks.world > 1 else "The device"
        if smaller is None:
            return (
                f"{who} is out of memory with micro-batches of one row. Use shorter sequences, "
                "model.enable_gradient_checkpointing, fsdp_config.optimizer_offload, or more devices."
            )
        if micro.max_tokens is not None:
            return (
                f"{who} is out of memory with micro-batches of {micro.max_tokens} tokens. Set the *_max_token_len_per_gpu of "
                f"this role to {smaller.max_tokens}."
            )
        return (
            f"{who} is out of memory with micro-batches of {micro.rows} rows. Set the *_micro_batch_size_per_gpu of this role "
            f"to {smaller.rows}."
        )
