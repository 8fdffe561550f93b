"""Rules of the `algorithm.distillation` section."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.catalog import POLICY_LOSSES
from strop.config.derived import has_task_reward
from strop.config.hyperparameters import policy_loss_name
from strop.config.rules.findings import Findings, error, warning
from strop.config.schema.distillation import REVERSE_KL, TOPK

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.ppo import PpoConfig

SECTION = "algorithm.distillation"
SERVER_KEYS = ("model", "api_key_env", "max_concurrent", "timeout")


def teacher(loaded: Loaded[PpoConfig]) -> Findings:
    """The teacher is one model: weights here, or a server."""
    config = loaded.config
    settings = config.algorithm.distillation
    if not settings.enable:
        for path in loaded.set_by_user:
            if path.startswith(f"{SECTION}.") and path != f"{SECTION}.enable":
                yield warning(path, f"no effect without {SECTION}.enable=true.")
        return
    if not settings.path and not settings.url:
        yield error(f"{SECTION}.path", f"not set. {SECTION}.enable=true needs a teacher: path or url.")
    if settings.path and settings.url:
        yield error(
            f"{SECTION}.url",
            f"{settings.url}, but {SECTION}.path={settings.path}: there is one teacher. Unset one of them.",
        )
    if settings.url and settings.nnodes:
        yield error(f"{SECTION}.nnodes", f"{settings.nnodes}, but the teacher is behind url. Set 0.")
    if not settings.url:
        for name in SERVER_KEYS:
            if f"{SECTION}.{name}" in loaded.set_by_user:
                yield warning(f"{SECTION}.{name}", f"no effect without {SECTION}.url.")
    yield from _loss(loaded)
    temperature = config.actor_rollout_ref.rollout.temperature
    if settings.url and temperature not in (0.0, 1.0):
        yield error(
            "actor_rollout_ref.rollout.temperature",
            f"{temperature:g}, but the log-probs of a server ({SECTION}.url) are those of temperature 1. Set "
            f"it to 1, or load the teacher here ({SECTION}.path).",
        )


def _loss(loaded: Loaded[PpoConfig]) -> Findings:
    """The divergence is one that its use allows."""
    config = loaded.config
    settings = config.algorithm.distillation
    mode = settings.loss_mode
    if settings.use_policy_gradient and mode not in REVERSE_KL:
        yield error(
            f"{SECTION}.loss_mode",
            f"{mode}, but a reward ({SECTION}.use_policy_gradient=true) is the reverse KL of the sampled "
            f"token. Set k1, or {SECTION}.use_policy_gradient=false.",
        )
    if not settings.use_policy_gradient and mode in REVERSE_KL:
        yield error(
            f"{SECTION}.loss_mode",
            f"{mode} with {SECTION}.use_policy_gradient=false: the gradient of this loss does not depend on "
            f"the teacher. Set {TOPK} or k3, or {SECTION}.use_policy_gradient=true.",
        )
    if mode == TOPK and "megatron" in (
        config.actor_rollout_ref.actor.strategy,
        config.actor_rollout_ref.ref.strategy,
    ):
        yield error(
            f"{SECTION}.loss_mode",
            f"{mode} does not work with strategy=megatron. Set k3, or actor_rollout_ref.actor.strategy=fsdp "
            "and actor_rollout_ref.ref.strategy=fsdp.",
        )
    floor = settings.log_prob_min_clamp
    if floor is not None and not floor < 0:
        yield error(
            f"{SECTION}.log_prob_min_clamp",
            f"{floor:g}: log-probs are below 0, so all of them would count as this. Set it to -10, or null.",
        )
    only = {"discount": settings.use_policy_gradient}
    only |= dict.fromkeys(("topk", "log_prob_min_clamp"), mode == TOPK)
    for name, used in only.items():
        if f"{SECTION}.{name}" in loaded.set_by_user and not used:
            yield warning(f"{SECTION}.{name}", f"no effect with loss_mode={mode}.")


def without_task_reward(loaded: Loaded[PpoConfig]) -> Findings:
    """What reads scores has nothing to read where the teacher's term is the whole advantage."""
    config = loaded.config
    if has_task_reward(config):
        return
    algorithm = config.algorithm
    reads_scores = {
        "algorithm.filter_groups.enable": algorithm.filter_groups.enable,
        "algorithm.use_pf_ppo": algorithm.use_pf_ppo,
        "algorithm.use_kl_in_reward": algorithm.use_kl_in_reward,
        "critic.enable": bool(config.critic.enable),
    }
    for key, chosen in reads_scores.items():
        if chosen:
            yield error(
                key,
                f"true, but {SECTION}.task_reward=false: rewards are not trained on. Set it to false, or "
                f"{SECTION}.task_reward=true.",
            )
    loss_mode = policy_loss_name(config)
    penalty = POLICY_LOSSES.entry(loss_mode).facts["penalty"]
    if config.algorithm.distillation.is_loss and penalty:
        yield error(
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            f"{loss_mode}, but {SECTION}.task_reward=false with {SECTION}.use_policy_gradient=false: all "
            f"advantages are 0, so only its penalty is left ({penalty}). Set it to vanilla, which adds "
            f"nothing there, or {SECTION}.use_policy_gradient=true with {SECTION}.loss_mode=k1, which makes "
            "the teacher's term the advantage.",
        )
