"""Rows drawn before they are trained on."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from strop.data.loader import Loader


@dataclass
class DrawnAhead:
    """A loader whose state is that of its oldest draw that was not used yet.

    What a window holds when a checkpoint is written goes down with the process. A resumed run draws it again, so no row is
    lost and none is trained twice.
    """

    loader: Loader
    _before: deque[dict[str, Any]] = field(default_factory=deque)
    """The state before each draw that is not used yet, oldest first."""

    def draw(self) -> list[Any]:
        self._before.append(copy.deepcopy(self.loader.state_dict()))
        return self.loader.draw()

    def used(self, draws: int) -> None:
        """The oldest `draws` draws are being trained on."""
        for _ in range(draws):
            self._before.popleft()

    @property
    def epoch(self) -> int:
        return int(self._before[0]["epoch"]) if self._before else self.loader.epoch

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._before[0]) if self._before else self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._before.clear()
        self.loader.load_state_dict(state)

    def update(self, batch: Any) -> None:
        self.loader.update(batch)

    def close(self) -> None:
        self.loader.close()
