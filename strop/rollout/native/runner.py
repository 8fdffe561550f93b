"""Running the module: prompts that join, and steps of all running rows."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strop.rollout.native.accelerated import kernels
from strop.rollout.native.attention import Decode, Piece, Prefill, Shapes, Step, TwinDecode
from strop.rollout.native.cache import Cache
from strop.rollout.native.graphs import Graphs
from strop.rollout.native.rows import Rows
from strop.rollout.native.scheduler import Admission, Sample

_SPAN = 16


class Runner:
    def __init__(self, model: Any, *, batch_tokens: int, chunked: bool, graphs: bool) -> None:
        """`batch_tokens`: most prompt tokens of one forward pass; `chunked`: longer prompts are split, else they run alone."""
        self.model, self.batch_tokens, self.chunked = model, batch_tokens, chunked
        self.device = model.get_input_embeddings().weight.device
        self.rows = Rows(self.device)
        self.cache = self._measure()
        core = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._selects = "logits_to_keep" in inspect.signature(core.forward).parameters
        self._graphs = Graphs() if graphs and self.device.type == "cuda" else None
        # On a GPU a step takes as long for one row as for many, and its shape must not depend on what was sampled.
        self._pairs = self.device.type == "cpu"
        self.lends = kernels(self.device.type) is not None
        """Whether decode steps read the prompt of a request in one place for all of its samples."""

    def _measure(self) -> Cache:
        """An empty cache, after one pass of one token that shows which layers attend."""
        shapes = Shapes()
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._forward(nothing, nothing, shapes)
        kinds = getattr(self.model.config.get_text_config(), "layer_types", None) or []
        strange = sorted({kind for kind in kinds if not kind.endswith("attention") or kind == "linear_attention"})
        if not shapes.layers or strange:
            why = f"has layers of the kind {', '.join(strange)}" if strange else "does not take a registered attention function"
            raise ValueError(f"{type(self.model).__name__} {why}, so the native engine cannot drive it. Set rollout.name=hf.")
        return Cache(shapes.layers, dtype=shapes.dtype, device=self.device)

    def _forward(self, ids: Tensor, positions: Tensor, step: Step, **more: Any) -> Tensor:
        return self.model(input_ids=ids, position_ids=positions, use_cache=False, rollout=step, **more).logits

    def fit(self, rows: int, capacity: int, keep: int, stops: int) -> None:
        """Grow, or shrink in one direction to grow in the other; the first `keep` rows keep what they hold."""
        if rows > self.cache.rows or capacity > self.cache.capacity:
            if self._graphs is not None:
                self._graphs.clear()
            self.cache.resize(rows, capacity, keep)
        if (self.cache.rows, self.cache.capacity) != (self.rows.rows, self.rows.capacity) or stops > self.rows.stops:
            if self._graphs is not None:
                self._graphs.clear()
            self.rows.resize(self.cache.rows, self.cache.capacity, keep, max(stops, self.rows.stops))

    @property
    def recorded(self) -> bool:
        """Whether decode steps were recorded, which point into the cache."""
        return self._graphs is not None and len(self._graphs) > 0

    def free(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()
        self.cache.free()
        self.rows.resize(0, 0, 0, 1)

    def prefill(self, admissions: Sequence[Admission], streams: Sequence[int]) -> int:
        """Compute what the seated samples lack and sample the next token of each; returns the tokens computed, or yet to be
        computed for those that are fed.

        What an admission shares with its donor is in its row already.
        """
        if self._graphs is not None:
            self._graphs.check(self.model)
        self.rows.fill(admissions, streams)
        followers: dict[int, list[Admission]] = {}
        own = [a for a in admissions if a.leader is None and not a.fed]
        for admission in admissions:
            if admission.leader is not None:
                followers.setdefault(admission.leader, []).append(admission)
        by_row = {a.row: a for a in own}
        pieces = [Piece(a.row, a.shared, [*a.sample.prompt, *a.sample.tokens][a.shared :]) for a in own]
        for batch in self._batches(pieces):
            self._run_pieces(batch, by_row, followers)
        return sum(len(piece.tokens) for piece in pieces) + sum(a.sample.length - a.shared for a in admissions if a.fed)

    def _run_pieces(self, batch: list[Piece], own: dict[int, Admission], followers: dict[int, list[Admission]]) -> None:
        step = Prefill(self.cache, batch, self.device)
        whole = [i for i, piece in enumerate(batch) if piece.end == own[piece.row].sample.length]
        last = step.last[whole]
        more = {"logits_to_keep": last} if self._selects else {}
        logits = self._forward(step.ids, step.positions[None], step, **more)[0]
        if not whole:
            return
        if not self._selects:
            logits = logits[last]
        seated, source = [], []
        copies: list[tuple[int, int]] = []
        for i, at in enumerate(whole):
            leader = own[batch[at].row]
            group = [leader, *followers.get(leader.row, [])]
            seated += group
            source += [i] * len(group)
            copies += [(leader.row, a.row) for a in group[1:]]
        longest = max(a.sample.length for a in seated)
        self.cache.copy([a for a, _ in copies], [b for _, b in copies], longest)
        rows = torch.tensor([a.row for a in seated], device=self.device)
        samples = [a.sample for a in seated]
        self._advance(rows, logits[source], self.rows.knobs(samples), longest)

    def _batches(self, pieces: list[Piece]) -> list[list[Piece]]:
        """Pieces in batches of at most `batch_tokens`; long ones are split, or alone where that is not allowed."""
        batches: list[list[Piece]] = [[]]
        room = self.batch_tokens
        for piece in pieces:
            while True:
                if len(piece.tokens) <= room:
                    break
                if self.chunked and (room > 0 and (not batches[-1] or len(piece.tokens) > self.batch_tokens)):
                    batches[-1].append(Piece(piece.row, piece.start, piece.tokens[:room]))
                    piece = Piece(piece.row, piece.start + room, piece.tokens[room:])
                elif not batches[-1]:
                    break
                batches.append([])
                room = self.batch_tokens
            batches[-1].append(piece)
            room -= len(piece.tokens)
        return [batch for batch in batches if batch]

    def decode(self, samples: Sequence[Sample], lengths: Sequence[int], steps: int) -> None:
        """`steps` tokens for every running row."""
        used = self.rows.knobs(samples)
        for i in range(steps):
            if self._graphs is not None:
                self._graphs.step(self, len(samples), max(lengths) + i, used)
            else:
                self.step(len(samples), self._spans(lengths, i), used)

    def _spans(self, lengths: Sequence[int], ahead: int) -> list[tuple[int, int, int]]:
        """Rows in stretches with a used length of their own, in so far as that saves reading."""
        count = len(lengths)
        if self.device.type == "cuda" or max(lengths) <= 1.25 * min(lengths) + _SPAN:
            return [(0, count, max(lengths) + ahead)]
        return [(i, min(i + _SPAN, count), max(lengths[i : i + _SPAN]) + ahead) for i in range(0, count, _SPAN)]

    def step(self, count: int, spans: Sequence[tuple[int, int, int]], used: dict[str, bool | int]) -> None:
        """One token for the first `count` rows: reads and writes tensors of fixed place only, so it can be recorded."""
        rows = torch.arange(count, device=self.device)
        ids, positions = self.rows.inputs(rows)
        longest = max(length for *_, length in spans)
        twins = self.rows.twins(count) if self._pairs and len(spans) == 1 else None
        if twins is None:
            step: Step = Decode(self.cache, rows, positions, spans, self.rows.lent(count))
            logits = self._forward(ids[:, None], positions[:, None], step)[:, -1]
        else:
            step = TwinDecode(self.cache, rows, positions, longest, twins)
            logits = self._forward(ids[twins.first, None], positions[twins.first, None], step)[:, -1][twins.which]
        self._advance(rows, logits, used, longest)

    def _advance(self, rows: Tensor, logits: Tensor, used: dict[str, bool | int], longest: int) -> None:
        self.rows.advance(rows, logits, used, longest)
        if self._pairs:
            self.rows.part(rows)
