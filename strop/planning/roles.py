"""From sections of a configuration to models as the planner sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strop.planning.activations import Numbers
from strop.planning.devices import Cluster, Device
from strop.planning.known import shape_of
from strop.planning.shape import Shape
from strop.planning.training import Placement, TrainedModel

BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}


def _numbers(model: Any, fsdp: Any, device: Device, *, frozen: bool = False) -> Numbers:
    compute = 4 if device.is_cpu else BYTES[fsdp.dtype]
    master = compute if frozen else BYTES[fsdp.model_dtype]
    return Numbers(compute, master, residual=4 if model.fp32_residual else compute)


def _placement(fsdp: Any, cluster: Cluster, tensor: int = 1, *, lent: bool = False) -> Placement:
    """`lent`: an engine samples from the module itself, which therefore stays on the device."""
    ranks = cluster.ranks
    size = fsdp.fsdp_size
    if size not in (-1, ranks) and (size < 1 or ranks % size):
        raise ValueError(f"fsdp_config.fsdp_size={size} does not divide the {ranks} ranks. Set -1, or a divisor of {ranks}.")
    return Placement(
        ranks=ranks,
        shards=ranks if size == -1 else size,
        tensor=tensor,
        in_host=ranks > 1 and (fsdp.offload_policy or fsdp.param_offload or fsdp.optimizer_offload),
        parks_module=(fsdp.param_offload or fsdp.offload_policy) and not lent,
        parks_optimizer=fsdp.optimizer_offload or fsdp.offload_policy,
        keeps_gathered=not fsdp.reshard_after_forward,
        reduce=BYTES[(fsdp.mixed_precision or {}).get("reduce_dtype", "fp32")],
    )


def _moments(optim: Any) -> int:
    return 2 if "adam" in optim.optimizer.lower() else 1


def _shape(model: Any, *, scalar: bool = False) -> Shape:
    changes = {key: value for key, value in model.override_config.items() if key != "attn_implementation"}
    return shape_of(model.path, config_path=model.hf_config_path, changes=changes, scalar=scalar)


def _lora_rank(model: Any) -> int:
    """The rank of new adapters, or of those that training starts from."""
    if not model.lora_adapter_path:
        return int(model.lora_rank)
    file = Path(model.lora_adapter_path).expanduser() / "adapter_config.json"
    if not file.is_file():
        raise ValueError(
            f"lora_adapter_path={model.lora_adapter_path!r} holds no adapter_config.json, so its rank is not known."
        )
    return int(json.loads(file.read_text(encoding="utf-8"))["r"])


def trained(
    model: Any, fsdp: Any, optim: Any, cluster: Cluster, tensor: int = 1, *, scalar: bool = False, lent: bool = False
) -> TrainedModel:
    return TrainedModel(
        _shape(model, scalar=scalar),
        _numbers(model, fsdp, cluster.device),
        _placement(fsdp, cluster, tensor, lent=lent),
        checkpointed=model.enable_gradient_checkpointing,
        lora_rank=_lora_rank(model),
        kernels=not cluster.device.is_cpu,
        moments=_moments(optim),
    )


def frozen(
    model: Any, fsdp: Any, cluster: Cluster, tensor: int = 1, *, scalar: bool = False, divided: bool = True
) -> TrainedModel:
    place = _placement(fsdp, cluster, tensor) if divided else Placement()
    numbers = _numbers(model, fsdp, cluster.device, frozen=True)
    return TrainedModel(_shape(model, scalar=scalar), numbers, place, frozen=True, kernels=not cluster.device.is_cpu)
