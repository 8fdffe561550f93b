"""Drafts of the model's own multi-token prediction head (rollout.speculation.mtp).

Every pass with drafts gives the policy's hidden states at the newest token of a row and at its drafts. From
those at tokens that were kept the head computes the first draft; the further ones follow from its own hidden
states. The head's weights stay as they were loaded, but it uses the embedding and the output head of the
policy as they are.

The head attends to the tokens of a row since drafts began to be made for it, because it needs the hidden
states of a pass: positions are counted from there. Its KV cache has one layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from strop.config.schema.rollout import SpeculationConfig
from strop.models.lora import decoder_of
from strop.rollout.native.attention import Decode, ShapeProbe
from strop.rollout.native.borrowed_model import RolloutPatches
from strop.rollout.native.decode_rows import DecodeRows, Features
from strop.rollout.native.pages import PAGE
from strop.rollout.native.requests import ScheduledSample
from strop.rollout.native.sampler import SampledTokens
from strop.rollout.native.speculation.attention import AheadDecode
from strop.rollout.native.speculation.controller import Controller
from strop.rollout.native.speculation.draft_cache import DraftCache, move_rows
from strop.rollout.native.speculation.drawn import DrawnDrafts, SampleKey
from strop.rollout.native.speculation.mtp_head import MtpHead, load_mtp_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BEHIND = PAGE
"""Known tokens of a row that are computed by decode steps: it is up to so many behind its length."""


def build_mtp_drafts(settings: SpeculationConfig, policy: PreTrainedModel, device: torch.device) -> MtpDrafts:
    head = load_mtp_head(policy, device)
    RolloutPatches(head.decoder).apply()
    drafts = MtpDrafts(settings, head, device)
    # The policy outlives the engine and may be copied: its hook must not hold the drafts.
    known = weakref.ref(drafts)

    def policy_ran(module: nn.Module, inputs: object, output: object) -> None:
        found = known()
        if found is not None:
            found.policy_ran(output)

    handle = decoder_of(policy).register_forward_hook(policy_ran)
    weakref.finalize(drafts, handle.remove)
    return drafts


class MtpDrafts(DrawnDrafts):
    def __init__(self, settings: SpeculationConfig, head: MtpHead, device: torch.device) -> None:
        self._head = head
        probe = ShapeProbe()
        zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        with torch.no_grad():
            head(zero, zero.new_zeros(1, 1, head.hidden_size, dtype=head.dtype), zero, probe)
        cache = DraftCache(probe.layers, dtype=probe.dtype, device=device)
        self._width = Controller(settings, adaptive=settings.enable == "auto").most_drafts + 1
        """Most hidden states that a pass gives for a row."""
        self._followed: dict[SampleKey, tuple[int, int]] = {}
        """By sample: its row, and its length when drafts began to be made for it."""
        self._begin = torch.empty(0)
        """[rows] the position that is the first of the cache."""
        self._first = torch.empty(0)
        """[rows] the position of the first of the row's hidden states."""
        self._hidden = torch.empty(0)
        """[rows, width, size] the policy's hidden states of the last pass."""
        self._listens = False
        self._heard: Tensor | None = None
        super().__init__(settings, cache, sum(weight.nbytes for weight in head.parameters()))

    def free(self) -> None:
        super().free()
        self._followed = {}
        self._begin = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._first = self._begin
        self._hidden = torch.zeros(0, self._width, self._head.hidden_size, device=self.device)

    def policy_ran(self, output: object) -> None:
        """The policy's decoder has computed this."""
        if self._listens:
            hidden = getattr(output, "last_hidden_state", None)
            assert isinstance(hidden, Tensor), type(output)
            self._heard = hidden

    # --- rows -----------------------------------------------------------------------------------------------

    def set_rows(
        self, samples: Sequence[ScheduledSample], lengths: Sequence[int], rows: DecodeRows, ahead: int
    ) -> int:
        if self.cache.fit(self.max_rows, rows.capacity) or not self._in_step:
            self._followed = {}
        self._in_step = True
        if not len(self._begin):
            size = (self.max_rows, self._width, self._head.hidden_size)
            self._begin = torch.zeros(self.max_rows, dtype=torch.int64, device=self.device)
            self._first = torch.zeros_like(self._begin)
            self._hidden = torch.zeros(size, dtype=self._head.dtype, device=self.device)
        moves = []
        fresh = []
        followed: dict[SampleKey, tuple[int, int]] = {}
        for row, (sample, length) in enumerate(zip(samples, lengths)):
            key = (sample.request, sample.index)
            known = self._followed.get(key)
            if known is None:
                fresh.append(row)
                known = (row, length)
            elif known[0] != row:
                moves.append((known[0], row))
            followed[key] = (row, known[1])
        self.cache.move(moves, 0)
        move_rows((self._begin, self._first, self._hidden), moves)
        if fresh:
            index = torch.tensor(fresh, device=self.device)
            newest = rows.fields["length"][index] - 1
            self._begin[index] = newest
            self._first[index] = newest
        spare = ahead + self._width + _BEHIND
        wanted = [length - begin + spare for length, (_, begin) in zip(lengths, followed.values())]
        held = self.cache.hold([min(rows.capacity, length) for length in wanted])
        self._followed = {key: place for key, place in followed.items() if held[place[0]]}
        return 0

    # --- a pass ---------------------------------------------------------------------------------------------

    def propose(self, rows: DecodeRows, count: int, num_tokens: int, used: Features, longest: int) -> Tensor:
        index = torch.arange(count, device=self.device)
        length = rows.fields["length"][:count]
        # Hidden states at tokens that were kept and have a next token; a row without any drafts nothing yet.
        usable = length - 1 - self._first[:count]
        ready = self.cache.followed[:count] & (usable > 0)
        hidden = self._after_kept(rows, count, longest)[index, (usable - 1).clamp(0, self._width - 1)]
        begin = self._begin[:count]
        drafts = []
        chances = []
        for ahead in range(num_tokens):
            logits = self._head.logits(hidden[:, None])[:, -1]
            token, chance = self.draw(rows, length + ahead, logits, used, longest, ready)
            drafts.append(token)
            chances.append(chance)
            if ahead + 1 < num_tokens:
                place = self._places(length - 1 + ahead - begin)
                step = Decode(self.cache, index, place, [(0, count, longest)])
                hidden = self._head(token.clamp(min=0)[:, None], hidden[:, None], place[:, None], step)[:, -1]
        self._chances = torch.stack(chances, 1)
        self._listens = True
        return torch.stack(drafts, 1)

    def _after_kept(self, rows: DecodeRows, count: int, longest: int) -> Tensor:
        """The head's hidden states [count, width, size] behind those of the policy's last pass. Those behind
        tokens that were not kept are not used, and their keys and values are written again."""
        index = torch.arange(count * self._width, device=self.device) // self._width
        across = torch.arange(count * self._width, device=self.device) % self._width
        position = self._first[index] + across
        ids = rows.fields["tokens"][index, (position + 1).clamp(max=rows.capacity)]
        place = self._places(position - self._begin[index])
        step = AheadDecode(self.cache, index, place, self._width, longest)
        hidden: Tensor = self._head(
            ids[:, None], self._hidden[:count].flatten(0, 1)[:, None], place[:, None], step
        )
        return hidden[:, 0].unflatten(0, (count, self._width))

    def _places(self, places: Tensor) -> Tensor:
        return places.clamp(0, self.cache.capacity - 1)

    def sample(
        self, rows: DecodeRows, index: Tensor, drafts: Tensor, logits: Tensor, used: Features, longest: int
    ) -> SampledTokens:
        count, ahead = len(drafts), drafts.shape[1] + 1
        assert self._heard is not None
        self._hidden[:count, :ahead] = self._heard.reshape(count, ahead, -1).to(self._hidden.dtype)
        self._first[:count] = rows.fields["length"][:count] - 1
        self._heard = None
        self._listens = False
        return super().sample(rows, index, drafts, logits, used, longest)
