"""The losses of the protocol against their formulas, written a second time without torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from strop.rewards.server_requests import RequestRefused
from strop.serve.losses import LOSSES, check_datum, find_loss, loss_settings, summed_loss
from strop.serve.messages import LossDatum

P = [-1.0, -0.2, -3.0]
Q = [-1.5, -0.2, -1.0]
A = [1.0, -2.0, 0.5]


def ratio(index: int) -> float:
    return math.exp(P[index] - Q[index])


def clipped(index: int) -> float:
    return min(max(ratio(index), 0.8), 1.2)


BY_HAND = {
    "cross_entropy": sum(-p * a for p, a in zip(P, A, strict=True)),
    "importance_sampling": sum(-ratio(i) * A[i] for i in range(3)),
    "ppo": sum(-min(ratio(i) * A[i], clipped(i) * A[i]) for i in range(3)),
    "cispo": sum(-clipped(i) * P[i] * A[i] for i in range(3)),
    "dro": sum(-(P[i] * A[i] - 0.025 * (P[i] - Q[i]) ** 2) for i in range(3)),
}
SLOPES = {
    "cross_entropy": [-a for a in A],
    "importance_sampling": [-ratio(i) * A[i] for i in range(3)],
    # Token 0 is beyond the upper clip, and token 2 below the lower one with a positive advantage.
    "ppo": [0.0, -ratio(1) * A[1], -ratio(2) * A[2]],
    "cispo": [-clipped(i) * A[i] for i in range(3)],
    "dro": [-A[i] + 0.05 * (P[i] - Q[i]) for i in range(3)],
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_those_of_the_formula(name: str) -> None:
    log_probs = torch.tensor(P, dtype=torch.float64, requires_grad=True)
    values = {"weights": np.array(A), "advantages": np.array(A), "logprobs": np.array(Q)}
    loss = summed_loss(LOSSES[name], loss_settings(LOSSES[name], {}), log_probs, values)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(BY_HAND[name], abs=1e-12)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx(SLOPES[name], abs=1e-12)


def test_settings_are_those_of_the_loss() -> None:
    assert loss_settings(LOSSES["ppo"], {"clip_low_threshold": 0.5})["clip_low_threshold"] == 0.5
    with pytest.raises(RequestRefused, match=r"clip_low=0.5: this loss takes clip_low_threshold"):
        loss_settings(LOSSES["ppo"], {"clip_low": 0.5})
    with pytest.raises(RequestRefused, match="There is no loss 'ppoo'"):
        find_loss("ppoo")


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"weights": np.ones(2)}, "no target_tokens"),
        ({"target_tokens": np.array([1, 2])}, "no weights"),
        ({"target_tokens": np.array([1]), "weights": np.ones(1)}, "target_tokens of shape"),
        ({"target_tokens": np.array([1, 2]), "weights": np.ones(3)}, "weights of shape"),
        ({"target_tokens": np.array([1, 50]), "weights": np.ones(2)}, "target_tokens must be token ids"),
        ({"target_tokens": np.array([1.0, 2.0]), "weights": np.ones(2)}, "target_tokens must be token ids"),
        ({"target_tokens": np.array([1, 2]), "weights": np.array([1, np.inf])}, "not finite"),
        ({"target_tokens": np.array([1, 2]), "weights": np.ones(2), "mask": np.ones(2)}, "has mask"),
    ],
)
def test_a_datum_that_does_not_fit_is_refused(inputs: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(RequestRefused, match=words):
        check_datum(0, LossDatum(np.array([3, 4]), inputs), LOSSES["cross_entropy"], 50, 8)
