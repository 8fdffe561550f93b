"""The order in which the prompts of a step are given to the engine (rollout.admission_order).

Rows whose responses were long in earlier epochs start first. If a step has more samples than the engine can
run concurrently, a long response that starts last would run alone at the end. Each sample has its own random
stream, so the order does not change what is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from strop.data.loader import PromptLoader
from strop.types import Prompt, Trajectory

T = TypeVar("T")


@dataclass
class AnswerLengths:
    """The mean length of the answers to each row, when it was last trained on."""

    by_row: dict[int, float] = field(default_factory=dict)

    def longest_first(self, items: Sequence[T], prompt_of: Callable[[T], Prompt]) -> list[T]:
        """Items by falling length of earlier answers. Rows without any come where the mean row would be;
        among equals the order stays."""
        if not self.by_row:
            return list(items)
        typical = sum(self.by_row.values()) / len(self.by_row)
        return sorted(items, key=lambda item: -self.by_row.get(prompt_of(item).index, typical))

    def record(self, trajectories: Iterable[Trajectory]) -> None:
        """Remember the answers of a step."""
        tokens: dict[int, int] = {}
        samples: dict[int, int] = {}
        for t in trajectories:
            row = t.prompt.index
            tokens[row] = tokens.get(row, 0) + len(t.response)
            samples[row] = samples.get(row, 0) + 1
        for row, total in tokens.items():
            self.by_row[row] = total / samples[row]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {
            "rows": torch.tensor(list(self.by_row.keys()), dtype=torch.int64),
            "lengths": torch.tensor(list(self.by_row.values()), dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.by_row = dict(zip(state["rows"].tolist(), state["lengths"].tolist()))


@dataclass
class LengthRecorder:
    """A loader that also records how long the answers to its rows were; its state has the lengths."""

    loader: PromptLoader
    lengths: AnswerLengths

    @property
    def epoch(self) -> int:
        return self.loader.epoch

    def draw(self) -> list[Prompt]:
        return self.loader.draw()

    def update(self, trajectories: list[Trajectory]) -> None:
        self.lengths.record(trajectories)
        self.loader.update(trajectories)

    def state_dict(self) -> dict[str, Any]:
        return {**self.loader.state_dict(), "answer_lengths": self.lengths.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "answer_lengths" in state:
            self.lengths.load_state_dict(state["answer_lengths"])
        self.loader.load_state_dict(state)

    def close(self) -> None:
        self.loader.close()
