"""What a LoRA layer adds to its frozen product on a GPU, by the length of the parts of the inner dimension.

    python benchmarks/lora_kernels.py --rows 64 1024 --rank 32

For each layer (inner x out) and number of rows, prints a JSON line: microseconds of the frozen product alone,
and of product and adapter for several part lengths. `chosen` is what the model uses. Times are those of a
CUDA graph of 50 calls, the smallest of five replays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

import torch

from strop.models.lora_gpu import kernels

LAYERS = {
    "0.5B": [(896, 896), (896, 128), (896, 4864), (4864, 896)],
    "1.5B": [(1536, 1536), (1536, 256), (1536, 8960), (8960, 1536)],
    "8B": [(4096, 4096), (4096, 1024), (4096, 12288), (12288, 4096)],
}
PARTS = (128, 256, 512, 1024, 2048)
CALLS = 50


def microseconds(work: Callable[[], object]) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    found = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return min(found)


def _given(part: int, inner: int) -> int:
    return part


@torch.no_grad()
def measure(inner: int, out: int, rows: int, rank: int) -> dict[str, object]:
    weight = torch.randn(out, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    a = torch.randn(rank, inner, device="cuda") / inner**0.5
    b = torch.randn(out, rank, device="cuda")
    chosen = kernels.part_length(inner)

    def product() -> torch.Tensor:
        return torch.nn.functional.linear(x, weight)

    plain = microseconds(product)
    with_adapter = {}
    own = kernels.part_length
    for part in PARTS:
        if part < 2 * inner:
            kernels.part_length = partial(_given, part)
            with_adapter[part] = round(microseconds(lambda: kernels.add_lora(product(), x, a, b, 2.0)), 2)
    kernels.part_length = own
    return {"frozen_us": round(plain, 2), "with_adapter_us": with_adapter, "chosen": chosen}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=list(LAYERS))
    asked = parser.parse_args()
    for model in asked.models:
        for inner, out in LAYERS[model]:
            for rows in asked.rows:
                case = {"model": model, "inner": inner, "out": out, "rows": rows, "rank": asked.rank}
                print(json.dumps({**case, **measure(inner, out, rows, asked.rank)}), flush=True)


if __name__ == "__main__":
    main()
