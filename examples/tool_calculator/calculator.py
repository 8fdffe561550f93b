"""The tool: what a sum comes to."""

from __future__ import annotations

import ast
import operator

LONGEST = 60
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculator(expression: str) -> str:
    """Compute an expression of numbers, + - * / and brackets.

    Args:
        expression: what to compute, for instance 37*48
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression may have {LONGEST} characters, this one has {len(expression)}")
    value = _value(ast.parse(expression, mode="eval").body)
    return str(int(value)) if float(value).is_integer() else f"{value:.10g}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError("only numbers, + - * / and brackets can be computed")
