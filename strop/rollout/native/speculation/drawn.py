"""Drafts that are drawn from a distribution: what a draft model and a prediction head have in common.

Each draft is drawn with the sampling settings of its row. One pass of the policy then keeps or replaces
drafts by the rejection rule (`verify.checked`), so that what is kept has the distribution of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from strop.config.schema.rollout import SpeculationConfig
from strop.rollout.native.decode_rows import DecodeRows, Features
from strop.rollout.native.requests import ScheduledSample
from strop.rollout.native.sampler import SampledTokens, drawn, probabilities, uniforms
from strop.rollout.native.speculation.draft_cache import DraftCache
from strop.rollout.native.speculation.drafts import Drafts
from strop.rollout.native.speculation.propose import NO_TOKEN
from strop.rollout.native.speculation.verify import checked

_DRAFT_STREAM = 0x5DEECE66D1CE4E5B
"""Drafts are drawn from other random numbers than the tokens of the policy."""

SampleKey = tuple[int, int]
"""Request and index of a sample."""


class DrawnDrafts(Drafts):
    def __init__(self, settings: SpeculationConfig, cache: DraftCache, num_weights_bytes: int) -> None:
        self.cache = cache
        self._num_weights_bytes = num_weights_bytes
        self._chances = torch.empty(0)
        """The distributions [rows, drafts, vocabulary] that the last drafts were drawn from."""
        self._in_step = False
        """The cache has the tokens of all passes since `set_rows`."""
        super().__init__(settings, cache.device)

    @property
    def max_rows(self) -> int:
        """Rows of the cache: recorded passes have at most so many."""
        return 1 << (self.settings.max_rows - 1).bit_length()

    def claim(self, size: int, per_token: int, longest: int) -> int:
        most = self.settings.max_rows * longest
        own = self.cache.limit(size - self._num_weights_bytes, per_token, most)
        return self._num_weights_bytes + own

    def before_resize(self, call: Callable[[], None]) -> None:
        self.cache.before_resize = call

    def free(self) -> None:
        super().free()
        self.cache.free()
        self._in_step = False

    def num_known(self, samples: Sequence[ScheduledSample]) -> int:
        return len(samples)

    def passed_by(self) -> None:
        self._in_step = False

    def draw(
        self, rows: DecodeRows, place: Tensor, logits: Tensor, used: Features, longest: int, ready: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The drafts at `place` of the first rows, and the distributions that they are drawn from. They are
        put behind the tokens of the rows. `ready`: rows that have one."""
        fields = rows.fields
        count = len(place)
        index = torch.arange(count, device=self.device)
        column = place.clamp(max=rows.capacity)
        chance = probabilities(logits, *rows.settings(index, place, logits, used, longest))
        token = drawn(chance, uniforms(fields["stream"][:count] ^ _DRAFT_STREAM, place))
        # The given tokens of a prefill by decode steps are certain.
        token = torch.where(place < fields["num_known"][:count], fields["tokens"][index, column], token)
        has_room = place + 2 <= rows.capacity  # two tokens: it and the next
        token = torch.where(has_room & ready, token, NO_TOKEN)
        fields["tokens"][index, column] = torch.where(
            ready, token.clamp(min=0), fields["tokens"][index, column]
        )
        return token, chance

    def sample(
        self, rows: DecodeRows, index: Tensor, drafts: Tensor, logits: Tensor, used: Features, longest: int
    ) -> SampledTokens:
        return checked(rows, index, logits, used, longest, drafts, self._chances)
