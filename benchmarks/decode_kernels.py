"""Where a decode step of the native engine spends its time: kernels by microseconds per step.

    python benchmarks/decode_kernels.py --shape qwen2.5-1.5b --rows 512 64 8 --context 1500 4000 6000

Each pair of --rows and --context is one case: so many rows, each with a prompt of its own of that length,
sample 96 tokens; steps in the middle are profiled. Prints one JSON line per case with the seconds of a step
without the profiler, the bytes that a step must read (16-bit weights and the KV cache) with the time this
takes at --bandwidth, and the kernels.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from rollout import SHAPES, load
from torch.profiler import ProfilerActivity, profile

from strop.config.schema.rollout import SpeculationConfig
from strop.rollout.base import Request, Sampling, build_engine
from strop.rollout.native.requests import ScheduledSample
from strop.rollout.native.runner import Runner

_TOKENS = 96
_PROFILED = range(16, 64)


class Clock:
    """Takes the place of Runner.decode: measures the steps in the middle, in every other run with the
    profiler."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.plain = Runner.decode
        self.profiler: profile | None = None
        self.taken = 0
        self.measured = 0
        self.seconds = 0.0

    def start(self, profiler: profile | None) -> None:
        self.profiler = profiler
        self.taken = 0
        self.measured = 0
        self.seconds = 0.0

    def decode(
        self,
        runner: Runner,
        samples: Sequence[ScheduledSample],
        lengths: Sequence[int],
        steps: int,
        drafts: int = 0,
    ) -> None:
        in_window = self.taken in _PROFILED
        self.taken += steps
        if not in_window:
            self.plain(runner, samples, lengths, steps, drafts)
            return
        self._synchronize()
        if self.profiler is not None and self.measured == 0:
            self.profiler.start()
        start = time.perf_counter()
        self.plain(runner, samples, lengths, steps, drafts)
        self._synchronize()
        self.seconds += time.perf_counter() - start
        self.measured += steps
        if self.profiler is not None and self.taken not in _PROFILED:
            self.profiler.stop()
            self.profiler = None

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def case(model: Any, rows: int, context: int, options: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(0)
    config = model.config
    prompts = [[draw.randrange(config.vocab_size) for _ in range(context)] for _ in range(rows)]
    speculation = SpeculationConfig(enable=False)
    if options.drafts:
        speculation = SpeculationConfig(enable=True, num_tokens=options.drafts, max_rows=rows)
    engine = build_engine(
        "native",
        model,
        max_model_len=context + _TOKENS + 1,
        max_num_seqs=rows,
        speculation=speculation,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    requests = [Request(ids, n=1, max_tokens=_TOKENS) for ids in prompts]
    clock = Clock(options.device)

    def decode(
        runner: Runner,
        samples: Sequence[ScheduledSample],
        lengths: Sequence[int],
        steps: int,
        drafts: int = 0,
    ) -> None:
        clock.decode(runner, samples, lengths, steps, drafts)

    Runner.decode = decode
    try:
        engine.generate(requests, Sampling(ignore_eos=True))
        clock.start(None)
        engine.generate(requests, Sampling(ignore_eos=True))
        seconds = clock.seconds / clock.measured
        activity = ProfilerActivity.CUDA if options.device == "cuda" else ProfilerActivity.CPU
        profiler = profile(activities=[activity])
        clock.start(profiler)
        engine.generate(requests, Sampling(ignore_eos=True))
        steps = clock.measured
    finally:
        Runner.decode = clock.plain
        engine.close()
    kernels = []
    for event in profiler.key_averages():
        spent = event.self_device_time_total if options.device == "cuda" else event.self_cpu_time_total
        if spent > 0:
            kernels.append((round(spent / steps, 2), round(event.count / steps, 2), event.key[:90]))
    kernels.sort(reverse=True)
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size
    cache = rows * (context + _TOKENS // 2) * per_token * next(model.parameters()).element_size()
    if options.kv_cache_dtype != "auto":
        cache //= 2
    return {
        "shape": options.shape,
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "rows": rows,
        "context": context,
        "drafts": options.drafts,
        "step_us": round(seconds * 1e6, 1),
        "bytes_us": round((weights + cache) / options.bandwidth * 1e6, 1),
        "kernels_us": round(sum(spent for spent, _, _ in kernels), 1),
        "launches": round(sum(count for _, count, _ in kernels), 1),
        "kernels": kernels[: options.most],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-1.5b", choices=sorted(SHAPES))
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 64, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[1500, 4000, 6000])
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second of the device")
    parser.add_argument(
        "--drafts", type=int, default=0, help="passes of speculation with so many drafts a row"
    )
    parser.add_argument("--quantization", choices=("fp8", "int8"), help="of the weights")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--most", type=int, default=30, help="kernels printed")
    options = parser.parse_args()
    model = load(options)
    for rows, context in zip(options.rows, options.context, strict=True):
        found = case(model, rows, context, options)
        kernels = found.pop("kernels")
        print(json.dumps(found), flush=True)
        for spent, count, name in kernels:
            print(f"  {spent:9.2f} us {count:7.2f} x  {name}", flush=True)


if __name__ == "__main__":
    main()
