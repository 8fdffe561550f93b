"""From sections of a configuration to a training backend (on one device, or divided over ranks), and to a
rollout engine with its sampling parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from strop.compat import Compat
from strop.config.derived import engine_name, holds_weights
from strop.config.schema.megatron import MegatronConfig
from strop.config.schema.model import FsdpConfig, ModelConfig, OptimConfig
from strop.config.schema.rollout import RolloutConfig
from strop.data.chat import stop_ids
from strop.host import cores_per_rank
from strop.models.build import (
    attention_of,
    build_critic,
    compute_dtype,
    dtype_of,
    persistent_buffers,
    stored_dtype,
)
from strop.models.load import resolve
from strop.ranks import Ranks
from strop.rollout.base import Engine, Sampling, build_engine
from strop.types import Batch, Images

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from strop.backends.fsdp.sharded import RegionReader


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
    compat: Compat = None
    """The framework whose learning-rate schedules to follow."""

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
        megatron: MegatronConfig | None = None,
        router_replay: str = BackendSettings.router_replay,
        topk: int = 0,
    ) -> ModuleBackend:
        """The backend of the module that `build` (of models/build.py) makes of the `model` section.

        Without `optim` it is frozen. `shared_with_engine`: a rollout engine samples from the module, so its
        weights stay on the device. `router_replay`: which passes take the experts of the batch. `topk`:
        tokens of the output top_ids.
        """
        if fsdp.full_determinism:
            use_deterministic_kernels()
        if strategy == "megatron":
            assert megatron is not None
            settings = self._settings(model, megatron.dtype, optim, clip)
            settings = dataclasses.replace(settings, router_replay=router_replay)
            return self._megatron(build, model, megatron, settings)
        settings = self._settings(model, fsdp.dtype, optim, clip, master=fsdp.model_dtype)
        settings = dataclasses.replace(settings, router_replay=router_replay, topk=topk)
        if model.quantization is not None:
            build = partial(build, quantize_on=self.device)
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
        self,
        model: ModelConfig,
        dtype: str,
        optim: OptimConfig | None,
        clip: float | None,
        master: str = "float32",
    ) -> BackendSettings:
        compute = compute_dtype(dtype, self.device)
        stored = compute
        if optim is not None:
            stored = dtype_of(master)
            if optim.total_training_steps < 1:
                optim = dataclasses.replace(optim, total_training_steps=self.total_steps)
        return BackendSettings(
            optim=optim,
            device=self.device,
            compute=compute,
            master=stored,
            grad_clip=clip,
            temperature=self.temperature,
            packed=model.use_remove_padding,
            attention=attention_of(model),
            offload_activations=model.enable_activation_offload,
            on_out_of_memory=self.on_out_of_memory,
            compat=self.compat,
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

    def _megatron(
        self,
        build: Callable[..., PreTrainedModel],
        model: ModelConfig,
        megatron: MegatronConfig,
        settings: BackendSettings,
    ) -> ModuleBackend:
        """A backend on megatron-core: its module is built on the meta device, then every rank loads its part
        of each weight."""
        from strop.backends.megatron.backend import MegatronBackend
        from strop.backends.megatron.load import checkpoint_loader, part_loader

        module = self.ranks.run_or_raise_on_all(
            lambda: build(model, weights=False), "making the model (model.path)"
        )
        load_weights = part_loader(
            resolve(model.path),
            lambda: build(model, dtype=stored_dtype(model)),
            self.ranks,
            self.device,
            new=build is build_critic or bool(model.lora_rank or model.lora_adapter_path),
        )
        if megatron.use_dist_checkpointing:
            load_weights = checkpoint_loader(partial(open_megatron, module, megatron), self.ranks)
        return MegatronBackend(
            module,
            settings,
            ranks=self.ranks,
            megatron=megatron,
            load_weights=load_weights,
            fp32_residual=model.fp32_residual,
        )


def open_megatron(
    module: PreTrainedModel, megatron: MegatronConfig, shapes: Mapping[str, torch.Size]
) -> Mapping[str, RegionReader]:
    """The weights of `module` in a Megatron checkpoint; its buffers are filled at once."""
    from strop.run.merge.megatron import megatron_weights, saved_megatron

    assert megatron.dist_checkpointing_path is not None, "the rules refuse a run without it"
    buffers = persistent_buffers(module)
    wanted = {**shapes, **{name: buffer.shape for name, buffer in buffers.items()}}
    folder = saved_megatron(megatron.dist_checkpointing_path)
    saved = megatron_weights(folder, module.config, wanted, prefix=megatron.dist_checkpointing_prefix)
    for name, buffer in buffers.items():
        buffer.copy_(saved[name].read())
    return saved


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("trainer.device=cuda, but torch sees no GPU here. Set trainer.device=cpu or auto.")
    return torch.device(name)


GPU_HOST_THREADS = 4
"""Threads of an operation on the host while the models are on a GPU."""


def use_device(name: str) -> torch.device:
    """The device of a run. On a GPU, operations on the host get few threads.

    They are small there: masks, advantages, packing. With a thread per core, every operation ends when the
    last core has done its part, and one core that is busy with something else (the sampling thread of an
    asynchronous run, another process) makes all of them wait for the scheduler: 0.3 s instead of 0.01 s for
    the advantages of 1,024 responses on 16 cores.
    """
    device = device_of(name)
    if device.type == "cuda":
        torch.set_num_threads(max(1, min(GPU_HOST_THREADS, cores_per_rank() // 2, torch.get_num_threads())))
    return device


@dataclass
class WithoutAdapters:
    """The reference of a model trained by LoRA: the same weights with the adapters off."""

    actor: ModuleBackend

    def forward(self, batch: Batch, want: Sequence[str], micro: MicroBatching) -> Outputs:
        with self.actor.reference():
            return self.actor.forward(batch.replace(experts=None), want, micro)


@dataclass
class DividedRewardModel:
    """A reward model that ranks have parts of. All of them score the same sequences."""

    backend: ModuleBackend
    micro: MicroBatching

    @property
    def module(self) -> nn.Module:
        """What the model is; its weights are elsewhere."""
        return self.backend.module

    def score(self, sequences: list[list[int]], images: Sequence[Images] | None = None) -> list[float]:
        """Return the score of each sequence."""
        assert images is None, "the families of strategy=megatron take no images"
        if not sequences:
            return []
        lengths = torch.tensor([len(ids) for ids in sequences])
        batch = Batch([torch.tensor(ids) for ids in sequences], lengths, torch.zeros(len(sequences), 0))
        scores = self.backend.forward(batch, ["scores"], self.micro).scores
        assert scores is not None
        return [float(score) for score in scores]


# --- rollout engines ----------------------------------------------------------------------------------------


ENGINE_SETTINGS = (
    "dtype",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "enforce_eager",
    "speculation",
    "cudagraph_capture_sizes",
    "free_cache_engine",
    "tensor_model_parallel_size",
    "data_parallel_size",
    "expert_parallel_size",
    "scheduling_policy",
    "load_format",
    "quantization",
    "kv_cache_dtype",
    "engine_kwargs",
)
"""Keys of the `rollout` section that engines take under the same name. Each engine takes a subset."""


def engine_for(rollout: RolloutConfig, module: nn.Module, *, record_experts: bool = False) -> Engine:
    """The engine that the `rollout` section names."""
    settings = engine_settings(rollout, record_experts=record_experts)
    return build_engine(engine_name(rollout), module, **settings)


def engine_settings(rollout: RolloutConfig, *, record_experts: bool = False) -> dict[str, Any]:
    """The arguments of `build_engine`. `record_experts`: completions have the experts of their tokens."""
    return {
        "record_experts": record_experts,
        "max_model_len": max_model_len(rollout),
        "bucket_megabytes": rollout.checkpoint_engine.update_weights_bucket_megabytes,
        "seed": rollout.seed or 0,
        **{name: getattr(rollout, name) for name in ENGINE_SETTINGS},
    }


def max_model_len(rollout: RolloutConfig) -> int:
    """Maximum tokens of prompt and response together."""
    return rollout.max_model_len or rollout.prompt_length + rollout.response_length


def sampling_for(
    rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase, module: nn.Module | None
) -> Sampling:
    """The sampling parameters of the `rollout` section. Stop tokens are those of the tokenizer and of the
    model's generation_config."""
    generation = getattr(module, "generation_config", None)
    stops = stop_ids(tokenizer, getattr(generation, "eos_token_id", None))
    return Sampling(
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        max_tokens=rollout.response_length,
        stop_ids=tuple(sorted(stops)),
        ignore_eos=rollout.ignore_eos,
        repetition_penalty=rollout.repetition_penalty,
    )


def tensor_parallel_size(rollout: RolloutConfig) -> int:
    """Neighbouring ranks that sample together, each with a part of every weight matrix. Engines that hold
    their own weights shard them themselves."""
    return 1 if holds_weights(rollout) else int(rollout.tensor_model_parallel_size)
