"""Shape, number formats and placement of a model, read from the sections of a configuration."""

from __future__ import annotations

import json
from pathlib import Path

from strop.config.checkpointing import checkpointing_of
from strop.config.schema.model import FsdpConfig, ModelConfig, OptimConfig
from strop.planning.activations import Numbers
from strop.planning.devices import Device, PlannedCluster
from strop.planning.shape import Shape, shape_of
from strop.planning.training import Placement, TrainedModel

BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
"""Bytes of one number, by the name of its dtype."""


def trained_model(
    model: ModelConfig,
    fsdp: FsdpConfig,
    optim: OptimConfig,
    cluster: PlannedCluster,
    tensor_parallel: int = 1,
    *,
    scalar: bool = False,
    on_device: bool = False,
) -> TrainedModel:
    """A model with an optimizer. `on_device`: an engine samples from its module, so it is never offloaded."""
    return TrainedModel(
        planned_shape(model, scalar=scalar),
        _numbers(model, fsdp, cluster.device),
        _placement(fsdp, cluster, tensor_parallel, on_device=on_device),
        checkpointing=checkpointing_of(model),
        offloads_activations=model.enable_activation_offload and not cluster.device.is_cpu,
        lora_rank=lora_rank_of(model),
        four_bit=model.quantization is not None,
        kernels=not cluster.device.is_cpu,
        moments=optimizer_moments(optim),
    )


def frozen_model(
    model: ModelConfig,
    fsdp: FsdpConfig,
    cluster: PlannedCluster,
    tensor_parallel: int = 1,
    *,
    scalar: bool = False,
    sharded: bool = True,
) -> TrainedModel:
    """A model that only runs forward passes: a reference or a reward model."""
    placement = Placement()
    if sharded:
        placement = _placement(fsdp, cluster, tensor_parallel)
    return TrainedModel(
        planned_shape(model, scalar=scalar),
        _numbers(model, fsdp, cluster.device, frozen=True),
        placement,
        frozen=True,
        kernels=not cluster.device.is_cpu,
    )


def planned_shape(model: ModelConfig, *, scalar: bool = False) -> Shape:
    """The shape of the model of a section."""
    changes = {key: value for key, value in model.override_config.items() if key != "attn_implementation"}
    return shape_of(model.path, config_path=model.hf_config_path, changes=changes, scalar=scalar)


def _numbers(model: ModelConfig, fsdp: FsdpConfig, device: Device, *, frozen: bool = False) -> Numbers:
    compute = BYTES[fsdp.dtype]
    if device.is_cpu:
        compute = 4
    master = BYTES[fsdp.model_dtype]
    if frozen:
        master = compute
    residual = compute
    if model.fp32_residual:
        residual = 4
    return Numbers(compute, master, residual)


def _placement(
    fsdp: FsdpConfig, cluster: PlannedCluster, tensor_parallel: int = 1, *, on_device: bool = False
) -> Placement:
    ranks = cluster.ranks
    size = fsdp.fsdp_size
    if size == -1 or size > ranks:
        size = ranks
    if size < 1 or ranks % size:
        raise ValueError(
            f"fsdp_size={size} does not divide the {ranks} ranks. Set -1, or a divisor of {ranks}."
        )
    return Placement(
        ranks=ranks,
        shards=size,
        tensor=tensor_parallel,
        in_host=ranks > 1 and (fsdp.offload_policy or fsdp.param_offload or fsdp.optimizer_offload),
        offloads_module=(fsdp.param_offload or fsdp.offload_policy) and not on_device,
        offloads_optimizer=fsdp.optimizer_offload or fsdp.offload_policy,
        keeps_gathered=not fsdp.reshard_after_forward,
        reduce=BYTES[(fsdp.mixed_precision or {}).get("reduce_dtype", "fp32")],
    )


def optimizer_moments(optim: OptimConfig) -> float:
    """Numbers that the optimizer keeps for each weight. Muon: two for embeddings, so two are planned."""
    known: dict[str, float] = {"AdamW8bit": 0.5, "Muon": 2}
    return known.get(optim.optimizer, 2 if "adam" in optim.optimizer.lower() else 1)


def lora_rank_of(model: ModelConfig) -> int:
    """The rank of new adapters, or of the adapter that training starts from."""
    if not model.lora_adapter_path:
        return int(model.lora_rank)
    file = Path(model.lora_adapter_path).expanduser() / "adapter_config.json"
    if not file.is_file():
        raise ValueError(
            f"lora_adapter_path={model.lora_adapter_path!r} holds no adapter_config.json, so its rank is not "
            "known."
        )
    return int(json.loads(file.read_text(encoding="utf-8"))["r"])
