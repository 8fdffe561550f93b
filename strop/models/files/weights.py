"""The weights of a model folder: its safetensors files, and errors that name a damaged or missing one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHER_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_config.json")
"""What transformers loads where there is no safetensors file; an adapter names its model."""


@contextmanager
def weights_of(name: str) -> Iterator[None]:
    """Inside the block, errors of libraries that cannot read weights become a ValueError that names the
    damaged file, if there is one."""
    try:
        yield
    except Exception as error:
        check_weights(Path(name))
        raise ValueError(f"The weights of {name!r} cannot be loaded: {reason_of(error)}") from error


def weight_files(folder: Path) -> list[str]:
    """The safetensors files of a model folder, by name; empty where there are none."""
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            return [SINGLE]
        return []
    try:
        return sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} is damaged or incomplete ({error}). Fetch it again.") from error


def open_weights(file: Path) -> Any:
    """A safetensors file, opened; its header, which says how long the file must be, is read and nothing
    more."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        size = "there is no such file"
        if file.is_file():
            size = f"it has {file.stat().st_size} bytes"
        raise ValueError(
            f"{file} is damaged or incomplete: {size} ({first_line(error)}). Fetch it again; an interrupted "
            "download or copy, or a Git LFS pointer in place of the file, looks like this."
        ) from error


def check_weights(folder: Path) -> None:
    """Refuse a model folder without weights, or of which a safetensors file is missing or cut short."""
    files = weight_files(folder)
    for file in files:
        open_weights(folder / file)
    if not files and not any((folder / name).is_file() for name in OTHER_WEIGHTS):
        raise ValueError(
            f"The folder {folder} holds no weights: neither {SINGLE}, nor {INDEX}, nor {OTHER_WEIGHTS[0]}. "
            "Copy or fetch them."
        )


def refuse_mismatch(name: str, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Refuse weights of other shapes than the configuration; `mismatched` lists (name, saved shape, wanted
    shape)."""
    found = sorted(mismatched)
    if found:
        key, saved, wanted = found[0]
        raise ValueError(
            f"{len(found)} weights of {name!r} do not fit its configuration, for instance {key}: "
            f"{tuple(saved)} in the file, {tuple(wanted)} by config.json (and override_config). Its "
            "config.json must belong to its weights."
        )


def first_line(error: Exception) -> str:
    """With the next line if it ends in a colon, and with the class of an error whose text says little."""
    line = " ".join(re.split(r"(?<!:)\n", str(error).strip(), maxsplit=1)[0].split())
    return f"{type(error).__name__}: {line}" if isinstance(error, LookupError | TypeError) else line


def reason_of(error: Exception) -> str:
    """The first line of an error; where transformers refuses to run code of the folder, what to set."""
    if "trust_remote_code" not in str(error):
        return first_line(error)
    return (
        "it brings code of its own (auto_map), which is not run. Read that code, and if you trust it set "
        "model.trust_remote_code=true (strop merge: --trust_remote_code)."
    )
