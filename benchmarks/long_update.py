"""Updates on long answers: tokens per second, MFU, and peak memory beside the forecast, for each way to keep
activations.

    python benchmarks/long_update.py --shape 1.5b --answers 2048 16384 --tokens 32768
    python benchmarks/long_update.py --shape 1.5b --answers 32768 --tokens 32800
    python benchmarks/long_update.py --shape 8b --answers 8192 --tokens 8224 --lora-rank 32
    python benchmarks/long_update.py --shape tiny --device cpu --answers 16 64 --tokens 256   # a trial

One process runs all modes, one after the other; the weights are random. The 8B shape with all weights
trained needs more than 141 GB with float32 masters and Adam: give --lora-rank or --optimizer-offload.
"""

from __future__ import annotations

import argparse
import gc
import json
import time

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from strop.backends.base import BackendSettings, MicroBatching, Outputs
from strop.backends.single import SingleBackend
from strop.config.schema.model import OptimConfig
from strop.models.checkpointing import checkpoint_activations
from strop.models.lora import add_adapters
from strop.models.residual import widen_residual
from strop.planning.activations import Numbers, Tokens
from strop.planning.devices import WORKSPACE
from strop.planning.shape import KNOWN, read_shape
from strop.planning.times import operations
from strop.planning.training import Placement, TrainedModel
from strop.types import Batch

PROMPT = 32
GIB = 1 << 30
PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200."""
TINY = {**KNOWN["qwen2.5-0.5b"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
SHAPES = {"tiny": TINY, "1.5b": KNOWN["qwen2.5-1.5b"]}
SHAPES["8b"] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
MODES = ("none", "selective", "full", "full+offload")


def lengths_of(shortest: int, longest: int, tokens: int, micro_batches: int) -> list[int]:
    """Answers from the shortest to the longest, in turn, that fill the micro-batches."""
    found = []
    for _ in range(micro_batches):
        left = tokens
        answer = longest
        while left >= PROMPT + shortest:
            answer = min(answer, left - PROMPT)
            found.append(answer)
            left -= PROMPT + answer
            answer = max(shortest, answer // 2)
    return found


def batch_of(answers: list[int], vocabulary: int) -> Batch:
    draw = torch.Generator().manual_seed(0)
    width = max(answers)
    mask = torch.zeros(len(answers), width)
    for row, answer in enumerate(answers):
        mask[row, :answer] = 1
    return Batch(
        sequences=[torch.randint(3, vocabulary, (PROMPT + answer,), generator=draw) for answer in answers],
        prompt_lengths=torch.full((len(answers),), PROMPT),
        mask=mask,
        advantages=torch.randn(len(answers), width, generator=draw),
    )


def loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    assert outputs.log_probs is not None and batch.advantages is not None
    value = -(outputs.log_probs * batch.advantages * batch.mask).sum() / 1e4
    return value, {"loss": value.detach()}


def build(arguments: argparse.Namespace, mode: str) -> SingleBackend:
    device = torch.device(arguments.device)
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    settings = dict(SHAPES[arguments.shape])
    kind = str(settings.pop("model_type"))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=torch.float32)
    if arguments.lora_rank:
        model = add_adapters(model.to(compute), rank=arguments.lora_rank, alpha=16)
    widen_residual(model)
    checkpoint_activations(model, mode.split("+")[0])
    return SingleBackend(
        model.train(),
        BackendSettings(
            optim=OptimConfig(lr=1e-6, lr_scheduler_type="constant"),
            device=device,
            compute=compute,
            offload_activations=mode.endswith("+offload"),
        ),
        offload_optimizer=arguments.optimizer_offload,
    )


def forecast(arguments: argparse.Namespace, mode: str, batch: Batch, micro_batches: int) -> int:
    gpu = arguments.device == "cuda"
    planned = TrainedModel(
        read_shape(SHAPES[arguments.shape]),
        Numbers(2 if gpu else 4, 4, residual=4),
        Placement(offloads_optimizer=arguments.optimizer_offload),
        checkpointing=mode.split("+")[0],
        offloads_activations=gpu and mode.endswith("+offload"),
        lora_rank=arguments.lora_rank,
        kernels=gpu,
    )
    tokens = sum(batch.lengths) // micro_batches
    answered = int(batch.mask.sum()) // micro_batches
    parts = planned.update(Tokens(tokens, answered), accumulated=micro_batches > 1)
    held = sum(planned.present(learns=True).values())
    return held + sum(parts.values()) + (WORKSPACE if gpu else 0)


def measure(arguments: argparse.Namespace, mode: str, batch: Batch, answers: list[int]) -> dict[str, object]:
    cuda = arguments.device == "cuda"
    micro = MicroBatching(max_tokens=arguments.tokens)
    backend = build(arguments, mode)
    seconds = []
    for _ in range(1 + arguments.steps):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        backend.forward_backward(batch, ["log_probs"], loss, micro)
        backend.step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    best = min(seconds[1:])
    shape = read_shape(SHAPES[arguments.shape])
    flops = sum(3 * operations(shape, PROMPT + answer, answer, PROMPT + answer) for answer in answers)
    tokens = sum(batch.lengths)
    expected = forecast(arguments, mode, batch, arguments.micro_batches) / GIB
    peak = torch.cuda.max_memory_allocated() / GIB if cuda else None
    return {
        "shape": arguments.shape,
        "mode": mode,
        "tokens": tokens,
        "longest": max(answers),
        "seconds": round(best, 4),
        "tokens_per_second": round(tokens / best),
        "mfu": round(flops / best / PEAK_FLOPS, 3) if cuda else None,
        "peak_gib": None if peak is None else round(peak, 2),
        "forecast_gib": round(expected, 2),
        "forecast_over_peak": None if peak is None else round(expected / peak, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="1.5b")
    parser.add_argument("--answers", type=int, nargs="+", default=[2048, 16384], help="one, or from and to")
    parser.add_argument("--tokens", type=int, default=32768, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=2, help="measured, after one of warm-up")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--optimizer-offload", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments = parser.parse_args()
    answers = lengths_of(
        min(arguments.answers), max(arguments.answers), arguments.tokens, arguments.micro_batches
    )
    batch = batch_of(answers, int(SHAPES[arguments.shape]["vocab_size"]))
    for mode in arguments.modes:
        try:
            result = measure(arguments, mode, batch, answers)
        except (torch.cuda.OutOfMemoryError, ValueError) as error:
            result = {"shape": arguments.shape, "mode": mode, "failed": str(error).splitlines()[0]}
            result["forecast_gib"] = round(forecast(arguments, mode, batch, arguments.micro_batches) / GIB, 2)
        print(json.dumps(result), flush=True)
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
