"""Hyperparameters of an advantage estimator or a policy loss: one file, one key, checked before the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from strop.config.compose import load
from strop.config.hyperparameters import ADVANTAGE_INPUTS
from strop.config.rules import check
from strop.config.typed import ConfigError
from strop.registry import load_module
from tests.ppo.runs import run, same, weights

ESTIMATOR = """
import torch
from strop.catalog import ADVANTAGES

@ADVANTAGES.register("scaled_{name}", needs=("group",))
def scaled(rewards: torch.Tensor, mask: torch.Tensor, *, strength: float = 0.5, shift: float | None = 0.25):
    assert isinstance(strength, float)
    score = rewards.sum(-1, keepdim=True) * strength
    return (score if shift is None else score + shift) * mask
"""

LOSS = """
from strop.algorithms.policy_losses.clipped import PolicyLoss
from strop.catalog import POLICY_LOSSES

@POLICY_LOSSES.register("weighted_{name}")
def weighted(log_probs, advantages, mask, *, power: int, clip_low: float = 0.1):
    weight = (1 - clip_low) ** power
    return PolicyLoss(-log_probs * advantages * mask * weight, {{"weight": mask * weight}})
"""

NEEDS_STRENGTH = """
from strop.catalog import ADVANTAGES

@ADVANTAGES.register("demanding_{name}")
def demanding(rewards, mask, *, strength: float): ...
"""

ADV = "algorithm.adv_kwargs"
ACTOR = "actor_rollout_ref.actor"
LOSS_KWARGS = f"{ACTOR}.policy_loss.kwargs"


@pytest.fixture
def plugin(tmp_path: Path):
    """Writes a plugin; the part of its name that keeps tests apart, and the override that lists it."""

    def write(source: str) -> tuple[str, str]:
        name = tmp_path.name.replace("-", "_").lower()
        file = tmp_path / "plugin.py"
        file.write_text(source.format(name=name))
        return name, f"plugins=[{file}]"

    return write


@pytest.fixture
def short(overrides: list[str]) -> list[str]:
    return [
        *overrides,
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
    ]


def errors(*overrides: str) -> list[str]:
    found = check(load("ppo_trainer", list(overrides)))
    return [str(finding) for finding in found if finding.level == "error" and "kwargs" in str(finding)]


def test_an_estimator_plugin_with_a_hyperparameter_trains(short, plugin, tmp_path):
    name, plugins = plugin(ESTIMATOR)

    def step(folder: str, *more: str) -> dict[str, float]:
        where = f"trainer.default_local_dir={tmp_path}/{folder}"
        return run(short, plugins, f"algorithm.adv_estimator=scaled_{name}", where, *more)[1]

    default = step("default")
    assert default["critic/advantages/min"] >= 0.25
    step("same", f"{ADV}.strength=0.5", f"{ADV}.shift=0.25")
    assert same(weights(tmp_path / "same", 1), weights(tmp_path / "default", 1))
    # A whole number becomes the float that the signature declares, and null reaches the function as None.
    other = step("other", f"{ADV}.strength=2", f"{ADV}.shift=null")
    assert other["critic/advantages/max"] == 2 * other["critic/score/max"]
    assert not same(weights(tmp_path / "other", 1), weights(tmp_path / "default", 1))


def test_a_loss_plugin_with_a_hyperparameter_trains(short, plugin):
    name, plugins = plugin(LOSS)
    loss_mode = f"{ACTOR}.policy_loss.loss_mode=weighted_{name}"
    steps = run(short, plugins, loss_mode, f"{LOSS_KWARGS}.power=2", f"{LOSS_KWARGS}.clip_low=0.5")
    assert steps[1]["actor/weight"] == pytest.approx(0.25)


def test_a_built_in_takes_arguments_without_a_key(short, tmp_path):
    eps = f"{ADV}.eps=1.0"
    run(short, f"trainer.default_local_dir={tmp_path}/plain")
    run(short, eps, f"trainer.default_local_dir={tmp_path}/eps")
    assert not same(weights(tmp_path / "plain", 1), weights(tmp_path / "eps", 1))
    assert not errors("algorithm.adv_estimator=grpo", eps, f"{LOSS_KWARGS}.ratio_cap=1.5")


def test_a_key_and_its_argument_give_the_same_numbers(short, tmp_path):
    off_policy = f"{ACTOR}.ppo_epochs=2"
    folder = f"trainer.default_local_dir={tmp_path}"
    by_key = run(short, off_policy, f"{folder}/key", f"{ACTOR}.clip_ratio_low=0.001")
    by_argument = run(short, off_policy, f"{folder}/argument", f"{LOSS_KWARGS}.clip_low=0.001")
    assert by_key[1]["actor/pg_clipfrac"] == by_argument[1]["actor/pg_clipfrac"]
    assert same(weights(tmp_path / "key", 1), weights(tmp_path / "argument", 1))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["algorithm.adv_estimator=reinforce", f"{ADV}.gama=0.9"],
            f"{ADV}.gama: reinforce takes gamma, normalisation, skip_gaps, compat. Did you mean gamma?",
        ),
        (
            [f"{LOSS_KWARGS}.ratio_cup=2"],
            f"{LOSS_KWARGS}.ratio_cup: vanilla takes clip_low, clip_high, clip_c, ratio_cap, level. "
            "Did you mean ratio_cap?",
        ),
        (
            ["algorithm.adv_estimator=flash_reinforce", f"{ADV}.eps=1"],
            f"{ADV}.eps: flash_reinforce takes no hyperparameters.",
        ),
        (
            ["algorithm.adv_estimator=grpo", f"{ADV}.eps=small"],
            f"{ADV}.eps: grpo expects number, got 'small'.",
        ),
        (
            ["algorithm.adv_estimator=grpo", f"{ADV}.singleton=one"],
            f"{ADV}.singleton: grpo expects 'score' or 'zero', got 'one'.",
        ),
        (
            [f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{LOSS_KWARGS}.generator=7"],
            f"{LOSS_KWARGS}.generator: clip_cov expects Generator or null, got 7.",
        ),
        (
            ["algorithm.adv_estimator=grpo", f"{ADV}.groups=[1,2]"],
            f"{ADV}.groups: the trainer passes groups to grpo; it is no hyperparameter.",
        ),
        (
            ["algorithm.adv_estimator=gdpo", f"{ADV}.component_weights=[1,2]"],
            "it is no hyperparameter. Set algorithm.gdpo_reward_weights.",
        ),
        (
            ["algorithm.adv_estimator=reinforce", f"{ADV}.gamma=0.9", "algorithm.gamma=0.99"],
            f"{ADV}.gamma: 0.9, but algorithm.gamma=0.99 sets the same argument of reinforce. "
            "Set only one of the two keys.",
        ),
        (
            [f"{LOSS_KWARGS}.clip_low=0.1", f"{ACTOR}.clip_ratio=0.2"],
            f"{LOSS_KWARGS}.clip_low: 0.1, but {ACTOR}.clip_ratio=0.2 sets the same argument of vanilla.",
        ),
        (
            [
                "algorithm.rollout_correction.bypass_mode=true",
                "algorithm.rollout_correction.loss_type=reinforce",
                f"{LOSS_KWARGS}.loss_type=ppo_clip",
            ],
            "algorithm.rollout_correction.loss_type=reinforce sets the same argument of bypass_mode.",
        ),
    ],
)
def test_a_mistake_is_named_before_the_run(overrides, words):
    (message,) = errors(*overrides)
    assert words in message


def test_a_plugin_is_checked_too(plugin):
    name, plugins = plugin(ESTIMATOR)
    chosen = f"algorithm.adv_estimator=scaled_{name}"
    assert errors(plugins, chosen, f"{ADV}.strenght=1") == [
        f"{ADV}.strenght: scaled_{name} takes strength, shift. Did you mean strength?"
    ]
    assert errors(plugins, chosen, f"{ADV}.strength=[1]") == [
        f"{ADV}.strength: scaled_{name} expects number, got [1]."
    ]
    assert not errors(plugins, chosen, f"{ADV}.strength=1e-3")


def test_a_hyperparameter_without_a_default_must_be_set(plugin):
    name, plugins = plugin(NEEDS_STRENGTH)
    assert errors(plugins, f"algorithm.adv_estimator=demanding_{name}") == [
        f"{ADV}.strength: not set, but demanding_{name} needs strength, which has no default. The trainer "
        f"itself passes {', '.join(ADVANTAGE_INPUTS)}."
    ]


def test_a_run_that_was_not_checked_refuses_as_well(short):
    with pytest.raises(ConfigError, match=r"grpo takes norm_by_std.*Did you mean eps"):
        run(short, f"{ADV}.epss=1.0")


HIGH_ENTROPY = """
from strop.algorithms.advantages.outcome import grpo
from strop.catalog import ADVANTAGES
SEEN = []

@ADVANTAGES.register("high_entropy_{name}", needs=("group", "entropy"), min_group=2)
def high_entropy(rewards, mask, groups, entropy, *, share: float = 0.2):
    found = grpo(rewards, mask, groups=groups).advantages
    keep = entropy >= entropy[mask > 0].quantile(1 - share)
    SEEN.append((entropy, mask, found * keep))
    return found * keep
"""


@pytest.mark.parametrize("bypass", ["true", "false"])
def test_an_estimator_gets_the_entropy_of_each_token(
    overrides: list[str], task: Path, tmp_path: Path, bypass: str
) -> None:
    """Also where the old log-probs are those of the engine, or of the update itself."""
    file = tmp_path / f"entropy_{bypass}.py"
    file.write_text(HIGH_ENTROPY.format(name=bypass))
    found = run(
        overrides,
        f"plugins=[{file}]",
        f"algorithm.adv_estimator=high_entropy_{bypass}",
        f"algorithm.rollout_correction.bypass_mode={bypass}",
        "trainer.record_steps=[1]",
        "trainer.total_training_steps=1",
    )
    ((entropy, mask, advantages),) = load_module(str(file)).SEEN
    sampled = load_file(tmp_path / "run" / "recorded" / "step_1" / "gen.safetensors")
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    for row, tokens in enumerate(sampled["tokens"]):
        length = int(sampled["lengths"][row])
        start = int(sampled["prompt_lengths"][row]) - 1
        with torch.no_grad():
            logits = model(tokens[None, :length]).logits[0, start : length - 1].double()
        expected = torch.distributions.Categorical(logits=logits).entropy().float()
        torch.testing.assert_close(entropy[row, : len(expected)], expected, rtol=1e-5, atol=1e-5)
    kept = ((advantages != 0) & (mask > 0)).sum() / (advantages.any(-1)[:, None] * mask).sum()
    assert 0 < kept < 1
    assert found[1]["actor/grad_norm"] > 0
    assert found[1]["actor/entropy"] == pytest.approx(float(entropy[mask > 0].mean()), rel=1e-5)
