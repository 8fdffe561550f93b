"""Optional libraries: imported when first used, with an error that names what to install."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import shlex
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

PROJECT = "strop"


class MissingExtra(ImportError, ValueError):
    """An optional library is not installed."""


def require(module: str, *, extra: str, why: str) -> ModuleType:
    """Import `module`, or say which extra of this package brings it.

    >>> require("json", extra="none", why="it is always there").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{why} needs the package {module.partition('.')[0]!r}, which cannot be imported ({error}). "
            f"Install it with: {install_command(extra)}"
        ) from error


def install_command(extra: str) -> str:
    """A command that adds an extra to this installation, from where it was installed."""
    try:
        installed = importlib.metadata.distribution(PROJECT)
    except importlib.metadata.PackageNotFoundError:  # the source tree on PYTHONPATH
        return command_from_source(
            extra, {"url": Path(__file__).parents[1].as_uri(), "dir_info": {"editable": True}}, []
        )
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    return command_from_source(extra, origin, installed.requires or [])


def command_from_source(extra: str, origin: Mapping[str, object], requires: list[str]) -> str:
    """`origin` is the content of direct_url.json (PEP 610), empty for a package that came from an index.

    A package index may not have this package. So a folder, a file and a repository are named as they are;
    where a file is gone, the packages of the extra are named instead.

    >>> command_from_source("plot", {}, [])
    "pip install 'strop[plot]'"
    >>> command_from_source("plot", {"url": "https://host/strop.git", "vcs_info": {"vcs": "git"}}, [])
    "pip install 'strop[plot] @ git+https://host/strop.git'"
    """
    url = str(origin.get("url", ""))
    name = f"{PROJECT}[{extra}]"
    if not url:
        return f"pip install {_quoted(name)}"
    repository = origin.get("vcs_info")
    if isinstance(repository, Mapping):
        url = f"{repository['vcs']}+{url}"
    if not url.startswith("file:"):
        return f"pip install {_quoted(f'{name} @ {url}')}"
    path = Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path))
    if not path.exists():
        return " ".join(["pip install", *map(_quoted, packages_of(extra, requires))])
    folder = origin.get("dir_info")
    editable = isinstance(folder, Mapping) and folder.get("editable")
    option = "-e " if editable else ""
    return f"pip install {option}{_quoted(f'{path}[{extra}]')}"


def packages_of(extra: str, requires: list[str]) -> list[str]:
    """The packages that an extra adds, out of the requirements in the metadata.

    >>> packages_of("plot", ["torch>=2.11", 'matplotlib>=3.9; extra == "plot"'])
    ['matplotlib>=3.9']
    """
    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, requires):
        marker = requirement.marker
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            requirement.marker = None
            found.append(str(requirement))
    return found


def _quoted(text: str) -> str:
    """Always in quotes: brackets are patterns of files in some shells."""
    quoted = shlex.quote(text)
    return quoted if quoted.startswith("'") else f"'{text}'"


def kernel_errors() -> tuple[type[Exception], ...]:
    """What compiling or launching a kernel raises where the GPU, the driver or the compiler does not fit.

    Exceptions that steer a program (the end of a recomputation in torch, a cancellation) are not among them.
    """
    expected: tuple[type[Exception], ...] = (
        RuntimeError,  # CUDA errors, out of memory, no C compiler, NotImplementedError
        OSError,  # a missing compiler or an unwritable kernel cache
        subprocess.SubprocessError,  # a compiler that failed
        ValueError,  # an unsupported shape or dtype
        TypeError,
        AttributeError,  # an operator that this torch or Triton does not have
        KeyError,
        AssertionError,
    )
    try:
        from triton.errors import TritonError
    except ImportError:
        return expected
    return (*expected, TritonError)
