"""From sections of a configuration to a training backend: on one device, or divided over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from strop.backends.determinism import use_deterministic_kernels
from strop.backends.single import SingleBackend
from strop.config.schema.model import Fsdp, Model, Optim
from strop.models.build import attention_of, build_critic, compute_dtype, dtype_of, stored_dtype
from strop.models.load import resolve
from strop.ranks import Ranks


@dataclass(frozen=True)
class BackendMaker:
    """Makes the backends of one run."""

    device: torch.device
    total_steps: int
    """How long schedules are, unless they say."""
    ranks: Ranks = dataclasses.field(default_factory=Ranks)
    temperature: float = 1.0

    def __call__(
        self,
        build: Callable[..., Any],
        model: Model,
        fsdp: Fsdp,
        strategy: str,
        optim: Optim | None = None,
        clip: float | None = None,
        sequence_parallel: int = 1,
        tensor_parallel: int = 1,
        lent: bool = False,
    ) -> SingleBackend:
        """A backend of what `build` (one of models/build.py) makes of the `model` section; without `optim` it is frozen. An
        engine samples from a module that is `lent` to it, which therefore stays on its device."""
        if optim is not None and optim.total_training_steps < 1:
            optim = dataclasses.replace(optim, total_training_steps=self.total_steps)
        if fsdp.full_determinism:
            use_deterministic_kernels()
        compute = compute_dtype(fsdp.dtype, self.device)
        common: dict[str, Any] = {
            "optim": optim,
            "device": self.device,
            "compute": compute,
            "master": dtype_of(fsdp.model_dtype) if optim is not None else compute,
            "grad_clip": clip,
            "temperature": self.temperature,
            "packed": model.use_remove_padding,
            "attention": attention_of(model),
            "offload_activations": model.enable_activation_offload,
        }
        if self.ranks.world == 1:
            park: dict[str, Any] = {
                "park_model": (fsdp.param_offload or fsdp.offload_policy) and not lent,
                "park_optimizer": fsdp.optimizer_offload or fsdp.offload_policy,
            }
            return SingleBackend(build(model), **common, **park)
        if strategy == "single":
            raise ValueError(
                f"strategy=single trains on one device, but there are {self.ranks.world} ranks. Set strategy=fsdp."
            )
        common |= {"sequence_parallel": sequence_parallel, "tensor_parallel": tensor_parallel}
        return self._sharded(build, model, fsdp, common)

    def _sharded(self, build: Callable[..., Any], model: Model, fsdp: Fsdp, common: dict[str, Any]) -> SingleBackend:
        from strop.backends.fsdp import FsdpBackend
        from strop.backends.fsdp_load import loader
        from strop.backends.fsdp_shard import in_host_memory

        module = self.ranks.together(lambda: build(model, weights=False), "making the model (model.path)")
        new = build is build_critic or bool(model.lora_rank or model.lora_adapter_path)
        whole = lambda: build(model, dtype=stored_dtype(model))  # noqa: E731
        rest = torch.device("cpu") if in_host_memory(fsdp) else self.device
        bring = loader(resolve(model.path), whole, self.ranks, self.device, new=new, rest=rest)
        reduce = (fsdp.mixed_precision or {}).get("reduce_dtype", "fp32")
        return FsdpBackend(module, ranks=self.ranks, settings=fsdp, reduce=dtype_of(reduce), fill_weights=bring, **common)
