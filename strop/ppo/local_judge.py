"""Chat completion with any rollout engine, for language models other than the policy, such as a judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from strop.config.schema.reward import RewardModelConfig
from strop.data.chat import Chat, stop_ids
from strop.models.build import build_reference, build_tokenizer, compute_dtype
from strop.rollout.base import Completion, Engine, Request, Sampling, build_engine
from strop.rollout.position_limit import position_limit


class EngineChat:
    def __init__(self, engine: Engine, chat: Chat, sampling: Sampling, name: str):
        """`name` identifies this model. The engine sleeps between calls."""
        self.engine = engine
        self.chat = chat
        self.sampling = sampling
        self.name = name
        engine.sleep()

    def complete(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[str | Exception]:
        """What the model says at the end of each conversation, or why it says nothing."""
        requests = [Request(self.chat.ids(messages), seed=0) for messages in conversations]
        self.engine.wake()
        try:
            answers = self.engine.generate(requests, self.sampling)
        finally:
            self.engine.sleep()
        return [self._text(completion) for [completion] in answers]

    def close(self) -> None:
        self.engine.close()

    def _text(self, completion: Completion) -> str | Exception:
        if completion.finish in ("error", "abort"):
            return RuntimeError(
                f"The engine of {self.name} gave no answer: {completion.error or completion.finish}."
            )
        return str(self.chat.tokenizer.decode(completion.ids, skip_special_tokens=True))


TEMPLATE_TOKENS = 512
"""Tokens of the judge's instructions, at most."""
LENGTHS = ("prompt_length", "response_length", "max_model_len")
"""Keys of reward_model.rollout that together say how long a conversation of the judge may be."""


def local_judge(reward: RewardModelConfig, device: torch.device, *, prompt_length: int) -> EngineChat:
    """The model of reward_model.model.path in an engine of its own. Its prompts have at most `prompt_length`
    tokens, unless reward_model.rollout says otherwise."""
    dtype = compute_dtype(reward.model.fsdp_config.dtype, device)
    module = build_reference(reward.model, dtype=dtype).to(device)
    tokenizer = build_tokenizer(reward.model)
    settings = {key: value for key, value in reward.rollout.items() if key not in LENGTHS}
    name = settings.pop("name", None) or "native"
    longest = reward.rollout.get("max_model_len")
    if longest is None:
        longest = (reward.rollout.get("prompt_length") or prompt_length) + reward.judge.max_tokens
        longest = min(longest, position_limit(module.config) or longest)
    engine = build_engine(name, module, max_model_len=longest, **settings)
    generation = getattr(module, "generation_config", None)
    sampling = Sampling(
        temperature=reward.judge.temperature,
        max_tokens=reward.judge.max_tokens,
        stop_ids=tuple(sorted(stop_ids(tokenizer, getattr(generation, "eos_token_id", None)))),
    )
    return EngineChat(engine, Chat(tokenizer), sampling, name=str(reward.model.path))
