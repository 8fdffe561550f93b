"""Rules for the algorithm: several OpenRLHF flags set one key, or one flag sets several keys. One function
per decision.

A rule reads flags from the draft (`value` returns the default of a flag that was not typed) and puts keys on
it. `put` marks a key as implied when none of its flags was typed.
"""

from __future__ import annotations

from collections.abc import Callable

from strop.config.openrlhf.command import ConversionDraft
from strop.config.openrlhf.table import ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, split_commas

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
CORRECTION = "algorithm.rollout_correction"

# Log-ratios are clamped to 20 before exp, so no ratio exceeds e^20 = 4.9e8: a constant above it never binds.
OUT_OF_REACH = 1e9


def batch(draft: ConversionDraft) -> None:
    """OpenRLHF counts samples, our keys count prompts."""
    prompts = "rollout.batch_size"
    samples = "rollout.n_samples_per_prompt"
    size = "train.batch_size"
    micro = "train.micro_batch_size"
    forward = "rollout.micro_batch_size"
    P, n, B, m = (draft.value(flag) for flag in (prompts, samples, size, micro))
    if B % n:
        near = sorted({max(B // n, 1) * n, (B // n + 1) * n})
        raise ValueError(
            f"{draft.name(size)} {B} counts samples and {draft.name(samples)} is {n}: an update would cut a "
            f"prompt's group. Set {draft.name(size)} to a multiple of {n}, for instance "
            f"{' or '.join(map(str, near))}."
        )
    if P * n < B:
        raise ValueError(
            f"{draft.name(size)} {B} is more than a step has: {draft.name(prompts)} {P} x "
            f"{draft.name(samples)} {n} = {P * n} samples. Set it to {P * n} or less."
        )
    draft.put("data.train_batch_size", P, prompts)
    if draft.given(samples):
        draft.put(f"{ROLLOUT}.n", n, samples)
    draft.put(
        f"{ACTOR}.ppo_mini_batch_size",
        B // n,
        size,
        samples,
        why=f"{B} samples / {n} per prompt = {B // n} prompts",
    )
    draft.put(f"{ACTOR}.ppo_micro_batch_size_per_gpu", m, micro)
    draft.put("critic.ppo_micro_batch_size_per_gpu", m, micro)
    for key in (f"{ROLLOUT}.log_prob", f"{REF}.log_prob", "critic.forward"):
        draft.put(f"{key}_micro_batch_size_per_gpu", draft.value(forward), forward)
    if draft.value("reward.model_name_or_path"):
        draft.put("reward_model.micro_batch_size_per_gpu", draft.value(forward), forward)
    if (P * n) % B:
        draft.notes.append(
            f"{P} x {n} samples are not a multiple of {B}: OpenRLHF drops the rest, here it is a smaller "
            "update."
        )


def lengths(draft: ConversionDraft) -> None:
    """Older generations have two limits, newer ones have one shared budget."""
    budget = "data.max_len"
    cap = "rollout.max_new_tokens"
    prompt = "prompt_max_len"
    response = "generate_max_len"
    if draft.generation == 1 or draft.given(prompt, response):
        draft.put("data.max_prompt_length", draft.value(prompt), prompt)
        draft.put("data.max_response_length", draft.value(response), response)
        draft.put(
            "data.truncation",
            "right",
            prompt,
            why="longer prompts lose their end there; here they are an error by default",
        )
        for flag in (budget, cap):
            draft.drop(flag, f"{draft.name(prompt)} and {draft.name(response)} decide")
        return
    total = draft.value(budget)
    if total < 2:
        raise ValueError(
            f"{draft.name(budget)} {total} leaves no room for a prompt and a response. Set it to at least 2."
        )
    draft.put("actor_rollout_ref.rollout.max_model_len", total, budget)
    draft.put(
        "data.max_prompt_length",
        total - 1,
        budget,
        why=f"a prompt may use the whole budget of {total} but one token",
    )
    if draft.value(cap) is not None:
        draft.put("data.max_response_length", min(draft.value(cap), total - 1), cap)
    else:
        draft.put(
            "data.max_response_length",
            total - 1,
            budget,
            why="a response gets what its prompt leaves of max_model_len",
        )
    draft.put(
        "data.truncation",
        "left",
        budget,
        why="longer prompts lose their beginning; here they are an error by default",
    )


def longest_sequence(draft: ConversionDraft) -> int:
    """Tokens of a prompt and its response."""
    lengths = ("prompt_max_len", "generate_max_len")
    if draft.generation == 1 or draft.given(*lengths):
        return sum(int(draft.value(name)) for name in lengths)
    return int(draft.value("data.max_len"))


def kl(draft: ConversionDraft) -> None:
    """KL in the reward, in the loss, or nowhere."""
    coef = "algo.kl.init_coef"
    target = "algo.kl.target"
    horizon = "algo.kl.horizon"
    in_loss = "algo.kl.use_loss"
    if draft.given("use_kl_estimator_k3"):
        estimator = "use_kl_estimator_k3"
        name: object = "low_var_kl"
    else:
        estimator = "algo.kl.estimator"
        name = KL_ESTIMATORS.from_openrlhf(draft.value(estimator))
    weight = draft.value(coef)
    if weight == 0:
        draft.put(
            "algorithm.use_kl_in_reward", False, coef, why="a coefficient of 0 means no reference model"
        )
        draft.put(f"{ACTOR}.use_kl_loss", False, coef, why="a coefficient of 0 means no reference model")
        for flag in (target, horizon, estimator, in_loss):
            draft.drop(flag, f"no effect while {draft.name(coef)} is 0")
    elif draft.value(in_loss):
        draft.put(f"{ACTOR}.use_kl_loss", True, in_loss)
        draft.put(f"{ACTOR}.kl_loss_coef", weight, coef, why="weight in the loss")
        draft.put(f"{ACTOR}.kl_loss_type", name, estimator)
        draft.put("algorithm.use_kl_in_reward", False, in_loss, why="the KL is in the loss instead")
        for flag in (target, horizon):
            draft.drop(flag, "the weight of a KL in the loss is constant")
    else:
        draft.put("algorithm.use_kl_in_reward", True, coef, why="KL is part of the reward there, off here")
        draft.put("algorithm.kl_ctrl.kl_coef", weight, coef, why="weight in the reward")
        if draft.given(estimator):
            draft.put("algorithm.kl_penalty", name, estimator)
        if draft.value(target) is None:
            draft.drop(horizon, f"no effect without {draft.name(target)}")
        else:
            draft.put("algorithm.kl_ctrl.type", "adaptive", target)
            draft.put("algorithm.kl_ctrl.target_kl", draft.value(target), target)
            if draft.given(horizon):
                draft.put("algorithm.kl_ctrl.horizon", draft.value(horizon), horizon)


def clip(draft: ConversionDraft) -> None:
    both = "actor.eps_clip"
    sides = "actor.eps_clip_low_high"
    dual = "actor.dual_clip"
    if draft.given(sides):
        low, high = draft.value(sides)
        draft.put(f"{ACTOR}.clip_ratio_low", low, sides)
        draft.put(f"{ACTOR}.clip_ratio_high", high, sides)
        draft.drop(both, f"{draft.name(sides)} wins")
    elif draft.given(both):
        draft.put(f"{ACTOR}.clip_ratio", draft.value(both), both)
    if draft.value(dual) is None:
        draft.put(
            f"{ACTOR}.clip_ratio_c",
            OUT_OF_REACH,
            dual,
            why="no dual clip there; ratios stay below e^20, so 1e9 never binds",
        )
    else:
        draft.put(f"{ACTOR}.clip_ratio_c", draft.value(dual), dual, why="same constant")


def policy_loss(draft: ConversionDraft) -> None:
    flag = "actor.policy_loss_type"
    if draft.given(flag):
        draft.put(f"{ACTOR}.policy_loss.loss_mode", POLICY_LOSSES.from_openrlhf(draft.value(flag)), flag)
    if draft.generation == 1:
        draft.put(
            f"{ACTOR}.loss_agg_mode",
            "seq-mean-token-mean",
            flag,
            why="the 2024 trainer averaged each sequence first",
        )


def estimator(draft: ConversionDraft) -> None:
    flag = "algo.advantage.estimator"
    samples = "rollout.n_samples_per_prompt"
    name = draft.value(flag)
    n = draft.value(samples)
    if name not in ("gae", "reinforce") and n < 2:
        raise ValueError(
            f"{draft.name(flag)} {name} compares the samples of a prompt, but {draft.name(samples)} is {n}. "
            "Set 2 or more."
        )
    if draft.given(flag):
        draft.put("algorithm.adv_estimator", ESTIMATORS.from_openrlhf(name), flag, why=f"{name} there")
    if name == "dr_grpo":
        draft.put(
            "algorithm.norm_adv_by_std_in_grpo",
            False,
            flag,
            why="dr_grpo does not divide by the group's deviation",
        )
    draft.put("algorithm.compat", "openrlhf", flag, why="OpenRLHF's numbers where ours deliberately differ")


def critic_model(draft: ConversionDraft) -> None:
    """The value model starts from the reward model when there is one."""
    flag = "critic.model_name_or_path"
    reward_flag = "reward.model_name_or_path"
    if draft.value(flag):
        draft.put("critic.model.path", draft.value(flag), flag, why="")
    elif draft.value(reward_flag):
        draft.put(
            "critic.model.path", draft.value(reward_flag), flag, why="the critic starts from the reward model"
        )


def reward(draft: ConversionDraft) -> None:
    model = "reward.model_name_or_path"
    remote = "reward.remote_url"
    path = draft.value(model)
    url = draft.value(remote)
    if path and "," in path:
        raise ValueError(
            f"{draft.name(model)} names several reward models ({path[:80]}). Give one, or combine them in a "
            "reward function."
        )
    if path:
        draft.put("reward_model.enable", True, model, why="a model scores")
        draft.put("reward_model.model.path", path, model, why="")
    if url and url.endswith(".py"):
        draft.put(
            "reward_model.remote_url", url, remote, why="reward_func(queries, prompts, labels) of a file"
        )
    elif url:
        draft.put("reward_model.remote_url", split_commas(url), remote, why="HTTP server(s), same protocol")
    if not path and not url and not draft.given("train.agent_func_path"):
        draft.notes.append(
            "The command has no reward: rows are scored by their data_source, or set "
            "custom_reward_function.path."
        )


def overlong(draft: ConversionDraft) -> None:
    length = "reward.overlong_buffer_len"
    factor = "reward.overlong_penalty_factor"
    if draft.value(length) is None:
        draft.drop(factor, f"no effect without {draft.name(length)}")
        return
    draft.put("reward_model.overlong_buffer.enable", True, length)
    draft.put("reward_model.overlong_buffer.len", int(draft.value(length)), length)
    if draft.given(factor):
        draft.put("reward_model.overlong_buffer.penalty_factor", draft.value(factor), factor)


def ptx(draft: ConversionDraft) -> None:
    data = "pretrain_data"
    coef = "ptx_coef"
    if draft.value(data) is None:
        draft.drop(coef, f"no effect without {draft.name(data)}")
        return
    draft.put("algorithm.pretrain_files", split_commas(draft.value(data)), data)
    draft.put("algorithm.ptx_coef", draft.value(coef), coef)


def filter_groups(draft: ConversionDraft) -> None:
    on = "algo.dynamic_filtering_enable"
    bounds = "algo.dynamic_filtering_range"
    if not draft.value(on):
        draft.drop(bounds, f"no effect without {draft.name(on)}")
        return
    draft.put("algorithm.filter_groups.enable", True, on)
    draft.put(
        "algorithm.filter_groups.metric",
        "score",
        on,
        why="OpenRLHF filters by the mean score of a prompt's samples",
    )
    draft.put("algorithm.filter_groups.range", draft.value(bounds), bounds)


def correction(draft: ConversionDraft) -> None:
    """Weights for the mismatch between the engine's and the trainer's probabilities."""
    on, bounds, kind = (f"algo.advantage.is_correction_{name}" for name in ("enable", "threshold", "type"))
    early = "use_icepop"
    if not draft.value(on):
        for flag in (bounds, kind, early):
            draft.drop(flag, f"no effect without {draft.name(on)}")
        return
    *lower, high = draft.value(bounds)
    low: float | None = lower[0] if lower else None
    how = "icepop" if draft.given(early) else draft.value(kind)
    if high <= 0 or (low is None and how != "tis") or (low is not None and not 0 < low < high):
        raise ValueError(
            f"{draft.name(bounds)} is {low} {high}, but {how} needs two numbers with 0 < low < high."
        )
    draft.put(f"{ROLLOUT}.calculate_log_probs", True, on, why="the engine's log-probabilities are needed")
    draft.put(f"{CORRECTION}.rollout_is", "token", on, why="one weight per token")
    if how == "tis":
        draft.put(f"{CORRECTION}.rollout_is_threshold", high, bounds, kind, why="weights are cut off above")
        if low is not None:
            draft.notes.append(
                f"{draft.name(bounds)}: OpenRLHF raises weights below {low} to it; here they are only cut "
                "off above."
            )
    elif how == "icepop":
        kinds = (early, bounds) if draft.given(early) else (kind, bounds)
        draft.put(
            f"{CORRECTION}.rollout_is_threshold",
            f"{low}_{high}",
            *kinds,
            why="weights outside the band become 0",
        )
    else:
        draft.put(
            f"{CORRECTION}.rollout_is_threshold", OUT_OF_REACH, kind, why="token weights are not cut off"
        )
        draft.put(
            f"{CORRECTION}.rollout_rs",
            "seq_mean_k1",
            kind,
            why="sequences with a mean ratio outside the band are dropped",
        )
        assert low is not None  # checked above for every kind but tis
        # k1 here is engine minus trainer, so its band is the reciprocal of OpenRLHF's trainer / engine.
        band = f"{1 / high:.6g}_{1 / low:.6g}"
        draft.put(
            f"{CORRECTION}.rollout_rs_threshold",
            band,
            bounds,
            kind,
            why=f"engine / trainer: 1/{high} to 1/{low}",
        )


def dpo_loss(draft: ConversionDraft) -> None:
    flag = "model.ipo_enable"
    if not draft.given(flag):
        return
    draft.put("loss.type", "ipo" if draft.value(flag) else "dpo", flag)


RULES: dict[str, Callable[[ConversionDraft], None]] = {
    rule.__name__: rule
    for rule in (
        batch,
        lengths,
        kl,
        clip,
        policy_loss,
        estimator,
        critic_model,
        reward,
        overlong,
        ptx,
        filter_groups,
        correction,
        dpo_loss,
    )
}
