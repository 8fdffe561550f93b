"""Functions that misbehave, to be called in worker processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from typing import Any


def catastrophic(length: int) -> bool:
    """A regular expression that backtracks for ages while it holds the interpreter."""
    return re.fullmatch(r"(a+)+b", "a" * length) is not None


def add(left: int, right: int = 0) -> int:
    return left + right


def nap(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def leave(code: int) -> None:
    os._exit(code)


def quit_politely() -> None:
    sys.exit("bye")


def complain(message: str) -> None:
    raise ZeroDivisionError(message)


class Picky(Exception):
    def __init__(self, one: str, two: str):
        super().__init__(one + two)


def complain_pickily() -> None:
    raise Picky("a", "b")


def chatter() -> str:
    print("words on standard output")
    return "done"


def start_child_and_hang(note: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(f"{note}.part", "w") as file:
        file.write(str(child.pid))
    os.rename(f"{note}.part", note)
    time.sleep(600)


def unpicklable() -> Any:
    return lambda: None


def catastrophic_score(solution_str: str, ground_truth: str) -> float:
    return float(re.fullmatch(r"(a+)+b", solution_str) is not None)
