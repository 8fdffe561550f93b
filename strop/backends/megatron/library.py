"""megatron-core, imported when a run uses it. Nothing else imports the library."""

from __future__ import annotations

import functools
from types import ModuleType

from torch import Tensor

from strop.extras import require

EXTRA = "megatron"
WHY = "strategy=megatron"


def megatron(name: str) -> ModuleType:
    """A module of megatron-core, such as "parallel_state"."""
    _repair()
    return require(f"megatron.core.{name}", extra=EXTRA, why=WHY)


def weigh_balance(weight: float) -> None:
    """From now on every token counts `weight` in load-balancing losses. Routers add their losses to the
    gradient themselves, times the number of tokens, and schedules set the factor of the whole batch."""
    scaler = megatron("transformer.moe.moe_utils").MoEAuxLossAutoScaler

    def set_loss_scale(scale: Tensor) -> None:
        scaler.main_loss_backward_scale = scale * weight

    scaler.set_loss_scale = staticmethod(set_loss_scale)


@functools.cache
def _repair() -> None:
    """Without Transformer Engine, the router of 0.16.1 asks for a name that was never set. torch.compile, for
    a function of the router that does nothing here, would take longer than the pass."""
    require("megatron.core.jit", extra=EXTRA, why=WHY).disable_jit_fuser()
    routing = require("megatron.core.transformer.moe.moe_utils", extra=EXTRA, why=WHY)
    vars(routing).setdefault("te_general_gemm", None)
