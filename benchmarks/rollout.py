"""Generation with log-probs: tokens per second of each engine on the same prompts.

    python benchmarks/rollout.py --prompts 16 --samples 4 --tokens 128 --repeats 3
    python benchmarks/rollout.py --model path/to/SmolLM2-135M-Instruct --engines hf,native,vllm --dtype bfloat16

Every completion has exactly `--tokens` tokens (no stop token), temperature 1, no top-k and top-p. Engines take turns so that a
noisy moment hits all of them. Prints one JSON line per engine (median, minimum and maximum over the repeats), then the ratios
of the native engine to the others. Without `--model`, a random model of the SmolLM2-135M shape, so vllm needs `--model`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from strop.rollout.base import Request, Sampling
from strop.rollout.build import build_engine

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": SMOLLM2,
    "qwen2.5-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
}


def load(options: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    dtype = getattr(torch, options.dtype)
    if options.model is not None:
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
    torch.manual_seed(0)
    with torch.device(options.device):
        return LlamaForCausalLM(LlamaConfig(**SHAPES[options.shape])).to(dtype).eval()


def prompts(options: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Random tokens, with the lengths of grade-school questions in a chat template."""
    draw = random.Random(0)
    return [[draw.randrange(vocabulary) for _ in range(draw.randint(*options.lengths))] for _ in range(options.prompts)]


def ours(name: str, model: Any, asked: list[list[int]], options: argparse.Namespace) -> Callable[[], int]:
    engine = build_engine(name, model, max_num_seqs=options.max_num_seqs, max_model_len=options.lengths[1] + options.tokens)
    sampling = Sampling(max_tokens=options.tokens, ignore_eos=True)

    def run() -> int:
        answers = engine.generate([Request(ids, n=options.samples) for ids in asked], sampling)
        return sum(len(completion.ids) for group in answers for completion in group)

    return run


def vllm(asked: list[list[int]], options: argparse.Namespace) -> Callable[[], int]:
    library = importlib.import_module("vllm")
    engine = library.LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=options.lengths[1] + options.tokens,
        max_num_seqs=options.max_num_seqs or 1024,
        gpu_memory_utilization=0.5,
    )
    settings = library.SamplingParams(
        n=options.samples, temperature=1.0, max_tokens=options.tokens, ignore_eos=True, logprobs=0, detokenize=False
    )

    def run() -> int:
        answers = engine.generate([{"prompt_token_ids": ids} for ids in asked], settings, use_tqdm=False)
        return sum(len(output.token_ids) for answer in answers for output in answer.outputs)

    return run


def measure(systems: dict[str, Callable[[], int]], repeats: int, device: str) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(repeats + 1):
        for name, run in systems.items():
            start = time.perf_counter()
            tokens = run()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn > 0:  # the first round warms up
                rates[name].append(tokens / (time.perf_counter() - start))
    return rates


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a Hugging Face model")
    parser.add_argument(
        "--shape", default="smollm2-135m", choices=sorted(SHAPES), help="random model where --model is not given"
    )
    parser.add_argument("--engines", default="hf,native")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs=2, default=(70, 170), help="shortest and longest prompt")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    asked_for = options()
    model = load(asked_for)
    asked = prompts(asked_for, model.config.vocab_size)
    names = asked_for.engines.split(",")
    systems = {name: ours(name, model, asked, asked_for) for name in names if name != "vllm"}
    if "vllm" in names:
        systems["vllm"] = vllm(asked, asked_for)
    work = f"{asked_for.prompts}x{asked_for.samples}x{asked_for.tokens}"
    rates = measure(systems, asked_for.repeats, asked_for.device)
    for name, found in rates.items():
        line = {
            "engine": name,
            "work": work,
            "model": asked_for.model or f"random {asked_for.shape}",
            "dtype": asked_for.dtype,
            "device": torch.cuda.get_device_name() if asked_for.device == "cuda" else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "tokens_per_second": round(statistics.median(found), 1),
            "min": round(min(found), 1),
            "max": round(max(found), 1),
        }
        print(json.dumps(line), flush=True)
    if "native" in rates:
        own = statistics.median(rates["native"])
        print(json.dumps({f"native/{n}": round(own / statistics.median(r), 2) for n, r in rates.items() if n != "native"}))


if __name__ == "__main__":
    main()
