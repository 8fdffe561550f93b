"""A recorded step, computed again: equal bit for bit, and a changed formula is found where it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from strop.config.compose import load
from strop.config.rules import check
from strop.ppo import experience
from strop.replay.recording import recorded_steps
from strop.replay.replay import difference, differences, main, render, replay
from tests.ppo.runs import run, same, weights

PPO = [
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.shuffle=true",
]


@pytest.mark.parametrize(
    "more", [pytest.param([], id="grpo"), pytest.param(PPO, id="ppo", marks=pytest.mark.slow)]
)
def test_a_replay_is_equal_bit_for_bit_and_recording_changes_nothing(overrides, tmp_path, capsys, more):
    run([*overrides, *more], f"trainer.default_local_dir={tmp_path}/plain")
    run([*overrides, *more], "trainer.record_steps=[1,3]")
    folder = tmp_path / "run"
    assert same(weights(folder, 4), weights(tmp_path / "plain", 4))
    assert recorded_steps(folder) == [1, 3]
    before = sorted(path for path in folder.rglob("*") if path.is_file())
    capsys.readouterr()
    for step in (1, 3):
        assert main([str(folder), "--step", str(step)]) == 0
    told = capsys.readouterr().out
    assert told.count("Equal, bit for bit.") == 2
    phases = {"gen", "reward", "adv", "update_actor", "after"} | (
        {"values", "ref", "update_critic"} if more else set()
    )
    assert all(f"  {phase:<14} equal" in told for phase in phases)
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == before


def test_a_replay_has_unfinished_prompts_and_the_teacher(overrides, tmp_path, task, capsys):
    teacher = ["algorithm.distillation.enable=true", f"algorithm.distillation.path={task}/model"]
    run(overrides, *teacher, "actor_rollout_ref.rollout.over_sampling=1.5", "trainer.record_steps=[3]")
    capsys.readouterr()
    assert main([str(tmp_path / "run"), "--step", "3"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {phase:<14} equal" in told for phase in ("gen", "teacher", "adv", "after"))


def test_a_changed_constant_of_the_loss_is_found_in_the_update_alone(overrides, tmp_path, monkeypatch):
    run(overrides, *PPO, "trainer.record_steps=[2]", "trainer.total_training_steps=2")
    from strop.ppo import update

    real = update.policy_loss

    def changed(mode, **arguments):
        return real(mode, **{**arguments, "clip_high": arguments["clip_high"] * 1e-4})

    monkeypatch.setattr(update, "policy_loss", changed)
    outcomes, _ = replay(tmp_path / "run", 2)
    differs = {outcome.phase: outcome.found for outcome in outcomes if outcome.found}
    assert set(differs) == {"update_actor", "after"}
    first = differs["update_actor"][0]
    assert first.tensor == "token_losses" and len(first.place) == 2 and first.recorded != first.now
    assert all(gap.tensor.startswith("actor.") for gap in differs["after"])


def test_a_change_before_the_update_does_not_spread(overrides, tmp_path, monkeypatch, capsys):
    run(overrides, *PPO, "trainer.record_steps=[2]", "trainer.total_training_steps=2")
    real = experience.estimate

    def nudged(*arguments, **named):
        result = real(*arguments, **named)
        result.advantages[5, 1] += 0.5
        return result

    monkeypatch.setattr(experience, "estimate", nudged)
    capsys.readouterr()
    assert main([str(tmp_path / "run"), "--step", "2"]) == 1
    told = capsys.readouterr().out
    assert "The first difference is in adv: advantages, row 5, token 1: recorded" in told
    assert told.count("DIFFERENT") == 1


def test_other_samples_do_not_spread_either(overrides, tmp_path, monkeypatch):
    run(overrides, "trainer.record_steps=[2]", "trainer.total_training_steps=2")
    from strop.ppo.collect import Collector

    real = Collector.collect

    def other(self, *arguments):
        found = real(self, *arguments)
        found[3].response[0] = (found[3].response[0] + 1) % 10
        return found

    monkeypatch.setattr(Collector, "collect", other)
    outcomes, _ = replay(tmp_path / "run", 2)
    differs = {outcome.phase: outcome.found for outcome in outcomes if outcome.found}
    assert "gen" in differs and differs["gen"][0].tensor == "tokens" and differs["gen"][0].place[0] == 3
    assert set(differs) <= {"gen", "reward"}


def test_what_is_missing_is_said(overrides, tmp_path):
    run(overrides, "trainer.record_steps=[2]", "trainer.total_training_steps=2")
    with pytest.raises(ValueError, match=r"no record of step 9\. Steps 2 are"):
        replay(tmp_path / "run", 9)
    with pytest.raises(ValueError, match=r"no record of step 1\. None is: set trainer\.record_steps"):
        replay(tmp_path, 1)
    (tmp_path / "run" / "recorded" / "step_2" / "facts.json").unlink()
    with pytest.raises(ValueError, match="not whole"):
        replay(tmp_path / "run", 2)


def test_the_record_can_be_read(overrides, tmp_path):
    run(overrides, "trainer.record_steps=[2]", "trainer.total_training_steps=2")
    folder = tmp_path / "run" / "recorded" / "step_2"
    facts = json.loads((folder / "facts.json").read_text())
    assert facts["step"] == 2 and facts["environment"]["torch"] == torch.__version__
    assert len(json.loads((folder / "trajectories.json").read_text())) == 32
    assert not [path for path in Path(folder).rglob("*") if path.suffix in (".pt", ".pkl")]


@pytest.mark.parametrize(
    "more",
    ["trainer.n_gpus_per_node=2", "trainer.async_training.partial_rollout=true"],
    ids=["ranks", "ahead"],
)
def test_what_a_replay_cannot_repeat_is_refused(overrides, more):
    found = check(load("ppo_trainer", [*overrides, "trainer.record_steps=[1]", more]))
    assert any(f.key == "trainer.record_steps" and f.level == "error" for f in found)


def test_differences_name_the_first_place() -> None:
    a = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    assert difference("x", a, a.clone()) is None
    b = a.clone()
    b[1, 0] = 2.5
    found = difference("x", a, b)
    assert (
        found is not None
        and found.place == (1, 0)
        and (found.recorded, found.now) == ("2", "2.5")
        and found.count == 1
    )
    assert "row 1, token 0: recorded 2, now 2.5 (1 of 4 values differ, by 0.5 at most)" in str(found)
    (shape,) = differences({"x": a}, {"x": a[:1]})
    assert shape.place == () and "[2, 2]" in shape.recorded
    assert [gap.tensor for gap in differences({"x": a}, {"y": a})] == ["x", "y"]


def test_the_report_names_what_changed_in_the_environment() -> None:
    now = {"torch": "2", "device": "cpu"}
    for name in ("environment", "surroundings"):  # the second is the name in records of version 0.1
        text = render(3, [], {name: {"torch": "1", "device": "cpu"}, "here": now})
        assert "environment changed: torch 1 -> 2\n" in text and "Equal, bit for bit." in text
