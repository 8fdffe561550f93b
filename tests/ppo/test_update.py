"""The loss of an update by hand: its terms, what they are divided by, the rows that take part, and what is counted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.metrics.training import StepRecord
from strop.backends.base import MicroBatching, Outputs, StepInfo
from strop.config.compose import load
from strop.config.schema.ppo import PpoConfig
from strop.ppo.critic_update import CriticUpdate
from strop.ppo.experience import ExperienceFacts, add_advantages, add_old_log_probs, add_values
from strop.ppo.update import ActorUpdate, mini_batches, run_updates
from strop.ranks import Ranks
from strop.types import Batch, Prompt, Trajectory, batch_of

ACTOR = "actor_rollout_ref.actor"
LENGTHS = (3, 1, 2, 4)


def configured(*words: str) -> PpoConfig:
    config = load("ppo_trainer", list(words)).config
    assert isinstance(config, PpoConfig)
    return config


def rows(*lengths: int, scores: tuple[float | None, ...] | None = None, **more: Any) -> list[Trajectory]:
    made = []
    for place, length in enumerate(lengths):
        prompt = Prompt(place, [1, 2], [], "arithmetic")
        score = 1.0 if scores is None else scores[place]
        tokens = ([5] * length, [1] * length, [-1.0] * length)
        made.append(Trajectory(prompt, place // 2, *tokens, score=score, **more))
    return made


def step(*lengths: int, **tensors: Tensor) -> Batch:
    """A batch with random numbers, NaN outside the mask."""
    batch = batch_of(rows(*(lengths or LENGTHS)))
    generator = torch.Generator().manual_seed(0)

    def drawn() -> Tensor:
        numbers = torch.rand(batch.mask.shape, generator=generator)
        return numbers.masked_fill(batch.mask == 0, torch.nan)

    names = ("advantages", "ref_log_probs", "values", "returns", "rollout_log_probs")
    made = {name: drawn() - 1.5 for name in names}
    made["advantages"] += 1.0
    return batch.replace(**{**made, **tensors})


def over(batch: Batch, values: Tensor) -> list[float]:
    return values[batch.mask.bool()].tolist()


def added(
    objective: ActorUpdate | CriticUpdate, mini: Batch, outputs: dict[str, Tensor], cut: int
) -> dict[str, float]:
    """Loss and metrics of a mini-batch in two micro-batches. `outputs` are those of the rows that take part."""
    active = objective.active(mini)
    loss = objective.loss(mini, active)
    sums: dict[str, float] = {}
    for part in (slice(0, cut), slice(cut, len(active))):
        micro = active.select(list(range(len(active)))[part])
        width = micro.mask.shape[1]
        made = {name: table[part, :width] if table.dim() else table for name, table in outputs.items()}
        total, metrics = loss(Outputs(**made), micro)
        for name, value in {"loss": total, **metrics}.items():
            assert name == "loss" or not value.requires_grad
            sums[name] = sums.get(name, 0.0) + float(value.detach())
    return sums


def test_every_term_of_the_actor_has_its_sign_and_coefficient():
    words = [
        "use_kl_loss=true",
        "kl_loss_coef=0.25",
        "kl_loss_type=mse",
        "entropy_coeff=0.5",
        "aux_loss_coef=2.0",
    ]
    objective = ActorUpdate(configured(*(f"{ACTOR}.{word}" for word in words)), width=4.0)
    assert objective.want() == ["log_probs", "entropy", "auxiliary"]
    mini = step()
    now = mini.ref_log_probs + torch.rand(4, 4)
    mini = mini.replace(old_log_probs=now)
    entropy = torch.rand(4, 4)
    found = added(
        objective, mini, {"log_probs": now, "entropy": entropy, "auxiliary": torch.tensor(3.0)}, cut=1
    )
    policy = -sum(over(mini, mini.advantages)) / 10
    kl = sum(0.5 * gap**2 for gap in over(mini, now - mini.ref_log_probs)) / 10
    mean_entropy = sum(over(mini, entropy)) / 10
    expected = {
        "loss": policy + 0.25 * kl - 0.5 * mean_entropy + 2.0 * 3.0,
        "actor/pg_loss": policy,
        "actor/kl_loss": kl,
        "actor/entropy_loss": mean_entropy,
        "actor/entropy": mean_entropy,
        "actor/aux_loss": 3.0,
        "actor/ppo_kl": 0.0,
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name


def test_entropy_is_reported_where_nothing_else_needs_it():
    assert ActorUpdate(configured(), 4.0).want() == ["log_probs", "observed_entropy"]
    off = configured(f"{ACTOR}.calculate_entropy=false")
    assert ActorUpdate(off, 4.0).want() == ["log_probs"]
    mini = step()
    given = {"log_probs": mini.rollout_log_probs, "observed_entropy": torch.full((4, 4), 2.0)}
    found = added(ActorUpdate(configured(), 4.0), mini, given, cut=2)
    assert found["actor/entropy"] == found["actor/entropy_loss"] == pytest.approx(2.0)
    assert found["loss"] == found["actor/pg_loss"], "it is no term of the loss"
    known = added(ActorUpdate(configured(), 4.0), mini.replace(entropy=mini.values), given, cut=2)
    assert "actor/entropy" not in known, "measured before the update"


@pytest.mark.parametrize(
    ("word", "skips"),
    [
        ("loss_agg_mode=token-mean", True),
        ("skip_zero_advantages=false", False),
        ("use_kl_loss=true", False),
        ("entropy_coeff=0.1", False),
        ("aux_loss_coef=0.1", False),
        ("policy_loss.loss_mode=kl_cov", False),
    ],
)
def test_rows_without_advantages_take_part_if_another_term_needs_them(word, skips):
    objective = ActorUpdate(configured(f"{ACTOR}.{word}"), width=4.0)
    mini = step()
    mini = mini.replace(advantages=mini.advantages.clone())
    mini.advantages[[0, 3]] = 0.0
    assert objective.active(mini).row_ids.tolist() == ([1, 2] if skips else [0, 1, 2, 3])
    mini.mask[0] = 0.0
    nothing = mini.replace(advantages=torch.zeros(4, 4))
    assert objective.active(nothing).row_ids.tolist() == ([1] if skips else [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("word", "weights"),
    [
        ("loss_agg_mode=token-mean", [1 / 10] * 4),
        ("loss_agg_mode=seq-mean-token-sum", [1 / 4] * 4),
        ("loss_agg_mode=seq-mean-token-sum-norm", [1 / (4 * 5)] * 4),
        ("loss_agg_mode=seq-mean-token-mean", [1 / (4 * length) for length in LENGTHS]),
        ("policy_loss.loss_mode=sapo", [1 / (4 * length) for length in LENGTHS]),
    ],
)
def test_the_gradient_of_the_first_update_is_the_policy_gradient(word, weights):
    config = configured(f"{ACTOR}.{word}", f"{ACTOR}.tau_neg=1.0")
    objective = ActorUpdate(config, width=5.0)
    seen: list[list[int]] = []
    objective.observe = lambda micro, per_token: seen.append(micro.row_ids.tolist())
    mini = step()
    now = (mini.rollout_log_probs + 0.5).requires_grad_()
    mini = mini.replace(rollout_log_probs=None)  # no importance weights
    total, metrics = objective.loss(mini, mini)(Outputs(log_probs=now), mini)
    total.backward()
    expected = -mini.advantages * torch.tensor(weights)[:, None]
    assert over(mini, now.grad) == pytest.approx(over(mini, expected), rel=1e-5)
    assert not any(value.requires_grad for value in metrics.values())
    assert seen == [[0, 1, 2, 3]]

    critic = CriticUpdate(configured(f"{ACTOR}.{word}"), width=5.0)
    if "sapo" not in word:
        ones = mini.replace(values=torch.ones(4, 4), returns=torch.zeros(4, 4))
        value = added(critic, ones, {"values": torch.ones(4, 4)}, cut=2)["loss"]
        assert value == pytest.approx(0.5 * sum(w * length for w, length in zip(weights, LENGTHS)))


@pytest.mark.parametrize(
    ("words", "weight"),
    [
        (["rollout_is=token", "rollout_is_threshold=1.5"], 1.5),
        (["rollout_is=token", "rollout_is_threshold=null"], None),
        (["rollout_is=null", "rollout_is_threshold=1.5"], None),
    ],
)
def test_importance_weights_of_the_first_update(words, weight):
    objective = ActorUpdate(
        configured(*(f"algorithm.rollout_correction.{word}" for word in words)), width=5.0
    )
    mini = step()
    now = mini.rollout_log_probs + 1.0
    found = added(objective, mini, {"log_probs": now}, cut=3)
    mean = sum(over(mini, mini.advantages)) / 10
    assert found["loss"] == pytest.approx(-mean * (weight or 1.0), rel=1e-5)
    known = objective.known(mini, Ranks())
    assert known is not None
    drift = objective.drift(mini, known)
    assert drift["training/rollout_logprobs_diff_mean"] == pytest.approx(1.0)
    assert drift.get("rollout_corr/rollout_is_mean") == weight


@pytest.mark.parametrize(("mode", "divisor"), [("token-mean", 10), ("seq-mean-token-sum", 4)])
def test_rows_without_advantages_count_in_the_loss_and_not_in_the_metrics(mode, divisor):
    objective = ActorUpdate(configured(f"{ACTOR}.loss_agg_mode={mode}"), width=4.0)
    mini = step()
    mini = mini.replace(advantages=mini.advantages.clone())
    mini.advantages[[0, 3]] = 0.0
    active = mini.select([1, 2])
    now = active.rollout_log_probs
    found = added(
        objective, mini.replace(old_log_probs=mini.rollout_log_probs - 0.5), {"log_probs": now}, cut=1
    )
    advantages = over(active, active.advantages)
    losses = [max(-a * math.exp(0.5), -a * 1.2) for a in advantages]
    assert found["loss"] == pytest.approx(sum(losses) / divisor, rel=1e-5)
    assert found["actor/ppo_kl"] == pytest.approx(-0.5)
    assert found["actor/pg_clipfrac"] == pytest.approx(sum(a > 0 for a in advantages) / 3)


@pytest.mark.parametrize(("loss_type", "ratio"), [("reinforce", False), ("ppo_clip", True)])
def test_bypass_mode_takes_its_own_settings(loss_type, ratio):
    correction = "algorithm.rollout_correction"
    words = ["bypass_mode=true", f"loss_type={loss_type}", "rollout_is=token", "rollout_is_threshold=1.5"]
    objective = ActorUpdate(configured(*(f"{correction}.{word}" for word in words)), width=4.0)
    mini = step(1)
    mini = mini.replace(advantages=torch.ones(1, 1), old_log_probs=mini.rollout_log_probs)
    now = mini.rollout_log_probs + 1.0
    found = added(objective, mini, {"log_probs": now}, cut=1)
    expected = -1.2 if ratio else -1.5 * float(now)  # clipped ratio; truncated weight times log-prob
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["rollout_corr/rollout_is_mean"] == 1.5, "the name is not that of a metric of the actor"


def test_the_first_update_with_the_engines_log_probs_is_compared_with_them():
    words = [f"{ACTOR}.use_rollout_log_probs=true"]
    objective = ActorUpdate(configured(*words), width=4.0)
    mini = step()
    mini = mini.replace(old_log_probs=mini.rollout_log_probs)
    first, second = mini.select([2, 1]), mini.select([0, 3])
    for _ in range(2):
        objective.begin_step()
        assert objective.known(mini, Ranks()) is None
        for piece, shift in ((first, 0.25), (second, 9.0)):
            added(objective, piece, {"log_probs": piece.rollout_log_probs + shift}, cut=1)
        known = objective.known(mini, Ranks())
        assert known is not None and known.rows.tolist() == [2, 1] and known.log_probs.shape == (2, 4)
        drift = objective.drift(mini, known)
        assert drift["training/rollout_logprobs_diff_max"] == pytest.approx(0.25, rel=1e-5)


def test_without_log_probs_before_the_update_all_passes_are_kept():
    objective = ActorUpdate(configured(), width=4.0)
    mini = step()
    for piece in (mini.select([3, 1]), mini.select([0, 2])):
        now = piece.rollout_log_probs.detach().clone().requires_grad_()
        found = added(objective, piece, {"log_probs": now, "observed_entropy": now.detach().exp()}, cut=1)
        assert found["actor/ppo_kl"] == 0.0
    known = objective.known(mini, Ranks())
    assert known is not None and known.rows.tolist() == [3, 1, 0, 2]
    assert not known.log_probs.requires_grad and known.entropy is not None
    order = mini.select([3, 1, 0, 2])
    assert over(order, known.log_probs) == over(order, order.rollout_log_probs)
    assert over(order, known.entropy) == pytest.approx(over(order, order.rollout_log_probs.exp()))


def test_the_critic_by_hand():
    objective = CriticUpdate(configured("critic.cliprange_value=0.1"), width=4.0)
    mini = step()
    now = torch.rand(4, 4)
    mini.returns[:2] += 3.0  # towards which the values went, so that two rows are clipped
    found = added(objective, mini, {"values": now}, cut=3)
    losses, clipped = [], 0
    for value, old, target in zip(over(mini, now), over(mini, mini.values), over(mini, mini.returns)):
        near = min(max(value, old - 0.1), old + 0.1)
        losses.append(0.5 * max((value - target) ** 2, (near - target) ** 2))
        clipped += (near - target) ** 2 > (value - target) ** 2
    assert found["loss"] == found["critic/vf_loss"] == pytest.approx(sum(losses) / 10, rel=1e-5)
    assert found["critic/vpred_mean"] == pytest.approx(sum(over(mini, now)) / 10, rel=1e-5)
    assert found["critic/vf_clipfrac"] == pytest.approx(clipped / 10) and 0 < clipped < 10


def order(epochs: int, shuffle: bool, seed: int) -> list[list[int]]:
    batch = batch_of(rows(*[1] * 10))
    return [piece.row_ids.tolist() for piece in mini_batches(batch, 4, epochs, shuffle, seed)]


def test_mini_batches_follow_the_order_or_the_seed():
    plain = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert order(2, False, 3) == plain * 2
    shuffled = order(3, True, 3)
    epochs = [[*shuffled[at], *shuffled[at + 1], *shuffled[at + 2]] for at in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3, "each epoch has its own order"
    assert order(3, True, 3) == shuffled and order(3, True, 4) != shuffled


class StubBackend:
    """Reports the advantages it was given, and runs out of memory once in the second update."""

    def __init__(self) -> None:
        self.out_of_memory = 5
        self.calls: list[str] = []
        self.seen: list[list[int]] = []

    def forward_backward(self, active: Batch, want: list[str], loss: Any, micro: Any) -> dict[str, float]:
        self.calls.append("pass")
        self.seen.append(active.row_ids.tolist())
        self.out_of_memory += self.calls.count("pass") == 2
        return {"actor/mean": float(active.advantages[active.mask.bool()].mean())}

    def step(self) -> StepInfo:
        self.calls.append("step")
        return StepInfo(grad_norm=3.0, lr=0.5, skipped=self.calls.count("step") == 1, loss_scale=8.0)

    def advance_schedule(self) -> None:
        self.calls.append("schedule")


def test_what_a_step_reports_of_its_updates():
    config = configured()
    mini = step(*[2] * 6)
    mini = mini.replace(advantages=torch.arange(6.0)[:, None].expand(6, 2).clone())
    mini.mask[0, 1] = 0.0
    mini.mask[2:4] = 0.0  # nothing to train on in the second update
    backend = StubBackend()
    more: dict[str, Any] = {
        "extra_loss": lambda backend, micro: backend.calls.append("extra") or {"ptx/loss": 2.0},
        "after_update": [lambda: backend.calls.append("after")],
    }
    objective = ActorUpdate(config, width=2.0)
    section = config.actor_rollout_ref.actor
    found = run_updates(backend, mini, objective, section, 2, MicroBatching(), 1, "actor", **more)
    assert backend.calls == ["pass", "extra", "step", "after"] * 2 + ["schedule"]
    assert found == {
        "actor/mean": (1.0 + 4.5) / 2,  # of the first row, whose advantage is 0, nothing is computed
        "actor/active_rows": 0.75,
        "ptx/loss": 2.0,
        "actor/grad_norm": 3.0,
        "actor/lr": 0.5,
        "actor/skipped_updates": 1.0,
        "actor/empty_updates": 1.0,
        "actor/loss_scale": 8.0,
        "actor/out_of_memory": 1.0,
    }


def test_the_order_of_a_step_depends_on_its_number_and_the_seed():
    config = configured(f"{ACTOR}.shuffle=true")
    section, objective = config.actor_rollout_ref.actor, ActorUpdate(config, width=2.0)
    mini = step(*[1] * 12)
    orders = {}
    for data_seed, number in ((7, 1), (7, 2), (None, 1), (None, 2), (None, 8)):
        section.data_loader_seed = data_seed
        backend = StubBackend()
        found = run_updates(backend, mini, objective, section, 6, MicroBatching(), number, "actor")
        orders[data_seed, number] = backend.seen
        assert found["actor/out_of_memory"] == 1.0
    assert "actor/out_of_memory" not in run_updates(
        StubBackend(), mini, objective, section, 12, MicroBatching(), 1, "actor"
    )
    assert orders[7, 1] != orders[7, 2] and orders[None, 1] != orders[None, 2], "of each step"
    assert orders[7, 1] != orders[None, 1] and orders[7, 1] == orders[None, 8], "of each seed"


class StubModel:
    """A model with these outputs; it keeps what it was asked for."""

    def __init__(self, **outputs: Tensor) -> None:
        self.outputs = outputs

    def forward(self, batch: Batch, want: list[str], micro: Any) -> Outputs:
        self.want = want
        return Outputs(**{name: self.outputs[name] for name in want})


def test_log_probs_and_values_before_the_update():
    batch = step()
    facts = ExperienceFacts.of(configured(), on_policy=False)
    model = StubModel(log_probs=batch.rollout_log_probs + 0.5, entropy=torch.arange(16.0).view(4, 4))
    record = StepRecord()
    found = add_old_log_probs(batch, model, facts, MicroBatching(), record)
    assert over(found, found.old_log_probs) == over(batch, batch.rollout_log_probs + 0.5)
    mean_entropy = sum(over(batch, model.outputs["entropy"])) / 10
    assert record.metrics["actor/entropy"] == pytest.approx(mean_entropy)
    assert record.metrics["training/rollout_logprobs_diff_mean"] == pytest.approx(0.5)
    empty = batch.replace(mask=torch.zeros(4, 4), rollout_log_probs=torch.zeros(4, 4))
    record = StepRecord()
    add_old_log_probs(empty, model, facts, MicroBatching(), record)
    assert record.metrics == {"actor/entropy": 0.0}, "no token, no mean of nothing"

    values = add_values(batch, StubModel(values=torch.ones(4, 4)), MicroBatching()).values
    assert torch.equal(values, batch.mask), "0 outside the mask"


def advantages(words: list[str], trajectories: list[Trajectory]) -> Tensor:
    config = configured(*words)
    batch = batch_of(trajectories)
    facts = ExperienceFacts.of(config, on_policy=True)
    found = add_advantages(
        batch.replace(rewards=batch.scores), config.algorithm, facts, trajectories
    ).advantages
    assert found is not None
    return found


def test_settings_of_estimators_reach_them():
    samples = rows(1, 1, 1, 1, scores=(1.0, 0.0, 4.0, 1.0))
    plus = "algorithm.adv_estimator=reinforce_plus_plus"
    assert advantages([plus, "algorithm.norm_adv_by_std=false"], samples)[:, 0].tolist() == [
        -0.5,
        -1.5,
        2.5,
        -0.5,
    ]
    whitened = advantages([plus], samples)
    torch.testing.assert_close(whitened.std(), torch.tensor(1.0))
    grpo = ["algorithm.adv_estimator=grpo"]
    alone = rows(1, 1, 1, scores=(1.0, 0.0, 4.0))
    kwargs = [*grpo, "algorithm.norm_adv_by_std_in_grpo=false"]
    assert advantages(kwargs, alone)[:, 0].tolist()[:2] == [0.5, -0.5]


def test_parts_of_the_score_reach_gdpo_with_their_weights():
    samples = rows(1, 1, 1, 1, scores=(1.0, 0.0, 1.0, 0.0))
    for sample, style in zip(samples, (0, 1, 1, 0)):
        sample.extras["style"] = style
    words = ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[score,style]"]
    weighted = [*words, "algorithm.gdpo_reward_weights=[1.0,3.0]"]
    found = advantages(weighted, samples)[:, 0]
    raw = torch.tensor([1.0 - 3.0, -1.0 + 3.0, 1.0 + 3.0, -1.0 - 3.0])
    torch.testing.assert_close(found, raw / raw.std(), rtol=1e-4, atol=1e-4)
    samples[2].extras = {"style": "good"}
    with pytest.raises(
        ValueError, match=r"gdpo_reward_keys names 'style'.* reports 'good' for it \(it gives score, style\)"
    ):
        advantages(words, samples)
