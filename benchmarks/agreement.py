"""What must hold, on a GPU, for sampling and training to agree to the last bit in bf16, and what it costs.

    python benchmarks/agreement.py [--models 7B 14B] [--save FILE]

Products: rows of a matrix product with few rows against the same rows of one with many, for the layers of
published models; a JSON line per layer names the numbers of rows at which some entry differs, and the share
that does. The same for queries, keys and values by three products against one, as the engine computes them
(training too where their inputs are as wide as in models of 3B and more). Attention: strop/models/flash.py
against torch's variable-length flash attention, microseconds of a forward pass, and against the decode kernel
of the engine.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.models.residual import add_product

MODELS = {
    "135M": (576, 1536, 960),
    "0.5B": (896, 4864, 1152),
    "1.5B": (1536, 8960, 2048),
    "3B": (2048, 11008, 2560),
    "7B": (3584, 18944, 4608),
    "Qwen3-8B": (4096, 12288, 6144),
    "14B": (5120, 13824, 7168),
    "72B": (8192, 29568, 10240),
}
"""Width of the stream, of the feed-forward part, and of queries, keys and values together."""
ROWS = (
    *(4096, 2048, 1024, 768, 640, 512, 448, 384, 320, 256, 224, 192, 160, 128),
    *(96, 64, 48, 32, 24, 16, 8, 4, 2, 1),
)
MANY = 20_000
HEADS = {"135M": (9, 3, 64), "0.5B": (14, 2, 64), "7B": (28, 4, 128)}


def layers(model: str) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of its products. Those with `+` are added to the stream, in float32."""
    stream, inner, joined = MODELS[model]
    return {
        "qkv": (stream, joined),
        "o+": (stream, stream),
        "gate and up": (stream, 2 * inner),
        "down+": (inner, stream),
    }


def products(model: str, layer: str) -> dict[str, Any]:
    inputs, outputs = layers(model)[layer]
    states = torch.randn(MANY, inputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
    stream = torch.randn(MANY, outputs, device="cuda") if layer.endswith("+") else None

    def product(rows: Tensor) -> Tensor:
        if stream is None:
            return states[rows] @ weight.t()
        return add_product(stream[rows], states[rows], weight)

    together = product(torch.arange(MANY, device="cuda"))
    other = {}
    for count in ROWS:
        some = torch.randperm(MANY, device="cuda")[:count]
        share = float((product(some) != together[some]).float().mean())
        if share:
            other[count] = round(share, 4)
    return {"part": "products", "model": model, "layer": layer, "rows_that_differ": other}


def apart(model: str) -> dict[str, Any]:
    """Queries, keys and values by three products of some rows against one product of many rows."""
    stream, _, joined = MODELS[model]
    narrow = (joined - stream) // 2
    states = torch.randn(MANY, stream, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(joined, stream, device="cuda", dtype=torch.bfloat16) * stream**-0.5
    together = (states @ weight.t()).split((stream, narrow, narrow), 1)
    other: dict[str, dict[int, float]] = {}
    for name, part, whole in zip(("q", "k", "v"), weight.split((stream, narrow, narrow)), together):
        shares = {count: float((states[:count] @ part.t() != whole[:count]).float().mean()) for count in ROWS}
        other[name] = {count: round(share, 4) for count, share in shares.items() if share}
    return {"part": "three products", "model": model, "rows_that_differ": other}


def attention(model: str, lengths: list[int]) -> dict[str, Any]:
    from strop.models.flash import packed_attention
    from strop.models.varlen import plain_kernel
    from strop.rollout.native.kernels import decode_attention

    heads, key_heads, size = HEADS[model]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
    q, k, v = (
        torch.randn(sum(lengths), n, size, device="cuda", dtype=torch.bfloat16)
        for n in (heads, key_heads, key_heads)
    )
    plain, longest = plain_kernel(), max(lengths)
    assert plain is not None
    mine = packed_attention(q, k, v, bounds, longest)
    last = bounds[1:].long() - 1
    keys, values = (
        torch.zeros(len(lengths), key_heads, longest + 1, size, device="cuda", dtype=q.dtype)
        for _ in range(2)
    )
    for row, (begin, length) in enumerate(zip(bounds.tolist(), lengths)):
        keys[row, :, :length] = k[begin : begin + length].transpose(0, 1)
        values[row, :, :length] = v[begin : begin + length].transpose(0, 1)
    positions = torch.tensor(lengths, device="cuda") - 1
    new = [x[last, :, None] for x in (q, k, v)]
    table = torch.arange(len(lengths), device="cuda")[:, None]
    alone = decode_attention(*new, keys, values, positions, table, longest)[:, 0]
    return {
        "part": "attention",
        "model": model,
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "strop_us": microseconds(lambda: packed_attention(q, k, v, bounds, longest)),
        "torch_us": microseconds(lambda: plain(q, k, v, bounds, longest)),
        "decode_us": microseconds(lambda: decode_attention(*new, keys, values, positions, table, longest)),
        "decode_differs": float((alone != mine[last]).float().mean()),
    }


def microseconds(work: Callable[[], object], times: int = 20) -> float:
    for _ in range(3):
        work()
    spans = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            work()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) / times * 1000)
    return round(min(spans), 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", type=Path, help="JSON-lines file to which the lines are added")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    asked = parser.parse_args()
    torch.manual_seed(0)
    ragged = torch.randint(60, 500, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    found = [products(model, layer) for model in asked.models for layer in layers(model)]
    found += [apart(model) for model in asked.models]
    long = [min(8192, round(random.Random(i).lognormvariate(7.3, 0.8))) for i in range(256)]
    works = ([2048] * 8, [8192] * 4, [7400, 5200, 4100, 3900], ragged, long)
    found += [attention(model, lengths) for model in HEADS if model in asked.models for lengths in works]
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for line in found:
        text = json.dumps({**line, **machine})
        print(text, flush=True)
        if asked.save is not None:
            with asked.save.open("a") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
