"""Assertions that compare calls with literals, `assert add(1, 2) == 3`, split into the calls and the rest.

A sandbox server runs one script and answers once, so the program and a process of assertions cannot talk to
each other there. For assertions of this form they need not: the script makes the calls and prints the values,
and the comparison is made here.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LiteralAssertion:
    """`assert CALL`, `assert not CALL`, or `assert CALL (==, !=, is) LITERAL`, in either order."""

    call: str
    """Source of the call; its arguments are literals."""
    operator: str
    """true | false | == | != | is"""
    expected: object = None

    def holds(self, value: object) -> bool:
        """Whether it holds for the value of the call."""
        if self.operator == "true":
            return bool(value)
        if self.operator == "false":
            return not value
        if self.operator == "is":
            return value is self.expected
        return (value == self.expected) == (self.operator == "==")


_OPERATORS = {ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is"}


def split_assertions(source: str) -> list[LiteralAssertion] | None:
    """Return the assertions of a test; None if one has another form."""
    try:
        statements = ast.parse(source).body
        return [_split(statement) for statement in statements]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _split(statement: ast.stmt) -> LiteralAssertion:
    """Return the parts of an assertion; ValueError if it has another form."""
    if not isinstance(statement, ast.Assert):
        raise ValueError("not an assertion")
    test = statement.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return LiteralAssertion(_call(test.operand), "false")
    if not isinstance(test, ast.Compare):
        return LiteralAssertion(_call(test), "true")
    if len(test.ops) != 1 or type(test.ops[0]) not in _OPERATORS:
        raise ValueError("another comparison")
    left = test.left
    right = test.comparators[0]
    if not isinstance(left, ast.Call):
        left, right = right, left
    expected = ast.literal_eval(right)
    operator = _OPERATORS[type(test.ops[0])]
    if operator == "is" and not (expected is None or isinstance(expected, bool)):
        raise ValueError("identity of values")
    return LiteralAssertion(_call(left), operator, expected)


def _call(node: ast.expr) -> str:
    """Return the source of a call of a function, or of a method of Solution, with literal arguments."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) in dir(builtins):
        raise ValueError("not a call of the program")
    function = ast.unparse(node.func).removeprefix("Solution().")
    if not function.isidentifier():
        raise ValueError("not a function")
    for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
        ast.literal_eval(argument)
    return ast.unparse(node)


def values_script(assertions: Sequence[LiteralAssertion], marker: str) -> str:
    """Return lines that print the values of the calls, as a literal on a line after `marker`."""
    calls = ", ".join(assertion.call for assertion in assertions)
    return f"print('\\n{marker}' + repr([{calls}]))"


def all_hold(assertions: Sequence[LiteralAssertion], printed: str) -> bool:
    """Whether all assertions hold for the printed values."""
    try:
        values = ast.literal_eval(printed.strip())
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    if not isinstance(values, list) or len(values) != len(assertions):
        return False
    return all(assertion.holds(value) for assertion, value in zip(assertions, values))
