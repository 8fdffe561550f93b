"""State of the running rows on the device: their tokens, how they sample, whether they have finished.

There is no Python loop over rows in a step: a step reads and writes these tensors as a whole, and a
completion is copied to the host once, when it finishes. RowGroups finds rows that hold exactly the same
tokens, so that a decode step on a CPU computes them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from strop.rollout.base import Sampling
from strop.rollout.native.kv_cache import kernels
from strop.rollout.native.requests import Admission, ScheduledSample
from strop.rollout.native.sampler import (
    ALL,
    SampledTokens,
    SamplingTensors,
    apply_penalty,
    sample,
    uniforms,
)

RUNNING, STOP, LENGTH, ERROR = range(4)
_NAMES = {STOP: "stop", LENGTH: "length", ERROR: "error"}

_INT_FIELDS = {
    "length": 1,
    "num_known": 0,
    "limit": 1,
    "state": LENGTH,
    "stream": 0,
    "group": 0,
    "top_k": ALL,
    "shift": 0,
}
_FLOAT_FIELDS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0}
"""Fields with one number per row, and their value in free rows, which look like finished rows of one
token."""

_MAX_DISTINCT_SHARE = 0.75
"""With more distinct rows than this share, computing them once does not pay."""
_SMALLEST = 1e-30
"""A smaller top-p may be 0 in float32, which leaves no token."""
_MAX_VOCAB = 1 << 20
"""No vocabulary is larger."""

Features = dict[str, bool | int]
"""Which sampling settings a batch uses; `top_k` is the largest one."""


def finish_name(state: int) -> str:
    """Completion.finish for the state of a finished row."""
    return _NAMES[state]


@dataclass(frozen=True)
class SharedRows:
    """Rows by the tokens that they hold."""

    first: Tensor
    """[groups] one row of each group."""
    group: Tensor
    """[rows] the group of each row, as an index of `first`."""


class RowGroups:
    """Numbers for groups of rows that hold exactly the same tokens.

    A confident policy samples the same first tokens for many samples of a prompt, and their hidden states are
    equal until they differ. All samples of a prompt start as one group; a group splits where its rows sample
    different tokens. Nothing is hashed.
    """

    def __init__(self) -> None:
        self._next = 0
        self._may_share = False
        """Whether any two rows may still hold the same tokens."""

    def new_groups(self, samples: Sequence[ScheduledSample], decode_prefill: Sequence[bool]) -> list[int]:
        """Groups of samples that are admitted together: one for all samples of a request without sampled
        tokens. Rows with decode prefill do not hold their whole sequence yet, so each is its own group."""
        known: dict[int, int] = {}
        numbers = []
        for one, alone in zip(samples, decode_prefill):
            number = self._next
            if not one.tokens and not alone:
                number = known.setdefault(one.request, self._next)
            if number == self._next:
                self._next += 1
            numbers.append(number)
        self._may_share = True
        return numbers

    def split(self, groups: Tensor, newest: Tensor) -> Tensor:
        """New group numbers after each row has sampled its newest token."""
        if not self._may_share:
            return groups
        distinct, index = torch.unique(groups * _MAX_VOCAB + newest, return_inverse=True)
        first = self._next
        self._next += len(distinct)
        return index + first

    def shared_rows(self, groups: Tensor) -> SharedRows | None:
        """The rows by group, or None if nearly all rows are distinct."""
        if not self._may_share:
            return None
        distinct, index = torch.unique(groups, return_inverse=True)
        self._may_share = len(distinct) < len(groups)
        if len(distinct) > _MAX_DISTINCT_SHARE * len(groups):
            return None
        none_yet = torch.full((len(distinct),), len(groups))
        first = none_yet.scatter_reduce(0, index, torch.arange(len(groups)), "amin")
        return SharedRows(first, index)


class DecodeRows:
    """Fields are [rows]; tokens and log_probs are [rows, capacity + 1], aligned with the positions of the
    cache. Fields with one number per row are lines of two tables, so that few operations fill or move all of
    them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows = 0
        self.capacity = 0
        self.fields: dict[str, Tensor] = {}
        self._row_groups = RowGroups()
        self.resize(0, 0, 0, 1)

    def resize(self, rows: int, capacity: int, keep: int, num_stops: int) -> None:
        """Change the size; the first `keep` rows keep their contents."""
        device = self.device
        self._ints = _table(_INT_FIELDS, torch.int64, rows, device)
        self._floats = _table(_FLOAT_FIELDS, torch.float32, rows, device)
        new = {
            "tokens": torch.zeros(rows, capacity + 1, dtype=torch.int64, device=device),
            "log_probs": torch.zeros(rows, capacity + 1, dtype=torch.float32, device=device),
            "stops": torch.full((rows, num_stops), -1, dtype=torch.int64, device=device),
            "greedy": torch.zeros(rows, dtype=torch.bool, device=device),
            **dict(zip(_INT_FIELDS, self._ints)),
            **dict(zip(_FLOAT_FIELDS, self._floats)),
        }
        if keep:
            for name, old in self.fields.items():
                if old.dim() == 1:
                    new[name][:keep] = old[:keep]
                else:
                    width = min(new[name].shape[1], old.shape[1])
                    new[name][:keep, :width] = old[:keep, :width]
        self.fields = new
        self.rows = rows
        self.capacity = capacity

    @property
    def num_stops(self) -> int:
        return self.fields["stops"].shape[1]

    def fill(self, admissions: Sequence[Admission]) -> None:
        """Write the state and the tokens of admitted samples. A row with decode prefill continues behind its
        cached tokens, and gets the rest of its sequence as if it was sampled."""
        device = self.device
        samples = [admission.sample for admission in admissions]
        index = torch.tensor([admission.row for admission in admissions], device=device)
        settings = [one.settings for one in samples]
        self._ints[:, index] = torch.tensor(self._int_values(admissions), device=device)
        floats = [
            [one.temperature or 1.0 for one in settings],
            [max(one.top_p, _SMALLEST) for one in settings],
            [one.min_p for one in settings],
            [one.repetition_penalty for one in settings],
        ]
        self._floats[:, index] = torch.tensor(floats, dtype=torch.float32, device=device)
        greedy = [one.temperature == 0 for one in settings]
        self.fields["greedy"][index] = torch.tensor(greedy, device=device)
        stops = [self._padded_stops(one) for one in settings]
        self.fields["stops"][index] = torch.tensor(stops, device=device)
        tokens = _token_table(samples)
        self.fields["tokens"][index, : tokens.shape[1]] = torch.from_numpy(tokens).to(device)
        for admission in admissions:
            one = admission.sample
            if one.tokens:
                log_probs = torch.tensor(one.log_probs, device=device)
                self.fields["log_probs"][admission.row, len(one.prompt) : one.length] = log_probs

    def _int_values(self, admissions: Sequence[Admission]) -> list[list[int]]:
        """Lines in the order of _INT_FIELDS."""
        samples = [admission.sample for admission in admissions]
        decode_prefill = [admission.decode_prefill for admission in admissions]
        values: dict[str, list[int]] = {name: [] for name in _INT_FIELDS}
        for admission, group in zip(admissions, self._row_groups.new_groups(samples, decode_prefill)):
            one = admission.sample
            length = admission.num_cached_tokens + 1 if admission.decode_prefill else one.length
            values["length"].append(length)
            values["num_known"].append(one.length)
            values["limit"].append(one.limit)
            values["state"].append(RUNNING)
            values["stream"].append(one.stream)
            values["group"].append(group)
            values["top_k"].append(_top_k(one.settings))
            values["shift"].append(0 if one.images is None else one.images.shift)
        return list(values.values())

    def _padded_stops(self, settings: Sampling) -> list[int]:
        padding = [-1] * self.num_stops
        if settings.ignore_eos:
            return padding
        return [*settings.stop_ids, *padding][: self.num_stops]

    def move(self, moves: Sequence[tuple[int, int]], left: int) -> None:
        """Move rows (source, target), all at once; rows from `left` on become free."""
        if moves:
            source = torch.tensor([row for row, _ in moves], device=self.device)
            target = torch.tensor([row for _, row in moves], device=self.device)
            self._ints[:, target] = self._ints[:, source]
            self._floats[:, target] = self._floats[:, source]
            for name in ("tokens", "log_probs", "stops", "greedy"):
                self.fields[name][target] = self.fields[name][source]
        self.fields["state"][left:] = LENGTH
        self.fields["length"][left:] = 1
        self.fields["num_known"][left:] = 0

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The newest token of each row, and its position."""
        positions = self.fields["length"][rows] - 1
        return self.fields["tokens"][rows, positions], positions

    def rotary(self, rows: Tensor, positions: Tensor, used: Features) -> Tensor:
        """The positions as rotary embeddings count them: an image takes fewer than it has tokens."""
        return positions + self.fields["shift"][rows] if used["shifted"] else positions

    def inputs_ahead(self, rows: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        """The newest token of a row and the next `ahead` - 1 tokens behind it, and their positions. `rows`:
        the row of each."""
        places = torch.arange(len(rows), device=self.device) % ahead
        positions = (self.fields["length"][rows] - 1 + places).clamp(max=max(0, self.capacity - 1))
        return self.fields["tokens"][rows, positions], positions

    def tokens_from(self, rows: Tensor, start: Tensor, count: int) -> Tensor:
        """The tokens of each row from `start` on, [rows, count]; -1 behind its end."""
        places = start[:, None] + torch.arange(count, device=self.device)
        tokens = self.fields["tokens"][rows[:, None], places.clamp(max=self.capacity)]
        return tokens.where(places < self.fields["length"][rows][:, None], -1)

    def features(self, samples: Sequence[ScheduledSample]) -> Features:
        """The settings that any of these samples uses; `sample_next` skips the others."""
        settings = set({id(one.settings): one.settings for one in samples}.values())
        greedy = {one.temperature == 0 for one in settings}
        top_ks = [_top_k(one) for one in settings]
        return {
            "greedy": True in greedy,
            "all_greedy": greedy == {True},
            "temperature": any(one.temperature not in (0, 1) for one in settings),
            "top_k": max(top_ks) if min(top_ks) < ALL else 0,
            "top_p": any(one.top_p < 1 for one in settings),
            "min_p": any(one.min_p > 0 for one in settings),
            "penalty": any(one.repetition_penalty != 1 for one in settings),
            "shifted": any(one.images is not None and one.images.shift for one in samples),
        }

    def sample_next(self, rows: Tensor, logits: Tensor, used: Features, longest: int) -> None:
        """Sample one token for each of `rows` and update whether the row has finished. Finished rows do not
        change."""
        fields = self.fields
        fast = kernels(self.device.type)
        if fast is not None and _only_temperature(used):
            fast.draw(logits, rows, fields, **_draw_features(used))
            return
        length = fields["length"][rows]
        state = fields["state"][rows]
        sampled = self._sampled(rows, length, logits, used, longest)
        known = length < fields["num_known"][rows]
        old_tokens = fields["tokens"][rows, length]
        old_log_probs = fields["log_probs"][rows, length]
        fields["tokens"][rows, length] = torch.where(known, old_tokens, sampled.tokens)
        fields["log_probs"][rows, length] = torch.where(known, old_log_probs, sampled.log_probs)
        stopped = (sampled.tokens[:, None] == fields["stops"][rows]).any(-1)
        after = torch.where(length + 1 >= fields["limit"][rows], LENGTH, RUNNING)
        after = torch.where(stopped, STOP, after)
        after = torch.where(known, RUNNING, after)
        after = torch.where(sampled.valid, after, ERROR)
        running = state == RUNNING
        fields["state"][rows] = torch.where(running, after, state)
        fields["length"][rows] = torch.where(running & sampled.valid, length + 1, length)

    def sample_ahead(
        self, rows: Tensor, ahead: int, logits: Tensor, used: Features, longest: int
    ) -> SampledTokens:
        """Sample a token from each of `logits`, which are those after the newest token of a row and after
        each of the next `ahead` - 1 tokens behind it. `rows`: the row of each. Changes no row."""
        fast = kernels(self.device.type)
        if fast is not None and _only_temperature(used):
            drawn = fast.draw(logits, rows, self.fields, ahead=ahead, **_draw_features(used))
            return SampledTokens(*drawn)
        places = torch.arange(len(rows), device=self.device) % ahead
        return self._sampled(rows, self.fields["length"][rows] + places, logits, used, longest)

    def _sampled(
        self, rows: Tensor, length: Tensor, logits: Tensor, used: Features, longest: int
    ) -> SampledTokens:
        """The token that follows the first `length` tokens of each row."""
        settings, penalised = self.settings(rows, length, logits, used, longest)
        return sample(logits, uniforms(self.fields["stream"][rows], length), settings, penalised)

    def settings(
        self, rows: Tensor, length: Tensor, logits: Tensor, used: Features, longest: int
    ) -> tuple[SamplingTensors, Tensor | None]:
        """How the token is sampled, and the logits to sample from if they differ."""
        fields = self.fields

        def setting(name: str) -> Tensor | None:
            return fields[name][rows] if used[name] else None

        settings = SamplingTensors(
            temperature=setting("temperature"),
            greedy=setting("greedy"),
            all_greedy=bool(used["all_greedy"]),
            top_k=setting("top_k"),
            max_top_k=int(used["top_k"]),
            top_p=setting("top_p"),
            min_p=setting("min_p"),
        )
        penalised = None
        if used["penalty"]:
            columns = torch.arange(longest, device=self.device)
            tokens = fields["tokens"][rows]
            # Columns past the end repeat the first token: it is in the sequence anyway.
            seen = tokens[:, :longest].where(columns < length[:, None], tokens[:, :1])
            penalised = apply_penalty(logits, seen, fields["penalty"][rows])
        return settings, penalised

    def split_groups(self, rows: Tensor, newest: Tensor) -> None:
        """Rows of one group that got different tokens, `newest` [rows, any], get different groups. Negative
        entries are none."""
        groups = self.fields["group"][rows]
        for tokens in newest.where(newest >= 0, _MAX_VOCAB - 1).unbind(1):
            groups = self._row_groups.split(groups, tokens)
        self.fields["group"][rows] = groups

    def shared_rows(self, count: int) -> SharedRows | None:
        """Which of the first rows hold exactly the same tokens, if computing them once pays."""
        return self._row_groups.shared_rows(self.fields["group"][:count])

    def states_and_lengths(self, count: int) -> tuple[list[int], list[int]]:
        """States and lengths of the first rows, on the host. During a decode prefill, the length of the whole
        known sequence."""
        length = torch.maximum(self.fields["length"][:count], self.fields["num_known"][:count])
        both = torch.stack([self.fields["state"][:count], length]).tolist()
        return both[0], both[1]

    def read(self, places: Sequence[tuple[int, int, int]]) -> list[tuple[np.ndarray, list[float]]]:
        """Tokens, as int32, and log-probs of each (row, start, end), in one copy to the host."""
        if not places:
            return []
        rows = torch.tensor([row for row, _, _ in places], device=self.device)
        width = max(end for _, _, end in places)
        # numpy makes Python numbers several times faster than torch.
        tokens = self.fields["tokens"][rows, :width].cpu().numpy().astype(np.int32)
        log_probs = self.fields["log_probs"][rows, :width].cpu().numpy()
        found = []
        for i, (_, start, end) in enumerate(places):
            found.append((tokens[i, start:end].copy(), log_probs[i, start:end].tolist()))
        return found


def _table(
    defaults: dict[str, int] | dict[str, float], dtype: torch.dtype, rows: int, device: torch.device
) -> Tensor:
    """[fields, rows], each line filled with its default."""
    column = torch.tensor(list(defaults.values()), dtype=dtype, device=device)
    return column[:, None].repeat(1, rows)


def _only_temperature(used: Features) -> bool:
    """The kernels draw without any other setting."""
    return not (used["top_k"] or used["top_p"] or used["min_p"] or used["penalty"])


def _draw_features(used: Features) -> dict[str, bool]:
    return {name: bool(used[name]) for name in ("temperature", "greedy", "all_greedy")}


def _top_k(settings: Sampling) -> int:
    return min(int(settings.top_k), ALL) if settings.top_k > 0 else ALL


def _token_table(samples: Sequence[ScheduledSample]) -> np.ndarray:
    """[samples, longest length]: each sequence, padded with 0."""
    tokens = np.zeros((len(samples), max(one.length for one in samples)), dtype=np.int64)
    prompts: dict[int, np.ndarray] = {}  # samples of a request have the same list
    for line, one in zip(tokens, samples):
        if id(one.prompt) not in prompts:
            prompts[id(one.prompt)] = np.array(one.prompt, dtype=np.int64)
        line[: len(one.prompt)] = prompts[id(one.prompt)]
        line[len(one.prompt) : one.length] = one.tokens
    return tokens
