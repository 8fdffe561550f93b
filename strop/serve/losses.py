"""The loss functions of the protocol. Each takes the log-probs of target tokens and the tensors of the data,
and returns the loss of each token; a pass sums over the tokens of all data, and divides by nothing.

    cross_entropy        -sum(log p * weights)
    importance_sampling  -sum(exp(log p - log q) * advantages)
    ppo                  -sum(min(r * A, clip(r) * A)), r = exp(log p - log q)
    cispo                -sum(stop_gradient(clip(r)) * log p * A)
    dro                  -sum(log p * A - beta / 2 * (log p - log q)^2)

q, the policy that sampled, gave `logprobs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from strop.registry import did_you_mean
from strop.rewards.server_requests import RequestRefused, printable
from strop.serve.messages import LossDatum

Settings = Mapping[str, float]
TokenLoss = Callable[[Tensor, Mapping[str, Tensor], Settings], Tensor]


def cross_entropy(log_probs: Tensor, inputs: Mapping[str, Tensor], settings: Settings) -> Tensor:
    return -log_probs * inputs["weights"]


def importance_sampling(log_probs: Tensor, inputs: Mapping[str, Tensor], settings: Settings) -> Tensor:
    return -torch.exp(log_probs - inputs["logprobs"]) * inputs["advantages"]


def ppo(log_probs: Tensor, inputs: Mapping[str, Tensor], settings: Settings) -> Tensor:
    ratio = torch.exp(log_probs - inputs["logprobs"])
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"])


def cispo(log_probs: Tensor, inputs: Mapping[str, Tensor], settings: Settings) -> Tensor:
    ratio = torch.exp(log_probs - inputs["logprobs"])
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -clipped.detach() * log_probs * inputs["advantages"]


def dro(log_probs: Tensor, inputs: Mapping[str, Tensor], settings: Settings) -> Tensor:
    distance = log_probs - inputs["logprobs"]
    return -(log_probs * inputs["advantages"] - 0.5 * settings["beta"] * distance**2)


@dataclass(frozen=True)
class ServedLoss:
    """A loss function, the tensors that it reads, and its hyperparameters with their defaults."""

    function: TokenLoss
    inputs: tuple[str, ...]
    settings: Mapping[str, float]
    factor: str | None = None
    """A token whose value of this input is 0 has no loss. None: every token has one."""


_POLICY = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: dict[str, ServedLoss] = {
    "cross_entropy": ServedLoss(cross_entropy, ("weights",), {}, factor="weights"),
    "importance_sampling": ServedLoss(importance_sampling, _POLICY, {}, factor="advantages"),
    "ppo": ServedLoss(ppo, _POLICY, _CLIP, factor="advantages"),
    "cispo": ServedLoss(cispo, _POLICY, _CLIP, factor="advantages"),
    "dro": ServedLoss(dro, _POLICY, {"beta": 0.05}),
}


def find_loss(name: str) -> ServedLoss:
    if name not in LOSSES:
        known = ", ".join(LOSSES)
        raise RequestRefused(
            400, f"There is no loss {name!r}.{did_you_mean(name, LOSSES)} This service has {known}."
        )
    return LOSSES[name]


def loss_settings(loss: ServedLoss, given: Mapping[str, float | str]) -> dict[str, float]:
    """The hyperparameters of a pass; one that the loss does not have is refused."""
    settings = dict(loss.settings)
    for key, value in given.items():
        if key not in settings or isinstance(value, str):
            allowed = ", ".join(settings) or "no settings"
            raise RequestRefused(400, f"loss_fn_config {key}={value!r}: this loss takes {allowed}.")
        settings[key] = value
    return settings


def check_datum(index: int, datum: LossDatum, loss: ServedLoss, vocabulary: int, context: int) -> None:
    """Refuse a datum whose tensors are missing or have another length than its tokens."""
    length = len(datum.tokens)
    if length + 1 > context:
        raise RequestRefused(
            400, f"data[{index}] has {length} tokens and a target; the model reads {context}."
        )
    for name in ("target_tokens", *loss.inputs):
        if name not in datum.inputs:
            raise RequestRefused(400, f"data[{index}] has no {name}, which the loss needs.")
    wanted = datum.targets.shape
    if len(wanted) not in (1, 2) or wanted[0] != length or 0 in wanted:
        raise RequestRefused(
            400,
            f"data[{index}] has {length} tokens and target_tokens of shape {list(wanted)}; a token needs one "
            "target, or one row of targets.",
        )
    for name, values in datum.inputs.items():
        if name != "target_tokens" and name not in loss.inputs:
            reads = ", ".join(("target_tokens", *loss.inputs))
            raise RequestRefused(400, f"data[{index}] has {printable(name)}; this loss reads {reads} only.")
        if values.shape != wanted:
            raise RequestRefused(
                400,
                f"data[{index}] has {name} of shape {list(values.shape)} and target_tokens of shape "
                f"{list(wanted)}; the shapes must be the same.",
            )
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise RequestRefused(400, f"data[{index}] {name} has a value that is not finite.")
    for name, ids in (("tokens", datum.tokens), ("target_tokens", datum.targets)):
        if ids.dtype.kind != "i" or not 0 <= ids.min() <= ids.max() < vocabulary:
            raise RequestRefused(400, f"data[{index}] {name} must be token ids from 0 to {vocabulary - 1}.")


def summed_loss(
    loss: ServedLoss, settings: Settings, log_probs: Tensor, inputs: Mapping[str, np.ndarray]
) -> Tensor:
    """The summed loss from the log-probs of targets."""
    tensors = {name: torch.tensor(inputs[name]).to(log_probs) for name in loss.inputs}
    return loss.function(log_probs, tensors, settings).sum()
