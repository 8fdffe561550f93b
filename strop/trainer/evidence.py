"""What is left of a batch whose loss was not a number: enough to compute the step again and to read the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.backends.nonfinite import NonFiniteLoss
from strop.run.durable import replace_text
from strop.run.plain_json import to_json
from strop.run.tensor_file import write_tensors
from strop.types import Batch


def write_evidence(
    folder: Path,
    problem: NonFiniteLoss,
    batch: Batch,
    texts: Sequence[Mapping[str, Any]],
    *,
    step: int,
) -> None:
    """batch.safetensors holds every table of the batch; rows.json says which rows are to blame and what all of them say."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "batch.safetensors", tensors_of(batch))
    blamed = set(problem.rows)
    rows: list[dict[str, Any]] = [
        {"row": row, "suspect": row in blamed, **text, "prompt_ids": prompt, "response_ids": response}
        for row, (text, (prompt, response)) in enumerate(zip(texts, _halves(batch), strict=True))
    ]
    told = {"step": step, "message": str(problem), "suspects": problem.rows, "not_finite": problem.causes, "rows": rows}
    replace_text(folder / "rows.json", to_json(told, indent=1))


def batch_rows(batch: Batch, decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """The rows of a batch to read, where nothing but their tokens is known."""
    return [{"input": decode(prompt), "output": decode(response)} for prompt, response in _halves(batch)]


def _halves(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Prompt and response of each row."""
    cuts = zip(batch.sequences, batch.prompt_lengths.tolist(), strict=True)
    return [(ids[:prompt].tolist(), ids[prompt:].tolist()) for ids, prompt in cuts]


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """The tables of a batch by name; token ids in one run, with the length of each sequence."""
    tables = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "sequences"}
    return {
        "token_ids": torch.cat(batch.sequences),
        "lengths": torch.tensor(batch.lengths),
        **{name: table for name, table in tables.items() if table is not None},
    }
