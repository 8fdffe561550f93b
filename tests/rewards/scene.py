"""Trajectories of a character tokenizer, and scorers built from a few settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import decoders

from strop.config.schema.reward import CustomRewardFunctionConfig, RewardManagerConfig, RewardModelConfig
from strop.rewards.managers import build_scorer
from strop.rewards.scorer import Scorer
from strop.types import Prompt, Trajectory
from tests.data.tokens import character_tokenizer


def reading_tokenizer(**arguments: Any) -> Any:
    """Its text comes back as it went in."""
    tokenizer = character_tokenizer(**arguments)
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    return tokenizer


TOKENIZER = reading_tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def trajectory(
    text: str = "#### 4", *, row: int = 0, source: str = "openai/gsm8k", truth: Any = "4", **more: Any
) -> Trajectory:
    response = [*ids(text), TOKENIZER.eos_token_id]
    prompt = Prompt(
        index=row,
        ids=ids("2+2?"),
        messages=[{"role": "user", "content": "2+2?"}],
        data_source=source,
        ground_truth=truth,
        extra_info=more.pop("extra_info", {}),
    )
    mask = more.pop("mask", [1] * len(response))
    return Trajectory(
        prompt, group=row, response=response, mask=mask, log_probs=[0.0] * len(response), **more
    )


def scorer(
    folder: Path | None = None,
    code: str | None = None,
    *,
    kwargs: dict[str, Any] | None = None,
    model: Any = None,
    **keys: Any,
) -> Scorer:
    """A scorer of the file `code` (or of the rules); `keys` are keys of the reward_model section."""
    custom = CustomRewardFunctionConfig(reward_kwargs=kwargs or {})
    if code is not None:
        assert folder is not None
        file = folder / "my_reward.py"
        file.write_text(code)
        custom.path = str(file)
    longest = keys.pop("max_response_length", None)
    manager = keys.pop("manager", RewardManagerConfig())
    if "weights" in keys:
        keys["model"] = keys.pop("weights")
    return build_scorer(
        RewardModelConfig(**keys), custom, manager, TOKENIZER, model, max_response_length=longest
    )
