"""Whether the model of a checkpoint is the model in a Hugging Face folder, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


@dataclass
class Differences:
    """What differs between a checkpoint (ours) and a folder (theirs)."""

    compared: int = 0
    only_ours: list[str] = field(default_factory=list)
    only_theirs: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    """Largest absolute difference of tensors whose numbers differ."""

    def __bool__(self) -> bool:
        return bool(self.only_ours or self.only_theirs or self.shapes or self.values)

    def lines(self, most: int = 5) -> list[str]:
        """What to tell a person: the first of each kind."""
        said = [f"{name} is only in the checkpoint" for name in self.only_ours[:most]]
        said += [f"{name} is only in the folder" for name in self.only_theirs[:most]]
        said += [
            f"{name} has shape {a} in the checkpoint and {b} in the folder" for name, (a, b) in list(self.shapes.items())[:most]
        ]
        said += [f"{name} differs by up to {most_of:.3g}" for name, most_of in list(self.values.items())[:most]]
        total = sum(len(kind) for kind in (self.only_ours, self.only_theirs, self.shapes, self.values))
        if total > len(said):
            said.append(f"... and {total - len(said)} more")
        return said


def compare_with_folder(weights: Mapping[str, Tensor], folder: str | Path, *, atol: float = 0.0) -> Differences:
    """Compare in the precision of the folder: ours are rounded to it first."""
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
        raise ValueError(f"{folder} holds no *.safetensors and no pytorch_model.bin, so there is nothing to compare with.")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(listed - {file.name for file in files})
        if missing:
            raise ValueError(f"{folder} is not complete: {missing[0]} is missing ({len(missing)} files in all).")
        files = [file for file in files if file.name in listed]
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
