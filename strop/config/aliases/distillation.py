"""verl's section `distillation` (0.8 to 0.10) as algorithm.distillation."""

from __future__ import annotations

from collections.abc import Mapping

from strop.config.typed import ConfigError

SECTION = "distillation."
LOSS = "distillation.distillation_loss."
OURS = "algorithm.distillation."
REVERSE_KL = ("k1", "kl")
"""Loss modes that are the policy's log-prob minus the teacher's."""


def teacher_section(leaves: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The leaves with verl's distillation under Strop's names, if it is enabled, and a notice.

    Strop has verl's k1 loss with a policy gradient, which is not verl's default.
    """
    found = dict(leaves)
    if not leaves.get(f"{SECTION}enabled"):
        return found, []
    mode = leaves.get(f"{LOSS}loss_mode", "k3")
    gradient = leaves.get(f"{LOSS}use_policy_gradient", False)
    if mode not in REVERSE_KL or not gradient:
        raise ConfigError(
            f"{LOSS}loss_mode={mode} with use_policy_gradient={gradient}: only the reverse KL of the sampled "
            f"tokens as a reward is supported. Set {LOSS}loss_mode=k1 and {LOSS}use_policy_gradient=true."
        )
    moved: dict[str, object] = {f"{OURS}enable": True, f"{OURS}path": _teacher(leaves)}
    moved[f"{OURS}task_reward"] = leaves.get(f"{LOSS}use_task_rewards", True)
    if moved[f"{OURS}task_reward"]:  # verl ignores the coefficient of a loss that stands alone
        moved[f"{OURS}coef"] = leaves.get(f"{LOSS}distillation_loss_coef")
    moved[f"{OURS}max_log_ratio"] = leaves.get(f"{LOSS}loss_max_clamp")
    for path in leaves:
        if path.startswith(SECTION):
            del found[path]
    said = {name: value for name, value in moved.items() if value is not None}
    settings = ", ".join(f"{name}={value}" for name, value in said.items())
    notice = (
        f"distillation.* is now {settings}. The teacher is a frozen model on the actor's devices; "
        f"{OURS}nnodes gives it nodes of its own."
    )
    return {**said, **found}, [notice]


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
