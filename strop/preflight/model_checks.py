"""Checks that several programs share: tokenizer, model folder, file of a reward function."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from strop.config.rules import ConfigFinding, error, warning
from strop.config.schema.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

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


def head_findings(key: str, path: str | None, wanted: str) -> list[ConfigFinding]:
    """Errors if the folder holds another kind of model than `wanted`, or a file of weights is incomplete."""
    from strop.models.heads import wrong_head
    from strop.models.load import check_weights, resolve

    source = resolve(path)
    if source.gguf_file is not None or not Path(source.name).is_dir():
        return []
    problem = wrong_head(Path(source.name), wanted=wanted)
    if problem is not None:
        return [error(key, f"{path}: {problem}")]
    try:
        check_weights(Path(source.name))
    except ValueError as damage:
        return [error(key, str(damage))]
    return []


def find_tokenizer(
    model: ModelConfig, key: str = "actor_rollout_ref.model.path"
) -> tuple[PreTrainedTokenizerBase | None, list[ConfigFinding]]:
    """The tokenizer if it is on this machine. A model that would have to be downloaded gives a warning."""
    place = model.tokenizer_path or model.path
    assert place is not None, "a missing model.path is an error of the configuration"
    local = Path(place).expanduser()
    if local.exists() or place.endswith(".gguf") or place == "smollm2-135m":
        from strop.models.build import build_tokenizer

        try:
            return build_tokenizer(model), []
        except (ValueError, OSError) as problem:
            return None, [error(key, str(problem).partition("\n")[0])]
    if place.startswith(("/", "./", "~")) or place.count("/") > 1:
        return None, [error(key, f"there is no folder {local}.")]
    from transformers import AutoTokenizer

    from strop.models.load import refused_code_or_first_line

    trust = model.trust_remote_code
    try:
        return AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=trust), []
    except (OSError, ValueError) as problem:
        if "trust_remote_code" in str(problem):
            return None, [error(key, f"{place}: {refused_code_or_first_line(problem)}")]
        message = f"{place} is not on this machine, so template and prompt lengths were not checked."
        return None, [warning(key, message)]


def reward_file_finding(path: str, problem: ValueError) -> ConfigFinding:
    """The error about a file from which no reward function could be loaded."""
    key = "custom_reward_function.path"
    return error(key, str(problem).removeprefix(f"{key}={path}: "))
