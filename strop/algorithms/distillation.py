"""On-policy distillation: a per-token advantage or loss from the log-probs of a teacher.

For a token a that the policy pi sampled, g = log pi_teacher(a) - log pi(a). Its mean under the policy is
minus the reverse KL divergence KL(pi, pi_teacher), so g is a reward whose maximum is the teacher itself. It
is one sample of a difference of two distributions; a divergence over the teacher's likeliest tokens says
which other tokens should become likelier, too.
"""

from __future__ import annotations

import torch
from torch import Tensor


def teacher_gain(
    log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor, *, limit: float | None = None
) -> Tensor:
    """g per token [B, T], within ±`limit`; 0 outside the mask."""
    if log_probs.shape != teacher_log_probs.shape or log_probs.shape != mask.shape:
        raise ValueError(
            f"log_probs {tuple(log_probs.shape)}, teacher_log_probs {tuple(teacher_log_probs.shape)} and "
            f"mask {tuple(mask.shape)} must have one shape [batch, tokens]."
        )
    gain = teacher_log_probs - log_probs
    if limit is not None:
        gain = gain.clamp(-limit, limit)
    return torch.where(mask.bool(), gain, 0.0)


def discounted_gain(gain: Tensor, mask: Tensor, *, discount: float) -> Tensor:
    """A_t = g_t + discount * A_(t+1) over the tokens of the mask. Tokens outside it take no part: the next
    token of the policy's last token before a tool's reply is the first one after the reply."""
    if discount == 0.0:
        return gain
    total = torch.zeros_like(gain)
    following = torch.zeros_like(gain[:, 0])
    trained = mask.bool()
    for column in range(gain.shape[1] - 1, -1, -1):
        here = gain[:, column] + discount * following
        total[:, column] = torch.where(trained[:, column], here, 0.0)
        following = torch.where(trained[:, column], here, following)
    return total


def forward_kl_topk(
    log_probs: Tensor, teacher_log_probs: Tensor, *, min_log_prob: float | None = None
) -> Tensor:
    """sum_k p_k (log p_k - log q_k) per token [B, T] over the teacher's likeliest tokens, at least 0: p of
    the teacher, q of the policy, both [B, T, k]. Log-probs below `min_log_prob` count as that. Tokens that
    one of both does not have, with a log-prob of -inf, are left out."""
    if log_probs.shape != teacher_log_probs.shape:
        raise ValueError(
            f"log_probs {tuple(log_probs.shape)} and teacher_log_probs {tuple(teacher_log_probs.shape)} must "
            "have one shape [batch, tokens, k]."
        )
    missing = log_probs.isneginf() | teacher_log_probs.isneginf()
    log_probs = log_probs.masked_fill(missing, 0.0)
    teacher_log_probs = teacher_log_probs.masked_fill(missing, 0.0)
    if min_log_prob is not None:
        log_probs = log_probs.clamp(min=min_log_prob)
        teacher_log_probs = teacher_log_probs.clamp(min=min_log_prob)
    divergence = (teacher_log_probs.exp() * (teacher_log_probs - log_probs)).sum(-1)
    return divergence.clamp(min=0.0)  # parts of distributions: their divergence may be negative
