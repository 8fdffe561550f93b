"""From sections of a configuration to a training backend: on one device, or divided over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from strop.backends.base import (
    BackendSettings,
    MicroBatching,
    Outputs,
    nothing_to_release,
    use_deterministic_kernels,
)
from strop.backends.single import ModuleBackend, SingleBackend
from strop.config.schema.model import FsdpConfig, ModelConfig, OptimConfig
from strop.data.chat import Chat
from strop.models.build import (
    attention_of,
    build_critic,
    build_tokenizer,
    compute_dtype,
    dtype_of,
    stored_dtype,
)
from strop.models.load import resolve
from strop.ranks import Ranks
from strop.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class BackendMaker:
    """Makes the backends of one run."""

    device: torch.device
    total_steps: int
    """Length of learning-rate schedules, unless they set one."""
    ranks: Ranks = dataclasses.field(default_factory=Ranks)
    temperature: float = 1.0
    on_out_of_memory: Callable[[], bool] = nothing_to_release
    """Makes others release device memory when a pass is out of memory."""

    def __call__(
        self,
        build: Callable[..., PreTrainedModel],
        model: ModelConfig,
        fsdp: FsdpConfig,
        strategy: str,
        optim: OptimConfig | None = None,
        clip: float | None = None,
        sequence_parallel: int = 1,
        tensor_parallel: int = 1,
        shared_with_engine: bool = False,
    ) -> ModuleBackend:
        """The backend of the module that `build` (of models/build.py) makes of the `model` section.

        Without `optim` it is frozen. `shared_with_engine`: a rollout engine samples from the module, so its
        weights stay on the device.
        """
        if fsdp.full_determinism:
            use_deterministic_kernels()
        settings = self._settings(model, fsdp, optim, clip)
        if self.ranks.world == 1:
            return SingleBackend(
                build(model),
                settings,
                offload_model=(fsdp.param_offload or fsdp.offload_policy) and not shared_with_engine,
                offload_optimizer=fsdp.optimizer_offload or fsdp.offload_policy,
            )
        if strategy == "single":
            raise ValueError(
                f"strategy=single trains on one device, but there are {self.ranks.world} ranks. Set "
                "strategy=fsdp."
            )
        return self._sharded(build, model, fsdp, settings, sequence_parallel, tensor_parallel)

    def _settings(
        self, model: ModelConfig, fsdp: FsdpConfig, optim: OptimConfig | None, clip: float | None
    ) -> BackendSettings:
        compute = compute_dtype(fsdp.dtype, self.device)
        master = compute
        if optim is not None:
            master = dtype_of(fsdp.model_dtype)
            if optim.total_training_steps < 1:
                optim = dataclasses.replace(optim, total_training_steps=self.total_steps)
        return BackendSettings(
            optim=optim,
            device=self.device,
            compute=compute,
            master=master,
            grad_clip=clip,
            temperature=self.temperature,
            packed=model.use_remove_padding,
            attention=attention_of(model),
            offload_activations=model.enable_activation_offload,
            on_out_of_memory=self.on_out_of_memory,
        )

    def _sharded(
        self,
        build: Callable[..., PreTrainedModel],
        model: ModelConfig,
        fsdp: FsdpConfig,
        settings: BackendSettings,
        sequence_parallel: int,
        tensor_parallel: int,
    ) -> ModuleBackend:
        """A sharded backend: its module is built on the meta device, then every rank loads its shards."""
        from strop.backends.fsdp.backend import FsdpBackend
        from strop.backends.fsdp.shard import is_offloaded, weight_loader

        module = self.ranks.run_or_raise_on_all(
            lambda: build(model, weights=False), "making the model (model.path)"
        )
        storage = self.device
        if is_offloaded(fsdp):
            storage = torch.device("cpu")
        fill_weights = weight_loader(
            resolve(model.path),
            lambda: build(model, dtype=stored_dtype(model)),
            self.ranks,
            self.device,
            new=build is build_critic or bool(model.lora_rank or model.lora_adapter_path),
            storage=storage,
        )
        reduce = (fsdp.mixed_precision or {}).get("reduce_dtype", "fp32")
        return FsdpBackend(
            module,
            settings,
            ranks=self.ranks,
            fsdp=fsdp,
            reduce=dtype_of(reduce),
            sequence_parallel=sequence_parallel,
            tensor_parallel=tensor_parallel,
            fill_weights=fill_weights,
        )


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.device=cuda, but torch sees no GPU here. Set trainer.device=cpu or auto.")
    return torch.device(name)


def tokenizer_of(model: Any) -> Any:
    """The policy's tokenizer, with the chat template that was asked for: a text, or the content of a .jinja
    file."""
    tokenizer = build_tokenizer(model)
    if model.custom_chat_template is not None:
        tokenizer.chat_template = Chat(tokenizer, template=model.custom_chat_template).template
    return tokenizer


@dataclass
class WithoutAdapters:
    """The reference of a model trained by LoRA: the same weights with the adapters off."""

    actor: ModuleBackend

    def forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        with self.actor.reference():
            return self.actor.forward(batch, want, micro)
