"""What a command says on the side: Strop's own notes and everybody's warnings, one line each, on stderr."""

from __future__ import annotations

import logging
import os
import sys


class ToStderr(logging.Handler):
    """Writes to what sys.stderr is at that moment: the live view of a run puts its own stream there."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
        except (OSError, ValueError):  # the stream is closed or full; a note is not worth a run
            self.handleError(record)


class OneLine(logging.Formatter):
    """`strop: warning: ...`, in the form that errors have; other libraries are named."""

    def format(self, record: logging.LogRecord) -> str:
        room = record.name.partition(".")[0]
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = f"{room}: {level}{record.getMessage()}"
        return text if not record.exc_info else f"{text}\n{self.formatException(record.exc_info)}"


def configure_logging() -> None:
    """Once per process: Strop from INFO on, others from WARNING on; STROP_DEBUG=1 lets transformers tell all it does."""
    root = logging.getLogger()
    if any(isinstance(handler, ToStderr) for handler in root.handlers):
        return
    handler = ToStderr()
    handler.setFormatter(OneLine())
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("strop").setLevel(logging.INFO)
    if os.environ.get("STROP_DEBUG") != "1":
        # Both are read when the library is imported, which is later. Its progress bars and tables of loaded weights are noise.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
