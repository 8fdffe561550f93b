"""Tries the RUN lines of the Dockerfile without building an image: each command by its own dry run.

    python scripts/try_dockerfile.py [--only apt-get pip useradd ...]

pip resolves what it would install (`--dry-run`), apt-get simulates, useradd (as root) writes into an empty
folder. Commands on the files of the image (rm, mkdir, chown) are read by bash only. Prints each command and
its seconds; exits with 1 if one fails. A command that is not known here is a failure, so that no new kind of
line is left untried.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
OF_THE_IMAGE = ("rm", "mkdir", "chown")
"""They change files of the image; nothing else may be done with them here."""


def commands(text: str) -> Iterator[str]:
    """Every command of every RUN line, in its order, each once."""
    seen: set[str] = set()
    for line in text.replace("\\\n", " ").splitlines():
        if not line.startswith("RUN "):
            continue
        for command in re.split(r" && ", line.removeprefix("RUN ").strip()):
            if command not in seen:
                seen.add(command)
                yield command


def dry_run(command: str, folder: Path) -> str | None:
    """The shell command that tries this one; None: it is only read by bash."""
    program, _, rest = command.partition(" ")
    if program in OF_THE_IMAGE:
        return None
    if program == "pip":
        verb, _, arguments = rest.partition(" ")
        return f"{sys.executable} -m pip {verb} --dry-run --quiet --ignore-installed {arguments}"
    if program == "apt-get":
        if shutil.which("apt-get") is None:
            return None
        option = "--print-uris" if rest == "update" else "--simulate"
        return f"apt-get {option} {rest}"
    if program == "useradd":
        if os.geteuid() or shutil.which("useradd") is None:
            return None
        (folder / "etc").mkdir(exist_ok=True)
        for name in ("passwd", "group", "shadow", "gshadow"):
            (folder / "etc" / name).touch()
        return f"useradd --prefix {folder} {rest}"
    raise ValueError(f"The Dockerfile runs {program!r}: say in {Path(__file__).name} how it is tried.")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="programs to try; the others are read by bash only")
    options = parser.parse_args(argv)
    failed = False
    with tempfile.TemporaryDirectory() as name:
        for command in commands((ROOT / "Dockerfile").read_text()):
            began = time.monotonic()
            tried = dry_run(command, Path(name))
            if options.only and command.partition(" ")[0] not in options.only:
                tried = None
            words = ["bash", "-n", "-c", command]
            if tried is not None:
                words = ["bash", "-c", tried]
            done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)
            how = "read" if tried is None else "tried"
            verdict = how if done.returncode == 0 else f"FAILED ({how})"
            print(f"{verdict}, {time.monotonic() - began:.0f} s: {command}", flush=True)
            if done.returncode:
                failed = True
                print(done.stderr[-2000:])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
