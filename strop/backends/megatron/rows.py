"""A micro-batch as one packed row, and the outputs of the model for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from strop.algorithms.logprobs import head_logits, token_logprobs_from_hidden
from strop.algorithms.logprobs_of_logits import sum_pi_squared
from strop.backends.megatron.stage import StageChunk
from strop.backends.megatron.topology import Topology
from strop.backends.megatron.vocabulary import VocabularyShare, vocabulary_statistics
from strop.models.forward import LANGUAGE, SCALAR
from strop.models.layouts.routing import spread_experts
from strop.models.packing import (
    NOTHING,
    Inputs,
    RankShare,
    lay_out,
    rectangle,
    response_states,
    without_last,
)
from strop.models.sequence_parallel import Slicing
from strop.types import Batch

_LOGITS = {"cpu": 2**26, "cuda": 2**28}
"""Logits of this rank that exist at a time."""


@dataclass(frozen=True)
class MicroRow:
    """The packed row of a micro-batch, and which of its states are read."""

    piece: Batch
    want: tuple[str, ...]
    share: RankShare
    """Inputs of this rank, and the states that it reads."""
    cells: Tensor
    tokens: int
    """Of all context-parallel ranks."""
    experts: Tensor | None
    """[n, layers, k] of its places, in an update that replays them."""
    number: int | None
    """Of the micro-batch. None: the row is idle, computed because other ranks wait for it; its outputs are
    not used."""

    @property
    def inputs(self) -> Inputs:
        return self.share.inputs


class MicroRows:
    """The rows of a pass. Each is laid out when a schedule first asks for it, while the device computes the
    rows before."""

    def __init__(self, makers: Sequence[Callable[[], MicroRow]]) -> None:
        self._makers = makers
        self._made: dict[int, MicroRow] = {}

    def __len__(self) -> int:
        return len(self._makers)

    def __iter__(self) -> Iterator[MicroRow]:
        for place, make in enumerate(self._makers):
            if place not in self._made:
                self._made[place] = make()
            yield self._made[place]

    @property
    def largest(self) -> int:
        """Tokens of the largest row that was laid out so far."""
        return max((row.tokens for row in self._made.values()), default=0)


def lay_out_row(
    piece: Batch, want: Sequence[str], device: torch.device, topology: Topology, number: int | None
) -> MicroRow:
    """The row for the outputs named in `want`; see response_outputs of models/forward.py."""
    table = rectangle(piece.sequences)
    slicing = None
    if topology.sizes.context > 1:
        slicing = Slicing(topology.context_group, topology.context_rank, topology.sizes.context)
    if "scores" in want:
        inputs = lay_out(table, packed=True, device=device)
        ends = (inputs.places != NOTHING).sum(1, keepdim=True) - 1
        last = inputs.places.gather(1, ends).squeeze(1).to(device)
        share = RankShare(last, last, inputs, slicing)
        return MicroRow(piece, tuple(want), share, last, inputs.ids.shape[1], None, number)
    # Experts of a common prefix may differ from row to row.
    inputs = lay_out(without_last(table), packed=True, share=piece.experts is None, device=device)
    experts = None
    if piece.experts is not None:
        experts = spread_experts(piece.experts, inputs).to(device)
    states, labels, cells = (part.to(device) for part in response_states(piece, table, inputs.places))
    share = RankShare(states, labels, inputs, slicing)
    return MicroRow(piece, tuple(want), share, cells, inputs.ids.shape[1], experts, number)


def outputs_of(
    chunk: StageChunk, hidden: Tensor, row: MicroRow, topology: Topology, temperature: float
) -> dict[str, Tensor]:
    """The outputs of the last stage for its hidden states [N, 1, H]."""
    picked = hidden[:, 0].index_select(0, row.share.states)
    if row.want[0] in SCALAR:
        columns = {row.want[0]: _scalar(chunk, picked)}
    else:
        columns = _language(chunk, picked, row, topology, temperature)
    joined = row.share.join(torch.stack([column.float() for column in columns.values()], -1))
    found = {}
    shape = row.piece.mask.shape
    for name, column in zip(columns, joined.unbind(-1), strict=True):
        if name in ("observed_entropy", "sum_pi_squared"):
            column = column.detach()
        if name == "scores":
            return {name: column}
        numbers = torch.zeros(row.piece.mask.numel(), dtype=torch.float32, device=hidden.device)
        found[name] = numbers.index_put((row.cells,), column).view(shape)
    return found


def _scalar(chunk: StageChunk, picked: Tensor) -> Tensor:
    head = chunk.gpt.output_layer
    bias = None if head.bias is None else head.bias.float()
    return F.linear(picked.float(), head.weight.float(), bias).squeeze(-1)


def _language(
    chunk: StageChunk, picked: Tensor, row: MicroRow, topology: Topology, temperature: float
) -> dict[str, Tensor]:
    names = [name for name in row.want if name in LANGUAGE]
    weight = chunk.head_weight()
    rows = max(1, _LOGITS.get(picked.device.type, 2**26) // len(weight))
    if topology.sizes.tensor > 1:
        share = vocabulary_share(chunk, topology)
        log_probs, entropy, squares = vocabulary_statistics(
            picked, weight, row.share.labels, share, temperature, rows
        )
    else:
        wants_entropy = "entropy" in names or "observed_entropy" in names
        statistics = token_logprobs_from_hidden(
            picked, weight, row.share.labels, temperature=temperature, chunk=rows, want_entropy=wants_entropy
        )
        log_probs = statistics.log_probs
        entropy = log_probs if statistics.entropy is None else statistics.entropy
        squares = log_probs
        if "sum_pi_squared" in names:
            squares = _squares(picked, weight, temperature, rows)
    found = {
        "log_probs": log_probs,
        "entropy": entropy,
        "observed_entropy": entropy.detach(),
        "sum_pi_squared": squares.detach(),
    }
    return {name: found[name] for name in names}


def vocabulary_share(chunk: StageChunk, topology: Topology) -> VocabularyShare:
    """The tokens whose logits this rank computes."""
    group: dist.ProcessGroup = topology.tensor_group
    size = len(chunk.head_weight())
    first = size * topology.tensor_rank
    return VocabularyShare(group, first, max(0, min(size, chunk.vocabulary - first)))


@torch.no_grad()
def _squares(picked: Tensor, weight: Tensor, temperature: float, rows: int) -> Tensor:
    parts = [
        sum_pi_squared(head_logits(part, weight), temperature=temperature) for part in picked.split(rows)
    ]
    return torch.cat(parts)
