"""The loop on one device: it learns, it is exact, and it goes on where it was killed."""

from __future__ import annotations

import json

import pytest
import torch

from strop.backends.single import SingleBackend
from strop.models.build import dtype_of
from tests import forked
from tests.forked import Forked
from tests.ppo.runs import run, same, weights
from tests.tolerance import sum_tolerance

SEVENS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return solution_str.count("7") / 4
"""
AT_ONCE = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
    "critic.ppo_micro_batch_size_per_gpu=64",
]
"""One pass per update."""


def test_an_on_policy_step_has_ratio_one_and_exact_log_probs(overrides):
    steps = run(overrides)
    for step in range(1, 5):
        assert steps[step]["actor/ppo_kl"] == 0.0
        assert steps[step]["actor/pg_clipfrac"] == 0.0
        assert steps[step]["training/rollout_logprobs_diff_mean"] < 1e-5
        assert steps[step]["training/rollout_logprobs_diff_max"] < 1e-4
    assert {"val-core/arithmetic/acc/mean@1", "critic/score/mean", "response_length/mean", "timing_s/gen", "perf/throughput",
            "actor/grad_norm", "actor/lr", "actor/entropy_loss", "training/global_step"} <= {*steps[4]}  # fmt: skip


@pytest.mark.parametrize("updates", [1, 2])
def test_the_engines_log_probs_save_the_pass_and_are_still_compared(
    overrides, tmp_path, monkeypatch, updates
):
    """The first update of a step computes log-probs with the weights that sampled; later ones do not."""
    base = [
        *overrides,
        "data.train_batch_size=8",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={8 // updates}",
    ]
    passes, forward = [], SingleBackend.forward
    monkeypatch.setattr(
        SingleBackend, "forward", lambda self, *given: passes.append(given) or forward(self, *given)
    )
    recomputed = run(base, f"trainer.default_local_dir={tmp_path}/recomputed")
    assert len(passes) == (4 if updates == 2 else 0)
    steps = run(
        base,
        "actor_rollout_ref.actor.use_rollout_log_probs=true",
        f"trainer.default_local_dir={tmp_path}/engine",
    )
    assert len(passes) == (4 if updates == 2 else 0)
    gaps = [steps[step]["training/rollout_logprobs_diff_max"] for step in range(1, 5)]
    # Two passes were compared: on some CPUs all tokens of one short step agree to the bit, never those of all.
    assert 0 < max(gaps) < 1e-4
    for step in range(1, 5):
        assert steps[step]["actor/entropy"] > 0
        for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"):
            assert steps[step][name] == pytest.approx(recomputed[step][name], rel=1e-3, abs=1e-5), name


def test_micro_batches_change_nothing(overrides, tmp_path):
    folders = []
    for rows in (3, 32):
        folder = tmp_path / f"micro{rows}"
        run(
            overrides,
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={rows}",
            f"trainer.default_local_dir={folder}",
        )
        folders.append(weights(folder, 4))
    for name in folders[0]:
        assert torch.allclose(folders[0][name], folders[1][name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_stopping_and_resuming_gives_the_same_run(overrides, tmp_path, estimator):
    base = [
        *overrides,
        f"algorithm.adv_estimator={estimator}",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
    ]
    whole = tmp_path / "whole"
    straight = run(base, f"trainer.default_local_dir={whole}")
    cut = f"trainer.default_local_dir={tmp_path}/cut"
    run(base, cut, "trainer.total_training_steps=2")
    resumed = run(base, cut)
    assert same(weights(whole, 4), weights(tmp_path / "cut", 4))
    for step in (3, 4):
        assert resumed[step]["critic/score/mean"] == straight[step]["critic/score/mean"]
        assert resumed[step]["actor/pg_loss"] == straight[step]["actor/pg_loss"]
        assert (
            resumed[step]["actor/reward_kl_penalty_coeff"] == straight[step]["actor/reward_kl_penalty_coeff"]
        )


def test_a_model_that_runs_out_of_memory_gets_what_the_engine_kept(overrides, tmp_path, monkeypatch):
    """The cache stays over an update, as on a large GPU; the update of the second step lacks memory once."""
    monkeypatch.setattr("strop.rollout.native.engine.may_stay", lambda device: True)
    monkeypatch.setattr("strop.rollout.native.runner.Runner.num_recorded", 1)
    usual = tmp_path / "usual"
    run(overrides, f"trainer.default_local_dir={usual}")
    own, passes = SingleBackend._forward_backward, []

    def short(self, *arguments):
        passes.append(arguments)
        if len(passes) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(self, *arguments)

    monkeypatch.setattr(SingleBackend, "_forward_backward", short)
    steps = run(overrides, f"trainer.default_local_dir={tmp_path}/short")
    assert len(passes) == 5 and passes[1] == passes[2], "made again as it was"
    assert not any("actor/out_of_memory" in numbers for numbers in steps.values())
    assert same(weights(usual, 4), weights(tmp_path / "short", 4))


def test_a_killed_run_goes_on_to_the_same_weights(overrides, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    long = [*overrides, "trainer.total_training_steps=6", "trainer.save_freq=1", "trainer.test_freq=-1"]
    run(long, f"trainer.default_local_dir={whole}")
    command = [*long, f"trainer.default_local_dir={killed}"]
    first = Forked("strop.trainer.main_ppo", command, tmp_path / "first.log")
    first.kill_when((killed / "global_step_2").exists)
    done = forked.run("strop.trainer.main_ppo", command, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert same(weights(whole, 6), weights(killed, 6))


CHANCE = """
import random
import numpy

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return random.random() + numpy.random.rand()
"""


def test_user_code_draws_the_same_numbers_in_a_run_that_begins_again(overrides, tmp_path):
    """A run that was killed before its first checkpoint: Python's and NumPy's generators are seeded too."""
    (tmp_path / "chance.py").write_text(CHANCE)
    short = [
        *(f"custom_reward_function.path={tmp_path}/chance.py", "trainer.total_training_steps=1"),
        *("trainer.test_freq=-1", "data.val_files=null"),
    ]
    scores = []
    for attempt in ("first", "second", "other"):
        seed = "trainer.seed=7" if attempt == "other" else "trainer.save_freq=-1"
        steps = run(overrides, *short, seed, f"trainer.default_local_dir={tmp_path}/{attempt}")
        scores.append(steps[1]["critic/score/mean"])
    assert scores[0] == scores[1] != scores[2]


RISE_IN_THE_QUICKSTART = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("rloo", "reinforce_plus_plus", "remax")
]
"""Slow tests, as those of tests/quickstart are."""


@pytest.mark.parametrize("estimator", ["grpo", "gae", *RISE_IN_THE_QUICKSTART])
def test_the_reward_rises(overrides, tmp_path, estimator):
    """A reward anyone can learn: say as many sevens as you can. Chance is one in seventeen."""
    reward = tmp_path / "sevens.py"
    reward.write_text(SEVENS)
    steps = rises(overrides, f"custom_reward_function.path={reward}", f"algorithm.adv_estimator={estimator}")
    if estimator == "gae":  # the critic learns too: a policy learns this reward without one
        for step in (23, 24, 25):
            returns = steps[step]["critic/returns/mean"]
            assert returns > 0.5 and abs(steps[step]["critic/values/mean"] - returns) < 0.15
        assert steps[25]["critic/vf_loss"] < 0.05


def rises(overrides, *more: str) -> dict[int, dict[str, float]]:
    steps = run(
        overrides,
        *more,
        "actor_rollout_ref.actor.optim.lr=5e-3",
        "critic.optim.lr=1e-2",
        "actor_rollout_ref.rollout.n=8",
        *AT_ONCE,
        "trainer.total_training_steps=25",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
    )
    first = sum(steps[s]["critic/score/mean"] for s in (1, 2, 3)) / 3
    last = sum(steps[s]["critic/score/mean"] for s in (23, 24, 25)) / 3
    assert first < 0.15 and last > 0.5, (first, last)
    return steps


@pytest.mark.slow
def test_the_reward_rises_in_float16(overrides, tmp_path, monkeypatch):
    for where in ("ppo.roles", "shared.build"):
        monkeypatch.setattr(f"strop.{where}.compute_dtype", lambda name, device: dtype_of(name))
    reward = tmp_path / "sevens.py"
    reward.write_text(SEVENS)
    steps = rises(
        overrides,
        f"custom_reward_function.path={reward}",
        "actor_rollout_ref.actor.fsdp_config.dtype=float16",
    )
    assert steps[25]["actor/loss_scale"] >= 2.0**8
    assert all(steps[step]["training/rollout_logprobs_diff_max"] < 5e-3 for step in range(1, 26))
    assert sum(steps[step]["actor/skipped_updates"] for step in range(1, 26)) == 0


@pytest.mark.parametrize("setting", ["quantization=int8", "kv_cache_dtype=fp8"])
def test_the_reward_rises_from_samples_in_8_bits(overrides, tmp_path, setting):
    """Importance weights are on by default: samples come from a policy that is slightly another one."""
    reward = tmp_path / "sevens.py"
    reward.write_text(SEVENS)
    steps = rises(overrides, f"custom_reward_function.path={reward}", f"actor_rollout_ref.rollout.{setting}")
    for step in range(1, 26):
        assert steps[step]["training/rollout_logprobs_diff_max"] > 0
        assert steps[step]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.05)


def test_a_failing_scorer_masks_its_samples_and_is_counted(overrides, tmp_path):
    reward = tmp_path / "moody.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if len(solution_str) % 2:\n        raise RuntimeError('odd')\n    return 1.0\n"
    )
    steps = run(
        overrides,
        f"custom_reward_function.path={reward}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    )
    assert sum(steps[s]["reward/failed"] for s in range(1, 5)) > 0
    assert all(steps[s]["reward/score/mean"] == 1.0 for s in range(1, 5))  # failures are not zeros


def test_dynamic_sampling_fills_the_batch_with_groups_that_disagree(overrides, tmp_path):
    reward = tmp_path / "length.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return float(len(solution_str) > 2)\n"
    )
    steps = run(
        overrides,
        f"custom_reward_function.path={reward}",
        "algorithm.filter_groups.enable=true",
        "trainer.total_training_steps=2",
        "trainer.rollout_data_dir=" + str(tmp_path / "dump"),
    )
    assert steps[1]["train/num_gen_batches"] >= 1
    rows = [json.loads(line) for line in (tmp_path / "dump" / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    for group in {row["group"] for row in rows}:
        assert len({row["score"] for row in rows if row["group"] == group}) == 2


def test_off_policy_epochs_clip(overrides):
    steps = run(
        overrides,
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.optim.lr=2e-2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=1.0",
        "trainer.critic_warmup=2",
    )
    assert "actor/pg_loss" not in steps[1] and "actor/pg_loss" in steps[2]  # warm-up
    assert steps[4]["actor/ppo_kl"] != 0.0
    assert steps[4]["actor/kl_loss"] > 0.0 and "actor/reward_kl_penalty" in steps[4]


def test_a_curriculum_hears_of_every_step(overrides, tmp_path):
    """A sampler that begins with the last rows, and writes down what it is told."""
    file = tmp_path / "curriculum.py"
    file.write_text(
        "import json\n"
        "class Backwards:\n"
        "    def __init__(self, dataset, config):\n        self.rows, self.heard = len(dataset), []\n"
        "    def __len__(self):\n        return self.rows\n"
        "    def __iter__(self):\n        return iter(range(self.rows - 1, -1, -1))\n"
        "    def update(self, trajectories):\n"
        "        self.heard.append([(t.prompt.index, t.score) for t in trajectories])\n"
        f"        open({str(tmp_path / 'heard.json')!r}, 'w').write(json.dumps(self.heard))\n"
        "    def state_dict(self):\n        return {'heard': self.heard}\n"
        "    def load_state_dict(self, state):\n        self.heard = state['heard']\n"
    )
    run(
        overrides,
        f"data.sampler.class_path={file}",
        "data.sampler.class_name=Backwards",
        "data.shuffle=false",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
    )
    heard = json.loads((tmp_path / "heard.json").read_text())
    assert [len(step) for step in heard] == [32, 32]
    assert [index for index, _ in heard[0][::4]] == list(range(63, 55, -1))
    assert all(score is not None for step in heard for _, score in step)


@pytest.mark.slow
def test_token_budgets_and_shuffled_updates_are_exact_too(overrides, tmp_path):
    base = [*overrides, "trainer.test_freq=-1", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    lr, eps, updates = 1e-2, 1e-3, 8
    base += ["actor_rollout_ref.actor.shuffle=true", f"actor_rollout_ref.actor.optim.lr={lr}"]
    base += [f"actor_rollout_ref.actor.optim.eps={eps}"]
    found = {}
    for name, settings in {
        "rows": [],
        "tokens": [
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24",
        ],
        "ordered": ["actor_rollout_ref.actor.shuffle=false"],
    }.items():
        run(base, *settings, f"trainer.default_local_dir={tmp_path}/{name}")
        found[name] = weights(tmp_path / name, 4)
    # AdamW moves a weight by lr g / (|g| + eps). Clipped gradients are at most 1; micro-batches sum them in another order.
    gradient = sum_tolerance(torch.float32, terms=4 * 4 * (8 + 4), magnitude=1.0)
    limit = updates * lr * gradient / eps
    for name, tensor in found["rows"].items():
        gap = (tensor - found["tokens"][name]).abs().max()
        assert gap <= limit < 0.1 * updates * lr, (name, gap)
    assert not same(found["rows"], found["ordered"])


def test_checkpoints_are_kept_by_number_and_by_merit_and_copied_away(overrides, tmp_path):
    settings = [
        *overrides,
        "trainer.save_freq=1",
        "trainer.test_freq=1",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.best_metric=val-aux/num_turns/mean",  # the same every time, so the first one stays the best
        f"trainer.default_hdfs_dir=file://{tmp_path}/copies",
    ]
    run(settings)
    assert sorted(path.name for path in (tmp_path / "run").glob("global_step_*")) == [
        "global_step_1",
        "global_step_4",
    ]
    whole = weights(tmp_path / "run", 4)
    assert same(whole, weights(tmp_path / "copies", 4))
    import shutil

    shutil.rmtree(tmp_path / "run")  # another machine
    steps = run(settings, "trainer.total_training_steps=5")
    assert set(steps) == {5}


def test_a_chat_template_from_a_file(overrides, tmp_path):
    file = tmp_path / "twice.jinja"
    file.write_text("{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}")
    run(
        overrides,
        f"actor_rollout_ref.model.custom_chat_template={file}",
        f"trainer.rollout_data_dir={tmp_path}/said",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
    )
    shown = json.loads((tmp_path / "said" / "1.jsonl").read_text().splitlines()[0])["input"]
    assert len(shown) == 8 and shown[:4] == shown[4:]
