"""A residual stream in float32 for models that compute in 16 bits.

The sum that runs through all layers is the one place of a decoder where rounding adds up: every layer rounds it twice, and two
ways to compute the same numbers (the engine's one token at a time, the trainer's packed row) drift apart there. Kept in float32
it costs some memory traffic; matrix products, attention and weights stay in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_NARROW = (torch.bfloat16, torch.float16)


def widen_residual(model: Any) -> bool:
    """Embeddings leave in float32, norms hand on the dtype of their weights. Says whether the model can do that.

    The hooks look at dtypes when they run: a model in float32 is left alone, and one that is rounded later is not.
    """
    norms = [
        part for part in model.modules() if "Norm" in type(part).__name__ and isinstance(getattr(part, "weight", None), Tensor)
    ]
    rotary = [part for part in model.modules() if type(part).__name__.endswith("RotaryEmbedding")]
    # torch's own layer norm takes no float32 input with 16-bit weights, and without rotary angles there are learned positions.
    if not norms or not rotary or any(isinstance(part, nn.LayerNorm | nn.GroupNorm) for part in norms):
        return False
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_hook(_widen)
    for part in norms:
        part.register_forward_hook(_narrow)
    for part in rotary:
        part.register_forward_hook(lambda _, __, angles: _angles(angles, embeddings.weight.dtype))
    return True


def narrows(part: nn.Module) -> bool:
    """Whether this part takes float32 and hands on the dtype of its weights."""
    return _narrow in part._forward_hooks.values()


def _widen(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    return output.float() if output.dtype in _NARROW else output


def _narrow(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return output.to(weight.dtype) if output.dtype == torch.float32 and weight.dtype in _NARROW else output


def _angles(angles: Any, dtype: torch.dtype) -> Any:
    """Models make the angles in the dtype of the stream; queries and keys are in that of the weights."""
    if dtype not in _NARROW:
        return angles
    if isinstance(angles, Tensor):
        return angles.to(dtype) if angles.is_floating_point() else angles
    return tuple(_angles(part, dtype) for part in angles)
