"""The parts of a training loop that belong into a checkpoint, apart from its models."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

from strop.run.checkpoint.contents import capture_random_states
from strop.run.checkpoint.tensor_files import Tree


class Stateful(Protocol):
    """Something with a state that belongs into a checkpoint."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class Loop(Protocol):
    """The parts of a training loop that belong into a checkpoint, apart from its models."""

    step: int

    @property
    def loader(self) -> Stateful: ...


@dataclass(frozen=True)
class LoopState:
    """What changes while a step samples and scores."""

    step: int
    """The last step that is finished."""
    data: Tree
    """State of the loader."""
    random: dict[str, Tree]

    @staticmethod
    def of(loop: Loop, step: int) -> LoopState:
        return LoopState(step, copy.deepcopy(loop.loader.state_dict()), capture_random_states())
