"""The `reward_model`, `reward_manager` and `custom_reward_function` sections: where scores come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.catalog import REWARD_MANAGERS
from strop.config.schema.fields import inert, link, section, setting
from strop.config.schema.megatron import Megatron
from strop.config.schema.model import Fsdp, Model, Profiler

_LOOP = "every sample is scored as soon as it is complete, and in batches where the scorer wants them"


@dataclass(eq=False)
class RewardModelWeights(Model):
    """Weights of the reward model. Read by models/build.py."""

    path: str | None = setting(None)
    """A sequence- or token-classification model with one label, or an OpenRLHF-style value head."""
    input_tokenizer: str | None = link("actor_rollout_ref.model.path")
    """The policy's tokenizer. Null: the reward model shares tokenizer and template, and is given the ids as they are."""
    trust_remote_code: bool = link("actor_rollout_ref.model.trust_remote_code")
    """Run model code from the model's own repository."""
    external_lib: str | None = link("actor_rollout_ref.model.external_lib")
    """Module(s) imported first."""
    value_head_prefix: str = link("actor_rollout_ref.model.value_head_prefix")
    """Attribute name of the scalar head in OpenRLHF-style models."""
    fsdp_config: Fsdp = section(Fsdp)
    """Precision, sharding, offloading."""


@dataclass(eq=False)
class OverlongBuffer:
    """DAPO's soft penalty on long responses. Read by rewards/managers."""

    enable: bool = False
    """Use it."""
    len: int = setting(0, at_least=0)
    """The penalty grows over this many tokens before the length limit."""
    penalty_factor: float = setting(1.0, at_least=0)
    """Penalty at the limit."""
    log: bool = False
    """Log it per sample."""


@dataclass(eq=False)
class SandboxFusion:
    """Execution of programs that a model wrote. Read by rewards/rules/code.py."""

    url: str | None = None
    """Address of a SandboxFusion server (.../run_code). Null: the sandbox of this machine."""
    max_concurrent: int = setting(64, at_least=1)
    """Programs at the same time on that server. Here as many run as there are cores."""
    memory_limit_mb: int = setting(1024, at_least=1)
    """Memory of each."""
    timeout: float = setting(10.0, above=0)
    """Seconds for one test of a program."""
    total_timeout: float = setting(60.0, above=0)
    """Seconds for all tests of a program; those that do not get their turn fail."""
    isolation: str = setting("auto", choices=("auto", "namespaces", "bubblewrap", "user", "limits"))
    """What must separate programs from this machine. auto: the best that works here; it warns if the network stays open."""


@dataclass(eq=False)
class Judge:
    """A language model that reads answers and gives marks. Read by rewards/judge.py."""

    enable: bool = setting(False)
    """Score with a judge: the model behind url, or reward_model.model.path in an engine of this run."""
    url: str | None = None
    """OpenAI-compatible address, such as http://localhost:8000/v1. Null: reward_model.model.path is loaded here."""
    model: str | None = None
    """Name of the model there. Null: the first that the server lists."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, where the server wants one."""
    template: str | None = None
    """What the judge is asked: a file, or a text, with {question}, {answer}, {ground_truth}. Null: a template of ours."""
    score_pattern: str = r"(?i)score:?\**\s*(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, the mark. Its last match in what the judge says counts; without one the sample is
    masked."""
    score_range: list[float] = setting([0.0, 10.0])
    """Lowest and highest mark, which become 0 and 1."""
    temperature: float = setting(0.0, at_least=0)
    """0 is greedy."""
    max_tokens: int = setting(1024, at_least=1)
    """Longest reply of the judge."""
    max_concurrent: int = setting(32, at_least=1)
    """Requests at the same time. reward_model.timeout limits each, tries included."""
    cache_path: str | None = None
    """File that keeps what the judge said, for later runs. Null: kept in memory."""


@dataclass(eq=False)
class RewardModel:
    """A model in the reward loop, and how all scores are collected. Read by rewards/."""

    enable: bool = setting(False)
    """Score with a model."""
    model: RewardModelWeights = section(RewardModelWeights)
    """Its weights."""
    reward_manager: str = setting("naive", one_of=REWARD_MANAGERS)
    """How scorers are called: naive (one by one), prime (in processes), batch (all at once), dapo (with length penalty) ..."""
    reward_kwargs: dict[str, Any] = setting({})
    """Arguments of the manager, for instance {overlong_buffer_cfg: {...}, max_resp_len: 1024}."""
    num_workers: int = setting(1, at_least=1)
    """Processes (prime) or threads (others) that score."""
    timeout: float = setting(300.0, above=0)
    """Seconds per sample; a later one is masked and counted."""
    retries: int = setting(0, at_least=0)
    """Times a failing scorer is called again before its sample is masked."""
    remote_url: str | list[str] | None = setting(None)
    """HTTP reward server(s) that speak OpenRLHF's protocol."""
    normalize: bool = setting(False)
    """Normalise the model's scores with the mean and deviation saved beside it."""
    clip_range: list[float] | None = setting(None)
    """Clamp scores to [low, high]."""
    stop_properly_penalty_coef: float | None = setting(None, at_most=1)
    """Responses cut at the length limit: 0 to 1 scales their score, a negative number replaces it."""
    overlong_buffer: OverlongBuffer = section(OverlongBuffer)
    """Soft penalty on long responses."""
    micro_batch_size: int | None = setting(None, at_least=1)
    """Old form of the next key, counted over all devices."""
    micro_batch_size_per_gpu: int | None = setting(None, at_least=1)
    """Sequences per forward of the model. Null: derived."""
    max_length: int | None = setting(None, at_least=1)
    """Longest input of the model."""
    use_dynamic_bsz: bool = link("critic.use_dynamic_bsz")
    """Fill forwards by tokens."""
    forward_max_token_len_per_gpu: int = link("critic.forward_max_token_len_per_gpu", at_least=1)
    """Tokens per forward then."""
    ulysses_sequence_parallel_size: int = setting(1, at_least=1)
    """Devices that share one sequence."""
    strategy: str = link("actor_rollout_ref.actor.strategy")
    """Backend that holds the model."""
    enable_resource_pool: bool = setting(False)
    """Give the model devices of its own, with a whole copy on each (trainer.runtime=ray)."""
    nnodes: int = setting(0, at_least=0)
    """Nodes of that pool."""
    n_gpus_per_node: int = setting(8, at_least=0)
    """Devices per node of that pool."""
    sandbox_fusion: SandboxFusion = section(SandboxFusion)
    """Execution of code answers."""
    max_concurrent: int = setting(1, at_least=1)
    """rate_limited: requests at the same time."""
    max_rpm: float | None = setting(None, above=0)
    """rate_limited: requests per minute."""
    max_tpm: float | None = setting(None, above=0)
    """rate_limited: tokens per minute."""
    estimated_tokens_per_request: int = setting(2000, at_least=1)
    """rate_limited: tokens assumed per request."""
    profiler: Profiler = section(Profiler)
    """Profiling of this role."""
    judge: Judge = section(Judge)
    """A judge model."""
    rollout: dict[str, Any] = setting({})
    """Engine of a judge that runs here: {name: native, prompt_length: 4096, max_num_seqs: 64 ...}."""
    megatron: Megatron = section(Megatron)
    """Settings of the Megatron backend."""
    use_reward_loop: bool = inert(True, _LOOP)
    """Score per sample inside the rollout."""
    launch_reward_fn_async: bool = inert(False, _LOOP)
    """Score while log-probs are computed."""
    reward_loop_source: str = inert("register", "set custom_reward_function or reward_manager.module")
    """register or importlib."""
    reward_loop_module_path: str | None = inert(None, "set reward_manager.module.path")
    """File of an own manager."""
    reward_loop_class_name: str | None = inert(None, "set reward_manager.module.name")
    """Class of an own manager."""


@dataclass(eq=False)
class RewardManagerModule:
    path: str | None = None
    """File of a reward manager of your own."""
    name: str = "custom_reward_manager"
    """Class of it."""


@dataclass(eq=False)
class RewardManager:
    """Another place for reward_model.reward_manager. Read by rewards/."""

    source: str = setting("register", choices=("register", "importlib"))
    """register: by name; importlib: from module.path."""
    name: str = link("reward_model.reward_manager", one_of=REWARD_MANAGERS)
    """Name of the manager."""
    module: RewardManagerModule = section(RewardManagerModule)
    """Where an own one lives."""


@dataclass(eq=False)
class CustomRewardFunction:
    """A scorer of your own. Read by rewards/."""

    path: str | None = None
    """Python file (or `pkg://module`) with a function (data_source, solution_str, ground_truth, extra_info) -> score."""
    name: str = "compute_score"
    """Name of that function; it may be async, and may return a number or a dict with `score`."""
    reward_kwargs: dict[str, Any] = setting({})
    """Further keyword arguments of every call."""
