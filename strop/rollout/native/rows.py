"""What the device knows about each running row: its tokens, how it samples, whether it ended.

Nothing here is a Python loop over rows and steps: a step reads and writes these tensors as a whole, and a completion is read
back once, when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from strop.rollout.base import Sampling
from strop.rollout.native.accelerated import kernels
from strop.rollout.native.sampler import ALL, Knobs, penalise, sample, uniforms
from strop.rollout.native.scheduler import Admission, Sample
from strop.rollout.native.twins import Families, Twins

RUNNING, STOP, LENGTH, ERROR = range(4)
_NAMES = {STOP: "stop", LENGTH: "length", ERROR: "error"}


def finish_name(state: int) -> str:
    return _NAMES[state]


_WHOLE = {
    "length": 1,
    "given": 0,
    "limit": 1,
    "state": LENGTH,
    "stream": 0,
    "family": 0,
    "top_k": ALL,
    "lender": 0,
    "borrowed": 0,
}
_REAL = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0}
"""Fields of one number per row, and what they are in rows that hold nothing: ended rows of one token."""


class Rows:
    """Fields are [rows]; tokens and log_probs are [rows, capacity + 1], aligned with the positions of the cache. Those of one
    number per row are lines of two tables, so that few operations fill or move them all."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows = self.capacity = 0
        self.fields: dict[str, Tensor] = {}
        self._families = Families()
        self.resize(0, 0, 0, 1)

    def resize(self, rows: int, capacity: int, keep: int, stops: int) -> None:
        """Room for more; the first `keep` rows stay as they are."""
        whole, real = torch.int64, torch.float32
        wanted: dict[str, tuple[tuple[int, int], torch.dtype, float]] = {
            "tokens": ((rows, capacity + 1), whole, 0),
            "log_probs": ((rows, capacity + 1), real, 0),
            "stops": ((rows, stops), whole, -1),
        }
        new = {n: torch.full(shape, empty, dtype=kind, device=self.device) for n, (shape, kind, empty) in wanted.items()}
        new["greedy"] = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self._whole, self._real = (
            torch.tensor(list(lines.values()), dtype=kind, device=self.device)[:, None].repeat(1, rows)
            for lines, kind in ((_WHOLE, whole), (_REAL, real))
        )
        new |= dict(zip(_WHOLE, self._whole)) | dict(zip(_REAL, self._real))
        for name, old in self.fields.items() if keep else ():
            part = (slice(keep), *(slice(min(a, b)) for a, b in zip(new[name].shape[1:], old.shape[1:])))
            new[name][part] = old[part]
        self.fields, self.rows, self.capacity = new, rows, capacity

    @property
    def stops(self) -> int:
        return self.fields["stops"].shape[1]

    def fill(self, admissions: Sequence[Admission], streams: Sequence[int]) -> None:
        """Seat samples; their tokens so far are written, the next one is theirs to sample. A row that is fed goes on behind
        what it shares, and gets the tokens it has already as if they were sampled."""
        rows, samples = [a.row for a in admissions], [a.sample for a in admissions]
        index = torch.tensor(rows, device=self.device)
        settings: list[Sampling] = [s.settings for s in samples]
        whole: dict[str, Sequence[int]] = {
            "length": [a.shared + 1 if a.fed else a.sample.length for a in admissions],
            "given": [s.length for s in samples],
            "limit": [s.limit for s in samples],
            "state": [RUNNING for _ in samples],
            "stream": streams,
            "family": self._families.of_samples(samples, [a.fed for a in admissions]),
            "top_k": [s.top_k if s.top_k > 0 else ALL for s in settings],
            "lender": rows,
            "borrowed": [0 for _ in samples],
        }
        real = {
            "temperature": [s.temperature or 1.0 for s in settings],
            "top_p": [s.top_p for s in settings],
            "min_p": [s.min_p for s in settings],
            "penalty": [s.repetition_penalty for s in settings],
        }
        self._whole[:, index] = torch.tensor([whole[name] for name in _WHOLE], device=self.device)
        self._real[:, index] = torch.tensor([real[name] for name in _REAL], dtype=torch.float32, device=self.device)
        self.fields["greedy"][index] = torch.tensor([s.temperature == 0 for s in settings], device=self.device)
        blank = [-1] * self.stops
        stops = [blank if s.ignore_eos else (list(s.stop_ids) + blank)[: self.stops] for s in settings]
        self.fields["stops"][index] = torch.tensor(stops, device=self.device)
        tokens = np.zeros((len(samples), max(s.length for s in samples)), dtype=np.int64)
        prompts = {id(s.prompt): s.prompt for s in samples}  # samples of a request have the same list
        arrays = {key: np.array(prompt, dtype=np.int64) for key, prompt in prompts.items()}
        for line, one in zip(tokens, samples):
            line[: len(one.prompt)] = arrays[id(one.prompt)]
            line[len(one.prompt) : one.length] = one.tokens
        self.fields["tokens"][index, : tokens.shape[1]] = torch.from_numpy(tokens).to(self.device)
        for row, one in zip(rows, samples):
            if one.tokens:
                self.fields["log_probs"][row, len(one.prompt) : one.length] = torch.tensor(one.log_probs, device=self.device)

    def move(self, moves: Sequence[tuple[int, int]], left: int) -> None:
        """Close gaps; rows from `left` on are free."""
        if moves:
            source, target = (torch.tensor(list(side), device=self.device) for side in zip(*moves))
            for table in (self._whole, self._real):
                table[:, target] = table[:, source]
            for name in ("tokens", "log_probs", "stops", "greedy"):
                self.fields[name][target] = self.fields[name][source]
        self.fields["state"][left:] = LENGTH
        self.fields["length"][left:] = 1
        self.fields["given"][left:] = 0

    def lend(self, running: Sequence[Sample]) -> None:
        """Samples of one request that run side by side all hold their prompt: kernels may read it in the row of the first."""
        first: dict[int, int] = {}
        lenders, borrowed = list(range(len(running))), [0] * len(running)
        for row, one in enumerate(running):
            if not one.fed:  # all of its prompt is computed
                lenders[row] = first.setdefault(one.request, row)
                borrowed[row] = len(one.prompt) if lenders[row] < row else 0
        lines = torch.tensor([lenders, borrowed], device=self.device)
        self.fields["lender"][: len(running)], self.fields["borrowed"][: len(running)] = lines

    def lent(self, count: int) -> tuple[Tensor, Tensor]:
        """Of the first rows: in which row each may read its beginning, and how many tokens of it."""
        return self.fields["lender"][:count], self.fields["borrowed"][:count]

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The newest token of each row, and its position."""
        positions = self.fields["length"][rows] - 1
        return self.fields["tokens"][rows, positions], positions

    def knobs(self, samples: Sequence[Sample]) -> dict[str, bool | int]:
        """Which settings any of these samples uses: what `advance` need not do for a whole batch."""
        settings: set[Sampling] = set({id(s.settings): s.settings for s in samples}.values())
        greedy = {s.temperature == 0 for s in settings}
        ks = [s.top_k if s.top_k > 0 else ALL for s in settings]
        return {
            "greedy": True in greedy,
            "all_greedy": greedy == {True},
            "temperature": any(s.temperature not in (0, 1) for s in settings),
            "top_k": max(ks) if min(ks) < ALL else 0,
            "top_p": any(s.top_p < 1 for s in settings),
            "min_p": any(s.min_p > 0 for s in settings),
            "penalty": any(s.repetition_penalty != 1 for s in settings),
        }

    def advance(self, rows: Tensor, logits: Tensor, used: dict[str, bool | int], longest: int) -> None:
        """Sample one token for each of `rows` and judge whether the row ends with it. Ended rows stay as they are."""
        f = self.fields
        fast = kernels(self.device.type)
        if fast is not None and not any(used[name] for name in ("top_k", "top_p", "min_p", "penalty")):
            plain = {name: bool(used[name]) for name in ("temperature", "greedy", "all_greedy")}
            fast.draw(logits, rows, f, **plain)
            return
        length, state = f["length"][rows], f["state"][rows]

        def setting(name: str) -> Tensor | None:
            return f[name][rows] if used[name] else None

        knobs = Knobs(
            temperature=setting("temperature"),
            greedy=setting("greedy"),
            all_greedy=bool(used["all_greedy"]),
            top_k=setting("top_k"),
            widest=int(used["top_k"]),
            top_p=setting("top_p"),
            min_p=setting("min_p"),
        )
        penalised = None
        if used["penalty"]:
            columns = torch.arange(longest, device=self.device)
            # Columns past the end repeat the first token: it is in the sequence anyway.
            seen = f["tokens"][rows][:, :longest].where(columns < length[:, None], f["tokens"][rows][:, :1])
            penalised = penalise(logits, seen, f["penalty"][rows])
        draw = sample(logits, uniforms(f["stream"][rows], length), knobs, penalised)
        given = length < f["given"][rows]
        f["tokens"][rows, length] = torch.where(given, f["tokens"][rows, length], draw.tokens)
        f["log_probs"][rows, length] = torch.where(given, f["log_probs"][rows, length], draw.log_probs)
        stopped = (draw.tokens[:, None] == f["stops"][rows]).any(-1)
        after = torch.where(stopped, STOP, torch.where(length + 1 >= f["limit"][rows], LENGTH, RUNNING))
        after = torch.where(given, RUNNING, after)
        after = torch.where(draw.valid, after, ERROR)
        alive = state == RUNNING
        f["state"][rows] = torch.where(alive, after, state)
        f["length"][rows] = torch.where(alive & draw.valid, length + 1, length)

    def part(self, rows: Tensor) -> None:
        """Rows that held the same tokens are a family no longer if they sampled different ones."""
        newest, _ = self.inputs(rows)
        self.fields["family"][rows] = self._families.parted(self.fields["family"][rows], newest)

    def twins(self, count: int) -> Twins | None:
        """Which of the first rows hold the very same tokens, where that saves enough."""
        return self._families.twins(self.fields["family"][:count])

    def look(self, count: int) -> tuple[list[int], list[int]]:
        """State and length of the first rows, on the host. A row that is still fed has the length it is fed up to."""
        length = torch.maximum(self.fields["length"][:count], self.fields["given"][:count])
        both = torch.stack([self.fields["state"][:count], length]).tolist()
        return both[0], both[1]

    def read(self, places: Sequence[tuple[int, int, int]]) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probs of (row, start, end) each, in one trip to the host."""
        if not places:
            return []
        rows, width = torch.tensor([row for row, _, _ in places], device=self.device), max(end for _, _, end in places)
        # numpy makes Python numbers several times faster than torch.
        tokens, log_probs = (self.fields[name][rows, :width].cpu().numpy() for name in ("tokens", "log_probs"))
        return [(tokens[i, a:b].tolist(), log_probs[i, a:b].tolist()) for i, (_, a, b) in enumerate(places)]
