"""The auxiliary loss of a mixture of experts, for comparison with the one that models return."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def load_balancing_loss(router_logits: Sequence[Tensor], *, top_k: int, mask: Tensor | None = None) -> Tensor:
    """Auxiliary loss of a mixture of experts (Switch Transformer, Fedus et al. 2021), over all layers
    together:

    E Σ_e f_e P_e, f_e = assignments of expert e per token (they sum to k), P_e = its mean router probability.

    `router_logits` holds one [N, E] per layer for the same N tokens, `mask` [N] (any shape with N entries)
    leaves padding out. The minimum, at perfect balance, is k.
    """
    if not router_logits:
        raise ValueError(
            "router_logits is empty: the model returned none. Set output_router_logits=True in its config."
        )
    logits = torch.stack(tuple(router_logits)).float()
    experts = logits.shape[-1]
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be between 1 and the number of experts {experts}, got {top_k}.")
    if mask is not None and mask.numel() != logits.shape[1]:
        raise ValueError(
            f"mask has {mask.numel()} entries but each layer's router_logits has {logits.shape[1]} tokens."
        )
    on = torch.ones(logits.shape[1], device=logits.device) if mask is None else mask.reshape(-1).to(logits)
    logits = logits.masked_fill(on[None, :, None] == 0, 0.0)
    probs = logits.softmax(-1)
    chosen = torch.zeros_like(probs).scatter(-1, probs.topk(top_k, dim=-1).indices, 1.0)
    count = (on.sum() * len(router_logits)).clamp(min=1)
    share = (chosen * on[None, :, None]).sum((0, 1)) / count
    mean_prob = (probs * on[None, :, None]).sum((0, 1)) / count
    return experts * (share * mean_prob).sum()
