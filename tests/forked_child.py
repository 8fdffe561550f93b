"""The other side of tests/forked.py: all that a forked process imports before it becomes the command."""

from __future__ import annotations

import os
import runpy
import sys

inside = False
"""Whether this process was forked so."""


def begin(module: str, words: list[str], environment: dict[str, str], out: str, err: str) -> None:
    import torch

    global inside
    inside = True
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    files = [
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        for path in dict.fromkeys([out, err])
    ]
    os.dup2(files[0], 1)
    os.dup2(files[-1], 2)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
