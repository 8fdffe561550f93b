"""What the sampling engine reports about itself: expert load and speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def moe_load_metrics(routed_experts: Tensor, response_mask: Tensor, num_experts: int) -> dict[str, float]:
    """How unevenly sampled tokens were sent to experts, per layer and over layers.

    routed_experts: (rows, prompt + response width, layers, experts per token). With load_e the tokens sent to
    expert e and m their mean, the violation of e is load_e / m - 1; reported are its max, min and mean
    absolute value. The last token of a response is sampled but never fed back, so it has no routing.
    """
    mask = response_mask.bool()
    width = mask.shape[1]
    if routed_experts.shape[0] != mask.shape[0] or routed_experts.shape[1] < width:
        raise ValueError(
            f"`routed_experts` has shape {tuple(routed_experts.shape)}, `response_mask` {tuple(mask.shape)}: "
            "the rows must agree and the last columns must be the response."
        )
    last = mask.long().cumsum(-1) == mask.sum(-1, keepdim=True)
    chosen = routed_experts[:, -width:][mask & ~last]
    metrics: dict[str, float] = {}
    if chosen.numel() == 0:
        return metrics
    found: dict[str, list[float]] = {"max_vio": [], "min_vio": [], "avg_vio": []}
    for layer in range(chosen.shape[1]):
        load = torch.bincount(chosen[:, layer].flatten().long(), minlength=num_experts).double()
        violation = load / load.mean() - 1.0
        for name, value in (
            ("max_vio", violation.max()),
            ("min_vio", violation.min()),
            ("avg_vio", violation.abs().mean()),
        ):
            found[name].append(value.item())
            metrics[f"rollout/moe/{name}/layer_{layer}"] = value.item()
    for name, values in found.items():
        metrics[f"rollout/moe/{name}/max"] = max(values)
        metrics[f"rollout/moe/{name}/avg"] = sum(values) / len(values)
    return metrics


def spec_decode_metrics(
    drafts: Sequence[int], accepts: Sequence[int], verifies: Sequence[int]
) -> dict[str, float]:
    """Speculative decoding per sample: share of drafted tokens accepted, and tokens per verification step
    (its own included).

    A sample that never drafted counts as 0 in both, so the means tell what speculation brought to the whole
    batch.
    """
    if not len(drafts) == len(accepts) == len(verifies):
        raise ValueError(
            f"One entry per sample is needed: {len(drafts)} drafts, {len(accepts)} accepts, {len(verifies)} "
            "verifies."
        )
    if len(drafts) == 0:
        return {}
    rates = [accepted / drafted if drafted else 0.0 for drafted, accepted in zip(drafts, accepts)]
    gains = [1.0 + accepted / steps if steps else 0.0 for steps, accepted in zip(verifies, accepts)]
    return {
        "rollout/spec_accept_rate": sum(rates) / len(rates),
        "rollout/spec_accept_length": sum(gains) / len(gains),
    }
