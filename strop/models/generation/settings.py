"""The generation config of a model: read from its folder, completed with the token that ends a turn, written.

transformers and vLLM stop at its EOS tokens, and so does Strop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from strop.config.schema.model import ModelConfig
from strop.models.load import load_config, resolve


def read_generation_config(source: str) -> GenerationConfig | None:
    """Return the generation config of a model's folder or name; None if it has none."""
    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:
        return None


def load_generation_config(model: Any, source: str) -> None:
    """Give a model that was built without its weights the generation config that it has with them."""
    found = read_generation_config(source)
    if found is not None and model.can_generate():
        model.generation_config = found


def write_generation_config(generation: GenerationConfig, folder: Path) -> None:
    """Write a generation config as it is. `save_pretrained` refuses some that transformers has loaded, such
    as a temperature without do_sample."""
    generation.to_json_file(folder / GENERATION_CONFIG_NAME, use_diff=True, keys_to_pop=["compile_config"])


def eos_ids(generation: GenerationConfig | None) -> list[int]:
    """Return the EOS tokens of a generation config."""
    found: int | Sequence[int] | None = getattr(generation, "eos_token_id", None)
    if found is None:
        return []
    if isinstance(found, int):
        return [found]
    return list(found)


def eos_ids_of(settings: ModelConfig) -> list[int]:
    """Return the EOS tokens that a model will have, from its files; none if they cannot be read."""
    try:
        source = resolve(settings.path)
        found = eos_ids(read_generation_config(source.name))
        if found:
            return found
        config = load_config(source, trust_remote_code=settings.trust_remote_code)
    except ValueError:  # the checks of the model say it
        return []
    return eos_ids(GenerationConfig.from_model_config(config))


def add_eos_id(model: Any, token: int, tokenizer_eos: int | None) -> bool:
    """Add a token to those that end a generation; False if it is one of them."""
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return False
    known = eos_ids(generation)
    if not known and tokenizer_eos is not None:
        known = [tokenizer_eos]
    if token in known or token == tokenizer_eos:
        return False
    generation.eos_token_id = [*known, token]
    return True
