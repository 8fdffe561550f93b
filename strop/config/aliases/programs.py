"""Defaults of verl's programs that differ from ours, for commands that only one of its programs takes."""

from __future__ import annotations

from collections.abc import Container, Mapping

from strop.config.aliases.async_lengths import SYNC_STEPS
from strop.config.aliases.row import PPO

BYPASS = "algorithm.rollout_correction.bypass_mode"
FULLY_ASYNC: dict[str, object] = {
    "trainer.async_training.staleness_threshold": 0.1,
    SYNC_STEPS: 4,
    "trainer.async_training.partial_rollout": True,
    "actor_rollout_ref.actor.use_rollout_log_probs": True,
    BYPASS: True,
}
"""Of fully_async_main, which reads fully_async_ppo_trainer.yaml without being told."""
ONE_STEP_OFF: dict[str, object] = {BYPASS: True}
"""Of one_step_off_policy.main_ppo."""
SFT_TRAINER: dict[str, object] = {
    "optim.lr": 1e-3,
    "optim.lr_scheduler": "constant",
    "optim.lr_warmup_steps_ratio": 0.0,
    "optim.betas": [0.9, 0.999],
}
"""Of sft_trainer since verl 0.7: its groups optim/fsdp and optim/megatron. fsdp_sft_trainer has ours."""


def fill_defaults(
    leaves: dict[str, object], root: str, named: Container[str], written: Mapping[str, object]
) -> list[str]:
    """Add the defaults of the program that the command is meant for to `leaves`, the keys that the user set;
    returns the notice. `named`: keys and groups on the command line; `written`: the keys as the user wrote
    them."""
    found = _program(root, named, written)
    if found is None:
        return []
    program, mark, defaults = found
    missing = {key: value for key, value in defaults.items() if leaves.get(key) is None}
    if not missing:
        return []
    leaves.update(missing)
    filled = " ".join(f"{key}={value}".replace(" ", "") for key, value in missing.items())
    return [f"{mark} is for verl's {program}, whose defaults hold for what is not set: {filled}."]


def _program(
    root: str, named: Container[str], written: Mapping[str, object]
) -> tuple[str, str, dict[str, object]] | None:
    """The program, what shows that the command is for it, and its defaults."""
    if root == "sft_trainer":
        if "engine" in named or any(key.startswith("engine.") for key in written):
            return "sft_trainer", "engine", SFT_TRAINER
        return None
    separate = written.get("actor_rollout_ref.hybrid_engine") is False
    if not separate or root not in PPO or "trainer.v1.trainer_mode" in written:
        return None
    mark = "actor_rollout_ref.hybrid_engine=False"
    if any(key.startswith("async_training.") for key in written):
        return "fully_async_main", mark, FULLY_ASYNC
    return "one_step_off_policy.main_ppo", mark, ONE_STEP_OFF
