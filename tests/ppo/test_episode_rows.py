"""Credit of episodes with several sequences: the group compares episodes, and every sequence gets its share."""

from __future__ import annotations

import pytest
import torch

from strop.config.compose import load
from strop.ppo.episodes.rows import rows_of_episodes
from strop.ppo.experience import ExperienceFacts, add_advantages, shape_rewards
from strop.ppo.update import mini_batches
from strop.types import Batch, Prompt, Trajectory, batch_of


def row(
    group: int, tokens: int, score: float | None = None, *branches: Trajectory, **more: object
) -> Trajectory:
    made = Trajectory(
        Prompt(group, [1, 2], [], "test"), group, [5] * tokens, [1] * tokens, [-1.0] * tokens, score=score
    )
    made.branches = list(branches)
    vars(made).update(more)
    return made


def tree() -> list[Trajectory]:
    """Two prompts of two episodes; the first episode has three sequences, and turn rewards in two of them."""
    first = row(0, 3, 1.0, row(0, 2, turn_rewards={1: 0.5}), row(0, 4), turn_rewards={0: 0.25})
    return [first, row(0, 2, 0.0), row(1, 2, 0.0), row(1, 1, 2.0, row(1, 5))]


def advantages(trajectories: list[Trajectory], *words: str) -> Batch:
    config = load("ppo_trainer", [f"{word}" for word in words]).config
    rows = rows_of_episodes(trajectories, config.actor_rollout_ref.rollout.agent.credit)
    facts = ExperienceFacts.of(config, on_policy=True)
    batch = batch_of(rows)
    batch = shape_rewards(batch, config.algorithm, facts, rows, None, None)  # type: ignore[arg-type]
    return add_advantages(batch, config.algorithm, facts, rows)


def flat() -> list[Trajectory]:
    """The same episodes as one sequence each, with the same rewards in all."""
    return [row(0, 3, 1.0, turn_rewards={0: 0.75}), row(0, 2, 0.0), row(1, 2, 0.0), row(1, 1, 2.0)]


HEADS = [0, 3, 4, 5]
OWNERS = [0, 0, 0, 1, 2, 3, 3]


@pytest.mark.parametrize("compat", ["strop", "verl", "openrlhf"])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "gpg", "dr_grpo"])
def test_the_baseline_is_over_episodes_and_all_sequences_share_the_advantage(
    estimator: str, compat: str
) -> None:
    words = [f"algorithm.adv_estimator={estimator}", f"algorithm.compat={compat}"]
    found, expected = advantages(tree(), *words), advantages(flat(), *words)
    assert found.episodes is not None and found.episodes.tolist() == OWNERS and expected.episodes is None
    assert found.advantages is not None and expected.advantages is not None
    for place, owner in enumerate(OWNERS):
        value = expected.advantages[owner, 0]
        trained = found.mask[place].bool()
        torch.testing.assert_close(found.advantages[place][trained], value.expand(int(trained.sum())))
        assert value != 0 and (found.advantages[place][~trained] == 0).all()


def test_split_and_last() -> None:
    words = ["algorithm.adv_estimator=rloo"]
    key = "actor_rollout_ref.rollout.agent.credit"
    shared, split, last = (
        advantages(tree(), *words, f"{key}={rule}") for rule in ("shared", "split", "last")
    )
    assert shared.advantages is not None and split.advantages is not None
    counts = torch.tensor([3, 3, 3, 1, 1, 2, 2])
    torch.testing.assert_close(split.advantages * counts[:, None], shared.advantages)
    assert len(last) == 4 and last.episodes is None, "only the sequence with the last answer is trained"


def test_estimators_of_tokens_see_each_sequence_with_the_score_at_its_end() -> None:
    found = advantages(tree(), "algorithm.adv_estimator=reinforce", "algorithm.norm_adv_by_std=false")
    assert found.scores is not None
    assert found.scores[0].tolist() == [0.25, 0.0, 1.0, 0.0, 0.0] and found.scores[1, 1] == 1.5
    assert found.scores[2, 3] == 1.0 and found.scores[6, 4] == 2.0


def test_a_failed_episode_is_masked_with_all_its_sequences() -> None:
    samples = [row(0, 2, None, row(0, 3)), row(0, 2, 1.0), row(0, 2, 0.0)]
    found = advantages(samples, "algorithm.adv_estimator=grpo")
    assert found.mask.sum(-1).tolist() == [0, 0, 2, 2]
    assert found.advantages is not None and (found.advantages[:2] == 0).all() and found.advantages[2, 0] > 0


@pytest.mark.parametrize("shuffle", [False, True])
def test_mini_batches_count_episodes(shuffle: bool) -> None:
    batch = batch_of(rows_of_episodes(tree(), "shared"))
    pieces = list(mini_batches(batch, 2, 1, shuffle, seed=3))
    assert len(pieces) == 2
    seen = []
    for piece in pieces:
        assert piece.episodes is not None and piece.row_ids is not None
        assert len(set(piece.episodes.tolist())) == 2
        seen += piece.row_ids.tolist()
    assert sorted(seen) == list(range(7))


def test_players_are_compared_with_the_same_player_in_other_episodes() -> None:
    def game(white: float, black: float) -> Trajectory:
        branches = [
            row(0, 2, black, player="black"),
            row(0, 1, black, player="black"),
            row(0, 3, player="white"),
        ]
        return row(0, 2, white, *branches, player="white")

    samples = [game(1.0, -1.0), game(-1.0, 1.0), game(1.0, -1.0)]
    found = advantages(samples, "algorithm.adv_estimator=rloo")
    assert found.advantages is not None and found.episodes is not None and found.samples is not None
    assert found.episodes.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert found.samples.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert found.advantages[:, 0].tolist() == [
        1.0,
        1.0,
        -1.0,
        -1.0,
        -2.0,
        -2.0,
        2.0,
        2.0,
        1.0,
        1.0,
        -1.0,
        -1.0,
    ]
    [whole] = mini_batches(found, 3, 1, False, seed=0)
    assert len(whole) == 12, "a step of three samples is one update"


def test_episodes_of_one_sequence_are_plain_rows() -> None:
    rows = rows_of_episodes(flat(), "shared")
    assert batch_of(rows).episodes is None and len(rows) == 4
