"""The compiled functions of training on a CPU beside torch's: attention of packed sequences in bf16
(cpu/packed_attention.c) and the log-probs of an output head (algorithms/logprob_kernels_cpu.c), forward and
backward.

    python benchmarks/cpu_training_kernels.py [--out benchmarks/results/cpu_training_kernels.jsonl]

torch's side is what Strop computes where the functions cannot be compiled. The times of a head contain its
two matrix products. Times are medians of `--turns`, in milliseconds. Prints one JSON line per shape.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from strop.algorithms import logprobs
from strop.algorithms.logprob_kernels_cpu import is_available
from strop.algorithms.logprobs import token_logprobs_from_hidden
from strop.cpu.packed_attention import packed_attention, takes
from strop.models.attention import _attend, _Options
from strop.models.packing import AttentionGroup

ATTENTION = (
    # sequences, tokens of each, query heads, key heads, head size
    (16, 168, 14, 2, 64),
    (4, 1024, 14, 2, 64),
    (1, 4096, 14, 2, 64),
    (16, 168, 16, 8, 128),
    (4, 1024, 12, 2, 128),
)
HEADS = (
    # rows, hidden size, vocabulary
    (1024, 896, 151936),
    (1024, 576, 49152),
)

Pass = Callable[[], Tensor]


def measured(sides: dict[str, Pass], leaves: Sequence[Tensor], above: Tensor, turns: int) -> dict[str, float]:
    """Milliseconds of both passes of each side; the first turn warms up."""
    seconds: dict[str, list[float]] = {}
    for turn in range(turns + 1):
        for name, forward in sides.items():
            start = time.perf_counter()
            out = forward()
            middle = time.perf_counter()
            torch.autograd.grad(out, leaves, above)
            end = time.perf_counter()
            if turn:
                seconds.setdefault(f"{name}_forward", []).append(middle - start)
                seconds.setdefault(f"{name}_backward", []).append(end - middle)
    return {name: round(1e3 * statistics.median(found), 2) for name, found in seconds.items()}


def attention(
    sequences: int, tokens: int, heads: int, key_heads: int, size: int, turns: int
) -> dict[str, object]:
    leaves = [
        torch.randn(sequences * tokens, many, size).bfloat16().requires_grad_()
        for many in (heads, key_heads, key_heads)
    ]
    bounds = torch.arange(0, sequences * tokens + 1, tokens, dtype=torch.int32)
    group = AttentionGroup(sequences, tokens)
    plain = _Options(None, 0.0, None, None)
    q, k, v = leaves
    sides: dict[str, Pass] = {
        "compiled": lambda: packed_attention(q, k, v, bounds, tokens),
        "torch": lambda: _attend(q, k, v, group, None, plain),
    }
    found = measured(sides, leaves, torch.randn_like(leaves[0]), turns)
    shown = f"{heads} query, {key_heads} key-value, size {size}"
    return {"attention": shown, "sequences": sequences, "tokens": tokens, "dtype": "bfloat16", **found}


def head(rows: int, hidden: int, vocabulary: int, dtype: torch.dtype, turns: int) -> dict[str, object]:
    states = torch.randn(rows, hidden).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden).div(hidden**0.5).to(dtype)
    labels = torch.randint(vocabulary, (rows,))

    def compute() -> Tensor:
        return token_logprobs_from_hidden(states, weight, labels, want_entropy=True).log_probs

    found = measured({"compiled": compute}, [states], torch.randn(rows), turns)
    with mock.patch.object(logprobs, "compiled_for", lambda *_: None):
        found |= measured({"torch": compute}, [states], torch.randn(rows), turns)
    return {"head": f"{hidden} x {vocabulary}", "rows": rows, "dtype": str(dtype)[6:], **found}


def lines(turns: int) -> Iterator[dict[str, object]]:
    probe = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    if takes(probe, probe, probe):
        for shape in ATTENTION:
            yield attention(*shape, turns)
    for dtype in (torch.bfloat16, torch.float32):
        if is_available(dtype):
            for rows in HEADS:
                yield head(*rows, dtype, turns)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path, help="lines are added to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    machine = {
        "machine": platform.machine(),
        "threads": options.threads,
        "torch_version": torch.__version__,
    }
    found = []
    for line in lines(options.turns):
        found.append(json.dumps({**line, **machine, "date": date.today().isoformat()}))
        print(found[-1], flush=True)
    if not found:
        raise SystemExit("The compiled functions are for CPUs with AVX-512 (attention: AMX) and a compiler.")
    if options.out is not None:
        with options.out.open("a") as file:
            file.write("\n".join(found) + "\n")


if __name__ == "__main__":
    main()
