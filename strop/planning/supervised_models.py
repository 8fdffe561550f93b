"""The models of sft, rm and dpo on the trainer's ranks, by the strategy of their section."""

from __future__ import annotations

import dataclasses

from strop.catalog import PREFERENCE_LOSSES
from strop.config.schema.supervised import DpoConfig, RmConfig, SftConfig
from strop.planning.devices import PlannedCluster
from strop.planning.megatron import frozen_megatron, megatron_role
from strop.planning.model_sections import frozen_model, trained_model
from strop.planning.training import TrainedModel


def supervised_models(
    config: SftConfig | RmConfig | DpoConfig, cluster: PlannedCluster
) -> dict[str, TrainedModel]:
    """The trained model, and the reference of dpo if it has one, by role."""
    model = config.model
    scalar = isinstance(config, RmConfig)
    reference = None
    if isinstance(config, DpoConfig) and _has_reference_model(config):
        reference = dataclasses.replace(model, path=config.ref.path)
    models: dict[str, TrainedModel] = {}
    if model.strategy == "megatron":
        models["model"] = megatron_role(model.megatron, model, config.optim, cluster, scalar=scalar)
        if reference is not None:
            models["reference"] = frozen_megatron(model.megatron, reference, cluster)
        return models
    parts = config.tensor_parallel_size
    models["model"] = trained_model(model, model.fsdp_config, config.optim, cluster, parts, scalar=scalar)
    if reference is not None:
        models["reference"] = frozen_model(reference, model.fsdp_config, cluster, parts)
    return models


def _has_reference_model(config: DpoConfig) -> bool:
    """Whether DPO has a second model on the device while it trains."""
    needs = PREFERENCE_LOSSES.entry(config.loss.type).facts["needs"]
    if config.loss.reference_free or "reference" not in needs or config.ref.param_offload:
        return False
    same = config.ref.path == config.model.path
    return not (same and (config.model.lora_rank or config.loss.precompute_ref))
