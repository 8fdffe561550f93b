"""States of mixers by row: what linear attention, state spaces and short convolutions have instead of keys
and values.

A state is that of the last token of a row. It cannot be cut back to an earlier token, so a sequence can begin
with the states of another one only where it begins with all of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from strop.models.layouts.delta_rule import DeltaRule, PackedSequences
from strop.models.layouts.mixers import MixerForward

StateKey = tuple[str, int]
"""Convolution or recurrent, and its number in transformers' cache."""
_CONVOLUTION = "convolution"
_RECURRENT = "recurrent"
_DELTA_STATES = [(_CONVOLUTION, 0), (_RECURRENT, 0)]


class RowStates:
    """The states of all rows: [rows, ...] for each state of each mixer."""

    def __init__(self, *, kernels: bool = True) -> None:
        """`kernels`: may decode steps of the gated delta rule run as kernels?"""
        self._use_kernels = kernels
        self._examples: dict[int, dict[StateKey, Tensor]] = {}
        """By mixer, its states of one row, empty."""
        self._rules: dict[int, DeltaRule] = {}
        """Mixers of the gated delta rule."""
        self._states: dict[int, dict[StateKey, Tensor]] = {}
        self._rows = 0

    def __bool__(self) -> bool:
        return bool(self._examples)

    @property
    def bytes_per_row(self) -> int:
        sizes = 0
        for examples in self._examples.values():
            sizes += sum(example.numel() * example.element_size() for example in examples.values())
        return sizes

    @property
    def has_kernels(self) -> bool:
        """Whether decode steps of some mixers run as kernels."""
        return any(rule.has_step for rule in self._rules.values())

    def rows_within(self, size: int, rows: int) -> int:
        """So many of these rows have states of together at most so many bytes; at least one."""
        if not self:
            return rows
        return max(1, min(rows, size // self.bytes_per_row))

    # --- passes ---------------------------------------------------------------------------------------------

    def probe(self, mixer: MixerForward, hidden: Tensor) -> Tensor:
        """Run a mixer over one row to see its states."""
        layer = _CacheLayer(mixer.num_states)
        out = mixer.run(hidden, layer.cache(mixer.layer))
        self._examples[mixer.number] = {
            key: torch.zeros_like(state[:1]) for key, state in layer.states.items()
        }
        rule = DeltaRule.of(mixer.mixer)
        if rule is not None and sorted(layer.states) == _DELTA_STATES:
            self._rules[mixer.number] = rule
            examples = self._examples[mixer.number]
            begin = (examples[_DELTA_STATES[0]], examples[_DELTA_STATES[1]])

            def plain(next_hidden: Tensor, conv: Tensor, recurrent: Tensor) -> Tensor:
                states = dict(zip(_DELTA_STATES, (conv, recurrent), strict=True))
                return _plain_step(mixer, next_hidden, states)

            if self._use_kernels:
                rule.check_kernels(plain, hidden, begin)
        return out

    def start(self, mixer: MixerForward, hidden: Tensor, sequences: PackedSequences) -> Tensor:
        """Run a mixer over a packed row [1, N, H] of sequences from their first tokens."""
        states = self._states[mixer.number]
        if mixer.number in self._rules:
            out, *after = self._rules[mixer.number].start(hidden, sequences)
            for key, state in zip(_DELTA_STATES, after, strict=True):
                states[key][sequences.rows] = state.to(states[key].dtype)
            return out
        out = torch.empty_like(hidden)
        for take, rows in sequences.by_length:
            layer = _CacheLayer(mixer.num_states)
            out[0, take] = mixer.run(hidden[0, take], layer.cache(mixer.layer)).to(out.dtype)
            for key, state in layer.states.items():
                states[key][rows] = state.to(states[key].dtype)
        return out

    def step(self, mixer: MixerForward, hidden: Tensor) -> Tensor:
        """Run a mixer over the next tokens [B, 1, H] of the first B rows."""
        own = {key: state[: len(hidden)] for key, state in self._states[mixer.number].items()}
        rule = self._rules.get(mixer.number)
        if rule is not None and rule.has_step:
            return rule.step(hidden, *(own[key] for key in _DELTA_STATES))
        return _plain_step(mixer, hidden, own)

    # --- rows -----------------------------------------------------------------------------------------------

    def resize(self, rows: int, keep: int) -> None:
        """Have so many rows; the first `keep` keep their states."""
        for number, examples in self._examples.items():
            old = self._states.get(number, {})
            new = {}
            for key, example in examples.items():
                new[key] = example.expand(rows, *example.shape[1:]).clone()
                if key in old:
                    new[key][:keep] = old.pop(key)[:keep]
            self._states[number] = new
        self._rows = rows

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Rows `targets` get the states of rows `sources`, all at once."""
        for states in self._states.values():
            for state in states.values():
                state[targets] = state[sources]

    def clear(self, rows: Sequence[int]) -> None:
        """Set the states of these rows to 0."""
        for states in self._states.values():
            for state in states.values():
                state[list(rows)] = 0

    def free(self) -> None:
        self._states = {}
        self._rows = 0


def _plain_step(mixer: MixerForward, hidden: Tensor, own: dict[StateKey, Tensor]) -> Tensor:
    """The mixer's own forward over the next tokens of rows with these states, which are updated."""
    layer = _CacheLayer(mixer.num_states)
    layer.continue_from(own)
    out = mixer.run(hidden, layer.cache(mixer.layer))
    for key, state in layer.states.items():
        if state is not own[key]:  # else it was updated in place
            own[key].copy_(state)
    return out


class _CacheLayer(LinearAttentionLayer):
    """A layer of transformers' cache that leaves its memory to others."""

    def lazy_initialization(
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        if conv_states is not None:
            size = conv_kernel_size or conv_states.shape[-1]
            self.conv_kernel_size[state_idx] = size
            self.conv_states[state_idx] = conv_states.new_zeros(*conv_states.shape[:-1], size)
            self.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            self.recurrent_states[state_idx] = torch.zeros_like(recurrent_states)
            self.is_recurrent_states_initialized[state_idx] = True

    def cache(self, layer: int) -> Cache:
        """Transformers' cache with this as its layer of this number."""
        return Cache(layers=[self] * (layer + 1))

    @property
    def states(self) -> dict[StateKey, Tensor]:
        found = {}
        for name, states in ((_CONVOLUTION, self.conv_states), (_RECURRENT, self.recurrent_states)):
            for number, state in states.items():
                if state is not None:
                    found[name, number] = state
        return found

    def continue_from(self, states: dict[StateKey, Tensor]) -> None:
        """The next tokens continue these states, which are updated in place where the mixer does so."""
        for (name, number), state in states.items():
            if name == _CONVOLUTION:
                self.conv_states[number] = state
                self.conv_kernel_size[number] = state.shape[-1]
                self.is_conv_states_initialized[number] = True
            else:
                self.recurrent_states[number] = state
                self.is_recurrent_states_initialized[number] = True
            self.has_previous_state[number] = True
