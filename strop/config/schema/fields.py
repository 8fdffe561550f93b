"""The functions that declare configuration fields.

Every default is written once, in a dataclass, with its documentation as a string literal under the field:

    @dataclass(eq=False)  # sections are never compared, and generating no __eq__ saves start-up time
    class Optim:
        lr: float = setting(1e-6, above=0)
        \"\"\"Learning rate after warm-up.\"\"\"

`strop config show`, `strop config explain`, the pages in docs/configuration and all checks of single values
read these classes.
"""

from __future__ import annotations

import copy
from dataclasses import MISSING, field
from typing import Any, TypeAlias

from strop.registry import Registry

FreeForm: TypeAlias = dict[str, Any]
"""A mapping whose keys the schema does not check: arguments of a library, a plugin or a template."""

MAX_SEED = 2**63 - 1
"""Generators of NumPy take no negative seed, those of torch none over 64 bits."""


def setting(
    default: object = MISSING,
    *,
    choices: tuple[object, ...] | None = None,
    one_of: Registry | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A field with limits.

    `choices` lists all values; `one_of` takes them from a registry (plugins included); `at_least`, `above`
    and `at_most` bound a number.
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


def inert(
    default: object,
    why: str,
    *,
    choices: tuple[object, ...] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A field without effect that is accepted because existing files contain it.

    Setting it logs the reason once. The limits are checked like those of any other field.
    """
    limits = {"choices": choices, "at_least": at_least, "at_most": at_most}
    metadata: dict[str, object] = {name: limit for name, limit in limits.items() if limit is not None}
    metadata["inert"] = why
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, **other_defaults: Any) -> Any:
    """A nested group of fields; `other_defaults` replaces some of its defaults."""
    return field(default_factory=lambda: kind(**copy.deepcopy(other_defaults)))


def is_link(value: object) -> bool:
    """Whether a value is a reference to another key, such as `${trainer.seed}`."""
    return isinstance(value, str) and value.startswith("${") and value.endswith("}")
