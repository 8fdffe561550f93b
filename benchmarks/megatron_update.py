"""One update on one device: the layers of megatron-core beside those of transformers, in turns.

    python benchmarks/megatron_update.py --shape 1.5b
    python benchmarks/megatron_update.py --shape qwen3-moe --optimizer AdamW8bit
    python benchmarks/megatron_update.py --shape tiny-moe --device cpu --tokens 256 --answer 48   # a trial

Each strategy is built, warmed up, measured and removed, and then the other, `--turns` times. The weights are
random, computation is in bf16 with float32 masters and Adam. MFU counts the operations of the parameters
that a token uses (forward and backward, no recomputation); `matmul` is the rate that a large matrix product
reaches here, and `of_matmul` the MFU relative to it. Megatron runs as one rank (NCCL on a GPU).

The qwen3-moe shape has 8.1e9 weights: with float32 masters and AdamW they need 146 GB, with AdamW8bit 97 GB.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent))

from strop.backends.base import BackendSettings, MicroBatching, Outputs
from strop.backends.single import ModuleBackend, SingleBackend
from strop.config.schema.megatron import MegatronConfig
from strop.config.schema.model import OptimConfig
from strop.models.checkpointing import checkpoint_activations
from strop.models.residual import widen_residual
from strop.planning.shape import KNOWN, read_shape
from strop.planning.times import operations
from strop.ranks import Ranks
from strop.types import Batch

from supervised_mfu import matmul_peak, wait  # isort: skip - it stands beside this file

PROMPT = 32
GIB = 1 << 30
PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200."""
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
"""Layers of Qwen3-30B-A3B, 12 of its 48."""
SHAPES = {
    "tiny": {**KNOWN["qwen2.5-0.5b"], **SMALL},
    "tiny-moe": {**MOE, **SMALL, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    "1.5b": KNOWN["qwen2.5-1.5b"],
    "qwen3-moe": MOE,
}
STRATEGIES = ("single", "megatron")


def batch_of(rows: int, answer: int, vocabulary: int) -> Batch:
    draw = torch.Generator().manual_seed(0)
    return Batch(
        sequences=[torch.randint(3, vocabulary, (PROMPT + answer,), generator=draw) for _ in range(rows)],
        prompt_lengths=torch.full((rows,), PROMPT),
        mask=torch.ones(rows, answer),
        advantages=torch.randn(rows, answer, generator=draw),
    )


def loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    assert outputs.log_probs is not None and batch.advantages is not None
    value = -(outputs.log_probs * batch.advantages * batch.mask).sum() / 1e4
    return value, {"loss": value.detach()}


def build(arguments: argparse.Namespace, strategy: str) -> ModuleBackend:
    device = torch.device(arguments.device)
    fields = dict(SHAPES[arguments.shape])
    config = AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    settings = BackendSettings(
        optim=OptimConfig(lr=1e-6, lr_scheduler_type="constant", optimizer=arguments.optimizer),
        device=device,
        compute=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    checkpoint_activations(model, arguments.checkpointing)
    if strategy == "single":
        if arguments.fp32_residual:
            widen_residual(model)
        return SingleBackend(model.train(), settings)
    from strop.backends.megatron.backend import MegatronBackend

    dtype = str(settings.compute).removeprefix("torch.")
    return MegatronBackend(
        model,
        settings,
        ranks=Ranks(),
        megatron=MegatronConfig(dtype=dtype),
        fp32_residual=arguments.fp32_residual,
    )


def measure(arguments: argparse.Namespace, strategy: str, batch: Batch, rate: float) -> dict[str, object]:
    cuda = arguments.device == "cuda"
    micro = MicroBatching(max_tokens=arguments.tokens)
    backend = build(arguments, strategy)
    wait(torch.device(arguments.device))
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    passes, updates = [], []
    for _ in range(arguments.warm_up + arguments.steps):
        wait(torch.device(arguments.device))
        begun = time.perf_counter()
        backend.forward_backward(batch, ["log_probs"], loss, micro)
        wait(torch.device(arguments.device))
        passed = time.perf_counter()
        backend.step()
        wait(torch.device(arguments.device))
        passes.append(passed - begun)
        updates.append(time.perf_counter() - passed)
    pass_seconds = statistics.median(passes[arguments.warm_up :])
    step_seconds = statistics.median(updates[arguments.warm_up :])
    seconds = pass_seconds + step_seconds
    shape = read_shape(SHAPES[arguments.shape])
    length = PROMPT + arguments.answer
    flops = len(batch) * 3 * operations(shape, length, arguments.answer, length)
    tokens = sum(batch.lengths)
    return {
        "shape": arguments.shape,
        "strategy": strategy,
        "checkpointing": arguments.checkpointing,
        "optimizer": arguments.optimizer,
        "tokens": tokens,
        "seconds": round(seconds, 4),
        "passes": round(pass_seconds, 4),
        "step": round(step_seconds, 4),
        "tokens_per_second": round(tokens / seconds),
        "mfu": round(flops / seconds / PEAK_FLOPS, 4) if cuda else None,
        "passes_of_matmul": round(flops / pass_seconds / rate, 4),
        "of_matmul": round(flops / seconds / rate, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2) if cuda else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="1.5b")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--answer", type=int, default=1024, help="tokens of an answer")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--optimizer", choices=("AdamW", "AdamW8bit", "SGD"), default="AdamW")
    parser.add_argument("--fp32-residual", action="store_true")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="measured, after those of warm-up")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and "megatron" in arguments.strategies:
        from tests.backends.megatron_cpu import without_cuda

        without_cuda()
    rows = arguments.micro_batches * max(1, arguments.tokens // (PROMPT + arguments.answer))
    batch = batch_of(rows, arguments.answer, int(SHAPES[arguments.shape]["vocab_size"]))
    rate = matmul_peak(torch.device(arguments.device))
    print(json.dumps({"matmul_tflops": round(rate / 1e12, 2), "torch": torch.__version__}), flush=True)
    for _ in range(arguments.turns):
        for strategy in arguments.strategies:
            print(json.dumps(measure(arguments, strategy, batch, rate)), flush=True)
            gc.collect()
            if arguments.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
