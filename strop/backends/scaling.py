"""Loss scaling for float16: three more bits than bfloat16 in every number, but nothing below 6e-8 nor above 65,504.

The loss is multiplied by a power of two before the backward pass and gradients are divided by it afterwards, which is exact. It
halves until gradients are finite, and doubles after many updates without trouble.
"""

from __future__ import annotations

_FIRST = 2.0**16
_MOST = 2.0**24
_PATIENCE = 100
"""Updates without trouble after which the scale doubles."""


class LossScale:
    def __init__(self, value: float = _FIRST) -> None:
        self.value = value
        self.quiet = 0
        """Updates since it last changed."""

    def shrink(self) -> bool:
        """After gradients that are not finite; False when they were not scaled any more, so it is not the scale's fault."""
        if self.value <= 1:
            return False
        self.value, self.quiet = max(1.0, self.value / 2), 0
        return True

    def stepped(self) -> None:
        self.quiet += 1
        if self.quiet >= _PATIENCE and self.value < _MOST:
            self.value, self.quiet = self.value * 2, 0

    def state(self) -> dict[str, float | int]:
        return {"value": self.value, "quiet": self.quiet}

    def load(self, state: dict[str, float | int]) -> None:
        self.value, self.quiet = float(state["value"]), int(state["quiet"])
