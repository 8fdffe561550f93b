"""Which build of torch the Makefile installs: prints arguments for pip, and on stderr what pip will download.

    pip install -c constraints.txt $(python scripts/torch_build.py) torch

torch of PyPI for Linux brings the libraries of CUDA, gigabytes that a machine without a GPU never uses.
PyTorch's own index has a build without them. It is taken where no NVIDIA GPU is found and that index has
the pinned version for this interpreter. `--index default` leaves the choice to pip's configuration;
`--index URL` names another index.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TIMEOUT = 10  # seconds; the index is an offer, not a need
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"


@dataclass(frozen=True)
class Machine:
    system: str
    architecture: str
    python: str
    """cp312"""
    has_gpu: bool


@dataclass(frozen=True)
class Build:
    arguments: tuple[str, ...]
    """For pip install."""
    message: str


def choose(version: str, machine: Machine, index: str, read_page: Callable[[str], str | None]) -> Build:
    """`read_page` returns the text of a page, or None where it cannot be read."""
    if index == "default":
        return Build((), f"torch {version} from pip's index (TORCH_INDEX=default).")
    if index != "auto":
        return Build(("--extra-index-url", index), f"torch {version} from {index} (TORCH_INDEX).")
    if machine.system != "Linux":
        return Build((), f"torch {version} from pip's index; for {machine.system} it has no CUDA libraries.")
    if machine.has_gpu:
        return Build((), f"torch {version} with CUDA from pip's index: a GPU was found.")
    page = read_page(f"{CPU_INDEX}/torch/")
    if page is None:
        why = f"{CPU_INDEX} cannot be reached"
    elif not offers_cpu_build(page, version, machine):
        why = f"{CPU_INDEX} has no build of it for {machine.python}, {machine.architecture}"
    else:
        return Build(
            ("--extra-index-url", CPU_INDEX),
            f"torch {version} for CPU from {CPU_INDEX}, about 200 MB: no GPU was found.",
        )
    return Build(
        (),
        f"torch {version} from pip's index: no GPU was found, but {why}. "
        "With the CUDA libraries that the build of PyPI brings, this is a download of about 2.7 GB.",
    )


def offers_cpu_build(page: str, version: str, machine: Machine) -> bool:
    """Whether a page of an index names the CPU build for this interpreter and this architecture.

    >>> intel = Machine("Linux", "x86_64", "cp312", has_gpu=False)
    >>> offers_cpu_build("torch-2.13.0%2Bcpu-cp312-cp312-manylinux_2_28_x86_64.whl", "2.13.0", intel)
    True
    """
    build = rf"torch-{re.escape(version)}(\+|%2B)cpu"
    tags = rf"{machine.python}-{machine.python}-[\w.]*{machine.architecture}"
    return re.search(rf"{build}-{tags}\.whl", page, re.IGNORECASE) is not None


def this_machine() -> Machine:
    devices = Path("/dev").glob("nvidia[0-9]*")
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        python=f"cp{sys.version_info.major}{sys.version_info.minor}",
        has_gpu=any(devices) or shutil.which("nvidia-smi") is not None,
    )


def pinned_torch(constraints: str) -> str:
    found = re.search(r"^torch==(\S+)", constraints, re.MULTILINE)
    if found is None:
        raise ValueError("constraints.txt does not pin torch")
    return found[1]


def read_page(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, TimeoutError):
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--index", default="auto", help="auto, default, or the URL of an index")
    options = parser.parse_args()
    version = pinned_torch(CONSTRAINTS.read_text())
    build = choose(version, this_machine(), options.index, read_page)
    print(build.message, file=sys.stderr)
    print(" ".join(build.arguments))


if __name__ == "__main__":
    main()
