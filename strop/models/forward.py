"""What a model says about the responses of a micro-batch: log-probs, entropies, values, scores.

Packed (the default) or padded, the numbers are the same. The model runs as a whole, through its own forward, but its output
head is asked for the few numbers that are wanted instead of for logits: only the states in front of response tokens reach it, a
chunk at a time, so nothing of the size [tokens, vocabulary] ever exists. Since the head answers inside the model's own forward,
wrappers around the model (adapters, sharding) see an ordinary call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from strop.algorithms.logprobs import head_logits, sum_pi_squared, token_logprobs_from_hidden, token_statistics
from strop.models.attention import PACKED, Packing, packing, packing_obstacle, padded_attention, set_attention
from strop.models.heads import scalar_head
from strop.types import Batch

LANGUAGE = ("log_probs", "entropy", "sum_pi_squared")
"""Outputs of a language model."""
SCALAR = ("values", "scores")
"""Outputs of a value or reward model."""
_LOGITS = 2**26
"""Logits that exist at a time."""


@dataclass(frozen=True)
class Inputs:
    """Sequences as a model takes them."""

    ids: Tensor
    positions: Tensor
    mask: Tensor | None
    """None when packed."""
    packing: Packing | None
    places: list[Tensor]
    """Where the tokens of each sequence stand in the flattened ids."""


def lay_out(
    sequences: Sequence[Tensor],
    *,
    packed: bool,
    device: torch.device | str = "cpu",
    prompt_lengths: Sequence[int] | None = None,
) -> Inputs:
    """One row of all tokens with positions that restart, or one row per sequence padded on the right.

    With `prompt_lengths`, a packed row holds equal prompts once: the samples of a prompt differ only after it, and most of the
    work on short answers is the prompt's.
    """
    lengths = [len(sequence) for sequence in sequences]
    if packed:
        pieces, positions, places = _share(sequences, prompt_lengths or [0] * len(lengths))
        layout = packing(lengths, device, places)
        return Inputs(torch.cat(pieces)[None].to(device), torch.cat(positions)[None].to(device), None, layout, places)
    ids = pad_sequence(list(sequences), batch_first=True)
    columns = torch.arange(ids.shape[1]).expand_as(ids)
    mask = (columns < torch.tensor(lengths)[:, None]).long()
    places = [torch.arange(length) + row * ids.shape[1] for row, length in enumerate(lengths)]
    return Inputs(ids.to(device), columns.to(device), mask.to(device), None, places)


def _share(sequences: Sequence[Tensor], prompt_lengths: Sequence[int]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Pieces of a packed row, their positions, and where each sequence finds its tokens in it; each prompt stands once."""
    pieces, positions, places = [], [], []
    known: dict[tuple[int, ...], Tensor] = {}
    end = 0
    for sequence, prompt in zip(sequences, prompt_lengths, strict=True):
        name = tuple(sequence[:prompt].tolist())
        begin = known.get(name) if prompt else None
        new = sequence if begin is None else sequence[prompt:]
        place = torch.arange(end, end + len(new))
        pieces.append(new)
        positions.append(torch.arange(len(sequence) - len(new), len(sequence)))
        places.append(place if begin is None else torch.cat([begin, place]))
        if begin is None and prompt:
            known[name] = place[:prompt]
        end += len(new)
    return pieces, positions, places


def response_outputs(
    model: Any,
    batch: Batch,
    want: Sequence[str],
    *,
    temperature: float = 1.0,
    packed: bool = True,
    attention: str | None = None,
    chunk: int | None = None,
) -> dict[str, Tensor]:
    """The outputs named in `want`, [B, T] in float32 on the model's device, with gradients where the model has them.

    Column t speaks of the t-th response token, from the state before it; columns after a response are 0. `want` may name
    log_probs, entropy, sum_pi_squared (no gradient) of a language model, at `temperature`; values of a value model; scores of a
    reward model, [B] and alone; auxiliary, the scalar load-balancing loss of a mixture of experts. `attention` names the
    function of the padded layout; None: sdpa, or eager where sdpa would leave something out. `chunk` is how many rows of logits
    exist at a time (None: 256 MiB of them).
    """
    strange = sorted(set(want) - {*LANGUAGE, *SCALAR, "auxiliary"})
    if strange or not set(want) - {"auxiliary"}:
        raise ValueError(f"A model cannot answer {strange or list(want)}; it can answer {[*LANGUAGE, *SCALAR, 'auxiliary']}.")
    if "scores" in want:
        assert list(want) == ["scores"], want
        own = batch.prompt_lengths.tolist()
        return {"scores": sequence_scores(model, batch.sequences, packed=packed, attention=attention, prompt_lengths=own)}
    device = next(model.parameters()).device
    # The load-balancing loss counts tokens, so there every sequence brings its own prompt.
    prompts = None if "auxiliary" in want else batch.prompt_lengths.tolist()
    inputs = lay_out(batch.sequences, packed=packed, device=device, prompt_lengths=prompts)
    states, targets, cells = (part.to(device) for part in _response_states(batch, inputs.places))
    more: dict[str, Any] = {"output_router_logits": True} if "auxiliary" in want else {}
    if "values" in want:
        answer: Answer = _ScalarAnswer(model, states)
    else:
        labels = inputs.ids.flatten()[targets]
        answer = _LanguageAnswer(model, states, labels, [name for name in want if name in LANGUAGE], temperature, chunk)
    result, output = _run(model, inputs, answer, attention, more)
    found = {}
    for name, column in zip(answer.names, result.unbind(-1), strict=True):
        table = torch.zeros(batch.mask.numel(), dtype=torch.float32, device=device)
        column = column.detach() if name == "sum_pi_squared" else column
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
    prompt_lengths: Sequence[int] | None = None,
) -> Tensor:
    """A reward model's score of each sequence [B], read at its last token; equal prompts are computed once (`lay_out`)."""
    device = next(model.parameters()).device
    inputs = lay_out(sequences, packed=packed, device=device, prompt_lengths=prompt_lengths)
    last = torch.stack([place[-1] for place in inputs.places])
    result, _ = _run(model, inputs, _ScalarAnswer(model, last.to(device)), attention, {})
    return result.squeeze(-1)


def _response_states(batch: Batch, places: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Flat positions of the states before each response token, of the tokens, and the cells of [B, T] they fill."""
    states, targets, cells = [], [], []
    width = batch.mask.shape[1]
    for row, (place, prompt) in enumerate(zip(places, batch.prompt_lengths.tolist(), strict=True)):
        response = len(place) - prompt
        if prompt < 1:
            raise ValueError(
                f"Row {row} has an empty prompt: its first token has no state before it. Begin it with a BOS token."
            )
        assert 0 <= response <= width, (response, width)
        states.append(place[prompt - 1 : len(place) - 1])
        targets.append(place[prompt:])
        cells.append(torch.arange(response) + row * width)
    return torch.cat(states), torch.cat(targets), torch.cat(cells)


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
        picked = hidden.flatten(0, 1)[self.states].float()
        bias = None if self.head.bias is None else self.head.bias.float()
        return F.linear(picked, self.head.weight.float(), bias)[None]


class _LanguageAnswer(Answer):
    def __init__(self, model: Any, states: Tensor, labels: Tensor, names: Sequence[str], temperature: float, chunk: int | None):
        self.head = model.get_output_embeddings()
        if self.head is None:
            raise ValueError(f"{type(model).__name__} has no language-model head; log-probs need a causal language model.")
        self.names, self.states, self.labels = names, states, labels
        self.temperature = temperature
        self.chunk = chunk or max(1, _LOGITS // len(self.head.weight))
        if not head_is_plain(model):
            self.model, self.after = model, self._from_own_logits
            self.picked = states.new_empty(0)

    def __call__(self, hidden: Tensor) -> Tensor:
        picked = hidden.flatten(0, 1)[self.states]
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
            want_entropy="entropy" in self.names,
        )
        squares = None
        if "sum_pi_squared" in self.names:
            with torch.no_grad():
                parts = [
                    sum_pi_squared(head_logits(p, weight, bias), temperature=self.temperature) for p in picked.split(self.chunk)
                ]
            squares = torch.cat(parts)
        return self._columns(log_probs, entropy, squares)[None]

    def _from_own_logits(self) -> Tensor:
        """For heads that cap, scale or otherwise change logits: the model's own logits, computed again in the backward pass."""

        def statistics(hidden: Tensor, labels: Tensor) -> Tensor:
            return self._statistics(own_logits(self.model, hidden), labels)

        pieces = zip(self.picked.split(self.chunk), self.labels.split(self.chunk), strict=True)
        return torch.cat([checkpoint(statistics, hidden, labels, use_reentrant=False) for hidden, labels in pieces])

    def _statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        log_probs, entropy = token_statistics(
            logits, labels, temperature=self.temperature, want_entropy="entropy" in self.names
        )
        squares = sum_pi_squared(logits, temperature=self.temperature) if "sum_pi_squared" in self.names else None
        return self._columns(log_probs, entropy, squares)

    def _columns(self, log_probs: Tensor, entropy: Tensor | None, squares: Tensor | None) -> Tensor:
        found = {"log_probs": log_probs, "entropy": entropy, "sum_pi_squared": squares}
        return torch.stack([cast(Tensor, found[name]) for name in self.names], dim=-1)


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
