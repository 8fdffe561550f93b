"""The protocol of training backends: forward, forward_backward, step, export, save, load, offload."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from strop.ranks import Ranks
from strop.types import Batch


@dataclass
class Outputs:
    """What a model says about the responses of a (micro-)batch; [b, T] and aligned with Batch unless it says otherwise."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    observed_entropy: Tensor | None = None
    """Entropy without a gradient: what is only reported costs the backward pass nothing."""
    sum_pi_squared: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    """[b], a reward model's score of each whole sequence."""
    auxiliary: Tensor | None = None
    """Scalar load-balancing loss of a mixture of experts."""


Loss = Callable[[Outputs, Batch], tuple[Tensor, Mapping[str, Tensor]]]
"""(outputs, micro-batch) -> (scalar to differentiate, sums to report). Denominators are global and inside the loss already, so
the scalars of all micro-batches on all ranks add up to the loss of the whole mini-batch, and so do the reported sums."""


@dataclass(frozen=True)
class StepInfo:
    grad_norm: float
    lr: float
    skipped: bool = False
    """The gradient was not finite and the weights were left alone."""
    loss_scale: float | None = None
    """By what the loss was multiplied, where the model computes in float16."""


@dataclass(frozen=True)
class MicroBatching:
    """How a batch is cut for one pass over the model. It never changes the result."""

    rows: int = 8
    max_tokens: int | None = None
    """Set: fill micro-batches by tokens instead of by rows."""
    together: int = 1
    """So many consecutive rows are never parted, nor is their order changed: 2 for pairs of answers."""


class Backend(Protocol):
    """One model in training (or frozen). Batches live on the CPU; the backend moves micro-batches to its device."""

    module: nn.Module
    temperature: float
    """Log-probs are those of the logits divided by it."""
    ranks: Ranks
    """Who shares the work. All of them call every method alike, with the same batch, and are given the same answer."""

    @property
    def out_of_memory(self) -> int:
        """Times a pass did not fit into memory and was made again with smaller micro-batches."""
        ...

    def forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        """Outputs named in `want` (see response_outputs of models/forward.py), no gradient, on the CPU in fp32."""
        ...

    def forward_backward(self, batch: Batch, want: Sequence[str], loss: Loss, micro: MicroBatching) -> dict[str, float]:
        """Accumulate gradients of `loss` over all micro-batches; returns the reported sums."""
        ...

    def step(self) -> StepInfo:
        """Clip, update, clear gradients."""
        ...

    def advance_schedule(self) -> None:
        """Once per trainer step: the learning rate of the next one."""
        ...

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights by Hugging Face name, in compute precision, LoRA merged."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer and schedule, as tensors and plain values only."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def offload(self) -> None: ...

    def onload(self) -> None: ...
