"""The rules of `openrlhf_rules.py` and `openrlhf_run_rules.py`, read backwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from strop.config.openrlhf_rules import ACTOR, CORRECTION, OUT_OF_REACH, REF, ROLLOUT
from strop.config.openrlhf_run_rules import END_ONLY
from strop.config.openrlhf_table import about_critic, rows_of
from strop.config.openrlhf_transforms import ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, SCHEDULES, NoEquivalentError, join_commas


@dataclass
class Sheet:
    """Keys to say in OpenRLHF's words, and what was said."""

    verb: str
    keys: dict[str, Any]
    flags: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    unexpressed: list[tuple[str, Any, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def has_critic(self) -> bool:
        forced = self.keys.get("critic.enable")
        return bool(forced) if forced is not None else self.keys.get("algorithm.adv_estimator", "gae") == "gae"

    def matters(self, key: str) -> bool:
        """Whether the role a key speaks about exists."""
        if about_critic(key):
            return self.has_critic
        return bool(self.keys.get("reward_model.enable")) or not key.startswith("reward_model.model.")

    def get(self, key: str, otherwise: Any = None) -> Any:
        self.used.add(key)
        value = self.keys.get(key)
        return otherwise if value is None else value

    def say(self, flag: str, value: Any) -> None:
        """Add a flag unless OpenRLHF would do the same without it."""
        row = rows_of(self.verb)[flag]
        if isinstance(value, tuple):
            value = list(value)
        if value is None or value is False or (row.when != "say" and value == row.default(3)):
            return
        self.flags[flag] = value

    def cannot(self, key: str, reason: str) -> None:
        self.used.add(key)
        self.unexpressed.append((key, self.keys.get(key), reason))


def placement(sheet: Sheet) -> None:
    """Everything shares the actor's GPUs here, which OpenRLHF has to be told role by role."""
    nodes, gpus = sheet.get("trainer.nnodes", 1), sheet.get("trainer.n_gpus_per_node")
    if gpus is None:
        return
    own = sheet.get("reward_model.enable_resource_pool", False)
    for role in ("actor", "ref", "critic", "reward"):
        pool = own and role == "reward"
        sheet.say(f"{role}.num_nodes", sheet.get("reward_model.nnodes", 1) if pool else nodes)
        sheet.say(f"{role}.num_gpus_per_node", sheet.get("reward_model.n_gpus_per_node", 8) if pool else gpus)
    sheet.used |= {"reward_model.nnodes", "reward_model.n_gpus_per_node"}
    sheet.say("train.colocate_actor_ref" if own else "train.colocate_all", True)
    sheet.say("vllm.num_engines", max(nodes * gpus // sheet.get(f"{ROLLOUT}.tensor_model_parallel_size", 1), 1))


def batch(sheet: Sheet) -> None:
    n = sheet.get(f"{ROLLOUT}.n", 1)
    sheet.say("rollout.batch_size", sheet.get("data.train_batch_size"))
    sheet.say("rollout.n_samples_per_prompt", n)
    mini = sheet.get(f"{ACTOR}.ppo_mini_batch_size")
    sheet.say("train.batch_size", None if mini is None else mini * n)
    sheet.say("train.micro_batch_size", sheet.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu"))
    sheet.say("rollout.micro_batch_size", sheet.get(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"))
    pairs = (
        ("critic.ppo_mini_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
        ("critic.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
        (f"{REF}.log_prob_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        ("critic.forward_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        ("reward_model.micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    )
    for key, leader in pairs:
        value = sheet.get(key)
        exists = sheet.has_critic or not key.startswith("critic.")
        if value is not None and exists and value != sheet.get(leader, value):
            sheet.cannot(key, f"one flag decides this and {leader}")


def lengths(sheet: Sheet) -> None:
    prompt, response = sheet.get("data.max_prompt_length"), sheet.get("data.max_response_length")
    total = sheet.get(f"{ROLLOUT}.max_model_len")
    if total is None and None not in (prompt, response):
        total = prompt + response
    if total is None:
        return
    sheet.say("data.max_len", total)
    sheet.say("rollout.max_new_tokens", response if response is not None and response < total - 1 else None)
    if prompt is not None and prompt < total - 1:
        sheet.cannot("data.max_prompt_length", f"a prompt may use all of --data.max_len {total}; shorten the prompts instead")
    if sheet.get("data.truncation", "left") != "left":
        sheet.cannot("data.truncation", "over-long prompts lose their beginning")


def kl(sheet: Sheet) -> None:
    in_loss, in_reward = sheet.get(f"{ACTOR}.use_kl_loss"), sheet.get("algorithm.use_kl_in_reward")
    keys = ("algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type")
    adaptive = tuple(f"algorithm.kl_ctrl.{name}" for name in ("type", "target_kl", "horizon"))
    sheet.used.update(keys + adaptive)
    if in_loss is None and in_reward is None:
        return
    if not in_loss and not in_reward:
        sheet.say("algo.kl.init_coef", 0.0)
        return
    name, coef = (keys[0], keys[1]) if in_reward else (keys[3], keys[2])
    if in_loss and in_reward:
        sheet.cannot(f"{ACTOR}.use_kl_loss", "the KL is either in the reward or in the loss; it is left in the reward")
    sheet.say("algo.kl.use_loss", not in_reward)
    sheet.say("algo.kl.init_coef", sheet.get(coef))
    named(sheet, "algo.kl.estimator", KL_ESTIMATORS.here_to_there, name)
    if in_reward and sheet.get("algorithm.kl_ctrl.type") == "adaptive":
        sheet.say("algo.kl.target", sheet.get("algorithm.kl_ctrl.target_kl"))
        sheet.say("algo.kl.horizon", sheet.get("algorithm.kl_ctrl.horizon"))


def named(sheet: Sheet, flag: str, back: Callable[[Any], Any], key: str) -> None:
    """A name that may be unknown on the other side."""
    value = sheet.get(key)
    if value is None:
        return
    try:
        sheet.say(flag, back(value))
    except NoEquivalentError as reason:
        sheet.cannot(key, str(reason))


def clip(sheet: Sheet) -> None:
    both = sheet.get(f"{ACTOR}.clip_ratio")
    low, high = (sheet.get(f"{ACTOR}.clip_ratio_{side}", both) for side in ("low", "high"))
    if None not in (low, high) and (low != high or low != both):
        sheet.say("actor.eps_clip_low_high", [low, high])
    else:
        sheet.say("actor.eps_clip", both)
    dual = sheet.get(f"{ACTOR}.clip_ratio_c")
    sheet.say("actor.dual_clip", dual if dual is not None and dual < OUT_OF_REACH else None)


def policy_loss(sheet: Sheet) -> None:
    named(sheet, "actor.policy_loss_type", POLICY_LOSSES.here_to_there, f"{ACTOR}.policy_loss.loss_mode")
    if sheet.get(f"{ACTOR}.loss_agg_mode", "token-mean") != "token-mean":
        sheet.cannot(f"{ACTOR}.loss_agg_mode", "the loss is a mean over the tokens of an update")


def estimator(sheet: Sheet) -> None:
    sheet.get("algorithm.compat")
    centred = sheet.get("algorithm.norm_adv_by_std_in_grpo") is False
    if centred and sheet.get("algorithm.adv_estimator") == "grpo":
        sheet.say("algo.advantage.estimator", "dr_grpo")
    else:
        named(sheet, "algo.advantage.estimator", ESTIMATORS.here_to_there, "algorithm.adv_estimator")


def critic_model(sheet: Sheet) -> None:
    path = sheet.get("critic.model.path")
    starts_from = sheet.keys.get("reward_model.model.path") if sheet.keys.get("reward_model.enable") else None
    if sheet.has_critic and path is not None and path != (starts_from or sheet.keys.get("actor_rollout_ref.model.path")):
        sheet.say("critic.model_name_or_path", path)


def reward(sheet: Sheet) -> None:
    path = sheet.get("reward_model.model.path")
    if sheet.get("reward_model.enable"):
        sheet.say("reward.model_name_or_path", path)
    file, name, url = (
        sheet.get(key) for key in ("custom_reward_function.path", "custom_reward_function.name", "reward_model.remote_url")
    )
    if file is not None:
        sheet.say("reward.remote_url", file)
        if name != "reward_func":
            sheet.notes.append(
                f"{file}: OpenRLHF calls reward_func(queries, prompts, labels) with lists; {name} has to be wrapped."
            )
    elif url is not None:
        sheet.say("reward.remote_url", join_commas(url))


def overlong(sheet: Sheet) -> None:
    on, length, factor = (sheet.get(f"reward_model.overlong_buffer.{name}") for name in ("enable", "len", "penalty_factor"))
    if on:
        sheet.say("reward.overlong_buffer_len", length)
        sheet.say("reward.overlong_penalty_factor", factor)


def ptx(sheet: Sheet) -> None:
    coef = sheet.get("algorithm.ptx_coef")
    if sheet.get("algorithm.pretrain_files") is not None:
        sheet.cannot("algorithm.pretrain_files", f"the mixed language-model loss (weight {coef}) was removed from OpenRLHF")


def filter_groups(sheet: Sheet) -> None:
    on, metric, bounds = (sheet.get(f"algorithm.filter_groups.{name}") for name in ("enable", "metric", "range"))
    if not on:
        return
    sheet.say("algo.dynamic_filtering_enable", True)
    sheet.say("algo.dynamic_filtering_range", bounds)
    if metric not in (None, "score"):
        sheet.cannot("algorithm.filter_groups.metric", "prompts are filtered by their mean score")


def correction(sheet: Sheet) -> None:
    flag = "algo.advantage.is_correction_"
    sheet.get(f"{ROLLOUT}.calculate_log_probs")
    weights, upper, reject, band = (
        sheet.get(f"{CORRECTION}.{name}")
        for name in ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
    )
    if weights is None and reject is None:
        return
    if weights != "token" or reject not in (None, "seq_mean_k1"):
        sheet.cannot(f"{CORRECTION}.rollout_is", "only token weights, alone or with seq_mean_k1 rejection, have a flag")
        return
    try:
        kind, low, high = _band(upper, reject, band)
    except (ValueError, ZeroDivisionError):
        sheet.cannot(f"{CORRECTION}.rollout_is_threshold", "the bounds are not two positive numbers")
        return
    sheet.say(flag + "enable", True)
    sheet.say(flag + "type", kind)
    sheet.say(flag + "threshold", [low, high])


def _band(upper: Any, reject: str | None, band: Any) -> tuple[str, float, float]:
    if reject:  # engine / trainer here, trainer / engine there
        low, high = (float(f"{1 / float(bound):.6g}") for bound in reversed(str(band).split("_")))
        return "seq-mask-tis", low, high
    if "_" in str(upper):
        low, high = map(float, str(upper).split("_"))
        return "icepop", low, high
    return "tis", min(0.5, float(upper) / 2), float(upper)  # there is no lower bound here; 0.5 is OpenRLHF's usual one


def evaluation(sheet: Sheet) -> None:
    sheet.say("eval.steps", sheet.get("trainer.test_freq"))
    sheet.say("eval.temperature", sheet.get(f"{ROLLOUT}.val_kwargs.temperature"))
    sheet.say("eval.n_samples_per_prompt", sheet.get(f"{ROLLOUT}.val_kwargs.n"))
    sheet.get(f"{ROLLOUT}.val_kwargs.do_sample")
    if sheet.get("trainer.val_before_train") and sheet.keys.get("data.val_files"):
        sheet.cannot("trainer.val_before_train", "OpenRLHF does not evaluate before the first step")


def dynamic_batch(sheet: Sheet) -> None:
    train, forward = sheet.get(f"{ACTOR}.ppo_max_token_len_per_gpu"), sheet.get(f"{ROLLOUT}.log_prob_max_token_len_per_gpu")
    sheet.used |= {f"{REF}.log_prob_max_token_len_per_gpu"}
    sheet.used |= {f"critic.{name}_max_token_len_per_gpu" for name in ("ppo", "forward")}
    if sheet.get(f"{ACTOR}.use_dynamic_bsz"):
        sheet.say("train.dynamic_batch_enable", True)
        sheet.say("train.max_tokens_per_gpu", train)
        sheet.say("rollout.max_tokens_per_gpu", forward if forward != train else None)


def sequence_parallel(sheet: Sheet) -> None:
    ppo = sheet.verb == "ppo"
    sheet.used |= {f"{REF}.ulysses_sequence_parallel_size", "critic.ulysses_sequence_parallel_size"}
    sheet.say(
        "ds.ring_attn_size", sheet.get(f"{ACTOR}.ulysses_sequence_parallel_size" if ppo else "ulysses_sequence_parallel_size")
    )


def schedule(sheet: Sheet) -> None:
    ppo = sheet.verb == "ppo"
    for prefix, key in (("actor.", f"{ACTOR}.optim"), ("critic.", "critic.optim")) if ppo else (("", "optim"),):
        shape_key = f"{key}.lr_scheduler{'_type' * ppo}"
        shape, warmup, floor = (sheet.get(name) for name in (shape_key, f"{key}.lr_warmup_steps_ratio", f"{key}.min_lr_ratio"))
        if prefix == "critic." and not sheet.has_critic:
            continue
        if shape in (None, "cosine"):  # OpenRLHF's cosine_with_min_lr is its default; plain cosine falls to 0
            sheet.say(f"{prefix}lr_scheduler", "cosine" if floor == 0 else None)
            sheet.say(f"{prefix}min_lr_ratio", floor or None)
        else:
            named(sheet, f"{prefix}lr_scheduler", SCHEDULES.here_to_there, shape_key)
        sheet.say(f"{prefix}lr_warmup_ratio", warmup)


def checkpoint(sheet: Sheet) -> None:
    sheet.say("ckpt.path", sheet.get("trainer.default_local_dir"))
    period = sheet.get("trainer.save_freq")
    sheet.say("ckpt.save_steps", -1 if isinstance(period, int) and period >= END_ONLY else period)
    key = f"{ACTOR}.checkpoint.save_contents" if sheet.verb == "ppo" else "trainer.checkpoint.save_contents"
    contents = sheet.get(key)
    if contents is not None:
        sheet.say("ckpt.disable_ds", "optimizer" not in contents)
        sheet.say("ckpt.save_hf", "hf_model" in contents)


def logger(sheet: Sheet) -> None:
    names = sheet.get("trainer.logger", [])
    names = [names] if isinstance(names, str) else list(names)
    sheet.say("logger.wandb.key", "True" if "wandb" in names else None)
    sheet.say("logger.tensorboard_dir", "./tensorboard" if "tensorboard" in names else None)
    if others := [name for name in names if name not in ("console", "file", "wandb", "tensorboard")]:
        sheet.cannot("trainer.logger", f"no such tracker: {', '.join(others)}")


def sup_length(sheet: Sheet) -> None:
    sheet.say("data.max_len", sheet.get("data.max_length"))
    if sheet.get("data.truncation", "right") != "right":
        sheet.cannot("data.truncation", "over-long rows are cut on the right")


def columns(sheet: Sheet) -> None:
    conversation, messages = sheet.get("data.multiturn.enable"), sheet.get("data.multiturn.messages_key")
    prompt, response = sheet.get("data.prompt_key"), sheet.get("data.response_key")
    sheet.say("data.multiturn", bool(conversation))
    sheet.say("data.input_key", messages if conversation else prompt)
    sheet.say("data.output_key", None if conversation else response)


def sft_template(sheet: Sheet) -> None:
    template = sheet.get("data.input_template")
    sheet.say("data.input_template", template)
    if template is None and "data.input_template" in sheet.keys and not sheet.keys.get("data.apply_chat_template"):
        sheet.say("data.input_template", "{}")  # unset means OpenRLHF's own template


REVERSE_RULES: dict[str, Callable[[Sheet], None]] = {
    rule.__name__: rule
    for rule in (
        placement, batch, lengths, kl, clip, policy_loss, estimator, critic_model, reward, overlong, ptx, filter_groups,
        correction, evaluation, dynamic_batch, sequence_parallel, schedule, checkpoint, logger,
        sup_length, columns, sft_template,
    )
}  # fmt: skip
