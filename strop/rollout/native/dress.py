"""What a module wears while the engine has it on loan: rollout attention, evaluation mode, and on a GPU a wide head and
joined products.

The output head gives float32 logits, because bf16 has steps of 1/8 at the usual size of a logit. Small parts run as kernels
here as in training (models/parts.py), which is not taken off again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.parts import quicken
from strop.models.residual import AddingLinear
from strop.rollout.native.attention import NAME
from strop.rollout.native.joined import Joined, joined_forwards


@contextmanager
def on_loan(model: Any, changes: Changes | None = None) -> Iterator[None]:
    """The module dressed for a rollout; afterwards every part is as it was before."""
    before = model.config._attn_implementation
    training = [part for part in model.modules() if part.training]
    model.set_attn_implementation(NAME)
    try:
        for part in training:
            part.training = False
        if changes is not None:
            changes.put_on()
        yield
    finally:
        if changes is not None:
            changes.take_off()
        for part in training:
            part.training = True
        model.set_attn_implementation(before)


class Changes:
    """What a model wears besides: see above. Found once; put on and taken off for each loan."""

    def __init__(self, model: nn.Module) -> None:
        self._forwards: list[tuple[nn.Module, Callable[..., Tensor]]] = []
        self._joined: list[Joined] = []
        self._owners: list[AddingLinear] = []
        if next(model.parameters()).device.type != "cuda":
            return
        quicken(model)
        # A layer's states are read by the next layer alone here.
        self._owners = [part for part in model.modules() if isinstance(part, AddingLinear) and not part.overwrites]
        head = getattr(model, "get_output_embeddings", lambda: None)()
        if type(head) is nn.Linear and head.weight.dtype in (torch.bfloat16, torch.float16):
            self._forwards.append((head, _wide_head(head)))
        for part, forward, product in joined_forwards(model):
            self._forwards.append((part, forward))
            self._joined.append(product)

    def put_on(self) -> None:
        for product in self._joined:
            product.lay_out()
        for part, forward in self._forwards:
            part.forward = forward
        for end in self._owners:
            end.overwrites = True

    def take_off(self) -> None:
        for end in self._owners:
            end.overwrites = False
        for part, _ in self._forwards:
            part.__dict__.pop("forward", None)


def _wide_head(head: nn.Linear) -> Callable[..., Tensor]:
    def forward(hidden: Tensor) -> Tensor:
        logits = torch.mm(hidden.reshape(-1, hidden.shape[-1]), head.weight.t(), out_dtype=torch.float32)
        if head.bias is not None:
            logits += head.bias
        return logits.view(*hidden.shape[:-1], -1)

    return forward
