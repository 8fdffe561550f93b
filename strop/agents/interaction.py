"""Simulated users: they reply to the policy when it calls no tool.

    class Polite(BaseInteraction):
        async def generate_response(self, instance_id, messages, **kwargs):
            return should_stop, "what the user says", reward_of_the_last_answer, {}

One object serves all episodes of a run; the state of an episode is kept under its `instance_id`. A row
chooses by extra_info.interaction_kwargs.name, and its interaction_kwargs are passed to the methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.agents.config_files import load_target, read_agent_file
from strop.registry import did_you_mean

KEY = "rollout.multi_turn.interaction_config_path"
ChatMessage = dict[str, Any]
"""One message of a conversation: role, content and what else the chat template reads."""
Reply = tuple[bool, str, float, dict[str, object]]
"""Whether the conversation ends here, what the user says, the reward of the latest answer, and numbers to
report."""


class BaseInteraction:
    """Subclass it, or write any class with these coroutines."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.config = dict(config)
        self.name = str(config.get("name", type(self).__name__))

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str:
        """Begin an episode with the row's interaction_kwargs; the id that the other methods get."""
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[ChatMessage], **kwargs: Any) -> Reply:
        """Return the user's reply to the conversation so far."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what it replies: write generate_response."
        )

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Return the score of the whole conversation; it is reported as `interaction_score`, and the scorer
        sees it."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """End an episode, however it ended."""


class Interactions:
    """The named interactions of a run."""

    def __init__(self, by_name: Mapping[str, BaseInteraction] | None = None) -> None:
        """The values may be of any class with the coroutines of `BaseInteraction`."""
        self.by_name = dict(by_name or {})

    @classmethod
    def from_config(cls, path: str | None) -> Interactions:
        """Read a YAML file: `interaction: [{name, class_name, config}]`."""
        if path is None:
            return cls()
        by_name: dict[str, BaseInteraction] = {}
        for number, entry in enumerate(_entries(path), 1):
            where = f"{path}, interaction {number}"
            name, interaction = _interaction_of(entry, Path(path).parent, where)
            if name in by_name:
                raise ValueError(
                    f"{where}: the name {name!r} is taken by an earlier one. Give each its own `name`."
                )
            by_name[name] = interaction
        return cls(by_name)

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def choose(self, kwargs: Mapping[str, object] | None) -> BaseInteraction | None:
        """Return the interaction that a row's interaction_kwargs name; None for rows without, and for rows
        that name none in a run without interactions (verl's tool data has such interaction_kwargs)."""
        if not kwargs or (not self.by_name and "name" not in kwargs):
            return None
        if not self.by_name:
            raise ValueError(
                "the row has interaction_kwargs, but no interactions are configured: set "
                "rollout.multi_turn.interaction_config_path."
            )
        name = kwargs.get("name")
        if name is None and len(self.by_name) == 1:
            return next(iter(self.by_name.values()))
        if not isinstance(name, str) or name not in self.by_name:
            known = ", ".join(self.by_name)
            raise ValueError(
                f"interaction_kwargs.name={name!r} is none of the configured interactions "
                f"({known}).{did_you_mean(str(name), self.by_name)}"
            )
        return self.by_name[name]


def _entries(path: str) -> Sequence[object]:
    content = read_agent_file(path, KEY)
    entries = content.get("interaction") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            f"{KEY}={path} must hold `interaction:` with a list of {{name, class_name, config}}."
        )
    return entries


def _interaction_of(entry: object, folder: Path, where: str) -> tuple[str, BaseInteraction]:
    """Return name and object of one entry."""
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise ValueError(
            f"{where} is {entry!r}; it needs class_name: package.module.Class or path/to/file.py:Class."
        )
    interaction_class = load_target(entry["class_name"], folder, where)
    default_name = interaction_class.__name__.removesuffix("Interaction").lower()
    name = str(entry.get("name") or default_name)
    if not inspect.iscoroutinefunction(getattr(interaction_class, "generate_response", None)):
        raise ValueError(
            f"{where}: {entry['class_name']} needs a method `async def generate_response(instance_id, "
            "messages)`."
        )
    return name, interaction_class({**(entry.get("config") or {}), "name": name})
