"""Whether models on this machine can be divided as their `megatron` sections say, and start from the weights
that they name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from strop.config.rules import ConfigFinding, error
from strop.config.rules.megatron import MegatronRole
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
    return found


def _initial_weights(role: MegatronRole, config: PreTrainedConfig) -> list[ConfigFinding]:
    """An error if the Megatron checkpoint of initial weights is not one of this model."""
    from strop.run.merge.megatron import megatron_weights, saved_megatron, weight_shapes

    settings = role.settings
    if not settings.use_dist_checkpointing or settings.dist_checkpointing_path is None:
        return []
    try:
        folder = saved_megatron(settings.dist_checkpointing_path)
        shapes = weight_shapes(config, scalar=role.key == "critic")
        megatron_weights(folder, config, shapes, prefix=settings.dist_checkpointing_prefix)
    except ValueError as problem:
        return [error(f"{role.key}.megatron.dist_checkpointing_path", str(problem))]
    return []
