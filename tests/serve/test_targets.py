"""Targets of the protocol as rows of a policy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strop.backends.base import Outputs
from strop.rewards.server_requests import RequestRefused
from strop.serve import targets as module
from strop.serve.losses import LOSSES
from strop.serve.messages import LossDatum
from strop.serve.targets import TargetRows
from strop.types import Batch

CROSS_ENTROPY = LOSSES["cross_entropy"]


def datum(targets: object, weights: object) -> LossDatum:
    return LossDatum(np.array([5, 6, 7]), {"target_tokens": np.array(targets), "weights": np.array(weights)})


def loss_of(rows: TargetRows, numbers: list[int], table: torch.Tensor) -> float:
    """The loss of some rows, by their numbers and log-probs."""
    batch = Batch([], torch.tensor([]), torch.tensor([]), row_ids=torch.tensor(numbers))
    return float(rows.loss(CROSS_ENTROPY, {})(Outputs(log_probs=table), batch))


def rows_of(rows: TargetRows) -> list[tuple[list[int], list[int]]]:
    return [(list(row.prompt), list(row.response)) for row in rows.data]


def test_next_tokens_are_one_row() -> None:
    rows = TargetRows([datum([6, 7, 8], [1.0, 0.0, 1.0])], CROSS_ENTROPY, backward=True)
    assert rows_of(rows) == [([5], [6, 7, 8])]
    table = torch.tensor([[-1.0, -2.0, -3.0]])
    assert loss_of(rows, [0], table) == 4.0


def test_another_target_is_a_row_of_its_own_where_it_has_weight() -> None:
    data = [datum([0, 9, 8], [0.0, 1.0, 1.0])]
    rows = TargetRows(data, CROSS_ENTROPY, backward=True)
    assert rows_of(rows) == [([5], [6, 7, 8]), ([5, 6], [9])]
    found = rows.log_probs([np.array([-1.0, -2.0, -3.0]), np.array([-4.0])])
    assert np.isnan(found[0][0]) and found[0][1:].tolist() == [-4.0, -3.0]
    table = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]])
    assert loss_of(rows, [0, 1], table) == 7.0
    # Each micro-batch has its rows in an order of its own, and its part of the sum.
    assert loss_of(rows, [1, 0], table.flip(0)) == 7.0
    assert (loss_of(rows, [0], table[:1]), loss_of(rows, [1], table[1:, :1])) == (3.0, 4.0)
    # Without a backward pass, somebody wants the log-probs themselves: all are computed.
    assert rows_of(TargetRows(data, CROSS_ENTROPY, backward=False))[1:] == [([5], [0]), ([5, 6], [9])]


def test_a_token_may_have_several_targets() -> None:
    rows = TargetRows([datum([[6, 1], [2, 7], [8, 8]], np.ones((3, 2)))], CROSS_ENTROPY, backward=True)
    assert rows_of(rows) == [([5], [6, 7, 8]), ([5], [1]), ([5, 6], [2])]
    found = rows.log_probs([np.array([-1.0, -2.0, -3.0]), np.array([-4.0]), np.array([-5.0])])
    assert found[0].tolist() == [[-1.0, -4.0], [-5.0, -2.0], [-3.0, -3.0]]


def test_too_many_other_targets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OTHER_TARGETS", 1)
    with pytest.raises(RequestRefused, match="More than 1 targets"):
        TargetRows([datum([1, 2, 3], [1.0, 1.0, 1.0])], CROSS_ENTROPY, backward=True)
