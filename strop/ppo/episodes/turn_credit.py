"""Credit by turn (rollout.agent.credit=turn), for estimators that compare the samples of a prompt.

A turn cannot influence the rewards before it. So the advantage of a turn is computed from the rewards from
this turn on: the sum of the rewards of the episode minus the rewards of earlier tokens of the same sequence.
All tokens of the turn get the advantage that the estimator gives to that sum. The sums of the other episodes
of the prompt do not change, so the baseline is computed over episodes. Without turn rewards the result is the
advantage of the episode. Rewards of other sequences of the episode count for every turn, because branches
have no common order in time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from strop.ppo.episodes.rows import added_rewards, first_rows, owners
from strop.types import Batch, Trajectory

Compare = Callable[[Tensor, Tensor], Tensor]
"""Advantages of sums of rewards [R] in groups [R]."""


def add_turn_credit(
    batch: Batch, trajectories: Sequence[Trajectory], comparable: Sequence[int], compare: Compare
) -> Batch:
    """The batch, which has the advantages of whole episodes, with those of turns. `comparable`: episodes that
    the estimator compares, counted among the first rows of episodes."""
    assert batch.rewards is not None and batch.advantages is not None and batch.returns is not None
    totals, owner = _totals(batch, trajectories)
    heads = torch.arange(len(batch)) if batch.episodes is None else first_rows(batch.episodes)
    members: dict[int, list[int]] = {}
    for episode in comparable:
        members.setdefault(int(batch.groups[heads[episode]]), []).append(episode)
    sums: list[Tensor] = []
    turns: list[tuple[int, int, int, int]] = []
    """Row, first and last token, place in the list of sums."""
    size = 0
    allowed = set(comparable)
    for row, trajectory in enumerate(trajectories):
        episode = int(owner[row])
        if episode not in allowed:
            continue
        peers = members[int(batch.groups[row])]
        for turn in trajectory.turns:
            before = batch.rewards[row, : turn.start].double().sum()
            if turn.role != "assistant" or before == 0:
                continue
            place = peers.index(episode)
            compared = totals[peers].clone()
            compared[place] -= before
            turns.append((row, turn.start, turn.end, size + place))
            sums.append(compared)
            size += len(peers)
    if not turns:
        return batch
    groups = torch.repeat_interleave(torch.arange(len(sums)), torch.tensor([len(one) for one in sums]))
    found = compare(torch.cat(sums), groups)
    advantages = batch.advantages.clone()
    returns = batch.returns.clone()
    for row, start, end, place in turns:
        own = slice(start, end)
        advantages[row, own] = found[place].to(advantages.dtype) * batch.mask[row, own]
        returns[row, own] = advantages[row, own].to(returns.dtype)
    return batch.replace(advantages=advantages, returns=returns)


def _totals(batch: Batch, trajectories: Sequence[Trajectory]) -> tuple[Tensor, Tensor]:
    """The sum of the rewards of each episode, and the episode of each row."""
    assert batch.rewards is not None
    sums = batch.rewards.double().sum(-1)
    if batch.episodes is None:
        return sums, torch.arange(len(batch))
    sums = sums + added_rewards(sums, batch.episodes, trajectories)
    return sums[first_rows(batch.episodes)], owners(batch.episodes)
