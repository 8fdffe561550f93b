"""Out of memory: the same result with smaller micro-batches, counted, and said which key to change."""

from __future__ import annotations

import logging

import pytest
import torch

from strop.backends.base import MicroBatching
from strop.backends.micro_batches import OomRetry, halved
from strop.backends.single import SingleBackend
from strop.ranks import Ranks
from tests.backends.make import make_backend, single
from tests.backends.test_conformance import flat_gradient, optim, policy_loss
from tests.models.tiny import tiny_batch, tiny_model
from tests.tolerance import assert_same_sum


class SmallDevice(SingleBackend):
    """Has room for so many tokens; the lack shows after a part of the pass is done."""

    room = 30

    def _outputs(self, piece, want):
        found = super()._outputs(piece, want)
        if sum(piece.lengths) > self.room:
            if torch.is_grad_enabled():
                found["log_probs"].sum().backward()  # what a pass that breaks off may leave behind
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found


@pytest.mark.parametrize(
    "micro", [MicroBatching(rows=4), MicroBatching(max_tokens=50)], ids=["rows", "tokens"]
)
def test_a_pass_that_does_not_fit_is_made_again_with_half(micro, caplog):
    batch = tiny_batch()
    small, large = make_backend(SmallDevice, tiny_model(), optim=optim()), single(tiny_model(), optim=optim())
    with caplog.at_level(logging.WARNING):
        found = small.forward_backward(batch, ["log_probs"], policy_loss, micro)
    expected = large.forward_backward(batch, ["log_probs"], policy_loss, micro)
    assert found == pytest.approx(expected, rel=1e-6)
    assert_same_sum(flat_gradient(small), flat_gradient(large), terms=sum(batch.lengths))
    tries = small.out_of_memory
    assert tries >= 1
    key = "micro_batch_size_per_gpu" if micro.max_tokens is None else "max_token_len_per_gpu"
    assert key in caplog.text and "continues with the smaller size" in caplog.text
    small.step()
    small.forward_backward(batch, ["log_probs"], policy_loss, micro)
    assert small.out_of_memory == tries, "a size that did not fit is not tried twice"
    torch.testing.assert_close(
        small.forward(batch, ["log_probs"], MicroBatching(rows=3)).log_probs.shape, batch.mask.shape
    )


def test_a_longer_row_than_the_size_that_was_found_has_room_again():
    """Responses grow during a run: the budget of a step with short rows must not refuse a later one."""
    batch = tiny_batch()
    micro = MicroBatching(max_tokens=max(batch.lengths) + 10)
    small = make_backend(SmallDevice, tiny_model(), optim=optim())
    short = batch.select([row for row, length in enumerate(batch.lengths) if length < max(batch.lengths)])
    small.room = max(short.lengths)
    small.forward(short, ["log_probs"], micro)
    assert small.out_of_memory, "the budget was halved below the longest row of the whole batch"
    small.room = max(batch.lengths)
    found = small.forward(batch, ["log_probs"], micro).log_probs
    expected = single(tiny_model(), optim=optim()).forward(batch, ["log_probs"], micro).log_probs
    torch.testing.assert_close(found, expected)
    small.room -= 1
    with pytest.raises(ValueError, match="out of memory with micro-batches of one row"):
        small.forward(batch, ["log_probs"], micro)


def test_what_others_can_spare_comes_before_smaller_micro_batches():
    batch, micro = tiny_batch(), MicroBatching(rows=4)
    asked = []

    def release_memory() -> bool:
        asked.append(small.room)
        small.room *= 10
        return True

    small = make_backend(SmallDevice, tiny_model(), optim=optim(), on_out_of_memory=release_memory)
    large = single(tiny_model(), optim=optim())
    for backend in (small, large):
        backend.forward_backward(batch, ["log_probs"], policy_loss, micro)
    assert_same_sum(flat_gradient(small), flat_gradient(large), terms=sum(batch.lengths))
    assert asked == [30] and small.out_of_memory == 0


def test_what_cannot_be_tried_again_says_what_to_set():
    batch = tiny_batch()
    tiny = make_backend(SmallDevice, tiny_model(), optim=optim())
    tiny.room = 5
    with pytest.raises(ValueError, match="out of memory with micro-batches of one row"):
        tiny.forward(batch, ["log_probs"], MicroBatching(rows=4))

    def never(micro: MicroBatching) -> None:
        raise torch.OutOfMemoryError

    with pytest.raises(
        ValueError,
        match=r"Rank 1 of 4 is out of memory with micro-batches of 8 rows\. Set the \*_micro_batch",
    ):
        OomRetry(Ranks(1, 4)).run(MicroBatching(rows=8), [3] * 16, never)


def test_halves_keep_rows_together_and_hold_the_longest():
    assert halved(MicroBatching(rows=6, rows_per_item=2), [4] * 12) == MicroBatching(rows=2, rows_per_item=2)
    assert halved(MicroBatching(rows=18, rows_per_item=2), [4] * 16) == MicroBatching(rows=8, rows_per_item=2)
    assert halved(MicroBatching(rows=100), [4] * 10) == MicroBatching(rows=5)
    assert halved(MicroBatching(rows=1), [4] * 10) is None
    assert halved(MicroBatching(max_tokens=64), [30, 10]) == MicroBatching(max_tokens=30)
    assert halved(MicroBatching(max_tokens=30), [30, 10]) is None
    pairs = MicroBatching(max_tokens=50, rows_per_item=2)
    assert halved(pairs, [10, 20, 25, 5]) == MicroBatching(max_tokens=30, rows_per_item=2)
