"""The table of contents of a checkpoint, with the size and checksum of every file, so that a cut file is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from strop.run.durable import Fingerprint, fingerprint, write_file

NAME = "manifest.json"
FORMAT = 1


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class Manifest:
    step: int
    serial: int
    """Counts saves in a run's folder over all its processes: the order in which checkpoints were made. A run that was rewound
    makes smaller steps later."""
    files: dict[str, Fingerprint]
    """By path inside the checkpoint."""
    parts: list[str]
    """Names of the saved trees."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What validation said about these weights."""

    @property
    def size(self) -> int:
        """Bytes on the disk, the manifest itself left out."""
        return sum(file.size for file in self.files.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "serial": manifest.serial,
        "parts": manifest.parts,
        "metrics": manifest.metrics,
        "files": {path: {"bytes": file.size, "crc32": file.crc32} for path, file in sorted(manifest.files.items())},
    }
    write_file(folder / NAME, [json.dumps(content, indent=1).encode()])


def read_manifest(folder: Path) -> Manifest:
    try:
        text = (folder / NAME).read_text()
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{folder} has no {NAME}: it was not written by Strop, or only a part of it was copied here."
        ) from None
    try:
        content = json.loads(text)
        version = content["format"]
        manifest = Manifest(
            step=content["step"],
            serial=content["serial"],
            parts=content["parts"],
            metrics=content["metrics"],
            files={path: Fingerprint(facts["bytes"], facts["crc32"]) for path, facts in content["files"].items()},
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{folder / NAME} cannot be read ({error!r}, {len(text)} characters).") from error
    if version != FORMAT:
        raise DamagedCheckpoint(f"{folder / NAME} has format {version}; this version of Strop reads format {FORMAT}.")
    return manifest


def verify(folder: Path, files: Mapping[str, Fingerprint], *, contents: Callable[[str], bool] = lambda path: True) -> None:
    """Refuse a checkpoint of which a file is missing, cut or changed. `contents` chooses the files that are read through."""
    for path, expected in files.items():
        file = folder / path
        if not file.is_file():
            raise DamagedCheckpoint(f"{file} is missing.")
        size = file.stat().st_size
        if size != expected.size:
            raise DamagedCheckpoint(f"{file} was cut or changed: it has {size} bytes, {expected.size} were written.")
        if contents(path) and fingerprint(file) != expected:
            raise DamagedCheckpoint(f"{file} was changed: it has the right size but another checksum than what was written.")
