"""Whether models on this machine can be divided as their `megatron` sections say, and start from the weights
that they name."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from strop.config.megatron import adapted_outside_layers
from strop.config.rules import ConfigFinding, error
from strop.config.rules.megatron import MegatronRole, outside_message
from strop.preflight.model_checks import local_model_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def megatron_findings(roles: Iterable[MegatronRole]) -> list[ConfigFinding]:
    """Errors if a model on this machine cannot be divided as its `megatron` section says."""
    from strop.backends.megatron.fits import problems

    found: list[ConfigFinding] = []
    for role in roles:
        try:
            model = local_model_config(role.model)
        except ValueError as problem:
            return [error(f"{role.model_key}.path", str(problem))]
        if model is not None:
            found += [error(f"{role.key}.{key}", text) for key, text in problems(model, role.settings)]
            found += _initial_weights(role, model)
        found += _saved_adapters(role)
        found += _options(role)
    return found


def _options(role: MegatronRole) -> list[ConfigFinding]:
    """Errors if override_transformer_config names options that megatron-core does not have."""
    from strop.backends.megatron.options import unknown_options

    given = role.settings.override_transformer_config or role.settings.override_mcore_model_config
    if not given or importlib.util.find_spec("megatron") is None:
        return []
    key = f"{role.key}.megatron.override_transformer_config"
    return [error(f"{key}.{name}", problem) for name, problem in unknown_options(role.settings)]


def _saved_adapters(role: MegatronRole) -> list[ConfigFinding]:
    """Errors if the adapters of lora_adapter_path are others than the divided layers can have. A folder that
    cannot be read is reported by the check of the model."""
    if role.model.lora_adapter_path is None:
        return []
    key = f"{role.model_key}.lora_adapter_path"
    file = Path(role.model.lora_adapter_path).expanduser() / "adapter_config.json"
    if not file.is_file():
        return []
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        targets = said.get("target_modules") or []
        outside = adapted_outside_layers(targets, said.get("exclude_modules"), scalar=role.scalar)
    except (ValueError, re.error) as problem:
        return [error(key, f"{file} cannot be read: {problem}")]
    found = []
    if outside:
        found.append(error(key, f"{file}: target_modules {outside_message(role, outside)}"))
    for option in ("lora_dropout", "use_dora", "lora_bias", "modules_to_save", "layer_replication"):
        if said.get(option):
            found.append(
                error(
                    key,
                    f"{file} has {option}={said[option]!r}, which {role.key}.strategy=megatron does not "
                    f"have. Set {role.key}.strategy=fsdp.",
                )
            )
    return found


def _initial_weights(role: MegatronRole, config: PreTrainedConfig) -> list[ConfigFinding]:
    """An error if the Megatron checkpoint of initial weights is not one of this model."""
    from strop.run.merge.megatron import megatron_weights, saved_megatron, weight_shapes

    settings = role.settings
    if not settings.use_dist_checkpointing or settings.dist_checkpointing_path is None:
        return []
    try:
        folder = saved_megatron(settings.dist_checkpointing_path)
        shapes = weight_shapes(config, scalar=role.scalar)
        megatron_weights(folder, config, shapes, prefix=settings.dist_checkpointing_prefix)
    except ValueError as problem:
        return [error(f"{role.key}.megatron.dist_checkpointing_path", str(problem))]
    return []
