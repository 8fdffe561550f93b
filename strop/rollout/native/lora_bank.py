"""Adds LoRA adapters to the linear modules of a model, another one for each row of a batch.

A forward hook of each adapted module adds (x A) B of the row's adapter to its output. Hooks are there only
while the engine samples and adapters are loaded. Rows without adapter are what the module computes itself. If
the module has adapters of its own (peft), they are left out for rows with an adapter.

Adapters in use have slots in a bank, per module A [slots, rank, in] and B [slots, rank, out], smaller ranks
filled up with zeros. On a GPU a step multiplies all rows with all slots, sets what belongs to other adapters
to zero, and multiplies again: two products with fixed addresses, which a CUDA graph records, and few rows
have to read all adapters anyway. (Products with other adapters may be anything but never reach the output;
loaded weights are finite, so zero times a weight is zero.) On a CPU, a batched product per slot computes few
rows, and one product per adapter computes many.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from strop.models.lora import adapted_layers, base_model
from strop.rollout.native.adapters import NO_ADAPTER, LoadedAdapter, adaptable

_RANK_STEP = 8
"""Ranks of the bank are multiples of this."""
_MAX_DENSE = 512
"""With more slots times rank, a pass over prompts on a GPU multiplies each adapter with its own tokens."""
_FEW = 16
"""With more rows of one adapter, a CPU computes one product per adapter."""
_SPARSE = 4
"""Adapters move together when they use a part of the bank that is this many times too large."""
_MAX_PADDING = 1.5
"""A batched product of slots may have this many times the rows that are needed."""

_MAX_SLOTS = 1 << 20

Index = Tensor | slice


@dataclass(frozen=True)
class AdaptedRows:
    """Which rows of the states have which adapter, in one of three forms."""

    count: int
    adapted: Tensor | None
    """[rows, 1] rows with an adapter, if there are others and the model has adapters of its own."""
    foreign: Tensor | None = None
    """For one product of all slots: [rows, slots * rank], True where the slot is not the row's."""
    padded: Tensor | None = None
    """For a batched product: the rows of each slot in turn, as many for each slot, filled up with any."""
    used_slots: int = 0
    """Slots of `padded`."""
    real: Tensor | None = None
    """Which of `padded` are not filling; None: all."""
    groups: Sequence[tuple[int, Index]] = ()
    """For one product per adapter: numbers of adapters and their rows."""


class LoraBank:
    def __init__(self, model: nn.Module, loaded: Mapping[int, LoadedAdapter]) -> None:
        """`loaded`: adapters by number; it changes as adapters are loaded."""
        self._model = model
        self.loaded = loaded
        self._device = next(model.parameters()).device
        self.dense = self._device.type != "cpu"
        """One product of all slots, whatever the number of rows."""
        self._generation = 0
        """Grows when tensors that a CUDA graph may have recorded are replaced."""
        self._first: dict[str, Tensor] = {}
        self._second: dict[str, Tensor] = {}
        self.num_slots = 0
        self._rank = 0
        self._slot_of: dict[int, int] = {}
        self._owner = torch.empty(0)
        """[slots * rank] the slot of each line of the bank."""
        self._row_slots = torch.empty(0)
        """[rows] the slot of each decoding row, -1: none. CUDA graphs read it."""
        self._written: list[int] = []
        """What `_row_slots` was last filled with."""
        self._numbers: list[int] = []
        """Adapters of the decoding rows."""
        self._rows: AdaptedRows | None = None
        self._head_rows: AdaptedRows | None = None
        self.hooks: dict[str, RemovableHandle] = {}
        """By path; without hooks on the model there is nothing to say about rows."""
        self._own: list[Any] = []
        self._own_off = False
        self._head_parts: set[nn.Module | None] = set()

    # --- hooks ----------------------------------------------------------------------------------------------

    def remove_hooks(self) -> None:
        """Leave the model as it was."""
        self._use(None, None)
        for handle in self.hooks.values():
            handle.remove()
        self.hooks = {}
        self._head_parts = set()
        self._own = []

    def install_hooks(self) -> None:
        """Put hooks on adapted modules that have none yet."""
        paths = {path for adapter in self.loaded.values() for path in adapter.factors}
        missing = paths - self.hooks.keys()
        if not missing:
            return
        if not self.hooks:
            self._watch_own_adapters()
        modules = adaptable(self._model)
        for path in missing:
            self.hooks[path] = modules[path].register_forward_hook(self._adding_hook(path))

    def _watch_own_adapters(self) -> None:
        self._own = [layer for layer in adapted_layers(self._model) if not layer.disable_adapters]
        head = base_model(self._model).get_output_embeddings()
        self._head_parts = {head, getattr(head, "base_layer", None)}
        for i, layer in enumerate(self._own):
            for name in layer.active_adapters:
                if name in layer.lora_B:
                    part = layer.lora_B[name]
                    self.hooks[f"own adapter {i} {name}"] = part.register_forward_hook(self._leave_out)
                    if layer is head:
                        self._head_parts.add(part)

    def _rows_of(self, module: nn.Module) -> AdaptedRows | None:
        """The output head may get fewer rows than the rest of the model."""
        return self._head_rows if module in self._head_parts else self._rows

    def _adding_hook(self, path: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            rows = self._rows_of(module)
            if rows is not None:
                states = inputs[0].reshape(-1, inputs[0].shape[-1])
                if len(states) != rows.count:
                    raise ValueError(f"{path} gets {len(states)} rows of {rows.count} and cannot be adapted.")
                self._add(path, rows, states, output.view(-1, output.shape[-1]))

        return hook

    def _leave_out(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        rows = self._rows_of(module)
        if rows is not None and rows.adapted is not None:
            output.view(-1, output.shape[-1]).masked_fill_(rows.adapted, 0)

    def _use(self, rows: AdaptedRows | None, head_rows: AdaptedRows | None) -> None:
        """The rows of the coming passes; None: no row has an adapter."""
        self._rows = rows
        self._head_rows = head_rows
        off = rows is not None and rows.adapted is None
        if off != self._own_off:
            self._own_off = off
            for layer in self._own:
                layer._disable_adapters = off

    # --- rows of a pass -------------------------------------------------------------------------------------

    def use_tokens(self, spans: Sequence[tuple[int, int]], last: Sequence[int] | None) -> None:
        """The coming pass has prompts: (adapter, tokens) of each. `last`: prompts whose last tokens get
        logits; None: all tokens of all prompts do."""
        if not any(number for number, _ in spans):
            self._use(None, None)
            return
        merged: list[tuple[int, int]] = []
        for number, count in spans:
            if merged and merged[-1][0] == number:
                count += merged.pop()[1]
            merged.append((number, count))
        rows = self._token_rows(merged)
        head_rows = rows
        if last is not None:
            head_rows = self._token_rows([(spans[i][0], 1) for i in last])
        self._use(rows, head_rows)

    def _token_rows(self, spans: Sequence[tuple[int, int]]) -> AdaptedRows:
        numbers = [number for number, _ in spans]
        if self.dense and numbers and self._fits_dense(numbers):
            counts = torch.tensor([count for _, count in spans])
            slots = torch.tensor(self._slots(numbers)).repeat_interleave(counts).to(self._device)
            return self._dense_rows(slots, numbers)
        start = 0
        groups = []
        for number, count in spans:
            if number != NO_ADAPTER:
                groups.append((number, slice(start, start + count)))
            start += count
        return AdaptedRows(start, self._adapted(spans), groups=groups)

    def _adapted(self, spans: Sequence[tuple[int, int]]) -> Tensor | None:
        if not self._own or all(number != NO_ADAPTER for number, _ in spans):
            return None
        marks = torch.tensor([number != NO_ADAPTER for number, _ in spans])
        counts = torch.tensor([count for _, count in spans])
        return marks.repeat_interleave(counts)[:, None].to(self._device)

    def set_rows(self, numbers: Sequence[int], num_rows: int) -> int:
        """Adapters of the rows that decode from now on, in a cache with `num_rows` rows. Returns what a CUDA
        graph depends on: steps with the same number compute with the same tensors; 0: without adapters."""
        if not any(numbers):
            self._numbers = []
            return 0
        wanted = set(numbers) - {NO_ADAPTER}
        if self._used_slots(wanted) >= _SPARSE * _power_of_two(len(wanted)):
            self._slot_of = {}
        if self.dense:
            if len(self._row_slots) != num_rows:
                self._row_slots = torch.full((num_rows,), -1, device=self._device)
                self._written = []
                self._generation += 1
            slots = self._slots(numbers)
            if slots != self._written:
                self._written = slots
                self._row_slots.fill_(-1)
                self._row_slots[: len(slots)] = torch.tensor(slots, device=self._device)
        self._numbers = list(numbers)
        mixed = bool(self._own) and NO_ADAPTER in numbers
        return (self._generation * _MAX_SLOTS + self._used_slots(wanted)) * 2 + mixed

    def use_rows(self, count: int, first: Tensor | None = None) -> None:
        """The coming pass has one token of each of `count` rows, or of the rows `first`."""
        if not self._numbers:
            self._use(None, None)
            return
        if self.dense:
            slots = self._row_slots[:count] if first is None else self._row_slots[first]
            rows = self._dense_rows(slots, self._numbers)
        else:
            chosen = self._numbers
            if first is not None:
                chosen = [chosen[row] for row in first.tolist()]
            rows = self._few_rows(chosen)
        self._use(rows, rows)

    def _dense_rows(self, slots: Tensor, numbers: Sequence[int]) -> AdaptedRows:
        adapted = None
        if self._own and NO_ADAPTER in numbers:
            adapted = (slots >= 0)[:, None]
        width = self._used_slots(numbers) * self._rank
        return AdaptedRows(len(slots), adapted, foreign=self._owner[:width] != slots[:, None])

    def _few_rows(self, numbers: Sequence[int]) -> AdaptedRows:
        by_number: dict[int, list[int]] = {}
        for row, number in enumerate(numbers):
            if number != NO_ADAPTER:
                by_number.setdefault(number, []).append(row)
        adapted = self._adapted([(number, 1) for number in numbers])
        count = len(numbers)
        most = max((len(rows) for rows in by_number.values()), default=0)
        if len(by_number) > 1 and most <= _FEW:
            slots = self._slots(list(by_number))
            used = max(slots) + 1
            if used * most <= _MAX_PADDING * count:
                table = torch.full((used, most), -1)
                for slot, rows in zip(slots, by_number.values()):
                    table[slot, : len(rows)] = torch.tensor(rows)
                flat = table.view(-1)
                real = None
                if int(flat.min()) < 0:
                    real = (flat >= 0).nonzero()[:, 0]
                return AdaptedRows(count, adapted, padded=flat.clamp(min=0), used_slots=used, real=real)
        groups = [(number, _index(rows, count)) for number, rows in by_number.items()]
        return AdaptedRows(count, adapted, groups=groups)

    # --- products -------------------------------------------------------------------------------------------

    def _add(self, path: str, rows: AdaptedRows, states: Tensor, output: Tensor) -> None:
        """Add the products of each row's adapter to `output`, in place."""
        for number, index in rows.groups:
            factors = self.loaded[number].factors.get(path)
            if factors is None:
                continue
            first, second = factors
            inner = states[index] @ first.t()
            if isinstance(index, slice) and output.dtype == inner.dtype:
                output[index].addmm_(inner, second)
            else:
                output[index] += inner @ second
        if path not in self._first:
            return
        if rows.foreign is not None:
            width = rows.foreign.shape[1]
            first = self._first[path].flatten(0, 1)[:width]
            second = self._second[path].flatten(0, 1)[:width]
            inner = (states @ first.t()).masked_fill_(rows.foreign, 0)
            if output.dtype == inner.dtype:
                output.addmm_(inner, second)
            else:
                output += inner @ second
        elif rows.padded is not None:
            used = rows.used_slots
            by_slot = states.index_select(0, rows.padded).view(used, -1, states.shape[1])
            inner = torch.bmm(by_slot, self._first[path][:used].transpose(1, 2))
            added = torch.bmm(inner, self._second[path][:used]).flatten(0, 1)
            targets = rows.padded
            if rows.real is not None:
                added = added[rows.real]
                targets = targets[rows.real]
            output.index_add_(0, targets, added.to(output.dtype))

    # --- slots ----------------------------------------------------------------------------------------------

    def free(self) -> None:
        """Free the bank; it is filled again from the loaded adapters."""
        self._first = {}
        self._second = {}
        self.num_slots = 0
        self._rank = 0
        self._slot_of = {}
        self._owner = torch.empty(0)
        self._row_slots = torch.empty(0)
        self._numbers = []
        self._generation += 1

    def _fits_dense(self, numbers: Sequence[int]) -> bool:
        wanted = [self.loaded[number] for number in set(numbers) - {NO_ADAPTER}]
        return len(wanted) * max((adapter.rank for adapter in wanted), default=0) <= _MAX_DENSE

    def _used_slots(self, numbers: Iterable[int]) -> int:
        """A power of two; slots from there on hold no adapter of these."""
        return _power_of_two(1 + max(self._slot_of.get(number, 0) for number in numbers))

    def _slots(self, numbers: Sequence[int]) -> list[int]:
        """The slot of each number, -1 without adapter; adapters that have none get one."""
        wanted = set(numbers) - {NO_ADAPTER}
        if not wanted <= self._slot_of.keys():
            self._place([self.loaded[number] for number in sorted(wanted)])
        return [self._slot_of.get(number, -1) for number in numbers]

    def _place(self, adapters: Sequence[LoadedAdapter]) -> None:
        rank = max(adapter.rank for adapter in adapters)
        paths = {path for adapter in adapters for path in adapter.factors}
        if len(adapters) > self.num_slots or rank > self._rank or not paths <= self._first.keys():
            self._allocate(len(adapters), rank, paths)
        wanted = {adapter.number for adapter in adapters}
        taken = {slot: number for number, slot in self._slot_of.items()}
        # Empty slots first, then those that no decoding row uses.
        free = sorted(
            (slot for slot in range(self.num_slots) if taken.get(slot) not in wanted),
            key=lambda slot: (slot in taken, taken.get(slot) in self._numbers, slot),
        )
        for adapter in adapters:
            if adapter.number in self._slot_of:
                continue
            slot = free.pop(0)
            if slot in taken:
                del self._slot_of[taken[slot]]
            self._slot_of[adapter.number] = slot
            self._write(slot, adapter)

    def _allocate(self, slots: int, rank: int, paths: set[str]) -> None:
        """A larger, empty bank."""
        self.num_slots = max(self.num_slots, _power_of_two(slots))
        self._rank = max(self._rank, -(-rank // _RANK_STEP) * _RANK_STEP)
        paths |= self._first.keys()
        modules = adaptable(self._model)
        self._first = {}
        self._second = {}
        for path in paths:
            weight = modules[path].weight
            sides = (modules[path].in_features, modules[path].out_features)
            self._first[path], self._second[path] = (
                torch.zeros(self.num_slots, self._rank, side, dtype=weight.dtype, device=weight.device)
                for side in sides
            )
        self._owner = torch.arange(self.num_slots, device=self._device).repeat_interleave(self._rank)
        self._slot_of = {}
        self._generation += 1

    def _write(self, slot: int, adapter: LoadedAdapter) -> None:
        for path in self._first:
            factors = adapter.factors.get(path)
            for bank, which in ((self._first, 0), (self._second, 1)):
                bank[path][slot].zero_()
                if factors is not None:
                    bank[path][slot, : len(factors[which])] = factors[which]


def _index(rows: list[int], count: int) -> Index:
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows)


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
