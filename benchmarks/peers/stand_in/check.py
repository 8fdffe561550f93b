"""On a GPU: packed rows of the stand-in against attention of each sequence alone, values and gradients.

PYTHONPATH=benchmarks/peers/stand_in python benchmarks/peers/stand_in/check.py
"""

from __future__ import annotations

import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
from transformers.utils import is_flash_attn_2_available


def main() -> None:
    torch.manual_seed(0)
    lengths = [5, 130, 64, 1, 300]
    q, k, v = (
        torch.randn(sum(lengths), heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (14, 2, 2)
    )
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    packed = flash_attn_varlen_func(q, k, v, bounds, bounds, max(lengths), max(lengths), causal=True)
    pieces = zip(*(tensor.split(lengths) for tensor in (q, k, v)))
    alone = torch.cat([flash_attn_func(*(one[None] for one in row), causal=True)[0] for row in pieces])
    weight = torch.randn_like(packed)
    apart = {"values": (packed - alone).abs().max().item()}
    ours = torch.autograd.grad((packed * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((alone * weight).sum(), (q, k, v))
    for name, mine, other in zip(("dq", "dk", "dv"), ours, theirs):
        apart[name] = ((mine - other).norm() / other.norm()).item()
    print(apart, "transformers finds it:", is_flash_attn_2_available())
    if max(apart.values()) > 0.03 or not is_flash_attn_2_available():
        raise SystemExit("the stand-in of flash-attn is wrong here: use --attention sdpa")


if __name__ == "__main__":
    main()
