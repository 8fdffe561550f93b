"""The tool: what a sum comes to."""

from __future__ import annotations

import ast
import operator
import re

LONGEST = 60
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}

MONEY = re.compile(r"\$(?=\s*[\d.])")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
PERCENT_OF = re.compile(r"%\s*of\b", re.IGNORECASE)
# A sign behind % belongs to a sum, not to an operand: 100% - 20% is 0.8.
PERCENT = re.compile(r"(\d+\.?\d*|\.\d+)\s*%(?=\s*(?:[-+*/)]|$))")


def calculator(expression: str) -> str:
    """Compute an expression of numbers, + - * /, percentages and brackets.

    Args:
        expression: what to compute, for instance 37*48
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression may have {LONGEST} characters, this one has {len(expression)}")
    plain = THOUSANDS.sub("", MONEY.sub("", expression))
    written = PERCENT.sub(r"(\1/100)", PERCENT_OF.sub("%*", plain))
    value = _value(ast.parse(written, mode="eval").body)
    return str(int(value)) if float(value).is_integer() else f"{value:.10g}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError("only numbers, + - * /, percentages and brackets can be computed")
