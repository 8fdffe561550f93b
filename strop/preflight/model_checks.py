"""Checks that several programs share: tokenizer, model folder, file of a reward function."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, cast

from strop.config.derived import has_critic
from strop.config.policies import KEY, agent_policies, other_size
from strop.config.rules import ConfigFinding, error, warning
from strop.config.rules.router_replay import MODE
from strop.config.schema.distillation import TOPK, DistillationConfig
from strop.config.schema.model import FsdpConfig, ModelConfig
from strop.config.schema.ppo import PpoConfig
from strop.registry import load_attribute

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from strop.config.schema.actor import ActorRolloutRefConfig
    from strop.config.schema.rollout import RolloutConfig

EVERY_ROW_UP_TO = 50_000
"""Files of at most so many rows are measured whole when one long prompt would stop the run."""


def count_file_rows(paths: str | list[str], key: str) -> tuple[int | None, list[ConfigFinding]]:
    """The rows of all files; None and a finding if they cannot be read."""
    from strop.data.files import count_rows

    try:
        return count_rows(paths), []
    except (ValueError, OSError) as problem:
        return None, [error(key, str(problem))]


def local_model_config(model: ModelConfig) -> PreTrainedConfig | None:
    """The text part of the model's config.json; None for a model that is not on this machine."""
    from strop.models.load import load_config, resolve

    source = resolve(model.path)
    if not Path(source.name).is_dir():
        return None
    config: PreTrainedConfig = load_config(
        source,
        override=model.override_config,
        config_path=model.hf_config_path,
        trust_remote_code=model.trust_remote_code,
    ).get_text_config()
    return config


def lora_findings(model: ModelConfig, key: str) -> list[ConfigFinding]:
    """An error if lora_adapter_path holds no adapter that can be trained, or if lora_rank is larger than
    every matrix of a model on this machine. In a decoder one side of each matrix is the hidden size or
    smaller."""
    from strop.models.adapter_files import check_adapter_folder
    from strop.models.lora import rank_message

    if path := model.lora_adapter_path:
        try:
            check_adapter_folder(Path(path).expanduser(), path, only_lora=True)
        except (ValueError, OSError) as problem:
            named = str(problem).removeprefix(f"lora_adapter_path={path!r} ")
            return [error(f"{key}.lora_adapter_path", named)]
    if model.lora_rank <= 0 or model.lora_adapter_path:
        return []
    try:
        config = local_model_config(model)
    except ValueError as problem:
        return [error(f"{key}.path", str(problem))]
    hidden = getattr(config, "hidden_size", None)
    if not isinstance(hidden, int) or model.lora_rank <= hidden:
        return []
    return [error(f"{key}.lora_rank", rank_message(model.lora_rank, hidden, f"its hidden size is {hidden}"))]


def policy_findings(group: ActorRolloutRefConfig) -> list[ConfigFinding]:
    """Errors for adapters of rollout.agent.policies that are not there or do not fit to the run."""
    from strop.shared.adapter_folders import read_adapter_size

    found = []
    for policy in agent_policies(group.rollout.agent):
        if policy.path is None:
            continue
        try:
            given = read_adapter_size(Path(policy.path).expanduser())
        except ValueError as problem:
            found.append(error(f"{KEY}.{policy.name}.path", str(problem)))
            continue
        misfit = other_size(policy, given, (group.model.lora_rank, group.model.lora_alpha))
        if misfit is not None and group.model.lora_adapter_path is None:
            found.append(error(f"{KEY}.{policy.name}.path", misfit))
    return found


def expert_findings(model: ModelConfig, fsdp: FsdpConfig, key: str) -> list[ConfigFinding]:
    """An error if the experts of a model on this machine cannot be divided as its fsdp_config says. `key`:
    that of fsdp_config."""
    from strop.backends.fsdp.experts import refuse_experts

    if fsdp.expert_parallel_size == 1:
        return []
    try:
        config = local_model_config(model)
    except ValueError as problem:
        return [error(key, str(problem))]
    if config is None:
        return []
    refusal = refuse_experts(config, fsdp.expert_parallel_size)
    return [] if refusal is None else [error(f"{key}.expert_parallel_size", refusal)]


def replay_findings(config: PpoConfig) -> list[ConfigFinding]:
    """An error if router replay is set and the model on this machine has no experts."""
    from strop.backends.fsdp.experts import expert_count

    mode = config.actor_rollout_ref.actor.router_replay.mode
    if mode == "disabled":
        return []
    try:
        known = local_model_config(config.actor_rollout_ref.model)
    except ValueError as problem:
        return [error(MODE, str(problem))]
    if known is None or expert_count(known):
        return []
    return [error(MODE, f"{mode}, but {known.model_type} has no experts. Set disabled.")]


def ppo_expert_findings(config: PpoConfig) -> list[ConfigFinding]:
    """The same for actor, reference and critic, and what router replay needs."""
    group = config.actor_rollout_ref
    found = replay_findings(config)
    for name, section in (("actor", group.actor), ("ref", group.ref)):
        key = f"actor_rollout_ref.{name}.fsdp_config"
        found += expert_findings(group.model, section.fsdp_config, key)
    if has_critic(config):
        critic = config.critic.model
        found += expert_findings(critic, critic.fsdp_config, "critic.model.fsdp_config")
    return found


def native_obstacle(config: PreTrainedConfig) -> str | None:
    """Why the native engine cannot sample from such a model, measured on a small one; None if it can, or if
    the model cannot be made small."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from strop.models.layouts.check import FAILURES
    from strop.rollout.native_check import sampling_complaint

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    kind = cast("type[PreTrainedModel]", MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    try:
        return sampling_complaint(kind, config)
    except FAILURES:
        return None


def head_findings(key: str, path: str | None, wanted: str) -> list[ConfigFinding]:
    """Errors if the folder holds another kind of model than `wanted`, or a file in it is damaged."""
    from strop.models.files.weights import check_weights
    from strop.models.generation.settings import read_generation_config
    from strop.models.heads import wrong_head
    from strop.models.load import resolve

    source = resolve(path)
    if source.gguf_file is not None or not Path(source.name).is_dir():
        return []
    problem = wrong_head(Path(source.name), wanted=wanted)
    if problem is not None:
        return [error(key, f"{path}: {problem}")]
    try:
        check_weights(Path(source.name))
        if wanted == "language":
            read_generation_config(source.name)
    except ValueError as damage:
        return [error(key, str(damage))]
    return []


def find_tokenizer(
    model: ModelConfig, key: str = "actor_rollout_ref.model.path"
) -> tuple[PreTrainedTokenizerBase | None, list[ConfigFinding]]:
    """The tokenizer if it is on this machine. A model that would have to be downloaded gives a warning."""
    place = model.tokenizer_path or model.path
    if model.tokenizer_path:
        key = key.removesuffix("path") + "tokenizer_path"
    assert place is not None, "a missing model.path is an error of the configuration"
    from strop.models.load import is_path

    local = Path(place).expanduser()
    is_hub_name = not (local.exists() or place.endswith(".gguf") or place == "smollm2-135m")
    if is_hub_name and is_path(place):
        return None, [error(key, f"there is no folder {local}.")]
    from strop.models.build import build_tokenizer

    try:
        return build_tokenizer(model, local_files_only=is_hub_name), []
    except (ValueError, OSError) as problem:
        if is_hub_name and isinstance(problem.__cause__, OSError):
            message = f"{place} is not on this machine, so template and prompt lengths were not checked."
            return None, [warning(key, message)]
        return None, [error(key, str(problem).partition("\n")[0])]


def teacher_tokenizer_findings(policy: ModelConfig, path: str) -> list[ConfigFinding]:
    """An error if a token of the policy is another token of the teacher, who would rate another text."""
    key = "algorithm.distillation.path"
    own, _ = find_tokenizer(policy)
    teacher = dataclasses.replace(policy, path=path, tokenizer_path=None)
    theirs, findings = find_tokenizer(teacher, key)
    if own is None or theirs is None:
        return findings
    known = theirs.get_vocab()
    for token, number in own.get_vocab().items():
        if known.get(token) != number:
            message = (
                f"{path} has another tokenizer than the policy: {token!r} is token {number} of the policy "
                f"and {known.get(token, 'no token')} of the teacher. Choose a teacher of the same family."
            )
            return [error(key, message)]
    return []


def topk_findings(policy: ModelConfig, settings: DistillationConfig) -> list[ConfigFinding]:
    """An error if the teacher on this machine has fewer tokens than the loss asks for."""
    if not settings.is_loss or settings.loss_mode != TOPK:
        return []
    config = local_model_config(dataclasses.replace(policy, path=settings.path, hf_config_path=None))
    known = getattr(config, "vocab_size", None)
    if known is None or settings.topk <= known:
        return []
    message = f"{settings.topk}, but {settings.path} has {known} tokens. Set it to {known} or less."
    return [error("algorithm.distillation.topk", message)]


def reward_file_finding(path: str, problem: ValueError) -> ConfigFinding:
    """The error about a file from which no reward function could be loaded."""
    key = "custom_reward_function.path"
    return error(key, str(problem).removeprefix(f"{key}={path}: "))


def remote_file_findings(url: str | list[str] | None) -> list[ConfigFinding]:
    """Whether the function can be loaded where reward_model.remote_url is a file."""
    if not isinstance(url, str) or not url.endswith(".py"):
        return []
    try:
        load_attribute(url, "reward_func")
    except ValueError as problem:
        return [error("reward_model.remote_url", str(problem))]
    return []


def draft_findings(key: str, rollout: RolloutConfig, model: ModelConfig) -> list[ConfigFinding]:
    """An error if the draft model of the native engine has another vocabulary than the policy, or cannot be
    read; or if the policy has no head for rollout.speculation.mtp."""
    from strop.models.load import load_config, resolve
    from strop.rollout.native.speculation.mtp_head import head_files

    settings = rollout.speculation
    path = settings.draft_model
    if (path is None and not settings.mtp) or settings.enable is False:
        return []
    key = f"{key}.speculation.{'mtp' if path is None else 'draft_model'}"
    try:
        policy = local_model_config(model)
        if policy is None or path is None:
            if policy is not None:
                head_files(resolve(model.path).name, policy)
            return []
        draft = load_config(resolve(path)).get_text_config()
    except (ValueError, OSError) as problem:
        return [error(key, str(problem))]
    sizes = (draft.vocab_size, policy.vocab_size)
    if sizes[0] == sizes[1]:
        return []
    message = f"{path} has a vocabulary of {sizes[0]} tokens, the policy one of {sizes[1]}."
    return [error(key, f"{message} Give a model with the same tokenizer, or null.")]
