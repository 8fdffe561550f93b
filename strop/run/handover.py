"""Ranks that write one checkpoint together: each leaves a note of what it wrote, and rank 0 collects the notes.

Notes are files in the checkpoint's own hidden folder, because writing goes on in the background, where ranks must not talk over
the connections that training uses.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from strop.run.durable import Fingerprint, replace_text

PATIENCE = 3600.0
"""Seconds that rank 0 waits for the slowest."""


def _note(folder: Path, rank: int) -> Path:
    return folder / f".written_by_{rank}.json"


def leave_note(folder: Path, rank: int, write: Callable[[], Mapping[str, Fingerprint]]) -> None:
    """Write, and say what was written; or say why it could not be, and raise."""
    try:
        files = write()
    except OSError as error:
        replace_text(_note(folder, rank), json.dumps({"error": str(error), "errno": error.errno}))
        raise
    content = {name: {"bytes": file.size, "crc32": file.crc32} for name, file in files.items()}
    replace_text(_note(folder, rank), json.dumps({"files": content}))


def notes(folder: Path, world: int) -> dict[str, Fingerprint]:
    """What all ranks but 0 wrote. The notes are taken away."""
    found: dict[str, Fingerprint] = {}
    deadline = time.monotonic() + PATIENCE
    for rank in range(1, world):
        note = _note(folder, rank)
        while not note.exists():
            if time.monotonic() > deadline:
                raise OSError(f"rank {rank} has not written its part of the checkpoint for {PATIENCE:.0f} seconds")
            time.sleep(0.01)
        content = json.loads(note.read_text())
        if "error" in content:
            raise OSError(content["errno"], f"rank {rank}: {content['error']}")
        found |= {name: Fingerprint(file["bytes"], file["crc32"]) for name, file in content["files"].items()}
        note.unlink()
    return found
