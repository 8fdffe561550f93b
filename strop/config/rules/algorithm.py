"""Rules of the `algorithm` section: what an advantage estimator needs, and rollout correction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.catalog import ADVANTAGES, POLICY_LOSSES
from strop.config.derived import has_task_reward, rollout_correction
from strop.config.hyperparameters import advantage_kwargs, policy_loss_kwargs
from strop.config.rules.findings import Findings, error, warning
from strop.config.rules.reward import ordered_pair

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.ppo import PpoConfig

LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"


def group_size(loaded: Loaded[PpoConfig]) -> Findings:
    """Estimators that compare the samples of a prompt need several."""
    name = loaded.config.algorithm.adv_estimator
    n = loaded.config.actor_rollout_ref.rollout.n
    facts = ADVANTAGES.entry(name).facts
    if not has_task_reward(loaded.config):
        return
    if n < facts["min_group"]:
        yield error(
            "actor_rollout_ref.rollout.n",
            f"{name} compares samples of one prompt and needs at least {facts['min_group']}, got n={n}. Set "
            "actor_rollout_ref.rollout.n=8.",
        )
    elif n == 1 and "group" in facts["needs"]:
        yield warning(
            "actor_rollout_ref.rollout.n",
            f"{name} compares the samples of one prompt, but n=1: there is no baseline. Set "
            "actor_rollout_ref.rollout.n=8.",
        )


def reward_components(loaded: Loaded[PpoConfig]) -> Findings:
    """gdpo: the parts of the score, and one weight for each."""
    algorithm = loaded.config.algorithm
    name = algorithm.adv_estimator
    parts = algorithm.gdpo_reward_keys
    weights = algorithm.gdpo_reward_weights
    if "reward_components" in ADVANTAGES.entry(name).facts["needs"] and not parts:
        yield warning(
            "algorithm.gdpo_reward_keys",
            f"not set, so {name} sees the score as its only part, which is grpo whitened.",
        )
    count = len(parts or ["score"])
    if weights is not None and len(weights) != count:
        yield error(
            "algorithm.gdpo_reward_weights",
            f"{len(weights)} weights for {count} parts ({parts}).",
        )


def filter_groups(loaded: Loaded[PpoConfig]) -> Findings:
    """Dynamic sampling compares the samples of a prompt."""
    groups = loaded.config.algorithm.filter_groups
    if groups.enable and loaded.config.actor_rollout_ref.rollout.n == 1:
        yield error(
            "algorithm.filter_groups.enable",
            "dynamic sampling compares the samples of one prompt; set actor_rollout_ref.rollout.n above 1.",
        )
    data = loaded.config.data
    if not groups.enable and data.gen_batch_size not in (None, data.train_batch_size):
        yield warning(
            "data.gen_batch_size",
            f"{data.gen_batch_size} has no effect without algorithm.filter_groups.enable=true: a step has "
            f"data.train_batch_size={data.train_batch_size} prompts.",
        )
    yield from ordered_pair("algorithm.filter_groups.range", groups.range)


def rollout_correction_inputs(loaded: Loaded[PpoConfig]) -> Findings:
    """Rollout correction needs the engine's log-probs, and rejection needs bounds."""
    config = loaded.config
    correction = rollout_correction(config)
    active = correction.rollout_is or correction.rollout_rs or correction.bypass_mode
    if active and not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield error(
            "actor_rollout_ref.rollout.calculate_log_probs",
            "false, but algorithm.rollout_correction compares with the engine's log-probs. Set it to true.",
        )
    if correction.rollout_rs and correction.rollout_rs_threshold is None:
        yield error(
            "algorithm.rollout_correction.rollout_rs_threshold",
            f"rollout_rs={correction.rollout_rs!r} needs bounds.",
        )


def bypass_mode(loaded: Loaded[PpoConfig]) -> Findings:
    """Bypass mode has a policy loss of its own, which computes the importance weights in each pass."""
    config = loaded.config
    correction = config.algorithm.rollout_correction
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if not correction.bypass_mode:
        if loss_mode == "bypass_mode":
            yield error(
                LOSS_MODE,
                "bypass_mode compares with the engine's log-probs, but those of the old policy are computed. "
                "Set algorithm.rollout_correction.bypass_mode=true, which selects this loss.",
            )
        return
    if LOSS_MODE in loaded.set_by_user and loss_mode not in ("vanilla", "bypass_mode"):
        yield error(
            LOSS_MODE,
            f"{loss_mode} has no effect with algorithm.rollout_correction.bypass_mode=true, which trains "
            f"loss_type={correction.loss_type}. For {loss_mode} with the engine's log-probs as the old ones "
            "set algorithm.rollout_correction.bypass_mode=false and "
            "actor_rollout_ref.actor.use_rollout_log_probs=true.",
        )
    if correction.rollout_is_batch_normalize:
        yield error(
            "algorithm.rollout_correction.rollout_is_batch_normalize",
            "true with bypass_mode=true: the weights are known in a micro-batch only, and its mean is not "
            "that of the batch. Set one of them to false.",
        )


def weights_of_vespo(loaded: Loaded[PpoConfig]) -> Findings:
    """vespo multiplies the weights of the tokens of a row, so each must be that of its token alone."""
    config = loaded.config
    correction = rollout_correction(config)
    loss = POLICY_LOSSES.entry(config.actor_rollout_ref.actor.policy_loss.loss_mode).name
    if correction.bypass_mode or loss != "vespo":
        return
    if correction.rollout_is == "sequence":
        yield error(
            "algorithm.rollout_correction.rollout_is",
            "sequence with loss_mode=vespo: every token has the weight of its sequence, and vespo multiplies "
            "the weights of tokens, so it would count once per token. Set it to token, or to null with "
            "actor_rollout_ref.actor.use_rollout_log_probs=true.",
        )
    if correction.rollout_is and correction.rollout_is_batch_normalize:
        yield error(
            "algorithm.rollout_correction.rollout_is_batch_normalize",
            "true with loss_mode=vespo: the mean that divides each weight would divide the product once per "
            "token. Set it to false.",
        )


def keyword_arguments(loaded: Loaded[PpoConfig]) -> Findings:
    """Keyword arguments that the advantage estimator or the policy loss does not take."""
    for arguments in (advantage_kwargs(loaded.config), policy_loss_kwargs(loaded.config)):
        for problem in arguments.problems(loaded.set_by_user):
            yield error(problem.key, problem.message)
