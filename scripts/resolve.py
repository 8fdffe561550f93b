"""`make resolve`: do the pins of constraints.txt install on every supported platform? A dry run on metadata.

    python scripts/resolve.py [--index URL] [--python 3.12 ...] [--platform linux-x86_64 ...]

For each platform and Python version it starts from the requirements of pyproject.toml (the core and all
extras that have wheels there), takes the pinned version of each requirement, finds its wheel in the index,
reads the wheel's own requirements and goes on. It prints each requirement that a pin does not satisfy, each
package without a pin and each pin without a wheel, and exits with 1. pip's configuration is not read: only
the index that is named here counts.
"""

from __future__ import annotations

import argparse
import functools
import sys
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path
from typing import Protocol

from package_index import IndexFile, IndexUnreachable, PackageIndex
from packaging import tags
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
PUBLIC_INDEX = "https://pypi.org/simple"
THREADS = 24

# Extras that constraints.txt does not cover: vllm and sglang pin their own torch, verifiers (environments) an
# older mcp. Each lives in an environment of its own.
OWN_ENVIRONMENT = ("vllm", "sglang", "environments")
# Extras without wheels on a platform, with the package that lacks them.
NO_WHEELS = {"macos-arm64": {"liger": "triton", "megatron": "megatron-core"}}
# Pure Python packages that are published as source only; pip builds them in seconds.
SOURCE_ONLY = ("antlr4-python3-runtime", "pwinput")


@dataclass(frozen=True)
class Platform:
    name: str
    system: str
    sys_platform: str
    machine: str
    tags: tuple[str, ...]


def linux(machine: str, glibc: int = 28) -> Platform:
    """glibc 2.28 (Debian 10, RHEL 8) is the oldest that torch has wheels for."""
    names = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc, 4, -1)]
    names += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}"]
    return Platform(f"linux-{machine}", "Linux", "linux", machine, (*names, f"linux_{machine}"))


MACOS = Platform("macos-arm64", "Darwin", "darwin", "arm64", tuple(tags.mac_platforms((14, 0), "arm64")))
PLATFORMS = (linux("x86_64"), linux("aarch64"), MACOS)


@dataclass(frozen=True)
class Target:
    platform: Platform
    python: str

    def __str__(self) -> str:
        return f"{self.platform.name}, Python {self.python}"

    @functools.cached_property
    def ranks(self) -> dict[tags.Tag, int]:
        """Tag -> rank; pip takes the wheel of the lowest rank."""
        version = tuple(map(int, self.python.split(".")))
        names = list(self.platform.tags)
        ordered = [*tags.cpython_tags(version, platforms=names)]
        ordered += tags.compatible_tags(version, f"cp{version[0]}{version[1]}", names)
        return {tag: rank for rank, tag in enumerate(ordered)}

    @functools.cached_property
    def environment(self) -> dict[str, str]:
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.platform.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": self.platform.system,
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": self.platform.sys_platform,
        }


class Source(Protocol):
    """Where files and their metadata come from: an index, or a table in tests."""

    def files(self, project: str, containing: str) -> list[IndexFile]: ...

    def metadata(self, file: IndexFile) -> str: ...


class CachedSource:
    """Each page and each metadata file is read once, also when several threads ask for it at once."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._pages: dict[str, list[IndexFile]] = {}
        self._requirements: dict[str, list[Requirement]] = {}

    def files(self, project: str, version: Version) -> list[IndexFile]:
        """The files of one version."""
        key = f"{project} {version}"
        with self._lock_of(key):
            if key not in self._pages:
                near = self.source.files(project, _without_zeros(version.public))
                self._pages[key] = [file for file in near if _version_of(project, file.name) == version]
        return self._pages[key]

    def requirements(self, file: IndexFile) -> list[Requirement]:
        with self._lock_of(file.url):
            if file.url not in self._requirements:
                headers = HeaderParser().parsestr(self.source.metadata(file))
                found = [Requirement(line) for line in headers.get_all("Requires-Dist") or []]
                self._requirements[file.url] = found
        return self._requirements[file.url]

    def _lock_of(self, key: str) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(key, threading.Lock())


def _without_zeros(version: str) -> str:
    """13.0.3.0 and 13.0.3 are one version; file names have either.

    >>> _without_zeros("13.0.3.0")
    '13.0.3'
    """
    while version.endswith(".0"):
        version = version.removesuffix(".0")
    return version


def _version_of(project: str, name: str) -> Version | None:
    """The version that a file name tells; None for files that pip would not look at."""
    try:
        if name.endswith(".whl"):
            return parse_wheel_filename(name)[1]
        if not name.endswith(".tar.gz"):
            return None
        return Version(name.removesuffix(".tar.gz")[len(project) + 1 :])
    except (InvalidWheelFilename, InvalidVersion):
        return None


def read_pins(text: str) -> dict[str, Requirement]:
    """`name==version` per line; comments and blank lines are skipped."""
    pins = {}
    for line in text.splitlines():
        words = line.partition("#")[0].strip()
        if words:
            pin = Requirement(words)
            pins[canonicalize_name(pin.name)] = pin
    return pins


def pinned_version(pin: Requirement) -> Version:
    (only,) = pin.specifier
    if only.operator != "==":
        raise ValueError(f"constraints.txt has {pin}; write name==version")
    return Version(only.version)


@functools.cache
def _pythons(specifier: str) -> SpecifierSet:
    return SpecifierSet(specifier)


@functools.cache
def _tags_of(wheel: str) -> frozenset[tags.Tag]:
    return parse_wheel_filename(wheel)[3]


def best_file(files: Iterable[IndexFile], target: Target, *, allow_source: bool) -> IndexFile | None:
    """The file that pip takes on this target: the wheel with the most specific tag, else the source."""
    ranked: list[tuple[int, IndexFile]] = []
    for file in files:
        if not _pythons(file.requires_python).contains(f"{target.python}.0"):
            continue
        if file.name.endswith(".whl"):
            ranks = [target.ranks[tag] for tag in _tags_of(file.name) if tag in target.ranks]
            if ranks:
                ranked.append((min(ranks), file))
        elif allow_source:
            ranked.append((len(target.ranks), file))
    if not ranked:
        return None
    return min(ranked, key=lambda pair: pair[0])[1]


@dataclass
class Resolution:
    """One walk over the requirements of a target."""

    target: Target
    pins: dict[str, Requirement]
    source: CachedSource
    taken: dict[str, IndexFile] = field(default_factory=dict)
    problems: set[str] = field(default_factory=set)

    def follow(self, root: str, requirements: Iterable[Requirement]) -> None:
        """Follow the requirements of `root`, each (package, extra) once."""
        seen: set[tuple[str, str]] = set()
        queue = list(_active(requirements, "", self.target))
        asked_by = [root] * len(queue)
        while queue:
            requirement = queue.pop()
            parent = asked_by.pop()
            name = canonicalize_name(requirement.name)
            file = self._take(name, requirement, parent)
            if file is None:
                continue
            for extra in ("", *sorted(requirement.extras)):
                if (name, extra) in seen:
                    continue
                seen.add((name, extra))
                found = list(_active(self.source.requirements(file), extra, self.target))
                queue += found
                asked_by += [f"{name} {pinned_version(self.pins[name])}"] * len(found)

    def _take(self, name: str, requirement: Requirement, parent: str) -> IndexFile | None:
        pin = self.pins.get(name)
        if pin is None:
            self.problems.add(f"{parent} requires {requirement}, which constraints.txt does not pin")
            return None
        version = pinned_version(pin)
        if not requirement.specifier.contains(version, prereleases=True):
            self.problems.add(f"{parent} requires {_short(requirement)}, but constraints.txt pins {pin}")
            return None
        if name not in self.taken:
            allow = name in SOURCE_ONLY
            file = best_file(self.source.files(name, version), self.target, allow_source=allow)
            if file is None:
                self.problems.add(
                    f"{parent} requires {_short(requirement)}: the index has no wheel of {pin} here"
                )
                return None
            self.taken[name] = file
        return self.taken[name]


def _short(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _active(requirements: Iterable[Requirement], extra: str, target: Target) -> Iterator[Requirement]:
    """The requirements of a package, or of one of its extras, whose marker holds."""
    for requirement in requirements:
        marker = requirement.marker
        if marker is None:
            if not extra:
                yield requirement
        elif marker.evaluate({**target.environment, "extra": extra}):
            yield requirement


def project_requirements(text: str, platform: Platform) -> dict[str, list[Requirement]]:
    """Extra -> requirements ("" is the core), without extras that have no wheels or an own environment."""
    project = tomllib.loads(text)["project"]
    groups = {"": [Requirement(line) for line in project["dependencies"]]}
    left_out = {*OWN_ENVIRONMENT, *NO_WHEELS.get(platform.name, {})}
    for extra, lines in project["optional-dependencies"].items():
        if extra in left_out:
            continue
        found = [Requirement(line) for line in lines]
        # strop[a,b]: those extras are in the table themselves.
        groups[extra] = [item for item in found if item.name != project["name"]]
    return groups


def resolve(target: Target, pyproject: str, constraints: str, source: CachedSource) -> Resolution:
    resolution = Resolution(target, read_pins(constraints), source)
    for extra, requirements in project_requirements(pyproject, target.platform).items():
        root = f"strop[{extra}]" if extra else "strop"
        resolution.follow(root, requirements)
    return resolution


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--index", default=PUBLIC_INDEX)
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--platform", nargs="+", default=[platform.name for platform in PLATFORMS])
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    options = parser.parse_args(argv)
    index = PackageIndex(options.index)
    source = CachedSource(index)
    pyproject = (ROOT / "pyproject.toml").read_text()
    constraints = options.constraints.read_text()
    platforms = [platform for platform in PLATFORMS if platform.name in options.platform]
    targets = [Target(platform, python) for platform in platforms for python in options.python]
    began = time.monotonic()
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            _read_ahead(pool, source, read_pins(constraints), targets)
            done = list(pool.map(lambda each: resolve(each, pyproject, constraints, source), targets))
    except IndexUnreachable as error:
        print(f"make resolve: {error}. It needs a package index (--index URL).", file=sys.stderr)
        return 1
    for resolution in done:
        verdict = "resolves" if not resolution.problems else "DOES NOT RESOLVE"
        print(f"{resolution.target}: {verdict}, {len(resolution.taken)} packages")
        for problem in sorted(resolution.problems):
            print(f"  {problem}")
    seconds = time.monotonic() - began
    print(f"read {index.downloaded / 1e6:.0f} MB of {options.index} in {seconds:.0f} s")
    return int(any(resolution.problems for resolution in done))


def _read_ahead(
    pool: ThreadPoolExecutor, source: CachedSource, pins: dict[str, Requirement], targets: list[Target]
) -> None:
    """All pages and metadata files in parallel; the walks then find them in memory."""

    def read(name: str) -> None:
        files = source.files(name, pinned_version(pins[name]))
        for target in targets:
            file = best_file(files, target, allow_source=name in SOURCE_ONLY)
            if file is not None:
                source.requirements(file)

    list(pool.map(read, pins))


if __name__ == "__main__":
    sys.exit(main())
