"""Sampling with several LoRA adapters in one batch: tokens per second of the native engine.

    python benchmarks/adapters.py --prompts 16 --samples 2 --tokens 64
    OMP_NUM_THREADS=1 python benchmarks/adapters.py --layers 4 --lengths 8 16 --tokens 12 --clock process
    python benchmarks/adapters.py --shape qwen2.5-1.5b --dtype bfloat16 --prompts 64 --samples 4 --tokens 256

The same prompts in four ways, which take turns so that a noisy moment hits all of them:

- base: the model without adapters
- ordinary: the model with one adapter of peft, active for the whole batch
- one: the model without peft, all requests name the same loaded adapter
- many: the requests name `--adapters` different adapters in turn

Every completion has exactly `--tokens` tokens. The models are random, of the shape that `--shape` names.
Prints one JSON line per way (median, minimum and maximum over the repeats), then the ratios of `many` to the
others.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rollout import SHAPES, load

from strop.models.lora import add_adapters
from strop.rollout.base import Request, Sampling
from strop.rollout.native import NativeEngine
from strop.rollout.native.adapters import adaptable

CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="smollm2-135m", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, for a quick look")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs=2, default=(70, 170), help="shortest and longest prompt")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--clock",
        default="wall",
        choices=sorted(CLOCKS),
        help="process: processor time, for a CPU that other processes use too; with one thread",
    )
    parser.add_argument("--save", help="JSON-lines file to which the lines are added")
    parser.set_defaults(model=None)
    return parser.parse_args()


def adapter_weights(model: Any, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Random factors for all linear modules but the output head."""
    device = next(model.parameters()).device
    draw = torch.Generator(device).manual_seed(seed)
    made = {}
    for path, module in adaptable(model).items():
        if path == "lm_head":
            continue
        for part, shape in (
            ("lora_A", (rank, module.in_features)),
            ("lora_B", (module.out_features, rank)),
        ):
            made[f"{path}.{part}"] = torch.randn(shape, generator=draw, device=device) * 0.01
    return made


class Way:
    """An engine and its requests; a call makes all completions."""

    def __init__(self, engine: NativeEngine, requests: list[Request], asked_for: argparse.Namespace) -> None:
        self.engine = engine
        self._requests = requests
        self._sampling = Sampling(ignore_eos=True, max_tokens=asked_for.tokens)
        self._clock = CLOCKS[asked_for.clock]
        self._version = 0

    def __call__(self) -> float:
        """Tokens per second."""
        self._version += 1
        self.engine.update_weights((), self._version)  # prompts are computed again
        start = self._clock()
        answers = self.engine.generate(self._requests, self._sampling)
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = self._clock() - start
        tokens = 0
        for group in answers:
            for completion in group:
                assert completion.finish == "length", completion.error
                tokens += len(completion.ids)
        return tokens / seconds


def ways(asked_for: argparse.Namespace) -> dict[str, Way]:
    shape = SHAPES[asked_for.shape]
    if asked_for.layers:
        shape["num_hidden_layers"] = asked_for.layers
    model = load(asked_for)
    draw = random.Random(0)
    asked = []
    for _ in range(asked_for.prompts):
        length = draw.randint(*asked_for.lengths)
        asked.append([draw.randrange(model.config.vocab_size) for _ in range(length)])
    settings: dict[str, Any] = {
        "max_num_seqs": asked_for.max_num_seqs,
        "max_model_len": max(map(len, asked)) + asked_for.tokens,
        "gpu_memory_utilization": 0.3,
    }

    def requests(names: list[str | None]) -> list[Request]:
        made = []
        for i, ids in enumerate(asked):
            made.append(Request(ids, n=asked_for.samples, seed=i, adapter=names[i % len(names)]))
        return made

    rank = asked_for.rank
    with_peft = add_adapters(copy.deepcopy(model), rank=rank, alpha=rank, target_modules="all-linear").eval()
    several = NativeEngine(model, **settings)
    names: list[str | None] = []
    for i in range(asked_for.adapters):
        several.load_adapter(f"adapter-{i}", adapter_weights(model, rank, i), 1.0)
        names.append(f"adapter-{i}")
    return {
        "base": Way(NativeEngine(model, **settings), requests([None]), asked_for),
        "ordinary": Way(NativeEngine(with_peft, **settings), requests([None]), asked_for),
        "one": Way(several, requests(names[:1]), asked_for),
        "many": Way(several, requests(names), asked_for),
    }


def main() -> None:
    asked_for = options()
    compared = ways(asked_for)
    rates: dict[str, list[float]] = {name: [] for name in compared}
    for turn in range(asked_for.repeats + 1):
        for name, run in compared.items():
            rate = run()
            if turn > 0:  # the first round warms up
                rates[name].append(rate)
    work = {
        "work": f"{asked_for.prompts}x{asked_for.samples}x{asked_for.tokens}",
        "model": f"random {asked_for.shape}",
        "adapters": asked_for.adapters,
        "rank": asked_for.rank,
    }
    lines: list[dict[str, Any]] = []
    for name, found in rates.items():
        lines.append(
            {
                "way": name,
                **work,
                "dtype": asked_for.dtype,
                "clock": asked_for.clock,
                "device": torch.cuda.get_device_name() if asked_for.device == "cuda" else platform.machine(),
                "cores": len(os.sched_getaffinity(0)),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "date": time.strftime("%Y-%m-%d"),
                "tokens_per_second": round(statistics.median(found), 1),
                "min": round(min(found), 1),
                "max": round(max(found), 1),
            }
        )
    own = statistics.median(rates["many"])
    ratios = {
        f"many/{name}": round(own / statistics.median(found), 3)
        for name, found in rates.items()
        if name != "many"
    }
    lines.append({**work, **ratios})
    for line in lines:
        print(json.dumps(line), flush=True)
    if asked_for.save:
        with Path(asked_for.save).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    for way in compared.values():
        way.engine.close()


if __name__ == "__main__":
    main()
