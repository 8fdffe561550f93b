"""A data loader: batches of rows in a seeded order, resumable at the exact row.

Its state is an epoch and the number of rows drawn in it; the order of an epoch is a function of the seed and
the epoch. A saved state holds a fingerprint of the data, because a position is valid for the same data only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any, Generic, Literal, Protocol, TypeVar

from strop.config.schema.data import DataConfig, SamplerConfig
from strop.data.prompts import PromptDataset, content_fingerprint
from strop.data.selection import Indices, Split, order_seed, permutation
from strop.data.workers import Prefetcher
from strop.registry import load_attribute
from strop.types import Prompt, Trajectory

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


class RowSampler(Protocol):
    """A user's order of rows: iterating it yields indices of the data set.

    It may also have `__len__`, `update(batch)`, `state_dict()` and `load_state_dict(state)`.
    """

    def __iter__(self) -> Iterator[int]: ...


class PromptLoader(Protocol):
    """A `Loader` of prompts, or its wrapper that knows which of them were trained on."""

    @property
    def epoch(self) -> int: ...

    def draw(self) -> list[Prompt]: ...

    def update(self, trajectories: list[Trajectory]) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Loader(Generic[Item]):
    """Draws batches (lists of items) from a data set."""

    def __init__(
        self,
        dataset: Sequence[Item],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        sampler: RowSampler | None = None,
        workers: int = 0,
    ):
        """`sampler` replaces the shuffled order; `workers` are processes that prepare items ahead of time."""
        if not len(dataset):
            raise ValueError("The data set holds no rows, so there is nothing to draw.")
        self.rows = len(sampler) if isinstance(sampler, Sized) else len(dataset)
        """Rows of an epoch."""
        if drop_last and self.rows < batch_size:
            source = "The data set has" if sampler is None else "data.sampler gives"
            raise ValueError(
                f"{source} {self.rows} rows, fewer than one batch of {batch_size}, so no step could be "
                f"made. Set data.train_batch_size (or data.gen_batch_size) to {self.rows} or less."
            )
        if workers and sampler is not None:
            raise ValueError(
                f"data.dataloader_num_workers={workers} prepares batches ahead of time, before data.sampler "
                "has seen the result of the step. Set data.dataloader_num_workers=0."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.sampler = sampler
        self.epoch = 0
        self.position = 0
        self._order: Sequence[int] | Indices = ()
        self._order_key: tuple[int, int] | None = None
        """Seed and epoch of `_order`."""
        self._sampled: Iterator[int] | None = None
        self._prefetcher: Prefetcher[Item] | None = None
        if workers:
            self._prefetcher = Prefetcher(dataset, workers)

    def __len__(self) -> int:
        """Batches per epoch."""
        batches, rest = divmod(self.rows, self.batch_size)
        if rest and not self.drop_last:
            return batches + 1
        return batches

    def __iter__(self) -> Iterator[list[Item]]:
        """Yield the remaining batches of this epoch; the next epoch begins with the next iteration."""
        while (batch := self._draw()) is not None:
            yield batch
        self._next_epoch()

    def rewind(self) -> None:
        """Go back to the beginning of the first epoch."""
        self._seek(0, 0)

    def draw(self) -> list[Item]:
        """Return the next batch, of the next epoch if this one has ended."""
        batch = self._draw()
        if batch is None:
            self._next_epoch()
            batch = self._draw()
        if batch is None:
            raise ValueError(
                f"data.sampler gave fewer than one batch of {self.batch_size} rows in a whole epoch."
            )
        return batch

    def update(self, batch: object) -> None:
        """Pass the result of a step to the sampler, for a curriculum."""
        if self.sampler is not None and hasattr(self.sampler, "update"):
            self.sampler.update(batch)

    def state_dict(self) -> dict[str, object]:
        """Return the position, and what is needed to check that it is valid."""
        state: dict[str, object] = {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rows": len(self.dataset),
            "fingerprint": content_fingerprint(self.dataset),
        }
        if self.sampler is not None and hasattr(self.sampler, "state_dict"):
            state["sampler"] = self.sampler.state_dict()
        return state

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_change: Literal["error", "restart"] = "error"
    ) -> None:
        """Continue where `state` was saved. If the data changed: raise, or `restart` the epoch with the new
        data."""
        fingerprint = content_fingerprint(self.dataset)
        if state["fingerprint"] != fingerprint:
            change = (
                f"The data changed since the checkpoint: it had {state['rows']} rows (fingerprint "
                f"{state['fingerprint']}), now there are {len(self.dataset)} ({fingerprint}). Row "
                f"{state['position']} of epoch {state['epoch']} is not the same row."
            )
            if on_change == "error":
                raise ValueError(
                    f"{change} Restore data.train_files, data.train_max_samples, data.seed and the length "
                    "filter as they were, or begin a new run (trainer.resume_mode=disable)."
                )
            logger.warning("%s Epoch %d starts again.", change, state["epoch"])
            self._seek(int(state["epoch"]), 0)
            return
        if (state["seed"], state["shuffle"]) != (self.seed, self.shuffle):
            logger.warning(
                "Rows continue in the order of the checkpoint (seed=%s, shuffle=%s), not as configured "
                "(seed=%s, shuffle=%s).",
                *(state["seed"], state["shuffle"], self.seed, self.shuffle),
            )
            self.seed = state["seed"]
            self.shuffle = state["shuffle"]
        self._seek(int(state["epoch"]), int(state["position"]))
        if self.sampler is not None:
            self._resume_sampler(self.sampler, state.get("sampler"))

    def close(self) -> None:
        """Stop the worker processes."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def order(self, epoch: int) -> Sequence[int] | Indices:
        """Return the indices of an epoch, in the order in which they are drawn without a sampler."""
        if not self.shuffle:
            return range(len(self.dataset))
        if self._order_key != (self.seed, epoch):
            self._order = permutation(len(self.dataset), seed=self.seed, stream=epoch)
            self._order_key = (self.seed, epoch)
        return self._order

    def _draw(self) -> list[Item] | None:
        indices = self._next_indices()
        if indices is None:
            return None
        if self._prefetcher is not None:
            batch = self._prefetcher.take(indices, self._following(self._prefetcher.depth))
        else:
            batch = [self.dataset[index] for index in indices]
        # Before the batch is returned: a state that is saved while the batch is used counts it as drawn.
        self.position += len(indices)
        return batch

    def _next_indices(self) -> list[int] | None:
        """Return the indices of the next batch, None at the end of the epoch."""
        if self.sampler is None:
            indices = self._slice(self.position)
        else:
            if self._sampled is None:
                self._sampled = iter(self.sampler)
            indices = [int(index) for index in islice(self._sampled, self.batch_size)]
        if not self._is_batch(indices):
            return None
        return indices

    def _is_batch(self, indices: list[int]) -> bool:
        if self.drop_last:
            return len(indices) == self.batch_size
        return bool(indices)

    def _slice(self, start: int) -> list[int]:
        order = self.order(self.epoch)
        return [int(index) for index in order[start : start + self.batch_size]]

    def _following(self, count: int) -> list[list[int]]:
        """Return the indices of up to `count` batches after the next one, in this epoch."""
        batches = []
        for number in range(1, count + 1):
            indices = self._slice(self.position + self.batch_size * number)
            if self._is_batch(indices):
                batches.append(indices)
        return batches

    def _next_epoch(self) -> None:
        self._seek(self.epoch + 1, 0)

    def _seek(self, epoch: int, position: int) -> None:
        self.epoch = epoch
        self.position = position
        self._sampled = None

    def _resume_sampler(self, sampler: RowSampler, state: object) -> None:
        """Restore the state of a sampler that has one; any other sampler yields its earlier rows again, which
        also brings a seeded generator to its place."""
        if state is not None and hasattr(sampler, "load_state_dict"):
            sampler.load_state_dict(state)
            return
        if hasattr(sampler, "update"):
            logger.warning(
                "data.sampler has update() but no state_dict() and load_state_dict(), so what it learned "
                "before the checkpoint is lost; only its position is restored."
            )
        for _ in range(self.epoch):
            rows = iter(sampler)
            while self._is_batch(list(islice(rows, self.batch_size))):
                pass
        self._sampled = islice(iter(sampler), self.position, None)


def build_loader(config: DataConfig, dataset: PromptDataset, *, split: Split = "train") -> Loader[Prompt]:
    """Build the loader of a configuration; training drops a short last batch, validation reads every row."""
    workers = config.dataloader_num_workers
    if split == "val":
        return Loader(
            dataset,
            config.val_batch_size or len(dataset),
            shuffle=config.validation_shuffle,
            seed=order_seed(config),
            drop_last=False,
            workers=workers,
        )
    return Loader(
        dataset,
        config.gen_batch_size or config.train_batch_size,
        shuffle=config.shuffle,
        seed=order_seed(config),
        sampler=build_sampler(config.sampler, dataset, config),
        workers=workers,
    )


def build_sampler(
    config: SamplerConfig, dataset: Sequence[object], data_config: DataConfig
) -> RowSampler | None:
    """Build the user's sampler (data.sampler) from (dataset, config); None if there is none."""
    if not config.class_path:
        return None
    if not config.class_name:
        raise ValueError(
            f"data.sampler.class_path={config.class_path} is set but data.sampler.class_name is not."
        )
    sampler: RowSampler = load_attribute(config.class_path, config.class_name)(dataset, data_config)
    if not hasattr(sampler, "__iter__"):
        raise ValueError(
            f"{config.class_name} in {config.class_path} has no __iter__; a sampler yields indices of rows."
        )
    return sampler
