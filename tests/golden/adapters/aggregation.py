"""Peers' aggregators: a data-parallel factor, and local counts where global ones are not given."""

from __future__ import annotations

from typing import Any

import torch

from strop.algorithms.aggregation import Totals, aggregate
from tests.golden.harness import Case, NotApplicable, adapts, peer


def verl_aggregate(
    per_token: torch.Tensor, mask: torch.Tensor, mode: str, info: dict[str, Any]
) -> torch.Tensor:
    """verl multiplies by the number of ranks, because its gradients are averaged over them."""
    ranks = info.get("dp_size") or 1
    if ranks > 1 and mode != "token-sum":
        needed = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
        if info.get(needed) is None:
            raise ValueError(f"{needed} must be given when dp_size is {ranks}.")
    local = Totals.of(mask, width=info.get("loss_scale_factor"))
    # 0, not 1, for an empty mask: verl then divides 0 by 0
    tokens = info.get("batch_num_tokens") or peer(int(mask.sum()), local.tokens)
    totals = Totals(tokens, info.get("global_batch_size") or local.sequences, local.width)
    return aggregate(per_token, mask, mode, totals) * ranks


def openrlhf_aggregate(per_token: torch.Tensor, mask: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    mode = "token-mean" if settings.get("token_level_loss", True) else "seq-mean-token-mean"
    return verl_aggregate(per_token, mask, mode, settings)


def gradient(loss: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found)]


@adapts("verl.trainer.ppo.core_algos.agg_loss")
def agg_loss(case: Case) -> dict[str, Any]:
    loss_mat = case.tensor("loss_mat", grad=True)
    loss = verl_aggregate(loss_mat, case.tensor("loss_mask"), case.kwargs["loss_agg_mode"], case.kwargs)
    return {"loss": loss, "grad_loss_mat": gradient(loss, loss_mat)[0]}


@adapts("openrlhf.models.loss.aggregate_loss")
def aggregate_loss(case: Case) -> dict[str, Any]:
    if "all_masked" in case.tags:
        raise NotApplicable(
            "an empty mask gives NaN there, value and gradient; here the loss is 0 and so is its gradient"
        )
    per_token = case.tensor("loss", grad=True)
    loss = openrlhf_aggregate(per_token, case.tensor("loss_mask"), case.kwargs)
    return {"loss": loss, "grad_loss": gradient(loss, per_token)[0]}
