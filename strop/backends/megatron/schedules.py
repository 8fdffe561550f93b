"""Learning rates as Megatron's scheduler computes them from lr_warmup_init, lr_decay_style and their like."""

from __future__ import annotations

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from strop.backends.optimizer import make_schedule, warmup_length
from strop.compat import Compat
from strop.config.megatron import megatron_schedule_keys
from strop.config.schema.model import OptimConfig


def megatron_schedule(optimizer: Optimizer, optim: OptimConfig, compat: Compat = None) -> LambdaLR:
    """The schedule of Megatron's keys where one of them is set, else that of lr_scheduler_type."""
    if not megatron_schedule_keys(optim):
        return make_schedule(optimizer, optim, compat)
    return LambdaLR(optimizer, partial(factor, optim=optim))


def factor(step: int, *, optim: OptimConfig) -> float:
    """The learning rate of the (step + 1)-th trainer step, divided by optim.lr."""
    return learning_rate(step, optim) / optim.lr


def learning_rate(step: int, optim: OptimConfig) -> float:
    """From lr_warmup_init to lr in the warm-up, then to min_lr at lr_decay_steps in the shape of
    lr_decay_style."""
    end = optim.lr_decay_steps or optim.total_training_steps
    warmup = warmup_length(max(end, 0), steps=optim.lr_warmup_steps, ratio=optim.lr_warmup_steps_ratio)
    if warmup > 0 and step <= warmup:
        return optim.lr_warmup_init + (optim.lr - optim.lr_warmup_init) * step / warmup
    if optim.lr_decay_style == "constant":
        return optim.lr
    if step > end:
        return optim.min_lr
    if optim.lr_decay_style == "inverse-square-root":
        return max(optim.min_lr, optim.lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(step, 1)))
    done = (step - warmup) / max(1, end - warmup)
    shape = _shape(step, done, end, optim)
    return optim.min_lr + shape * (optim.lr - optim.min_lr)


def _shape(step: int, done: float, end: int, optim: OptimConfig) -> float:
    """What is left of the way from lr to min_lr; `done` is the share of the steps after warm-up."""
    if optim.lr_decay_style == "linear":
        return 1.0 - done
    if optim.lr_decay_style == "cosine":
        return 0.5 * (math.cos(math.pi * done) + 1.0)
    length = optim.lr_wsd_decay_steps or end
    last = (step - (end - length)) / max(1, length)
    if last <= 0:
        return 1.0
    if optim.lr_wsd_decay_style == "linear":
        return 1.0 - last
    if optim.lr_wsd_decay_style == "cosine":
        return 0.5 * (math.cos(math.pi * last) + 1.0)
    if optim.lr_wsd_decay_style == "minus_sqrt":
        return 1.0 - math.sqrt(last)
    return 2.0 * 0.5**last - 1.0
