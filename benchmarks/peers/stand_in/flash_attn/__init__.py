"""What verl, OpenRLHF and transformers import from flash-attn, computed by the kernels that torch contains.

flash-attn has no wheels on PyPI, and OpenRLHF cannot be imported without it. torch (2.10 and later) contains
the same FlashAttention-2 kernels for rows of several sequences, with gradients, under another name. Only what
these frameworks call for text models is here: no dropout, no ALiBi, no paged cache.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

__version__ = "2.8.3"


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if dropout_p:
        raise NotImplementedError(
            f"dropout_p={dropout_p}: the kernel of torch has no dropout for packed rows"
        )
    options: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    right = 0 if causal else window_size[1]
    bounds = (cu_seqlens_q.int(), cu_seqlens_k.int(), int(max_seqlen_q), int(max_seqlen_k))
    return varlen_attn(q, k, v, *bounds, scale=softmax_scale, window_size=(window_size[0], right), **options)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Rows without padding, (batch, sequence, heads, width)."""
    inputs = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    grouped = q.shape[2] != k.shape[2]
    out = scaled_dot_product_attention(
        *inputs, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def flash_attn_with_kvcache(*_: Any, **__: Any) -> torch.Tensor:
    raise NotImplementedError("this stand-in of flash-attn has no paged cache")
