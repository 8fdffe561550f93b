"""Peak memory that the planner predicts beside what one GPU really uses, phase by phase.

    python benchmarks/plan_memory.py                          # 0.5b, 1.5b and 7b shapes, every variant
    python benchmarks/plan_memory.py --shapes 0.5b --variants checkpointed --tokens 16384
    python benchmarks/plan_memory.py --shapes tiny            # on a CPU: runs everything, measures no memory

Random weights of the Qwen2.5 shapes, made on the device; the real backend and the real native engine. A
variant is one process: `checkpointed` and `plain` train all weights with float32 masters and AdamW (0.5b,
1.5b), `bf16` with bf16 masters and `lora` adapters of rank 32 (7b, whose float32 training does not fit one
device). Each process samples, computes log-probs, then makes an update of one micro-batch and one of two. One
JSON line per phase: measured and predicted bytes (torch's allocator at its peak), their ratio, what torch
reserved and the device lost, and seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.planning.activations import Numbers, Tokens
from strop.planning.devices import CONTEXT, SLACK, WORKSPACE
from strop.planning.forecast import taken
from strop.planning.rollout import PlannedSampler
from strop.planning.shape import KNOWN, Shape, read_shape
from strop.planning.training import TrainedModel

TINY = {
    **KNOWN["qwen2.5-0.5b"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
TINY |= {"num_attention_heads": 4, "head_dim": 16}
SHAPES = {"tiny": TINY, **{size: KNOWN[f"qwen2.5-{size}"] for size in ("0.5b", "1.5b", "7b")}}
VARIANTS = {
    "tiny": ("checkpointed", "plain", "lora"),
    "0.5b": ("checkpointed", "plain"),
    "1.5b": ("checkpointed", "plain"),
    "7b": ("bf16", "lora"),
}
LORA_RANK = 32
PROMPT, ANSWER = 128, 256
"""Tokens of the rollout."""
ROW, ROW_PROMPT = 1024, 256
"""Tokens of a training row, and how many of them are its prompt."""
GIB = 2**30


@dataclass
class Bench:
    """One variant of one shape: the real parts, and the planner's idea of them."""

    name: str
    variant: str
    asked: argparse.Namespace
    device: torch.device
    shape: Shape
    backend: Any
    model: TrainedModel
    sampler: PlannedSampler
    stepped: bool = False
    """The optimizer remembers something."""
    kept_cache: int = 0
    engine: Any = None
    """Lives on while the model learns, with the cache that it keeps."""

    @property
    def at_rest(self) -> int:
        return self.model.weights + self.model.optimizer * self.stepped + WORKSPACE

    @property
    def outside_passes(self) -> int:
        return CONTEXT + SLACK + (self.sampler.recorded if self.kept_cache else 0)

    def measure(
        self, phase: str, work: Callable[[], Any], parts: dict[str, int], outside: int, **facts: Any
    ) -> None:
        """`parts` come on top of what is at rest; `outside` is what torch's allocator does not count as
        allocated."""
        predicted = self.at_rest + sum(parts.values())
        lost = self.at_rest + sum(taken(part, size) for part, size in parts.items()) + outside
        cuda = self.device.type == "cuda"
        if cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        work()
        line: dict[str, Any] = {"shape": self.name, "variant": self.variant, "phase": phase, **facts}
        if cuda:
            torch.cuda.synchronize()
        line["seconds"] = round(time.perf_counter() - begun, 3)
        line["predicted_gib"] = round(predicted / GIB, 3)
        if cuda:
            measured = torch.cuda.max_memory_allocated()
            free, total = torch.cuda.mem_get_info()
            line |= {
                "measured_gib": round(measured / GIB, 3),
                "ratio": round(predicted / measured, 3),
                "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3),
                "device_gib": round((total - free) / GIB, 3),
                "outside_gib": round((total - free - torch.cuda.memory_reserved()) / GIB, 3),
                "predicted_device_gib": round(lost / GIB, 3),
                "device": torch.cuda.get_device_name(),
            }
        print(json.dumps({**line, "torch": torch.__version__}), flush=True)


def build(name: str, variant: str, asked: argparse.Namespace) -> Bench:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from strop.backends.base import BackendSettings
    from strop.backends.single import SingleBackend
    from strop.config.schema.model import OptimConfig
    from strop.models.checkpointing import Checkpointing, checkpoint_activations
    from strop.models.lora import add_adapters
    from strop.models.residual import widen_residual

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    master = compute if variant == "bf16" else torch.float32
    sizes = {key: value for key, value in SHAPES[name].items() if key not in ("model_type", "head_dim")}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if master == torch.float32 and variant != "lora" else compute)
    with torch.device(device):
        module: Any = Qwen2ForCausalLM(Qwen2Config(**sizes, max_position_embeddings=4096))
    torch.set_default_dtype(torch.float32)
    widen_residual(module)
    if variant == "lora":
        module = add_adapters(module, rank=LORA_RANK, alpha=2 * LORA_RANK)
    mode: Checkpointing = "none" if variant == "plain" else "full"
    checkpoint_activations(module, mode)
    settings = BackendSettings(
        optim=OptimConfig(lr=1e-6, lr_warmup_steps=0), device=device, compute=compute, master=master
    )
    backend = SingleBackend(module, settings)
    shape = read_shape(SHAPES[name])
    numbers = Numbers(compute.itemsize, master.itemsize, residual=4)
    sequences = asked.prompts * asked.samples
    sampler = PlannedSampler(
        shape,
        sequences,
        PROMPT,
        ANSWER,
        samples=asked.samples,
        numbers=numbers,
        records=device.type == "cuda",
    )
    rank = LORA_RANK if variant == "lora" else 0
    model = TrainedModel(shape, numbers, checkpointing=mode, lora_rank=rank, kernels=device.type == "cuda")
    return Bench(name, variant, asked, device, shape, backend, model, sampler)


def sample(bench: Bench) -> None:
    """256 prompts x 4 samples x 256 tokens, twice: the first round compiles kernels and records steps."""
    from strop.rollout.base import Request, Sampling
    from strop.rollout.native.engine import NativeEngine

    engine = NativeEngine(bench.backend.module, max_model_len=PROMPT + ANSWER)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, bench.shape.vocabulary, (bench.asked.prompts, PROMPT), generator=draw).tolist()
    requests = [Request(ids=ids, n=bench.asked.samples) for ids in prompts]
    sampling = Sampling(max_tokens=ANSWER, ignore_eos=True)
    total = torch.cuda.get_device_properties(0).total_memory if bench.device.type == "cuda" else 64 * GIB
    cache = bench.sampler.cache(total, bench.at_rest)
    step = max(bench.sampler.decoding, bench.sampler.prefilling)
    parts = {"cache": cache + bench.sampler.bookkeeping(cache), "step": step}
    for round_ in ("rollout, first", "rollout"):
        engine.wake()
        bench.measure(
            round_,
            lambda: engine.generate(requests, sampling),
            parts,
            CONTEXT + bench.sampler.recorded,
            sequences=bench.sampler.sequences,
            new_tokens=bench.sampler.sequences * ANSWER,
            predicted_cache_gib=round(cache / GIB, 3),
        )
    engine.sleep()
    kept = bench.sampler.kept(cache, total, bench.at_rest, frees=True)
    bench.kept_cache, bench.engine = kept + bench.sampler.bookkeeping(kept), engine


def batch_of(bench: Bench, tokens: int) -> Any:
    from strop.types import Batch

    rows = max(1, tokens // ROW)
    draw = torch.Generator().manual_seed(1)
    return Batch(
        sequences=list(torch.randint(bench.shape.vocabulary, (rows, ROW), generator=draw)),
        prompt_lengths=torch.full((rows,), ROW_PROMPT),
        mask=torch.ones(rows, ROW - ROW_PROMPT),
        advantages=torch.randn(rows, ROW - ROW_PROMPT, generator=draw),
    )


def micro_tokens(tokens: int) -> Tokens:
    rows = max(1, tokens // ROW)
    return Tokens(rows * (ROW - 1), rows * (ROW - ROW_PROMPT))


def ask(bench: Bench, tokens: int) -> None:
    from strop.backends.base import MicroBatching

    batch = batch_of(bench, 2 * tokens)
    parts = bench.model.forward(micro_tokens(tokens), entropy=True)
    bench.measure(
        "log_prob",
        lambda: bench.backend.forward(batch, ["log_probs", "entropy"], MicroBatching(max_tokens=tokens)),
        {**parts, "cache": bench.kept_cache},
        bench.outside_passes,
        tokens=tokens,
    )


def learn(bench: Bench, tokens: int, micro_batches: int) -> None:
    """An update whose entropy is reported and not trained, as in a usual run."""
    from strop.backends.base import MicroBatching, Outputs

    batch = batch_of(bench, micro_batches * tokens)

    def loss(outputs: Outputs, piece: Any) -> tuple[Tensor, dict[str, Tensor]]:
        assert outputs.log_probs is not None and outputs.entropy is not None
        value = -(outputs.log_probs * piece.advantages).mean()
        return value, {"loss": value, "entropy": outputs.entropy.detach().mean()}

    def update() -> None:
        bench.backend.forward_backward(
            batch, ["log_probs", "entropy"], loss, MicroBatching(max_tokens=tokens)
        )
        bench.backend.step()

    if not bench.stepped:
        update()
        bench.stepped = True
    parts = bench.model.update(micro_tokens(tokens), accumulated=micro_batches > 1, entropy=True)
    bench.measure(
        f"update, {micro_batches} micro-batch" + "es" * (micro_batches > 1),
        update,
        {**parts, "cache": bench.kept_cache},
        bench.outside_passes,
        tokens=tokens,
        parts_gib={part: round(size / GIB, 3) for part, size in parts.items()},
    )


def run(name: str, variant: str, asked: argparse.Namespace) -> None:
    bench = build(name, variant, asked)
    sample(bench)
    for tokens in asked.tokens:
        ask(bench, tokens)
        for micro_batches in (1, 2):
            learn(bench, tokens, micro_batches)


def options() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=sorted(SHAPES), default=["0.5b", "1.5b", "7b"] if cuda else ["tiny"]
    )
    parser.add_argument("--variants", nargs="+", help="of those that a shape has; all of them by default")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[8192, 16384] if cuda else [2048], help="per micro-batch"
    )
    parser.add_argument("--prompts", type=int, default=256 if cuda else 4)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--here", action="store_true", help="in this process; for one shape and one variant")
    parser.add_argument("--save", help="also append the lines to this file")
    return parser.parse_args()


def main() -> None:
    asked = options()
    if asked.here:
        name = asked.shapes[0]
        run(name, (asked.variants or VARIANTS[name])[0], asked)
        return
    for name in asked.shapes:
        for variant in [v for v in VARIANTS[name] if asked.variants is None or v in asked.variants]:
            sizes = [
                "--tokens",
                *map(str, asked.tokens),
                "--prompts",
                str(asked.prompts),
                "--samples",
                str(asked.samples),
            ]
            command = [sys.executable, __file__, "--here", "--shapes", name, "--variants", variant, *sizes]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            sys.stdout.write(done.stdout)
            if done.returncode != 0:
                failed = json.dumps({"shape": name, "variant": variant, "failed": done.returncode})
                print(failed, flush=True)
            if asked.save:
                with Path(asked.save).open("a") as file:
                    file.write(done.stdout)


if __name__ == "__main__":
    main()
