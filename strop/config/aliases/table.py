"""All rows, newest names first, and values that mean another value."""

from __future__ import annotations

from strop.config.aliases.row import Alias
from strop.config.aliases.verl_0_7 import VERL_0_7
from strop.config.aliases.verl_0_10 import VERL_0_10

ALIASES: tuple[Alias, ...] = (*VERL_0_10, *VERL_0_7)

NEVER = -1
VALUES: dict[tuple[str, object], object] = {
    ("trainer.test_freq", False): NEVER,
    ("trainer.save_freq", False): NEVER,
    ("trainer.resume_from_path", False): None,  # the default of verl 0.3
    ("algorithm.adv_estimator", "reward"): "reinforce",  # names of older guides: the return, no baseline
    ("algorithm.adv_estimator", "none"): "reinforce",
    ("actor_rollout_ref.rollout.checkpoint_engine.backend", "delta_sharded"): "nccl",
    ("engine.reshard_after_forward", "default"): None,
    ("engine.mixed_precision", True): None,
    ("engine.mixed_precision", False): None,
}
"""(key, value in verl) -> value of the same key here. None: the default."""

_FULL_KL = (
    "full needs the logits of both models, which are never kept; verl refuses it too. Choose low_var_kl "
    "(k3), k2 or k1"
)
REFUSED_VALUES: dict[tuple[str, object], str] = {
    ("algorithm.kl_penalty", "full"): _FULL_KL,
    ("algorithm.kl_penalty", "full+"): _FULL_KL,
    ("actor_rollout_ref.actor.kl_loss_type", "full"): _FULL_KL,
    ("actor_rollout_ref.actor.kl_loss_type", "full+"): _FULL_KL,
    (
        "actor_rollout_ref.rollout.name",
        "trtllm",
    ): "TensorRT-LLM is not supported. Choose vllm, sglang or native",
}
"""(key, value) that verl's documentation names and that does not exist -> the reason."""
