"""Assertions that compare calls with literals, `assert add(1, 2) == 3`, split into the calls and the rest.

A sandbox server runs one script and answers once, so the program and a process of assertions cannot talk to
each other there. For assertions of this form they need not: the script makes the calls and prints the values,
and the comparison is made here. HumanEval's `def check(candidate)` is read too.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LiteralAssertion:
    """`assert CALL`, `assert not CALL`, `assert CALL (==, !=, is) LITERAL`, in either order, or
    `assert abs(CALL - NUMBER) < NUMBER`."""

    call: str
    """Source of the call; its arguments are literals."""
    operator: str
    """true | false | == | != | is | near"""
    expected: object = None
    tolerance: float = 0.0
    """Of `near`."""

    def holds(self, value: object) -> bool:
        """Whether it holds for the value of the call."""
        if self.operator == "true":
            return bool(value)
        if self.operator == "false":
            return not value
        if self.operator == "is":
            return value is self.expected
        if self.operator == "near":
            return self._is_near(value)
        return (value == self.expected) == (self.operator == "==")

    def _is_near(self, value: object) -> bool:
        assert isinstance(self.expected, int | float)
        if not isinstance(value, int | float):
            return False
        try:
            return abs(value - self.expected) < self.tolerance
        except OverflowError:  # an integer that no float can hold
            return False


_OPERATORS = {ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is"}


def split_assertions(source: str) -> list[LiteralAssertion] | None:
    """Return the assertions of a test; None if one has another form."""
    try:
        return [_split(statement) for statement in _statements(ast.parse(source).body)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements; those of HumanEval's `def check(candidate): ...` with the name in `check(name)`
    for the parameter. What has no effect (METADATA, a text, `assert True`) is left out."""
    body = [statement for statement in body if not _is_idle(statement)]
    if len(body) != 2:
        return body
    function = body[0]
    use = body[1]
    if not isinstance(function, ast.FunctionDef):
        return body
    call = use.value if isinstance(use, ast.Expr) else None
    parameters = [argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)]
    if (
        not isinstance(call, ast.Call)
        or ast.unparse(call.func) != function.name
        or call.keywords
        or len(call.args) != 1
        or not isinstance(call.args[0], ast.Name)
        or len(parameters) != 1
        or function.decorator_list
        or function.args.defaults
    ):
        return body
    inside = [statement for statement in function.body if not _is_idle(statement)]
    for statement in inside:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id == parameters[0]:
                node.id = call.args[0].id
    return inside


def _is_idle(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        return ast.unparse(statement.targets[0]) == "METADATA"
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Assert) and ast.unparse(statement.test) == "True"


def _split(statement: ast.stmt) -> LiteralAssertion:
    """Return the parts of an assertion; ValueError if it has another form."""
    if not isinstance(statement, ast.Assert):
        raise ValueError("not an assertion")
    test = statement.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return LiteralAssertion(_call(test.operand), "false")
    if not isinstance(test, ast.Compare):
        return LiteralAssertion(_call(test), "true")
    if len(test.ops) == 1 and isinstance(test.ops[0], ast.Lt):
        return _near(test.left, test.comparators[0])
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


def _near(left: ast.expr, right: ast.expr) -> LiteralAssertion:
    """Return the parts of `abs(CALL - NUMBER) < NUMBER`."""
    if not isinstance(left, ast.Call) or ast.unparse(left.func) != "abs" or len(left.args) != 1:
        raise ValueError("another comparison")
    difference = left.args[0]
    if not isinstance(difference, ast.BinOp) or not isinstance(difference.op, ast.Sub):
        raise ValueError("another comparison")
    expected = ast.literal_eval(difference.right)
    tolerance = ast.literal_eval(right)
    if not isinstance(expected, int | float) or not isinstance(tolerance, int | float):
        raise ValueError("not numbers")
    return LiteralAssertion(_call(difference.left), "near", expected, tolerance)


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


_PLAIN = """\
def plain(value):
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(plain, value))
    if isinstance(value, frozenset):
        return set(map(plain, value))
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return value.item()
    if type(value).__module__ in ("decimal", "fractions") and value == float(value):
        return float(value)
    return value
"""
"""Of values that are equal to a literal without being written like one: Counter, numpy.float64, Fraction."""


def values_script(assertions: Sequence[LiteralAssertion], marker: str) -> str:
    """Return lines that print the values of the calls, as a literal on a line after `marker`."""
    calls = ", ".join(assertion.call for assertion in assertions)
    own = f"names_{marker}"  # no program has it; in its own names, `list` and `map` may be other things
    return f"{own} = {{}}\nexec({_PLAIN!r}, {own})\nprint('\\n{marker}' + repr({own}['plain']([{calls}])))"


def all_hold(assertions: Sequence[LiteralAssertion], printed: str) -> bool:
    """Whether all assertions hold for the printed values."""
    try:
        values = ast.literal_eval(printed.strip())
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    if not isinstance(values, list) or len(values) != len(assertions):
        return False
    return all(assertion.holds(value) for assertion, value in zip(assertions, values))
