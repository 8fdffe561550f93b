"""Which files of the package read a key, computed from the source code.

`strop config explain` prints the answer, and a test refuses a key that no file reads. Nothing else imports
this module: it parses every file in which the name of the key occurs.

A read is an attribute access `x.name` (or `getattr(x, "name")`). The section that `x` stands for comes from
its annotation, from the assignment that made it, or from its own name: `config.trainer` is a trainer section,
and so is a parameter `trainer` without a type. Where that leaves `x` unknown, the read counts only for keys
that have no certain reader. The same holds for a name in a string, as in `tree["trainer"].get("seed")` or in
a tuple of names for getattr. A key that another key follows (`${...}`) is read where its follower is read.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from strop.config.schema import ROOTS
from strop.config.schema.reflect import Key, keys
from strop.config.source_reads import Read, SchemaIndex, Section, reads_of, reads_whole_sections

PACKAGE = Path(__file__).parents[1]
NOT_READERS = (
    *("config/schema/", "config/openrlhf/", "config/trl/", "config/readers.py", "config/source_reads.py"),
)
"""The schema itself, and files that only name keys."""

_SUPERVISED = ("sft_trainer", "rm_trainer", "dpo_trainer")
_INFERENCE = ("generation", "evaluation", "reward_server")
ROOTS_OF_ROOM = {
    "ppo/": ("ppo_trainer", "ppo_megatron_trainer"),
    "supervised/": _SUPERVISED,
    "inference/": _INFERENCE,
}
"""Rooms whose files run for some roots only. A read in another room counts for every root."""


def readers(key: Key, root: str) -> list[str]:
    """The files that read a key of a root, relative to the package; empty when none does."""
    found = _direct_readers(key, root)
    for follower in _followers(root).get(key.path, ()):
        found |= _direct_readers(follower, root)
    return sorted(found)


@functools.cache
def _followers(root: str) -> Mapping[str, list[Key]]:
    """Path -> the live keys whose default refers to it."""
    found: dict[str, list[Key]] = defaultdict(list)
    for key in keys(ROOTS[root]):
        if isinstance(key.default, str) and not key.inert:
            for path in re.findall(r"\$\{([\w.]+)\}", key.default):
                found[path].append(key)
    return found


def _direct_readers(key: Key, root: str) -> set[str]:
    certain: set[str] = set()
    possible: set[str] = set()
    for read in _reads_of_name(key.name):
        if not _runs_for(read.path, root):
            continue
        if read.sections is None:
            possible.add(read.path)
        elif any(_holds(section, key, ROOTS[root]) for section in read.sections):
            certain.add(read.path)
    return certain or possible


def _holds(section: Section, key: Key, root: type) -> bool:
    """Whether a key of a root may be in this section."""
    if not issubclass(key.owner, section.kind):
        return False
    return section.root is None or _family(section.root) is _family(root)


def _family(root: type) -> type:
    """SupervisedConfig for SFT, reward models and DPO; any other root itself."""
    return root.__mro__[-2]


def _runs_for(path: str, root: str) -> bool:
    for room, roots in ROOTS_OF_ROOM.items():
        if path.startswith(room):
            return root in roots
    return True


def _reads_of_name(name: str) -> Iterator[Read]:
    """Every read of an attribute of this name in the package."""
    for path, names in _names_in_files().items():
        if names is None or name in names:
            yield from _reads_in_file(path).get(name, ())
    if name.endswith("_per_gpu"):  # getattr(section, f"{name}_per_gpu")
        for read in _reads_of_name(name.removesuffix("_per_gpu")):
            if read.sections is None:
                yield read


@functools.cache
def _names_in_files() -> Mapping[str, AbstractSet[str] | None]:
    """File -> the names that it may read: what follows a dot or a quote. None: any name, for it reads whole
    sections. So a file that does not name a key need not be parsed."""
    found: dict[str, AbstractSet[str] | None] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        if path.startswith(NOT_READERS):
            continue
        source = file.read_text(encoding="utf-8")
        found[path] = None
        if not reads_whole_sections(source):
            found[path] = set(re.findall(r"""[."'](\w+)""", source))
    return found


@functools.cache
def _reads_in_file(path: str) -> Mapping[str, list[Read]]:
    """The reads in one file, by the name of the attribute."""
    found: dict[str, list[Read]] = defaultdict(list)
    for read in reads_of(path, (PACKAGE / path).read_text(encoding="utf-8"), _schema_index()):
        found[read.name].append(read)
    return found


@functools.cache
def _schema_index() -> SchemaIndex:
    return SchemaIndex()
