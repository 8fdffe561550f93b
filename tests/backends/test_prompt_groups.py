"""Samples of a prompt share a micro-batch and a rank, so that a pass computes the prompt and its images once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from strop.backends.base import MicroBatching
from strop.backends.micro_batches import partition, rows_by_prompt, shard_rows
from strop.models.packing import lay_out, rectangle
from strop.types import Batch, ImageInput


def groups(prompts: int, samples: int, images: bool) -> Batch:
    """Prompts of 30 tokens, with images of the same text where there are some; answers of 4 to 12."""
    draw = random.Random(0)
    sequences = []
    shown = []
    for prompt in range(prompts):
        begin = [1] * 29 + [0 if images else prompt]
        image = ImageInput(f"{prompt:064x}", {}, 4)
        for _ in range(samples):
            answer = [draw.randrange(200, 900) for _ in range(draw.randint(4, 12))]
            sequences.append(torch.tensor([*begin, *answer]))
            shown.append((image,))
    order = draw.sample(range(len(sequences)), len(sequences))
    width = max(len(one) for one in sequences) - 30
    return Batch(
        sequences=[sequences[row] for row in order],
        prompt_lengths=torch.full((len(order),), 30),
        mask=torch.ones(len(order), width),
        images=[shown[row] for row in order] if images else None,
    )


def distinct(groups_of: Sequence[list[int]], parts: Sequence[list[int]]) -> int:
    """Prompts of all parts, counted in each part."""
    own = {row: number for number, rows in enumerate(groups_of) for row in rows}
    return sum(len({own[row] for row in part}) for part in parts)


@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
@pytest.mark.parametrize("micro", [MicroBatching(max_tokens=700), MicroBatching(rows=16)], ids=str)
def test_a_prompt_is_computed_once(micro: MicroBatching, images: bool) -> None:
    batch = groups(20, 8, images)
    prompts = rows_by_prompt(batch)
    assert sorted(len(rows) for rows in prompts) == [8] * 20
    parts = partition(batch, micro)
    assert sorted(row for part in parts for row in part) == list(range(160))
    if micro.max_tokens is None:
        assert {len(part) for part in parts} == {16}
        if images:
            assert distinct(prompts, parts) == 20
        return
    assert max(sum(batch.lengths[row] for row in part) for part in parts) <= micro.max_tokens
    assert distinct(prompts, parts) <= 20 + len(parts) - 1, "a border of micro-batches divides one prompt"
    if not images:
        rows = [rectangle([batch.sequences[row] for row in part]) for part in parts]
        computed = sum(lay_out(table, packed=True).ids.numel() for table in rows)
        once = sum(batch.lengths) - 30 * (160 - 20)
        assert computed <= once + 30 * len(parts)


@pytest.mark.parametrize(("size", "rows"), [(1, 4), (2, 5), (2, 4)])
def test_rows_of_similar_length_share_a_micro_batch_and_the_longest_come_first(size: int, rows: int) -> None:
    lengths = [4, 5, 30, 31, 9, 8, 20, 21, 12, 13, 6, 7]
    batch = Batch(
        sequences=[torch.arange(length) for length in lengths],
        prompt_lengths=torch.tensor(lengths) - 1,
        mask=torch.ones(12, 1),
    )
    parts = partition(batch, MicroBatching(rows=rows, rows_per_item=size))
    if size == 1:
        assert parts == [[3, 2, 7, 6], [9, 8, 4, 5], [11, 10, 1, 0]]
    else:
        assert parts == [[2, 3, 6, 7], [8, 9, 4, 5], [10, 11, 0, 1]]


def test_micro_batches_of_neighbours_begin_with_the_longest_prompt_and_may_have_one_row() -> None:
    batch = groups(3, 2, images=True)
    answers = [[1] * 4, [1] * 9, [1] * 6]
    sequences = [torch.tensor([1] * 30 + answers[row // 2]) for row in range(6)]
    shown = [(ImageInput(f"{row // 2:064x}", {}, 4),) for row in range(6)]
    batch = batch.replace(sequences=sequences, images=shown)
    assert partition(batch, MicroBatching(rows=4)) == [[2, 3, 4, 5], [0, 1]]
    assert partition(batch, MicroBatching(rows=1)) == [[2], [3], [4], [5], [0], [1]]
    with pytest.raises(ValueError, match="at least one row, not 0"):
        partition(batch, MicroBatching(rows=0))


def test_a_rank_has_whole_prompts_if_the_work_is_equal() -> None:
    batch = groups(20, 8, images=True)
    prompts = rows_by_prompt(batch)
    shards = shard_rows(batch.lengths, 4, prompts=prompts)
    assert sorted(row for shard in shards for row in shard) == list(range(160))
    assert distinct(prompts, shards) == 20
    tokens = [sum(batch.lengths[row] for row in shard) for shard in shards]
    assert max(tokens) <= 1.05 * sum(tokens) / 4
    few = groups(5, 8, images=True)  # two ranks: 16 and 24 rows would be work of 1.2 times the mean
    shards = shard_rows(few.lengths, 2, prompts=rows_by_prompt(few))
    assert [len(shard) for shard in shards] == [20, 20]
    crossed = [[0, 3], [1, 2], [4, 7], [5, 6]]
    for shard in shard_rows([10] * 8, 2, rows_per_item=2, prompts=crossed):
        assert [row // 2 for row in shard[::2]] == [row // 2 for row in shard[1::2]], "pairs come first"
