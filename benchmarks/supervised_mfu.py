"""Model-flops utilisation of supervised training on one GPU: `python benchmarks/supervised.py mfu`.

A model of the Qwen2.5-0.5B shape with random weights learns packed rows. What counts is the arithmetic the
model needs (two operations per weight and token forward, four backward; causal attention), not what is
recomputed, over the time of a whole update with its optimizer step, divided by the rate that a large bf16
matrix product reaches on the same device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "toy": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument(
        "--length", type=int, default=2048, help="longest row; rows share packs of this many tokens"
    )
    parser.add_argument("--packs", type=int, default=32, help="packs per update")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per micro-batch")
    parser.add_argument(
        "--shortest", type=int, default=0, help="shortest row; 0: every row has --length tokens"
    )
    parser.add_argument("--taught", type=float, default=1.0, help="share of every row that is taught")
    parser.add_argument(
        "--checkpointing", action="store_true", help="compute activations again in the backward pass"
    )
    parser.add_argument("--liger", action="store_true")
    return parser.parse_args(words)


def build(asked: argparse.Namespace, device: torch.device) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from strop.backends.base import BackendSettings
    from strop.backends.single import SingleBackend
    from strop.config.schema.model import OptimConfig
    from strop.models.build import compute_dtype
    from strop.models.checkpointing import checkpoint_activations

    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(**SHAPES[asked.shape], max_position_embeddings=asked.length))
    if asked.checkpointing:
        checkpoint_activations(model)
    if asked.liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
    settings = OptimConfig(lr=1e-6, lr_warmup_steps=0)
    return SingleBackend(
        model, BackendSettings(optim=settings, device=device, compute=compute_dtype("bfloat16", device))
    )


def batch_of(asked: argparse.Namespace) -> Any:
    """Random tokens: whole packs, or rows of mixed lengths that fill as many packs."""
    from strop.data.chat import Rendered
    from strop.shared.rendered_batch import rendered_batch

    generator = torch.Generator().manual_seed(0)
    rows, left = [], asked.packs * asked.length
    while left > 1:
        longest = min(asked.length, left)
        size = (
            longest
            if not asked.shortest
            else int(torch.randint(asked.shortest, asked.length + 1, (1,), generator=generator))
        )
        size = min(size, longest)
        prompt = max(1, round(size * (1 - asked.taught)))
        ids = torch.randint(SHAPES[asked.shape]["vocab_size"], (size,), generator=generator).tolist()
        rows.append(Rendered(ids, [0] * prompt + [1] * (size - prompt)))
        left -= size
    return rendered_batch([row for row in rows if any(row.mask)])


def operations(asked: argparse.Namespace, batch: Any) -> float:
    """Forward and backward of one update, without recomputation and without what is not taught in the
    head."""
    shape = SHAPES[asked.shape]
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    width = hidden // heads
    linear = (
        layers
        * hidden
        * (2 * hidden + 2 * shape["num_key_value_heads"] * width + 3 * shape["intermediate_size"])
    )
    tokens = sum(batch.lengths)
    attention = sum(
        2 * layers * heads * width * length * length for length in batch.lengths
    )  # half of QK and PV: causal
    head = float(batch.mask.sum()) * hidden * shape["vocab_size"]
    return 3.0 * (2 * (tokens * linear + head) + attention)


def matmul_peak(device: torch.device, size: int = 8192) -> float:
    """Operations per second of a large bf16 product: the best of several tries, each of many products."""
    size = size if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(6):
        wait(device)
        begun = time.perf_counter()
        for _ in range(20):
            a @ b
        wait(device)
        best = max(best, 20 * 2 * size**3 / (time.perf_counter() - begun))
    return best


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(words: list[str], *, steps: int, warm_up: int, save: str | None) -> None:
    from strop.backends.base import MicroBatching
    from strop.supervised.tasks import SftTask

    asked = parse(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    peak = matmul_peak(device)
    backend, batch, task = build(asked, device), batch_of(asked), SftTask()
    micro, spent = MicroBatching(max_tokens=asked.tokens), []
    for _ in range(warm_up + steps):
        wait(device)
        begun = time.perf_counter()
        found = backend.forward_backward(batch, task.want(training=True), task.loss(batch), micro)
        backend.step()
        wait(device)
        spent.append(time.perf_counter() - begun)
    second = statistics.median(spent[warm_up:])
    needed, tokens = operations(asked, batch), sum(batch.lengths)
    result = {
        "system": "strop",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        **vars(asked),
        "torch": torch.__version__,
        "seconds": round(second, 4),
        "least": round(min(spent[warm_up:]), 4),
        "most": round(max(spent[warm_up:]), 4),
        "tokens_per_second": round(tokens / second),
        "tflops": round(needed / second / 1e12, 2),
        "matmul_peak_tflops": round(peak / 1e12, 2),
        "mfu": round(needed / second / peak, 4),
        "loss": round(found["loss"], 4),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else None,
    }
    print(json.dumps(result), flush=True)
    if save:
        with Path(save).open("a") as file:
            file.write(json.dumps(result) + "\n")
