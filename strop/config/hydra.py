"""From YAML files and group choices to the tree of what the user set. The only file that knows Hydra.

Our own groups are empty or set one value: defaults come from the schema afterwards (`compose.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from strop.config.commandline import searched_folders
from strop.config.typed import ConfigError
from strop.config.yaml_files import BAD_VALUES, read_limited
from strop.registry import did_you_mean

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
GROUP_WORDS = {name.partition("/")[0] for name in GROUPS} - {"", "data", "critic", "algorithm"}
"""Words that choose a group on a command line; the others are sections."""


def user_groups(config: str | None, search: str | None, more: Iterable[Path]) -> set[str]:
    """Folders with the user's YAML, and in `more`: their names choose one of the files in them, as in
    Hydra."""
    folders = list(more)
    if config is not None or search is not None:
        folders.append(Path(search if search is not None else Path(config or "").parent).expanduser())
    inside = [place for folder in folders if folder.is_dir() for place in folder.iterdir()]
    return {place.name for place in inside if place.is_dir() and any(place.glob("*.yaml"))}


def compose_files(
    root: str, overrides: Sequence[str], config: str | None, search: str | None
) -> dict[str, object]:
    """What a command line and the files that it names set, as nested dictionaries."""
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


def explain_hydra(error: Exception) -> str:
    """What an error of Hydra or OmegaConf means, and what to write instead."""
    override = getattr(error, "override", None)
    text = one_line(error).partition(" See https")[0].partition(" Config search path:")[0]
    if not text:
        return (
            "A value does not parse. Interpolations are written ${section.key}; quote text that holds a "
            "dollar sign."
        )
    if "must be a DictConfig" in text:
        return (
            f"{text.partition(' must')[0]} holds a list; a configuration holds keys and values (data: ...)."
        )
    if "Ambiguous value" in text:
        return (
            f"{text.partition(' 1.')[0]}. A value with commas is a list: write key=[a,b], or quote it: "
            "'key=\"a,b\"'."
        )
    if "Could not find" in text:
        return f"{text}. A key of a section is written section.key=value, for instance model.path=DIR."
    if override is None:
        return text
    return f"{override.lstrip('+')}: {text}. Quote values with special characters: 'key=\"...\"'."


def one_line(error: Exception) -> str:
    """The beginning of an error's text on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:6])
