"""Resolves the ${references} of a configuration, if it does not become too large by them.

Values that refer to each other can double at every step, as text (`${.x}${.x}`), as lists and as sections.
The size is counted before anything is resolved, in the way in which aliases of YAML are (`yaml_files.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from strop.config.hydra import one_line
from strop.config.typed import ConfigError
from strop.config.yaml_files import MAX_NODES

MAX_CHAIN = 50
MAX_LEVELS = 200
"""Sections inside sections, over references."""
CHARACTERS = 100
"""A text counts once more for each of so many characters."""
MAX_COMPUTED = 12
"""References whose key is itself computed: `${a.${b}}`. What they name is not known before, and n of them
make a value at most 3 ** (n / 3) times larger."""

_PATH = r"(\.*)((?:[\w-]+|\[[^\]$]*\])?(?:\.[\w-]+|\[[^\]$]*\])*)"
_PLAIN = re.compile(r"\$\{\s*" + _PATH + r"\s*\}")
_SELECT = re.compile(r"\$\{\s*oc\.(?:select|deprecated|dict\.keys|dict\.values)\s*:\s*" + _PATH + r"\s*[,}]")
_FUNCTION = re.compile(r"\$\{\s*(?!oc\.)[\w.]+\s*:|\$\{\s*oc\.env\s*:")
"""Functions that return no other key. What stands in their arguments is found by itself."""
_ENVIRONMENT = re.compile(r"\$\{\s*oc\.decode\s*:\s*\$\{\s*oc\.env\s*:")
Place = tuple[str, ...]
"""The keys and positions that lead to a value."""


def resolve(tree: dict[str, object]) -> dict[str, object]:
    """Replace `${a.b}` by the value it names. Other interpolations (relative, oc.env ...) are left to
    OmegaConf."""
    refuse_growth(tree)
    if not has_other_references(tree):
        return resolve_keys(tree)
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.create(tree), resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        if "HydraConfig was not set" in str(error):
            raise ConfigError(
                f"{error.full_key}: ${{hydra:...}} has no value, because Hydra only reads the configuration. "
                "Write the value itself."
            ) from error
        raise ConfigError(one_line(error)) from error


def refuse_growth(tree: Mapping[str, object]) -> None:
    """Refuse a tree whose references repeat more than MAX_NODES values."""
    growth = _Growth(tree)
    for name in tree:
        growth.size((str(name),), (), 0)
    if growth.computed > MAX_COMPUTED:
        raise ConfigError(
            f"The configuration has {growth.computed} references whose key is computed, as in ${{a.${{b}}}}; "
            f"at most {MAX_COMPUTED} are allowed. Write the keys out."
        )


class _Growth:
    """Sizes of resolved values by their place."""

    def __init__(self, tree: Mapping[str, object]) -> None:
        self.tree = tree
        self.known: dict[Place, int] = {}
        self.repeated = 0
        """Values that references add to the tree."""
        self.computed = 0

    def size(self, place: Place, above: tuple[Place, ...], level: int) -> int:
        """Values that the value at `place` consists of. `above`: places that refer to it, one over the
        other."""
        if place in self.known:
            return self.known[place]
        if place in above:  # a circle is reported where it is resolved
            return 0
        if len(above) > MAX_CHAIN:
            raise ConfigError(f"{'.'.join(above[0])} refers to a chain of more than {MAX_CHAIN} keys.")
        if level > MAX_LEVELS:
            raise ConfigError(f"{'.'.join(place)} is nested more than {MAX_LEVELS} levels deep.")
        value = self._at(place)
        total = 1
        if isinstance(value, str):
            repeated = 0
            for target in self._targets(place, value):
                repeated += self.size(target, (*above, place), level + 1)
            self.repeated += repeated
            if self.repeated > MAX_NODES:
                raise ConfigError(
                    f"{'.'.join(place)} refers, over other keys, to more values than a configuration may "
                    f"have ({MAX_NODES:,}; a text counts once per {CHARACTERS} characters). Write out what "
                    "is needed."
                )
            total += repeated + len(value) // CHARACTERS
        for name in _children(value):
            total += self.size((*place, name), above, level + 1)
        self.known[place] = total
        return total

    def _at(self, place: Place) -> object:
        at: object = self.tree
        for name in place:
            if isinstance(at, Mapping):
                at = at.get(name)
            elif isinstance(at, list) and name.isdigit() and int(name) < len(at):
                at = at[int(name)]
            else:
                return None
        return at

    def _targets(self, place: Place, text: str) -> Iterator[Place]:
        """Places that a text refers to."""
        start = text.find("${")
        while start >= 0:
            found = _PLAIN.match(text, start) or _SELECT.match(text, start)
            if found is not None:
                yield _absolute(place, len(found[1]), found[2])
            elif not _FUNCTION.match(text, start) and not _ENVIRONMENT.match(text, start):
                self.computed += 1
            start = text.find("${", start + 2)


def _children(value: object) -> list[str]:
    if isinstance(value, Mapping):
        return [str(name) for name in value]
    if isinstance(value, list):
        return [str(position) for position in range(len(value))]
    return []


def _absolute(place: Place, dots: int, path: str) -> Place:
    """The place that a reference names: one dot is the section of the value, two dots the section above."""
    names = tuple(re.findall(r"[^.\[\]]+", path))
    if dots == 0:
        return names
    return (*place[: max(0, len(place) - dots)], *names)


_WHOLE = re.compile(r"^\$\{([A-Za-z_][\w.]*)\}$")
_INSIDE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


def has_other_references(value: object) -> bool:
    """Whether a text anywhere in a value has a reference that is not the full name of a key."""
    if isinstance(value, Mapping):
        return any(map(has_other_references, value.values()))
    if isinstance(value, list):
        return any(map(has_other_references, value))
    return isinstance(value, str) and "${" in _INSIDE.sub("", value)


def resolve_keys(tree: Mapping[str, object]) -> dict[str, object]:
    """Replace `${a.b}` by the value it names; `${a.0}` is the first item of a list."""
    return {name: _resolve(value, tree, ()) for name, value in tree.items()}


def _resolve(value: object, tree: Mapping[str, object], seen: tuple[str, ...]) -> object:
    if isinstance(value, dict):
        return {name: _resolve(below, tree, seen) for name, below in value.items()}
    if isinstance(value, list):
        return [_resolve(item, tree, seen) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value

    def look_up(path: str) -> object:
        if path in seen:
            raise ConfigError(f"These keys refer to each other in a circle: {' -> '.join([*seen, path])}.")
        at: object = tree
        for part in path.split("."):
            if isinstance(at, list) and part.isdecimal() and int(part) < len(at):
                at = at[int(part)]
            elif isinstance(at, Mapping) and part in at:
                at = at[part]
            else:
                raise ConfigError(f"{value!r} refers to {path}, which does not exist.")
        return _resolve(at, tree, (*seen, path))

    whole = _WHOLE.match(value)
    return look_up(whole[1]) if whole else _INSIDE.sub(lambda match: str(look_up(match[1])), value)
