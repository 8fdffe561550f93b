"""What travels through a run: prompts, trajectories, batches. Tokens are the only currency; text is made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, rendered.

    Example: Prompt(index=7, ids=[1, 4093, 198], messages=[{"role": "user", "content": "2+2?"}], data_source="arithmetic",
    ground_truth="4")
    """

    index: int
    """Row number in the data set; the same prompt keeps it over epochs and runs."""
    ids: list[int]
    """Tokens of the rendered prompt, generation prefix included."""
    messages: list[dict[str, Any]]
    """The conversation before the first answer, as role and content."""
    data_source: str
    """Chooses the scorer, and groups validation metrics."""
    ground_truth: Any = None
    """What the scorer compares with."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Handed to the scorer, tools and interactions as it is."""
    agent_name: str | None = None
    """Which agent loop answers; None: the configured default."""
    images: list[Any] = field(default_factory=list)
    """Images in the order of their placeholders."""


@dataclass(frozen=True)
class Turn:
    """One turn after the prompt: who wrote `response[start:end]`."""

    role: str
    """assistant where the policy sampled it; else what the environment is called: tool, user ..."""
    start: int
    end: int


class TokenArrays(NamedTuple):
    """The tokens of one or many trajectories, in the precision of a batch: what is made of all of them is made of arrays."""

    response: np.ndarray
    mask: np.ndarray
    log_probs: np.ndarray

    @staticmethod
    def of(response: Sequence[int], mask: Sequence[int], log_probs: Sequence[float]) -> TokenArrays:
        import numpy as np

        return TokenArrays(np.array(response, np.int32), np.array(mask, np.int8), np.array(log_probs, np.float32))


@dataclass
class Trajectory:
    """One answer to a prompt: everything that stands after the prompt, token by token.

    Example (a tool was called once): response=[9, 4, 2, 77, 78, 5, 2], mask=[1, 1, 1, 0, 0, 1, 1]
    """

    prompt: Prompt
    group: int
    """Which prompt of the step it answers; samples of one prompt share the number."""
    response: list[int]
    """Tokens after the prompt, tool and user turns included."""
    mask: list[int]
    """1 where the policy sampled the token, 0 where the environment wrote it."""
    log_probs: list[float]
    """The engine's log-prob of each sampled token at the sampling temperature; 0.0 where mask is 0."""
    finish: str = "stop"
    """stop | length | abort | error."""
    version: int = 0
    """Version of the weights that sampled it (the newest, if they changed on the way)."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Where weights changed on the way: (version, tokens it sampled), in order. Empty: all of them by `version`."""
    num_turns: int = 2
    """Turns of the conversation, the prompt's included."""
    score: float | None = None
    """The outcome reward; None when its scorer failed, which masks the trajectory."""
    baseline: float | None = None
    """Score of the greedy answer to the same prompt, where an estimator wants it."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """Rewards inside the response: position of the token -> reward."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Whatever the scorer or the agent loop reported beside the score."""
    turns: list[Turn] = field(default_factory=list)
    """The turns that make up the response, in order. Empty: one turn of the assistant."""

    @property
    def reward(self) -> float | None:
        """Everything it earned, on the way and at the end; None when it could not be scored."""
        return None if self.score is None else self.score + sum(self.turn_rewards.values())

    @property
    def sampled(self) -> int:
        """How many tokens the policy wrote."""
        return sum(self.mask)

    @property
    def arrays(self) -> TokenArrays:
        return TokenArrays.of(self.response, self.mask, self.log_probs)

    def __post_init__(self) -> None:
        assert len(self.response) == len(self.mask) == len(self.log_probs), (
            len(self.response),
            len(self.mask),
            len(self.log_probs),
        )


# Roles of a Batch's fields decide how they are cut, joined and padded.
TOKENS, ROWS, LISTS = "tokens", "rows", "lists"


def tokens() -> Any:
    """[B, T]: one value per response token, zero-padded on the right to the longest response."""
    return field(default=None, metadata={"role": TOKENS})


def rows() -> Any:
    """[B]: one value per sequence."""
    return field(default=None, metadata={"role": ROWS})


@dataclass
class Batch:
    """B sequences as the trainer sees them. A field that nobody needed stays None.

    Response-aligned fields are [B, T], T the longest response: column t speaks of the t-th response token, and its log-prob or
    value comes from the state *before* that token.
    """

    sequences: list[Tensor] = field(metadata={"role": LISTS})
    """B tensors of token ids: prompt, then response; no padding."""
    prompt_lengths: Tensor = field(metadata={"role": ROWS})
    """Tokens of each prompt."""
    mask: Tensor = field(metadata={"role": TOKENS})
    """1 on tokens that are trained."""
    groups: Tensor = rows()
    """Which prompt each sequence answers."""
    rollout_log_probs: Tensor | None = tokens()
    """Log-probs the engine reported."""
    old_log_probs: Tensor | None = tokens()
    """Log-probs under the weights the step began with."""
    ref_log_probs: Tensor | None = tokens()
    """Log-probs under the reference."""
    entropy: Tensor | None = tokens()
    """Entropy under the weights the step began with."""
    sum_pi_squared: Tensor | None = tokens()
    """Sum of squared probabilities under those weights."""
    values: Tensor | None = tokens()
    """The critic's values."""
    scores: Tensor | None = tokens()
    """Rewards before any KL penalty, on the tokens they belong to."""
    rewards: Tensor | None = tokens()
    """Rewards after it."""
    advantages: Tensor | None = tokens()
    """Advantages."""
    returns: Tensor | None = tokens()
    """What the critic is fitted to."""
    rollout_weights: Tensor | None = tokens()
    """Importance weights of rollout correction."""
    baselines: Tensor | None = rows()
    """Score of the greedy answer to the same prompt."""
    row_ids: Tensor | None = rows()
    """Position in the step's first order, kept over reordering."""

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def response_lengths(self) -> Tensor:
        import torch

        return torch.tensor(self.lengths) - self.prompt_lengths.cpu()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, prompt included."""
        return [sequence.shape[0] for sequence in self.sequences]

    def select(self, indices: Sequence[int] | Tensor) -> Batch:
        """The rows at `indices`, in that order; columns that then hold only padding are cut away."""
        import torch

        index = torch.as_tensor(indices, dtype=torch.long)
        picked = index.tolist()
        width = int(self.response_lengths[index.cpu()].max()) if picked else 0
        changed: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value is None:
                continue
            if f.metadata["role"] == LISTS:
                changed[f.name] = [value[i] for i in picked]
            else:
                chosen = value[index.to(value.device)]
                changed[f.name] = chosen[:, :width] if f.metadata["role"] == TOKENS else chosen
        return dataclasses.replace(self, **changed)

    def split(self, size: int) -> list[Batch]:
        """Consecutive pieces of at most `size` rows."""
        return [self.select(range(i, min(i + size, len(self)))) for i in range(0, len(self), size)]

    @staticmethod
    def concat(pieces: Sequence[Batch]) -> Batch:
        """Pieces one after the other; a field must be there in all of them or in none."""
        import torch

        width = max(piece.mask.shape[1] for piece in pieces)
        joined: dict[str, Any] = {}
        for f in dataclasses.fields(Batch):
            values = [getattr(piece, f.name) for piece in pieces]
            there = [value is not None for value in values]
            if not any(there):
                continue
            assert all(there), f"{f.name} is missing in some of the {len(pieces)} pieces"
            if f.metadata["role"] == LISTS:
                joined[f.name] = [item for value in values for item in value]
            elif f.metadata["role"] == TOKENS:
                joined[f.name] = torch.cat([pad_columns(value, width) for value in values])
            else:
                joined[f.name] = torch.cat(values)
        return Batch(**joined)

    def replace(self, **changes: Any) -> Batch:
        return dataclasses.replace(self, **changes)


def pad_columns(values: Tensor, width: int) -> Tensor:
    """`values` [B, t] with zero columns added on the right up to `width`."""
    from torch.nn.functional import pad

    return pad(values, (0, width - values.shape[1])) if values.shape[1] < width else values


def rows_of(rows: Sequence[Sequence[float] | np.ndarray], width: int) -> Tensor:
    """Rows of numbers as [B, width] float32, with zeros behind the end of each."""
    import numpy as np
    import torch

    table = np.zeros((len(rows), width), dtype=np.float32)
    for row, values in zip(table, rows):
        row[: len(values)] = values
    return torch.from_numpy(table)


def batch_of(trajectories: Sequence[Trajectory]) -> Batch:
    """Trajectories as tensors. The score stands on the last response token; failed ones (no score) are masked out whole."""
    import numpy as np
    import torch

    arrays = [t.arrays for t in trajectories]
    lengths = [len(one.mask) for one in arrays]
    width = max(lengths, default=0)
    scores = np.zeros((len(trajectories), width), dtype=np.float32)
    for row, t, length in zip(scores, trajectories, lengths):
        earned = {length - 1: t.score} if t.score is not None and length else {}
        for position, reward in t.turn_rewards.items():
            earned[position] = earned.get(position, 0.0) + reward
        for position, reward in earned.items():
            row[position] = reward
    failed = torch.tensor([t.score is None for t in trajectories])
    groups = torch.tensor([t.group for t in trajectories])
    # A failed sample is nobody's peer: alone in a group, its missing score moves no baseline.
    groups[failed] = -1 - torch.arange(int(failed.sum()))
    mask = rows_of([one.mask for one in arrays], width)
    mask[failed] = 0.0
    baselines = [t.baseline for t in trajectories]
    prompts = {id(t.prompt): t.prompt for t in trajectories}
    asked = {key: np.array(prompt.ids, dtype=np.int64) for key, prompt in prompts.items()}
    whole = [np.concatenate([asked[id(t.prompt)], one.response], dtype=np.int64) for t, one in zip(trajectories, arrays)]
    return Batch(
        baselines=None if None in baselines else torch.tensor(baselines),
        sequences=[torch.from_numpy(sequence) for sequence in whole],
        prompt_lengths=torch.tensor([len(t.prompt.ids) for t in trajectories]),
        mask=mask,
        groups=groups,
        rollout_log_probs=rows_of([one.log_probs for one in arrays], width),
        scores=torch.from_numpy(scores),
        row_ids=torch.arange(len(trajectories)),
    )
