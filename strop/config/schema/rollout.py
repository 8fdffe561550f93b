"""The `rollout` group: how tokens are sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.catalog import ENGINES, TOOL_PARSERS
from strop.config.schema.fields import inert, link, section, setting

_ASYNC = "the engine's asynchronous interface is always there"


@dataclass(eq=False)
class ValKwargs:
    """Sampling while validating. Read by trainer/collect.py."""

    temperature: float = setting(0.0, at_least=0)
    """Validation temperature; 0 is greedy."""
    top_k: int = setting(-1, at_least=-1)
    """Validation top-k; -1 or 0: off."""
    top_p: float = setting(1.0, above=0, at_most=1)
    """Validation top-p."""
    n: int = setting(1, at_least=1)
    """Responses per validation prompt."""
    do_sample: bool = setting(False)
    """Sample while validating. False with a temperature above 0 samples all the same, and says so."""


@dataclass(eq=False)
class RewardWeights:
    """How rewards of a conversation add up. Read by trainer/collect.py."""

    score: float = setting(1.0)
    """Weight of the scorer's score of the whole conversation. 0: no scorer is asked."""
    turn: float = setting(1.0)
    """Weight of rewards given on the way (by a tool's execute, an interaction, a loop); each stands on the last token of its
    turn."""
    tool: float = setting(1.0)
    """Weight of what tools say at the end (calc_reward); it is added to the score."""


@dataclass(eq=False)
class MultiTurn:
    """Conversations with tools and simulated users. Read by agents/."""

    enable: bool = setting(False)
    """Conversations of several turns. The row's agent_name still chooses the loop."""
    max_assistant_turns: int | None = setting(None, at_least=1)
    """Most assistant turns. Null: as many as fit."""
    max_user_turns: int | None = setting(None, at_least=1)
    """Most tool and user turns. Null: as many as fit."""
    max_parallel_calls: int = setting(1, at_least=1)
    """Tool calls of one turn that run side by side; further ones are answered with an error message."""
    max_tool_response_length: int = setting(256, at_least=1)
    """Longest tool reply, in characters."""
    tool_response_truncate_side: str = setting("middle", choices=("left", "middle", "right"))
    """What is cut from a longer one: left keeps the head, right keeps the tail, middle keeps both."""
    tool_config_path: str | None = None
    """YAML with the tools."""
    tool_error_policy: str = setting("reply", choices=("reply", "stop", "mask"))
    """After a tool call that failed: reply (the model reads the error and goes on), stop (the conversation ends there), or mask
    (the sample is not trained on, and counted)."""
    call_timeout: float = setting(60.0, above=0)
    """Seconds that one call of a tool or an interaction may take."""
    reward_weights: RewardWeights = section(RewardWeights)
    """How rewards of turns, tools and the scorer add up."""
    interaction_config_path: str | None = None
    """YAML with the interactions."""
    format: str = setting("hermes", one_of=TOOL_PARSERS)
    """Syntax of tool calls: hermes, llama3_json, qwen, mistral, pythonic, or template: what the chat template writes."""
    use_inference_chat_template: bool = inert(False, "turns are rendered once, token by token")
    """Option of an older engine."""
    tokenization_sanity_check_mode: str = inert("strict", "token exactness is always checked")
    """Option of an older engine."""
    num_repeat_rollouts: int | None = inert(None, "set rollout.n")
    """Option of an older engine."""
    completion_callback: str | None = inert(None, "write an agent loop")
    """Option of an older engine."""


@dataclass(eq=False)
class AsyncServer:
    path: str | None = inert(None, "name an engine of your own in rollout.name")
    """File of an own server class."""
    name: str | None = inert(None, "name an engine of your own in rollout.name")
    """Class of it."""


@dataclass(eq=False)
class AgentSettings:
    """Agent loops. Read by agents/."""

    max_concurrency: int = setting(1024, at_least=1)
    """Episodes in flight at the same time, per device."""
    num_workers: int = inert(8, "episodes are coroutines of one process; max_concurrency bounds them, and any batch size works")
    """Processes that run episodes."""
    default_agent_loop: str = setting("single_turn_agent")
    """Loop of rows that name none."""
    agent_loop_config_path: str | None = None
    """YAML list of further loops: {name, _target_, ...}."""
    custom_async_server: AsyncServer = section(AsyncServer)
    """Own server class."""
    agent_loop_manager_class: str | None = inert(None, "loops are plain coroutines; there is no manager to replace")
    """Own manager class."""


@dataclass(eq=False)
class CheckpointEngine:
    """How weights reach engines in other processes. Read by trainer/pool.py."""

    backend: str = setting("naive", choices=("naive", "nccl", "nixl", "hccl", "file"))
    """Transport to replicas on machines of their own (rollout.nnodes): naive (Ray's object store, which is shared memory on one
    machine), nccl (a broadcast to all at once, by gloo where somebody has no CUDA device; actor_rollout_ref.nccl_timeout is its
    limit), or file (a folder that all machines see, where nothing else works). nixl and hccl are not there."""
    update_weights_bucket_megabytes: int = setting(2048, at_least=1)
    """Size of one bucket. The sender holds two of them, a receiver up to three."""
    engine_kwargs: dict[str, Any] = setting({})
    """Settings of the transport. folder: where buckets lie with backend=file, a folder of this run alone; else one under
    trainer.default_local_dir."""


@dataclass(eq=False)
class Trace:
    backend: str | None = inert(None, "trajectories are kept in full; see trainer.rollout_data_dir")
    """mlflow or weave."""
    token2text: bool = inert(False, "trajectories are kept in full")
    """Add decoded text."""
    max_samples_per_step_per_worker: int | None = inert(None, "trajectories are kept in full")
    """Thin out."""


@dataclass(eq=False)
class Prometheus:
    enable: bool = inert(False, "engine numbers are metrics of every step")
    """Scrape the engine."""
    port: int = inert(9090, "engine numbers are metrics of every step")
    """Port."""
    file: str | None = inert(None, "engine numbers are metrics of every step")
    """Configuration file."""
    served_model_name: str | None = inert(None, "engine numbers are metrics of every step")
    """Label."""


@dataclass(eq=False)
class LayerNameMap:
    qkv_layer_name: str = inert("qkv", "weights travel under their Hugging Face names")
    """Megatron name."""
    gate_proj_layer_name: str = inert("gate_up", "weights travel under their Hugging Face names")
    """Megatron name."""


@dataclass(eq=False)
class Rollout:
    """Sampling and the engine. Read by rollout/ and trainer/collect.py."""

    name: str = setting("native", one_of=ENGINES)
    """Engine. vllm and sglang fall back to native, with a notice, where they are not installed (strict: refuse)."""
    strict: bool = setting(False)
    """Refuse to start instead of falling back to the native engine."""
    n: int = setting(1, at_least=1)
    """Responses per prompt."""
    temperature: float = setting(1.0, at_least=0)
    """Sampling temperature; log-probs of training are taken at the same one. 0 is greedy."""
    top_k: int = setting(-1, at_least=-1)
    """Sample from the k likeliest tokens; -1 or 0: all."""
    top_p: float = setting(1.0, above=0, at_most=1)
    """Sample from the smallest set of tokens with this probability."""
    min_p: float = setting(0.0, at_least=0, at_most=1)
    """Sample from tokens at least this likely compared with the likeliest."""
    repetition_penalty: float = setting(1.0, above=0)
    """Above 1 discourages tokens that already occurred."""
    do_sample: bool = setting(True)
    """False is greedy."""
    ignore_eos: bool = setting(False)
    """Go on after the end-of-sequence token."""
    stop: list[str] = setting([])
    """Strings that end a response."""
    seed: int | None = link("trainer.seed")
    """Seed of sampling."""
    prompt_length: int = link("data.max_prompt_length", at_least=1)
    """Longest prompt the engine takes."""
    response_length: int = link("data.max_response_length", at_least=1)
    """Longest response it makes."""
    max_model_len: int | None = setting(None, at_least=1)
    """Longest sequence. Null: prompt_length + response_length."""
    dtype: str = setting("bfloat16", choices=("auto", "bfloat16", "float32", "float16"))
    """Precision of the engine's weights."""
    gpu_memory_utilization: float = setting(0.5, above=0, at_most=1)
    """Share of the device's memory for weights and cache of the engine."""
    enforce_eager: bool = setting(False)
    """Do without CUDA graphs."""
    cudagraph_capture_sizes: list[int] | None = setting(None)
    """Batch sizes that get a graph. Null: chosen by the engine."""
    free_cache_engine: bool = setting(True)
    """Give the cache's memory back while training. The native engine keeps it where at most a quarter of a GPU is taken with
    it, because the decode steps it recorded point into it; a model that runs out of memory makes it let go."""
    enable_sleep_mode: bool = inert(True, "free_cache_engine decides")
    """Engine sleep mode."""
    tensor_model_parallel_size: int = setting(1, at_least=1)
    """Devices per engine."""
    data_parallel_size: int = setting(1, at_least=1)
    """Data-parallel size inside one engine."""
    expert_parallel_size: int = setting(1, at_least=1)
    """Expert-parallel size inside one engine."""
    nnodes: int = setting(0, at_least=0)
    """Machines that only sample, with engines of their own (trainer.runtime=ray). 0: the engine lives beside the trainer."""
    n_gpus_per_node: int = setting(1, at_least=1)
    """Devices of each of them."""
    pipeline_model_parallel_size: int = setting(1, at_least=1, at_most=1)
    """Pipeline-parallel size inside one engine; only 1."""
    max_num_batched_tokens: int | None = setting(None, at_least=1)
    """Tokens per engine step. null: the engine's choice. The native one computes up to 32,768 prompt tokens at once on a GPU,
    because a pass costs tens of milliseconds of host time however few tokens it has, and 8,192 on a CPU."""
    max_num_seqs: int = setting(1024, at_least=1)
    """Sequences in flight."""
    enable_chunked_prefill: bool = setting(True)
    """Split long prompts over engine steps."""
    enable_prefix_caching: bool = setting(True)
    """Reuse the cache of equal beginnings: an agent's next turn computes only what is new."""
    calculate_log_probs: bool = setting(True)
    """Return the log-probs of sampled tokens; rollout correction and drift metrics need them."""
    log_prob_micro_batch_size: int | None = setting(None, at_least=1)
    """Old form of the next key, counted over all devices."""
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, at_least=1)
    """Sequences per forward when log-probs are recomputed. Null: derived."""
    log_prob_use_dynamic_bsz: bool = link("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill those forwards by tokens."""
    log_prob_max_token_len_per_gpu: int = link("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", at_least=1)
    """Tokens per forward then."""
    val_kwargs: ValKwargs = section(ValKwargs)
    """Sampling while validating."""
    multi_turn: MultiTurn = section(MultiTurn)
    """Tools and turns."""
    agent: AgentSettings = section(AgentSettings)
    """Agent loops."""
    engine_kwargs: dict[str, Any] = setting({})
    """Arguments for the engine itself: {vllm: {...}, sglang: {...}}; docs/rollout_engines.md lists ours among them."""
    checkpoint_engine: CheckpointEngine = section(CheckpointEngine)
    """Transport of weights."""
    scheduling_policy: str = setting("fcfs")
    """Order in which waiting requests start (vllm)."""
    logprobs_mode: str = inert("processed_logprobs", "log-probs are always those after temperature")
    """Which log-probs are returned."""
    mode: str = inert("async", _ASYNC)
    """sync or async."""
    load_format: str = inert("auto", "the engine takes the trainer's weights")
    """Initial weights of the engine."""
    layered_summon: bool = inert(False, "weights are always moved in buckets")
    """Gather layer by layer."""
    disable_log_stats: bool = inert(True, "engine numbers are metrics of every step")
    """Silence the engine's own log."""
    use_fire_sampling: bool = inert(False, "not supported")
    """Hotter first token."""
    over_sample_rate: float = inert(0.0, "use data.gen_batch_size with algorithm.filter_groups")
    """Surplus requests."""
    multi_stage_wake_up: bool = inert(False, "the engine wakes in one step")
    """Wake weights and cache apart."""
    skip_rollout: bool = inert(False, "use trainer.record_steps and strop replay")
    """Reuse dumped rollouts."""
    skip_dump_dir: str = inert("/tmp/rollout_dump", "use trainer.record_steps and strop replay")
    """Where they lie."""
    skip_tokenizer_init: bool = inert(True, "engines take and give token ids")
    """Engine without tokenizer."""
    enable_rollout_routing_replay: bool = inert(False, "router replay is not supported")
    """Return expert choices."""
    quantization: str | None = inert(None, "quantised rollouts are not supported")
    """Weight format of the engine."""
    quantization_config_file: str | None = inert(None, "quantised rollouts are not supported")
    """Its settings."""
    trace: Trace = section(Trace)
    """Tracing of agent calls."""
    prometheus: Prometheus = section(Prometheus)
    """Scraping of engine servers."""
    layer_name_map: LayerNameMap = section(LayerNameMap)
    """Megatron weight names."""
    profiler: dict[str, Any] = inert({}, "set actor_rollout_ref.profiler")
    """Profiling of the engine."""
