"""The contents of a checkpoint: which parts of a model are saved and loaded (model, optimizer, extra,
hf_model), the state of a training loop apart from its models, and all random states of a process (Python's,
NumPy's, torch's on the CPU and on each CUDA device) as one tree."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from strop.config.schema.model import CHECKPOINT_CONTENTS
from strop.run.checkpoint.tensor_files import Tree

log = logging.getLogger(__name__)


def role_parts(role: str, state: Mapping[str, Tree], contents: Sequence[str]) -> dict[str, Tree]:
    """The chosen parts of one model's state: `model`, `optimizer`, and the rest together as `extra`.

    >>> role_parts("actor", {"model": {}, "optimizer": {}, "schedule": {"step": 3}}, ["model", "extra"])
    {'actor/model': {}, 'actor/extra': {'schedule': {'step': 3}}}
    """
    extra = {name: tree for name, tree in state.items() if name not in ("model", "optimizer")}
    parts: dict[str, Tree] = {}
    for name in ("model", "optimizer"):
        if name in state and name in contents:
            parts[f"{role}/{name}"] = state[name]
    if "extra" in contents:
        parts[f"{role}/extra"] = extra
    return parts


def role_state(role: str, parts: Mapping[str, Tree], contents: Sequence[str]) -> dict[str, Tree]:
    """The inverse of `role_parts`, for those contents that are to be loaded."""
    if "model" not in contents:
        raise ValueError(
            f"No weights are loaded: {role}.checkpoint.load_contents, by default save_contents, is "
            f"{list(contents)}. Put 'model' into it, and resume from a checkpoint that was saved with it."
        )
    state: dict[str, Tree] = {}
    for name in contents:
        if name == "hf_model":  # written for other libraries, never read back
            continue
        part = f"{role}/{name}"
        if part not in parts:
            remedy = f"Take {name!r} out of {role}.checkpoint.load_contents, or resume"
            if name == "model":  # without its weights nothing can be loaded
                remedy = "Resume"
            raise ValueError(
                f"The checkpoint has no {part!r}, it has {', '.join(sorted(parts)) or 'nothing'}. {remedy} "
                "from a checkpoint that was saved with it."
            )
        if name == "extra":
            state |= parts[part]
        else:
            state[name] = parts[part]
    return state


def part_selector(contents: Mapping[str, Sequence[str]]) -> Callable[[str], bool]:
    """A test for the parts to read: of the roles in `contents` only what is listed, of everything else all.

    >>> wanted = part_selector({"actor": ["model"]})
    >>> [wanted(part) for part in ("actor/model", "actor/optimizer", "data")]
    [True, False, True]
    """

    def wanted(part: str) -> bool:
        role, _, name = part.partition("/")
        return role not in contents or name not in CHECKPOINT_CONTENTS or name in contents[role]

    return wanted


def seed_random_states(seed: int) -> None:
    """Seed the global generators. Strop draws from torch's; reward functions, tools, samplers and plugins may
    draw from any: a run that is killed before its first checkpoint must draw the same numbers again."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_random_states() -> dict[str, Tree]:
    """The states of the global generators. Other generators are saved through their `get_state()`."""
    state = np.random.get_state(legacy=False)
    inner = state["state"]
    cuda: list[torch.Tensor] = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # a query would initialize an unused CUDA
        cuda = torch.cuda.get_rng_state_all()
    return {
        "python": random.getstate(),
        "numpy": {
            "bit_generator": state["bit_generator"],
            "key": torch.from_numpy(inner["key"].astype(np.int64)),
            "pos": int(inner["pos"]),
            "has_gauss": int(state["has_gauss"]),
            "gauss": float(state["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def restore_random_states(state: dict[str, Tree]) -> None:
    """Set the global generators to what `capture_random_states` returned."""
    random.setstate(state["python"])
    numpy_state = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": numpy_state["bit_generator"],
            "state": {"key": numpy_state["key"].numpy().astype(np.uint32), "pos": numpy_state["pos"]},
            "has_gauss": numpy_state["has_gauss"],
            "gauss": numpy_state["gauss"],
        }
    )
    try:
        torch.set_rng_state(state["torch"])
    except RuntimeError as error:
        raise ValueError(f"The random state of torch is not one: {error}") from error
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(state["cuda"]) > devices:
        log.warning(
            "The checkpoint has random states of %d CUDA devices, there are %d here: the resumed run draws "
            "other numbers.",
            len(state["cuda"]),
            devices,
        )
    for device, cuda_state in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(cuda_state, device)


class Stateful(Protocol):
    """Something with a state that belongs into a checkpoint."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class Loop(Protocol):
    """The parts of a training loop that belong into a checkpoint, apart from its models."""

    step: int

    @property
    def loader(self) -> Stateful: ...


@dataclass(frozen=True)
class LoopState:
    """What changes while a step samples and scores."""

    step: int
    """The last step that is finished."""
    data: Tree
    """State of the loader."""
    random: dict[str, Tree]

    @staticmethod
    def of(loop: Loop, step: int) -> LoopState:
        return LoopState(step, copy.deepcopy(loop.loader.state_dict()), capture_random_states())
