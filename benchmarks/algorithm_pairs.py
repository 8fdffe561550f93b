"""The same computation by Strop and by verl, function by function, on the same tensors.

Each pair is two callables of the same inputs; what they return is compared before anything is timed. Both
sides do all the work a training step asks of them: groups are made from the prompts' uids, metrics are
reduced to numbers, and where a pair says "and gradient" the backward pass is run. verl is imported when its
side is first called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.advantages.base import estimate, group_ids
from strop.algorithms.aggregation import Totals, aggregate, masked_mean, masked_whiten
from strop.algorithms.kl import kl_penalty
from strop.algorithms.logprobs_of_logits import sum_pi_squared, token_entropy, token_logprobs
from strop.algorithms.losses import value_loss
from strop.algorithms.policy_losses.clipped import policy_loss
from strop.algorithms.rollout_correction import importance_weights, rejection_mask
from strop.algorithms.rollout_diagnostics import mismatch_metrics
from strop.catalog import ADVANTAGES, POLICY_LOSSES
from strop.data.balance import karmarkar_karp, micro_batches

Inputs = dict[str, Any]
Side = Callable[[Inputs], Any]

LOSSES = (
    "vanilla",
    "gspo",
    "sapo",
    "geo_mean",
    "cispo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "dppo_tv",
    "dppo_kl",
    "dro",
)
OUTCOMES = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus_baseline",
)
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
DRO_BETA = 0.1


class Pair(NamedTuple):
    ours: Side
    verl: Side
    size: str = "medium"  # "large" for the three functions a step cannot do without, "vocabulary" for logits
    holes: bool = False
    random: bool = False  # both sides draw tokens at random, so only the time is compared


@cache
def verl(module: str) -> Any:
    return importlib.import_module(f"verl.{module}")


def core() -> Any:
    return verl("trainer.ppo.core_algos")


def response_inputs(batch: int, length: int, *, holes: bool, group: int = 8) -> Inputs:
    """Responses of random length with a score on the last valid token; with `holes`, a tool span inside
    each."""
    torch.manual_seed(0)
    lengths = torch.randint(length // 2, length + 1, (batch, 1))
    columns = torch.arange(length)
    mask = columns < lengths
    if holes:
        start = lengths // 4
        mask = mask & ~((columns >= start) & (columns < start + length // 8))
    rewards = torch.zeros(batch, length)
    rewards.scatter_(1, lengths - 1, torch.randn(batch, 1))
    old = -torch.rand(batch, length)
    return {
        "rewards": rewards,
        "mask": mask.long(),
        "lengths": lengths.squeeze(1),
        "values": torch.randn(batch, length),
        "uids": [f"prompt-{i // group}" for i in range(batch)],
        "baselines": torch.randn(batch),
        "old": old,
        "new": (old + 0.1 * torch.randn(batch, length)).clamp_(max=0.0),
        "advantages": torch.randn(batch, length),
        "sum_pi_squared": torch.rand(batch, length),
    }


def vocabulary_inputs(rows: int, vocabulary: int) -> Inputs:
    torch.manual_seed(0)
    return {"logits": 3 * torch.randn(rows, vocabulary), "labels": torch.randint(vocabulary, (rows,))}


def ours_estimate(name: str, x: Inputs, **settings: Any) -> Tensor:
    grouped = "group" in ADVANTAGES.entry(name).facts["needs"]
    result = estimate(
        name,
        rewards=x["rewards"],
        mask=x["mask"],
        values=x["values"],
        groups=group_ids(x["uids"]) if grouped else None,
        reward_baselines=x["baselines"],
        old_log_probs=x["old"],
        sum_pi_squared=x["sum_pi_squared"],
        **settings,
    )
    return result.advantages


def verl_gae(x: Inputs) -> Tensor:
    return (
        core().compute_gae_advantage_return(x["rewards"], x["values"], x["mask"], 0.99, 0.95)[0] * x["mask"]
    )


def verl_outcome(name: str, x: Inputs) -> Tensor:
    function, config = (
        getattr(core(), f"compute_{name}_outcome_advantage"),
        verl("trainer.config").AlgoConfig(),
    )
    return function(x["rewards"], x["mask"], np.array(x["uids"], dtype=object), config=config)[0]


def verl_reinforce_plus_plus(x: Inputs) -> Tensor:
    config = verl("trainer.config").AlgoConfig(gamma=0.99)
    return core().compute_reinforce_plus_plus_outcome_advantage(x["rewards"], x["mask"], config=config)[0]


def verl_remax(x: Inputs) -> Tensor:
    return core().compute_remax_outcome_advantage(x["rewards"], x["baselines"], x["mask"])[0]


def verl_token_baseline(function: str, x: Inputs) -> Tensor:
    uids = np.array(x["uids"], dtype=object)
    tensors = {"old_log_probs": x["old"], "sum_pi_squared": x["sum_pi_squared"]}
    return getattr(core(), function)(x["rewards"], x["mask"], uids, **tensors)[0]


def ours_loss(name: str, x: Inputs, *, gradient: bool = True) -> Tensor:
    log_probs = x["new"].detach().requires_grad_(gradient)
    mask = x["mask"]
    result = policy_loss(
        name,
        log_probs=log_probs,
        old_log_probs=x["old"],
        advantages=x["advantages"],
        mask=mask,
        dro_beta=DRO_BETA,
    )
    totals = Totals.of(mask)
    mode = POLICY_LOSSES.entry(name).facts["aggregation"] or "token-mean"
    loss = aggregate(result.per_token, mask, mode, totals)
    for metric in result.metrics.values():
        float(aggregate(metric, mask, "token-mean", totals))
    return _slope(loss, log_probs) if gradient else loss


def verl_loss(name: str, x: Inputs, *, gradient: bool = True) -> Tensor:
    configs = verl("workers.config")
    settings = configs.PolicyLossConfig(**({"dro_beta": DRO_BETA} if name == "dro" else {}))
    config = configs.ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=settings
    )
    log_probs = x["new"].detach().requires_grad_(gradient)
    function = getattr(core(), f"compute_policy_loss_{name}")
    mode = POLICY_LOSSES.entry(name).facts["aggregation"] or "token-mean"
    loss, _ = function(x["old"], log_probs, x["advantages"], x["mask"], loss_agg_mode=mode, config=config)
    return _slope(loss, log_probs) if gradient else loss


def _slope(loss: Tensor, leaf: Tensor) -> Tensor:
    """The gradient, times the number of rows so that its entries are of order one."""
    loss.backward()
    assert leaf.grad is not None
    return leaf.grad * len(leaf)


def ours_aggregate(mode: str, x: Inputs) -> Tensor:
    return aggregate(x["values"], x["mask"], mode, Totals.of(x["mask"]))


def verl_aggregate(mode: str, x: Inputs) -> Tensor:
    return core().agg_loss(x["values"], x["mask"], mode)


def ours_value_loss(x: Inputs) -> Tensor:
    values, totals = x["values"].detach().requires_grad_(), Totals.of(x["mask"])
    result = value_loss(values, x["advantages"], x["old"], x["mask"], clip_range=0.5)
    float(aggregate(result.metrics["vf_clipfrac"], x["mask"], "token-mean", totals))
    return _slope(aggregate(result.per_token, x["mask"], "token-mean", totals), values)


def verl_value_loss(x: Inputs) -> Tensor:
    values = x["values"].detach().requires_grad_()
    loss, share = core().compute_value_loss(values, x["old"], x["advantages"], x["mask"], 0.5)
    float(share)
    return _slope(loss, values)


def ours_kl(name: str, x: Inputs) -> Tensor:
    log_probs = x["new"].detach().requires_grad_()
    return _slope(masked_mean(kl_penalty(log_probs, x["old"], estimator=name), x["mask"]), log_probs)


def verl_kl(name: str, x: Inputs) -> Tensor:
    log_probs = x["new"].detach().requires_grad_()
    mean = verl("utils.torch_functional").masked_mean(core().kl_penalty(log_probs, x["old"], name), x["mask"])
    return _slope(mean, log_probs)


def ours_logits(
    function: Callable[..., Tensor], x: Inputs, *, gradient: bool, labelled: bool = False
) -> Tensor:
    logits = x["logits"].detach().requires_grad_(gradient)
    out = function(logits, x["labels"]) if labelled else function(logits)
    return _slope(out.mean(), logits) if gradient else out


def verl_logits(function: str, x: Inputs, *, gradient: bool, labelled: bool = False) -> Tensor:
    named = getattr(verl("utils.torch_functional"), function)
    return ours_logits(named, x, gradient=gradient, labelled=labelled)


def ours_weights(x: Inputs) -> Tensor:
    weights, metrics = importance_weights(x["new"] - x["old"], x["mask"])
    _numbers(metrics)
    return weights


def verl_weights(x: Inputs) -> Tensor:
    helper = verl("trainer.ppo.rollout_corr_helper")
    return helper.compute_rollout_correction_weights(x["new"] - x["old"], x["mask"])[0]


def ours_rejection(x: Inputs) -> Tensor:
    kept, metrics = rejection_mask(
        x["new"] - x["old"], x["mask"], criteria="seq_mean_k1", threshold="0.999_1.001"
    )
    _numbers(metrics)
    return kept


def verl_rejection(x: Inputs) -> Tensor:
    helper = verl("trainer.ppo.rollout_corr_helper")
    return helper.compute_rollout_rejection_mask(
        x["new"] - x["old"], x["mask"], "seq_mean_k1", "0.999_1.001"
    )[0]


def ours_mismatch(x: Inputs) -> Tensor:
    return _numbers(mismatch_metrics(x["new"], x["old"], x["mask"]))


def verl_mismatch(x: Inputs) -> Tensor:
    return _numbers(
        verl("trainer.ppo.rollout_corr_helper").compute_offpolicy_metrics(x["new"], x["old"], x["mask"])
    )


def _numbers(metrics: dict[str, Any]) -> Tensor:
    return torch.tensor([float(metrics[name]) for name in sorted(metrics)])


def ours_partition(x: Inputs) -> list[list[int]]:
    return karmarkar_karp(x["lengths"].tolist(), 16, equal_size=True)


def verl_partition(x: Inputs) -> list[list[int]]:
    return verl("utils.seqlen_balancing").karmarkar_karp(x["lengths"].tolist(), 16, True)


def ours_micro_batches(x: Inputs) -> list[list[int]]:
    tensors = {"input_ids": x["mask"], "attention_mask": x["mask"]}
    parts = micro_batches(x["mask"].sum(1).tolist(), 8 * x["mask"].shape[1], padded_width=x["mask"].shape[1])
    for part in parts:
        _ = {name: tensor[part] for name, tensor in tensors.items()}
    return parts


def verl_micro_batches(x: Inputs) -> list[list[int]]:
    tensors = {"input_ids": x["mask"], "attention_mask": x["mask"]}
    batch = importlib.import_module("tensordict").TensorDict(tensors, batch_size=[len(x["mask"])])
    return verl("utils.seqlen_balancing").rearrange_micro_batches(batch, 8 * x["mask"].shape[1])[1]


GAMMAS = {"gamma": 0.99, "lam": 0.95}
PAIRS: dict[str, Pair] = {
    "gae": Pair(partial(ours_estimate, "gae", **GAMMAS), verl_gae, "large"),
    "gae, masks with holes": Pair(partial(ours_estimate, "gae", **GAMMAS), verl_gae, "large", holes=True),
    "grpo": Pair(partial(ours_estimate, "grpo"), partial(verl_outcome, "grpo"), "large"),
    "vanilla": Pair(
        partial(ours_loss, "vanilla", gradient=False), partial(verl_loss, "vanilla", gradient=False), "large"
    ),
    "vanilla, and gradient": Pair(partial(ours_loss, "vanilla"), partial(verl_loss, "vanilla"), "large"),
    **{f"advantage {n}": Pair(partial(ours_estimate, n), partial(verl_outcome, n)) for n in OUTCOMES},
    "advantage reinforce_plus_plus": Pair(
        partial(ours_estimate, "reinforce_plus_plus", gamma=0.99), verl_reinforce_plus_plus
    ),
    "advantage remax": Pair(partial(ours_estimate, "remax"), verl_remax),
    "advantage optimal_token_baseline": Pair(
        partial(ours_estimate, "optimal_token_baseline", handle_zero_tail=True),
        partial(verl_token_baseline, "compute_optimal_token_baseline_advantage"),
    ),
    "advantage tir_optimal_token_baseline": Pair(
        partial(ours_estimate, "tir_optimal_token_baseline"),
        partial(verl_token_baseline, "compute_multi_turn_optimal_token_baseline_advantage"),
    ),
    **{
        f"loss {n}, and gradient": Pair(partial(ours_loss, n), partial(verl_loss, n), random=n == "clip_cov")
        for n in LOSSES
        if n != "vanilla"
    },
    **{
        f"aggregation {mode}": Pair(partial(ours_aggregate, mode), partial(verl_aggregate, mode))
        for mode in MODES
    },
    "value loss, and gradient": Pair(ours_value_loss, verl_value_loss),
    **{
        f"kl {n}, and gradient": Pair(partial(ours_kl, n), partial(verl_kl, n))
        for n in ("k1", "abs", "k2", "k3")
    },
    "masked_whiten": Pair(
        lambda x: masked_whiten(x["values"], x["mask"]),
        lambda x: verl("utils.torch_functional").masked_whiten(x["values"], x["mask"]) * x["mask"],
    ),
    "rollout weights, token": Pair(ours_weights, verl_weights),
    "rollout rejection, geometric": Pair(ours_rejection, verl_rejection),
    "rollout mismatch metrics": Pair(ours_mismatch, verl_mismatch),
    "karmarkar_karp, 16 parts": Pair(ours_partition, verl_partition),
    "micro-batches by token budget": Pair(ours_micro_batches, verl_micro_batches),
    "log-probs from logits": Pair(
        partial(ours_logits, token_logprobs, gradient=False, labelled=True),
        partial(verl_logits, "logprobs_from_logits", gradient=False, labelled=True),
        "vocabulary",
    ),
    "log-probs from logits, and gradient": Pair(
        partial(ours_logits, token_logprobs, gradient=True, labelled=True),
        partial(verl_logits, "logprobs_from_logits", gradient=True, labelled=True),
        "vocabulary",
    ),
    "entropy from logits": Pair(
        partial(ours_logits, token_entropy, gradient=False),
        partial(verl_logits, "entropy_from_logits", gradient=False),
        "vocabulary",
    ),
    "entropy from logits, and gradient": Pair(
        partial(ours_logits, token_entropy, gradient=True),
        partial(verl_logits, "entropy_from_logits", gradient=True),
        "vocabulary",
    ),
    "sum of squared probabilities": Pair(
        partial(ours_logits, sum_pi_squared, gradient=False),
        partial(verl_logits, "calculate_sum_pi_squared_from_logits", gradient=False),
        "vocabulary",
    ),
}
