"""GSM8K as a conversation: a simulated user that checks answers, and verl's tool that does the same.

The user lets the model try again. The tool is called by the model before it gives its final answer: rows have
tools_kwargs {calc_gsm8k_reward: {create_kwargs: {ground_truth: ...}}}; an answer that is no better than the
best one before costs a little, and the reward of the episode is that of the latest answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.agents.interaction import BaseInteraction, ChatMessage, Reply
from strop.agents.tool_schema import JsonObject
from strop.agents.tools import ToolResult, ToolSchema
from strop.rewards.rules.gsm8k import compute_score

RIGHT = "That is right."
WRONG = "That is not right. Look for the mistake, and give the answer again after ####."
NO_BETTER = -0.05
"""Reward of a submitted answer that is no better than the best one before."""
SCHEMA = ToolSchema(
    "calc_gsm8k_reward",
    "Check your answer to the problem. Call it before you give the final answer.",
    {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The answer: a number."}},
        "required": ["answer"],
    },
)


class Gsm8kInteraction(BaseInteraction):
    """Rows have interaction_kwargs {name, query, ground_truth}. config: method (strict or flexible), right,
    wrong."""

    def __init__(self, config: JsonObject) -> None:
        super().__init__(config)
        self._truths: dict[str, str] = {}
        self._answers: dict[str, str] = {}

    async def start_interaction(
        self, instance_id: str, ground_truth: str | None = None, **kwargs: object
    ) -> str:
        if ground_truth is None:
            raise ValueError("the gsm8k interaction needs interaction_kwargs.ground_truth.")
        self._truths[instance_id] = ground_truth
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[ChatMessage], **kwargs: object
    ) -> Reply:
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        self._answers[instance_id] = answers[-1] if answers else ""
        score = await self.calculate_score(instance_id)
        if score >= 1.0:
            return True, str(self.config.get("right", RIGHT)), score, {}
        return False, str(self.config.get("wrong", WRONG)), score, {}

    async def calculate_score(self, instance_id: str, **kwargs: object) -> float:
        """Return 1 if the latest answer is right."""
        answer = self._answers.get(instance_id, "")
        method = str(self.config.get("method", "strict"))
        return compute_score(answer, self._truths[instance_id], method=method)

    async def finalize_interaction(self, instance_id: str, **kwargs: object) -> None:
        self._truths.pop(instance_id, None)
        self._answers.pop(instance_id, None)


@dataclass
class SubmittedAnswers:
    """The scores of the answers of one episode."""

    truth: str
    best: float = 0.0
    latest: float = 0.0


class Gsm8kTool:
    """verl's calc_gsm8k_reward: the model submits an answer and reads whether it is right."""

    def __init__(self, config: JsonObject | None = None, tool_schema: JsonObject | None = None) -> None:
        self.schema = SCHEMA
        if tool_schema is not None:
            self.schema = ToolSchema.from_openai(tool_schema, "Gsm8kTool")
        self._episodes: dict[str, SubmittedAnswers] = {}

    async def create(self, instance_id: str, ground_truth: str | None = None, **kwargs: object) -> str:
        if ground_truth is None:
            raise ValueError(f"the row has no tools_kwargs.{self.schema.name}.create_kwargs.ground_truth")
        self._episodes[instance_id] = SubmittedAnswers(ground_truth)
        return instance_id

    async def execute(self, instance_id: str, arguments: JsonObject) -> ToolResult:
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
