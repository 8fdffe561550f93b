"""Files about a batch with a non-finite loss: enough to compute the step again and to read its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from strop.backends.micro_batches import NonFiniteLoss
from strop.run.atomic_files import replace_text, to_json
from strop.run.checkpoint.tensor_files import write_tensors
from strop.types import Batch


def write_evidence(
    folder: Path,
    problem: NonFiniteLoss,
    batch: Batch,
    texts: Sequence[Mapping[str, object]],
    *,
    step: int,
) -> None:
    """Write batch.safetensors, with every tensor of the batch, and rows.json, with the text of all rows and
    which of them are suspect."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "batch.safetensors", tensors_of(batch))
    rows: list[dict[str, object]] = [
        {"row": row, "suspect": row in problem.rows, **text, "prompt_ids": prompt, "response_ids": response}
        for row, (text, (prompt, response)) in enumerate(
            zip(texts, _prompts_and_responses(batch), strict=True)
        )
    ]
    content = {
        "step": step,
        "message": str(problem),
        "suspects": problem.rows,
        "not_finite": problem.causes,
        "rows": rows,
    }
    replace_text(folder / "rows.json", to_json(content, indent=1))


def batch_rows(batch: Batch, decode: Callable[[list[int]], str]) -> list[dict[str, object]]:
    """The text of the rows of a batch, from their tokens."""
    return [
        {"input": decode(prompt), "output": decode(response)}
        for prompt, response in _prompts_and_responses(batch)
    ]


def _prompts_and_responses(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Prompt and response of each row."""
    cuts = zip(batch.sequences, batch.prompt_lengths.tolist(), strict=True)
    return [(ids[:prompt].tolist(), ids[prompt:].tolist()) for ids, prompt in cuts]


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch by name; token ids are concatenated, with the length of each sequence."""
    tables = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "sequences"}
    return {
        "token_ids": torch.cat(batch.sequences),
        "lengths": torch.tensor(batch.lengths),
        **{name: table for name, table in tables.items() if table is not None},
    }
