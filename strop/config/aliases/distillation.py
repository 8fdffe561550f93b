"""verl's section `distillation` (0.8 to 0.10) as algorithm.distillation."""

from __future__ import annotations

from collections.abc import Mapping

from strop.config.aliases.without_effect import notice as without_effect_notice
from strop.config.typed import ConfigError

SECTION = "distillation."
LOSS = "distillation.distillation_loss."
OURS = "algorithm.distillation."
SAME = ("loss_mode", "use_policy_gradient", "topk", "loss_max_clamp", "log_prob_min_clamp")
"""Keys of the loss that have the same name and meaning here."""
READ = (*SAME, "use_task_rewards", "distillation_loss_coef")
"""Keys of the loss that have an effect."""
VERL_DEFAULTS = {"loss_mode": "k3", "use_policy_gradient": False}
"""Those of verl that differ from Strop's."""


def teacher_section(leaves: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The leaves with verl's distillation under Strop's names, if it is enabled, and a notice."""
    found = dict(leaves)
    if not leaves.get(f"{SECTION}enabled"):
        return found, []
    moved: dict[str, object] = {f"{OURS}enable": True, f"{OURS}path": _teacher(leaves)}
    moved[f"{OURS}task_reward"] = leaves.get(f"{LOSS}use_task_rewards", True)
    if moved[f"{OURS}task_reward"]:  # verl ignores the coefficient of a loss that stands alone
        moved[f"{OURS}coef"] = leaves.get(f"{LOSS}distillation_loss_coef")
    for name in SAME:
        value = leaves.get(f"{LOSS}{name}")
        moved[f"{OURS}{name}"] = VERL_DEFAULTS.get(name) if value is None else value
    left = []
    for path in leaves:
        if path.startswith(SECTION):
            del found[path]
        if path.startswith(LOSS) and path.removeprefix(LOSS) not in READ:
            left.append(path)
    said = {name: value for name, value in moved.items() if value is not None}
    settings = ", ".join(f"{name}={value}" for name, value in said.items())
    notice = (
        f"distillation.* is now {settings}. The teacher is a frozen model on the actor's devices; "
        f"{OURS}nnodes gives it nodes of its own."
    )
    notices = [notice]
    if left:
        reason = f"this loss reads {', '.join(READ)}; the policy loss is that of actor_rollout_ref.actor"
        notices.append(without_effect_notice(left, reason))
    return {**said, **found}, notices


def _teacher(leaves: Mapping[str, object]) -> object:
    """The path of the one teacher; the entry `teacher_model` counts only if there is no other."""
    paths: dict[str, object] = {}
    for path, value in leaves.items():
        if (
            path.startswith(f"{SECTION}teacher_models.")
            and path.endswith(".model_path")
            and value is not None
        ):
            paths[path] = value
    if len(paths) > 1:
        paths.pop(f"{SECTION}teacher_models.teacher_model.model_path", None)
    if len(paths) > 1:
        raise ConfigError(f"{' and '.join(paths)}: there is one teacher for all rows. Keep one of them.")
    return next(iter(paths.values()), None)
