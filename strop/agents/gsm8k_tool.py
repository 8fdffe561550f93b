"""verl's tool for GSM8K: the model hands in an answer and is told whether it is right.

Rows have tools_kwargs {calc_gsm8k_reward: {create_kwargs: {ground_truth: ...}}}. Handing in an answer that is no better than
the best before costs a little; the reward of the episode is that of the latest answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strop.agents.tool_schema import ToolSchema
from strop.agents.tools import ToolResult
from strop.rewards.rules.gsm8k import compute_score

NO_BETTER = -0.05
_ANSWER = {"type": "string", "description": "The answer: a number."}
SCHEMA = ToolSchema(
    "calc_gsm8k_reward",
    "Check your answer to the problem. Call it before you give the final answer.",
    {"type": "object", "properties": {"answer": _ANSWER}, "required": ["answer"]},
)


@dataclass
class Handed:
    truth: Any
    best: float = 0.0
    latest: float = 0.0


class Gsm8kTool:
    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None):
        self.schema = SCHEMA if tool_schema is None else ToolSchema.from_openai(tool_schema, "Gsm8kTool")
        self._episodes: dict[str, Handed] = {}

    async def create(self, instance_id: str, ground_truth: Any = None, **kwargs: Any) -> str:
        if ground_truth is None:
            raise ValueError(f"the row has no tools_kwargs.{self.schema.name}.create_kwargs.ground_truth")
        self._episodes[instance_id] = Handed(ground_truth)
        return instance_id

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResult:
        episode = self._episodes[instance_id]
        episode.latest = compute_score(str(arguments.get("answer", "")), episode.truth, method="flexible")
        reward = 0.0 if episode.latest > episode.best else NO_BETTER
        episode.best = max(episode.best, episode.latest)
        verdict = "right" if episode.latest else "wrong"
        return ToolResult(f"{arguments.get('answer')} is {verdict}.", reward)

    async def calc_reward(self, instance_id: str) -> float:
        return self._episodes[instance_id].latest

    async def release(self, instance_id: str) -> None:
        self._episodes.pop(instance_id, None)
