"""The model of a finished run in a folder of its own, where OpenRLHF's users look for it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from strop.run.checkpoint.layout import checkpoint_folder, read_latest


def place_final_model(directory: Path, role: str, target: Path) -> bool:
    """Put the Hugging Face export of the newest checkpoint of `directory` into `target`; False if the
    checkpoint has none. Files of the same file system are linked, so they take no space."""
    step = read_latest(directory)
    if step is None:
        return False
    export = checkpoint_folder(directory, step) / role / "huggingface"
    if not export.is_dir():
        return False
    target.mkdir(parents=True, exist_ok=True)
    for file in export.iterdir():
        if file.is_file():
            _link_or_copy(file, target / file.name)
    return True


def _link_or_copy(file: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(file, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(file, target)
