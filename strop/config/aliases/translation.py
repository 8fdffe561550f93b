"""Translates the keys that a user set to current names."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

from strop.config.aliases.distillation import teacher_section
from strop.config.aliases.row import Alias
from strop.config.aliases.table import ALIASES, REFUSED_VALUES, VALUES
from strop.config.aliases.verl_0_7 import adapter_sections
from strop.config.aliases.verl_0_10 import without_v1
from strop.config.typed import ConfigError


def flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Leaves of a nested mapping by dotted path; an empty mapping is a leaf."""
    found: dict[str, object] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found.update(flatten(value, f"{path}."))
        else:
            found[path] = value
    return found


def nest(leaves: Mapping[str, object]) -> dict[str, object]:
    """The opposite of `flatten`."""
    tree: dict[str, object] = {}
    for path, value in leaves.items():
        *parents, name = path.split(".")
        at = tree
        for part in parents:
            below = at.setdefault(part, {})
            if not isinstance(below, dict):
                raise ConfigError(f"{path}: {part} is both a value ({below!r}) and a section.")
            at = below
        if isinstance(at.get(name), dict) and value == {}:
            continue
        at[name] = value
    return tree


def translate(
    leaves: Mapping[str, object], root: str, overrides: Container[str] = ()
) -> tuple[dict[str, object], list[str]]:
    """Leaves under their current names, and one notice per name that was translated.

    Two names of one setting with different values clash, unless one of them is in `overrides`, the names on
    the command line, and the other one comes from a file.
    """
    current: dict[str, object] = {}
    leaves, notices = teacher_section(leaves)
    leaves, unread = without_v1(leaves)
    notices += unread
    families: dict[Alias, list[str]] = {}
    renamed: dict[str, tuple[str, object]] = {}
    for path, said in adapter_sections(leaves, overrides).items():
        value = _translate_links(_current_value(path, said), root)
        if value != said and not isinstance(said, bool) and (path, said) in VALUES:
            notices.append(f"{path}={said} is now {path}={value}.")
        if isinstance(said, str) and (path, said) in REFUSED_VALUES:
            raise ConfigError(f"{path}: {REFUSED_VALUES[path, said]}.")
        found = _find(path, value, root)
        if found is None:
            current[path] = value
            continue
        alias, new = found
        if value is None:  # an old key left empty says nothing
            continue
        for name, moved in new.items():
            if name in renamed and renamed[name][1] != moved:
                if (path in overrides) == (renamed[name][0] in overrides):
                    raise _clash(path, moved, *renamed[name])
                if renamed[name][0] in overrides:
                    continue
            renamed[name] = (path, moved)
        if new:
            families.setdefault(alias, []).append(f"{path} is now {' and '.join(new)}")
    notices += [_renamed_notice(alias, said) for alias, said in families.items()]
    for name, (old, value) in renamed.items():
        if current.get(name) is not None and current[name] != value:
            if (old in overrides) == (name in overrides):
                raise _clash(old, value, name, current[name])
            if name in overrides:
                continue
        current[name] = value
    return current, notices


def _renamed_notice(alias: Alias, said: list[str]) -> str:
    """One notice for all keys of an alias."""
    others = ""
    if len(said) > 1:
        others = f"; {len(said) - 1} more of {alias.old} moved in the same way"
    return f"{said[0]} ({alias.why}){others}."


def _clash(old: str, value: object, name: str, other: object) -> ConfigError:
    return ConfigError(f"{old}={value!r} and {name}={other!r} are two names of one setting. Set only {name}.")


def _current_value(path: str, value: object) -> object:
    """The value that means here what `value` means in verl."""
    if isinstance(value, bool | str):
        for (key, old), new in VALUES.items():
            if path == key and type(value) is type(old) and value == old:
                return new
    return value


_LINK = re.compile(r"\$\{(oc\.select:)?([A-Za-z_][\w.]*)")


def _translate_links(value: object, root: str) -> object:
    """`${old.name}` inside a value as `${current.name}`."""
    if isinstance(value, list):
        return [_translate_links(item, root) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value

    def current(link: re.Match[str]) -> str:
        found = _find(link[2], link[0], root)
        if found is None or len(found[1]) != 1:
            return link[0]
        return f"${{{link[1] or ''}{next(iter(found[1]))}"

    return _LINK.sub(current, value)


def _find(path: str, value: object, root: str) -> tuple[Alias, dict[str, object]] | None:
    """The first alias that matches a path, with the new names and values; no names: the value says
    nothing."""
    for alias in ALIASES:
        if alias.verbs and root not in alias.verbs:
            continue
        prefix = alias.match(path)
        if prefix is None:
            continue
        if not callable(alias.new):
            return alias, {name.format(prefix=prefix): value for name in alias.new}
        new = alias.new(prefix, value)
        if new is not None:
            return alias, new
    return None
