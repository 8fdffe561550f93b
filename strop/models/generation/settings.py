"""The generation config of a model: read from its folder, completed with the token that ends a turn, written.

transformers and vLLM stop at its EOS tokens, and so does Strop.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from strop.config.schema.model import ModelConfig
from strop.models.files.weights import first_line
from strop.models.load import load_config, resolve


def read_generation_config(source: str) -> GenerationConfig | None:
    """Return the generation config of a model's folder or name; None if it has none.

    transformers takes a file that is not JSON for a missing one: samples would end at other tokens.
    """
    try:
        found = GenerationConfig.from_pretrained(source)
    except OSError as error:
        if isinstance(error.__context__, json.JSONDecodeError | UnicodeDecodeError):
            raise _damaged(source, f"it is not JSON ({error.__context__})") from error
        return None
    except Exception as error:  # a list, or a value that transformers refuses
        raise _damaged(source, first_line(error).rstrip(".")) from error
    ends = found.eos_token_id
    numbers = ends if isinstance(ends, list) else [ends]
    if ends is not None and not all(type(number) is int for number in numbers):
        raise _damaged(source, f"eos_token_id is {ends!r}, not a number or a list of numbers")
    return found


def _damaged(source: str, reason: str) -> ValueError:
    file = Path(source) / GENERATION_CONFIG_NAME
    place = str(file) if file.is_file() else f"{GENERATION_CONFIG_NAME} of {source!r}"
    return ValueError(
        f"{place} cannot be read: {reason}. It must be one JSON object, such as "
        '{"eos_token_id": 2}. Correct it, fetch it again, or remove it: without it the end tokens of '
        "config.json hold."
    )


def load_generation_config(model: Any, found: GenerationConfig | None) -> None:
    """Give a model that was built without its weights the generation config that it has with them."""
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
