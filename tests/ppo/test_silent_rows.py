"""Sequences whose advantages are 0 are not computed, and nothing but the time changes."""

from __future__ import annotations

import pytest
import torch

from strop.algorithms.policy_losses.clipped import policy_loss
from strop.catalog import POLICY_LOSSES
from tests.ppo.runs import run

SPARSE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.startswith("7") or "70" in solution_str)
"""
PROPORTIONAL = sorted(
    name for name in POLICY_LOSSES.names() if POLICY_LOSSES.entry(name).facts["proportional"]
)


@pytest.mark.parametrize("name", PROPORTIONAL)
def test_where_the_advantage_is_0_so_are_loss_and_gradient_and_others_do_not_depend_on_it(name):
    draw = torch.Generator().manual_seed(1)
    old = -torch.rand(6, 5, generator=draw, dtype=torch.float64) * 3
    now = (old + 0.3 * torch.randn(6, 5, generator=draw, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(6, 1, generator=draw, dtype=torch.float64).expand(6, 5).clone()
    advantages[[1, 4]] = 0
    mask = torch.ones(6, 5, dtype=torch.float64)
    mask[2, 3:] = 0

    def loss(rows, log_probs):
        return policy_loss(
            name, log_probs=log_probs[rows], old_log_probs=old[rows], rollout_log_probs=old[rows] - 0.01, mask=mask[rows],
            advantages=advantages[rows], rollout_weights=None, clip_low=0.2, clip_high=0.28, clip_c=3.0, tau_pos=1.0, tau_neg=1.05,
        ).per_token * mask[rows]  # fmt: skip

    everything = loss(torch.arange(6), now)
    everything.sum().backward()
    assert not everything[[1, 4]].any() and not now.grad[[1, 4]].any()
    moving = torch.tensor([0, 2, 3, 5])
    assert everything[moving].abs().sum() > 0 or now.grad[moving].abs().sum() > 0
    assert torch.equal(loss(moving, now), everything[moving])


@pytest.mark.parametrize(
    "settings", [[], ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"]], ids=["token", "sequence"]
)
def test_skipping_changes_only_the_number_of_rows(overrides, tmp_path, settings):
    reward = tmp_path / "sparse.py"
    reward.write_text(SPARSE)
    # One update per step, so that momentum has no part in what is compared.
    common = [*overrides, f"custom_reward_function.path={reward}", "trainer.total_training_steps=1", "trainer.save_freq=-1",
              "trainer.test_freq=-1", "trainer.val_before_train=false", *settings]  # fmt: skip
    key, found = "actor_rollout_ref.actor.skip_zero_advantages", {}
    for skip in ("true", "false"):
        found[skip] = run(common, f"{key}={skip}", f"trainer.default_local_dir={tmp_path}/{skip}")[1]
    assert 0 < found["true"]["actor/active_rows"] < 1 == found["false"]["actor/active_rows"]
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl"):
        assert found["true"][name] == pytest.approx(found["false"][name], rel=1e-5, abs=1e-9)


def test_with_other_terms_in_the_loss_every_row_is_computed(overrides, tmp_path):
    steps = run(
        overrides,
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "trainer.total_training_steps=1",
        "trainer.save_freq=-1",
    )
    assert steps[1]["actor/active_rows"] == 1
