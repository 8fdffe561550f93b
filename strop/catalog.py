"""The catalog of all built-in choices (estimators, losses, scorers, engines ...), and what each of them
needs.

Entries are import paths, so that importing this file is cheap: `strop check` knows that `gae` needs a critic
without importing torch. The functions themselves are undecorated.
"""

from __future__ import annotations

from strop.registry import Registry

# --- Advantage estimators -----------------------------------------------------------------------------------
# needs: what the batch must contain in addition to rewards and mask: "values" (so a critic exists), "group"
# (several samples of one prompt are compared), "greedy_baseline" (one greedy rollout per prompt), "entropy"
# and "sum_pi_squared" (from the old log-prob pass), "old_log_probs", "reward_components". min_group: the
# smallest rollout.n that makes sense.
# score_baseline: how its baseline can be taken from the scores before a KL penalty is charged: "plain", or
# "whitened" where the result is normalised over the batch afterwards; None: it needs the rewards of tokens.
ADVANTAGES = Registry("advantage estimator", facts={"needs": (), "min_group": 1, "score_baseline": None})
_advantages = "strop.algorithms.advantages"
ADVANTAGES.declare("gae", f"{_advantages}.returns:gae", needs=("values",))
ADVANTAGES.declare("reinforce", f"{_advantages}.returns:reinforce")
ADVANTAGES.declare("reinforce_plus_plus", f"{_advantages}.returns:reinforce_plus_plus")
ADVANTAGES.declare("remax", f"{_advantages}.returns:remax", needs=("greedy_baseline",))
_group = ("group",)
for _name in ("grpo", "grpo_vectorized", "grpo_passk", "dr_grpo", "rloo", "rloo_vectorized"):
    ADVANTAGES.declare(
        _name, f"{_advantages}.outcome:{_name}", needs=_group, min_group=2, score_baseline="plain"
    )
ADVANTAGES.declare("opo", f"{_advantages}.outcome:opo", needs=_group, min_group=2)
ADVANTAGES.declare("gpg", f"{_advantages}.outcome:gpg", needs=_group, min_group=2, score_baseline="plain")
ADVANTAGES.declare("gdpo", f"{_advantages}.outcome:gdpo", needs=("group", "reward_components"), min_group=2)
_centred = f"{_advantages}.outcome:reinforce_plus_plus_baseline"
ADVANTAGES.declare(
    "reinforce_plus_plus_baseline", _centred, needs=_group, min_group=2, score_baseline="whitened"
)
for _name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
    _needs = ("group", "old_log_probs", "sum_pi_squared")
    ADVANTAGES.declare(_name, f"{_advantages}.returns:{_name}", needs=_needs, min_group=2)
# OpenRLHF's names of the same estimators.
ADVANTAGES.declare(
    "group_norm", f"{_advantages}.outcome:grpo", needs=_group, min_group=2, score_baseline="plain"
)
ADVANTAGES.declare("reinforce_baseline", _centred, needs=_group, min_group=2, score_baseline="whitened")
ADVANTAGES.declare("flash_reinforce", f"{_advantages}.outcome:flash_reinforce", score_baseline="plain")

# --- Policy losses ------------------------------------------------------------------------------------------
# aggregation: the only mode the formula is defined for, or None when `loss_agg_mode` decides; proportional:
# where the advantages of a row are 0, its loss and gradient are 0; penalty: what it adds for a distance to
# the old policy, also where the advantages are 0; clips: it takes clip_low and clip_high.
POLICY_LOSSES = Registry(
    "policy loss", facts={"aggregation": None, "proportional": False, "penalty": None, "clips": False}
)
_losses = "strop.algorithms.policy_losses"
POLICY_LOSSES.declare("vanilla", f"{_losses}.clipped:vanilla", proportional=True, clips=True)
POLICY_LOSSES.declare("dppo_tv", f"{_losses}.clipped:dppo_tv", proportional=True, clips=True)
POLICY_LOSSES.declare("dppo_kl", f"{_losses}.clipped:dppo_kl", proportional=True, clips=True)
POLICY_LOSSES.declare("gspo", f"{_losses}.sequence:gspo", proportional=True, clips=True)
POLICY_LOSSES.declare(
    "luspo", f"{_losses}.sequence:gspo", aggregation="seq-mean-token-sum", proportional=True, clips=True
)
POLICY_LOSSES.declare(
    "geo_mean",
    f"{_losses}.sequence:geo_mean",
    aggregation="seq-mean-token-mean",
    proportional=True,
    clips=True,
)
POLICY_LOSSES.declare("cispo", f"{_losses}.smooth:cispo", proportional=True, clips=True)
POLICY_LOSSES.declare("sapo", f"{_losses}.smooth:sapo", aggregation="seq-mean-token-mean", proportional=True)
POLICY_LOSSES.declare("vespo", f"{_losses}.smooth:vespo", proportional=True)
POLICY_LOSSES.declare("clip_cov", f"{_losses}.covariance:clip_cov", clips=True)
POLICY_LOSSES.declare(
    "kl_cov", f"{_losses}.covariance:kl_cov", penalty="ppo_kl_coef, on tokens that it chooses by advantage"
)
POLICY_LOSSES.declare("gpg", f"{_losses}.reinforce:gpg", proportional=True)
POLICY_LOSSES.declare("reinforce", f"{_losses}.reinforce:reinforce", proportional=True)
POLICY_LOSSES.declare("dro", f"{_losses}.reinforce:dro", penalty="dro_beta, on all tokens")
POLICY_LOSSES.declare("bypass_mode", f"{_losses}.reinforce:bypass_mode", proportional=True, clips=True)

# --- Estimators of the KL divergence to the reference -------------------------------------------------------
# Names with a `+` have the value of the name before it and the gradient of k2.
KL_ESTIMATORS = Registry("KL estimator")
_kl = {"kl": "k1", "k1": "k1", "abs": "absolute", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
for _name, _target in _kl.items():
    KL_ESTIMATORS.declare(_name, f"strop.algorithms.kl:{_target}")
    KL_ESTIMATORS.declare(f"{_name}+", f"strop.algorithms.kl:{_target}")

# --- Ways to reduce a per-token loss to a number ------------------------------------------------------------
AGGREGATIONS = Registry("loss aggregation")
AGGREGATIONS.declare("token-mean", "strop.algorithms.aggregation:token_mean")
AGGREGATIONS.declare("token-sum", "strop.algorithms.aggregation:token_sum")
AGGREGATIONS.declare("seq-mean-token-sum", "strop.algorithms.aggregation:sequence_mean_token_sum")
AGGREGATIONS.declare("seq-mean-token-mean", "strop.algorithms.aggregation:sequence_mean_token_mean")
AGGREGATIONS.declare("seq-mean-token-sum-norm", "strop.algorithms.aggregation:sequence_mean_token_sum_norm")

# --- Learning-rate schedules --------------------------------------------------------------------------------
SCHEDULES = Registry("learning-rate schedule")
for _name in ("constant", "cosine", "linear", "wsd"):
    SCHEDULES.declare(_name, f"strop.backends.optimizer:{_name}")

# --- Pairwise and supervised losses -------------------------------------------------------------------------
# needs: "scores" (of a reward model), "log_probs" (of the policy, summed per answer), "reference" (the same
# of a frozen copy), "chosen_nll" (the mean negative log-prob of the chosen answer), "labels" (single answers,
# good or bad, instead of pairs). length_normalised: by default, log-probs of an answer are averaged over its
# tokens. terms: further settings it knows.
PREFERENCE_LOSSES = Registry("preference loss", facts={"needs": (), "length_normalised": False, "terms": ()})
PREFERENCE_LOSSES.declare(
    "sigmoid", "strop.algorithms.losses:reward_sigmoid", needs=("scores",), terms=("margin",)
)
PREFERENCE_LOSSES.declare("logexp", "strop.algorithms.losses:reward_logexp", needs=("scores",))
_policy = ("log_probs", "reference")
_terms = ("label_smoothing", "target_margin", "nll_coef")
PREFERENCE_LOSSES.declare("dpo", "strop.algorithms.losses:dpo", needs=_policy, terms=_terms)
PREFERENCE_LOSSES.declare(
    "ipo", "strop.algorithms.losses:ipo", needs=_policy, length_normalised=True, terms=("nll_coef",)
)
PREFERENCE_LOSSES.declare(
    "simpo",
    "strop.algorithms.losses:simpo",
    needs=("log_probs",),
    length_normalised=True,
    terms=("target_margin",),
)

PREFERENCE_LOSSES.declare(
    "orpo", "strop.algorithms.losses:orpo", needs=("log_probs", "chosen_nll"), length_normalised=True
)
PREFERENCE_LOSSES.declare(
    "kto",
    "strop.algorithms.losses:kto",
    needs=(*_policy, "labels"),
    terms=("desirable_weight", "undesirable_weight"),
)

# --- Rule scorers -------------------------------------------------------------------------------------------
# sources: shell-style patterns of `data_source` that select this scorer; slow: it can hang (sympy, regex), so
# it runs in a worker process with a timeout; vote: extracts the answer of a response, for majority votes (not
# needed if the scorer returns `pred`); runs_programs: it waits for other processes, so several calls run
# concurrently, with `sandbox` set to reward_model.sandbox_fusion; needs_truth: a row without a ground truth
# cannot be scored by it.
SCORERS = Registry(
    "scorer",
    facts={
        "sources": (),
        "slow": False,
        "vote": None,
        "runs_programs": False,
        "needs_truth": True,
        "compat": (),
    },
)
_VOTES = "strop.rewards.votes"
_RULES = "strop.rewards.rules"
SCORERS.declare(
    "gsm8k",
    f"{_RULES}.gsm8k:compute_score",
    sources=("openai/gsm8k", "gsm8k"),
    vote=f"{_VOTES}:number",
    compat=("verl",),
)
SCORERS.declare(
    "math_boxed",
    f"{_RULES}.math_boxed:compute_score",
    sources=("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
    vote=f"{_VOTES}:boxed",
    compat=("verl",),
)
SCORERS.declare(
    "math_dapo",
    f"{_RULES}.math_dapo:compute_score",
    sources=("math_dapo", "math", "math_dapo_reasoning", "aime*"),
    compat=("verl",),
)
SCORERS.declare(
    "math_symbolic",
    f"{_RULES}.math_symbolic:compute_score",
    sources=("numina_*",),
    slow=True,
    compat=("verl",),
)
SCORERS.declare(
    "geo3k",
    f"{_RULES}.geo3k:compute_score",
    sources=("hiyouga/geometry3k",),
    slow=True,
    vote=f"{_VOTES}:boxed",
    compat=("verl",),
)
SCORERS.declare(
    "search_qa", f"{_RULES}.search_qa:compute_score", sources=("searchR1_*",), vote=f"{_VOTES}:tagged"
)
SCORERS.declare(
    "multiple_choice",
    f"{_RULES}.multiple_choice:compute_score",
    sources=("cais/mmlu*", "TIGER-Lab/MMLU-Pro", "Idavidrein/gpqa*", "mmlu*", "gpqa*"),
    vote=f"{_VOTES}:letter",
)
SCORERS.declare(
    "code",
    f"{_RULES}.code:compute_score",
    sources=("codecontests", "apps", "codeforces", "taco"),
    runs_programs=True,
)
SCORERS.declare("format", f"{_RULES}.format:compute_score", needs_truth=False)
SCORERS.declare("arithmetic", f"{_RULES}.arithmetic:compute_score", sources=("arithmetic*",))

# --- Data sets as they are published ------------------------------------------------------------------------
# (row, split, index) -> a row for training. columns: what the published row must have; splits: what `strop
# data` writes.
DATASETS = Registry("data set", facts={"columns": (), "splits": ("train", "test")})
DATASETS.declare("gsm8k", "strop.data.make:gsm8k", columns=("question", "answer"))
DATASETS.declare("math", "strop.data.make:math", columns=("problem", "solution"))
DATASETS.declare("math500", "strop.data.make:math500", columns=("problem", "answer"), splits=("test",))
DATASETS.declare("aime", "strop.data.make:aime", columns=("Problem", "Answer"), splits=("test",))
DATASETS.declare("geo3k", "strop.data.geo3k:geo3k", columns=("problem", "answer"))
DATASETS.declare("hh_rlhf", "strop.data.make:hh_rlhf", columns=("chosen", "rejected"))

# --- Trackers -----------------------------------------------------------------------------------------------
# library: what must be installed, an extra of the same name.
TRACKERS = Registry("tracker", facts={"library": None})
TRACKERS.declare("console", "strop.run.trackers.console:ConsoleTracker")
TRACKERS.declare("file", "strop.run.trackers.files:JsonlTracker")
TRACKERS.declare("jsonl", "strop.run.trackers.files:JsonlTracker")
TRACKERS.declare("csv", "strop.run.trackers.files:CsvTracker")
TRACKERS.declare("tensorboard", "strop.run.trackers.tensorboard:TensorboardTracker")
TRACKERS.declare("wandb", "strop.run.trackers.wandb:WandbTracker", library="wandb")
TRACKERS.declare("tracking", "strop.run.trackers.wandb:WandbTracker", library="wandb")  # verl's old name
TRACKERS.declare("mlflow", "strop.run.trackers.mlflow:MlflowTracker", library="mlflow")
TRACKERS.declare("swanlab", "strop.run.trackers.swanlab:SwanlabTracker", library="swanlab")
TRACKERS.declare("trackio", "strop.run.trackers.trackio:TrackioTracker", library="trackio")

# --- Rollout engines ----------------------------------------------------------------------------------------
# settings: the keys of the `rollout` section that the engine takes. library: the package that must be
# installed, unless rollout.engine_kwargs names another interpreter or a server that has it. own_weights: the
# engine holds a copy of the weights, so each update needs a weight sync; other engines sample from the
# trainer's module. fed: `generate` accepts further requests while it runs, and calls `Request.on_done`.
ENGINES = Registry(
    "rollout engine",
    facts={"settings": (), "library": None, "own_weights": False, "fed": False, "images": True},
)
_shared = ("max_model_len", "max_num_seqs", "seed")
ENGINES.declare("hf", "strop.rollout.hf:HfEngine", settings=_shared)
ENGINES.declare(
    "native",
    "strop.rollout.native_check:checked_engine",
    fed=True,
    settings=(
        *_shared,
        "max_num_batched_tokens",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "gpu_memory_utilization",
        "cache_bytes",
        "enforce_eager",
        "speculation",
        "quantization",
        "kv_cache_dtype",
        "record_experts",
    ),
)
_outside = (
    "dtype",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "tensor_model_parallel_size",
    "data_parallel_size",
    "expert_parallel_size",
    "free_cache_engine",
    "bucket_megabytes",
    "load_format",
    "quantization",
    "kv_cache_dtype",
    "record_experts",
    "engine_kwargs",
)
ENGINES.declare(
    "vllm",
    "strop.rollout.vllm.engine:VllmEngine",
    library="vllm",
    own_weights=True,
    images=True,
    settings=(
        *_shared,
        *_outside,
        "max_num_batched_tokens",
        "enable_chunked_prefill",
        "enforce_eager",
        "cudagraph_capture_sizes",
        "scheduling_policy",
    ),
)
ENGINES.declare(
    "sglang",
    "strop.rollout.sglang:SglangEngine",
    library="sglang",
    own_weights=True,
    images=False,
    settings=(*_shared, *_outside),
)

# --- Formats of tool calls ----------------------------------------------------------------------------------
# reads_template: the parser is made from the tokenizer, whose chat template shows the format.
TOOL_PARSERS = Registry("format of tool calls", facts={"reads_template": False})
TOOL_PARSERS.declare("hermes", "strop.agents.parsers.json_formats:HermesParser")
TOOL_PARSERS.declare("llama3_json", "strop.agents.parsers.json_formats:Llama3JsonParser")
TOOL_PARSERS.declare("qwen", "strop.agents.parsers.qwen:QwenParser")
TOOL_PARSERS.declare("mistral", "strop.agents.parsers.json_formats:MistralParser")
TOOL_PARSERS.declare("pythonic", "strop.agents.parsers.pythonic:PythonicParser")
TOOL_PARSERS.declare("gpt-oss", "strop.agents.parsers.harmony:HarmonyParser")
for _name in ("template", "auto"):
    TOOL_PARSERS.declare(_name, "strop.agents.parsers.template:template_parser", reads_template=True)

# --- Agent loops --------------------------------------------------------------------------------------------
AGENT_LOOPS = Registry("agent loop")
AGENT_LOOPS.declare("single_turn_agent", "strop.agents.loops:SingleTurnAgent")
AGENT_LOOPS.declare("tool_agent", "strop.agents.tool_agent:ToolAgent")
AGENT_LOOPS.declare("react_agent", "strop.agents.tool_agent:ReactAgent")

# --- Reward managers ----------------------------------------------------------------------------------------
# stores_acc: a scorer's plain number is also reported as `acc`; takes_lists: the function is called once,
# with lists.
REWARD_MANAGERS = Registry("reward manager", facts={"stores_acc": False, "takes_lists": False})
_managers = "strop.rewards.managers"
REWARD_MANAGERS.declare("naive", f"{_managers}:NaiveRewardManager")
REWARD_MANAGERS.declare("prime", f"{_managers}:PrimeRewardManager")
REWARD_MANAGERS.declare("batch", f"{_managers}:BatchRewardManager", stores_acc=True, takes_lists=True)
REWARD_MANAGERS.declare("dapo", f"{_managers}:NaiveRewardManager", stores_acc=True)
REWARD_MANAGERS.declare("gdpo", f"{_managers}:NaiveRewardManager", stores_acc=True)
REWARD_MANAGERS.declare("rate_limited", f"{_managers}:RateLimitedRewardManager")
REWARD_MANAGERS.declare("remote", f"{_managers}:PrimeRewardManager")
