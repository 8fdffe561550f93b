"""What a model says about the responses of a micro-batch: log-probs, entropies, values, scores.

Packed (the default) or padded, the numbers are the same. The model runs as a whole, through its own forward, but its output
head is asked for the few numbers that are wanted instead of for logits: only the states in front of response tokens reach it, a
chunk at a time, so nothing of the size [tokens, vocabulary] ever exists. Since the head answers inside the model's own forward,
wrappers around the model (adapters, sharding) see an ordinary call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from strop.algorithms.logprobs import head_logits, sum_pi_squared, token_logprobs_from_hidden, token_statistics
from strop.models.attention import PACKED, packing_obstacle, padded_attention, set_attention
from strop.models.heads import scalar_head
from strop.models.layout import NOTHING, Inputs, lay_out, rectangle
from strop.models.sequence_parallel import Slicing
from strop.types import Batch

LANGUAGE = ("log_probs", "entropy", "observed_entropy", "sum_pi_squared")
"""Outputs of a language model."""
SCALAR = ("values", "scores")
"""Outputs of a value or reward model."""
_LOGITS = {"cpu": 2**26, "cuda": 2**28}
"""Logits that exist at a time. Each chunk adds to the gradient of the whole head, for which a GPU wants many rows."""


def response_outputs(
    model: Any,
    batch: Batch,
    want: Sequence[str],
    *,
    temperature: float = 1.0,
    packed: bool = True,
    attention: str | None = None,
    chunk: int | None = None,
    slicing: Slicing | None = None,
) -> dict[str, Tensor]:
    """The outputs named in `want`, [B, T] in float32 on the model's device, with gradients where the model has them.

    Column t speaks of the t-th response token, from the state before it; columns after a response are 0. `want` may name
    log_probs, entropy, observed_entropy (the same without a gradient, so that the backward pass does not compute its slope) and
    sum_pi_squared (no gradient) of a language model, at `temperature`; values of a value model; scores of a reward model, [B]
    and alone; auxiliary, the scalar load-balancing loss of a mixture of experts. `attention` names the
    function of the padded layout; None: sdpa, or eager where sdpa would leave something out. `chunk` is how many rows of logits
    exist at a time (None: 256 MiB of them on a CPU, 1 GiB on a GPU). With `slicing` the ranks of a group share the row, and
    each is given all answers.
    """
    strange = sorted(set(want) - {*LANGUAGE, *SCALAR, "auxiliary"})
    if strange or not set(want) - {"auxiliary"}:
        raise ValueError(f"A model cannot answer {strange or list(want)}; it can answer {[*LANGUAGE, *SCALAR, 'auxiliary']}.")
    if "scores" in want:
        assert list(want) == ["scores"], want
        return {"scores": sequence_scores(model, batch.sequences, packed=packed, attention=attention, slicing=slicing)}
    device = next(model.parameters()).device
    # The load-balancing loss counts tokens, so there every sequence brings all of its own.
    counted = "auxiliary" in want
    table = rectangle(batch.sequences)
    inputs = lay_out(table if counted else without_last(table), packed=packed, share=not counted, device=device)
    states, labels, cells = (part.to(device) for part in _response_states(batch, table, inputs.places))
    if slicing is not None and counted:
        raise ValueError("The load-balancing loss counts whole rows; set aux_loss_coef=0 or ulysses_sequence_parallel_size=1.")
    mine = _Part(states, labels, inputs, slicing)
    inputs, states, labels = mine.inputs, mine.states, mine.labels
    more: dict[str, Any] = {"output_router_logits": True} if counted else {}
    if "values" in want:
        answer: Answer = _ScalarAnswer(model, states)
    else:
        answer = _LanguageAnswer(model, states, labels, [name for name in want if name in LANGUAGE], temperature, chunk)
    result, output = _run(model, inputs, answer, attention, more)
    result = mine.joined(result)
    found = {}
    for name, column in zip(answer.names, result.unbind(-1), strict=True):
        table = torch.zeros(batch.mask.numel(), dtype=torch.float32, device=device)
        column = column.detach() if name in ("sum_pi_squared", "observed_entropy") else column
        found[name] = table.index_put((cells,), column.float()).view(batch.mask.shape)
    if "auxiliary" in want:
        if getattr(output, "aux_loss", None) is None:
            raise ValueError(f"{type(model).__name__} has no load-balancing loss; it is not a mixture of experts.")
        found["auxiliary"] = output.aux_loss
    return found


def sequence_scores(
    model: Any,
    sequences: Sequence[Tensor],
    *,
    packed: bool = True,
    attention: str | None = None,
    slicing: Slicing | None = None,
) -> Tensor:
    """A reward model's score of each sequence [B], read at its last token."""
    device = next(model.parameters()).device
    inputs = lay_out(rectangle(sequences), packed=packed, device=device)
    ends = (inputs.places != NOTHING).sum(1, keepdim=True) - 1
    last = inputs.places.gather(1, ends).squeeze(1).to(device)
    mine = _Part(last, last, inputs, slicing)
    result, _ = _run(model, mine.inputs, _ScalarAnswer(model, mine.states), attention, {})
    return mine.joined(result).squeeze(-1)


class _Part:
    """What of a question this rank answers: all of it, or what lies in its slice of the row."""

    def __init__(self, states: Tensor, labels: Tensor, inputs: Inputs, slicing: Slicing | None):
        self.states, self.labels, self.inputs, self.slicing = states, labels, inputs, slicing
        if slicing is None:
            return
        self.count = len(states)
        self.chosen, self.states = slicing.own(states, inputs.ids.shape[1])
        self.labels = labels[self.chosen]
        if not len(self.chosen):  # one answer that nobody reads: see Slicing.joined
            self.states, self.labels = states.new_zeros(1), labels.new_zeros(1)
        self.inputs = slicing.cut(inputs)

    def joined(self, result: Tensor) -> Tensor:
        return result if self.slicing is None else self.slicing.joined(result, self.chosen, self.count)


def without_last(table: Tensor) -> Tensor:
    """The rows of a table without their last tokens, of which nobody asks what comes next; a row keeps at least one token."""
    ends = (table != NOTHING).sum(1, keepdim=True) - 1
    cut = table.scatter(1, ends, NOTHING)
    cut[:, 0] = table[:, 0]
    return cut[:, : max(1, table.shape[1] - 1)]


def _response_states(batch: Batch, table: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flat positions of the states before each response token, the tokens, and the cells of [B, T] they fill."""
    prompts = batch.prompt_lengths.cpu()[:, None]
    empty = (prompts < 1).flatten().nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"Row {empty[0]} has an empty prompt: its first token has no state before it. Begin it with a BOS token."
        )
    lengths = (table != NOTHING).sum(1, keepdim=True)
    responses, width = lengths - prompts, batch.mask.shape[1]
    assert int(responses.min()) >= 0 and int(responses.max()) <= width, (responses.flatten().tolist(), width)
    at = torch.arange(table.shape[1])
    before = (at >= prompts - 1) & (at < lengths - 1)
    cells = (torch.arange(width) < responses).flatten().nonzero().flatten()
    return places[before[:, : places.shape[1]]], table[(at >= prompts) & (at < lengths)], cells


def _run(model: Any, inputs: Inputs, answer: Answer, attention: str | None, more: dict[str, Any]) -> tuple[Tensor, Any]:
    """A forward pass whose head is `answer`; what the head said, [n, answers], and the model's output."""
    if inputs.packing is not None:
        obstacle = packing_obstacle(model)
        if obstacle:
            raise ValueError(f"{type(model).__name__} cannot run packed: {obstacle}. Set use_remove_padding=False.")
        set_attention(model, PACKED)
        more = {**more, "packing": inputs.packing}
    else:
        set_attention(model, attention or padded_attention(model))
    with _forward_replaced(answer.head, answer):
        # Without use_cache=False, or with a mask of ones, some models let packed sequences see each other.
        output = model(input_ids=inputs.ids, position_ids=inputs.positions, attention_mask=inputs.mask, use_cache=False, **more)
    return output.logits[0] if answer.after is None else answer.after(), output


@contextlib.contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module` answers with `forward` inside the block."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


class Answer:
    """Stands in for the output head. Given hidden states [b, L, H] it returns [1, n, answers] for the states that count."""

    head: Any
    names: Sequence[str]
    after: Callable[[], Tensor] | None = None
    """Gives the answers [n, answers] once the pass is over, when they are not the output of the head itself."""

    def __call__(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class _ScalarAnswer(Answer):
    names = ("values",)

    def __init__(self, model: Any, states: Tensor):
        self.head = scalar_head(model)
        self.states = states

    def __call__(self, hidden: Tensor) -> Tensor:
        # A value is regressed on; eight bits of mantissa would be its noise floor.
        picked = hidden.flatten(0, 1).index_select(0, self.states).float()
        bias = None if self.head.bias is None else self.head.bias.float()
        return _output(F.linear(picked, self.head.weight.float(), bias))


class _LanguageAnswer(Answer):
    def __init__(self, model: Any, states: Tensor, labels: Tensor, names: Sequence[str], temperature: float, chunk: int | None):
        self.head = model.get_output_embeddings()
        if self.head is None:
            raise ValueError(f"{type(model).__name__} has no language-model head; log-probs need a causal language model.")
        self.names, self.states, self.labels = names, states, labels
        self.temperature = temperature
        self.chunk = chunk or max(1, _LOGITS.get(states.device.type, 2**26) // len(self.head.weight))
        if not head_is_plain(model):
            self.model, self.after = model, self._from_own_logits
            self.picked = states.new_empty(0)

    def __call__(self, hidden: Tensor) -> Tensor:
        picked = hidden.flatten(0, 1).index_select(0, self.states)
        if self.after is not None:
            self.picked = picked
            return picked[None]
        weight, bias = self.head.weight, getattr(self.head, "bias", None)
        log_probs, entropy = token_logprobs_from_hidden(
            picked,
            weight,
            self.labels,
            bias=bias,
            temperature=self.temperature,
            chunk=self.chunk,
            want_entropy=self._wants_entropy,
        )
        squares = None
        if "sum_pi_squared" in self.names:
            with torch.no_grad():
                parts = [
                    sum_pi_squared(head_logits(p, weight, bias), temperature=self.temperature) for p in picked.split(self.chunk)
                ]
            squares = torch.cat(parts)
        return _output(self._columns(log_probs, entropy, squares))

    def _from_own_logits(self) -> Tensor:
        """For heads that cap, scale or otherwise change logits: the model's own logits, computed again in the backward pass."""

        def statistics(hidden: Tensor, labels: Tensor) -> Tensor:
            return self._statistics(own_logits(self.model, hidden), labels)

        pieces = zip(self.picked.split(self.chunk), self.labels.split(self.chunk), strict=True)
        return torch.cat([checkpoint(statistics, hidden, labels, use_reentrant=False) for hidden, labels in pieces])

    def _statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        log_probs, entropy = token_statistics(logits, labels, temperature=self.temperature, want_entropy=self._wants_entropy)
        squares = sum_pi_squared(logits, temperature=self.temperature) if "sum_pi_squared" in self.names else None
        return self._columns(log_probs, entropy, squares)

    @property
    def _wants_entropy(self) -> bool:
        return "entropy" in self.names or "observed_entropy" in self.names

    def _columns(self, log_probs: Tensor, entropy: Tensor | None, squares: Tensor | None) -> Tensor:
        observed = None if entropy is None else entropy.detach()
        found = {"log_probs": log_probs, "entropy": entropy, "observed_entropy": observed, "sum_pi_squared": squares}
        return torch.stack([cast(Tensor, found[name]) for name in self.names], dim=-1)


def _output(answers: Tensor) -> Tensor:
    """[n, answers] as the output of a head. Not a view: sharded modules hang their backward hooks on what a module returns."""
    return answers[None].clone()


class _DecoderOutput:
    """Last hidden states in the place of a decoder's output, whichever way a model reads it."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


def own_logits(model: Any, hidden: Tensor) -> Tensor:
    """The logits [n, V] that the model itself makes of last hidden states [n, H], with every cap and scale it applies."""
    with _forward_replaced(model.get_decoder(), lambda *_, **__: _DecoderOutput(hidden[None])):
        token = torch.zeros(1, 1, dtype=torch.long, device=hidden.device)
        return model(input_ids=token, use_cache=False).logits[0]


_plain: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@torch.no_grad()
def head_is_plain(model: Any) -> bool:
    """Whether logits are just hidden @ weight.T + bias. Found out by asking for logits in the hundreds, where a cap shows."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    if head not in _plain:
        noise = torch.randn(4, head.in_features, generator=torch.Generator().manual_seed(0)).to(head.weight)
        spread = F.linear(noise, head.weight).float().std()
        loud = noise * (100.0 / spread.clamp(min=1e-12)).to(noise)
        expected = F.linear(loud, head.weight, head.bias).float()
        found = own_logits(model, loud).float()
        same = found.shape == expected.shape and bool((found - expected).abs().max() <= 0.01 * expected.abs().max())
        _plain[head] = same and bool(spread > 0)
    return _plain[head]
