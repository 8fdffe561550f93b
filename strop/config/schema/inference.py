"""The roots without training: generation, evaluation, and the reward server."""

from __future__ import annotations

from dataclasses import dataclass

from strop.catalog import DATASETS
from strop.compat import FRAMEWORKS
from strop.config.schema.actor import STRATEGIES
from strop.config.schema.fields import MAX_SEED, FreeForm, inert, link, section, setting
from strop.config.schema.model import _FUSED, FsdpConfig, ModelConfig
from strop.config.schema.reward import CustomRewardFunctionConfig
from strop.config.schema.rollout import (
    AgentConfig,
    CheckpointEngineConfig,
    MultiTurnConfig,
    RolloutConfig,
    ValKwargsConfig,
)
from strop.config.schema.trainer import RayKwargsConfig

_NO_TRAINING = "nothing is trained here"


@dataclass(eq=False)
class InferenceRayKwargsConfig(RayKwargsConfig):
    ray_init: FreeForm = inert({"num_cpus": None}, "generation and evaluation do not use Ray")
    """Arguments of ray.init: num_cpus, address, runtime_env ..."""
    timeline_json_file: str | None = inert(None, "only training runs write Ray's timeline")
    """File for Ray's timeline, written when the run ends."""


@dataclass(eq=False)
class GenerationDataConfig:
    """Prompts, and the file for the responses."""

    path: str | list[str] | None = None
    """Rows with prompts: parquet, json or jsonl; a local path or any fsspec address."""
    output_path: str | None = None
    """A .parquet file, local or at an fsspec address, for the same rows with an additional column
    `responses`."""
    prompt_key: str = "prompt"
    """Column with the prompt: messages, or plain text, which becomes one user message."""
    n_samples: int = setting(5, at_least=1)
    """Responses per prompt."""
    batch_size: int = setting(128, at_least=1)
    """Prompts between two writes to disk. A killed job loses at most one such batch. The value may change
    when a job resumes."""
    benchmark: str | None = setting(None, one_of=DATASETS)
    """Name of a benchmark (gsm8k, math, math500, aime) whose published format the file has. Its columns
    become prompt and ground truth."""
    apply_chat_template: bool = True
    """Render messages with the tokenizer's chat template. False: use the contents as plain text."""
    apply_chat_template_kwargs: FreeForm = setting({})
    """Extra arguments of the chat template, for instance {enable_thinking: false}."""


@dataclass(eq=False)
class GenerationCheckpointEngineConfig(CheckpointEngineConfig):
    backend: str = inert("naive", _NO_TRAINING)
    """A key of training runs."""
    engine_kwargs: FreeForm = inert({}, _NO_TRAINING)
    """A key of training runs."""


@dataclass(eq=False)
class GenerationMultiTurnConfig(MultiTurnConfig):
    enable: bool = inert(False, "the agent_name of each row chooses the loop")
    """Multi-turn conversations."""


@dataclass(eq=False)
class GenerationValKwargsConfig(ValKwargsConfig):
    temperature: float = inert(0.0, _NO_TRAINING)
    """A key of training runs."""
    top_k: int = inert(-1, _NO_TRAINING)
    """A key of training runs."""
    top_p: float = inert(1.0, _NO_TRAINING)
    """A key of training runs."""
    n: int = inert(1, _NO_TRAINING)
    """A key of training runs."""
    do_sample: bool = inert(False, _NO_TRAINING)
    """A key of training runs."""


@dataclass(eq=False)
class GenerationAgentConfig(AgentConfig):
    credit: str = inert(AgentConfig.credit, _NO_TRAINING)
    """A key of training runs."""


@dataclass(eq=False)
class GenerationRolloutConfig(RolloutConfig):
    temperature: float = setting(1.0, at_least=0)
    """Sampling temperature. 0 is greedy and needs n_samples=1."""
    top_k: int = setting(50, at_least=-1)
    """Sample from the k most likely tokens; -1 or 0: all."""
    top_p: float = setting(0.7, above=0, at_most=1)
    """Sample from the smallest set of tokens with this probability."""
    prompt_length: int = setting(1536, at_least=1)
    """Maximum prompt length in tokens. A longer prompt is truncated on the left."""
    response_length: int = setting(512, at_least=1)
    """Maximum response length in tokens."""
    stop: list[str] = setting([])
    """Strings that end a response."""
    agent: GenerationAgentConfig = section(GenerationAgentConfig)
    """Agent loops."""
    multi_turn: GenerationMultiTurnConfig = section(GenerationMultiTurnConfig)
    """Tools and multi-turn conversations."""
    val_kwargs: GenerationValKwargsConfig = section(GenerationValKwargsConfig)
    """Sampling in validation."""
    checkpoint_engine: GenerationCheckpointEngineConfig = section(GenerationCheckpointEngineConfig)
    """How the engine gets the weights."""
    calculate_log_probs: bool = inert(True, _NO_TRAINING)
    """A key of training runs."""
    log_prob_use_dynamic_bsz: bool = inert(False, _NO_TRAINING)
    """A key of training runs."""
    log_prob_max_token_len_per_gpu: int = inert(16384, _NO_TRAINING)
    """A key of training runs."""
    log_prob_micro_batch_size_per_gpu: int | None = inert(None, _NO_TRAINING)
    """A key of training runs."""
    log_prob_micro_batch_size: int | None = inert(None, _NO_TRAINING)
    """A key of training runs."""
    over_sampling: float = inert(1.0, _NO_TRAINING)
    """A key of training runs."""
    admission_order: str = inert("fcfs", _NO_TRAINING)
    """A key of training runs."""


@dataclass(eq=False)
class GenerationTrainerConfig:
    """Devices, runtime and seed."""

    nnodes: int = setting(1, at_least=1)
    """Number of nodes."""
    n_gpus_per_node: int = setting(1, at_least=1)
    """Devices per node."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda", "npu"))
    """auto: a GPU if there is one, else the CPU."""
    runtime: str = inert(
        "auto", "generation runs on the devices of one machine", choices=("auto", "local", "ray")
    )
    """local: processes on this machine; ray: a Ray cluster."""
    seed: int = 1
    """Seed of sampling."""


@dataclass(eq=False)
class GenerationActorConfig:
    """Sharding of the model that generates."""

    strategy: str = inert("fsdp", "every process holds the whole model", choices=STRATEGIES)
    """Backend that holds the weights."""
    ulysses_sequence_parallel_size: int = inert(1, _NO_TRAINING)
    """A key of training runs."""
    entropy_from_logits_with_chunking: bool = inert(False, _FUSED)
    """A key of training runs."""
    entropy_checkpointing: bool = inert(False, _FUSED)
    """A key of training runs."""
    fsdp_config: FsdpConfig = section(FsdpConfig)
    """Precision and sharding."""


@dataclass(eq=False)
class EvaluationDataConfig:
    """Responses, and the columns that scoring needs."""

    path: str | list[str] | None = None
    """Rows with responses. With `--compare A B`, the two files to compare."""
    prompt_key: str = "prompt"
    """Column with the prompt."""
    response_key: str = "responses"
    """Column with the list of responses."""
    data_source_key: str = "data_source"
    """Column that selects the scorer and groups the results."""
    reward_model_key: str = "reward_model"
    """Column with the ground truth."""
    benchmark: str | None = setting(None, one_of=DATASETS)
    """Name of a benchmark (gsm8k, math, math500, aime) whose published format the rows have, apart from the
    responses."""
    output_path: str | None = None
    """JSON file for the results, local or at an fsspec address. Null: data.path with .eval.json instead of
    .parquet."""


@dataclass(eq=False)
class EvaluationSettingsConfig:
    """How responses are scored and results are aggregated."""

    num_workers: int = setting(2, at_least=1)
    """Number of scoring processes."""
    timeout: float = setting(30.0, above=0)
    """Timeout per response, in seconds."""
    compat: str = setting("strop", choices=tuple(FRAMEWORKS))
    """Score as this framework does: verl compares mathematical answers as text. The same as algorithm.compat
    in training."""
    k: list[int] | None = setting(None)
    """Values of k for pass@k, best@k and maj@k. Null: the powers of 2, and the number of responses."""
    bootstrap: int = setting(1000, at_least=0)
    """Bootstrap samples for confidence intervals; 0: no intervals."""
    confidence: float = setting(0.95, above=0, at_most=0.9999)
    """Confidence level of the intervals."""
    seed: int = setting(42, at_least=0, at_most=MAX_SEED)
    """Seed of the bootstrap."""


@dataclass(eq=False)
class GenerationModelConfig(ModelConfig):
    path: str | None = None
    """Hugging Face folder, hub name, .gguf file, or `smollm2-135m`."""
    tokenizer_path: str | None = link("model.path")
    """Folder of the tokenizer, if it is not in the folder of the weights."""


@dataclass(eq=False)
class GenerationConfig:
    """Generation of responses for a file of prompts."""

    data: GenerationDataConfig = section(GenerationDataConfig)
    """Prompts, and the file for the responses."""
    model: GenerationModelConfig = section(GenerationModelConfig)
    """Weights and tokenizer."""
    rollout: GenerationRolloutConfig = section(GenerationRolloutConfig)
    """How responses are sampled."""
    actor: GenerationActorConfig = section(GenerationActorConfig)
    """Sharding of the model."""
    trainer: GenerationTrainerConfig = section(GenerationTrainerConfig)
    """Devices, runtime and seed."""
    ray_kwargs: InferenceRayKwargsConfig = section(InferenceRayKwargsConfig)
    """Settings of Ray."""
    plugins: list[str] = setting([])
    """Python files imported by every process before anything else."""


@dataclass(eq=False)
class EvaluationConfig:
    """Scoring of a file of responses."""

    data: EvaluationDataConfig = section(EvaluationDataConfig)
    """Responses, and the columns that scoring needs."""
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig)
    """A custom scorer function."""
    evaluation: EvaluationSettingsConfig = section(EvaluationSettingsConfig)
    """How responses are scored and results are aggregated."""
    ray_kwargs: InferenceRayKwargsConfig = section(InferenceRayKwargsConfig)
    """Settings of Ray."""
    plugins: list[str] = setting([])
    """Python files imported by every process before anything else."""


@dataclass(eq=False)
class RewardServerModelConfig(ModelConfig):
    path: str | None = None
    """A sequence- or token-classification model with one label, or an OpenRLHF-style value head."""


@dataclass(eq=False)
class ServerConfig:
    """Address, batching and limits."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 accepts requests from other machines; there is no authentication."""
    port: int = setting(5000, at_least=0, at_most=65535)
    """Port; 0: any free port."""
    max_batch_size: int = setting(64, at_least=1)
    """Maximum number of texts per batch."""
    max_wait_ms: float = setting(5.0, at_least=0)
    """Milliseconds that the first text of a batch waits for more texts."""
    max_queue: int = setting(4096, at_least=1)
    """Maximum number of waiting texts. A request beyond it gets status 503."""
    max_body_mb: float = setting(8.0, above=0)
    """Maximum request size in MB. A larger request gets status 413."""
    max_length: int | None = setting(None, at_least=1)
    """Maximum text length in tokens. A longer text is truncated on the right, and the reply reports this.
    Null: the model's maximum."""
    timeout: float = setting(300.0, above=0)
    """Seconds after which a waiting request gets status 503."""
    normalize: bool = setting(False)
    """Normalize scores with the mean and standard deviation that are saved with the model."""
    forward_max_token_len_per_gpu: int = setting(16384, at_least=1)
    """Tokens per forward pass."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))
    """auto: a GPU if there is one, else the CPU."""
    dtype: str = setting("bfloat16", choices=("bfloat16", "float32", "float16"))
    """Precision of the model. A CPU without bf16 computes in fp32."""


@dataclass(eq=False)
class RewardServerConfig:
    """An HTTP server for a reward model."""

    model: RewardServerModelConfig = section(RewardServerModelConfig)
    """Weights and tokenizer."""
    server: ServerConfig = section(ServerConfig)
    """Address, batching and limits."""
    plugins: list[str] = setting([])
    """Python files imported before anything else."""
