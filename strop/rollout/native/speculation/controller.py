"""Decides how many tokens are drafted: measured seconds of a pass against measured kept tokens."""

from __future__ import annotations

from collections.abc import Sequence

from strop.config.schema.rollout import SpeculationConfig

_MANY_TOKENS = 256
"""Tokens of one pass up to which as many are drafted as the settings allow; with more, half of them."""
_PRIOR = 0.6
"""Share of drafts that is kept, as long as nothing was measured."""
_PRIOR_ROWS = 32.0
"""Row passes that the prior counts for."""
_DECAY = 0.95
"""What an earlier measurement counts for after the next one."""
_MIN_GAIN = 1.03
"""Speculation must be this much faster."""
_LONGEST = 15
"""Drafts of a row and pass where nearly all are kept."""
_NEARLY_ALL = 0.75
"""Share of the drafts that must be kept before longer ones are tried."""
_PROBE = 48
"""Measurements after which the other way is measured again."""


class Acceptance:
    """How many tokens of a row a pass keeps, by recent measurements."""

    def __init__(self, num_tokens: int) -> None:
        self._tries = [_PRIOR_ROWS] * num_tokens
        self._kept = [_PRIOR_ROWS * _PRIOR ** (i + 1) for i in range(num_tokens)]

    def update(self, kept: Sequence[int]) -> None:
        """kept[i]: row passes that kept more than i tokens; kept[0] are all row passes."""
        for i in range(len(kept) - 1):
            self._tries[i] = self._tries[i] * _DECAY + kept[0]
            self._kept[i] = self._kept[i] * _DECAY + kept[i + 1]

    def tokens_per_pass(self, num_tokens: int) -> float:
        """Tokens that a row gains by a pass with so many drafts."""
        return 1.0 + sum(self._kept[i] / self._tries[i] for i in range(num_tokens))


class Controller:
    def __init__(self, settings: SpeculationConfig, *, adaptive: bool) -> None:
        """`adaptive`: only where it pays; otherwise always, up to `max_rows` rows."""
        self._settings = settings
        self._adaptive = adaptive
        self._seconds: dict[tuple[int, int], float] = {}
        """Of a pass, by number of rows (a power of two) and of drafts."""
        self._acceptance = {known: Acceptance(self.most_drafts) for known in (False, True)}
        self._speculates = False
        self._since_probe = 0
        self._probing = False

    @property
    def most_drafts(self) -> int:
        """The most that `num_drafts` asks for."""
        if not self._adaptive:
            return self._settings.num_tokens
        return max(self._settings.num_tokens, min(_LONGEST, 2 * self._settings.num_tokens + 1))

    def _drafts_for(self, rows: int, known: bool) -> int:
        """Half of num_tokens where a pass has many tokens, about twice as many where nearly all are kept."""
        drafts = self._settings.num_tokens
        if rows * (drafts + 1) > _MANY_TOKENS:
            return max(1, drafts // 2)
        longer = self.most_drafts
        kept = self._acceptance[known].tokens_per_pass(drafts) - 1
        if rows * (longer + 1) <= _MANY_TOKENS and kept >= _NEARLY_ALL * drafts:
            return longer
        return drafts

    def num_drafts(self, rows: int, *, known: bool) -> int:
        """Drafts for each of so many rows in the coming passes, 0: none. `known`: most of them have earlier
        answers to guess from."""
        settings = self._settings
        self._probing = False
        if not 0 < rows <= settings.max_rows:
            return 0
        if not self._adaptive:
            return settings.num_tokens
        drafts = self._drafts_for(rows, known)
        plain = self._seconds_of(rows, 0)
        with_drafts = self._seconds_of(rows, drafts)
        if plain is None:
            # Where there are earlier answers, drafts are likely to pay: an ordinary pass is measured later.
            return drafts if known and with_drafts is None else 0
        if with_drafts is None:
            return drafts
        gain = self._acceptance[known].tokens_per_pass(drafts) * plain / with_drafts
        self._speculates = gain >= _MIN_GAIN
        self._since_probe += 1
        if self._since_probe >= _PROBE:
            self._since_probe = 0
            self._probing = True
            return 0 if self._speculates else drafts
        return drafts if self._speculates else 0

    @property
    def probing(self) -> bool:
        """The coming passes are made to measure the way that seems slower: few are enough."""
        return self._probing

    def measured(self, rows: int, drafts: int, seconds_per_pass: float) -> None:
        """A pass of so many rows and drafts took so long."""
        key = (_power_of_two(rows), drafts)
        before = self._seconds.get(key, seconds_per_pass)
        self._seconds[key] = (before + seconds_per_pass) / 2

    def kept(self, known: bool, counts: Sequence[int]) -> None:
        """See Acceptance.update."""
        self._acceptance[known].update(counts)

    def _seconds_of(self, rows: int, drafts: int) -> float | None:
        """Measured with as many rows, or with the next larger number that was measured."""
        least = _power_of_two(rows)
        larger = [size for size, number in self._seconds if number == drafts and size >= least]
        if not larger:
            return None
        return self._seconds[min(larger), drafts]


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
