"""How many tokens a sequence may have: what the model takes, and what a run asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ANY_LENGTH = 1 << 20


def position_limit(config: PretrainedConfig) -> int | None:
    """The positions that the model takes; None: any number.

    YaRN extends them where `max_position_embeddings` is still that of the model before the extension. With
    longrope the angles of all tokens change where the longest sequence of a pass exceeds
    `original_max_position_embeddings`: a sampled token and its recomputation would see different ones, so
    longer sequences are not taken.
    """
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rotary = getattr(text, "rope_parameters", None) or {}
    trained = rotary.get("original_max_position_embeddings")
    if not limit or not trained:
        return limit
    if rotary.get("rope_type") == "yarn":
        return max(limit, int(trained * (rotary.get("factor") or 1)))
    if rotary.get("rope_type") == "longrope":
        return min(limit, int(trained))
    return limit


def resolve_max_model_len(config: PretrainedConfig, max_model_len: int | None) -> int:
    """`max_model_len`, or by default the model's limit. Raises ValueError if it exceeds the model's limit."""
    limit = position_limit(config)
    if max_model_len is None:
        return limit or _ANY_LENGTH
    if max_model_len < 2 or (limit and max_model_len > limit):
        raise ValueError(
            f"max_model_len={max_model_len}: the model takes from 2 to {limit or 'any number of'} positions. "
            "Prompt and response together must fit: lower data.max_prompt_length, data.max_response_length "
            "or rollout.max_model_len."
        )
    return max_model_len
