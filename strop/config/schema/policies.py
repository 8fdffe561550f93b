"""The section of one policy in rollout.agent.policies."""

from __future__ import annotations

from dataclasses import dataclass

from strop.config.schema.fields import setting


@dataclass(eq=False)
class AgentPolicyConfig:
    """A policy of several that play in one episode: a LoRA adapter over model.path."""

    train: bool = setting(True)
    """False: its weights never change, and its sequences are not trained on."""
    path: str | None = None
    """Folder of a peft adapter to begin with. By default the adapter is new, so that the policy begins as
    model.path."""
