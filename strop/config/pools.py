"""Roles that have machines of their own, beside those of the ranks."""

from __future__ import annotations

from typing import Any

from strop.config.objective import has_critic, has_reference, uses_lora


def pools(config: Any) -> dict[str, Any]:
    """The section of each such role, which says how many machines (nnodes) and devices on each (n_gpus_per_node)."""
    group: Any = getattr(config, "actor_rollout_ref", None)
    if group is None:
        return {}
    reward = config.reward_model
    asked = {
        "rollout": (group.rollout, group.rollout.nnodes > 0),
        "reference": (group.ref, group.ref.nnodes > 0 and has_reference(config) and not uses_lora(config)),
        "critic": (config.critic, config.critic.nnodes > 0 and has_critic(config)),
        "reward": (reward, reward.enable_resource_pool and reward.enable and not reward.remote_url),
    }
    return {role: section for role, (section, own) in asked.items() if own}


def devices_of(section: Any) -> int:
    return int(section.nnodes * section.n_gpus_per_node)
