"""Models in use, not in training: generation, evaluation, and the reward server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.catalog import DATASETS
from strop.config.schema.actor import STRATEGIES
from strop.config.schema.fields import inert, link, section, setting
from strop.config.schema.model import _FUSED, Fsdp, Model
from strop.config.schema.reward import CustomRewardFunction
from strop.config.schema.rollout import Rollout
from strop.config.schema.trainer import RayKwargs


@dataclass(eq=False)
class GenerationData:
    """What to answer. Read by trainer/main_generation.py."""

    path: str | list[str] | None = None
    """Rows with prompts: parquet, json or jsonl, on this machine or at any fsspec address."""
    output_path: str | None = None
    """A .parquet file for the same rows with a column `responses` added; an fsspec address will do."""
    prompt_key: str = "prompt"
    """Column with the prompt: messages, or plain text that becomes one user message."""
    n_samples: int = setting(5, at_least=1)
    """Responses per prompt."""
    batch_size: int = setting(128, at_least=1)
    """Prompts between two writes: what a kill can cost at most. It may be changed when a job goes on."""
    benchmark: str | None = setting(None, one_of=DATASETS)
    """The file is a benchmark as it is published (gsm8k, math, math500, aime): its columns become prompt and ground truth."""
    apply_chat_template: bool = True
    """Render messages with the tokenizer's chat template. False: contents as they stand."""
    apply_chat_template_kwargs: dict[str, Any] = setting({})
    """Further variables of the template, for instance {enable_thinking: false}."""


@dataclass(eq=False)
class GenerationRollout(Rollout):
    temperature: float = setting(1.0, at_least=0)
    """Sampling temperature; 0 is greedy and needs n_samples 1."""
    top_k: int = setting(50, at_least=-1)
    """Sample from the k likeliest tokens; -1 or 0: all."""
    top_p: float = setting(0.7, above=0, at_most=1)
    """Sample from the smallest set of tokens with this probability."""
    prompt_length: int = setting(1536, at_least=1)
    """Longest prompt; a longer one keeps its end."""
    response_length: int = setting(512, at_least=1)
    """Longest response."""
    log_prob_use_dynamic_bsz: bool = inert(False, "nothing is trained here")
    """Training key."""
    log_prob_max_token_len_per_gpu: int = inert(16384, "nothing is trained here")
    """Training key."""
    log_prob_micro_batch_size_per_gpu: int | None = inert(None, "nothing is trained here")
    """Training key."""
    log_prob_micro_batch_size: int | None = inert(None, "nothing is trained here")
    """Training key."""


@dataclass(eq=False)
class GenerationTrainer:
    """The machine. Read by trainer/main_generation.py."""

    nnodes: int = setting(1, at_least=1)
    """Machines."""
    n_gpus_per_node: int = setting(1, at_least=1)
    """Devices per machine."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda", "npu"))
    """auto: a GPU where there is one."""
    runtime: str = setting("auto", choices=("auto", "local", "ray"))
    """local: processes on this machine; ray: a cluster."""
    seed: int = 1
    """Seed of sampling."""


@dataclass(eq=False)
class GenerationActor:
    """Sharding of the model that generates. Read by trainer/main_generation.py."""

    strategy: str = setting("fsdp", choices=STRATEGIES)
    """Backend that holds the weights."""
    ulysses_sequence_parallel_size: int = inert(1, "nothing is trained here")
    """Training key."""
    entropy_from_logits_with_chunking: bool = inert(False, _FUSED)
    """Training key."""
    entropy_checkpointing: bool = inert(False, _FUSED)
    """Training key."""
    fsdp_config: Fsdp = section(Fsdp)
    """Precision and sharding."""


@dataclass(eq=False)
class EvaluationData:
    """What to score. Read by trainer/main_eval.py."""

    path: str | list[str] | None = None
    """Rows with responses. With `--compare A B`, those two files."""
    prompt_key: str = "prompt"
    """Column with the prompt."""
    response_key: str = "responses"
    """Column with the list of responses."""
    data_source_key: str = "data_source"
    """Column that chooses the scorer and groups the results."""
    reward_model_key: str = "reward_model"
    """Column with the ground truth."""
    benchmark: str | None = setting(None, one_of=DATASETS)
    """The rows are those of a benchmark as it is published (gsm8k, math, math500, aime), with responses added."""
    output_path: str | None = None
    """JSON file for the results; an fsspec address will do. Null: data.path with .eval.json instead of .parquet."""


@dataclass(eq=False)
class EvaluationSettings:
    """How scores are summed up. Read by trainer/main_eval.py."""

    num_workers: int = setting(2, at_least=1)
    """Processes that score."""
    timeout: float = setting(30.0, above=0)
    """Seconds per response."""
    k: list[int] | None = setting(None)
    """Numbers of responses for pass@k, best@k and maj@k. Null: 1, 2, 4, ... and all of them."""
    bootstrap: int = setting(1000, at_least=0)
    """Draws of prompts for confidence intervals; 0: none."""
    confidence: float = setting(0.95, above=0, at_most=0.9999)
    """Share of the draws inside an interval."""
    seed: int = 42
    """Seed of those draws."""


@dataclass(eq=False)
class GenerationModel(Model):
    path: str | None = None
    """Hugging Face folder, hub name, .gguf file, or `smollm2-135m`."""
    tokenizer_path: str | None = link("model.path")
    """Folder of the tokenizer when it is not beside the weights."""


@dataclass(eq=False)
class Generation:
    """Answers for a file of prompts."""

    data: GenerationData = section(GenerationData)
    """What to answer."""
    model: GenerationModel = section(GenerationModel)
    """Weights and tokenizer."""
    rollout: GenerationRollout = section(GenerationRollout)
    """How answers are sampled."""
    actor: GenerationActor = section(GenerationActor)
    """Sharding of the model."""
    trainer: GenerationTrainer = section(GenerationTrainer)
    """The machine."""
    ray_kwargs: RayKwargs = section(RayKwargs)
    """Ray."""
    plugins: list[str] = setting([])
    """Python files imported by every process before anything else."""


@dataclass(eq=False)
class Evaluation:
    """Scores for a file of answers."""

    data: EvaluationData = section(EvaluationData)
    """What to score."""
    custom_reward_function: CustomRewardFunction = section(CustomRewardFunction)
    """A scorer of your own."""
    evaluation: EvaluationSettings = section(EvaluationSettings)
    """How scores are summed up."""
    ray_kwargs: RayKwargs = section(RayKwargs)
    """Ray."""
    plugins: list[str] = setting([])
    """Python files imported by every process before anything else."""


@dataclass(eq=False)
class RewardServerModel(Model):
    path: str | None = None
    """A sequence- or token-classification model with one label, or an OpenRLHF-style value head."""


@dataclass(eq=False)
class ServerSettings:
    """Address, batching and limits. Read by rewards/server.py."""

    host: str = "127.0.0.1"
    """Address to listen at. 0.0.0.0 answers other machines too; there is no authentication."""
    port: int = setting(5000, at_least=0, at_most=65535)
    """Port; 0: any free one."""
    max_batch_size: int = setting(64, at_least=1)
    """Most texts that are scored together."""
    max_wait_ms: float = setting(5.0, at_least=0)
    """Milliseconds the first text of a batch waits for others."""
    max_queue: int = setting(4096, at_least=1)
    """Texts that may wait; a request beyond is answered with 503, come back later."""
    max_body_mb: float = setting(8.0, above=0)
    """Largest request; a larger one is answered with 413."""
    max_length: int | None = setting(None, at_least=1)
    """Longest text in tokens; a longer one loses its end, which the answer says. Null: what the model takes."""
    timeout: float = setting(300.0, above=0)
    """Seconds until a request that waits is answered with 503."""
    normalize: bool = setting(False)
    """Normalise scores with the mean and deviation saved beside the model."""
    forward_max_token_len_per_gpu: int = setting(16384, at_least=1)
    """Tokens per forward."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))
    """auto: a GPU where there is one."""
    dtype: str = setting("bfloat16", choices=("bfloat16", "float32", "float16"))
    """Precision of the model; a CPU without bf16 computes in fp32."""


@dataclass(eq=False)
class RewardServer:
    """A reward model behind HTTP."""

    model: RewardServerModel = section(RewardServerModel)
    """Weights and tokenizer."""
    server: ServerSettings = section(ServerSettings)
    """Address, batching and limits."""
    plugins: list[str] = setting([])
    """Python files imported before anything else."""
