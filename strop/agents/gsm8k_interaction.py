"""A user who checks answers to GSM8K and lets the model try again."""

from __future__ import annotations

from typing import Any

from strop.agents.interaction import BaseInteraction, Reply
from strop.rewards.rules.gsm8k import compute_score

RIGHT = "That is right."
WRONG = "That is not right. Look for the mistake, and give the answer again after ####."


class Gsm8kInteraction(BaseInteraction):
    """Rows have interaction_kwargs {name, query, ground_truth}. config: method (strict or flexible), right, wrong."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._truths: dict[str, Any] = {}
        self._answers: dict[str, str] = {}

    async def start_interaction(self, instance_id: str, ground_truth: Any = None, **kwargs: Any) -> str:
        if ground_truth is None:
            raise ValueError("the gsm8k interaction needs interaction_kwargs.ground_truth.")
        self._truths[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Reply:
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        self._answers[instance_id] = said[-1] if said else ""
        score = await self.calculate_score(instance_id)
        if score >= 1.0:
            return True, str(self.config.get("right", RIGHT)), score, {}
        return False, str(self.config.get("wrong", WRONG)), score, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """1 if the latest answer is right."""
        answer, truth = self._answers.get(instance_id, ""), self._truths[instance_id]
        return compute_score(answer, truth, method=self.config.get("method", "strict"))

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._truths.pop(instance_id, None)
        self._answers.pop(instance_id, None)
