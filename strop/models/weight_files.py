"""The safetensors files of a model folder: which there are, whether they are whole, and what is said when they do not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@contextmanager
def weights_of(name: str) -> Iterator[None]:
    """What a library says about weights that it cannot read, as a ValueError that names the damaged file if there is one."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        check_weights(Path(name))
        raise ValueError(f"The weights of {name!r} cannot be loaded: {first_line(error)}") from error


def weight_files(folder: Path) -> list[str]:
    """The safetensors files of a model folder, by name; empty where there are none."""
    if not (folder / INDEX).is_file():
        return [SINGLE] if (folder / SINGLE).is_file() else []
    try:
        return sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} is damaged or incomplete ({error}). Fetch it again.") from error


def open_weights(file: Path) -> Any:
    """A safetensors file, opened; its header, which says how long the file must be, is read and nothing more."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        size = f"it has {file.stat().st_size} bytes" if file.is_file() else "there is no such file"
        raise ValueError(
            f"{file} is damaged or incomplete: {size} ({first_line(error)}). Fetch it again; "
            "an interrupted download or copy, or a Git LFS pointer in place of the file, looks like this."
        ) from error


def check_weights(folder: Path) -> None:
    """Refuse a model folder of which a safetensors file is missing or cut short."""
    for file in weight_files(folder):
        open_weights(folder / file)


def refuse_mismatch(name: str, mismatched: Any) -> None:
    """Refuse weights of other shapes than the configuration; `mismatched` lists (name, saved shape, wanted shape)."""
    for key, saved, wanted in sorted(mismatched):
        raise ValueError(
            f"{len(mismatched)} weights of {name!r} do not fit its configuration, for instance {key}: {tuple(saved)} in the "
            f"file, {tuple(wanted)} by config.json (and override_config). Its config.json must belong to its weights."
        )


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
