"""The root of `strop serve-train`: a training service for many users."""

from __future__ import annotations

from dataclasses import dataclass

from strop.config.schema.fields import MAX_SEED, FreeForm, section, setting
from strop.config.schema.model import ModelConfig


@dataclass(eq=False)
class ServiceModelConfig(ModelConfig):
    path: str | None = None
    """Hugging Face folder or hub name of the base model, over which users train LoRA adapters."""


@dataclass(eq=False)
class ServiceConfig:
    """Address, users, limits and durability."""

    host: str = "127.0.0.1"
    """Address to listen on. Any address other than this machine's own needs tokens."""
    port: int = setting(8900, at_least=0, at_most=65535)
    """Port; 0: any free port."""
    tokens_file: str | None = None
    """File with a line `USER TOKEN` per user. Null: the environment variable STROP_SERVE_TOKENS
    (USER:TOKEN,USER:TOKEN); if that is not set either, one user on this machine, with any key."""
    base_model: str | None = None
    """Name by which clients request the model. Null: model.path."""
    state_dir: str = "serve_state"
    """Folder for sessions, adapters, optimizer states and saved weights; a restarted service continues from
    it."""
    snapshot_steps: int = setting(10, at_least=1)
    """Optimizer steps between two snapshots of an adapter. After a restart, the steps since the last snapshot
    are recomputed."""
    lora_alpha: float = setting(32.0, above=0)
    """Alpha of every adapter: its product is scaled by alpha / rank."""
    max_lora_rank: int = setting(128, at_least=1)
    """Maximum rank of an adapter."""
    max_adapters: int = setting(32, at_least=1)
    """Adapters in training on the device at the same time. Further adapters are restored from state_dir when
    they are needed."""
    max_adapters_per_user: int = setting(8, at_least=1)
    """Adapters that one user may have in training."""
    max_samplers: int = setting(32, at_least=1)
    """Saved weights that are loaded for sampling at the same time. Further weights are loaded when they are
    needed."""
    ephemeral_samplers: int = setting(8, at_least=1)
    """Sampler weights without a name that are kept per adapter; older ones are deleted."""
    max_body_mb: float = setting(64.0, above=0)
    """Maximum request size in MB. A larger request gets status 413."""
    max_batch_tokens: int = setting(1_048_576, at_least=1)
    """Maximum tokens of one training request. A larger request gets status 413."""
    max_samples: int = setting(256, at_least=1)
    """Maximum samples of one sampling request."""
    max_pending: int = setting(4096, at_least=1)
    """Maximum number of waiting requests of one user. A further request gets status 429, and the client
    waits."""
    session_timeout: float = setting(3600.0, above=0)
    """Seconds after its last request until a session no longer counts towards max_adapters_per_user."""
    max_token_len_per_gpu: int = setting(16384, at_least=1)
    """Tokens per forward and backward pass."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))
    """auto: a GPU if there is one, else the CPU."""
    seed: int = setting(1, at_least=0, at_most=MAX_SEED)
    """Seed of the base run; adapters and samples have their own seeds."""


@dataclass(eq=False)
class TrainingServiceConfig:
    """A training service with the protocol of the Tinker client."""

    model: ServiceModelConfig = section(ServiceModelConfig)
    """The base model and its tokenizer."""
    server: ServiceConfig = section(ServiceConfig)
    """Address, users, limits and durability."""
    policy: FreeForm = setting({})
    """Further keys of a training run for the model under the service, by full name or last word, such as
    {gpu_memory_utilization: 0.6}."""
    plugins: list[str] = setting([])
    """Python files imported before anything else."""
