"""Whose work a profile is of: the roles that have it enabled, and the ranks they name. Without any, all roles on rank 0."""

from __future__ import annotations

from typing import Any

ROLES = {
    "gen": "actor_rollout_ref.rollout",
    "old_log_prob": "actor_rollout_ref.actor",
    "update_actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "values": "critic",
    "update_critic": "critic",
    "reward": "reward_model",
}
"""Whose work a phase is."""


def is_profiled(config: Any, rank: int) -> bool:
    chosen = enabled(config).values()
    ranks = {rank for section in chosen for rank in section.ranks} or {0}
    return rank in ranks or any(section.all_ranks for section in chosen)


def enabled(config: Any) -> dict[str, Any]:
    """The `profiler` section of every role that has it and enables it."""
    found = {}
    for role in {*ROLES.values(), "actor_rollout_ref", ""}:
        section: Any = config
        for part in filter(None, role.split(".")):
            section = getattr(section, part, None)
        profiler: Any = getattr(section, "profiler", None)
        if hasattr(profiler, "tool_config") and profiler.enable:
            found[role] = profiler
    return found
