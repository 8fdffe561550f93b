"""What the YAML files of agents share: reading them, and loading the classes and functions that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strop.config.yaml_files import read_yaml
from strop.registry import load_attribute

BUILT_IN_CLASSES = {
    "verl.tools.gsm8k_tool.Gsm8kTool": "strop.agents.gsm8k.Gsm8kTool",
    "verl.interactions.gsm8k_interaction.Gsm8kInteraction": "strop.agents.gsm8k.Gsm8kInteraction",
}
"""Tools and interactions of verl that Strop has too, for files that name verl's."""
VERL_ADVICE = (
    " BaseTool, ToolResponse and OpenAIFunctionToolSchema can be imported from strop.agents.verl_tool "
    "instead, BaseInteraction from strop.agents.interaction."
)


def read_agent_file(path: str, key: str) -> object:
    """Return the content of a user's YAML file; `key` is the setting that names it."""
    return read_yaml(Path(path).expanduser(), f"{key}={path}")


def load_target(target: str, folder: Path, where: str) -> Any:
    """Return what `module.Name`, `module:Name` or `path/to/file.py:Name` stands for.

    Paths are relative to `folder`, then to the working directory. Errors name `where`.
    """
    target = BUILT_IN_CLASSES.get(target, target)
    module, colon, name = str(target).rpartition(":")
    if not colon:
        module, _, name = str(target).rpartition(".")
    if not module or not name:
        raise ValueError(f"{where}: {target!r} must be module.Name or path/to/file.py:Name.")
    if module.endswith(".py") and (folder / module).is_file():
        module = str(folder / module)
    try:
        return load_attribute(module, name)
    except ValueError as error:
        advice = VERL_ADVICE if "No module named 'verl" in str(error) else ""
        raise ValueError(f"{where}: {error}{advice}") from error
