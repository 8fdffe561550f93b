"""Compiles C functions with the machine's compiler, once, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

from strop.host import cache_root

_log = logging.getLogger(__name__)

_FLAGS = ("-O3", "-fPIC", "-fopenmp")
_AVX512_FLAGS = ("-mavx512f", "-mfma", "-mprefer-vector-width=512")
_AMX_FLAGS = ("-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
_VNNI_FLAGS = ("-mavx512bw", "-mavx512vnni")
_DOT_PRODUCT_FLAGS = ("-march=armv8.2-a+dotprod",)
_BF16_FLAGS = ("-DBF16",)
"""See vectors.h."""
_HEADERS = Path(__file__).parent
_SECONDS = 60
"""A compiler that takes longer is given up; it takes about one."""


@cache
def load_library(
    source: Path, dtype: torch.dtype = torch.float32, *, amx: bool = False, int8: bool = False
) -> ctypes.CDLL | None:
    """The functions of a C file, or None where there is no compiler or another CPU than they are for.

    `dtype`: of the numbers in memory, in files that heed BF16. `amx`: the file needs AMX. `int8`: it needs
    sums of int8 products in one instruction.

    The file is compiled without the library of OpenMP: torch has loaded one, and threads of a second one
    would wait for work on the same cores.
    """
    flags = _flags(dtype, amx, int8)
    compiler = shlex.split(os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or "")
    if flags is None or not compiler:
        return None
    texts = [file.read_text() for file in (source, *sorted(_HEADERS.glob("*.h")))]
    key = hashlib.sha256("\0".join([*flags, *compiler, *texts]).encode()).hexdigest()[:16]
    library = cache_root() / "kernels" / f"{source.stem}-{key}.so"
    try:
        if not library.exists():
            _compile([*compiler, *flags], source, library)
        _share_openmp()
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        _log.warning("%s is not used: %s", source.name, str(said).strip()[-400:])
        return None


def is_arm_linux() -> bool:
    return sys.platform == "linux" and platform.machine() == "aarch64"


def _flags(dtype: torch.dtype, amx: bool, int8: bool) -> tuple[str, ...] | None:
    """For the vectors of this CPU; None for a CPU without an implementation."""
    flags: tuple[str, ...] = _FLAGS
    if dtype == torch.bfloat16:
        flags = (*flags, *_BF16_FLAGS)
    if amx and not (sys.platform == "linux" and torch.cpu._is_amx_tile_supported()):
        return None
    if amx:
        return (*flags, *_AVX512_FLAGS, *_AMX_FLAGS)
    if is_arm_linux():
        if not int8:
            return flags
        return (*flags, *_DOT_PRODUCT_FLAGS) if "asimddp" in _arm_features() else None
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    if not int8:
        return (*flags, *_AVX512_FLAGS)
    return (*flags, *_AVX512_FLAGS, *_VNNI_FLAGS) if torch.cpu._is_vnni_supported() else None


def _arm_features() -> list[str]:
    """What the first core has, in the kernel's names."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("Features"):
            return line.partition(":")[2].split()
    return []


def _share_openmp() -> None:
    """Let libraries that are loaded later find the OpenMP that torch has loaded. On x86 they do already."""
    if is_arm_linux():
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/libgomp" in line:
                ctypes.CDLL(line.split(maxsplit=5)[5], mode=ctypes.RTLD_GLOBAL)
                return


def _compile(compiler: list[str], source: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        half = Path(folder) / "half.o"
        whole = Path(folder) / "whole.so"
        for command in (
            [*compiler, "-I", str(_HEADERS), "-c", str(source), "-o", str(half)],
            [*compiler, "-shared", str(half), "-o", str(whole)],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        whole.replace(library)  # other processes may compile it too
