"""The `reward_model`, `reward_manager` and `custom_reward_function` sections: where scores come from."""

from __future__ import annotations

from dataclasses import dataclass

from strop.catalog import REWARD_MANAGERS
from strop.config.schema.fields import FreeForm, inert, link, section, setting
from strop.config.schema.megatron import MegatronConfig
from strop.config.schema.model import FsdpConfig, ModelConfig, ProfilerConfig, WrapPolicyConfig

_WHOLE = "every device that scores holds the whole reward model"
_FROZEN = "the reward model is not trained"
_LOOP = "every sample is scored as soon as it is complete, and in batches if the scorer needs batches"


@dataclass(eq=False)
class RewardModelWrapPolicyConfig(WrapPolicyConfig):
    transformer_layer_cls_to_wrap: list[str] | None = inert(None, _WHOLE)
    """Layer classes that FSDP wraps."""
    min_num_params: int = inert(0, _WHOLE)
    """Size of the modules that FSDP wraps."""


@dataclass(eq=False)
class RewardModelFsdpConfig(FsdpConfig):
    """Precision and offloading of a frozen model that every device holds whole."""

    param_offload: bool = setting(False)
    """Offload the weights to host memory between passes."""
    offload_policy: bool = setting(False)
    """The same as param_offload."""
    dtype: str = setting("bfloat16", choices=("bfloat16", "bf16", "float32", "fp32", "float16", "fp16"))
    """Precision of the weights and of the forward pass."""
    model_dtype: str = inert("fp32", "a frozen model has the precision of dtype")
    """Precision of the master weights."""
    optimizer_offload: bool = inert(False, _FROZEN)
    """Offload optimizer state."""
    reshard_after_forward: bool = inert(True, _WHOLE)
    """Free the gathered weights after the forward pass."""
    fsdp_size: int = inert(-1, _WHOLE)
    """Ranks that shard one copy of the weights."""
    expert_parallel_size: int = inert(1, _WHOLE)
    """Ranks that share the experts of a layer."""
    forward_prefetch: bool = inert(False, _WHOLE)
    """All-gather the next layer while the current one runs."""
    wrap_policy: RewardModelWrapPolicyConfig = section(RewardModelWrapPolicyConfig)
    """Which modules FSDP wraps as units."""
    mixed_precision: FreeForm | None = inert(None, "set dtype")
    """Explicit {param_dtype, reduce_dtype, buffer_dtype}."""
    full_determinism: bool = inert(False, "set actor_rollout_ref.actor.fsdp_config.full_determinism")
    """Use deterministic kernels only."""


@dataclass(eq=False)
class RewardModelWeightsConfig(ModelConfig):
    """Weights of the reward model."""

    path: str | None = setting(None)
    """A sequence- or token-classification model with one label, or an OpenRLHF-style value head."""
    input_tokenizer: str | None = link("actor_rollout_ref.model.path")
    """The policy's tokenizer. Null: the reward model has the same tokenizer and chat template, and gets the
    token ids unchanged."""
    trust_remote_code: bool = link("actor_rollout_ref.model.trust_remote_code")
    """Run model code from the model's repository."""
    external_lib: str | None = link("actor_rollout_ref.model.external_lib")
    """Modules to import before the model is loaded, comma separated."""
    value_head_prefix: str = link("actor_rollout_ref.model.value_head_prefix")
    """Attribute name of the scalar head in OpenRLHF-style models."""
    lora_adapter_path: str | None = setting(None)
    """Folder of an adapter that is merged into the weights."""
    quantization: str | None = inert(None, "4-bit weights are for training with LoRA")
    """Storage of frozen weights in 4 bits."""
    lora_rank: int = inert(0, _FROZEN, at_least=0)
    """Rank of LoRA adapters."""
    lora_alpha: float = inert(16, _FROZEN)
    """LoRA scale."""
    lora_dropout: float = inert(0.0, _FROZEN)
    """Dropout in front of the adapters."""
    target_modules: str | list[str] = inert("all-linear", _FROZEN)
    """Modules that get an adapter."""
    exclude_modules: str | list[str] | None = inert(None, _FROZEN)
    """Modules that get no adapter."""
    enable_gradient_checkpointing: bool = inert(True, _FROZEN)
    """Recompute activations in the backward pass."""
    gradient_checkpointing: str | None = inert(None, _FROZEN)
    """Which activations are recomputed."""
    enable_activation_offload: bool = inert(False, _FROZEN)
    """Offload activations to host memory."""
    fsdp_config: RewardModelFsdpConfig = section(RewardModelFsdpConfig)
    """Precision and offloading."""


@dataclass(eq=False)
class OverlongBufferConfig:
    """DAPO's soft penalty on long responses."""

    enable: bool = False
    """Enable the penalty."""
    len: int = setting(0, at_least=0)
    """The penalty grows over this many tokens before the length limit."""
    penalty_factor: float = setting(1.0, at_least=0)
    """Penalty at the length limit."""
    log: bool = False
    """Log the penalty of every sample."""


@dataclass(eq=False)
class SandboxFusionConfig:
    """Execution of model-written programs."""

    url: str | None = None
    """Address of a SandboxFusion server (.../run_code). Null: the local sandbox."""
    shared_assertions: bool = False
    """On a server, run assertions that are not of the form `assert f(literals) == literal` in the process of
    the program, which can manipulate them. False: they are rejected. The local sandbox runs all assertions in
    a separate process."""
    max_concurrent: int = setting(64, at_least=1)
    """Concurrent programs on the server. The local sandbox runs one program per CPU core."""
    memory_limit_mb: int = setting(1024, at_least=1)
    """Memory limit of each program, in MB."""
    timeout: float = setting(10.0, above=0)
    """Timeout of one test of a program, in seconds."""
    total_timeout: float = setting(60.0, above=0)
    """Timeout of all tests of a program, in seconds. Tests that have not started by then fail."""
    isolation: str = setting(
        "auto", choices=("auto", "namespaces", "bubblewrap", "landlock", "user", "limits")
    )
    """How programs are isolated. auto: the strongest of namespaces, bubblewrap and landlock that works on
    this machine; if none works, programs are not run. user and limits leave the network reachable."""


@dataclass(eq=False)
class JudgeConfig:
    """A language model that scores responses (LLM as a judge)."""

    enable: bool = setting(False)
    """Score with a judge: the model behind url, or reward_model.model.path in an engine of this run."""
    url: str | None = None
    """OpenAI-compatible address, such as http://localhost:8000/v1. Null: this run loads
    reward_model.model.path."""
    model: str | None = None
    """Name of the model on the server. Null: the first model that the server lists."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the API key, if the server needs one."""
    template: str | None = None
    """Prompt of the judge: a file or a text with {question}, {answer} and {ground_truth}. Null: the built-in
    template."""
    score_pattern: str = r"(?i)score[*_]*:?[*_\s]*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, the score. The last match in the judge's reply is used. Without a
    match the sample is masked."""
    score_range: list[float] = setting([0.0, 10.0])
    """Lowest and highest score of the judge; they are scaled to 0 and 1."""
    temperature: float = setting(0.0, at_least=0)
    """Sampling temperature of the judge; 0 is greedy."""
    max_tokens: int = setting(1024, at_least=1)
    """Maximum length of the judge's reply, in tokens."""
    max_concurrent: int = setting(32, at_least=1)
    """Concurrent requests. reward_model.timeout limits each request, including retries."""
    cache_path: str | None = None
    """File that caches the judge's replies for later runs. Null: cache in memory."""
    rubric: FreeForm = setting({})
    """Criteria that the judge scores one by one: {name: text}, or {name: {text: ..., weight: 2}}. The score
    is their weighted mean, and each criterion is reported as judge_<name>. Empty: one score for the whole
    response."""
    votes: int = setting(1, at_least=1)
    """Replies per response; the score is their mean, and judge_agreement is the share of the votes with the
    most frequent mark. Needs a temperature above 0."""
    price: list[float] = setting([0.0, 0.0])
    """Price of a million prompt tokens and of a million reply tokens, for reward/judge_cost. The server
    reports the number of tokens."""


@dataclass(eq=False)
class RewardModelConfig:
    """The reward model, and how all scores are collected."""

    enable: bool = setting(False)
    """Score with a reward model."""
    model: RewardModelWeightsConfig = section(RewardModelWeightsConfig)
    """Weights of the reward model."""
    reward_manager: str = setting("naive", one_of=REWARD_MANAGERS)
    """How scorers are called: naive (one by one), prime (in processes), batch (all at once), dapo (with
    length penalty) ..."""
    reward_kwargs: FreeForm = setting({})
    """Arguments of the manager, for instance {overlong_buffer_cfg: {...}, max_resp_len: 1024}."""
    num_workers: int = setting(1, at_least=1)
    """Number of scoring processes (prime) or threads (other managers)."""
    timeout: float = setting(300.0, above=0)
    """Timeout per sample, in seconds. A sample that exceeds it is masked and counted."""
    retries: int = setting(0, at_least=0)
    """Retries of a failing scorer before its sample is masked."""
    remote_url: str | list[str] | None = setting(None)
    """Address of one or more HTTP reward servers with OpenRLHF's protocol, or a Python file with its function
    reward_func(queries, prompts, labels)."""
    normalize: bool = setting(False)
    """Normalize the model's scores with the mean and standard deviation that are saved with it."""
    clip_range: list[float] | None = setting(None)
    """Clamp scores to [low, high]; with algorithm.compat=openrlhf, after the group baseline is subtracted."""
    stop_properly_penalty_coef: float | None = setting(None, at_most=1)
    """For responses that hit the length limit: 0 to 1 scales their score, a negative number replaces it."""
    overlong_buffer: OverlongBufferConfig = section(OverlongBufferConfig)
    """Soft penalty on long responses."""
    micro_batch_size: int | None = setting(None, at_least=1)
    """Deprecated form of the next key, counted over all devices."""
    micro_batch_size_per_gpu: int | None = setting(None, at_least=1)
    """Sequences per forward pass of the model. Null: derived."""
    max_length: int | None = setting(None, at_least=1)
    """Maximum input length of the model, in tokens."""
    use_dynamic_bsz: bool = link("critic.use_dynamic_bsz")
    """Fill forward passes by tokens instead of by sequences."""
    forward_max_token_len_per_gpu: int = link("critic.forward_max_token_len_per_gpu", at_least=1)
    """Tokens per forward pass when use_dynamic_bsz is on."""
    ulysses_sequence_parallel_size: int = inert(1, _WHOLE, at_least=1)
    """Devices that split each sequence (Ulysses)."""
    strategy: str = link("actor_rollout_ref.actor.strategy")
    """Backend of the model. megatron, with parallel sizes above 1 in reward_model.megatron: the model is
    divided over the ranks. Otherwise every rank holds the whole model and scores its share."""
    enable_resource_pool: bool = setting(False)
    """Dedicated devices for the reward model, with a full copy on each (trainer.runtime=ray)."""
    nnodes: int = setting(0, at_least=0)
    """Nodes of the resource pool."""
    n_gpus_per_node: int = setting(8, at_least=0)
    """Devices per node of the resource pool."""
    sandbox_fusion: SandboxFusionConfig = section(SandboxFusionConfig)
    """Execution of model-written programs."""
    max_concurrent: int = setting(1, at_least=1)
    """rate_limited: concurrent requests."""
    max_rpm: float | None = setting(None, above=0)
    """rate_limited: requests per minute."""
    max_tpm: float | None = setting(None, above=0)
    """rate_limited: tokens per minute."""
    estimated_tokens_per_request: int = setting(2000, at_least=1)
    """rate_limited: tokens assumed per request."""
    profiler: ProfilerConfig = section(ProfilerConfig)
    """Profiling of this role."""
    judge: JudgeConfig = section(JudgeConfig)
    """A judge model."""
    rollout: FreeForm = setting({})
    """Engine of a judge that this run loads: {name: native, prompt_length: 4096, max_num_seqs: 64 ...}."""
    megatron: MegatronConfig = section(MegatronConfig)
    """Settings of the Megatron backend, with strategy=megatron."""
    use_reward_loop: bool = inert(True, _LOOP)
    """Score per sample inside the rollout."""
    launch_reward_fn_async: bool = inert(False, _LOOP)
    """Score while log-probs are computed."""
    reward_loop_source: str = inert("register", "set custom_reward_function or reward_manager.module")
    """register or importlib."""
    reward_loop_module_path: str | None = inert(None, "set reward_manager.module.path")
    """File of a custom manager."""
    reward_loop_class_name: str | None = inert(None, "set reward_manager.module.name")
    """Class of a custom manager."""


@dataclass(eq=False)
class RewardManagerModuleConfig:
    path: str | None = None
    """File of a custom reward manager."""
    name: str = "custom_reward_manager"
    """Class of the custom reward manager, if reward_manager.name does not give it."""


@dataclass(eq=False)
class RewardManagerConfig:
    """Alternative to reward_model.reward_manager."""

    source: str = setting("register", choices=("register", "importlib"))
    """register: by name; importlib: from module.path."""
    name: str = link("reward_model.reward_manager")
    """Name of the manager; with importlib, its class in module.path."""
    module: RewardManagerModuleConfig = section(RewardManagerModuleConfig)
    """File and class of a custom manager."""


@dataclass(eq=False)
class CustomRewardFunctionConfig:
    """A custom scorer function."""

    path: str | None = None
    """Python file (or `pkg://module`) with a function (data_source, solution_str, ground_truth, extra_info)
    -> score."""
    name: str = "compute_score"
    """Name of the function. It may be async, and may return a number or a dict with `score`."""
    reward_kwargs: FreeForm = setting({})
    """Further keyword arguments of every call."""
