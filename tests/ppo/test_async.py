"""Sampling ahead of training: equal to the synchronous loop where nothing is ahead, bounded and measured where something is."""

from __future__ import annotations

import json

import pytest
import torch

from strop.ppo.collect import Validator
from tests.ppo.runs import run, same, weights
from tests.ppo.test_loop import AT_ONCE, SEVENS

ASYNC = "trainer.async_training."
BESIDE = [f"{ASYNC}enable=true"]
PARTIAL = [f"{ASYNC}partial_rollout=true"]
NOT_OF_THE_RUN = ("timing", "perf/", "staleness/", "rollout/", "memory", "time", "health")


def numbers(step: dict[str, float]) -> dict[str, float]:
    """What of a step's metrics does not depend on the clock or the machine."""
    return {
        name: value
        for name, value in step.items()
        if not name.startswith(NOT_OF_THE_RUN) and "second" not in name
    }


REMAX = ["algorithm.adv_estimator=remax", "algorithm.filter_groups.enable=true"]


@pytest.mark.parametrize("more", [[], pytest.param(REMAX, marks=pytest.mark.slow)])
def test_with_age_zero_it_is_the_synchronous_loop_bit_for_bit(overrides, tmp_path, more):
    plain = run(overrides, *more, f"trainer.default_local_dir={tmp_path}/plain")
    for name, mode in {"beside": BESIDE, "partial": PARTIAL, "both": [*BESIDE, *PARTIAL]}.items():
        folder = tmp_path / name
        ahead = run(
            overrides, *more, *mode, f"{ASYNC}max_policy_age=0", f"trainer.default_local_dir={folder}"
        )
        assert same(weights(tmp_path / "plain", 4), weights(folder, 4)), name
        for step in range(5):
            assert numbers(plain[step]) == numbers(ahead[step]), name
        assert all(ahead[step]["staleness/max"] == 0 for step in range(1, 5)), name


@pytest.mark.parametrize("more", [pytest.param([], marks=pytest.mark.slow), PARTIAL], ids=["waits", "cuts"])
def test_rows_are_trained_in_the_order_drawn_and_no_older_than_allowed(overrides, tmp_path, more):
    long = ["trainer.total_training_steps=6", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    seen = {}
    for name, settings in {"plain": [], "ahead": [*BESIDE, *more, f"{ASYNC}max_policy_age=2"]}.items():
        folder = tmp_path / name
        steps = run(
            overrides,
            *long,
            *settings,
            f"trainer.default_local_dir={folder}/run",
            f"trainer.rollout_data_dir={folder}/said",
        )
        seen[name] = [
            [json.loads(line)["index"] for line in (folder / "said" / f"{s}.jsonl").read_text().splitlines()]
            for s in range(1, 7)
        ]
    assert seen["plain"] == seen["ahead"]
    oldest = [steps[step]["staleness/max"] for step in range(1, 7)]
    assert oldest[0] == 0 and max(oldest) <= 2 and sum(oldest) > 0, oldest
    assert [steps[step]["staleness/prompts_ahead"] for step in range(1, 7)] == [16, 16, 16, 16, 8, 0], (
        "none beyond the last step"
    )
    assert all("rollout_corr/rollout_is_mean" in steps[step] for step in range(1, 7)), (
        "corrected unless told otherwise"
    )


def test_one_step_off_policy_does_not_depend_on_the_clock(overrides, tmp_path):
    """Without interruptions a batch is sampled whole under the weights before the last ones: only rounding may differ."""
    for name in ("one", "two"):
        said = f"trainer.rollout_data_dir={tmp_path}/{name}/said"
        steps = run(overrides, *BESIDE, said, f"trainer.default_local_dir={tmp_path}/{name}")
    assert [steps[step]["staleness/mean"] for step in range(1, 5)] == [0, 1, 1, 1]
    for step in range(1, 5):
        one, two = (
            (tmp_path / name / "said" / f"{step}.jsonl").read_text().splitlines() for name in ("one", "two")
        )
        assert [json.loads(line)["output"] for line in one] == [json.loads(line)["output"] for line in two]
    first, second = weights(tmp_path / "one", 4), weights(tmp_path / "two", 4)
    for name, tensor in first.items():
        assert torch.allclose(tensor, second[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(
    ("every", "ahead", "oldest"),
    [pytest.param(1, [4, 4, 4, 4, 4, 0], 1, marks=pytest.mark.slow), (2, [16, 8, 16, 8, 8, 0], 2)],
)
def test_half_a_step_ahead_and_weights_every_so_many_steps(overrides, every, ahead, oldest):
    """A half more may be begun than is trained on (8 prompts a step) from one weight update to the next."""
    steps = run(
        overrides,
        *BESIDE,
        *PARTIAL,
        f"{ASYNC}staleness_threshold=0.5",
        f"{ASYNC}trigger_parameter_sync_step={every}",
        "trainer.total_training_steps=6",
    )
    assert [steps[step]["staleness/prompts_ahead"] for step in range(1, 7)] == ahead
    assert 0 < max(steps[step]["staleness/max"] for step in steps if step) <= oldest


def test_validations_have_the_newest_weights_also_after_a_resume_between_two_syncs(overrides, monkeypatch):
    """With weights every two steps, the run goes on from step 3; the actor is trained from step 3 on."""
    seen = {}
    validate = Validator.run

    def remember(self, step, record):
        samples = validate(self, step, record)
        seen[step] = {sample.version for sample in samples}
        return samples

    monkeypatch.setattr(Validator, "run", remember)
    long = [*BESIDE, f"{ASYNC}trigger_parameter_sync_step=2", "trainer.total_training_steps=7"]
    run(overrides, *long, "trainer.save_freq=1", "trainer.total_training_steps=3")
    run(overrides, *long)
    assert seen == {0: {0}, 2: {2}, 3: {3}, 4: {4}, 6: {6}, 7: {7}}
    seen.clear()
    run(overrides, *long, "trainer.critic_warmup=3", "trainer.resume_mode=disable")
    assert seen == {0: {0}, 2: {0}, 4: {4}, 6: {6}, 7: {7}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param([*BESIDE, *PARTIAL, f"{ASYNC}max_policy_age=2"], id="beside"),
        pytest.param(PARTIAL, id="between"),
    ],
)
def test_it_learns_what_the_synchronous_loop_learns(overrides, tmp_path, mode):
    """The reward of the synchronous test: say as many sevens as you can."""
    reward = tmp_path / "sevens.py"
    reward.write_text(SEVENS)
    learning = [
        f"custom_reward_function.path={reward}",
        "actor_rollout_ref.actor.optim.lr=5e-3",
        "actor_rollout_ref.rollout.n=8",
        *AT_ONCE,
    ]
    learning += ["trainer.total_training_steps=25", "trainer.save_freq=-1", "trainer.test_freq=-1"]
    last = []
    for name, settings in {"plain": [], "ahead": mode}.items():
        steps = run(overrides, *learning, *settings, f"trainer.default_local_dir={tmp_path}/{name}")
        last.append(sum(steps[s]["critic/score/mean"] for s in (23, 24, 25)) / 3)
    assert min(last) > 0.5 and abs(last[0] - last[1]) < 0.2, last
    assert max(steps[s]["staleness/max"] for s in range(1, 26)) >= 1
