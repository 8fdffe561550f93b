"""Policy losses: one function per published objective, per token, not yet reduced.

Every function has the same shape:

    loss(log_probs, old_log_probs, advantages, mask, *, <settings>) -> PolicyLoss(per_token, metrics)

All tensors are [B, T]; the mask is set on trained tokens. Nothing is averaged inside, neither the loss nor a metric: the caller
reduces them with the totals of the whole optimizer step (`aggregation.py`), so micro-batches cannot change the result. Where a
formula only makes sense under one reduction, its entry in `catalog.POLICY_LOSSES` says so.
"""

from __future__ import annotations

import inspect
from typing import Any

from strop.algorithms.policy_losses.surrogate import PolicyLoss
from strop.catalog import POLICY_LOSSES

__all__ = ["PolicyLoss", "policy_loss"]


def policy_loss(name: str, **available: Any) -> PolicyLoss:
    """Call the loss `name` with those of the `available` arguments that it takes; the others are settings of other losses.

    >>> import torch
    >>> one = torch.ones(1, 2)
    >>> policy_loss("gpg", log_probs=-one, old_log_probs=-one, advantages=one, mask=one, clip_low=0.2).per_token
    tensor([[1., 1.]])
    """
    function = POLICY_LOSSES.get(name)
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        chosen = dict(available)
    else:
        chosen = {key: available[key] for key in parameters if key in available}
    missing = [
        key for key, p in parameters.items() if p.default is p.empty and key not in chosen and p.kind is not p.VAR_KEYWORD
    ]
    if missing:
        raise ValueError(f"The policy loss {name!r} needs {', '.join(missing)}; given were {', '.join(sorted(available))}.")
    result: PolicyLoss = function(**chosen)
    return result
