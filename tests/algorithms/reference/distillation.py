"""Learning from a teacher that gives its most likely tokens at every position."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from strop.algorithms.aggregation import require_same_shape


class Distillation(NamedTuple):
    per_token: Tensor  # [N] the loss
    student_mass: Tensor  # [N] probability the student gives to the teacher's top k
    teacher_mass: Tensor  # [N] probability the teacher gives to them
    overlap_count: Tensor  # [N] how many of them are in the student's own top k
    overlap_token_advantage: (
        Tensor  # [N] mean over the shared tokens of p_teacher (log p_teacher - log p_student), negated
    )


def forward_kl_topk(
    student_logits: Tensor,
    teacher_log_probs: Tensor,
    teacher_ids: Tensor,
    *,
    log_prob_floor: float | None = None,
) -> Distillation:
    """KL(teacher || student) restricted to the teacher's top k: Σ_k p_t (log p_t - log p_s).

    `student_logits` [N, V], `teacher_log_probs` and `teacher_ids` [N, k]. `log_prob_floor` limits both
    log-probs from below.
    """
    require_same_shape(teacher_log_probs=teacher_log_probs, teacher_ids=teacher_ids)
    if student_logits.shape[:-1] != teacher_ids.shape[:-1]:
        raise ValueError(
            f"student_logits has shape {tuple(student_logits.shape)} but teacher_ids has shape "
            f"{tuple(teacher_ids.shape)}; "
            "all but the last dimension must be equal."
        )
    student_all = student_logits.float().log_softmax(-1)
    student = student_all.gather(-1, teacher_ids)
    student_mass, teacher_mass = student.exp().sum(-1), teacher_log_probs.exp().sum(-1)
    own = student_all.detach().topk(teacher_ids.shape[-1], dim=-1).indices
    shared = (teacher_ids[..., :, None] == own[..., None, :]).any(-1)
    teacher = teacher_log_probs
    if log_prob_floor is not None:
        student, teacher = student.clamp(min=log_prob_floor), teacher.clamp(min=log_prob_floor)
    terms = teacher.exp() * (teacher - student)
    count = shared.sum(-1)
    advantage = -(terms.detach() * shared).sum(-1) / count.clamp(min=1)
    return Distillation(
        terms.sum(-1), student_mass.detach(), teacher_mass, count, torch.where(count > 0, advantage, 0.0)
    )
