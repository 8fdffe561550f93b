"""Conversations in, texts out, over any engine: for models that speak beside the policy, such as a judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strop.data.chat import Chat
from strop.rollout.base import Completion, Engine, Request, Sampling


class EngineChat:
    def __init__(self, engine: Engine, chat: Chat, sampling: Sampling, name: str):
        """`name` tells this model from others. The engine sleeps between calls."""
        self.engine, self.chat, self.sampling, self.name = engine, chat, sampling, name
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
            return RuntimeError(f"The engine of {self.name} gave no answer: {completion.error or completion.finish}.")
        return str(self.chat.tokenizer.decode(completion.ids, skip_special_tokens=True))
