"""The protocol of training backends (forward, forward_backward, step, export, state, offload), and the
settings that all of them share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from strop.compat import Compat
from strop.config.schema.model import OptimConfig
from strop.ranks import Ranks
from strop.types import Batch


@dataclass
class Outputs:
    """Outputs of a model for the responses of a (micro-)batch; [b, T] and aligned with Batch unless stated
    otherwise."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    observed_entropy: Tensor | None = None
    """Entropy without a gradient: a metric costs the backward pass nothing."""
    sum_pi_squared: Tensor | None = None
    top_ids: Tensor | None = None
    """[b, T, topk], the likeliest tokens at the place of each response token."""
    top_log_probs: Tensor | None = None
    """[b, T, topk], their log-probs."""
    student_top_log_probs: Tensor | None = None
    """[b, T, k], log-probs of the tokens in Batch.teacher_top_ids."""
    values: Tensor | None = None
    scores: Tensor | None = None
    """[b], a reward model's score of each whole sequence."""
    auxiliary: Tensor | None = None
    """Scalar load-balancing loss of a mixture of experts."""
    experts: Tensor | None = None
    """[b, longest, layers, k], numbers of the experts that each token visited (router replay)."""


Loss = Callable[[Outputs, Batch], tuple[Tensor, Mapping[str, Tensor]]]
"""(outputs, micro-batch) -> (scalar to differentiate, sums to report). Denominators are global and inside the
loss already, so the scalars of all micro-batches on all ranks add up to the loss of the whole mini-batch,
and so do the reported sums."""
Observe = Callable[[Batch, Tensor], None]
"""Called with each micro-batch and its loss per token."""


@dataclass(frozen=True)
class StepInfo:
    grad_norm: float
    lr: float
    skipped: bool = False
    """The gradient was not finite and the weights were left alone."""
    loss_scale: float | None = None
    """Factor of the loss, where the model computes in float16."""


@dataclass(frozen=True)
class MicroBatching:
    """How a batch is cut into micro-batches. It never changes the result."""

    rows: int = 8
    max_tokens: int | None = None
    """Set: fill micro-batches by tokens instead of by rows."""
    rows_per_item: int = 1
    """So many consecutive rows stay in one micro-batch, in their order: 2 for pairs of responses."""
    unread: int = 0
    """Tokens at the end of each row that the model does not read; `max_tokens` does not count them."""


def nothing_to_release() -> bool:
    """For `BackendSettings.on_out_of_memory`, where no other owner of device memory is known."""
    return False


@dataclass(frozen=True)
class BackendSettings:
    """Settings that every backend needs, however it divides the work."""

    optim: OptimConfig | None = None
    """None: the model is frozen and only answers."""
    device: torch.device | str = "cpu"
    compute: torch.dtype = torch.float32
    """Precision of forward and backward."""
    master: torch.dtype = torch.float32
    """Precision of master weights and optimizer state."""
    grad_clip: float | None = 1.0
    temperature: float = 1.0
    """Log-probs are those of the logits divided by it."""
    packed: bool = True
    """Sequences are packed into one row without padding."""
    attention: str | None = None
    """Attention function of the padded layout; None: sdpa, or eager where sdpa would leave something out."""
    offload_activations: bool = False
    """Activations wait for the backward pass in host memory."""
    router_replay: str = "disabled"
    """Which passes send tokens to the experts that the batch names. R2: updates; R3: `forward` too."""
    topk: int = 0
    """Tokens of the outputs top_ids and top_log_probs."""
    compat: Compat = None
    """The framework whose learning-rate schedules to follow."""
    on_out_of_memory: Callable[[], bool] = nothing_to_release
    """Called when a pass is out of memory: makes others release device memory, and says whether they did.
    Then the pass is retried as it is, before micro-batches get smaller."""


class Backend(Protocol):
    """One model in training (or frozen). Batches are on the CPU; the backend moves micro-batches to its
    device."""

    module: nn.Module
    temperature: float
    """Log-probs are those of the logits divided by it."""
    ranks: Ranks
    """The ranks that share the work. All of them call every method with the same batch and get the same
    result."""

    @property
    def out_of_memory(self) -> int:
        """How often a pass was out of memory (OOM) and retried with smaller micro-batches."""
        ...

    def forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        """Outputs named in `want` (see response_outputs of models/forward.py), no gradient, on the CPU in
        fp32."""
        ...

    def forward_backward(
        self, batch: Batch, want: Sequence[str], loss: Loss, micro: MicroBatching
    ) -> dict[str, float]:
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


# --- determinism --------------------------------------------------------------------------------------------

WORKSPACE = ":4096:8"
"""Fixed buffers of cuBLAS: with several streams it otherwise sums in the order in which they become free."""


def use_deterministic_kernels() -> None:
    """The same bits from run to run on one device, for this whole process. torch warns about operations
    without a deterministic kernel: sampling needs some (a cumulative sum on a GPU), and sampled tokens do not
    depend on the last bit of it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


@dataclass
class Roles:
    """The models of a run; None where the configuration needs none."""

    actor: Backend
    critic: Backend | None = None
    reference: Backend | None = None
    teacher: Backend | None = None
    """The teacher of a distillation. Like a reference it only needs `forward`."""


def refuse_other_weights(own: Mapping[str, Tensor], given: Mapping[str, Any]) -> None:
    """Refuse saved weights with other names or shapes than those of this model."""
    if own.keys() != given.keys():
        missing = sorted(own.keys() - given.keys())
        unknown = sorted(given.keys() - own.keys())
        raise ValueError(
            f"The saved weights are not those of this model: {len(missing)} are missing ({missing[:3]}), "
            f"{len(unknown)} are unknown ({unknown[:3]}). Were the model or lora_rank changed?"
        )
    for name, weight in own.items():
        if weight.shape != given[name].shape:
            raise ValueError(
                f"{name} was saved with shape {tuple(given[name].shape)} and is {tuple(weight.shape)} here."
            )
