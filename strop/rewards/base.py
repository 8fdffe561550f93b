"""The input and the output of every scorer: `RewardSample` (one response to score) and `Verdict` (its score).

`build_samples` decodes trajectories to samples; `parse_verdict` checks what a scorer returned.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from strop.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SHOWN = 60  # characters of a wrong value in an error message


@dataclass(frozen=True)
class RewardSample:
    """One response to score."""

    trajectory: Trajectory
    solution_str: str
    """Text that the policy generated, without special tokens."""
    extra_info: dict[str, object]
    """The extra_info of the data row, the extras of the agent loop, num_turns and turn_scores."""

    @property
    def data_source(self) -> str:
        return self.trajectory.prompt.data_source

    @property
    def ground_truth(self) -> object:
        return self.trajectory.prompt.ground_truth

    @property
    def index(self) -> int:
        """Row number in the data set."""
        return self.trajectory.prompt.index


def build_samples(
    trajectories: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase, *, whole_transcript: bool = False
) -> list[RewardSample]:
    """Return one sample per trajectory, in the same order.

    The text holds only tokens that the policy sampled, one line per turn: text written by a tool or a user
    must not earn a reward. `whole_transcript` decodes every token after the prompt, as verl does.
    """
    texts = response_texts(trajectories, tokenizer, whole_transcript=whole_transcript)
    samples = []
    for trajectory, text in zip(trajectories, texts, strict=True):
        samples.append(RewardSample(trajectory, text, _extra_info(trajectory)))
    return samples


def response_texts(
    trajectories: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase, *, whole_transcript: bool
) -> list[str]:
    """Return the decoded response of each trajectory; all turns go through one call of the tokenizer."""
    turns_of_each: list[list[list[int]]] = []
    all_turns: list[list[int]] = []
    for trajectory in trajectories:
        turns = [trajectory.response]
        if not whole_transcript:
            turns = _sampled_turns(trajectory)
        turns_of_each.append(turns)
        all_turns += turns
    decoded = iter(tokenizer.batch_decode(all_turns, skip_special_tokens=True))
    eos = str(tokenizer.eos_token or "")
    texts = []
    for turns in turns_of_each:
        # Some tokenizers do not mark their EOS token as special, so it is still in the text.
        texts.append("\n".join(next(decoded).removesuffix(eos) for _ in turns))
    return texts


def _sampled_turns(trajectory: Trajectory) -> list[list[int]]:
    """Return the runs of tokens with mask 1."""
    if all(trajectory.mask):
        return [trajectory.response]
    turns = []
    for sampled, run in groupby(zip(trajectory.mask, trajectory.response), key=lambda pair: pair[0]):
        if sampled:
            turns.append([token for _, token in run])
    return turns


def _extra_info(trajectory: Trajectory) -> dict[str, object]:
    rewards = trajectory.turn_rewards
    return {
        **trajectory.prompt.extra_info,
        **trajectory.extras,
        "num_turns": trajectory.num_turns,
        "turn_scores": [rewards[position] for position in sorted(rewards)],
    }


@dataclass(frozen=True)
class Verdict:
    """A checked result of a scorer: a finite score and plain Python values."""

    score: float
    extras: dict[str, object] = field(default_factory=dict)
    """Every key of a returned dict, `score` included; empty if the scorer returned a number."""


def unpenalized_score(trajectory: Trajectory) -> float | None:
    """The score before penalties for the length of the response; None if the scorer failed."""
    if trajectory.score is None or trajectory.unpenalized is None:
        return trajectory.score
    return trajectory.unpenalized


def parse_verdict(value: object) -> Verdict:
    """Read a number (also a bool or a numpy scalar) or a dict with `score`; ValueError for anything else.

    >>> parse_verdict({"score": True, "format": 0.5})
    Verdict(score=1.0, extras={'score': 1.0, 'format': 0.5})
    """
    if not isinstance(value, Mapping):
        return Verdict(_finite(value))
    if "score" not in value:
        keys = ", ".join(map(str, value)) or "nothing"
        raise ValueError(f"The scorer returned a dict without 'score', only {keys}.")
    score = _finite(value["score"])
    extras = {str(name): plain_value(item) for name, item in value.items()}
    extras["score"] = score
    return Verdict(score, extras)


def plain_value(value: object) -> object:
    """Return a numpy or torch scalar as a Python number, an array as lists, and an integer that no float can
    hold as infinity; other values unchanged."""
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return value.tolist()
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return math.inf if value > 0 else -math.inf
    return value


def _finite(value: object) -> float:
    number = plain_value(value)
    if isinstance(number, list) and len(number) == 1 and number is not value:
        number = number[0]  # an array or tensor with one element
    if not isinstance(number, numbers.Real):
        raise ValueError(
            f"The scorer returned {_shortened(value)} of type {type(value).__name__}; it must return a "
            "number or a dict with 'score'."
        )
    try:
        score = float(number)
    except OverflowError:  # a fraction that no float can hold
        score = math.inf
    if not math.isfinite(score):
        raise ValueError(f"The scorer returned {score}, which is not a finite number.")
    return score


def _shortened(value: object) -> str:
    text = repr(value)
    if len(text) <= MAX_SHOWN:
        return text
    return text[: MAX_SHOWN - 3] + "..."
