"""Rules of `actor_rollout_ref.rollout`: sampling, engines, replicas and weight sync."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from strop.config.derived import device_count, engine_name, missing_library
from strop.config.rules.findings import Findings, error, warning
from strop.registry import did_you_mean

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.ppo import PpoConfig
    from strop.config.schema.rollout import RolloutConfig

ROLLOUT = "actor_rollout_ref.rollout"
NATIVE_QUANTIZATION = ("fp8", "int8")
NATIVE_CACHE_DTYPES = ("auto", "fp8")


def sampling(loaded: Loaded[PpoConfig]) -> Findings:
    """Greedy decoding and several samples per prompt exclude each other."""
    rollout = loaded.config.actor_rollout_ref.rollout
    greedy = rollout.temperature == 0 or not rollout.do_sample
    if greedy and rollout.n > 1:
        yield error(
            f"{ROLLOUT}.n",
            f"{rollout.n} samples per prompt with temperature={rollout.temperature:g} and "
            f"do_sample={str(rollout.do_sample).lower()} would all be the same. Set {ROLLOUT}.temperature "
            f"above 0 and {ROLLOUT}.do_sample=true.",
        )
    val = rollout.val_kwargs
    if val.temperature == 0 and (val.n > 1 or val.do_sample):
        yield warning(
            f"{ROLLOUT}.val_kwargs",
            f"temperature=0 is greedy, so n={val.n} and do_sample={str(val.do_sample).lower()} change "
            f"nothing. Set {ROLLOUT}.val_kwargs.temperature to sample.",
        )
    if val.temperature > 0 and not val.do_sample:
        yield warning(
            f"{ROLLOUT}.val_kwargs.do_sample",
            f"false, but the temperature of validation is {val.temperature:g}, which samples all the same. "
            f"Set it to true, or {ROLLOUT}.val_kwargs.temperature=0 for greedy.",
        )


def context_length(loaded: Loaded[PpoConfig]) -> Findings:
    """max_model_len holds a whole prompt and a whole response."""
    rollout = loaded.config.actor_rollout_ref.rollout
    wanted = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < wanted:
        yield warning(
            f"{ROLLOUT}.max_model_len",
            f"{rollout.max_model_len} is less than prompt_length + response_length = {wanted}: long prompts "
            "get less.",
        )


TURN_CREDIT = ("grpo", "grpo_vectorized", "group_norm", "dr_grpo", "rloo", "rloo_vectorized")
"""Estimators of sums of rewards that compare each prompt by itself."""


def credit_of_turns(loaded: Loaded[PpoConfig]) -> Findings:
    """rollout.agent.credit=turn needs an estimator whose advantage is that of a sum of rewards."""
    config = loaded.config
    name = config.algorithm.adv_estimator
    if config.actor_rollout_ref.rollout.agent.credit != "turn":
        return
    if name not in TURN_CREDIT:
        yield error(
            f"{ROLLOUT}.agent.credit",
            f"turn is defined for {', '.join(TURN_CREDIT)}, and algorithm.adv_estimator={name}. Estimators "
            "of tokens (gae, reinforce) give each turn what follows it anyway: set "
            f"{ROLLOUT}.agent.credit=shared.",
        )
    if config.algorithm.compat == "openrlhf":
        yield error(
            f"{ROLLOUT}.agent.credit",
            "turn needs rewards of single turns, and with algorithm.compat=openrlhf the baseline is "
            f"subtracted from the sum before. Set {ROLLOUT}.agent.credit=shared, or another "
            "algorithm.compat.",
        )


def outside_agents(loaded: Loaded[PpoConfig]) -> Findings:
    """Agents from outside (rollout.agent.command)."""
    agent = loaded.config.actor_rollout_ref.rollout.agent
    key = f"{ROLLOUT}.agent"
    if agent.command is None:
        for name in ("service", "players"):
            if getattr(agent, name):
                yield error(f"{key}.{name}", f"has no effect without a program. Set {key}.command.")
        return
    if agent.players and (len(agent.players) < 2 or len(set(agent.players)) < len(agent.players)):
        yield error(f"{key}.players", f"{agent.players} must be two or more different names.")
    if agent.players and agent.reward != "file":
        yield error(
            f"{key}.players",
            f"each player needs a score, and reward={agent.reward} gives one for the episode. Set "
            f"{key}.reward=file.",
        )


def replicas(loaded: Loaded[PpoConfig]) -> Findings:
    """Engines on their own machines (rollout.nnodes)."""
    config = loaded.config
    rollout = config.actor_rollout_ref.rollout
    if not rollout.nnodes:
        return
    key = f"{ROLLOUT}.nnodes"
    if config.trainer.runtime == "local":
        yield error(
            key, f"{rollout.nnodes} machines that only sample need trainer.runtime=ray (or auto), not local."
        )
    native = engine_name(rollout) == "native"
    path = str(config.actor_rollout_ref.model.path)
    if (path.endswith(".gguf") or path.lower() == "smollm2-135m") and not native:
        yield error(
            key,
            f"{rollout.name} replicas read a Hugging Face folder, but {path} is a GGUF file. Set "
            f"{ROLLOUT}.name=native, or convert the model first.",
        )
    size = devices_per_engine(rollout)
    if size > 1 and native:
        yield error(
            key,
            "native replicas have one device each, but tensor_model_parallel_size x data_parallel_size is "
            f"{size}. Set {ROLLOUT}.tensor_model_parallel_size=1 and {ROLLOUT}.data_parallel_size=1, or "
            f"{ROLLOUT}.name=vllm.",
        )
    elif rollout.n_gpus_per_node % size:
        yield error(
            key,
            f"an engine of {size} devices does not fit {ROLLOUT}.n_gpus_per_node={rollout.n_gpus_per_node}.",
        )


def devices_per_engine(rollout: RolloutConfig) -> int:
    """Devices of one engine: tensor parallel size times data parallel size."""
    return rollout.tensor_model_parallel_size * rollout.data_parallel_size


def weight_transport(loaded: Loaded[PpoConfig]) -> Findings:
    """checkpoint_engine moves weights to replicas; it has no effect without them."""
    rollout = loaded.config.actor_rollout_ref.rollout
    path = f"{ROLLOUT}.checkpoint_engine"
    settings = rollout.checkpoint_engine
    if not rollout.nnodes:
        if settings.backend != "naive" and f"{path}.backend" in loaded.set_by_user:
            yield warning(
                f"{path}.backend",
                f"{settings.backend} has no effect without {ROLLOUT}.nnodes: the engine is on the trainer's "
                "machines.",
            )
        return
    if settings.backend in ("nixl", "hccl"):
        yield error(
            f"{path}.backend",
            f"{settings.backend} is not there. Set nccl (a broadcast; by gloo between machines without "
            "CUDA), naive (Ray's object store) or file (a folder that all machines see).",
        )
    for name, value in settings.engine_kwargs.items():
        if isinstance(value, Mapping):  # verl's, by transport
            yield warning(
                f"{path}.engine_kwargs.{name}",
                f"no effect: the transports have no such settings. There is {path}.engine_kwargs.folder, for "
                f"{path}.backend=file.",
            )
        elif name != "folder":
            yield error(
                f"{path}.engine_kwargs",
                f"unknown setting {name!r}. There is folder, for {path}.backend=file.",
            )
        elif settings.backend != "file":
            yield warning(
                f"{path}.engine_kwargs",
                f"folder has no effect with backend={settings.backend}. Set {path}.backend=file.",
            )


def engine_size(loaded: Loaded[PpoConfig]) -> Findings:
    """The devices that sample divide into whole engines."""
    config = loaded.config
    rollout = config.actor_rollout_ref.rollout
    devices = device_count(rollout) if rollout.nnodes else device_count(config.trainer)
    size = devices_per_engine(rollout)
    if devices % size:
        yield error(
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"{devices} devices cannot be divided into engines of {size}. Set a divisor of {devices}.",
        )
    if rollout.expert_parallel_size > 1 and rollout.expert_parallel_size != size:
        yield error(
            f"{ROLLOUT}.expert_parallel_size",
            f"{rollout.expert_parallel_size} must equal tensor_model_parallel_size x data_parallel_size = "
            f"{size}.",
        )


def quantization(loaded: Loaded[PpoConfig]) -> Findings:
    """Which engines and devices sample with 8-bit weights."""
    config = loaded.config
    yield from quantized_engine(ROLLOUT, config.actor_rollout_ref.rollout, config.trainer.device)


def quantized_engine(path: str, rollout: RolloutConfig, device: str) -> Findings:
    """The same for the rollout section at `path`. Values for vllm and sglang are checked by them."""
    yield from _cache_precision(path, rollout)
    value = rollout.quantization
    key = f"{path}.quantization"
    engine = engine_name(rollout)
    if value is None or engine not in ("native", "hf"):
        return
    if engine == "hf":
        yield error(
            key, f"{value}, but {path}.name=hf samples from the weights as they are. Set {path}.name=native."
        )
    elif value not in NATIVE_QUANTIZATION:
        hint = did_you_mean(value, NATIVE_QUANTIZATION)
        yield error(key, f"{value!r} must be fp8 or int8 with the native engine.{hint}")
    elif rollout.tensor_model_parallel_size > 1:
        yield error(
            key,
            f"{value} with tensor_model_parallel_size={rollout.tensor_model_parallel_size}: the native "
            f"engine quantises whole weights only. Set {path}.tensor_model_parallel_size=1, or {key}=null.",
        )
    elif value == "fp8" and device == "cpu":
        yield error(
            key,
            "fp8 needs a GPU with compute capability 8.9 or more (H100, L4, RTX 40), but trainer.device=cpu. "
            f"Set {key}=int8 or null.",
        )


def _cache_precision(path: str, rollout: RolloutConfig) -> Findings:
    """Which engines have a KV cache of 8 bits."""
    key = f"{path}.kv_cache_dtype"
    value = rollout.kv_cache_dtype
    engine = engine_name(rollout)
    if engine == "hf" and value != "auto":
        message = f"{value}, but {path}.name=hf has the KV cache of transformers. Set {path}.name=native."
        yield error(key, message)
    if engine == "native" and value not in NATIVE_CACHE_DTYPES:
        hint = did_you_mean(value, NATIVE_CACHE_DTYPES)
        yield error(key, f"{value!r} must be auto or fp8 with the native engine.{hint}")


def engine_library(loaded: Loaded[PpoConfig]) -> Findings:
    """The library of the engine is installed, or the native engine replaces it."""
    yield from installed_engine(ROLLOUT, loaded.config.actor_rollout_ref.rollout)


def installed_engine(path: str, rollout: RolloutConfig) -> Findings:
    """The same for the rollout section at `path`."""
    library = missing_library(rollout)
    if library is None:
        return
    advice = (
        f"Install 'strop[{rollout.name}]', or name the interpreter of an environment that has it in "
        f"{path}.engine_kwargs.{rollout.name}.python, or set {path}.name=native."
    )
    if rollout.strict:
        message = f"{library} is not installed and {path}.strict=true. {advice}"
        yield error(f"{path}.name", message, about_machine=True)
    else:
        yield warning(
            f"{path}.name",
            f"{library} is not installed; the native engine samples instead ({path}.strict=true would "
            f"refuse). {advice}",
        )


def environment(loaded: Loaded[PpoConfig]) -> Findings:
    """Rows are played by one agent: an environment, or a program."""
    rollout = loaded.config.actor_rollout_ref.rollout
    if rollout.environment is not None and rollout.agent.command is not None:
        yield error(
            "actor_rollout_ref.rollout.environment",
            f"{rollout.environment}, but {ROLLOUT}.agent.command={rollout.agent.command!r} plays the rows. "
            "Unset one of them.",
        )
    if rollout.environment is None and rollout.environment_kwargs:
        yield warning(
            "actor_rollout_ref.rollout.environment_kwargs",
            f"{dict(rollout.environment_kwargs)} has no effect without {ROLLOUT}.environment.",
        )


def speculation(loaded: Loaded[PpoConfig]) -> Findings:
    """Speculative decoding is a part of the native engine, which guesses from earlier tokens only."""
    yield from possible_speculation(ROLLOUT, loaded.config.actor_rollout_ref.rollout)


def possible_speculation(section: str, rollout: RolloutConfig) -> Findings:
    """The same for the rollout section at the path `section`."""
    path = f"{section}.speculation"
    settings = rollout.speculation
    if settings.draft_model is not None and rollout.tensor_model_parallel_size > 1:
        yield error(
            f"{path}.draft_model",
            f"{settings.draft_model} with tensor_model_parallel_size={rollout.tensor_model_parallel_size}: a "
            f"draft model drafts for a policy on one device. Set {section}.tensor_model_parallel_size=1, or "
            "null.",
        )
    if settings.draft_model is not None and settings.enable is False:
        yield warning(
            f"{path}.draft_model",
            f"{settings.draft_model} has no effect with enable=false. Set {path}.enable=auto or true.",
        )
    if settings.mtp and settings.draft_model is not None:
        yield error(
            f"{path}.mtp",
            f"true and draft_model={settings.draft_model}: one of the two guesses. Set it to false, or "
            f"{path}.draft_model=null.",
        )
    if settings.mtp and rollout.tensor_model_parallel_size > 1:
        yield error(
            f"{path}.mtp",
            f"true with tensor_model_parallel_size={rollout.tensor_model_parallel_size}: a multi-token "
            "prediction head drafts for a policy on one device. Set "
            f"{section}.tensor_model_parallel_size=1, or false.",
        )
    if settings.mtp and settings.enable is False:
        message = f"true has no effect with enable=false. Set {path}.enable=auto or true."
        yield warning(f"{path}.mtp", message)
    if settings.min_match > settings.max_match:
        yield error(
            f"{path}.min_match",
            f"{settings.min_match} tokens can never match, because only max_match={settings.max_match} are "
            f"compared. Set it to at most {settings.max_match}, or {path}.max_match higher.",
        )
    engine = engine_name(rollout)
    if settings.enable is True and engine != "native":
        yield error(
            f"{path}.enable",
            f"true has no effect with {section}.name={engine}. Set {section}.name=native, or "
            f"{path}.enable=auto.",
        )
