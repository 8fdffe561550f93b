"""Parses the part of a command line that chooses a configuration: Hydra's options, a YAML file, overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from strop.config.typed import ConfigError

_OPTIONS = {
    "--config-name": "config",
    "-cn": "config",
    "--config-path": "search",
    "-cp": "search",
    "--config-dir": "search",
    "-cd": "search",
}
_HELP = "settings are written key=value; `strop config show NAME` lists them, `strop help` the commands"
_REFUSED = {
    "--multirun": "sweeps are not supported; start one run per value",
    "-m": "sweeps are not supported; start one run per value",
    "--help": _HELP,
    "-h": _HELP,
    "--cfg": "use `strop config show`",
    "-c": "use `strop config show`",
}


@dataclass
class ConfigArguments:
    """Overrides, the name and folder of a YAML file, and switches such as --json."""

    overrides: list[str] = field(default_factory=list)
    config: str | None = None
    search: str | None = None
    switches: set[str] = field(default_factory=set)


def parse(arguments: Sequence[str], switches: Sequence[str] = ()) -> ConfigArguments:
    """`key=value` overrides, `--config-name`, `--config-path`, one YAML file by its path, and the named
    switches."""
    asked = ConfigArguments()
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in _OPTIONS:
            if not equals:
                if not rest:
                    raise ConfigError(f"{name} needs a value.")
                value = rest.pop(0)
            setattr(asked, _OPTIONS[name], value)
        elif word in switches:
            asked.switches.add(word)
        elif name in _REFUSED:
            raise ConfigError(f"{name}: {_REFUSED[name]}.")
        elif word.startswith("-"):
            raise ConfigError(f"{word}: no such option. Settings are written key=value, without dashes.")
        elif not equals and word.endswith((".yaml", ".yml")):
            asked.config = word
        else:
            asked.overrides.append(word)
    return asked
