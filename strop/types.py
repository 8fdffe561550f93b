"""The data types of a run: prompts, trajectories and batches. They hold token ids; text is decoded from them
when it is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class ImageInput:
    """One image or video of a prompt as its model takes it. Samples of a prompt share it by reference."""

    digest: str
    """Hash of the picture and of how it was prepared; images with the same digest have the same features."""
    tensors: Mapping[str, Tensor]
    """What the model's forward takes for this image alone: pixel_values, image_grid_thw ..."""
    num_tokens: int
    """Placeholder tokens in the prompt, each of which is replaced by one vector of features."""
    size: tuple[int, int] = (0, 0)
    """Width and height of the picture in the data, in pixels."""
    token_id: int = -1
    """Of its placeholder tokens."""
    picture: Image | None = None
    """The picture that was prepared, for engines with processors of their own and for the board."""
    options: Mapping[str, int] = field(default_factory=dict)
    """Arguments of the processor: min_pixels, max_pixels."""
    video: bool = False
    """It is a video: `tensors` has the patches of its pairs of frames, `picture` its first frame."""
    grid_seconds: float = 1.0
    """Of a video, the seconds between two pairs of frames."""
    unused: bool = False
    """It has no tokens in its sequence. The vision tower computes it, because other ranks compute theirs."""


Images = tuple[ImageInput, ...]
"""The images of a sequence, in the order of their placeholders, and its videos in the order of theirs."""


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, rendered.

    Example: Prompt(7, [1, 4093, 198], [{"role": "user", "content": "2+2?"}], "arithmetic", ground_truth="4")
    """

    index: int
    """Row number in the data set; it is the same in all epochs and runs."""
    ids: list[int]
    """Tokens of the rendered prompt, generation prefix included."""
    messages: list[dict[str, Any]]
    """The conversation before the first response, as role and content."""
    data_source: str
    """Selects the scorer, and groups validation metrics."""
    ground_truth: Any = None
    """The reference answer of the scorer."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Passed to the scorer, tools and interactions unchanged."""
    columns: dict[str, Any] = field(default_factory=dict)  # see RowFields.columns
    agent_name: str | None = None
    """Name of the agent loop; None: the configured default."""
    images: Images = ()
    """Images in the order of their placeholders."""
    unusable: str = ""
    """Why the row has no prompt: an image of it cannot be read. Its samples are masked and counted."""


@dataclass(frozen=True)
class Turn:
    """One turn after the prompt: the role that wrote `response[start:end]`."""

    role: str
    """assistant if the policy sampled the turn; else the role of the environment: tool, user ..."""
    start: int
    end: int


class TokenArrays(NamedTuple):
    """The tokens of one or more trajectories as numpy arrays, in the precision of a batch."""

    response: np.ndarray
    mask: np.ndarray
    log_probs: np.ndarray

    @staticmethod
    def of(response: Sequence[int], mask: Sequence[int], log_probs: Sequence[float]) -> TokenArrays:
        import numpy as np

        numbers = np.array(log_probs, np.float32)
        return TokenArrays(np.array(response, np.int32), np.array(mask, np.int8), numbers)


@dataclass
class Trajectory:
    """One response to a prompt: all tokens after the prompt.

    Example (a tool was called once): response=[9, 4, 2, 77, 78, 5, 2], mask=[1, 1, 1, 0, 0, 1, 1]
    """

    prompt: Prompt
    group: int
    """Number of the prompt in the step; all samples of one prompt have the same number."""
    response: list[int]
    """Tokens after the prompt, tool and user turns included."""
    mask: list[int]
    """1 where the policy sampled the token, 0 where the environment wrote it."""
    log_probs: list[float]
    """The engine's log-prob of each sampled token at the sampling temperature; 0.0 where mask is 0."""
    finish: str = "stop"
    """stop | length | abort | error."""
    version: int = 0
    """Version of the weights that sampled it (the newest, if the weights changed during sampling)."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens it sampled), in order, if the weights changed meanwhile. Empty: only `version`."""
    num_turns: int = 2
    """Turns of the conversation, including those of the prompt."""
    score: float | None = None
    """The outcome reward; None if the scorer failed, which masks the trajectory."""
    unpenalized: float | None = None  # the score without penalties for the length; None: there are none
    baseline: float | None = None
    """Score of the greedy response to the same prompt, if the estimator needs it."""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """Rewards of single turns: position of the token -> reward."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Further values that the scorer or the agent loop reported."""
    turns: list[Turn] = field(default_factory=list)
    """The turns that make up the response, in order. Empty: one turn of the assistant."""
    branches: list[Trajectory] = field(default_factory=list)
    """Further sequences of the same episode, of an agent that rewrote its context. The score of the episode
    is here; each sampled token is in one of the sequences, and may be in the prompts of others. Once they are
    scored, all of them are trajectories with the same `episode`."""
    player: str = ""
    """In episodes of several players: whose sequence it is. Each player has a score of its own."""
    episode: int | None = None
    """Number of the episode in the step, if episodes have several sequences; else every trajectory is one."""
    sample: int | None = None
    """Number of the sample in the step, if it has several sequences or players."""
    experts: np.ndarray | None = field(default=None, compare=False, repr=False)
    """[tokens, layers, k]: experts that tokens of prompt and response visited in the rollout engine, from the
    first token on (router_replay.mode=R3). The last token is never an input and has none."""

    @property
    def reward(self) -> float | None:
        """The total reward: score and turn rewards; None if the scorer failed."""
        if self.score is None:
            return None
        return self.score + sum(self.turn_rewards.values())

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self.mask)

    @property
    def arrays(self) -> TokenArrays:
        """Response, mask and log-probs as numpy arrays."""
        return TokenArrays.of(self.response, self.mask, self.log_probs)

    def __post_init__(self) -> None:
        lengths = (len(self.response), len(self.mask), len(self.log_probs))
        assert len(set(lengths)) == 1, lengths


# The role of a Batch field says how it is selected, concatenated and padded.
TOKENS, ROWS, LISTS = "tokens", "rows", "lists"


def tokens() -> Any:
    """[B, T], or [B, T, k]: values per response token, zero-padded on the right to the longest response."""
    return field(default=None, metadata={"role": TOKENS})


def rows() -> Any:
    """[B]: one value per sequence."""
    return field(default=None, metadata={"role": ROWS})


@dataclass
class Batch:
    """B sequences as tensors for training. A field that the run does not need is None.

    Response-aligned fields are [B, T], where T is the longest response: column t belongs to the t-th response
    token, and its log-prob or value comes from the state *before* that token.
    """

    sequences: list[Tensor] = field(metadata={"role": LISTS})
    """B tensors of token ids: prompt, then response; no padding."""
    prompt_lengths: Tensor = field(metadata={"role": ROWS})
    """Tokens of each prompt."""
    mask: Tensor = field(metadata={"role": TOKENS})
    """1 on tokens that are trained."""
    groups: Tensor = rows()
    """Number of each sequence's prompt in the step."""
    rollout_log_probs: Tensor | None = tokens()
    """Log-probs that the engine reported."""
    old_log_probs: Tensor | None = tokens()
    """Log-probs under the weights at the start of the step."""
    ref_log_probs: Tensor | None = tokens()
    """Log-probs under the reference model."""
    teacher_log_probs: Tensor | None = tokens()
    """Log-probs under the teacher of a distillation."""
    teacher_top_ids: Tensor | None = tokens()
    """[B, T, k]: the teacher's likeliest tokens at the place of each response token."""
    teacher_top_log_probs: Tensor | None = tokens()
    """[B, T, k]: their log-probs under the teacher."""
    entropy: Tensor | None = tokens()
    """Entropy under the weights at the start of the step."""
    sum_pi_squared: Tensor | None = tokens()
    """Sum of squared probabilities under the weights at the start of the step."""
    values: Tensor | None = tokens()
    """The critic's values."""
    scores: Tensor | None = tokens()
    """Rewards before any KL penalty, on the tokens they belong to."""
    rewards: Tensor | None = tokens()
    """Rewards after the KL penalty."""
    advantages: Tensor | None = tokens()
    """Advantages."""
    returns: Tensor | None = tokens()
    """Targets of the critic."""
    rollout_weights: Tensor | None = tokens()
    """Importance weights of rollout correction."""
    weights: Tensor | None = tokens()
    """Weights of the tokens in a weighted cross entropy."""
    baselines: Tensor | None = rows()
    """Score of the greedy response to the same prompt."""
    row_ids: Tensor | None = rows()
    """Position in the original order of the step; reordering keeps it."""
    episodes: Tensor | None = rows()
    """Number of the episode of each sequence; rows of one episode are neighbours. None: each row is one."""
    samples: Tensor | None = rows()
    """Number of the sample of each sequence: the episodes of all its players. None: each row is one."""
    experts: Tensor | None = rows()
    """[B, longest, layers, k]: numbers of the experts that tokens visited in the rollout engine (R3), or when
    the old log-probs were computed (R2); any behind the end of a sequence."""
    images: list[Images] | None = field(default=None, metadata={"role": LISTS})
    """The images of each sequence; None: none has any."""

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
        """The rows at `indices`, in that order; columns that hold only padding afterwards are removed."""
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

    @staticmethod
    def concat(pieces: Sequence[Batch]) -> Batch:
        """Concatenate batches; a field must be set in all of them or in none."""
        import torch

        width = max(piece.mask.shape[1] for piece in pieces)
        joined: dict[str, Any] = {}
        for f in dataclasses.fields(Batch):
            values = [getattr(piece, f.name) for piece in pieces]
            present = [value is not None for value in values]
            if not any(present):
                continue
            assert all(present), f"{f.name} is missing in some of the {len(pieces)} pieces"
            if f.metadata["role"] == LISTS:
                joined[f.name] = [item for value in values for item in value]
            elif f.metadata["role"] == TOKENS:
                joined[f.name] = torch.cat([pad_columns(value, width) for value in values])
            else:
                joined[f.name] = torch.cat(values)
        return Batch(**joined)

    def replace(self, **changes: Any) -> Batch:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)


def pad_columns(values: Tensor, width: int) -> Tensor:
    """`values` [B, t, ...] with zero columns added on the right up to `width`."""
    from torch.nn.functional import pad

    fill = (0, 0) * (values.dim() - 2) + (0, width - values.shape[1])
    return pad(values, fill) if values.shape[1] < width else values


def rows_of(rows: Sequence[Sequence[float] | np.ndarray], width: int) -> Tensor:
    """Rows of numbers as a [B, width] float32 tensor, zero-padded on the right."""
    import numpy as np
    import torch

    table = np.zeros((len(rows), width), dtype=np.float32)
    for row, values in zip(table, rows):
        row[: len(values)] = values
    return torch.from_numpy(table)


def batch_of(trajectories: Sequence[Trajectory]) -> Batch:
    """Trajectories as tensors. The score is put on the last response token; trajectories without a score are
    masked completely."""
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
    # Each failed sample gets a group of its own, so that its missing score changes no group's baseline.
    groups[failed] = -1 - torch.arange(int(failed.sum()))
    mask = rows_of([one.mask for one in arrays], width)
    mask[failed] = 0.0
    baselines = [t.baseline for t in trajectories]
    episodes = [t.episode for t in trajectories]
    samples = [t.sample for t in trajectories]
    images = [t.prompt.images for t in trajectories]
    prompts = {id(t.prompt): t.prompt for t in trajectories}
    prompt_ids = {key: np.array(prompt.ids, dtype=np.int64) for key, prompt in prompts.items()}
    whole = [
        np.concatenate([prompt_ids[id(t.prompt)], one.response], dtype=np.int64)
        for t, one in zip(trajectories, arrays)
    ]
    return Batch(
        baselines=None if None in baselines else torch.tensor(baselines),
        sequences=[torch.from_numpy(sequence) for sequence in whole],
        prompt_lengths=torch.tensor([len(t.prompt.ids) for t in trajectories]),
        mask=mask,
        groups=groups,
        rollout_log_probs=rows_of([one.log_probs for one in arrays], width),
        scores=torch.from_numpy(scores),
        row_ids=torch.arange(len(trajectories)),
        episodes=None if None in episodes else torch.tensor(episodes),
        samples=None if None in samples else torch.tensor(samples),
        experts=expert_table(trajectories, arrays),
        images=images if any(images) else None,
    )


def expert_table(trajectories: Sequence[Trajectory], arrays: Sequence[TokenArrays]) -> Tensor | None:
    """`Batch.experts` of what the engine recorded; None: nothing. Tokens after the last trained one may have
    no experts: they get the first ones, which changes no log-prob that is trained."""
    import numpy as np
    import torch

    recorded = [t.experts for t in trajectories if t.experts is not None]
    if not recorded:
        return None
    longest = max(len(t.prompt.ids) + len(one.mask) for t, one in zip(trajectories, arrays))
    first = np.arange(recorded[0].shape[2], dtype=recorded[0].dtype)
    table = np.tile(first, (len(trajectories), max(1, longest - 1), recorded[0].shape[1], 1))
    for row, t, one in zip(table, trajectories, arrays):
        known = recorded[0][:0] if t.experts is None else t.experts[: len(row)]
        row[: len(known)] = known
        trained = np.flatnonzero(one.mask)
        if len(trained) and len(known) < len(t.prompt.ids) + trained[-1]:
            which = f"{len(known)} tokens of a sample of row {t.prompt.index}, too few for its trained ones"
            raise ValueError(f"The engine returned the experts of {which}. Set router_replay.mode=R2.")
    return torch.from_numpy(table)


def join_experts(before: np.ndarray | None, after: np.ndarray | None) -> np.ndarray | None:
    """The experts of a sequence in two parts, of which the second has all tokens again: each token keeps the
    experts with which its successor was sampled."""
    import numpy as np

    if before is None or after is None:
        return after if before is None else before
    return np.concatenate([before, after[len(before) :]])
