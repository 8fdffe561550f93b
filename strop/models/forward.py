"""A forward pass over the responses of a micro-batch: log-probs, entropies, values, scores.

Packed (the default) or padded (models/packing.py), the numbers are the same. The model runs through its own
forward, but its output head is replaced by an `OutputHead` that computes the few wanted numbers instead of
logits: only the states in front of response tokens reach it, a chunk at a time, so nothing of the size
[tokens, vocabulary] ever exists. Wrappers around the model (adapters, sharding) see an ordinary call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from strop.algorithms import top_tokens
from strop.algorithms.frozen_head import frozen_head_logprobs
from strop.algorithms.logprobs import head_logits, token_logprobs_from_hidden
from strop.algorithms.logprobs_of_logits import sum_pi_squared, token_statistics
from strop.models.attention import PACKED, padded_attention, set_attention
from strop.models.heads import scalar_head
from strop.models.layouts.check import runs_packed
from strop.models.layouts.routing import auxiliary_loss, begin_routing, recorded_experts, routings
from strop.models.lora import decoder_of
from strop.models.packing import (
    NOTHING,
    Inputs,
    RankShare,
    lay_out,
    rectangle,
    refuse_mixed_lengths,
    response_states,
    without_last,
)
from strop.models.sequence_parallel import Slicing
from strop.models.vision.passes import images_in, lay_out_images
from strop.types import Batch, Images

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LANGUAGE = ("log_probs", "entropy", "observed_entropy", "sum_pi_squared")
"""Outputs of a language model."""
TOP = ("top_ids", "top_log_probs", "student_top_log_probs")
"""Outputs of a language model with several numbers per token."""
SCALAR = ("values", "scores")
"""Outputs of a value or reward model."""
_LOGITS = {"cpu": 2**26, "cuda": 2**28}
"""Logits that exist at a time. Each chunk adds to the gradient of the whole head: a GPU wants many rows."""


def response_outputs(
    model: PreTrainedModel,
    batch: Batch,
    want: Sequence[str],
    *,
    temperature: float = 1.0,
    packed: bool | None = None,
    attention: str | None = None,
    chunk: int | None = None,
    slicing: Slicing | None = None,
    topk: int = 0,
) -> dict[str, Tensor]:
    """The outputs named in `want`, [B, T] in float32 on the model's device, with gradients if it has any.

    Column t belongs to the t-th response token, from the state before it; columns after a response are 0.
    `want` may name log_probs, entropy, observed_entropy (the same without a gradient, so that the backward
    pass does not compute its slope) and sum_pi_squared (no gradient) of a language model, at `temperature`;
    values of a value model; scores of a reward model, [B] and alone; auxiliary, the scalar load-balancing
    loss of a mixture of experts; experts, those that it chose; top_ids and top_log_probs, both and alone with
    log_probs: the `topk` likeliest tokens [B, T, topk], no gradient; student_top_log_probs, those of the
    tokens batch.teacher_top_ids [B, T, k], -inf of those beyond the vocabulary. `packed`: None packs where
    the model can; True only after `runs_packed`, which prepares the model. `attention`: the function of the
    padded layout; None: sdpa, or eager where sdpa leaves something out. `chunk`: rows of logits at a time
    (None: 256 MiB on a CPU, 1 GiB on a GPU). With `slicing` the ranks of a group share the row, and each
    gets all outputs.
    """
    _refuse_unknown(want)
    if "scores" in want:
        assert list(want) == ["scores"], want
        return {"scores": sequence_scores(model, batch.sequences, batch.images, packed, attention, slicing)}
    device = next(model.parameters()).device
    # The load-balancing loss counts tokens, so there no sequence shares tokens with another.
    counted = "auxiliary" in want
    if slicing is not None and counted:
        raise ValueError(
            "The load-balancing loss counts whole rows; set aux_loss_coef=0 or "
            "ulysses_sequence_parallel_size=1."
        )
    shared = not counted and batch.experts is None  # experts of a prefix may differ from row to row
    table = rectangle(batch.sequences)
    read = table if counted else without_last(table)
    if packed is None:
        packed = runs_packed(model, True, slicing is not None)
    inputs = _laid_out(model, read, batch.images, packed=packed, share=shared, device=device)
    states, labels, cells = (part.to(device) for part in response_states(batch, table, inputs.places))
    share = RankShare(states, labels, inputs, slicing)
    head: OutputHead
    if "values" in want:
        head = _ScalarHead(model, share.states)
    else:
        names = [name for name in want if name in LANGUAGE]
        head = _LanguageHead(model, share.states, share.labels, names, temperature, chunk)
        head.top = [name for name in want if name in TOP]
        head.topk = topk
        if "student_top_log_probs" in want:
            assert batch.teacher_top_ids is not None
            ids, foreign = top_tokens.known_tokens(batch.teacher_top_ids, len(head.module.weight))
            head.ids = share.rows_of(ids.to(device).flatten(0, 1)[cells].long())
    options = {"output_router_logits": True} if counted else {}
    records = "experts" in want
    if records or batch.experts is not None or model in routings:
        begin_routing(model, batch, inputs, records=records)
    result, output = _run(model, share.inputs, head, attention, options)
    found = {}
    joined = share.join(result)
    single = len(head.names)
    for name, column in zip(head.names, joined[:, :single].unbind(-1), strict=True):
        if name in ("sum_pi_squared", "observed_entropy"):
            column = column.detach()
        numbers = torch.zeros(batch.mask.numel(), dtype=torch.float32, device=device)
        found[name] = numbers.index_put((cells,), column.float()).view(batch.mask.shape)
    for name, part in zip(head.top, joined[:, single:].chunk(max(1, len(head.top)), dim=-1)):
        numbers = torch.zeros(batch.mask.numel(), part.shape[1], dtype=torch.float32, device=device)
        table = numbers.index_put((cells,), part.float()).view(*batch.mask.shape, part.shape[1])
        found[name] = table.int() if name == "top_ids" else table
    if "student_top_log_probs" in want:
        found["student_top_log_probs"].masked_fill_(foreign.to(device), -torch.inf)
    if counted:
        found["auxiliary"] = auxiliary_loss(model, output)
    if "experts" in want:
        found["experts"] = recorded_experts(model, inputs)
    return found


def _laid_out(
    model: PreTrainedModel, table: Tensor, images: Sequence[Images] | None, **options: Any
) -> Inputs:
    refuse_mixed_lengths(model.config, table)
    return lay_out(table, **options) if images is None else lay_out_images(model, table, images, **options)


def _refuse_unknown(want: Sequence[str]) -> None:
    known = [*LANGUAGE, *TOP, *SCALAR, "auxiliary", "experts"]
    unknown = sorted(set(want) - set(known))
    if unknown or not set(want) - {"auxiliary", "experts"}:
        raise ValueError(f"A model cannot answer {unknown or list(want)}; it can answer {known}.")


def sequence_scores(
    model: PreTrainedModel,
    sequences: Sequence[Tensor],
    images: Sequence[Images] | None = None,
    packed: bool | None = None,
    attention: str | None = None,
    slicing: Slicing | None = None,
) -> Tensor:
    """A reward model's score of each sequence [B], read at its last token."""
    device = next(model.parameters()).device
    if packed is None:
        packed = runs_packed(model, True, slicing is not None)
    inputs = _laid_out(model, rectangle(sequences), images, packed=packed, device=device)
    ends = (inputs.places != NOTHING).sum(1, keepdim=True) - 1
    last = inputs.places.gather(1, ends).squeeze(1).to(device)
    share = RankShare(last, last, inputs, slicing)
    result, _ = _run(model, share.inputs, _ScalarHead(model, share.states), attention, {})
    return share.join(result).squeeze(-1)


# --- the pass -----------------------------------------------------------------------------------------------


def _run(
    model: PreTrainedModel, inputs: Inputs, head: OutputHead, attention: str | None, options: dict[str, bool]
) -> tuple[Tensor, object]:
    """A forward pass whose output head is `head`: its outputs [n, outputs], and the model's output."""
    given: dict[str, Any] = dict(options)
    if inputs.packing is not None:
        set_attention(model, PACKED)
        given["packing"] = inputs.packing
    else:
        set_attention(model, attention or padded_attention(model))
    images: AbstractContextManager[tuple[Tensor, dict[str, Tensor]]] = nullcontext((inputs.ids, {}))
    if inputs.images:
        images = images_in(model, inputs)
    with forward_replaced(head.module, head), images as (ids, more):
        # Without use_cache=False, or with a mask of ones, some models let packed sequences see each other.
        output = model(
            input_ids=ids,
            position_ids=inputs.positions,
            attention_mask=inputs.mask,
            use_cache=False,
            **given,
            **more,
        )
    if head.after is not None:
        return head.after(), output
    return output.logits[0], output


class OutputHead:
    """Replaces the output head during a pass. Given hidden states [b, L, H] it returns [1, n, outputs] for
    the states that count."""

    module: nn.Linear
    names: Sequence[str]
    top: Sequence[str] = ()
    """Outputs with several columns each, after those of `names`."""
    after: Callable[[], Tensor] | None = None
    """Gives the outputs [n, outputs] once the pass is over, where they are not the output of the head
    itself."""

    def __call__(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class _ScalarHead(OutputHead):
    names = ("values",)

    def __init__(self, model: nn.Module, states: Tensor):
        self.module = scalar_head(model)
        self.states = states

    def __call__(self, hidden: Tensor) -> Tensor:
        # A value is regressed on; eight bits of mantissa would be its noise floor.
        picked = hidden.flatten(0, 1).index_select(0, self.states).float()
        bias = None if self.module.bias is None else self.module.bias.float()
        return _as_output(F.linear(picked, self.module.weight.float(), bias))


class _LanguageHead(OutputHead):
    topk = 0
    """Tokens of top_ids and top_log_probs."""
    ids: Tensor | None = None
    """[n, k], the tokens of student_top_log_probs."""

    def __init__(
        self,
        model: PreTrainedModel,
        states: Tensor,
        labels: Tensor,
        names: Sequence[str],
        temperature: float,
        chunk: int | None,
    ):
        head = model.get_output_embeddings()
        if head is None:
            raise ValueError(
                f"{type(model).__name__} has no language-model head; log-probs need a causal language model."
            )
        self.module = cast(nn.Linear, head)
        self.names = names
        self.states = states
        self.labels = labels
        self.temperature = temperature
        self.chunk = chunk or max(1, _LOGITS.get(states.device.type, 2**26) // len(self.module.weight))
        self.want_entropy = "entropy" in names or "observed_entropy" in names
        if not head_is_plain(model):
            self.model = model
            self.after = self._from_own_logits
            self.picked = states.new_empty(0)

    def __call__(self, hidden: Tensor) -> Tensor:
        picked = hidden.flatten(0, 1).index_select(0, self.states)
        if self.after is not None:
            self.picked = picked
            return picked[None]
        weight = self.module.weight
        bias = getattr(self.module, "bias", None)
        asked: dict[str, Any] = {"bias": bias, "temperature": self.temperature, "chunk": self.chunk}
        compute = token_logprobs_from_hidden
        if not weight.requires_grad and "entropy" not in self.names:
            compute = frozen_head_logprobs
        log_probs, entropy = compute(picked, weight, self.labels, want_entropy=self.want_entropy, **asked)
        squares = None
        if "sum_pi_squared" in self.names:
            parts = []
            with torch.no_grad():
                for logits in (head_logits(part, weight, bias) for part in picked.split(self.chunk)):
                    parts.append(sum_pi_squared(logits, temperature=self.temperature))
            squares = torch.cat(parts)
        columns = self._columns(log_probs, entropy, squares)
        if self.ids is not None:
            found = top_tokens.log_probs_of_tokens(picked, weight, self.ids, **asked)
            columns = torch.cat([columns, found], dim=-1)
        elif self.top:
            columns = torch.cat([columns, *top_tokens.top_tokens(picked, weight, self.topk, **asked)], dim=-1)
        return _as_output(columns)

    def _from_own_logits(self) -> Tensor:
        """For heads that cap, scale or otherwise change logits: the model's own logits, computed again in the
        backward pass."""
        pieces = []
        for start in range(0, max(1, len(self.picked)), self.chunk):
            at = slice(start, start + self.chunk)
            parts = (self.picked[at], self.labels[at], None if self.ids is None else self.ids[at])
            pieces.append(checkpoint(self._of_own_logits, *parts, use_reentrant=False))
        return torch.cat(pieces)

    def _of_own_logits(self, hidden: Tensor, labels: Tensor, ids: Tensor | None) -> Tensor:
        logits = own_logits(self.model, hidden)
        log_probs, entropy = token_statistics(
            logits, labels, temperature=self.temperature, want_entropy=self.want_entropy
        )
        wanted = "sum_pi_squared" in self.names
        squares = sum_pi_squared(logits, temperature=self.temperature) if wanted else None
        columns = self._columns(log_probs, entropy, squares)
        if ids is not None:
            found = top_tokens.log_probs_in_logits(logits, ids, temperature=self.temperature)
            return torch.cat([columns, found], dim=-1)
        if self.top:
            top = top_tokens.top_of_logits(logits, self.topk, temperature=self.temperature)
            return torch.cat([columns, *top], dim=-1)
        return columns

    def _columns(self, log_probs: Tensor, entropy: Tensor | None, squares: Tensor | None) -> Tensor:
        found = {
            "log_probs": log_probs,
            "entropy": entropy,
            "observed_entropy": None if entropy is None else entropy.detach(),
            "sum_pi_squared": squares,
        }
        return torch.stack([cast(Tensor, found[name]) for name in self.names], dim=-1)


def _as_output(numbers: Tensor) -> Tensor:
    """[n, outputs] as the output of a head. Not a view: sharded modules hook what a module returns."""
    return numbers[None].clone()


# --- heads of language models that are more than a matrix product -------------------------------------------


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Inside the block `forward` is the forward of `module`."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


class _DecoderOutput:
    """Last hidden states in the place of a decoder's output, whichever way a model reads it."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, place: int | str) -> Tensor:
        return (self.last_hidden_state,)[0 if isinstance(place, str) else place]

    def keys(self) -> tuple[str]:
        return ("last_hidden_state",)

    def __getattr__(self, name: str) -> None:
        return None


def own_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The logits [n, V] that the model makes of [n, H] at its head. What it does before is not done again."""
    head = cast(nn.Linear, model.get_output_embeddings())
    project = head.forward
    token = torch.zeros(1, 1, dtype=torch.long, device=hidden.device)
    with (
        forward_replaced(decoder_of(model), lambda *_, **__: _DecoderOutput(hidden[None])),
        forward_replaced(head, lambda _: project(hidden[None])),
    ):
        logits: Tensor = model(input_ids=token, use_cache=False).logits[0]
        return logits


_plain: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@torch.no_grad()
def head_is_plain(model: PreTrainedModel) -> bool:
    """Whether logits are just hidden @ weight.T + bias. Checked once per head, with logits over any cap."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    if head not in _plain:
        noise = torch.randn(4, head.in_features, generator=torch.Generator().manual_seed(0)).to(head.weight)
        spread = F.linear(noise, head.weight).float().std()
        loud = noise * (100.0 / spread.clamp(min=1e-12)).to(noise)
        expected = F.linear(loud, head.weight, head.bias).float()
        found = own_logits(model, loud).float()
        same = found.shape == expected.shape and bool(
            (found - expected).abs().max() <= 0.01 * expected.abs().max()
        )
        _plain[head] = same and bool(spread > 0)
    return _plain[head]
