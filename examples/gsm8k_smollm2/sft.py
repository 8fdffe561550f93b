"""A short warm-up on worked solutions: `python sft.py --model PATH --out FOLDER`.

At temperature 1 the plain model almost never writes `#### 42`, so a strict reward would have nothing to say. A pass or two over
the training split's solutions teaches the form. Loss falls on the solution alone; the result is a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from evaluate import accuracy
from torch import Tensor

from strop.algorithms.aggregation import Totals
from strop.algorithms.sft import sft_loss
from strop.backends.base import Loss, MicroBatching, Outputs
from strop.backends.single import SingleBackend
from strop.config.schema.model import Model, Optim
from strop.data.chat import Chat
from strop.data.files import open_rows
from strop.models.build import build_policy, build_tokenizer, compute_dtype
from strop.trainer.build import device_of
from strop.types import Batch

Example = tuple[list[int], int]
"""Ids up to the end of the solution, and how many of them are the prompt."""


def examples(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[Example]:
    chat = Chat(tokenizer)
    made = []
    for row in rows:
        answer = {"role": "assistant", "content": row["extra_info"]["answer"]}
        rendered = chat.conversation([*row["prompt"], answer], learn_from=len(row["prompt"]))
        end = len(rendered.mask) - rendered.mask[::-1].index(1)  # the template's newline behind the turn teaches nothing
        made.append((rendered.ids[:end], rendered.mask.index(1)))
    return made


def batch_of(chosen: Sequence[Example]) -> Batch:
    mask = torch.zeros(len(chosen), max(len(ids) - prompt for ids, prompt in chosen))
    for row, (ids, prompt) in enumerate(chosen):
        mask[row, : len(ids) - prompt] = 1.0
    return Batch(
        sequences=[torch.tensor(ids) for ids, _ in chosen],
        prompt_lengths=torch.tensor([prompt for _, prompt in chosen]),
        mask=mask,
        groups=torch.arange(len(chosen)),
    )


def batches(made: Sequence[Example], rows: int, generator: torch.Generator) -> Iterator[Batch]:
    """One epoch in random order; what does not fill a batch is left for the next epoch's order."""
    order = torch.randperm(len(made), generator=generator).tolist()
    for start in range(0, len(made) - rows + 1, rows):
        yield batch_of([made[i] for i in order[start : start + rows]])


def cross_entropy(batch: Batch) -> Loss:
    totals = Totals.of(batch.mask)

    def loss(outputs: Outputs, micro: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        assert outputs.log_probs is not None
        value = sft_loss(outputs.log_probs, micro.mask, totals)
        return value, {"loss": value.detach()}

    return loss


def save(backend: SingleBackend, tokenizer: Any, folder: Path) -> None:
    module: Any = backend.module
    module.save_pretrained(folder, state_dict=dict(backend.export_weights()))
    tokenizer.save_pretrained(folder)


def one_epoch(backend: SingleBackend, made: Sequence[Example], rows: int, generator: torch.Generator) -> list[float]:
    losses = []
    for batch in batches(made, rows, generator):
        reported = backend.forward_backward(batch, ["log_probs"], cross_entropy(batch), MicroBatching(max_tokens=32768))
        backend.step()
        backend.advance_schedule()
        losses.append(reported["loss"])
    return losses


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", default="runs/gsm8k_smollm2/data/train.parquet")
    parser.add_argument("--test", help="greedy accuracy on this file after every epoch")
    parser.add_argument("--out", default="runs/gsm8k_smollm2/sft")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=64, help="solutions per update")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--max-rows", type=int, default=-1, help="of the training file and of the test file")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="auto")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    asked = parse(arguments)
    device, most = device_of(asked.device), asked.max_rows if asked.max_rows > 0 else None
    settings = Model(path=asked.model, enable_gradient_checkpointing=False)
    tokenizer = build_tokenizer(settings)
    made = examples(list(open_rows(asked.data))[:most], tokenizer)
    test = list(open_rows(asked.test))[:most] if asked.test else []
    updates = asked.epochs * (len(made) // asked.rows)
    if updates < 1:
        raise ValueError(f"--rows {asked.rows} is more than the {len(made)} rows of {asked.data}. Lower it.")
    backend = SingleBackend(
        build_policy(settings),
        optim=Optim(lr=asked.lr, lr_warmup_steps_ratio=0.05, lr_scheduler_type="cosine", total_training_steps=updates),
        device=device,
        compute=compute_dtype("bfloat16", device),
    )
    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(asked.seed)
    with (out / "metrics.jsonl").open("w") as log:
        for epoch in range(1, asked.epochs + 1):
            begun = time.perf_counter()
            losses = one_epoch(backend, made, asked.rows, generator)
            spent, mean = time.perf_counter() - begun, sum(losses) / len(losses)
            found = accuracy(backend.module, tokenizer, test, max_tokens=asked.max_tokens) if test else {}
            values = {"epoch": epoch, "updates": len(losses), "loss": mean, "seconds": spent, "test": found}
            print(json.dumps(values), file=log, flush=True)
            print(f"epoch {epoch}: loss {mean:.3f}, {spent:.0f} s, strict accuracy {found.get('strict', float('nan')):.2%}")
    save(backend, tokenizer, out)
    print(f"saved to {out}")


if __name__ == "__main__":
    main()
