"""Names that can be chosen in a configuration, and what each choice needs.

A registry maps a name to an entry. An entry has *facts* (what it needs, what it forbids), so that no other
code compares names: the trainer reads `entry.facts["needs"]`, never `name == "gae"`.

Built-ins are declared in `catalog.py` by import path, without importing them, so that configuration code does
not import torch. Users add entries with the decorator, in a file that `plugins:` lists

    from strop.catalog import ADVANTAGES

    @ADVANTAGES.register("centred", needs=("group",))
    def centred(rewards, mask, groups): ...
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

Target = TypeVar("Target")


def nearest(name: str, choices: Iterable[str], limit: int = 3) -> list[str]:
    """The choices that are most similar to `name`, best first."""
    return difflib.get_close_matches(name, list(choices), n=limit, cutoff=0.6)


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A sentence for the end of an error message; empty if no choice is similar."""
    close = nearest(name, choices)
    if not close:
        return ""
    return f" Did you mean {' or '.join(map(repr, close))}?"


@dataclass
class Entry:
    """One registered choice."""

    name: str
    target: object  # the object, or "module:attribute" until it is first used
    facts: Mapping[str, Any] = field(default_factory=dict)
    source: str = "built-in"

    def load(self) -> Any:
        """The registered object; it is imported on the first call."""
        if isinstance(self.target, str):
            module, _, attribute = self.target.partition(":")
            self.target = getattr(importlib.import_module(module), attribute)
        return self.target


class Registry:
    """All choices of one kind. Names are compared with hyphens and underscores as equal."""

    def __init__(self, kind: str, facts: Mapping[str, Any] | None = None):
        """`facts`: the facts that an entry of this kind may declare, with their defaults."""
        self.kind = kind
        self.defaults = dict(facts or {})
        self._entries: dict[str, Entry] = {}

    def declare(self, name: str, target: object, *, source: str = "built-in", **facts: object) -> None:
        """Add an entry; `target` may be "package.module:attribute", which is imported on first use."""
        key = self._key(name)
        unknown = sorted(set(facts) - set(self.defaults))
        if unknown:
            raise ValueError(
                f"{self.kind} {name!r} declares {unknown}, but entries of this kind may declare "
                f"{sorted(self.defaults)}."
            )
        old = self._entries.get(key)
        if old is not None and (old.source != source or source == "built-in"):
            raise ValueError(
                f"{self.kind} {name!r} is registered twice: by {old.source} and by {source}. Rename one of "
                "them."
            )
        self._entries[key] = Entry(key, target, {**self.defaults, **facts}, source)

    def register(self, name: str, **facts: object) -> Callable[[Target], Target]:
        """Decorator form of `declare`, for plugins."""

        def decorate(target: Target) -> Target:
            self.declare(name, target, source=getattr(target, "__module__", "a plugin"), **facts)
            return target

        return decorate

    def entry(self, name: str) -> Entry:
        """The entry of a name; a ValueError lists the known names."""
        found = self._entries.get(self._key(name)) if isinstance(name, str) else None
        if found is None:
            raise ValueError(
                f"Unknown {self.kind} {name!r}.{did_you_mean(str(name), self._entries)} Known: "
                f"{', '.join(self.names())}. Your own goes in a file listed under `plugins`."
            )
        return found

    def get(self, name: str) -> Any:
        """The registered object of a name."""
        return self.entry(name).load()

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._key(name) in self._entries

    @staticmethod
    def _key(name: str) -> str:
        return name.strip().lower().replace("-", "_")


_imported_files: dict[str, tuple[Path, bytes | None]] = {}
"""Names of the modules that are files of users, with the file and what it contained."""
_LIBRARIES = {str(Path(__file__).parent), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))}
"""Folders of code that is not the user's."""
_PLUGIN = "strop_plugin_"
"""What the names of modules begin with that are imported by the paths of their files."""


def forget_changed_files() -> None:
    """Let files of users be imported anew if one of them has changed, or a module that they import. A call
    from Python starts with this: somebody who edits a reward function in a notebook's folder and trains
    again expects the new one. Code does not change while a run lasts.

    All are forgotten, because any of them may have imported the one that changed. What the caller has
    imported, or a function imports when it runs, is not known here and stays.
    """
    if all(_content(file) == content for file, content in _imported_files.values()):
        return
    for name, (file, _) in _imported_files.items():
        module = sys.modules.pop(name, None)
        package, _, last = name.rpartition(".")
        if module is not None and getattr(sys.modules.get(package), last, None) is module:
            delattr(sys.modules[package], last)  # `from package import last` would find it there
        with suppress(OSError):  # it may be that of an edit within the same second, see below
            Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
    _imported_files.clear()


@contextmanager
def _imports_recorded() -> Iterator[None]:
    """Inside the block, files of users that are imported are remembered."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in sys.modules.keys() - before - _imported_files.keys():
            file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
            if isinstance(file, str) and file.endswith(".py") and not _is_installed(Path(file)):
                _imported_files[name] = (Path(file), _content(Path(file)))


def _is_installed(file: Path) -> bool:
    """Whether a file belongs to Python, to a library or to this package."""
    folders = {str(folder) for folder in file.parents}
    return bool(folders & _LIBRARIES) or "site-packages" in file.parts or "dist-packages" in file.parts


class _UserFile(importlib.machinery.SourceFileLoader):
    """Without Python's cache of bytecode, which takes a file that was edited within the same second, and is
    as long as before, for unchanged."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _content(file: Path) -> bytes | None:
    """A hash of a file; None if it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).digest()
    except OSError:
        return None


def user_files() -> dict[str, str]:
    """The files that were imported by their paths, by the names of their modules. A process that unpickles
    an object of such a module must import the file first."""
    return {name: str(file) for name, (file, _) in _imported_files.items() if name.startswith(_PLUGIN)}


def load_module(path: str) -> ModuleType:
    """Import a user's file: a path, `file://path`, `pkg://dotted.module`, or a dotted module name."""
    if path.startswith("pkg://"):
        return _import_dotted(path.removeprefix("pkg://"))
    plain = path.removeprefix("file://")
    if not plain.endswith(".py") and "/" not in plain:
        return _import_dotted(plain)
    file = Path(plain).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"The Python file {path!r} does not exist (looked for {file}).")
    # The name is the same in every process, so that objects of the file can be pickled to workers.
    name = f"{_PLUGIN}{file.stem}_{hashlib.sha1(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    _imported_files[name] = (file, _content(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=_UserFile(name, str(file)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _imports_recorded():
            spec.loader.exec_module(module)
    except SyntaxError as error:
        del sys.modules[name]
        raise ValueError(f"{file} does not parse: {error.msg} (line {error.lineno}).") from error
    except (Exception, SystemExit) as error:  # a script that parses its command line raises SystemExit
        del sys.modules[name]
        hint = _neighbour_hint(file, error)
        raise ValueError(
            f"{file} fails while it is imported: {type(error).__name__}: {error}{hint}"
        ) from error
    return module


def _neighbour_hint(file: Path, error: BaseException) -> str:
    """What to set if a module that was not found lies in the folder of the file."""
    missing = (isinstance(error, ModuleNotFoundError) and error.name) or ""
    place = file.parent / missing.partition(".")[0]
    if not missing or not (place.with_suffix(".py").is_file() or place.is_dir()):
        return ""
    return f". It lies next to {file.name}: set PYTHONPATH={file.parent}"


def load_attribute(path: str, name: str, key: str = "") -> Any:
    """The object `name` of a user's file. `key` is the setting with the name, for messages."""
    module = load_module(path)
    if not hasattr(module, name):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ValueError(
            f"{path} defines no {name!r}.{did_you_mean(name, public)} It has: "
            f"{', '.join(public) or 'nothing'}.{f' {key} names it.' if key else ''}"
        )
    return getattr(module, name)


def load_plugins(paths: Iterable[str]) -> None:
    """Import every file of the `plugins:` list; each worker process does this before anything else."""
    for path in paths:
        load_module(path)


def _import_dotted(name: str) -> ModuleType:
    try:
        with _imports_recorded():
            return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"The module {name!r} cannot be imported: {error}. Install it, or give a path to a .py."
        ) from error
