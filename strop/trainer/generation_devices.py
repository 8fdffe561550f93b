"""One process per device, each with a model of its own and every n-th of the rows."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.multiprocessing as processes

from strop.config.schema.inference import Generation
from strop.registry import load_plugins
from strop.run.parts import Parts
from strop.trainer.build import device_of
from strop.trainer.generation_input import Questions, open_questions
from strop.trainer.generation_model import Answerer, Count, answer_rows
from strop.trainer.prepare import prepare_process

SECONDS_BETWEEN_LOOKS = 1.0


def answer_on_devices(config: Generation, questions: Questions, todo: Sequence[int], parts: Parts) -> Iterator[Count]:
    """Answer `todo` on all devices of the `trainer` section; gives an empty count when it begins, then one per batch."""
    device, count = device_of(config.trainer.device), config.trainer.n_gpus_per_node
    if config.trainer.nnodes > 1:
        raise ValueError(
            f"trainer.nnodes={config.trainer.nnodes}: generation runs on the devices of one machine. Divide the file and start "
            "one job per machine, with an output_path each."
        )
    if device.type == "cuda" and count > torch.cuda.device_count():
        raise ValueError(f"trainer.n_gpus_per_node={count}, but torch sees {torch.cuda.device_count()} GPUs here.")
    if count == 1 or len(todo) <= 1:
        answerer = Answerer(config, questions, device)
        yield Count()
        yield from answer_rows(answerer, todo, parts, config.data.batch_size)
        answerer.close()
        return
    yield from _spawn(config, todo, parts, device.type, count)


def _spawn(config: Generation, todo: Sequence[int], parts: Parts, kind: str, count: int) -> Iterator[Count]:
    context = processes.get_context("spawn")
    counts: Any = context.Queue()
    started = processes.spawn(_work, (config, list(todo), parts, kind, count, counts), nprocs=count, join=False)
    running = True
    while running or not counts.empty():
        try:
            yield counts.get(timeout=SECONDS_BETWEEN_LOOKS)
        except queue.Empty:
            running = not started.join(timeout=0)  # raises what a worker raised, and ends the others


def _work(rank: int, config: Generation, todo: list[int], parts: Parts, kind: str, count: int, counts: Any) -> None:
    prepare_process()
    load_plugins(config.plugins)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    answerer = Answerer(config, open_questions(config), device)
    counts.put(Count())
    for batch in answer_rows(answerer, todo[rank::count], parts, config.data.batch_size):
        counts.put(batch)
    answerer.close()
