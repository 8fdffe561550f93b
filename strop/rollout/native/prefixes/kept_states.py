"""States of a model that are kept besides those of the running rows, for sequences that continue there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from strop.models.layouts.states import RowStates
from strop.rollout.native.prefixes.snapshots import StateSnapshots
from strop.rollout.native.requests import Admission, PrefillChunk, ScheduledSample

_SLOTS_PER_ROW = 2
"""States that are kept for each row: those of its prompt and of its last turn."""
_SLOT_SHARE = 4
"""They take at most this part of the memory that the states of the rows leave."""


def fit_row_states(states: RowStates, size: int, rows: int) -> tuple[int, int]:
    """How many of `rows` rows have states within half of `size` bytes, and the bytes that are left."""
    rows = states.rows_within(size // 2, rows)
    return rows, size - rows * states.bytes_per_row


class KeptStates:
    def __init__(self, states: RowStates, snapshots: StateSnapshots) -> None:
        """`snapshots`: where the kept states are found."""
        self._states = states
        self._snapshots = snapshots

    def fit_memory(self, size: int, rows: int) -> tuple[int, int]:
        """How many of `rows` rows have states within half of `size` bytes, and the bytes that are left for
        keys and values when states are kept too."""
        rows, size = fit_row_states(self._states, size, rows)
        each = self._states.bytes_per_row
        slots = min(_SLOTS_PER_ROW * rows, max(0, size) // _SLOT_SHARE // each)
        self._snapshots.set_slots(slots)
        return rows, size - slots * each

    def load(self, admissions: Sequence[Admission]) -> None:
        """Rows that continue where states were kept get these states."""
        continued = [one for one in admissions if one.snapshot is not None]
        if continued:
            slots = [one.snapshot for one in continued if one.snapshot is not None]
            self._states.load(slots, [one.row for one in continued])

    def with_slots(
        self, chunks: Sequence[PrefillChunk], by_row: Mapping[int, Admission]
    ) -> list[PrefillChunk]:
        """Chunks with the slots in which states are kept before their last tokens."""
        wanted = [(chunk.row, by_row[chunk.row].sample) for chunk in chunks if by_row[chunk.row].keeps_states]
        slots = {row: slot for slot, row in self._take(wanted).items()}
        return [dataclasses.replace(chunk, slot=slots.get(chunk.row)) for chunk in chunks]

    def keep(self, finished: Iterable[tuple[int, ScheduledSample]]) -> None:
        """Keep the states of these rows, whose newest token was never an input of the model, if they are
        turns of conversations."""
        taken = self._take((row, sample) for row, sample in finished if sample.multi_turn)
        if taken:
            self._states.save(list(taken.values()), list(taken))

    def _take(self, wanted: Iterable[tuple[int, ScheduledSample]]) -> dict[int, int]:
        """Slots for the states of rows before their last tokens, and these rows. What one was given can be
        evicted for the next: the last one has it."""
        taken: dict[int, int] = {}
        for row, sample in wanted:
            slot = self._snapshots.add(sample.prefix_keys[:-1], sample.adapter)
            if slot is not None:
                taken[slot] = row
        needed = max(taken, default=-1) + 1
        if needed > self._states.slots:  # slots that are added one by one would be copied each time
            self._states.fit_slots(min(2 * needed, self._snapshots.max_slots))
        return taken
