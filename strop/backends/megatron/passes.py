"""Passes over micro-batches through megatron-core's schedules: one after the other on one stage, 1F1B over
pipeline stages, interleaved with virtual stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.backends.megatron.library import megatron
from strop.backends.megatron.rows import MicroRow, MicroRows
from strop.backends.megatron.stage import StageChunk

LastStage = Callable[[StageChunk, Tensor, MicroRow], Tensor]
"""What the last stage does with the hidden states of a row; returns the number to differentiate."""
Recorder = Callable[[StageChunk, MicroRow], None]


def run_schedule(
    chunks: Sequence[StageChunk],
    rows: MicroRows,
    finish: LastStage,
    *,
    learn: bool,
    record: Recorder | None = None,
) -> None:
    """Forward (and, with `learn`, backward) passes of all rows. `record` is called after each forward pass of
    a row through a chunk."""
    if not len(rows):
        return
    length = 0
    if len(chunks) > 1:
        length = max(row.inputs.ids.shape[1] for row in rows)
    by_module = {id(chunk.gpt): chunk for chunk in chunks}

    def step(remaining: Iterator[MicroRow], module: Any) -> tuple[Tensor, Any]:
        row = next(remaining)
        chunk = by_module[id(module)]
        chunk.experts.begin(row.experts, chunk.padded(max(row.tokens, length)), learn=learn)
        hidden = chunk.run(row.inputs, length)
        chunk.experts.end()
        if record is not None:
            record(chunk, row)
        if not module.post_process:
            return hidden, None
        return finish(chunk, hidden, row), _as_it_is

    schedule = megatron("pipeline_parallel").get_forward_backward_func()
    modules = [chunk.gpt for chunk in chunks]
    iterators = [iter(rows) for _ in chunks]
    schedule(
        forward_step_func=step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=modules if len(chunks) > 1 else modules[0],
        num_microbatches=len(rows),
        # Read where all rows have one length; otherwise stages exchange shapes. It counts the tokens of all
        # context-parallel ranks.
        seq_length=chunks[0].padded(length) * chunks[0].gpt.config.context_parallel_size,
        micro_batch_size=1,
        forward_only=not learn,
    )


def _as_it_is(value: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch, which has its denominator inside."""
    return value, torch.ones((), dtype=torch.int, device=value.device), {}
