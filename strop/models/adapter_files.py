"""Folders with adapters of peft: what is refused before and after peft loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_BEYOND_LORA = (
    *("use_dora", "use_qalora", "alora_invocation_tokens", "arrow_config", "lora_bias"),
    *("modules_to_save", "trainable_token_indices", "layer_replication"),
)
"""Keys of adapter_config.json with which the model computes more than W x + scale B A x."""
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Beginnings of init_lora_weights with which peft takes a part out of W, whenever it loads the adapter: W is
then no longer the model before training, and no other program has it."""


def check_adapter_folder(folder: Path, path: str, *, only_lora: bool) -> None:
    """Refuse a folder without an adapter, or with one that cannot be trained. `path` is the folder as the
    user gave it."""
    if not (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"lora_adapter_path={path!r} holds no adapter: there is no adapter_config.json in it."
        )
    if not any((folder / name).is_file() for name in ADAPTER_FILES):
        raise ValueError(
            f"lora_adapter_path={path!r} holds no weights: there is none of {', '.join(ADAPTER_FILES)} in it."
        )
    said = _read_config(folder / "adapter_config.json")
    if only_lora:
        _refuse_other_kinds(path, said)


def refuse_part_of_adapter(path: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Refuse an adapter of which only a part was loaded: peft warns, and the rest would be a new adapter."""
    ignored = [name for name in unexpected if ".lora_" in name]
    if missing or ignored:
        raise ValueError(
            f"The adapter of lora_adapter_path={path!r} does not fit this model: {len(missing)} weights are "
            f"missing in its file {sorted(missing)[:2]}, {len(ignored)} fit nowhere {sorted(ignored)[:2]}. "
            "It belongs to another model, or its adapter_config.json (target_modules) to another adapter."
        )


def _read_config(file: Path) -> dict[str, Any]:
    """What an adapter_config.json says. Refused is one with megatron_config: peft imports the module that it
    calls megatron_core, whatever it is."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise ValueError(f"{file} is not the configuration of an adapter: it holds a {type(said).__name__}.")
    if said.get("megatron_config"):
        raise ValueError(
            f"{file} sets megatron_config, with which peft imports a module by name. Adapters of Megatron "
            "layers are not supported; take megatron_config out."
        )
    return said


def _refuse_other_kinds(path: str, said: Mapping[str, Any]) -> None:
    beyond = [f"{key}={said[key]!r}" for key in _BEYOND_LORA if said.get(key)]
    for key, plain in (("peft_type", "LORA"), ("bias", "none")):
        if said.get(key, plain) != plain:
            beyond.append(f"{key}={said[key]!r}")
    initial = said.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_CHANGES_BASE):
        beyond.append(f"init_lora_weights={initial!r}")
    if beyond:
        raise ValueError(
            f"The adapter of lora_adapter_path={path!r} has {', '.join(beyond)}; Strop trains and exports "
            "LoRA with A and B alone. Merge it into the model with peft (merge_and_unload, save_pretrained), "
            "give that folder as the model, and set lora_rank to train new adapters."
        )
