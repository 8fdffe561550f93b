"""From a command line and YAML files to one tree of values. The only file that knows Hydra.

Hydra composes what the *user* said: a primary YAML, its `defaults:` list, groups, overrides. Our own groups
are empty there; defaults come from the schema afterwards. So the tree that Hydra returns is exactly what was
set by hand, which is what the notices ("you set X, but it does nothing because ...") need to know, and
nothing is refused before old names are translated.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
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
from strop.config.hydra_messages import explain_hydra, one_line
from strop.config.references import has_other_references, refuse_growth, resolve_keys
from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys
from strop.config.typed import ConfigError, accepts_null, build, unknown_key
from strop.config.yaml_files import BAD_VALUES, read_limited
from strop.registry import did_you_mean, load_plugins

if TYPE_CHECKING:
    from strop.config.schema.roots import RootConfig

Root = TypeVar("Root", bound="RootConfig")

BUILT_IN = Path(__file__).parent / "yaml"
VERL_FOLDERS = ("config", "./config")
"""What verl's commands give to --config-path: a folder inside verl's package, whose files are among ours."""
VERL_PRIMARIES = {
    "dapo_trainer": "ppo_trainer",
    "dapo_megatron_trainer": "ppo_megatron_trainer",
    "fully_async_dapo_trainer": "fully_async_ppo_trainer",
    "sft_trainer_engine": "sft_trainer",
    "transfer_queue_ppo_trainer": "ppo_trainer",
    "ppo_torchtitan_trainer": "ppo_trainer",
    "ppo_veomni_trainer": "ppo_trainer",
}
"""Names of verl's primary files -> our file with the same keys."""
SETS_VALUES = ("ppo_megatron_trainer",)
"""Primaries whose groups say something."""

# The group files of every era of verl, so that a `defaults:` list written for it composes. value: what the
# choice itself sets.
_BACKENDS = ("dp", "megatron", "torchtitan", "veomni", "mlite")
_ENGINES = ("fsdp", "megatron", "torchtitan", "veomni", "automodel", "mlite")
GROUPS: dict[str, dict[str, str]] = {
    **{f"model_engine/{name}": {"model_engine": name} for name in _BACKENDS},
    "actor/actor": {},
    **{f"{role}/{role}": {} for role in ("ref", "critic", "reward", "distillation", "transfer_queue")},
    **{f"{role}/{name}_{role}": {} for role in ("actor", "ref", "critic") for name in _BACKENDS},
    "actor/megatron_actor": {"strategy": "megatron"},
    "rollout/rollout": {},
    "model/hf_model": {},
    **{
        f"reward_model/{name}": {}
        for name in (
            "reward_model",
            "dp_reward_model",
            "dp_reward_loop",
            "megatron_reward_model",
            "megatron_reward_loop",
        )
    },
    "reward_manager/reward_manager": {},
    "data/legacy_data": {},
    "algorithm/rollout_correction": {},
    **{f"engine/{name}": {"strategy": name} for name in _ENGINES},
    "engine/fsdp": {},
    **{f"optim/{name}": {} for name in _ENGINES},
    "npu_profile/npu_profile": {},
    "profiler/profiler": {},
    "/legacy_reward_impl": {},
}
GLOBAL_GROUPS = ("model_engine",)
"""Groups whose values belong to the top level."""


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
    of_user = {name for name in _user_groups(config, search, folders) if not schema.has(name)}
    groups = GROUP_WORDS | of_user
    written = [quote_digits(quote_command(text), schema.types.get) for text in overrides]
    overrides = [force_override(text, groups, of_user) for text in written]
    named = {text.lstrip("+").partition("=")[0] for text in overrides}
    _refuse_unknown(overrides, named, root)
    said = None
    if config is None and search is None and root not in SETS_VALUES:
        said = plain_values(overrides)
    if said is None:
        said = flatten(_compose(root, overrides, config, search))
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


GROUP_WORDS = {name.partition("/")[0] for name in GROUPS} - {"", "data", "critic", "algorithm"}
"""Words that choose a group on a command line; the others are sections."""


def _user_groups(config: str | None, search: str | None, more: Iterable[Path]) -> set[str]:
    """Folders with the user's YAML, and in `more`: their names choose one of the files in them, as in
    Hydra."""
    folders = list(more)
    if config is not None or search is not None:
        folders.append(Path(search if search is not None else Path(config or "").parent).expanduser())
    inside = [place for folder in folders if folder.is_dir() for place in folder.iterdir()]
    return {place.name for place in inside if place.is_dir() and any(place.glob("*.yaml"))}


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


def _compose(
    root: str, overrides: Sequence[str], config: str | None, search: str | None
) -> dict[str, object]:
    import yaml
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _adapt_hydra()
    store = ConfigStore.instance()
    for path, node in GROUPS.items():
        group, _, name = path.partition("/")
        package = "_global_" if group in GLOBAL_GROUPS else None
        store.store(group=group or None, name=name, node=node, package=package)
    groups_chosen = not all(text.startswith("++") for text in overrides)
    folder, name = _locate(root, config, search, searched_folders(overrides), chooses_groups=groups_chosen)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base=None), warnings.catch_warnings():
            # A file written for verl names verl's folder, which need not be here.
            warnings.filterwarnings("ignore", message=".* is not available")
            composed = compose(name, overrides=list(overrides))
        return OmegaConf.to_container(composed, resolve=False)  # type: ignore[return-value]
    except yaml.YAMLError as error:
        raise ConfigError(f"The YAML does not parse: {one_line(error)}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain_hydra(error)) from error
    except RecursionError as error:
        raise ConfigError("A value on the command line is nested too deep. Write it flatter.") from error
    except OSError as error:  # how OmegaConf refuses a file that holds a bare number or text
        raise ConfigError(f"{name} does not hold keys and values: {one_line(error)}") from error
    finally:
        GlobalHydra.instance().clear()


@cache
def _adapt_hydra() -> None:
    """Let Hydra read YAML files only after their depth and the size of their aliases were checked, also those
    that end in .yml, and find our files besides those of the user's hydra.searchpath."""
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigResult
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class LimitedFileSource(FileConfigSource):
        def load_config(self, config_path: str) -> ConfigResult:
            file = Path(self.path) / self._normalize_file_name(config_path)
            try:
                if file.is_file():
                    read_limited(file, str(file))
                return super().load_config(config_path)
            except BAD_VALUES as error:
                text = str(error)
                raise ConfigError(text if str(file) in text else f"{file}: {text}") from error

        @staticmethod
        def _normalize_file_name(filename: str) -> str:
            if filename.endswith(".yml"):
                return filename
            return FileConfigSource._normalize_file_name(filename)

    class BuiltInFiles(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            search_path.append(provider="strop", path=f"file://{BUILT_IN}")

    Plugins.instance().register(BuiltInFiles)  # the instance also registers the source that is replaced
    SourcesRegistry.instance().types[FileConfigSource.scheme()] = LimitedFileSource


def _locate(
    root: str, config: str | None, search: str | None, more: Sequence[Path], chooses_groups: bool
) -> tuple[Path, str]:
    """Folder and name of the primary YAML; it may be in `more` folders if it is nowhere else."""
    if search in VERL_FOLDERS and not Path(search).is_dir():
        search = None
    if search is not None:
        folder = Path(search).expanduser().resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-path: there is no folder {folder}.")
    else:
        folder = BUILT_IN
    if config is None:
        # Our own primaries only list groups, and those are empty: without a file of the user's there is
        # nothing to compose.
        return folder, root if search is not None or root in SETS_VALUES or chooses_groups else "bare"
    as_path = (folder if search is not None else Path.cwd()) / Path(config).expanduser()
    for candidate in (as_path, as_path.with_name(as_path.name + ".yaml")):
        if candidate.is_file():
            return candidate.parent.resolve(), candidate.name.removesuffix(".yaml")
    ours = config.removesuffix(".yaml")
    ours = VERL_PRIMARIES.get(ours, ours)
    is_ours = (BUILT_IN / f"{ours}.yaml").is_file()
    if is_ours and search is None:
        return BUILT_IN, ours
    for place in more:
        if (place / f"{config.removesuffix('.yaml')}.yaml").is_file():
            return place, config.removesuffix(".yaml")
    if is_ours:
        raise ConfigError(
            f"--config-path: {folder} has no {config}. With --config-dir instead, which adds a folder to "
            f"the built-in ones, {config} is the built-in file."
        )
    names = [file.stem for at in {BUILT_IN, folder, as_path.parent, *more} for file in at.glob("*.yaml")]
    raise ConfigError(
        f"There is no configuration {config!r}: no file {as_path}.{did_you_mean(Path(config).stem, names)}"
    )


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
