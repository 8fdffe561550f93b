"""Target tokens of the protocol as rows of a policy.

A datum has tokens and, per token, a target whose log-prob is wanted. Nearly always the target is the next
token. So a datum is one row: its first token as prompt, the rest and the last target as response. Any other
target is a row of its own: the tokens up to there as prompt, and the target as response. Rows with a common
beginning are computed together, so such a row costs about one token.

Clients fill targets that have no weight with anything. They get no row, and their log-prob is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from strop.backends.base import Outputs
from strop.policy.batches import Datum
from strop.policy.losses import SumLoss
from strop.rewards.server_requests import RequestRefused
from strop.serve.losses import ServedLoss, summed_loss
from strop.serve.messages import LossDatum
from strop.types import Batch

MAX_OTHER_TARGETS = 65536
"""Targets of one request that are not the next token."""


@dataclass(frozen=True)
class Places:
    """Where the log-prob of each target of a datum is found: row and column of the outputs."""

    rows: np.ndarray
    columns: np.ndarray
    absent: np.ndarray
    """True where it is not computed; the place is that of another token."""


class TargetRows:
    """The rows of a training request."""

    def __init__(self, data: Sequence[LossDatum], loss: ServedLoss, *, backward: bool) -> None:
        self._sources = data
        self.data: list[Datum] = []
        for datum in data:
            tokens = datum.tokens.tolist()
            last = int(datum.targets.reshape(len(tokens), -1)[-1, 0])
            self.data.append(Datum(tokens[:1], [*tokens[1:], last]))
        self._places = [self._find(row, datum, loss, backward) for row, datum in enumerate(data)]

    def _find(self, row: int, datum: LossDatum, loss: ServedLoss, backward: bool) -> Places:
        """Places of a datum's targets; adds a row for each that is not the next token."""
        length = len(datum.tokens)
        following = np.asarray(self.data[row].response).reshape(length, *[1] * (datum.targets.ndim - 1))
        other = datum.targets != following
        absent = np.zeros_like(other)
        if backward and loss.factor is not None:
            absent = other & (datum.inputs[loss.factor] == 0)
        rows = np.full(datum.targets.shape, row)
        columns = np.broadcast_to(np.arange(length).reshape(following.shape), datum.targets.shape).copy()
        tokens = datum.tokens.tolist()
        for place in zip(*np.nonzero(other & ~absent), strict=True):
            if len(self.data) - len(self._sources) >= MAX_OTHER_TARGETS:
                raise RequestRefused(
                    413,
                    f"More than {MAX_OTHER_TARGETS} targets of this request are not the next token of their "
                    "sequence. Send fewer at a time.",
                )
            rows[place] = len(self.data)
            columns[place] = 0
            self.data.append(Datum(tokens[: int(place[0]) + 1], [int(datum.targets[place])]))
        return Places(rows, columns, absent)

    def loss(self, loss: ServedLoss, settings: Mapping[str, float]) -> SumLoss:
        """The loss of the request: a sum over targets, and each is in one row. The targets of all data are
        one flat tensor, so a micro-batch has as few kernels with many data as with one."""
        rows = np.concatenate([places.rows.reshape(-1) for places in self._places])
        columns = np.concatenate([places.columns.reshape(-1) for places in self._places])
        inputs = {}
        for name in loss.inputs:
            inputs[name] = np.concatenate([datum.inputs[name].reshape(-1) for datum in self._sources])

        def part(outputs: Outputs, batch: Batch) -> Tensor:
            table = outputs.log_probs
            assert table is not None and batch.row_ids is not None
            here = np.full(len(self.data), -1)
            here[batch.row_ids.numpy()] = np.arange(len(table))
            places = here[rows]
            own = places >= 0
            where = torch.from_numpy(places[own] * table.shape[1] + columns[own]).to(table.device)
            chosen = {name: values[own] for name, values in inputs.items()}
            return summed_loss(loss, settings, table.reshape(-1)[where], chosen)

        return SumLoss(part)

    def log_probs(self, found: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The log-probs of the targets of each datum, from those of all rows."""
        starts = np.cumsum([0, *(len(row) for row in found)])
        flat = np.concatenate(found)
        result = []
        for places in self._places:
            values = flat[starts[places.rows] + places.columns].astype(np.float32)
            values[places.absent] = np.nan
            result.append(values)
        return result
