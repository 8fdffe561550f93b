"""Simulated users: what answers the policy where no tool does.

    class Polite(BaseInteraction):
        async def generate_response(self, instance_id, messages, **kwargs):
            return should_stop, "what the user says", reward_of_the_last_answer, {}

One object serves all episodes of a run; what belongs to one of them is kept under its `instance_id`. Rows choose by
extra_info.interaction_kwargs.name, and all of interaction_kwargs reaches the methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.agents.toolbox import load_target
from strop.registry import did_you_mean

Reply = tuple[bool, str, float, dict[str, Any]]
"""Whether the conversation ends here, what the user says, the reward of the latest answer, and numbers to report."""


class BaseInteraction:
    """Subclass it, or write any class with these coroutines."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.name = str(config.get("name", type(self).__name__))

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str:
        """Called once per episode with the row's interaction_kwargs; returns the id that the other methods get."""
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Reply:
        """The user's reply to the conversation so far."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it replies: write generate_response.")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """How the conversation went as a whole; reported as `interaction_score`, and shown to the scorer."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Called once per episode, however it ended."""


class Interactions:
    """The named interactions of a run."""

    def __init__(self, by_name: Mapping[str, Any] | None = None) -> None:
        self.by_name = dict(by_name or {})

    @classmethod
    def from_config(cls, path: str | None) -> Interactions:
        """From a YAML file: `interaction: [{name, class_name, config}]`."""
        if path is None:
            return cls()
        made: dict[str, Any] = {}
        for number, entry in enumerate(_entries(path), 1):
            where = f"{path}, interaction {number}"
            name, interaction = _made(entry, Path(path).parent, where)
            if name in made:
                raise ValueError(f"{where}: the name {name!r} is taken by an earlier one. Give each its own `name`.")
            made[name] = interaction
        return cls(made)

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def choose(self, kwargs: Mapping[str, Any] | None) -> Any | None:
        """The interaction that a row's interaction_kwargs name; None for rows without."""
        if not kwargs:
            return None
        if not self.by_name:
            raise ValueError(
                "the row has interaction_kwargs, but no interactions are configured: set "
                "rollout.multi_turn.interaction_config_path."
            )
        name = kwargs.get("name")
        if name is None and len(self.by_name) == 1:
            return next(iter(self.by_name.values()))
        if name not in self.by_name:
            known = ", ".join(self.by_name)
            raise ValueError(
                f"interaction_kwargs.name={name!r} is none of the configured interactions ({known})."
                f"{did_you_mean(str(name), self.by_name)}"
            )
        return self.by_name[name]


def read_yaml(path: str, key: str) -> Any:
    """The content of a user's YAML file that the setting `key` names."""
    import yaml

    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{key}={path}: there is no such file.")
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{key}={path} is not YAML: {' '.join(str(error).split())}") from error


def _entries(path: str) -> Sequence[Any]:
    key = "rollout.multi_turn.interaction_config_path"
    content = read_yaml(path, key)
    entries = content.get("interaction") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{key}={path} must hold `interaction:` with a list of {{name, class_name, config}}.")
    return entries


def _made(entry: Any, folder: Path, where: str) -> tuple[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise ValueError(f"{where} is {entry!r}; it needs class_name: package.module.Class or path/to/file.py:Class.")
    kind = load_target(entry["class_name"], folder, where)
    name = str(entry.get("name") or kind.__name__.removesuffix("Interaction").lower())
    if not inspect.iscoroutinefunction(getattr(kind, "generate_response", None)):
        raise ValueError(f"{where}: {entry['class_name']} needs a method `async def generate_response(instance_id, messages)`.")
    return name, kind({**(entry.get("config") or {}), "name": name})
