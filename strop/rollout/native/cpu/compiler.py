"""Compiles the C functions of this folder with the machine's compiler, once, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from strop.data.files import cache_root

_log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-mavx512f", "-mfma", "-mprefer-vector-width=512", "-fPIC", "-fopenmp")
_SECONDS = 60
"""A compiler that takes longer is given up; it takes about one."""


@cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """The functions of a C file, or None where there is no compiler or another CPU than they are for.

    The file is compiled without the library of OpenMP: torch has loaded one, and threads of a second one
    would wait for work on the same cores.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    compiler = shlex.split(os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or "")
    if not compiler:
        return None
    key = hashlib.sha256("\0".join([*_FLAGS, *compiler, source.read_text()]).encode()).hexdigest()[:16]
    library = cache_root() / "kernels" / f"{source.stem}-{key}.so"
    try:
        if not library.exists():
            _compile(compiler, source, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        _log.warning("%s is not used: %s", source.name, str(said).strip()[-400:])
        return None


def _compile(compiler: list[str], source: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        half = Path(folder) / "half.o"
        whole = Path(folder) / "whole.so"
        for command in (
            [*compiler, *_FLAGS, "-c", str(source), "-o", str(half)],
            [*compiler, "-shared", str(half), "-o", str(whole)],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        whole.replace(library)  # other processes may compile it too
