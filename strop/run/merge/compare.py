"""Compare the weights of a checkpoint with those of a Hugging Face folder, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


@dataclass
class Differences:
    """Differences between a checkpoint (ours) and a folder (theirs)."""

    compared: int = 0
    only_ours: list[str] = field(default_factory=list)
    only_theirs: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    """Largest absolute difference of tensors whose numbers differ."""

    def __bool__(self) -> bool:
        return bool(self.only_ours or self.only_theirs or self.shapes or self.values)

    def lines(self, limit: int = 5) -> list[str]:
        """One line per difference, at most `limit` of each kind."""
        lines: list[str] = []
        for name in self.only_ours[:limit]:
            lines.append(f"{name} is only in the checkpoint")
        for name in self.only_theirs[:limit]:
            lines.append(f"{name} is only in the folder")
        for name, (ours, theirs) in islice(self.shapes.items(), limit):
            lines.append(f"{name} has shape {ours} in the checkpoint and {theirs} in the folder")
        for name, gap in islice(self.values.items(), limit):
            lines.append(f"{name} differs by up to {gap:.3g}")
        total = len(self.only_ours) + len(self.only_theirs) + len(self.shapes) + len(self.values)
        if total > len(lines):
            lines.append(f"... and {total - len(lines)} more")
        return lines


def compare_with_folder(
    weights: Mapping[str, Tensor], folder: str | Path, *, atol: float = 0.0
) -> Differences:
    """The differences between weights and a folder, in the dtype of the folder: ours are cast to it first."""
    found = Differences()
    theirs = set()
    for name, tensor in folder_tensors(Path(folder).expanduser()):
        theirs.add(name)
        if name not in weights:
            found.only_theirs.append(name)
            continue
        ours = weights[name].to(tensor.dtype)
        found.compared += 1
        if ours.shape != tensor.shape:
            found.shapes[name] = (tuple(ours.shape), tuple(tensor.shape))
        elif not torch.equal(ours, tensor):
            gap = float((ours.double() - tensor.double()).abs().max())
            if not gap <= atol:
                found.values[name] = gap
    found.only_ours = [name for name in weights if name not in theirs]
    return found


def folder_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a Hugging Face folder, one at a time."""
    files = sorted(folder.glob("*.safetensors"))
    if not files and (folder / "pytorch_model.bin").is_file():
        yield from torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True).items()
        return
    if not files:
        raise ValueError(
            f"{folder} holds no *.safetensors and no pytorch_model.bin, so there is nothing to compare with."
        )
    for file in _indexed_files(folder, files):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error


def _indexed_files(folder: Path, files: list[Path]) -> list[Path]:
    """The files that the index of the folder names, or all of them if it has no index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return files
    indexed = set(json.loads(index.read_text())["weight_map"].values())
    missing = sorted(indexed - {file.name for file in files})
    if missing:
        raise ValueError(f"{folder} is not complete: {missing[0]} is missing ({len(missing)} files in all).")
    return [file for file in files if file.name in indexed]
