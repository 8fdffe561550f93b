"""From a command line and YAML files to one typed configuration.

Hydra (`hydra.py`) composes what the *user* said: a primary YAML, its `defaults:` list, groups, overrides. Our
own groups are empty there; defaults come from the schema afterwards. So the tree that Hydra returns is
exactly what was set by hand, which is what the notices ("you set X, but it does nothing because ...") need to
know, and nothing is refused before old names are translated.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from strop.config.aliases import drop_without_effect, flatten, nest, notice, reason_for, translate
from strop.config.aliases.async_lengths import ASYNC_LENGTHS, fill_async_lengths
from strop.config.aliases.programs import fill_defaults
from strop.config.commandline import (
    environment_as_text,
    force_override,
    plain_values,
    quote_command,
    quote_digits,
    searched_folders,
)
from strop.config.hydra import GROUP_WORDS, SETS_VALUES, compose_files, user_groups
from strop.config.references import resolve
from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys
from strop.config.typed import ConfigError, accepts_null, build, unknown_key
from strop.registry import load_plugins

if TYPE_CHECKING:
    from strop.config.schema.roots import RootConfig

Root = TypeVar("Root", bound="RootConfig")


@dataclass
class Loaded(Generic[Root]):
    """A configuration that passed every check of single values."""

    root: str
    config: Root
    set_by_user: dict[str, object]
    notices: list[str] = field(default_factory=list)

    def tree(self) -> dict[str, Any]:
        """The configuration as nested dictionaries."""
        return asdict(self.config)


def load(
    root: str, overrides: Sequence[str] = (), config: str | None = None, search: str | None = None
) -> Loaded:
    """Compose and type-check. `root`: a name in ROOTS; `config`: a user's YAML; `search`: its folder."""
    schema = schema_keys(root)
    folders = searched_folders(overrides)
    of_user = {name for name in user_groups(config, search, folders) if not schema.has(name)}
    groups = GROUP_WORDS | of_user
    written = [quote_digits(quote_command(text), schema.types.get) for text in overrides]
    overrides = [force_override(text, groups, of_user) for text in written]
    named = {text.lstrip("+").partition("=")[0] for text in overrides}
    _refuse_unknown(overrides, named, root)
    said = None
    if config is None and search is None and root not in SETS_VALUES:
        said = plain_values(overrides)
    if said is None:
        said = flatten(compose_files(root, overrides, config, search))
    set_values = {}
    for path, value in said.items():
        if value != "???" and (value != {} or schema.is_free(path)):
            set_values[path] = value
    leaves, notices = translate(environment_as_text(set_values), root, named)
    notices += fill_defaults(leaves, root, named, set_values)
    notices += fill_async_lengths(leaves, set_values)
    leaves, without_effect = drop_without_effect(leaves, schema.has)
    notices += without_effect + schema.drop_nulls(leaves)
    schema.refuse_sections(leaves)
    plugins = leaves.get("plugins")
    if isinstance(plugins, list):  # they may register names that `build` checks
        load_plugins(str(path) for path in plugins)
    tree = resolve(_merge(_defaults(root), nest(leaves)))
    made = build(ROOTS[root], tree)
    for key in schema.keys:
        set_here = [path for path in leaves if key.inert and f"{path}.".startswith(f"{key.path}.")]
        if key.inert and set_here:
            notices.append(notice(set_here, key.inert))
    return Loaded(root, made, leaves, notices)


class SchemaKeys:
    """Questions about the keys of one root."""

    def __init__(self, root: type) -> None:
        self.keys = list(keys(root))
        self._by_path = {key.path: key for key in self.keys}
        self.types = {key.path: key.type for key in self.keys}
        self._sections = {path[:at] for path in self._by_path for at in _dots(path)}

    def has(self, path: str) -> bool:
        """Whether a path is a key, a section, or inside a mapping whose keys are free."""
        if path in self._by_path or path in self._sections:
            return True
        return self.is_free(path)

    def is_free(self, path: str) -> bool:
        """Whether a path is inside a mapping whose keys are free."""
        return any(path[:at] in self._by_path for at in _dots(path))

    def below(self, path: str) -> list[str]:
        """The keys inside a section."""
        return [key for key in self._by_path if key.startswith(path + ".")]

    def drop_nulls(self, leaves: dict[str, object]) -> list[str]:
        """Remove sections without a key, and keys that were set to null and cannot be null: they have their
        default; returns notices."""
        notices = []
        for path in [path for path, value in leaves.items() if value is None]:
            key = self._by_path.get(path)
            if path in self._sections:
                del leaves[path]
            elif key is not None and not accepts_null(key.type):
                del leaves[path]
                notices.append(f"{path}=null means its default, {key.default}.")
        return notices

    def refuse_sections(self, leaves: Mapping[str, object]) -> None:
        """Refuse values of sections: other keys may refer to what is in the section."""
        problems = []
        for path, value in leaves.items():
            is_link = isinstance(value, str) and "${" in value
            if path in self._sections and not is_link:
                problems.append(
                    f"{path}: expected a section with keys such as {self.below(path)[0]}, got {value!r}."
                )
        if problems:
            raise ConfigError(problems)


@cache
def schema_keys(root: str) -> SchemaKeys:
    """One for each root: to find the keys takes longer than to read a command line."""
    return SchemaKeys(ROOTS[root])


@cache
def _defaults(root: str) -> dict[str, object]:
    """The defaults of a root as nested dictionaries. Shared: `_merge` and `resolve` make new ones."""
    return asdict(ROOTS[root]())


def _dots(path: str) -> Iterable[int]:
    return (at for at, letter in enumerate(path) if letter == ".")


def reload(root: str, tree: Mapping[str, object], changes: Mapping[str, object]) -> Loaded:
    """A configuration that was written down, with `changes` by key; what it does not say has today's
    default."""
    kind = ROOTS[root]
    changed = nest({**flatten(dict(tree)), **changes})
    return Loaded(root, build(kind, resolve(_merge(_defaults(root), changed))), {})


def _refuse_unknown(overrides: Iterable[str], named: Container[str], root: str) -> None:
    """Typos on the command line are answered before Hydra is even imported."""
    schema = schema_keys(root)
    problems = []
    for text in overrides:
        if not text.startswith("++"):
            continue
        path = text[2:].partition("=")[0]
        if path.startswith("hydra.") or (path in ASYNC_LENGTHS and schema.has("trainer.async_training")):
            continue
        inside = schema.below(path)
        if inside and "." not in path:
            problems.append(f"{path} is a section. Set its keys one by one, for instance {inside[0]}=...")
            continue
        translated, _ = translate({path: 0}, root)
        for name in translated:
            full = f"actor_rollout_ref.{name}"  # of `rollout.n`, which verl has but does not read
            known = reason_for(name) is not None and (full in named or not schema.has(full))
            if not schema.has(name) and not known:
                problems.append(unknown_key(path, ROOTS[root]))
    if problems:
        raise ConfigError(problems)


def _merge(base: dict[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """`over` on top of `base`, section by section."""
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        if isinstance(below, dict) and isinstance(value, Mapping):
            merged[name] = _merge(below, value)
        else:
            merged[name] = value
    return merged
