"""The state of a policy on the disk: to go on exactly (a checkpoint), and to sample from elsewhere (a folder
of Hugging Face or peft)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from strop.backends.fsdp.sharded import shard_like, whole
from strop.backends.single import ModuleBackend
from strop.models.lora import adapter_scale, has_adapters, without_adapter_name, write_adapter_config
from strop.run.atomic_files import flush_folder, flush_tree
from strop.run.checkpoint import layout
from strop.run.checkpoint.contents import (
    capture_random_states,
    restore_random_states,
    role_parts,
    role_state,
)
from strop.run.checkpoint.layout import DamagedCheckpoint, candidates, saved_checkpoints, step_folders
from strop.run.checkpoint.retention import RetentionPolicy
from strop.run.checkpoint.store import Checkpoints, Export, load
from strop.run.checkpoint.tensor_files import write_tensors
from strop.shared.adapter_folders import load_weights
from strop.shared.export import folder_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLE = "actor"
CONTENTS = ("model", "optimizer", "extra")
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
"""Part with the name of the optimizer."""
ADAPTER = "adapter"
"""Part with the name of the adapter."""
SCALE = "adapter_scale"
"""Part with what the product of an adapter is multiplied by (alpha / rank)."""


# --- exact state --------------------------------------------------------------------------------------------


def write_state(path: Path, backend: ModuleBackend, adapter: str, counters: Mapping[str, int]) -> None:
    """Save weights, optimizer, schedule, accumulated gradients, random states and counters.

    `path/global_step_<updates>` is complete or absent; an older one is deleted when it is complete. Names of
    weights do not contain the name of the adapter, so that another adapter can load them.
    """
    _refuse_state_of_another(path, adapter)
    state = backend.state_dict()
    plain: dict[str, Any] = {**state}
    for part in ("model", "optimizer"):
        plain[part] = {without_adapter_name(name): value for name, value in state[part].items()}
    gradients: dict[str, Tensor] = {}
    for name, master in backend.weights.masters.items():
        if master.grad is not None:
            gradients[without_adapter_name(name)] = master.grad
    plain[GRADIENTS] = gradients
    parts = role_parts(ROLE, plain, CONTENTS)
    parts["random"] = capture_random_states()
    parts["policy"] = dict(counters)
    parts[OPTIMIZER] = _optimizer(backend)
    parts[ADAPTER] = adapter
    parts[SCALE] = _scale(backend, adapter)
    keep = RetentionPolicy(newest=1)
    with Checkpoints(path, background=False, keep=keep, ranks=backend.ranks) as checkpoints:
        checkpoints.save(counters["updates"], parts)


def _refuse_state_of_another(path: Path, adapter: str) -> None:
    """A ValueError if the folder has the state of another adapter, which this one would replace."""
    for saved in saved_checkpoints(path):
        try:
            owner = load(saved.path, only=lambda part: part == ADAPTER).get(ADAPTER)
        except DamagedCheckpoint:
            continue
        if owner is not None and owner != adapter:
            raise ValueError(
                f"save_state: {path} holds the state of the adapter {owner!r}, and that of {adapter!r} would "
                "replace it. Give each adapter a folder of its own, or delete the old state."
            )


def read_state(path: Path, backend: ModuleBackend, adapter: str, *, optimizer: bool = True) -> dict[str, int]:
    """Load what `write_state` saved; returns the counters. Without `optimizer` only the weights are loaded,
    and the optimizer starts from scratch."""
    folders = candidates(path) if layout.step_of(path) is None else [path]
    if not folders:
        raise ValueError(f"There is no saved state in {path}: no folder global_step_... is in it.")
    sharded = backend.ranks.world > 1
    parts = load(folders[0], later=lambda part: sharded and part.startswith(ROLE))
    saved_with = parts.get(OPTIMIZER)
    if optimizer and saved_with is not None and saved_with != _optimizer(backend):
        raise ValueError(
            f"{folders[0]} was saved with optim.optimizer={saved_with}, and this policy has "
            f"{_optimizer(backend)}, whose state is another one. Make the policy with "
            f"optimizer={saved_with!r}, or load the weights alone by optimizer=False."
        )
    scale, own_scale = parts.get(SCALE), _scale(backend, adapter)
    if scale is not None and own_scale is not None and scale != own_scale:
        raise ValueError(
            f"{folders[0]} was saved with lora_alpha / lora_rank = {scale:g}, and this adapter has "
            f"{own_scale:g}: its weights would count {own_scale / scale:g} times as much. Set lora_alpha to "
            f"{scale:g} times lora_rank."
        )
    names = {without_adapter_name(name): name for name in backend.weights.masters}
    state = role_state(ROLE, parts, CONTENTS)
    gradients = state.pop(GRADIENTS)
    for part in ("model", "optimizer"):
        state[part] = {names.get(name, name): value for name, value in state[part].items()}
    counters = {name: int(value) for name, value in parts["policy"].items()}
    if not optimizer:
        load_weights(state["model"], backend)
        return counters
    backend.load_state_dict(state)
    backend.weights.clear_gradients()
    for name, gradient in gradients.items():
        master = backend.weights.masters[names[name]]
        master.grad = shard_like(gradient, master).to(master.device)
    restore_random_states(parts["random"])
    return counters


def _optimizer(backend: ModuleBackend) -> str:
    assert backend.settings.optim is not None
    return backend.settings.optim.optimizer


def _scale(backend: ModuleBackend, adapter: str) -> float | None:
    return adapter_scale(backend.module, adapter) if has_adapters(backend.module) else None


# --- folders for sampling -----------------------------------------------------------------------------------


def write_sampling_folder(
    path: Path, backend: ModuleBackend, adapter: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write a folder that transformers loads, or peft where an adapter is trained. It appears whole; an older
    one of that name is replaced, and anything else there is refused."""
    export = _folder(backend, adapter, tokenizer)
    backend.ranks.run_or_raise_on_all(
        lambda: _write_folder(path, *export) if backend.ranks.is_rank0 else None,
        "writing a folder for sampling",
    )


def _folder(backend: ModuleBackend, adapter: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, Export]:
    """The name of the file of weights, and what is written. All ranks take part."""
    if not has_adapters(backend.module):
        return "model.safetensors", folder_of(backend, tokenizer)

    def write(folder: Path) -> None:
        write_adapter_config(backend.module, adapter, folder)
        tokenizer.save_pretrained(str(folder))

    return "adapter_model.safetensors", Export(adapter_tensors(backend), write)


def _replaceable(path: Path) -> Path:
    """The folder to write, behind a symbolic link if `path` is one. A ValueError for something else than an
    older folder of the same kind: it would be deleted."""
    if path.is_symlink():
        path = path.resolve()
    if not path.exists():
        return path
    found = "a file"
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        written = {"config.json", "adapter_config.json"} & set(names)
        if not names or (written and not step_folders(path)):
            return path
        found = f"a folder with other files ({', '.join(names[:4])})"
    raise ValueError(
        f"save_for_sampling replaces its folder, and {path} is {found}, which would be lost. Give a new "
        "folder."
    )


def _write_folder(path: Path, file: str, export: Export) -> None:
    path = _replaceable(path)
    staged = path.with_name(f".{path.name}.new")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    export.write_files(staged)
    write_tensors(staged / file, export.weights)
    flush_tree(staged)
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
        os.rename(staged, path)
        shutil.rmtree(old)
    else:
        os.rename(staged, path)
    flush_folder(path.parent)


def adapter_tensors(backend: ModuleBackend) -> dict[str, Tensor]:
    """The weights of the active adapter by the names of peft's files, in master precision. All ranks take
    part."""
    found: dict[str, Tensor] = {}
    for name, master in backend.weights.masters.items():
        found[without_adapter_name(name)] = whole(master.detach())
    return found
