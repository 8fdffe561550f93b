"""What a pass with drafts reads and writes on the device: earlier answers of the running rows, and counts of
kept tokens. Addresses stay the same, so that a CUDA graph can record such a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from strop.config.schema.rollout import SpeculationConfig
from strop.rollout.native.decode_rows import DecodeRows, Features
from strop.rollout.native.requests import ScheduledSample
from strop.rollout.native.sampler import SampledTokens
from strop.rollout.native.speculation.attention import draft_kernels
from strop.rollout.native.speculation.controller import Controller
from strop.rollout.native.speculation.memory import DraftMemory, PromptMemory
from strop.rollout.native.speculation.propose import NO_TOKEN, propose
from strop.rollout.native.speculation.verify import judge, write

_SHORT_LINE = 4096
"""Width of the lines that a recorded pass searches, if the earlier answers of all rows are shorter: few
widths, because each is recorded for itself."""
_BYTES = 1 << 20


class DraftCounts:
    """What passes with drafts did since the last reading."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.drafted, self.accepted, *self.kept = numbers
        """Drafts; those that were sampled; row passes that kept more than 0, 1, 2 ... tokens."""


class Drafts:
    def __init__(self, settings: SpeculationConfig, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.memory = DraftMemory(
            max_bytes=settings.memory_megabytes * _BYTES,
            max_tokens=settings.memory_tokens,
            context=settings.max_match,
        )
        self._lines = torch.empty(0)
        self._lengths: list[int] = []
        """Tokens in each line."""
        self._written: list[tuple[PromptMemory | None, int]] = []
        """What each line was filled with, and its version."""
        self._counts = torch.empty(0)
        self._matches = {"min_match": settings.min_match, "max_match": settings.max_match}
        self.free()

    def free(self) -> None:
        """Free the tensors; no recorded pass may use them any more."""
        self._lines = torch.empty(0, 0, dtype=torch.int32, device=self.device)
        most = Controller(self.settings, adaptive=self.settings.enable == "auto").most_drafts
        self._counts = torch.zeros(3 + most, dtype=torch.int32, device=self.device)
        self._lengths = []
        self._written = []

    # --- rows -----------------------------------------------------------------------------------------------

    def num_known(self, samples: Sequence[ScheduledSample]) -> int:
        """How many of these samples have earlier answers to guess from."""
        return sum(self.memory.find(one.request, one.prompt) is not None for one in samples)

    def passed_by(self) -> None:
        """Tokens were sampled without drafts."""

    def claim(self, size: int, per_token: int, longest: int) -> int:
        """Bytes for drafts, if they are worth counting, of `size` bytes that they share with a cache of
        `per_token` bytes. `longest`: tokens of a row."""
        return 0

    def before_resize(self, call: Callable[[], None]) -> None:
        """`call` before tensors are replaced in the middle of a rollout: recorded passes point to them."""

    def set_rows(
        self, samples: Sequence[ScheduledSample], lengths: Sequence[int], rows: DecodeRows, ahead: int
    ) -> int:
        """The samples that run from now on, by row, each up to `ahead` tokens further until the next call.
        Returns the width of the lines that a pass searches."""
        settings = self.settings
        if not len(self._lines):
            count = 1 << (settings.max_rows - 1).bit_length()  # recorded passes have at most so many
            size = (count, settings.memory_tokens)
            self._lines = torch.full(size, NO_TOKEN, dtype=torch.int32, device=self.device)
            self._lengths = [0] * count
            self._written = [(None, 0)] * count
        outdated: dict[PromptMemory | None, list[int]] = {}
        for row, sample in enumerate(samples):
            known = self.memory.find(sample.request, sample.prompt)
            stamp = (known, 0 if known is None else known.version)
            if stamp != self._written[row]:
                outdated.setdefault(known, []).append(row)
                self._written[row] = stamp
        for known, lines in outdated.items():
            self._write_lines(lines, known)
        longest = max(self._lengths[: len(samples)])
        if self.device.type == "cpu":
            return max(1, longest)
        widths = (1, _SHORT_LINE, settings.memory_tokens)
        return min(width for width in widths if width >= min(longest, settings.memory_tokens))

    def _write_lines(self, rows: list[int], known: PromptMemory | None) -> None:
        index = torch.tensor(rows, device=self.device)
        before = max(self._lengths[row] for row in rows)
        length = 0
        if known is not None:
            line = torch.from_numpy(known.line(self.settings.memory_tokens)).to(self.device)
            length = len(line)
            self._lines[index, :length] = line
        self._lines[index, length:before] = NO_TOKEN
        for row in rows:
            self._lengths[row] = length

    # --- a pass ---------------------------------------------------------------------------------------------

    def propose(self, rows: DecodeRows, count: int, num_tokens: int, used: Features, longest: int) -> Tensor:
        """Drafts [count, num_tokens] for the first rows; they are also put behind the tokens of the rows."""
        fields = rows.fields
        lines = self._lines[:count, : int(used["line_width"])]
        fast = draft_kernels(self.device.type)
        if fast is not None:
            found: Tensor = fast.propose(fields, count, lines, num_tokens, longest, **self._matches)
            return found
        length = fields["length"][:count]
        drafts = propose(fields["tokens"][:count, :longest], length, lines, num_tokens, **self._matches)
        places = length[:, None] + torch.arange(num_tokens, device=self.device)
        index = (torch.arange(count, device=self.device)[:, None], places.clamp(max=rows.capacity))
        # The given tokens of a prefill by decode steps are certain; what follows them cannot be guessed yet.
        num_known = fields["num_known"][:count, None]
        drafts = torch.where(length[:, None] < num_known, NO_TOKEN, drafts)
        drafts = torch.where(places < num_known, fields["tokens"][index], drafts)
        drafts = torch.where(places + 2 <= rows.capacity, drafts, NO_TOKEN)  # two tokens: it and the next
        fields["tokens"][index] = drafts.clamp(min=0)
        return drafts

    def sample(
        self, rows: DecodeRows, index: Tensor, drafts: Tensor, logits: Tensor, used: Features, longest: int
    ) -> SampledTokens:
        """The tokens after the newest token of each row and after each of its drafts. `index`: the row of
        each of `logits`."""
        return rows.sample_ahead(index, drafts.shape[1] + 1, logits, used, longest)

    def keep(self, rows: DecodeRows, drafts: Tensor, sampled: SampledTokens) -> None:
        """The first rows get the tokens that ordinary steps would have sampled."""
        fast = draft_kernels(self.device.type)
        if fast is not None:
            fast.keep(
                rows.fields, drafts, sampled.tokens, sampled.log_probs, sampled.valid, counts=self._counts
            )
            return
        index = torch.arange(len(drafts), device=self.device)
        found = judge(rows.fields, index, drafts, sampled)
        write(rows.fields, index, found, sampled.log_probs)
        counts = [found.drafted.sum(), found.accepted.sum(), *found.kept.sum(0).unbind()]
        self._counts[: len(counts)] += torch.stack(counts)

    def read_counts(self, num_tokens: int) -> DraftCounts:
        """Counts of passes with so many drafts, since the last reading."""
        numbers = self._counts.tolist()
        self._counts.zero_()
        return DraftCounts(numbers[: 3 + num_tokens])
