"""The rules of `rules.py` and `run_rules.py` in reverse: from our keys to OpenRLHF's flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from strop.config.openrlhf.rules import ACTOR, CORRECTION, OUT_OF_REACH, REF, ROLLOUT
from strop.config.openrlhf.run_rules import END_ONLY, contents_key, optimizer_groups
from strop.config.openrlhf.table import (
    ESTIMATORS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    SCHEDULES,
    TRANSFORMS,
    ConvertValue,
    NoEquivalentError,
    about_critic,
    as_list,
    join_commas,
    rows_of,
)


@dataclass
class ReverseDraft:
    """The keys to convert, and the flags found so far."""

    verb: str
    keys: dict[str, object]
    flags: dict[str, object] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    unexpressed: list[tuple[str, object, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def has_critic(self) -> bool:
        forced = self.keys.get("critic.enable")
        if forced is not None:
            return bool(forced)
        return self.keys.get("algorithm.adv_estimator", "gae") == "gae"

    def matters(self, key: str) -> bool:
        """Whether the role that a key belongs to exists."""
        if about_critic(key):
            return self.has_critic
        return bool(self.keys.get("reward_model.enable")) or not key.startswith("reward_model.model.")

    def get(self, key: str, otherwise: object = None) -> Any:
        """The value of a key, or `otherwise` when it is not set; the key counts as used."""
        self.used.add(key)
        value = self.keys.get(key)
        return otherwise if value is None else value

    def set_flag(self, flag: str, value: object) -> None:
        """Add a flag, unless its value is OpenRLHF's default."""
        row = rows_of(self.verb)[flag]
        if isinstance(value, tuple):
            value = list(value)
        if value is None or value is False or (row.when != "say" and value == row.default(3)):
            return
        self.flags[flag] = value

    def report(self, key: str, reason: str) -> None:
        """Record a key that OpenRLHF cannot express."""
        self.used.add(key)
        self.unexpressed.append((key, self.keys.get(key), reason))


def placement(draft: ReverseDraft) -> None:
    """All roles share the actor's GPUs here; OpenRLHF has flags for each role."""
    nodes = draft.get("trainer.nnodes", 1)
    gpus = draft.get("trainer.n_gpus_per_node")
    if gpus is None:
        return
    for role in ("actor", "ref", "critic"):
        draft.set_flag(f"{role}.num_nodes", nodes)
        draft.set_flag(f"{role}.num_gpus_per_node", gpus)
    reward_nodes = draft.get("reward_model.nnodes", 1)
    reward_gpus = draft.get("reward_model.n_gpus_per_node", 8)
    if draft.get("reward_model.enable_resource_pool", False):
        draft.set_flag("reward.num_nodes", reward_nodes)
        draft.set_flag("reward.num_gpus_per_node", reward_gpus)
        draft.set_flag("train.colocate_actor_ref", True)
    else:
        draft.set_flag("reward.num_nodes", nodes)
        draft.set_flag("reward.num_gpus_per_node", gpus)
        draft.set_flag("train.colocate_all", True)
    engines = nodes * gpus // draft.get(f"{ROLLOUT}.tensor_model_parallel_size", 1)
    draft.set_flag("vllm.num_engines", max(engines, 1))


def batch(draft: ReverseDraft) -> None:
    n = draft.get(f"{ROLLOUT}.n", 1)
    draft.set_flag("rollout.batch_size", draft.get("data.train_batch_size"))
    draft.set_flag("rollout.n_samples_per_prompt", n)
    mini = draft.get(f"{ACTOR}.ppo_mini_batch_size")
    if mini is not None:
        draft.set_flag("train.batch_size", mini * n)
    draft.set_flag("train.micro_batch_size", draft.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu"))
    draft.set_flag("rollout.micro_batch_size", draft.get(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"))
    pairs = (
        ("critic.ppo_mini_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
        ("critic.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
        (f"{REF}.log_prob_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        ("critic.forward_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        ("reward_model.micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    )
    for key, leader in pairs:
        value = draft.get(key)
        exists = draft.has_critic or not key.startswith("critic.")
        if value is not None and exists and value != draft.get(leader, value):
            draft.report(key, f"one flag decides this and {leader}")


def lengths(draft: ReverseDraft) -> None:
    prompt = draft.get("data.max_prompt_length")
    response = draft.get("data.max_response_length")
    total = draft.get(f"{ROLLOUT}.max_model_len")
    if total is None and None not in (prompt, response):
        total = prompt + response
    if total is None:
        return
    draft.set_flag("data.max_len", total)
    if response is not None and response < total - 1:
        draft.set_flag("rollout.max_new_tokens", response)
    if prompt is not None and prompt < total - 1:
        draft.report(
            "data.max_prompt_length",
            f"a prompt may use all of --data.max_len {total}; shorten the prompts instead",
        )
    if draft.get("data.truncation", "left") != "left":
        draft.report("data.truncation", "over-long prompts lose their beginning")


def kl(draft: ReverseDraft) -> None:
    in_loss = draft.get(f"{ACTOR}.use_kl_loss")
    in_reward = draft.get("algorithm.use_kl_in_reward")
    draft.used |= {"algorithm.kl_penalty", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"}
    draft.used |= {f"algorithm.kl_ctrl.{name}" for name in ("kl_coef", "type", "target_kl", "horizon")}
    if in_loss is None and in_reward is None:
        return
    if not in_loss and not in_reward:
        draft.set_flag("algo.kl.init_coef", 0.0)
        return
    if in_reward:
        estimator_key = "algorithm.kl_penalty"
        coef_key = "algorithm.kl_ctrl.kl_coef"
    else:
        estimator_key = f"{ACTOR}.kl_loss_type"
        coef_key = f"{ACTOR}.kl_loss_coef"
    if in_loss and in_reward:
        draft.report(
            f"{ACTOR}.use_kl_loss", "the KL is either in the reward or in the loss; it is left in the reward"
        )
    draft.set_flag("algo.kl.use_loss", not in_reward)
    draft.set_flag("algo.kl.init_coef", draft.get(coef_key))
    named(draft, "algo.kl.estimator", KL_ESTIMATORS.to_openrlhf, estimator_key)
    if in_reward and draft.get("algorithm.kl_ctrl.type") == "adaptive":
        draft.set_flag("algo.kl.target", draft.get("algorithm.kl_ctrl.target_kl"))
        draft.set_flag("algo.kl.horizon", draft.get("algorithm.kl_ctrl.horizon"))


def named(draft: ReverseDraft, flag: str, to_openrlhf: ConvertValue, key: str) -> None:
    """Convert a name, or report that OpenRLHF does not know it."""
    value = draft.get(key)
    if value is None:
        return
    try:
        draft.set_flag(flag, to_openrlhf(value))
    except NoEquivalentError as reason:
        draft.report(key, str(reason))


def clip(draft: ReverseDraft) -> None:
    both = draft.get(f"{ACTOR}.clip_ratio")
    low, high = (draft.get(f"{ACTOR}.clip_ratio_{side}", both) for side in ("low", "high"))
    if None not in (low, high) and (low != high or low != both):
        draft.set_flag("actor.eps_clip_low_high", [low, high])
    else:
        draft.set_flag("actor.eps_clip", both)
    dual = draft.get(f"{ACTOR}.clip_ratio_c")
    if dual is not None and dual < OUT_OF_REACH:
        draft.set_flag("actor.dual_clip", dual)


def policy_loss(draft: ReverseDraft) -> None:
    named(draft, "actor.policy_loss_type", POLICY_LOSSES.to_openrlhf, f"{ACTOR}.policy_loss.loss_mode")
    if draft.get(f"{ACTOR}.loss_agg_mode", "token-mean") != "token-mean":
        draft.report(f"{ACTOR}.loss_agg_mode", "the loss is a mean over the tokens of an update")


def estimator(draft: ReverseDraft) -> None:
    draft.get("algorithm.compat")
    centred = draft.get("algorithm.norm_adv_by_std_in_grpo") is False
    if centred and draft.get("algorithm.adv_estimator") == "grpo":
        draft.set_flag("algo.advantage.estimator", "dr_grpo")
    else:
        named(draft, "algo.advantage.estimator", ESTIMATORS.to_openrlhf, "algorithm.adv_estimator")


def critic_model(draft: ReverseDraft) -> None:
    path = draft.get("critic.model.path")
    default_path = draft.keys.get("actor_rollout_ref.model.path")
    if draft.keys.get("reward_model.enable"):
        default_path = draft.keys.get("reward_model.model.path") or default_path
    if draft.has_critic and path is not None and path != default_path:
        draft.set_flag("critic.model_name_or_path", path)


def reward(draft: ReverseDraft) -> None:
    path = draft.get("reward_model.model.path")
    if draft.get("reward_model.enable"):
        draft.set_flag("reward.model_name_or_path", path)
    file = draft.get("custom_reward_function.path")
    name = draft.get("custom_reward_function.name")
    url = draft.get("reward_model.remote_url")
    if file is not None:
        draft.set_flag("reward.remote_url", file)
        if name != "reward_func":
            draft.notes.append(
                f"{file}: OpenRLHF calls reward_func(queries, prompts, labels) with lists; wrap {name}."
            )
    elif url is not None:
        draft.set_flag("reward.remote_url", join_commas(url))


def overlong(draft: ReverseDraft) -> None:
    length, factor = (draft.get(f"reward_model.overlong_buffer.{key}") for key in ("len", "penalty_factor"))
    if draft.get("reward_model.overlong_buffer.enable"):
        draft.set_flag("reward.overlong_buffer_len", length)
        draft.set_flag("reward.overlong_penalty_factor", factor)


def ptx(draft: ReverseDraft) -> None:
    coef = draft.get("algorithm.ptx_coef")
    if draft.get("algorithm.pretrain_files") is not None:
        draft.report(
            "algorithm.pretrain_files",
            f"the mixed language-model loss (weight {coef}) was removed from OpenRLHF",
        )


def filter_groups(draft: ReverseDraft) -> None:
    metric = draft.get("algorithm.filter_groups.metric")
    bounds = draft.get("algorithm.filter_groups.range")
    if not draft.get("algorithm.filter_groups.enable"):
        return
    draft.set_flag("algo.dynamic_filtering_enable", True)
    draft.set_flag("algo.dynamic_filtering_range", bounds)
    if metric not in (None, "score"):
        draft.report("algorithm.filter_groups.metric", "prompts are filtered by their mean score")


def correction(draft: ReverseDraft) -> None:
    flag = "algo.advantage.is_correction_"
    draft.get(f"{ROLLOUT}.calculate_log_probs")
    weights = draft.get(f"{CORRECTION}.rollout_is")
    upper = draft.get(f"{CORRECTION}.rollout_is_threshold")
    reject = draft.get(f"{CORRECTION}.rollout_rs")
    band = draft.get(f"{CORRECTION}.rollout_rs_threshold")
    if weights is None and reject is None:
        return
    if weights != "token" or reject not in (None, "seq_mean_k1"):
        draft.report(
            f"{CORRECTION}.rollout_is", "only token weights, alone or with seq_mean_k1 rejection, have a flag"
        )
        return
    try:
        kind, low, high = _band(upper, reject, band)
    except (ValueError, ZeroDivisionError):
        draft.report(f"{CORRECTION}.rollout_is_threshold", "the bounds are not two positive numbers")
        return
    draft.set_flag(flag + "enable", True)
    draft.set_flag(flag + "type", kind)
    draft.set_flag(flag + "threshold", [low, high])


def _band(upper: float | str, reject: str | None, band: object) -> tuple[str, float, float]:
    """OpenRLHF's type of correction, and its two bounds."""
    if reject:  # our band is engine / trainer, OpenRLHF's is trainer / engine
        low, high = (float(f"{1 / float(bound):.6g}") for bound in reversed(str(band).split("_")))
        return "seq-mask-tis", low, high
    if "_" in str(upper):
        low, high = map(float, str(upper).split("_"))
        return "icepop", low, high
    # We have no lower bound; 0.5 is OpenRLHF's usual one.
    return "tis", min(0.5, float(upper) / 2), float(upper)


def evaluation(draft: ReverseDraft) -> None:
    draft.set_flag("eval.steps", draft.get("trainer.test_freq"))
    draft.set_flag("eval.temperature", draft.get(f"{ROLLOUT}.val_kwargs.temperature"))
    draft.set_flag("eval.n_samples_per_prompt", draft.get(f"{ROLLOUT}.val_kwargs.n"))
    draft.get(f"{ROLLOUT}.val_kwargs.do_sample")
    if draft.get("trainer.val_before_train") and draft.keys.get("data.val_files"):
        draft.report("trainer.val_before_train", "OpenRLHF does not evaluate before the first step")


def dynamic_batch(draft: ReverseDraft) -> None:
    train = draft.get(f"{ACTOR}.ppo_max_token_len_per_gpu")
    forward = draft.get(f"{ROLLOUT}.log_prob_max_token_len_per_gpu")
    draft.used |= {f"{REF}.log_prob_max_token_len_per_gpu"}
    draft.used |= {f"critic.{name}_max_token_len_per_gpu" for name in ("ppo", "forward")}
    if draft.get(f"{ACTOR}.use_dynamic_bsz"):
        draft.set_flag("train.dynamic_batch_enable", True)
        draft.set_flag("train.max_tokens_per_gpu", train)
        if forward != train:
            draft.set_flag("rollout.max_tokens_per_gpu", forward)


def sequence_parallel(draft: ReverseDraft) -> None:
    draft.used |= {f"{REF}.ulysses_sequence_parallel_size", "critic.ulysses_sequence_parallel_size"}
    key = "ulysses_sequence_parallel_size"
    if draft.verb == "ppo":
        key = f"{ACTOR}.ulysses_sequence_parallel_size"
    draft.set_flag("ds.ring_attn_size", draft.get(key))


def schedule(draft: ReverseDraft) -> None:
    for prefix, key, shape_key in optimizer_groups(draft.verb):
        shape = draft.get(shape_key)
        warmup = draft.get(f"{key}.lr_warmup_steps_ratio")
        floor = draft.get(f"{key}.min_lr_ratio")
        if prefix == "critic." and not draft.has_critic:
            continue
        if shape in (None, "cosine"):  # OpenRLHF's cosine_with_min_lr is its default; plain cosine falls to 0
            if floor == 0:
                draft.set_flag(f"{prefix}lr_scheduler", "cosine")
            draft.set_flag(f"{prefix}min_lr_ratio", floor or None)
        else:
            named(draft, f"{prefix}lr_scheduler", SCHEDULES.to_openrlhf, shape_key)
        draft.set_flag(f"{prefix}lr_warmup_ratio", warmup)


def checkpoint(draft: ReverseDraft) -> None:
    draft.set_flag("ckpt.path", draft.get("trainer.default_local_dir"))
    period = draft.get("trainer.save_freq")
    if isinstance(period, int) and period >= END_ONLY:
        period = -1
    draft.set_flag("ckpt.save_steps", period)
    contents = draft.get(contents_key(draft.verb))
    if contents is not None:
        draft.set_flag("ckpt.disable_ds", "optimizer" not in contents)
        draft.set_flag("ckpt.save_hf", "hf_model" in contents)


def logger(draft: ReverseDraft) -> None:
    names = as_list(draft.get("trainer.logger", []))
    if "wandb" in names:
        draft.set_flag("logger.wandb.key", "True")
    if "tensorboard" in names:
        draft.set_flag("logger.tensorboard_dir", "./tensorboard")
    unknown = [name for name in names if name not in ("console", "file", "wandb", "tensorboard")]
    if unknown:
        draft.report("trainer.logger", f"no such tracker: {', '.join(unknown)}")


def sup_length(draft: ReverseDraft) -> None:
    draft.set_flag("data.max_len", draft.get("data.max_length"))
    if draft.get("data.truncation", "right") != "right":
        draft.report("data.truncation", "over-long rows are cut on the right")


def columns(draft: ReverseDraft) -> None:
    conversation = draft.get("data.multiturn.enable")
    messages = draft.get("data.multiturn.messages_key")
    prompt = draft.get("data.prompt_key")
    response = draft.get("data.response_key")
    draft.set_flag("data.multiturn", bool(conversation))
    if conversation:
        draft.set_flag("data.input_key", messages)
    else:
        draft.set_flag("data.input_key", prompt)
        draft.set_flag("data.output_key", response)


def sft_template(draft: ReverseDraft) -> None:
    template = draft.get("data.input_template")
    draft.set_flag("data.input_template", template)
    chat_template = draft.keys.get("data.apply_chat_template")
    if template is None and "data.input_template" in draft.keys and not chat_template:
        draft.set_flag("data.input_template", "{}")  # without the flag OpenRLHF uses its own template


def dpo_loss(draft: ReverseDraft) -> None:
    if draft.get("loss.type") == "ipo" and draft.get("loss.length_normalized") is not False:
        draft.report("loss.length_normalized", "IPO sums log-probs there")
    named(draft, "model.ipo_enable", TRANSFORMS["dpo_loss"].to_openrlhf, "loss.type")


REVERSE_RULES: dict[str, Callable[[ReverseDraft], None]] = {
    rule.__name__: rule
    for rule in (
        placement, batch, lengths, kl, clip, policy_loss, estimator, critic_model, reward, overlong, ptx,
        filter_groups, correction, evaluation, dynamic_batch, sequence_parallel, schedule, checkpoint, logger,
        sup_length, columns, sft_template, dpo_loss,
    )
}  # fmt: skip
