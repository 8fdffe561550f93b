"""Batches of rows in a seeded order, resumable at the exact row.

A loader's whole state is an epoch and a number of rows drawn in it; the order of an epoch is a function of the seed and the
epoch. A state carries a fingerprint of the data, because a position in other data means nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

from strop.config.schema.data import Data, Sampler
from strop.data.custom import order_seed
from strop.data.prompts import PromptDataset, Split
from strop.data.selection import permutation
from strop.data.workers import Ahead, items
from strop.registry import load_attribute

logger = logging.getLogger(__name__)


class Loader:
    """Draws batches (lists of items) from anything with a length and items by place."""

    def __init__(
        self,
        dataset: Sequence[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        sampler: Any = None,
        workers: int = 0,
    ):
        """`sampler` replaces the shuffled order: iterating it gives places, and it may have update(batch), state_dict() and
        load_state_dict(). `workers` are processes that make items ahead of time."""
        if not len(dataset):
            raise ValueError("The data set holds no rows, so there is nothing to draw.")
        if drop_last and len(dataset) < batch_size:
            raise ValueError(
                f"The data set has {len(dataset)} rows, fewer than one batch of {batch_size}, so no step could be made. "
                f"Set data.train_batch_size (or data.gen_batch_size) to {len(dataset)} or less."
            )
        if workers and sampler is not None:
            raise ValueError(
                f"data.dataloader_num_workers={workers} makes batches ahead of time, before data.sampler has seen what came of "
                "the step. Set data.dataloader_num_workers=0."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.sampler = sampler
        self.epoch = 0
        self.position = 0
        self._order: tuple[tuple[int, int], Sequence[int]] | None = None
        self._sampled: Iterator[int] | None = None
        self._ahead = Ahead(dataset, workers) if workers else None

    def __len__(self) -> int:
        """Batches per epoch."""
        whole, rest = divmod(self._rows(), self.batch_size)
        return whole if self.drop_last or not rest else whole + 1

    def __iter__(self) -> Iterator[list[Any]]:
        """The batches that are left of this epoch; the next epoch begins at the next call."""
        while (batch := self._draw()) is not None:
            yield batch
        self._next_epoch()

    def draw(self) -> list[Any]:
        """The next batch, from the next epoch if this one is used up."""
        batch = self._draw()
        if batch is None:
            self._next_epoch()
            batch = self._draw()
        if batch is None:
            raise ValueError(f"data.sampler gave fewer than one batch of {self.batch_size} rows in a whole epoch.")
        return batch

    def update(self, batch: Any) -> None:
        """Tell a curriculum what came of a step."""
        if hasattr(self.sampler, "update"):
            self.sampler.update(batch)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rows": len(self.dataset),
            "fingerprint": _fingerprint(self.dataset),
        }
        if hasattr(self.sampler, "state_dict"):
            state["sampler"] = self.sampler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, on_change: Literal["error", "restart"] = "error") -> None:
        """Go on where `state` was taken. If the data changed since: refuse, or `restart` the epoch with the new data."""
        now = _fingerprint(self.dataset)
        if state["fingerprint"] != now:
            said = (
                f"The data changed since the checkpoint: it had {state['rows']} rows (fingerprint {state['fingerprint']}), now "
                f"there are {len(self.dataset)} ({now}). Row {state['position']} of epoch {state['epoch']} is not the same row."
            )
            if on_change == "error":
                raise ValueError(
                    f"{said} Restore data.train_files, data.train_max_samples, data.seed and the length filter as they were, "
                    "or begin a new run (trainer.resume_mode=disable)."
                )
            logger.warning("%s Epoch %d begins anew.", said, state["epoch"])
            self._go_to(int(state["epoch"]), 0)
            return
        if (state["seed"], state["shuffle"]) != (self.seed, self.shuffle):
            logger.warning(
                "Rows go on in the order of the checkpoint (seed=%s, shuffle=%s), not as configured (seed=%s, shuffle=%s).",
                *(state["seed"], state["shuffle"], self.seed, self.shuffle),
            )
            self.seed, self.shuffle = state["seed"], state["shuffle"]
        self._go_to(int(state["epoch"]), int(state["position"]))
        if self.sampler is not None:
            self._resume_sampler(state.get("sampler"))

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def _draw(self) -> list[Any] | None:
        places = self._places()
        if places is None:
            return None
        batch = self._ahead.take(places, self._following(places)) if self._ahead else items(self.dataset, places)
        self.position += len(places)  # before the batch is handed out: a state taken while it is used counts it as drawn
        return batch

    def _places(self) -> list[int] | None:
        """Places of the next batch, or None at the end of the epoch."""
        if self.sampler is None:
            places = self._slice(self.position)
        else:
            self._sampled = self._sampled or iter(self.sampler)
            places = [int(place) for place in islice(self._sampled, self.batch_size)]
        if not places or (self.drop_last and len(places) < self.batch_size):
            return None
        return places

    def _slice(self, start: int, epoch: int | None = None) -> list[int]:
        order = self.order(self.epoch if epoch is None else epoch)
        return [int(place) for place in order[start : start + self.batch_size]]

    def order(self, epoch: int) -> Sequence[int]:
        """The places of an epoch, in the order in which they are drawn without a sampler."""
        if not self.shuffle:
            return range(len(self.dataset))
        if self._order is None or self._order[0] != (self.seed, epoch):
            self._order = ((self.seed, epoch), permutation(len(self.dataset), seed=self.seed, stream=epoch))  # type: ignore[assignment]
        assert self._order is not None
        return self._order[1]

    def _following(self, places: list[int]) -> list[list[int]]:
        """The batches after this one, as far as this epoch goes."""
        assert self._ahead is not None
        starts = (self.position + len(places) + self.batch_size * number for number in range(self._ahead.depth))
        batches = (self._slice(start) for start in starts)
        return [batch for batch in batches if batch and (len(batch) == self.batch_size or not self.drop_last)]

    def _rows(self) -> int:
        return len(self.sampler) if hasattr(self.sampler, "__len__") else len(self.dataset)

    def _next_epoch(self) -> None:
        self._go_to(self.epoch + 1, 0)

    def _go_to(self, epoch: int, position: int) -> None:
        self.epoch, self.position, self._sampled = epoch, position, None

    def _resume_sampler(self, state: Any) -> None:
        """A sampler with a state goes on by itself; another one is run forward to the position."""
        if state is not None and hasattr(self.sampler, "load_state_dict"):
            self.sampler.load_state_dict(state)
            return
        if hasattr(self.sampler, "update"):
            logger.warning(
                "data.sampler has update() but no state_dict() and load_state_dict(), so what it learned before the checkpoint "
                "is lost; only its position is restored."
            )
        self._sampled = islice(iter(self.sampler), self.position, None)


def build_loader(config: Data, dataset: PromptDataset, *, split: Split = "train") -> Loader:
    """The loader of a configuration: training drops a last short batch, validation sees every row once."""
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


def build_sampler(config: Sampler, dataset: Sequence[Any], data_config: Any) -> Any:
    """The user's own order of rows: a class made from (dataset, config) that is iterated for places."""
    if not config.class_path:
        return None
    if not config.class_name:
        raise ValueError(f"data.sampler.class_path={config.class_path} is set but data.sampler.class_name is not.")
    sampler = load_attribute(config.class_path, config.class_name)(dataset, data_config)
    if not hasattr(sampler, "__iter__"):
        raise ValueError(f"{config.class_name} in {config.class_path} has no __iter__; a sampler gives the places of rows.")
    return sampler


def _fingerprint(dataset: Sequence[Any]) -> str:
    own = getattr(dataset, "fingerprint", None)
    return str(own()) if callable(own) else f"{type(dataset).__qualname__} of {len(dataset)}"
