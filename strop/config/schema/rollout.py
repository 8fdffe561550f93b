"""The `rollout` group: how tokens are sampled."""

from __future__ import annotations

from dataclasses import dataclass

from strop.catalog import ENGINES, TOOL_PARSERS
from strop.config.schema.fields import FreeForm, inert, link, section, setting

_ASYNC = "the engine always has an asynchronous interface"
_CUSTOM_ENGINE = "set actor_rollout_ref.rollout.name to a registered custom engine"


@dataclass(eq=False)
class ValKwargsConfig:
    """Sampling in validation."""

    temperature: float = setting(0.0, at_least=0)
    """Validation temperature; 0 is greedy."""
    top_k: int = setting(-1, at_least=-1)
    """Validation top-k; -1 or 0: off."""
    top_p: float = setting(1.0, above=0, at_most=1)
    """Validation top-p."""
    n: int = setting(1, at_least=1)
    """Responses per validation prompt."""
    do_sample: bool = setting(False)
    """Sample in validation. False with a temperature above 0 still samples, and logs a notice."""


@dataclass(eq=False)
class RewardWeightsConfig:
    """Weights of the rewards of a conversation."""

    score: float = setting(1.0)
    """Weight of the scorer's score of the whole conversation. 0: no scorer is called."""
    turn: float = setting(1.0)
    """Weight of the rewards of single turns (from a tool's execute, an interaction or an agent loop). Each is
    placed on the last token of its turn."""
    tool: float = setting(1.0)
    """Weight of the final rewards of tools (calc_reward); they are added to the score."""


@dataclass(eq=False)
class MultiTurnConfig:
    """Conversations with tools and simulated users."""

    enable: bool = setting(False)
    """Multi-turn conversations. The row's agent_name still selects the agent loop."""
    max_assistant_turns: int | None = setting(None, at_least=1)
    """Maximum number of assistant turns. Null: limited only by the response length."""
    max_user_turns: int | None = setting(None, at_least=1)
    """Maximum number of tool and user turns. Null: limited only by the response length."""
    max_parallel_calls: int = setting(1, at_least=1)
    """Tool calls of one turn that run in parallel. Further calls get an error message as reply."""
    max_tool_response_length: int = setting(256, at_least=1)
    """Maximum length of a tool reply, in characters."""
    tool_response_truncate_side: str = setting("middle", choices=("left", "middle", "right"))
    """How a longer tool reply is truncated: left keeps the head, right keeps the tail, middle keeps both."""
    tool_config_path: str | None = None
    """YAML file that defines the tools."""
    tool_error_policy: str = setting("reply", choices=("reply", "stop", "mask"))
    """What happens after a failed tool call: reply (the model gets the error message and continues), stop
    (the conversation ends), or mask (the sample is excluded from training, and counted)."""
    call_timeout: float = setting(60.0, above=0)
    """Timeout of one call of a tool or an interaction, in seconds."""
    reward_weights: RewardWeightsConfig = section(RewardWeightsConfig)
    """Weights of the rewards of turns, tools and the scorer."""
    interaction_config_path: str | None = None
    """YAML file that defines the interactions."""
    format: str = setting("hermes", one_of=TOOL_PARSERS)
    """Syntax of tool calls: hermes, llama3_json, qwen, mistral, pythonic, gpt-oss, or template (the syntax
    that the chat template uses)."""
    use_inference_chat_template: bool = inert(False, "turns are rendered once, token by token")
    """Option of an older engine."""
    tokenization_sanity_check_mode: str = inert("strict", "token exactness is always checked")
    """Option of an older engine."""
    num_repeat_rollouts: int | None = inert(None, "set actor_rollout_ref.rollout.n")
    """Option of an older engine."""
    completion_callback: str | None = inert(None, "write an agent loop")
    """Option of an older engine."""


@dataclass(eq=False)
class AsyncServerConfig:
    path: str | None = inert(None, _CUSTOM_ENGINE)
    """File of a custom server class."""
    name: str | None = inert(None, _CUSTOM_ENGINE)
    """Name of the custom server class."""


@dataclass(eq=False)
class AgentConfig:
    """Agent loops."""

    max_concurrency: int = setting(1024, at_least=1)
    """Concurrent episodes per device."""
    num_workers: int = inert(
        8, "episodes are coroutines of one process; max_concurrency bounds them, and any batch size works"
    )
    """Processes that run episodes."""
    default_agent_loop: str = setting("single_turn_agent")
    """Agent loop of rows without agent_name."""
    agent_loop_config_path: str | None = None
    """YAML file with a list of further agent loops: {name, _target_, ...}."""
    endpoint: str | None = setting(None, choices=("openai", None))
    """openai: serve the policy at an HTTP endpoint of this process, with the APIs of OpenAI (chat
    completions, responses) and Anthropic (messages), for agent loops that pass episodes to programs. Every
    call is recorded token by token. rollout.agent.command implies it."""
    endpoint_host: str = setting("127.0.0.1")
    """Address on which the endpoint listens. Every episode has its own key."""
    command: str | None = None
    """Command of an external agent. It is started once per episode, with the URL and the key of the endpoint
    in its environment (OPENAI_BASE_URL, OPENAI_API_KEY ...). `{task}` is replaced by the last user message of
    the row, `{task_file}` by a JSON file with the row. The command is started without a shell. Rows without
    agent_name use it."""
    service: bool = setting(False)
    """Start rollout.agent.command once, for all episodes. It reads a line of JSON per episode from its
    standard input and writes a line when the episode ends. For programs that start slowly."""
    reward: str = setting("verifier", choices=("verifier", "exit", "file"))
    """Score of an episode of rollout.agent.command: verifier (the reward function of the run), exit (1 if the
    program exits with 0, else 0), or file (the content of $STROP_REWARD_FILE, which the program writes, or
    the score in a service's answer)."""
    players: list[str] = setting([])
    """Names of the players of an episode, for self-play. Each player has its own key ($STROP_API_KEYS, JSON
    by name), conversations and score: with reward=file, {"scores": {"name": a number}}. A score is compared
    with those of the same player in other episodes of the prompt."""
    policies: FreeForm = setting({})
    """Players with separate weights, by name: {white: {}, black: {train: false, path: folder}}. Each is a
    LoRA adapter over model.path, with its own optimizer, checkpoint (actor_<name>) and metrics
    (policy/<name>/). train=false: an opponent that never changes. path: a peft adapter to start from. The
    names are the players; a call is answered by the policy of its key, or by the policy in its field
    `model`."""
    timeout: float = setting(600.0, above=0)
    """Timeout of a program of rollout.agent.command, in seconds. At the timeout it is killed and its sample
    masked."""
    max_calls: int = setting(1000, at_least=1)
    """Maximum number of requests to the endpoint per episode. If an episode makes more, it fails."""
    credit: str = setting("shared", choices=("shared", "split", "last", "turn"))
    """How the sequences of an episode get their advantage; an agent that rewrites its context has several
    sequences per episode. Group estimators use one value per episode. shared: each sequence gets the
    advantage of the episode; split: that advantage divided by the number of sequences; last: only the
    sequence with the last response is trained; turn: each turn gets the advantage of the rewards from this
    turn on (grpo, dr_grpo, rloo), without the rewards of earlier turns of its sequence."""
    max_processes: int = setting(64, at_least=1)
    """Maximum number of programs of rollout.agent.command that run at the same time."""
    custom_async_server: AsyncServerConfig = section(AsyncServerConfig)
    """A custom server class."""
    agent_loop_manager_class: str | None = inert(
        None, "loops are plain coroutines; there is no manager to replace"
    )
    """A custom manager class."""


@dataclass(eq=False)
class CheckpointEngineConfig:
    """Weight sync to engines in other processes."""

    backend: str = setting("naive", choices=("naive", "nccl", "nixl", "hccl", "file"))
    """Transport to engine replicas on dedicated nodes (rollout.nnodes): naive (Ray's object store, which is
    shared memory on one machine), nccl (a broadcast to all replicas, over gloo if any process has no CUDA
    device; actor_rollout_ref.nccl_timeout is its timeout), or file (a folder on a shared file system).
    nixl and hccl are not supported."""
    update_weights_bucket_megabytes: int = setting(2048, at_least=1)
    """Size of one bucket. The sender holds two buckets, a receiver up to three."""
    engine_kwargs: FreeForm = setting({})
    """Settings of the transport. folder: the folder for buckets with backend=file, used by this run only; the
    default is a folder under trainer.default_local_dir."""


@dataclass(eq=False)
class TraceConfig:
    backend: str | None = inert(None, "trajectories are kept in full; see trainer.rollout_data_dir")
    """mlflow or weave."""
    token2text: bool = inert(False, "trajectories are kept in full")
    """Add the decoded text."""
    max_samples_per_step_per_worker: int | None = inert(None, "trajectories are kept in full")
    """Maximum number of traced samples."""


@dataclass(eq=False)
class PrometheusConfig:
    enable: bool = inert(False, "engine numbers are metrics of every step")
    """Let Prometheus scrape the engine."""
    port: int = inert(9090, "engine numbers are metrics of every step")
    """Port of Prometheus."""
    file: str | None = inert(None, "engine numbers are metrics of every step")
    """Configuration file."""
    served_model_name: str | None = inert(None, "engine numbers are metrics of every step")
    """Label of the model."""


@dataclass(eq=False)
class LayerNameMapConfig:
    qkv_layer_name: str = inert("qkv", "weights are synchronised under their Hugging Face names")
    """Megatron name."""
    gate_proj_layer_name: str = inert("gate_up", "weights are synchronised under their Hugging Face names")
    """Megatron name."""


@dataclass(eq=False)
class SpeculationConfig:
    """Speculative decoding in the native engine: several tokens of a sequence are proposed and verified in
    one pass."""

    enable: bool | str = setting(False, choices=("auto", True, False))
    """true: whenever at most max_rows sequences run. auto: on a GPU, if it is also measured to be faster; the
    decision depends on timing, so log-probs of two runs may differ by rounding. On a CPU, and with tensor
    parallelism, auto is off. The default is off, because the gain is small with many rows. Tokens are the
    same as in normal decoding with the same seeds, up to the rounding of a pass with more tokens."""
    num_tokens: int = setting(7, at_least=1, at_most=63)
    """Tokens that are proposed for each sequence and pass."""
    max_rows: int = setting(64, at_least=1)
    """Maximum number of running sequences for speculation. With more sequences, a pass has enough work
    without it."""
    min_match: int = setting(1, at_least=1)
    """Minimum number of last tokens that must match an earlier occurrence, whose continuation is proposed."""
    max_match: int = setting(8, at_least=1, at_most=64)
    """Maximum number of last tokens that are compared; the longest match is used."""
    memory_tokens: int = setting(32768, at_least=1)
    """Tokens of earlier responses to the same prompt, of this step and of earlier epochs, that are
    searched."""
    memory_megabytes: int = setting(512, at_least=0)
    """Host memory for earlier responses to all prompts; 0: search only the sequence itself. It is not part of
    checkpoints: a resumed run starts without it."""
    draft_model: str | None = setting(None)
    """Folder, hub name or GGUF file of a small model with the same vocabulary, which proposes tokens instead
    of the search in earlier responses. It has its own weights and KV cache. Tokens then have the policy's
    distribution, but differ from normal decoding with the same seeds, except for greedy decoding."""
    mtp: bool = setting(False)
    """Propose tokens with the model's own multi-token prediction head, read from the weights in model.path: a
    head in the layout of DeepSeek-V3 and GLM-4.5; others are rejected. Its weights are not trained.
    Distribution and seeds are as with draft_model."""


@dataclass(eq=False)
class RolloutConfig:
    """Sampling and the rollout engine."""

    name: str = setting("native", one_of=ENGINES)
    """Rollout engine. vllm and sglang fall back to native, with a notice, if they are not installed (strict:
    refuse)."""
    strict: bool = setting(False)
    """Fail instead of falling back to the native engine."""
    n: int = setting(1, at_least=1)
    """Responses per prompt."""
    temperature: float = setting(1.0, at_least=0)
    """Sampling temperature; training computes log-probs at the same temperature. 0 is greedy."""
    top_k: int = setting(-1, at_least=-1)
    """Sample from the k most likely tokens; -1 or 0: all."""
    top_p: float = setting(1.0, above=0, at_most=1)
    """Sample from the smallest set of tokens with this probability."""
    min_p: float = setting(0.0, at_least=0, at_most=1)
    """Sample from tokens whose probability is at least this fraction of the highest probability."""
    repetition_penalty: float = setting(1.0, above=0)
    """A value above 1 penalizes tokens that already occurred."""
    do_sample: bool = setting(True)
    """False: greedy decoding."""
    ignore_eos: bool = setting(False)
    """Continue after the end-of-sequence token."""
    stop: list[str] = inert([], "responses end at stop tokens; only generation reads stop strings")
    """Strings that end a response."""
    seed: int | None = link("trainer.seed")
    """Seed of sampling."""
    prompt_length: int = link("data.max_prompt_length", at_least=1)
    """Maximum prompt length of the engine, in tokens."""
    response_length: int = link("data.max_response_length", at_least=1)
    """Maximum response length of the engine, in tokens."""
    max_model_len: int | None = setting(None, at_least=1)
    """Maximum sequence length in tokens. Null: prompt_length + response_length."""
    dtype: str = setting("bfloat16", choices=("auto", "bfloat16", "float32", "float16"))
    """Precision of the engine's weights."""
    gpu_memory_utilization: float = setting(0.5, above=0, at_most=1)
    """Fraction of the device's memory for the engine's weights and KV cache."""
    enforce_eager: bool = setting(False)
    """Disable CUDA graphs."""
    cudagraph_capture_sizes: list[int] | None = setting(None)
    """Batch sizes with a CUDA graph. Null: the engine chooses."""
    free_cache_engine: bool = setting(True)
    """Free the KV cache during training. The native engine keeps it while the KV cache and everything else
    use at most a quarter of the GPU, because its CUDA graphs refer to it; on an OOM of the trainer it is
    freed."""
    enable_sleep_mode: bool = inert(True, "actor_rollout_ref.rollout.free_cache_engine decides")
    """Engine sleep mode."""
    tensor_model_parallel_size: int = setting(1, at_least=1)
    """Devices per engine."""
    data_parallel_size: int = setting(1, at_least=1)
    """Data-parallel size of one engine."""
    expert_parallel_size: int = setting(1, at_least=1)
    """Expert-parallel size of one engine."""
    nnodes: int = setting(0, at_least=0)
    """Dedicated rollout nodes, with one or more engines each (trainer.runtime=ray). 0: the engine shares the
    trainer's devices."""
    n_gpus_per_node: int = setting(1, at_least=1)
    """Devices per dedicated node."""
    pipeline_model_parallel_size: int = inert(1, "engines have no pipeline stages", at_least=1, at_most=1)
    """Pipeline-parallel size of one engine; only 1 is supported."""
    max_num_batched_tokens: int | None = setting(None, at_least=1)
    """Maximum tokens per engine step. Null: the engine chooses. The native engine prefills up to 32,768
    tokens per step on a GPU, because every pass costs tens of milliseconds of host time, and 8,192 on a
    CPU."""
    max_num_seqs: int = setting(1024, at_least=1)
    """Maximum number of concurrent sequences."""
    over_sampling: float = setting(1.0, at_least=1, at_most=2)
    """Start this many times the prompts of a step, train on the prompts whose samples finish first, and
    continue the others in the next step with its weights. No prompt is dropped: a step waits for prompts that
    are trainer.async_training.max_policy_age steps old. 1: each step samples its own prompts."""
    admission_order: str = setting("fcfs", choices=("fcfs", "longest_first"))
    """Order in which the prompts of a step are given to the engine. fcfs: as drawn. longest_first: rows with
    long responses in earlier epochs start first, which shortens the tail of a step with more samples than the
    engine runs at once. It does not change what is sampled."""
    enable_chunked_prefill: bool = setting(True)
    """Split the prefill of long prompts over engine steps."""
    enable_prefix_caching: bool = setting(True)
    """Reuse the KV cache of equal prefixes: the next turn of an agent prefills only the new tokens."""
    speculation: SpeculationConfig = section(SpeculationConfig)
    """Speculative decoding."""
    calculate_log_probs: bool = setting(True)
    """Return the log-probs of sampled tokens. Rollout correction and the mismatch metrics need them."""
    log_prob_micro_batch_size: int | None = setting(None, at_least=1)
    """Deprecated form of the next key, counted over all devices."""
    log_prob_micro_batch_size_per_gpu: int | None = link(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", at_least=1
    )
    """Sequences per forward pass when log-probs are recomputed. Null: derived."""
    log_prob_use_dynamic_bsz: bool = link("actor_rollout_ref.actor.use_dynamic_bsz")
    """Fill these forward passes by tokens instead of by sequences."""
    log_prob_max_token_len_per_gpu: int = link(
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", at_least=1
    )
    """Tokens per forward pass when log_prob_use_dynamic_bsz is on."""
    val_kwargs: ValKwargsConfig = section(ValKwargsConfig)
    """Sampling in validation."""
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)
    """Tools and multi-turn conversations."""
    agent: AgentConfig = section(AgentConfig)
    """Agent loops."""
    environment: str | None = setting(None)
    """Environment for rows without agent_name: gym:module:Class, gym:file.py:Class or gym:ID (the Gymnasium
    interface with text), openenv:URL (an OpenEnv server), or verifiers:NAME (an environment of verifiers).
    Its rewards are the scores; see docs/agents.md."""
    environment_kwargs: FreeForm = setting({})
    """Arguments of the environment. gym: arguments of the class; openenv: action_key, observation_key,
    action, reset; verifiers: fields of its EnvConfig."""
    engine_kwargs: FreeForm = setting({})
    """Arguments of the engine: {vllm: {...}, sglang: {...}}. docs/rollout_engines.md lists those that Strop
    adds."""
    checkpoint_engine: CheckpointEngineConfig = section(CheckpointEngineConfig)
    """Weight sync to engines in other processes."""
    scheduling_policy: str = setting("fcfs")
    """Order in which waiting requests start (vllm)."""
    logprobs_mode: str = inert("processed_logprobs", "log-probs are always those after temperature")
    """Which log-probs are returned."""
    mode: str = inert("async", _ASYNC)
    """sync or async."""
    load_format: str = inert("auto", "the engine takes the trainer's weights")
    """Load format of the engine's initial weights."""
    layered_summon: bool = inert(False, "weights are always moved in buckets")
    """Gather weights layer by layer."""
    disable_log_stats: bool = inert(True, "engine numbers are metrics of every step")
    """Disable the engine's own log."""
    use_fire_sampling: bool = inert(False, "not supported")
    """Sample the first token at a higher temperature."""
    over_sample_rate: float = inert(0.0, "use actor_rollout_ref.rollout.over_sampling, which drops nothing")
    """Fraction of requests that are dropped unfinished."""
    multi_stage_wake_up: bool = inert(False, "the engine wakes in one step")
    """Restore weights and KV cache separately."""
    skip_rollout: bool = inert(False, "use trainer.record_steps and strop replay")
    """Reuse saved rollouts."""
    skip_dump_dir: str = inert("/tmp/rollout_dump", "use trainer.record_steps and strop replay")
    """Folder of saved rollouts."""
    skip_tokenizer_init: bool = inert(True, "engines take and give token ids")
    """Start the engine without tokenizer."""
    enable_rollout_routing_replay: bool = inert(
        False, "actor_rollout_ref.actor.router_replay.mode=R3 decides"
    )
    """Return the experts that the router selected."""
    quantization: str | None = setting(None)
    """Precision of the weights that the engine samples with: fp8 or int8 (native), or a name that vLLM or
    SGLang supports. Null: that of dtype. The sampling policy then differs slightly from the trained one, so
    token-level importance weights are on unless algorithm.rollout_correction is set."""
    kv_cache_dtype: str = setting("auto")
    """Precision of the KV cache: auto (that of dtype), or fp8, which fits almost twice as many tokens; vLLM
    and SGLang support more names. With fp8, each head of each token has its own scale. Token-level importance
    weights are on by default, as with quantization."""
    quantization_config_file: str | None = inert(None, "8-bit weights need no settings")
    """Settings of the quantization."""
    trace: TraceConfig = section(TraceConfig)
    """Tracing of agent calls."""
    prometheus: PrometheusConfig = section(PrometheusConfig)
    """Prometheus metrics of engine servers."""
    layer_name_map: LayerNameMapConfig = section(LayerNameMapConfig)
    """Megatron weight names."""
    profiler: FreeForm = inert({}, "set actor_rollout_ref.profiler")
    """Profiling of the engine."""
