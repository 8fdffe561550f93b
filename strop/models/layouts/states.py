"""States of mixers by row: what linear attention, state spaces and short convolutions have instead of keys
and values.

A state is that of the last token of a row and cannot be cut back to an earlier token. So states are kept in
slots besides the rows where later sequences may continue: before the last token of a prompt, whose logits
each sample needs, and at the end of a turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from strop.models.layouts.delta_rule import DeltaRule
from strop.models.layouts.mixers import MixerForward
from strop.models.layouts.sequences import PackedSequences

StateKey = tuple[str, int]
"""Convolution or recurrent, and its number in transformers' cache."""
_CONVOLUTION = "convolution"
_RECURRENT = "recurrent"
_DELTA_STATES = [(_CONVOLUTION, 0), (_RECURRENT, 0)]
_PROBED_TOKENS = (4, 5)
"""Tokens before and behind a state, to see whether a mixer continues it with several tokens at once."""
_WRONG = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
"""What a mixer may raise that was not written for that."""


class RowStates:
    """The states of all rows: [rows, ...] for each state of each mixer."""

    def __init__(self, *, kernels: bool = True) -> None:
        """`kernels`: may decode steps of the gated delta rule run as kernels?"""
        self._use_kernels = kernels
        self._examples: dict[int, dict[StateKey, Tensor]] = {}
        """By mixer, its states of one row, empty."""
        self._rules: dict[int, DeltaRule] = {}
        """Mixers of the gated delta rule."""
        self._continues: dict[type[object], bool] = {}
        """Whether mixers of a class continue a state with several tokens at once."""
        self._states: dict[int, dict[StateKey, Tensor]] = {}
        self._rows = 0
        self._kept: dict[int, dict[StateKey, Tensor]] = {}
        """The same by slot."""
        self.slots = 0
        """Slots that are allocated."""

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
        kind = type(mixer.mixer)
        if kind not in self._continues:
            self._continues[kind] = _continues_at_once(mixer, hidden)
        rule = DeltaRule.of(mixer.mixer)
        if rule is not None and sorted(layer.states) == _DELTA_STATES:
            self._rules[mixer.number] = rule
            examples = self._examples[mixer.number]
            begin = (examples[_DELTA_STATES[0]], examples[_DELTA_STATES[1]])

            def plain(next_hidden: Tensor, conv: Tensor, recurrent: Tensor) -> Tensor:
                states = dict(zip(_DELTA_STATES, (conv, recurrent), strict=True))
                return _continue(mixer, next_hidden, states, at_once=True)

            if self._use_kernels:
                rule.check_kernels(plain, hidden, begin)
        return out

    def start(self, mixer: MixerForward, hidden: Tensor, sequences: PackedSequences) -> Tensor:
        """Run a mixer over a packed row [1, N, H] of sequences that begin or continue. Keep the states before
        last tokens where a sequence has a slot for them."""
        if sequences.kept is None:
            return self._run(mixer, hidden, sequences)
        parts = sequences.last_tokens
        out = torch.empty_like(hidden)
        if parts.before is not None:
            out[:, parts.before_places] = self._run(mixer, hidden[:, parts.before_places], parts.before)
        states = self._states[mixer.number]
        rows, slots = sequences.kept
        for key, state in states.items():
            state[parts.empty] = 0
            self._kept[mixer.number][key][slots] = state[rows]
        own = {key: state[sequences.rows] for key, state in states.items()}
        out[0, parts.last_places] = self._step(mixer, hidden[0, parts.last_places, None], own)[:, 0]
        for key, state in own.items():
            states[key][sequences.rows] = state
        return out

    def _run(self, mixer: MixerForward, hidden: Tensor, sequences: PackedSequences) -> Tensor:
        states = self._states[mixer.number]
        if mixer.number in self._rules:
            before = None
            if sequences.any_continued:
                fresh = torch.tensor(sequences.continued, device=hidden.device).logical_not()
                conv, recurrent = (states[key][sequences.rows] for key in _DELTA_STATES)
                conv[fresh] = 0
                recurrent[fresh] = 0
                before = (conv, recurrent)
            out, *after = self._rules[mixer.number].start(hidden, sequences, before)
            for key, state in zip(_DELTA_STATES, after, strict=True):
                states[key][sequences.rows] = state.to(states[key].dtype)
            return out
        out = torch.empty_like(hidden)
        for group in sequences.by_length:
            part = hidden[0, group.take]
            if group.continued:
                found = {key: state[group.rows] for key, state in states.items()}
                at_once = self._continues[type(mixer.mixer)]
                out[0, group.take] = _continue(mixer, part, found, at_once=at_once).to(out.dtype)
            else:
                layer = _CacheLayer(mixer.num_states)
                out[0, group.take] = mixer.run(part, layer.cache(mixer.layer)).to(out.dtype)
                found = layer.states
            for key, state in found.items():
                states[key][group.rows] = state.to(states[key].dtype)
        return out

    def step(self, mixer: MixerForward, hidden: Tensor, running: Tensor | None = None) -> Tensor:
        """Run a mixer over the next tokens [B, 1, H] of the first B rows. `running` [B]: rows whose states
        are updated; None: all."""
        own = {key: state[: len(hidden)] for key, state in self._states[mixer.number].items()}
        return self._step(mixer, hidden, own, running)

    def _step(
        self,
        mixer: MixerForward,
        hidden: Tensor,
        own: dict[StateKey, Tensor],
        running: Tensor | None = None,
    ) -> Tensor:
        """The next tokens of rows with these states, which are updated."""
        rule = self._rules.get(mixer.number)
        if rule is not None and rule.has_step:
            conv, recurrent = (own[key] for key in _DELTA_STATES)
            return rule.step(hidden, conv, recurrent, running)
        if running is None:
            return _continue(mixer, hidden, own, at_once=True)
        before = {key: state.clone() for key, state in own.items()}
        out = _continue(mixer, hidden, own, at_once=True)
        for key, state in own.items():
            state.copy_(torch.where(running.view(-1, *[1] * (state.dim() - 1)), state, before[key]))
        return out

    # --- slots ----------------------------------------------------------------------------------------------

    def fit_slots(self, slots: int) -> None:
        """Have so many slots, more than before."""
        for number, examples in self._examples.items():
            old = self._kept.get(number, {})
            new = {}
            for key, example in examples.items():
                new[key] = example.new_empty(slots, *example.shape[1:])
                if key in old:
                    new[key][: self.slots] = old.pop(key)
            self._kept[number] = new
        self.slots = slots

    def save(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Keep the states of these rows in these slots."""
        for number, states in self._states.items():
            _copy(states, rows, self._kept[number], slots)

    def load(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """These rows get the states of these slots."""
        for number, states in self._states.items():
            _copy(self._kept[number], slots, states, rows)

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
        self._kept = {}
        self.slots = 0


def _copy(
    source: dict[StateKey, Tensor],
    sources: Sequence[int],
    target: dict[StateKey, Tensor],
    targets: Sequence[int],
) -> None:
    for key, state in source.items():
        target[key][list(targets)] = state[list(sources)]


@torch.no_grad()
def _continues_at_once(mixer: MixerForward, like: Tensor) -> bool:
    """Whether the mixer continues a state with several tokens as it does token by token. Some begin anew:
    then a part of the output differs as much as without the state."""
    generator = torch.Generator(like.device).manual_seed(0)
    first, more = _PROBED_TOKENS
    drawn = torch.empty(1, first + more, like.shape[-1], dtype=torch.float32, device=like.device)
    hidden = drawn.normal_(generator=generator).to(like.dtype)
    layer = _CacheLayer(mixer.num_states)
    mixer.run(hidden[:, :first], layer.cache(mixer.layer))
    rest = hidden[:, first:]
    slow = {key: state.clone() for key, state in layer.states.items()}
    fast = {key: state.clone() for key, state in layer.states.items()}
    expected = _continue(mixer, rest, slow, at_once=False)
    try:
        found = _continue(mixer, rest, fast, at_once=True)
    except _WRONG:
        return False
    anew = mixer.run(rest, _CacheLayer(mixer.num_states).cache(mixer.layer))
    allowed = 0.1 * (anew - expected).abs().amax()
    right = (found - expected).abs().amax() <= allowed
    for key, state in slow.items():
        right &= (fast[key] - state).abs().amax() <= 0.1 * state.abs().amax()
    return bool(right)


def _continue(mixer: MixerForward, hidden: Tensor, own: dict[StateKey, Tensor], *, at_once: bool) -> Tensor:
    """The mixer's own forward over the next tokens [B, T, H] of rows with these states, which are updated;
    all tokens of a row at once or one after the other."""
    if not at_once:
        steps = [_continue(mixer, token, own, at_once=True) for token in hidden.split(1, 1)]
        return torch.cat(steps, 1)
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
