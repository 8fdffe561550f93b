"""How a configuration field is written.

Every default stands once, in a dataclass, with its documentation as a string literal under the field:

    @dataclass(eq=False)  # nobody compares sections, and not writing __eq__ makes the front door a little faster
    class Optim:
        lr: float = setting(1e-6, above=0)
        \"\"\"Learning rate after warm-up.\"\"\"

`strop config show`, `strop config explain`, docs/configuration.md and all checks of single values read these classes.
"""

from __future__ import annotations

import copy
from dataclasses import MISSING, field
from typing import Any

from strop.registry import Registry


def setting(
    default: Any = MISSING,
    *,
    choices: tuple[Any, ...] | None = None,
    one_of: Registry | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A field with limits.

    `choices` lists all values; `one_of` takes them from a registry (plugins included); `at_least`, `above` and `at_most` bound
    a number.
    """
    facts = {
        "choices": choices,
        "one_of": one_of,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
    }
    metadata = {name: fact for name, fact in facts.items() if fact is not None}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def link(path: str, **limits: Any) -> Any:
    """A field that follows another key unless it is set itself; shown as `${path}`."""
    return setting("${" + path + "}", **limits)


def inert(default: Any, why: str) -> Any:
    """A field that is accepted because people's files contain it, and that changes nothing. Setting it logs the reason once."""
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.deepcopy(default), metadata={"inert": why})
    return field(default=default, metadata={"inert": why})


def section(kind: type, **other_defaults: Any) -> Any:
    """A nested group of fields; `other_defaults` replaces some of its defaults in this place."""
    return field(default_factory=lambda: kind(**copy.deepcopy(other_defaults)))


def is_link(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("${") and value.endswith("}")
