"""What a scorer is told about a trajectory: text made of its tokens, the truth, and what else is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from strop.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sample:
    """One response to score."""

    trajectory: Trajectory
    solution_str: str
    """What the policy said, without special tokens."""
    extra_info: dict[str, Any]
    """The row's own, what the agent loop reported, num_turns and turn_scores; a copy, so a scorer may write in it."""

    @property
    def data_source(self) -> str:
        return self.trajectory.prompt.data_source

    @property
    def ground_truth(self) -> Any:
        return self.trajectory.prompt.ground_truth

    @property
    def index(self) -> int:
        """Row number in the data set."""
        return self.trajectory.prompt.index


def read_samples(
    trajectories: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase, *, whole_transcript: bool = False
) -> list[Sample]:
    """Samples in the order of `trajectories`.

    The text holds only what the policy sampled, its turns on lines of their own: an answer that a tool or a user wrote must not
    earn a reward. `whole_transcript` takes every token after the prompt, as verl does.
    """
    texts = response_texts(trajectories, tokenizer, whole_transcript=whole_transcript)
    return [Sample(trajectory, text, _extra_info(trajectory)) for trajectory, text in zip(trajectories, texts, strict=True)]


def response_texts(
    trajectories: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase, *, whole_transcript: bool
) -> list[str]:
    turns = [[t.response] if whole_transcript else _sampled_turns(t) for t in trajectories]
    decoded = iter(tokenizer.batch_decode([ids for of_one in turns for ids in of_one], skip_special_tokens=True))
    eos = str(tokenizer.eos_token or "")
    return ["\n".join(_without_end(next(decoded), eos) for _ in of_one) for of_one in turns]


def _sampled_turns(trajectory: Trajectory) -> list[list[int]]:
    """The runs of tokens with mask 1."""
    if all(trajectory.mask):
        return [trajectory.response]
    runs = groupby(zip(trajectory.mask, trajectory.response), key=lambda pair: pair[0])
    return [[token for _, token in run] for sampled, run in runs if sampled]


def _without_end(text: str, eos: str) -> str:
    """Some tokenizers do not mark their end-of-text token as special."""
    return text.removesuffix(eos) if eos else text


def _extra_info(trajectory: Trajectory) -> dict[str, Any]:
    rewards = trajectory.turn_rewards
    return {
        **trajectory.prompt.extra_info,
        **trajectory.extras,
        "num_turns": trajectory.num_turns,
        "turn_scores": [rewards[position] for position in sorted(rewards)],
    }
