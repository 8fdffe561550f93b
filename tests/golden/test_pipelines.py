"""From scores to advantages and to the loss, through the functions that a training step calls.

The first part feeds OpenRLHF's recorded pipeline cases to `shape_rewards` and `add_advantages` with the
configuration that its flags convert to. The second compares whole steps, from raw scores to the loss, with
`tests/golden/peer_steps.py`: each framework written as plain loops over its published formulas.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.kl import kl_controller
from strop.algorithms.metrics.training import StepRecord
from strop.backends.base import Outputs
from strop.compat import FRAMEWORKS, conventions, table
from strop.config.compose import load
from strop.config.openrlhf.table import ESTIMATORS
from strop.config.schema.ppo import PpoConfig
from strop.ppo.experience import ExperienceFacts, add_advantages, correct_off_policy, shape_rewards
from strop.ppo.update import ActorUpdate
from strop.types import Batch, Prompt, Trajectory, batch_of
from tests.golden.harness import Case, cases, compare
from tests.golden.peer_steps import STEPS, Step, clipped_losses, step_of

PIPELINE = "openrlhf.trainer.ppo_utils.experience_maker.RemoteExperienceMaker.compute_advantages_and_returns"


@functools.cache
def configured(*overrides: str) -> PpoConfig:
    config: PpoConfig = load("ppo_trainer", list(overrides)).config
    return config


def row(group: int, score: float, mask: list[Any]) -> Trajectory:
    width = len(mask)
    kept = [int(bool(m)) for m in mask]
    prompt = Prompt(group, [1], [], "arithmetic")
    return Trajectory(prompt, group, [5] * width, kept, [0.0] * width, score=score)


def advantages(config: PpoConfig, rows: list[Trajectory], **tensors: Tensor | None) -> Batch:
    """The batch of a step with its advantages, as the trainer computes them."""
    facts = ExperienceFacts.of(config, on_policy=False)
    batch = batch_of(rows).replace(**tensors)
    controller = kl_controller("fixed", coef=config.algorithm.kl_ctrl.kl_coef)
    record = StepRecord()
    batch = shape_rewards(batch, config.algorithm, facts, rows, controller, record)
    batch = correct_off_policy(batch, facts, record)
    return add_advantages(batch, config.algorithm, facts, rows)


# --- OpenRLHF's recorded cases ------------------------------------------------------------------------------


def recorded() -> list[Case]:
    return [case for case in cases("openrlhf_advantages") if case.function == PIPELINE]


def run_recorded(case: Case, compat: str) -> list[str]:
    """Where our advantages and returns of trained tokens differ from OpenRLHF's."""
    settings = case.kwargs
    name = settings["estimator"]
    low, high = settings.get("clip_range", (-10.0, 10.0))
    ours = name
    if name != "flash_reinforce":  # it has no flag that converts
        ours = ESTIMATORS.from_openrlhf(name)
    overrides = [
        f"algorithm.adv_estimator={ours}",
        f"algorithm.norm_adv_by_std_in_grpo={name != 'dr_grpo'}",
        f"algorithm.compat={compat}",
        f"algorithm.gamma={settings['gamma']}",
        f"algorithm.lam={settings['lambd']}",
        f"algorithm.norm_adv_by_std={not settings['no_std_norm']}",
        "algorithm.use_kl_in_reward=true",
        f"algorithm.kl_ctrl.kl_coef={settings['kl_coef']}",
        f"reward_model.clip_range=[{low},{high}]",
    ]
    experiences = case.inputs["experiences"]
    rows: list[Trajectory] = []
    for experience in experiences:
        for place, score, mask in zip(experience["index"], experience["rewards"], experience["action_mask"]):
            rows.append(row(place // settings["n_samples_per_prompt"], score, mask))
    width = max(len(each.mask) for each in rows)
    kl = widened([case.tensor(f"experiences.{i}.kl") for i in range(len(experiences))], width)
    values = None
    if name == "gae":
        values = widened([case.tensor(f"experiences.{i}.values") for i in range(len(experiences))], width)
    batch = advantages(
        configured(*overrides), rows, old_log_probs=kl, ref_log_probs=torch.zeros_like(kl), values=values
    )
    wrong: list[str] = []
    start = 0
    for experience, expected in zip(experiences, case.outputs["experiences"]):
        for offset, mask in enumerate(experience["action_mask"]):
            for key in ("advantages", "returns"):
                ours = getattr(batch, key)[start + offset].tolist()
                theirs = expected[key][offset]
                kept = [t for t, on in enumerate(mask) if on]
                wrong += compare(
                    [theirs[t] for t in kept], [ours[t] for t in kept], f"{key}[{start + offset}]"
                )
        start += len(experience["action_mask"])
    return wrong


def widened(parts: list[Tensor], width: int) -> Tensor:
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])


@pytest.mark.parametrize("case", recorded(), ids=lambda case: "-".join(case.tags))
def test_openrlhf_pipelines_agree_on_every_trained_token(case: Case) -> None:
    assert run_recorded(case, "openrlhf") == []


def test_openrlhf_pipelines_need_the_switch() -> None:
    differing = [case.id for case in recorded() if run_recorded(case, "strop")]
    assert len(differing) >= 12, "most cases differ by default: the switch changes something"


# --- whole steps, from raw scores to the loss ---------------------------------------------------------------


def our_loss(step: Step, compat: str, *more: str, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and loss of a step under `compat`."""
    config = configured(f"algorithm.compat={compat}", *step.overrides, *more)
    rows = [row(g, s, m) for g, s, m in zip(step.groups, step.scores, step.mask)]
    batch = advantages(
        config,
        rows,
        old_log_probs=torch.tensor(step.old),
        ref_log_probs=torch.tensor(step.reference),
        values=None if step.values is None else torch.tensor(step.values),
        **tensors,
    )
    objective = ActorUpdate(config, width=float(step.width))
    loss, _ = objective.loss(batch, batch)(Outputs(log_probs=torch.tensor(step.new)), batch)
    assert batch.advantages is not None
    return batch.advantages * batch.mask, loss


@pytest.mark.parametrize("name", list(STEPS))
def test_a_whole_step_gives_the_loss_of_the_framework(name: str) -> None:
    step = step_of(name)
    expected = step.peer(step)
    found, loss = our_loss(step, step.compat)
    assert torch.allclose(found, torch.tensor(expected.advantages), rtol=1e-4, atol=1e-5)
    assert float(loss) == pytest.approx(expected.loss, rel=1e-4, abs=1e-6)
    assert expected.loss == pytest.approx(step.frozen, rel=1e-9), "the reference itself changed"


def test_rejected_sequences_are_part_of_advantages_and_denominators_in_openrlhf() -> None:
    """Its mismatch correction weights the loss, after the advantages: a rejected sequence has weight 0 there, and
    is one of those over which advantages are whitened and the loss is averaged."""
    step = step_of("openrlhf reinforce_baseline, score on a tool turn")
    expected = step.peer(step)
    shifts = [0.05, 0.8, -0.1, -0.9]  # log(trainer / engine) of each sequence; the band is 0.5 to 2
    correction = "algorithm.rollout_correction"
    more = [f"{correction}.rollout_is=token", f"{correction}.rollout_is_threshold=1000"]
    more += [f"{correction}.rollout_rs=seq_mean_k1", f"{correction}.rollout_rs_threshold=0.5_2.0"]
    engine = torch.tensor(step.old) - torch.tensor(shifts)[:, None]
    found, loss = our_loss(step, "openrlhf", *more, rollout_log_probs=engine)
    total = 0.0
    for losses, mask, shift in zip(
        clipped_losses(step, expected.advantages, dual=None), step.mask, shifts, strict=True
    ):
        weight = math.exp(shift) if 0.5 <= math.exp(shift) <= 2 else 0.0
        total += weight * sum(one * on for one, on in zip(losses, mask))
    assert torch.allclose(found, torch.tensor(expected.advantages), rtol=1e-4, atol=1e-5)
    assert float(loss) == pytest.approx(total / sum(map(sum, step.mask)), rel=1e-4)
    ours, other = our_loss(step, "strop", *more, rollout_log_probs=engine)
    assert not bool(ours[[1, 3]].any()) and float(other) != pytest.approx(float(loss), rel=1e-2)


def test_scores_beyond_the_clip_range_still_differ_in_openrlhf() -> None:
    overrides = ("algorithm.adv_estimator=rloo", "reward_model.clip_range=[-10,10]")
    rows = [row(0, 100.0, [1, 1]), row(0, 101.0, [1, 1])]
    batch = advantages(configured("algorithm.compat=openrlhf", *overrides), rows)
    assert batch.advantages is not None and batch.advantages[:, 0].tolist() == [-1.0, 1.0]


def test_a_score_on_a_tool_turn_reaches_the_last_trained_token_in_openrlhf() -> None:
    config = configured("algorithm.compat=openrlhf", "algorithm.adv_estimator=reinforce_plus_plus")
    batch = advantages(config, [row(0, 1.0, [1, 1, 0]), row(1, -1.0, [1, 0, 0])])
    assert batch.rewards is not None and batch.rewards.tolist() == [[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0]]
    assert batch.advantages is not None and bool((batch.advantages[0, :2] > 0).all())


# --- the table ----------------------------------------------------------------------------------------------


def test_every_convention_is_read_somewhere_and_changed_by_someone() -> None:
    from tests.test_architecture import ROOT

    source = "".join(file.read_text() for file in ROOT.rglob("*.py") if file.name != "compat.py")
    ours = dataclasses.asdict(conventions("strop"))
    for name in ours:
        changed = [peer for peer, rules in FRAMEWORKS.items() if getattr(rules, name) != ours[name]]
        assert changed, f"no framework changes {name}"
        assert f".{name}" in source, f"nothing reads {name}"


def test_the_documented_table_is_the_one_in_the_code() -> None:
    from tests.test_architecture import REPOSITORY

    page = (REPOSITORY / "docs" / "compat.md").read_text()
    assert table() in page, "docs/compat.md is behind: paste what strop.compat.table() returns"
