"""An agent loop of your own, in one file: the model simplifies an expression step by step, and is told when a
step is wrong.

    (2+3)*(4-1)  ->  5*3  ->  15

Each answer must have the value of what stood before it and be shorter; the last is a number. Listed in
loops.yaml, chosen by rows with agent_name=math_expression.
"""

from __future__ import annotations

import ast
import operator
import re

from strop.agents.episode import Episode

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class MathExpression:
    def __init__(self, step_reward: float = 0.1) -> None:
        """What each right step earns on the way; the number itself earns 1."""
        self.step_reward = step_reward

    async def run(self, episode: Episode) -> None:
        expression = episode.messages[-1]["content"].strip().removesuffix("=")
        wanted, length = value_of(expression), len(expression)
        if wanted is None:
            raise ValueError(f"the prompt is no expression: {expression!r}")
        episode.score, episode.extras["steps"] = 0.0, 0
        while True:
            said = (await episode.answer()).text.strip()
            if said == str(wanted):
                episode.score = 1.0
                return
            right = value_of(said) == wanted and len(said) < length
            if right:
                length, episode.extras["steps"] = len(said), episode.extras["steps"] + 1
                episode.reward(self.step_reward)
            if not episode.may_go_on() or not episode.tell(
                {"role": "user", "content": "=" if right else "-"}
            ):
                return


def value_of(expression: str) -> int | None:
    """The value of an expression of + - * and whole numbers, also 07; None if it is something else."""
    try:
        return _value(ast.parse(re.sub(r"\b0+(?=\d)", "", expression), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers and + - *")
