"""Layout of the sequences of a micro-batch: one packed row of all tokens, or one padded row per sequence.

The output of a causal model for a token depends on the tokens before it alone. So a packed row holds a common
prefix (samples of a prompt, a system prompt) once, and every sequence finds its tokens by their places in the
row. For attention on a CPU, sequences of similar length are padded to groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.models.sequence_parallel import Slicing
from strop.types import Batch, Images

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NOTHING = -1
"""Fills a table of token ids behind the end of a sequence."""

# A sequence shorter than this share of the longest one of its group starts a new group: padding costs at most
# as much as an extra call.
_SIMILAR = 0.7
_SHORT = 64


# --- inputs of a model --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """Sequences as a model takes them."""

    ids: Tensor
    positions: Tensor
    mask: Tensor | None
    """None when packed."""
    packing: Packing | None
    places: Tensor
    """[B, longest] places of the tokens of each sequence in the flattened ids; NOTHING behind its end."""
    images: Images = ()
    """The images of all sequences, each once: see models/vision/passes.py."""

    def sliced(self, slicing: Slicing) -> Inputs:
        """The slice of a packed row that this rank computes."""
        assert self.packing is not None, "only a packed row is sliced"
        own = dataclasses.replace(slicing, length=self.ids.shape[1])
        return dataclasses.replace(
            self,
            ids=own.slice(self.ids),
            positions=own.slice(self.positions),
            packing=dataclasses.replace(self.packing, slicing=own),
        )


def lay_out(table: Tensor, *, packed: bool, share: bool = True, device: torch.device | str = "cpu") -> Inputs:
    """The inputs for sequences in the rows of `table` (see `rectangle`). With `share` a packed row holds
    every common prefix once."""
    real = table != NOTHING
    columns = torch.arange(table.shape[1]).expand_as(table)
    if not packed:
        places = torch.where(real, torch.arange(table.numel()).view_as(table), NOTHING)
        return Inputs(table.clamp(min=0).to(device), columns.to(device), real.long().to(device), None, places)
    order = torch.arange(len(table))
    new = real
    if share:
        order = _alphabetical(table)
        table = table[order]
        real = real[order]
        new = real & _differs_from_above(table)
    # A token that is not new has the place of the nearest row above with a new one; places grow downwards.
    sorted_places = torch.where(new, new.flatten().cumsum(0).view_as(table) - 1, NOTHING).cummax(0).values
    sorted_places = sorted_places.where(real, NOTHING)
    # A sequence without a new token is a prefix of another and need not attend by itself.
    layout = packing(sorted_places[new.any(1)], device)
    places = torch.empty_like(sorted_places).index_copy_(0, order, sorted_places)
    return Inputs(table[new][None].to(device), columns[new][None].to(device), None, layout, places)


def rectangle(sequences: Sequence[Tensor]) -> Tensor:
    """Token ids as [B, longest], with NOTHING behind the end of each sequence."""
    lengths = torch.tensor([sequence.shape[0] for sequence in sequences])
    table = torch.full((len(lengths), int(lengths.max())), NOTHING)
    table[torch.arange(table.shape[1]) < lengths[:, None]] = torch.cat(list(sequences))
    return table


def without_last(table: Tensor) -> Tensor:
    """The rows of a table without their last tokens, whose next token is not wanted; a row keeps at least one
    token."""
    ends = (table != NOTHING).sum(1, keepdim=True) - 1
    cut = table.scatter(1, ends, NOTHING)
    cut[:, 0] = table[:, 0]
    return cut[:, : max(1, table.shape[1] - 1)]


def longrope_limit(config: PreTrainedConfig) -> int | None:
    """The longest sequence that has the angles of short ones; None without longrope."""
    rotary = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if rotary.get("rope_type") != "longrope":
        return None
    return int(rotary["original_max_position_embeddings"])


def refuse_mixed_lengths(config: PreTrainedConfig, table: Tensor) -> None:
    """With longrope, one sequence over the original length changes the angles of all tokens of a pass: the
    log-probs of a short sequence would depend on its micro-batch."""
    limit = longrope_limit(config)
    if limit is None:
        return
    lengths = (table != NOTHING).sum(1)
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest <= limit < longest:
        raise ValueError(
            f"A micro-batch has sequences of {shortest} and of {longest} tokens. With the longrope of this "
            f"model, sequences over {limit} tokens (original_max_position_embeddings) have other angles, and "
            "a pass has one kind. Set the micro-batch size to 1 (without use_dynamic_bsz), or limit "
            f"sequences to {limit} tokens (data.max_length)."
        )


def response_states(batch: Batch, table: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flat places of the states before each response token, the tokens, and their cells of [B, T]."""
    prompts = batch.prompt_lengths.cpu()[:, None]
    empty = (prompts < 1).flatten().nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"Row {empty[0]} has an empty prompt: its first token has no state before it. Begin it with a "
            "BOS token."
        )
    lengths = (table != NOTHING).sum(1, keepdim=True)
    responses = lengths - prompts
    width = batch.mask.shape[1]
    assert int(responses.min()) >= 0 and int(responses.max()) <= width, (responses.flatten().tolist(), width)
    at = torch.arange(table.shape[1])
    before = (at >= prompts - 1) & (at < lengths - 1)
    cells = (torch.arange(width) < responses).flatten().nonzero().flatten()
    return places[before[:, : places.shape[1]]], table[(at >= prompts) & (at < lengths)], cells


class RankShare:
    """What of a pass this rank computes: all of it, or what is in its slice of the row."""

    def __init__(self, states: Tensor, labels: Tensor, inputs: Inputs, slicing: Slicing | None):
        self.states = states
        self.labels = labels
        self.inputs = inputs
        self.slicing = slicing
        if slicing is None:
            return
        self.count = len(states)
        self.chosen, self.states = slicing.own(states, inputs.ids.shape[1])
        self.labels = labels[self.chosen]
        if not len(self.chosen):  # one output that is not used: see Slicing.joined
            self.states = states.new_zeros(1)
            self.labels = labels.new_zeros(1)
        self.inputs = inputs.sliced(slicing)

    def rows_of(self, table: Tensor) -> Tensor:
        """The rows [n, k] of a table that belong to `states`."""
        if self.slicing is None:
            return table
        return table[self.chosen] if len(self.chosen) else table.new_zeros(1, table.shape[1])

    def join(self, result: Tensor) -> Tensor:
        """The results of all ranks."""
        if self.slicing is None:
            return result
        return self.slicing.joined(result, self.chosen, self.count)


def _alphabetical(table: Tensor) -> Tensor:
    """An order of the rows in which those with a common prefix are neighbours, and a row that is a prefix of
    another comes after it."""
    names = [row.tobytes() for row in table.numpy()]
    return torch.tensor(sorted(range(len(names)), key=names.__getitem__))


def _differs_from_above(table: Tensor) -> Tensor:
    """[B, longest] whether a row differs from the row above at this column or before it."""
    different = torch.ones_like(table, dtype=torch.bool)
    different[1:] = table[1:] != table[:-1]
    return different.cummax(1).values


# --- the packed row for attention ---------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionGroup:
    """Sequences of similar length, attended in one call."""

    rows: int
    width: int


@dataclass(frozen=True)
class Padded:
    """A packed row as padded rows, and back. Both ways are index_select, and so are their gradients: the
    gradient of plain indexing is summed number by number on a CPU."""

    take: Tensor
    """[all padded rows] positions in the packed row; padding repeats some token."""
    place: Tensor
    """[N] place of each token of the packed row in the padded rows, the first one if it is shared."""
    repeats: tuple[Tensor, Tensor] | None
    """Further places of shared tokens, and their positions in the packed row."""
    blank: Tensor
    """[all padded rows, 1, 1] whether the place is no `place` of a token."""

    def spread(self, row: Tensor) -> Tensor:
        """[N, ...] to padded rows. Padding gets no gradient."""
        result: Tensor = _Spread.apply(row, self)
        return result

    def gather(self, rows: Tensor) -> Tensor:
        """Padded rows to [N, ...]."""
        result: Tensor = _GatherRows.apply(rows, self)
        return result


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row: Tensor, padded: Padded) -> Tensor:
        ctx.padded = padded
        return row.index_select(0, padded.take)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None]:
        gradient = above.index_select(0, ctx.padded.place)
        if ctx.padded.repeats is not None:
            places, tokens = ctx.padded.repeats
            gradient.index_add_(0, tokens, above.index_select(0, places))
        return gradient, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, padded: Padded) -> Tensor:
        ctx.padded = padded
        return rows.index_select(0, padded.place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None]:
        return above.index_select(0, ctx.padded.take).masked_fill_(ctx.padded.blank, 0), None


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a packed row begin and end."""

    groups: tuple[AttentionGroup, ...]
    bounds: Tensor
    """[B + 1] int32, cumulative lengths."""
    longest: int
    spread: Tensor | None = None
    """Positions in the packed row of all tokens of all sequences in turn, where some share a prefix;
    otherwise None."""
    slicing: Slicing | None = None
    """Set where several ranks share the row, and each has a slice of it."""
    first: Tensor | None = None
    """[N] first place of each token of the packed row in `spread`."""
    padded: Padded | None = None
    """All groups one after the other. None: they are the packed row."""
    reach: Tensor | None = None
    """[N] the last position in its sequence that each token sees, where some see later tokens (those of their
    image). None: itself."""


def packing(places: Tensor, device: torch.device | str = "cpu") -> Packing:
    """The layout of a packed row, from the places of the tokens of each sequence in it: [B, longest], NOTHING
    behind the end of each.

    Sequences may share the tokens of a common prefix: each attends to them as its own, and the matrix
    products compute them once.
    """
    inside = places >= 0
    lengths = inside.sum(1).tolist()
    if not lengths or min(lengths) < 1:
        raise ValueError(f"Every packed sequence needs at least one token; the lengths are {lengths}.")
    spread = places[inside]
    shared = int(spread.max()) + 1 < len(spread)
    groups = []
    takes = []
    reals = []
    for members in _similar(lengths):
        width = max(lengths[i] for i in members)
        table = places[members, :width]
        within = inside[members, :width]
        groups.append(AttentionGroup(len(members), width))
        takes.append(torch.where(within, table, table[:, :1]).flatten())
        reals.append(within.flatten())
    take = torch.cat(takes)
    real = torch.cat(reals)
    in_order = bool(real.all()) and not shared and bool((take == torch.arange(len(take))).all())
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    layout = Packing(tuple(groups), bounds, max(lengths))
    if shared:
        first = _first_places(spread).to(device)
        layout = dataclasses.replace(layout, spread=spread.to(device), first=first)
    if not in_order:
        padded = _padded(take, real.nonzero().squeeze(1), device)
        layout = dataclasses.replace(layout, padded=padded)
    return layout


def _padded(take: Tensor, real: Tensor, device: torch.device | str) -> Padded:
    """`take`: the token of each place in the padded rows; `real`: the places that are no padding."""
    first = _first_places(take[real])
    blank = torch.ones(len(take), 1, 1, dtype=torch.bool)
    blank[real[first]] = False
    again = torch.ones(len(real), dtype=torch.bool)
    again[first] = False
    others = real[again]
    repeats = None
    if len(others):
        repeats = (others.to(device), take[others].to(device))
    return Padded(take.to(device), real[first].to(device), repeats, blank.to(device))


def _first_places(targets: Tensor) -> Tensor:
    """For each number from 0 to the largest: its first place in `targets`."""
    first = torch.full((int(targets.max()) + 1,), len(targets))
    return first.scatter_reduce(0, targets, torch.arange(len(targets)), "amin")


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences grouped so that little of a group is padding, longest first; inside a group in the order of
    the row."""
    groups: list[list[int]] = []
    widest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not groups or (widest > _SHORT and lengths[i] < _SIMILAR * widest):
            groups.append([])
            widest = lengths[i]
        groups[-1].append(i)
    return [sorted(group) for group in groups]
