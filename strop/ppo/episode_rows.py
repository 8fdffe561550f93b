"""Episodes of several sequences: an agent that rewrites its context leaves a tree of conversations.

Until it is scored, an episode is one trajectory with `branches`. Then every sequence is a row of the batch,
and rows of one episode have the same number (`Batch.episodes`). Each sampled token is trained in exactly one
row.

Credit. The score belongs to the episode. Estimators that compare the samples of a prompt (grpo, rloo ...) see
each episode once, with the sum of its rewards, and all its rows get its advantage:

    shared   every row has the advantage of the episode
    split    every row has that advantage divided by the number of rows
    last     only the row with the last answer is trained

Estimators that work token by token (gae, reinforce ...) see each row by itself. Its last token has the score
of the episode, and the rewards of its turns are on their last tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strop.types import Batch, Trajectory


def rows_of_episodes(trajectories: Sequence[Trajectory], credit: str) -> list[Trajectory]:
    """All sequences of scored episodes, in order; the one with the score comes first in its episode."""
    rows: list[Trajectory] = []
    several = credit != "last" and any(t.branches for t in trajectories)
    for number, head in enumerate(trajectories):
        branches = head.branches
        head.branches = []
        rows.append(head)
        if not several:
            continue
        head.episode = number
        for branch in branches:
            branch.episode = number
            branch.score = head.score
            branch.baseline = head.baseline
            branch.extras = {**head.extras, **branch.extras}
            rows.append(branch)
    return rows


def first_rows(episodes: Tensor) -> Tensor:
    """The first row of each episode, in order."""
    new = torch.ones(len(episodes), dtype=torch.bool)
    new[1:] = episodes[1:] != episodes[:-1]
    return new.nonzero()[:, 0]


def rows_by_episode(episodes: Tensor) -> list[list[int]]:
    """The rows of each episode."""
    found: dict[int, list[int]] = {}
    for row, episode in enumerate(episodes.tolist()):
        found.setdefault(episode, []).append(row)
    return list(found.values())


def owners(episodes: Tensor) -> Tensor:
    """For each row, the place of its episode among the first rows."""
    return torch.unique_consecutive(episodes, return_inverse=True)[1]


def added_rewards(rewards: Tensor, episodes: Tensor, trajectories: Sequence[Trajectory]) -> Tensor:
    """For the first row of each episode, the sum of the rewards of its other rows, without the score, which
    every row has; 0 for the other rows. `rewards`: one sum per row."""
    heads = first_rows(episodes)
    scores = torch.tensor([t.score or 0.0 for t in trajectories], dtype=torch.float64)
    more = rewards.double() - scores
    more[heads] = 0.0
    added = torch.zeros(len(episodes), dtype=torch.float64)
    return added.index_add_(0, heads[owners(episodes)], more)


def rewards_by_episode(batch: Batch, trajectories: Sequence[Trajectory]) -> Batch:
    """The first row of each episode; its last token also has the rewards of the other rows."""
    assert batch.episodes is not None and batch.rewards is not None
    heads = first_rows(batch.episodes)
    added = added_rewards(batch.rewards.sum(-1), batch.episodes, trajectories)[heads]
    first = batch.select(heads)
    assert first.rewards is not None
    rewards = first.rewards.clone()
    last = (first.response_lengths - 1).clamp(min=0)
    rewards[torch.arange(len(heads)), last] += added.to(rewards.dtype)
    return first.replace(rewards=rewards, episodes=None)


def of_all_rows(values: Tensor, episodes: Tensor, credit: str) -> Tensor:
    """From one advantage per episode to one per row."""
    place = owners(episodes)
    if credit == "split":
        values = values / torch.bincount(place)
    return values[place]


def spread_over_rows(values: Tensor, mask: Tensor, batch: Batch, credit: str) -> Tensor:
    """The advantage of each episode for all tokens that its rows train. `values`: per token of the first
    rows, whose mean over `mask` it is."""
    assert batch.episodes is not None
    of_episode = (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return of_all_rows(of_episode, batch.episodes, credit)[:, None] * batch.mask
