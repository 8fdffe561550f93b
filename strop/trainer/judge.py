"""A judge that speaks in this process: the language model of reward_model.model.path in an engine of its own."""

from __future__ import annotations

from typing import Any

import torch

from strop.data.chat import Chat, stop_ids
from strop.models.build import build_reference, build_tokenizer, compute_dtype
from strop.rollout.base import Sampling
from strop.rollout.build import build_engine
from strop.rollout.chat import EngineChat

TEMPLATE_TOKENS = 512  # of the judge's instructions
LENGTHS = ("prompt_length", "response_length", "max_model_len")


def judge_here(reward: Any, device: torch.device, *, prompt_length: int) -> EngineChat:
    """The judge of the `reward_model` section; its prompts hold question and answer, at most `prompt_length` tokens."""
    module = build_reference(reward.model, dtype=compute_dtype(reward.model.fsdp_config.dtype, device)).to(device)
    tokenizer = build_tokenizer(reward.model)
    settings = dict(reward.rollout)
    name = settings.pop("name", None) or "native"
    longest = settings.get("max_model_len") or (settings.get("prompt_length") or prompt_length) + reward.judge.max_tokens
    if "max_model_len" not in settings:
        longest = min(longest, getattr(module.config.get_text_config(), "max_position_embeddings", None) or longest)
    engine = build_engine(name, module, max_model_len=longest, **{k: v for k, v in settings.items() if k not in LENGTHS})
    generation = getattr(module, "generation_config", None)
    sampling = Sampling(
        temperature=reward.judge.temperature,
        max_tokens=reward.judge.max_tokens,
        stop_ids=tuple(sorted(stop_ids(tokenizer, getattr(generation, "eos_token_id", None)))),
    )
    return EngineChat(engine, Chat(tokenizer), sampling, name=str(reward.model.path))
