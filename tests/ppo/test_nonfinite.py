"""A loss that is not a number: the step does not happen, and the batch is kept to be looked at."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import strop.ppo.experience as experience
from strop.algorithms.advantages.base import AdvantageResult
from strop.config.compose import load
from strop.ppo.build import build_ppo
from tests.ppo.runs import same, weights


def broken_at(step):
    """An estimator whose fourth row is NaN in one step."""
    calls = []
    real = experience.estimate

    def estimate(name, **available):
        calls.append(name)
        found = real(name, **available)
        if len(calls) == step:
            advantages = found.advantages.clone()
            advantages[3] = float("nan")
            return AdvantageResult(advantages, found.returns)
        return found

    return estimate


def test_a_nan_stops_before_the_update_and_leaves_the_batch(overrides, tmp_path, monkeypatch):
    monkeypatch.setattr(experience, "estimate", broken_at(step=3))
    trainer = build_ppo(load("ppo_trainer", [*overrides, "trainer.save_freq=1", "trainer.test_freq=-1"]))
    with pytest.raises(ValueError, match=r"Step 3: .* rows 3\. .*advantages") as caught:
        trainer.fit()
    folder = tmp_path / "run" / "nonfinite_step_3"
    assert str(folder) in str(caught.value)
    told = json.loads((folder / "rows.json").read_text())
    assert told["suspects"] == [3] and told["not_finite"] == ["advantages"] and len(told["rows"]) == 32
    assert [row["row"] for row in told["rows"] if row["suspect"]] == [3]
    batch = load_file(folder / "batch.safetensors")
    assert batch["advantages"][3].isnan().any() and batch["advantages"][:3].isfinite().all()
    lengths = batch["lengths"].tolist()
    ids = batch["token_ids"].split(lengths)
    assert ids[3].tolist() == told["rows"][3]["prompt_ids"] + told["rows"][3]["response_ids"]
    # The weights are those after step 2, which is what the last checkpoint holds.
    assert not (tmp_path / "run" / "global_step_3").exists()
    assert same(
        weights(tmp_path / "run", 2), {k: v.detach() for k, v in trainer.roles.actor.weights.masters.items()}
    )


def test_a_model_that_answers_nan_is_found_before_anything_is_estimated(overrides, tmp_path):
    trainer = build_ppo(
        load("ppo_trainer", [*overrides, "algorithm.adv_estimator=gae", "trainer.val_before_train=false"])
    )
    with torch.no_grad():
        trainer.roles.critic.module.score.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="Not finite in them: values"):
        trainer.fit()
    assert load_file(tmp_path / "run" / "nonfinite_step_1" / "batch.safetensors")["values"].isnan().any()
