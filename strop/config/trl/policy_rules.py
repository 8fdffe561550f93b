"""The rules of GRPO and RLOO: batch sizes, the policy loss, the KL term and the engine."""

from __future__ import annotations

from strop.config.openrlhf.command import Override
from strop.config.trl.draft import ACTOR, Draft
from strop.config.trl.script import Expression
from strop.config.trl.table import BETAS, GENERATIONS, RL
from strop.registry import did_you_mean

_ROLLOUT = "actor_rollout_ref.rollout"
_NO_DUAL_CLIP = 1e9
_LOSSES = {
    "grpo": ("seq-mean-token-mean", "vanilla"),
    "dapo": ("token-mean", "vanilla"),
    "bnpo": ("token-mean", "vanilla"),
    "dr_grpo": ("seq-mean-token-sum-norm", "vanilla"),
    "cispo": ("token-mean", "cispo"),
    "sapo": ("seq-mean-token-mean", "sapo"),
    "luspo": ("seq-mean-token-sum", "luspo"),
    "vespo": ("token-mean", "vespo"),
}
"""TRL's loss_type, and loss_agg_mode and policy_loss.loss_mode here."""


def completions_per_update(draft: Draft) -> int:
    return int(draft.number("per_device_train_batch_size") * draft.number("gradient_accumulation_steps"))


def completions_per_step(draft: Draft) -> int:
    """TRL's generation_batch_size: completions that are sampled at a time."""
    if draft.value("generation_batch_size") is not None:
        return int(draft.number("generation_batch_size"))
    if draft.value("steps_per_generation") is not None:
        per_device = draft.number("per_device_train_batch_size")
        return int(per_device * draft.number("steps_per_generation"))
    return completions_per_update(draft)


def updates_per_step(draft: Draft) -> float:
    """Optimizer updates of TRL in one step of sampling and training here."""
    if draft.run.trainer not in RL:
        return 1
    iterations = draft.run.config.get("num_iterations", 1)
    if not isinstance(iterations, int):
        iterations = 1
    return max(completions_per_step(draft) / completions_per_update(draft), 1) * iterations


def batches(draft: Draft) -> None:
    """TRL counts completions, this configuration prompts."""
    generations = draft.run.config.get("num_generations", GENERATIONS[draft.run.trainer])
    if isinstance(generations, Expression) or not isinstance(generations, int):
        draft.unmapped.append(("num_generations", str(generations), "batch sizes cannot be computed from it"))
        return
    step = completions_per_step(draft)
    update = min(completions_per_update(draft), step)
    for what, completions in (("sampled", step), ("trained on in one update", update)):
        if completions % generations:
            raise ValueError(
                f"{draft.run.source}: {completions} completions are {what} at a time, which "
                f"num_generations={generations} does not divide. TRL refuses that too, or splits groups."
            )
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    more = ("generation_batch_size", "steps_per_generation")
    draft.put("data.train_batch_size", step // generations, *names, *more)
    draft.put(f"{ACTOR}.ppo_mini_batch_size", update // generations, *names)
    per_device = int(draft.number("per_device_train_batch_size"))
    draft.put(f"{ACTOR}.ppo_micro_batch_size_per_gpu", per_device, "per_device_train_batch_size")
    draft.notes.append(
        f"{step // generations} prompts x {generations} = {step} completions per step, "
        f"{step // update} update(s) of {update}, counted for one process. With N processes multiply "
        "data.train_batch_size and ppo_mini_batch_size by N, and set trainer.n_gpus_per_node=N."
    )


def policy_loss(draft: Draft) -> None:
    """Estimator, clipping and the reduction of token losses."""
    estimator = draft.run.trainer
    draft.overrides["estimator"] = Override("algorithm.adv_estimator", estimator, "", "the trainer's class")
    draft.overrides["compat"] = Override("algorithm.compat", "trl", "", "TRL's conventions (docs/compat.md)")
    low = draft.number("epsilon")
    high = low if draft.value("epsilon_high") is None else draft.number("epsilon_high")
    draft.put(f"{ACTOR}.clip_ratio_low", low, "epsilon")
    draft.put(f"{ACTOR}.clip_ratio_high", high, "epsilon_high")
    cap = _NO_DUAL_CLIP if draft.value("delta") is None else draft.number("delta")
    draft.put(f"{ACTOR}.clip_ratio_c", cap, "delta", why="without delta there is no dual clip")
    if estimator == "rloo":
        why = "TRL adds the log-probs of a completion's tokens"
        key = f"{ACTOR}.loss_agg_mode"
        draft.overrides[key] = Override(key, "seq-mean-token-sum", "", why)
        if updates_per_step(draft) > 1:
            draft.notes.append(
                "TRL's RLOO clips the ratio of a whole completion, here that of each token: with several "
                "updates per step the losses differ."
            )
        return
    name = str(draft.value("loss_type") or "dapo")
    if name not in _LOSSES:
        raise ValueError(
            f"{draft.run.source}: loss_type={name!r} is none of {', '.join(_LOSSES)}."
            f"{did_you_mean(name, _LOSSES)}"
        )
    aggregation, loss = _LOSSES[name]
    draft.put(f"{ACTOR}.loss_agg_mode", aggregation, "loss_type")
    if draft.value("importance_sampling_level") == "sequence":
        draft.put(f"{ACTOR}.policy_loss.loss_mode", "gspo", "importance_sampling_level")
    elif loss != "vanilla":
        draft.put(f"{ACTOR}.policy_loss.loss_mode", loss, "loss_type")
    scale = draft.value("scale_rewards")
    if scale == "batch":
        draft.unmapped.append(("scale_rewards", "batch", "grpo divides by the deviation of a group or by 1"))
    divided = scale not in (False, "none", "batch")
    draft.put("algorithm.norm_adv_by_std_in_grpo", divided, "scale_rewards")


def kl(draft: Draft) -> None:
    beta = draft.run.config.get("beta", BETAS[draft.run.trainer])
    if isinstance(beta, Expression) or not isinstance(beta, int | float) or beta == 0:
        return
    if draft.run.trainer == "rloo":
        draft.put("algorithm.use_kl_in_reward", True, "beta")
        draft.put("algorithm.kl_ctrl.kl_coef", float(beta), "beta")
    else:
        draft.put(f"{ACTOR}.use_kl_loss", True, "beta")
        draft.put(f"{ACTOR}.kl_loss_coef", float(beta), "beta")


def engine(draft: Draft) -> None:
    if draft.given("top_k"):
        draft.put(f"{_ROLLOUT}.top_k", draft.value("top_k") or 0, "top_k")
    if draft.value("use_vllm") is not True:
        return
    if draft.value("vllm_mode") == "server":
        draft.notes.append("vllm_mode=server: start it and set rollout.engine_kwargs.vllm.url.")
    draft.put(f"{_ROLLOUT}.name", "vllm", "use_vllm")
    memory = draft.number("vllm_gpu_memory_utilization")
    draft.put(f"{_ROLLOUT}.gpu_memory_utilization", memory, "vllm_gpu_memory_utilization")
    width = int(draft.number("vllm_tensor_parallel_size"))
    draft.put(f"{_ROLLOUT}.tensor_model_parallel_size", width, "vllm_tensor_parallel_size")
    draft.notes.append("Without rollout.name=vllm the native engine samples, from the trainer's own weights.")


def validation(draft: Draft) -> None:
    """TRL samples in evaluation as in training, several completions per prompt; here it is greedy by
    default."""
    if draft.value("eval_strategy") == "no":
        return
    config = draft.run.config
    settings = {
        "do_sample": True,
        "temperature": config.get("temperature", 1.0),
        "top_p": config.get("top_p", 1.0),
        "top_k": draft.value("top_k") or 0,
        "n": config.get("num_generations_eval")
        or config.get("num_generations", GENERATIONS[draft.run.trainer]),
    }
    for name, value in settings.items():
        if not isinstance(value, Expression):
            draft.put(f"{_ROLLOUT}.val_kwargs.{name}", value, "eval_strategy", why="sampled as in training")
    if not config.get("eval_on_start"):
        draft.put("trainer.val_before_train", False, "eval_strategy", why="not before the first step")
