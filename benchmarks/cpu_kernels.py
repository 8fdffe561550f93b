"""The compiled functions of the native engine on a CPU beside torch's: products of few rows with packed
weights (rollout/native/cpu/few_rows.c, few_rows_bf16.c), also of int8 weights (int8_rows.c), attention of
decode steps (decode_attention.c), norms, gates and rotations (elementwise.c), and the next token of each row
(draw.c).

    python benchmarks/cpu_kernels.py [--dtype float32] [--out benchmarks/results/cpu_kernels.jsonl]

Products are also compared with those of oneDNN with weights in its own layout for few rows, int8 products
with those of torch.

Weights and caches are larger than the processor's caches, as in a decode step. Both sides take turns; times
are the least of `--turns`, in microseconds of one call: noise only adds to them. Prints one JSON line per
shape.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.rollout.native import sampler
from strop.rollout.native.cpu import draw
from strop.rollout.native.cpu.decode_attention import decode_attention, is_available
from strop.rollout.native.cpu.elementwise import gated_silu, rms_norm, rotary
from strop.rollout.native.cpu.few_rows import packed_weight
from strop.rollout.native.cpu.few_rows_bf16 import packed_bf16_weight
from strop.rollout.native.cpu.int8_rows import PackedInt8, packed_int8
from strop.rollout.native.cpu.packed_linear import FEW
from strop.rollout.native.quantization.formats import INT8, plain_quantize_rows
from strop.rollout.native.quantization.formats import product as plain_int8_product

ROWS = (1, 4, 8, 16, 64, 256)
PRODUCTS = ((896, 4864), (4864, 896), (896, 151936))
"""Inputs and outputs: the MLP and the head of a 0.5B model."""
INT8_PRODUCTS = PRODUCTS[:2]
"""Without the head, which is not quantised."""
ATTENTION = (
    # rows, key heads, query heads per key head, head size, positions
    (64, 2, 7, 64, 180),
    (64, 2, 7, 64, 1000),
    (8, 2, 7, 64, 4000),
    (64, 3, 3, 64, 180),
    (64, 2, 6, 128, 500),
)
FEW_ROWS = (4, 64)
HIDDEN, INNER, HEADS, SIZE, VOCABULARY = 896, 4864, 14, 64, 151936
"""Of a 0.5B model."""
COPIES = 6
"""Of weights and caches, which are used in turn like those of layers."""


@dataclass(frozen=True)
class Options:
    scale: float | None = None
    window: int | None = None


def least(sides: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Microseconds of each side per copy."""
    found: dict[str, float] = dict.fromkeys(sides, float("inf"))
    for _ in range(turns):
        for name, call in sides.items():
            start = time.perf_counter()
            call()
            found[name] = min(found[name], time.perf_counter() - start)
    return {name: round(seconds / COPIES * 1e6, 1) for name, seconds in found.items()}


def product(rows: int, ins: int, outs: int, turns: int) -> dict[str, object]:
    weights = [torch.randn(outs, ins) for _ in range(COPIES)]
    packed = [packed_weight(weight) or packed_bf16_weight(weight) for weight in weights]
    ordered = [torch.ops.mkldnn._reorder_linear_weight(weight, FEW // 4) for weight in weights]
    states = torch.randn(rows, ins)
    by_onednn = torch.ops.mkldnn._linear_pointwise
    times = least(
        {
            "compiled": lambda: [one(states, None) for one in packed if one is not None],
            "torch": lambda: [F.linear(states, weight) for weight in weights],
            "onednn_packed": lambda: [by_onednn(states, one, None, "none", [], "") for one in ordered],
        },
        turns,
    )
    rate = round(2e-3 * rows * ins * outs / times["compiled"], 1)
    return {"product": f"{ins} x {outs}", "rows": rows, **times, "gflop_per_second": rate}


def int8_product(rows: int, ins: int, outs: int, turns: int) -> dict[str, object]:
    weights = [torch.randn(outs, ins) for _ in range(COPIES)]
    packed = [_packed_int8(weight) for weight in weights]
    plain = [plain_quantize_rows(INT8, weight) for weight in weights]
    states = torch.randn(rows, ins)
    sides: dict[str, Callable[[], object]] = {
        "compiled": lambda: [one(states, None) for one in packed],
        "torch": lambda: [plain_int8_product(INT8, states, *one, None) for one in plain],
        "packing": lambda: [one.fill(weight, 0) for one, weight in zip(packed, weights, strict=True)],
    }
    times = least(sides, turns)
    rate = round(2e-3 * rows * ins * outs / times["compiled"], 1)
    return {"int8_product": f"{ins} x {outs}", "rows": rows, **times, "gop_per_second": rate}


def _packed_int8(weight: Tensor) -> PackedInt8:
    copy = packed_int8(weight.dtype, *weight.shape)
    assert copy is not None, "no compiled int8 products"
    copy.fill(weight, 0)
    return copy


def attention(
    rows: int, key_heads: int, heads: int, size: int, positions: int, turns: int
) -> dict[str, object]:
    shape = (rows, key_heads, positions + 100, size)
    caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(COPIES)]
    query = torch.randn(rows, key_heads, heads, size)
    places = torch.arange(rows)
    newest = torch.full((rows,), positions - 1)
    mask = (torch.arange(positions) <= newest[:, None])[:, None, None]

    def plain(keys: Tensor, values: Tensor) -> Tensor:
        seen = slice(positions)
        return F.scaled_dot_product_attention(query, keys[:, :, seen], values[:, :, seen], attn_mask=mask)

    def compiled(keys: Tensor, values: Tensor) -> Tensor:
        return decode_attention(query, keys, values, places, newest, Options())

    times = least(
        {
            "compiled": lambda: [compiled(*cache) for cache in caches],
            "torch": lambda: [plain(*cache) for cache in caches],
        },
        turns,
    )
    shown = f"{heads * key_heads} query, {key_heads} key-value, size {size}"
    return {"attention": shown, "rows": rows, "positions": positions, **times}


def elementwise(rows: int, turns: int) -> Iterator[dict[str, object]]:
    hidden = torch.randn(rows, 1, HIDDEN)
    weight = torch.randn(HIDDEN)
    gate, up = torch.randn(2, rows, 1, INNER)
    query = torch.randn(rows, HEADS, 1, SIZE)
    cos, sin = torch.randn(2, rows, 1, SIZE)

    def plain_norm() -> Tensor:
        return weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6))

    def plain_rotary() -> Tensor:
        half = torch.cat((-query[..., SIZE // 2 :], query[..., : SIZE // 2]), -1)
        return query * cos[:, None] + half * sin[:, None]

    sides: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        f"RMS norm of {HIDDEN}": (lambda: rms_norm(hidden, weight, 1e-6), plain_norm),
        f"SiLU gate of {INNER}": (lambda: gated_silu(gate, up), lambda: F.silu(gate) * up),
        f"rotary embedding of {HEADS} x {SIZE}": (lambda: rotary(query, cos, sin), plain_rotary),
    }
    for name, (compiled, plain) in sides.items():
        times = least({"compiled": _often(compiled), "torch": _often(plain)}, turns)
        yield {"elementwise": name, "rows": rows, **times}


def _often(call: Callable[[], object]) -> Callable[[], object]:
    """As often as `least` takes for granted."""
    return lambda: [call() for _ in range(COPIES)]


def draws(rows: int, turns: int) -> dict[str, object]:
    logits = torch.randn(rows, VOCABULARY)
    numbers = torch.rand(rows, dtype=torch.float64)
    plain = sampler.SamplingTensors()

    def by_torch() -> None:
        with mock.patch.object(draw, "takes", lambda logits: False):
            sampler.sample(logits, numbers, plain)

    times = least(
        {"compiled": _often(lambda: sampler.sample(logits, numbers, plain)), "torch": _often(by_torch)}, turns
    )
    return {"draw": f"of {VOCABULARY} tokens", "rows": rows, **times}


def measured(turns: int) -> Iterator[dict[str, object]]:
    for ins, outs in PRODUCTS:
        for rows in ROWS:
            yield product(rows, ins, outs, turns)
    if packed_int8(torch.get_default_dtype(), 8, 8) is not None:
        for ins, outs in INT8_PRODUCTS:
            for rows in ROWS:
                yield int8_product(rows, ins, outs, turns)
    for shape in ATTENTION:
        yield attention(*shape, turns)
    for rows in FEW_ROWS:
        yield from elementwise(rows, turns)
        yield draws(rows, turns)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, help="lines are added to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(getattr(torch, options.dtype))
    probe = torch.zeros(1, 1)
    if (packed_weight(probe) or packed_bf16_weight(probe)) is None or not is_available(probe.dtype):
        raise SystemExit(
            "The compiled functions are for CPUs with AVX-512 (products also with NEON; in bf16 with AMX) "
            "and a compiler."
        )
    machine = {
        "machine": platform.machine(),
        "dtype": options.dtype,
        "threads": options.threads,
        "torch_version": torch.__version__,
    }
    lines = []
    with torch.no_grad():
        for found in measured(options.turns):
            lines.append(json.dumps({**found, **machine, "date": date.today().isoformat()}))
            print(lines[-1], flush=True)
    if options.out is not None:
        with options.out.open("a") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
