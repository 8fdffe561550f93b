"""A process that hosts an engine: its output goes to a file, and when it dies its last words are known."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import strop

_LAST_WORDS = 25  # lines
_PATIENCE = 10.0  # seconds between asking a process to end and ending it


class HostProcess:
    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
    ) -> None:
        self.name, self._command = name, list(command)
        self._folder = tempfile.TemporaryDirectory(prefix=f"strop-{name}-")
        self._log = Path(self._folder.name) / "output.log"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, "PYTHONPATH": self._python_path(), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=pass_fds,
                start_new_session=True,  # so that what it starts ends with it
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def story(self) -> str:
        """Which process it is, how it ended, and what it said last."""
        try:
            code: int | None = self._process.wait(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
        ended = "stopped answering" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                ended += f" ({signal.Signals(-code).name})"
        words = self._log.read_text(errors="replace").splitlines()[-_LAST_WORDS:]
        said = "\n".join(["It said last:", *words]) if words else "It said nothing."
        return f"The {self.name} process (id {self.pid}) {ended}. {said}\nIts command was: {shlex.join(self._command)}"

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_PATIENCE)
        self._folder.cleanup()

    def _python_path(self) -> str:
        """This package alone, by a link: the folder it is installed in may hold libraries of another environment."""
        package = Path(strop.__file__).parent
        (Path(self._folder.name) / "strop").symlink_to(package, target_is_directory=True)
        return os.pathsep.join([self._folder.name, *filter(None, [os.environ.get("PYTHONPATH")])])
