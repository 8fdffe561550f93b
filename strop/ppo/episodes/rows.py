"""Episodes of several sequences: an agent that rewrites its context leaves a tree of conversations.

Until it is scored, an episode is one trajectory with `branches`. Then every sequence is a row of the batch,
and rows of one episode have the same number (`Batch.episodes`). Each sampled token is trained in exactly one
row.

In an episode with several players, each player has a score. The rows of one player count as a separate
episode, which is compared with the same player in the other episodes of the prompt.

Credit. The score belongs to the episode. Estimators that compare the samples of a prompt (grpo, rloo ...) use
one value per episode, the sum of its rewards, and all its rows get its advantage:

    shared   every row has the advantage of the episode
    split    every row has that advantage divided by the number of rows
    last     only the row with the last answer is trained
    turn     every turn has the advantage of the rewards from this turn on (turn_credit.py)

Token-level estimators (gae, reinforce ...) treat each row separately. Its last token has the score of the
episode, and turn rewards are on the last tokens of their turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strop.types import Batch, Trajectory


def rows_of_episodes(trajectories: Sequence[Trajectory], credit: str) -> list[Trajectory]:
    """All sequences of scored episodes, in order; the one with the score comes first in its episode. What the
    second and further players did are episodes and groups of their own."""
    if not any(t.branches for t in trajectories):
        return list(trajectories)
    rows: list[Trajectory] = []
    episodes = 0
    groups: dict[tuple[int, str], int] = {}
    next_group = 1 + max(t.group for t in trajectories)
    for sample, head in enumerate(trajectories):
        by_player = {head.player: [head]}
        for branch in head.branches:
            by_player.setdefault(branch.player, []).append(branch)
        head.branches = []
        for player, members in by_player.items():
            first = members[0]
            if player != head.player:
                first.group = groups.setdefault((head.group, player), next_group + len(groups))
            if credit == "last":
                members = [first]
            for row in members:
                row.episode = episodes
                row.sample = sample
                row.group = first.group
                row.score = first.score if head.score is not None else None
                row.baseline = head.baseline
                row.extras = {**head.extras, **row.extras}
            rows += members
            episodes += 1
    for row in rows:
        if len(rows) == episodes:  # each episode has one sequence
            row.episode = None
        if len(rows) == len(trajectories):
            row.sample = None
    return rows


def first_rows(episodes: Tensor) -> Tensor:
    """The first row of each episode, in order."""
    new = torch.ones(len(episodes), dtype=torch.bool)
    new[1:] = episodes[1:] != episodes[:-1]
    return new.nonzero()[:, 0]


def rows_by_number(numbers: Tensor) -> list[list[int]]:
    """The rows with the same number."""
    found: dict[int, list[int]] = {}
    for row, number in enumerate(numbers.tolist()):
        found.setdefault(number, []).append(row)
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
