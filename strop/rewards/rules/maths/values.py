"""Compute an expression: exactly while it is rational, else with 50 digits; numbers have a largest size."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, TypeAlias, cast

from strop.rewards.rules.maths.nodes import (
    INFINITY,
    PI,
    E,
    I,
    Node,
    Number,
    Symbol,
    TooLarge,
    Undefined,
    operators,
    symbols,
    variables,
)

MAX_BITS = 20_000
MAX_FACTORIAL = 1_500
MAX_ROOT = 100
DIGITS = 50
TOLERANCE = Fraction(1, 10**30)
POINTS = 4
"""At so many points two expressions with variables are compared; the first two are positive."""

Inexact: TypeAlias = Any  # a number of mpmath, which has no types
Value = Fraction | Inexact


@cache
def _mp() -> ModuleType:
    """Return mpmath's numbers with 50 digits, in a context that nothing else changes."""
    import mpmath

    context = mpmath.MPContext()
    context.dps = DIGITS
    return cast(ModuleType, context)


def inexact(value: Value) -> Inexact:
    """Return the value as a number of mpmath."""
    if isinstance(value, Fraction):
        return _mp().mpf(value.numerator) / value.denominator
    return value


def evaluate(node: Node, point: Mapping[str, Fraction] | None = None) -> Value:
    """Return the value; `point` gives those of variables. Undefined or TooLarge if there is none.

    With a point, the expression is one of real numbers: the root or the logarithm of a negative number is
    undefined there, unless the expression has the imaginary unit.
    """
    real = bool(point) and "i" not in symbols(node)
    try:
        return _Evaluation(point or {}, real).value(node)
    except ArithmeticError as error:  # a division by zero
        raise Undefined(str(error)) from error


def same_value(left: Value, right: Value) -> bool:
    """Whether two values are equal, up to the rounding of the inexact."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    mp = _mp()
    one = inexact(left)
    other = inexact(right)
    if mp.isinf(one) or mp.isinf(other):
        return bool(one == other)
    scale = max(abs(one), abs(other))
    return bool(abs(one - other) <= scale * mp.mpf(10) ** -30 + mp.mpf(10) ** -45)


def is_real(value: Value) -> bool:
    """Whether the value is a real number."""
    return isinstance(value, Fraction) or not isinstance(value, _mp().mpc) or value.imag == 0


def identical(left: Node, right: Node) -> bool:
    """Whether two expressions are equal wherever both are defined."""
    if left == right:
        return True
    names = variables(left) | variables(right)
    if not names:
        return same_value(evaluate(left), evaluate(right))
    compared = 0
    integers = bool((operators(left) | operators(right)) & {"factorial", "binomial"})
    for point in points(frozenset(names), integers=integers):
        try:
            one = evaluate(left, point)
            other = evaluate(right, point)
        except Undefined:
            continue
        if not same_value(one, other):
            return False
        compared += 1
    return compared >= 2


def proportional(left: Node, right: Node, *, positive: bool = False) -> bool:
    """Whether the expressions differ by a constant factor that is not 0 (`positive`: that is above 0)."""
    if left == right:
        return True
    ratio: Value | None = None
    compared = 0
    for point in points(frozenset(variables(left) | variables(right))):
        try:
            one = evaluate(left, point)
            other = evaluate(right, point)
            if same_value(one, Fraction(0)) or same_value(other, Fraction(0)):
                return False
            quotient = _binary("/", one, other)
        except Undefined:
            continue
        if ratio is None:
            ratio = quotient
        elif not same_value(ratio, quotient):
            return False
        compared += 1
    if ratio is None or compared < 2:
        return False
    return not positive or (is_real(ratio) and bool(ratio > 0))


@lru_cache(maxsize=256)
def points(names: frozenset[str], *, integers: bool = False) -> list[dict[str, Fraction]]:
    """Return fixed points that look random: the same for equal names, in every process."""
    found = []
    for number in range(POINTS + 2):
        point = {}
        for name in sorted(names):
            seed = zlib.crc32(f"{name}/{number}".encode())
            value = Fraction(seed % 1009 + 101, 331)
            if integers:
                value = Fraction(seed % 37 + 3)
            if number >= 2 and seed & 4096:
                value = -value
            point[name] = value
        found.append(point)
    found[2] = {name: -value for name, value in found[0].items()}  # every sign is changed at least once
    return found


def _checked(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise TooLarge("A number is too large.")
    return value


def _binary(operator: str, left: Value, right: Value) -> Value:
    exact = isinstance(left, Fraction) and isinstance(right, Fraction)
    one = left if exact else inexact(left)
    other = right if exact else inexact(right)
    result: Value
    if operator == "+":
        result = one + other
    elif operator == "-":
        result = one - other
    elif operator == "*":
        result = one * other
    else:
        if other == 0:
            raise Undefined("A division by zero.")
        result = one / other
    if isinstance(result, Fraction):
        return _checked(result)
    return result


class _Evaluation:
    def __init__(self, point: Mapping[str, Fraction], real: bool):
        self.point = point
        self.real = real

    def value(self, node: Node) -> Value:
        if isinstance(node, Number):
            return node.value
        if isinstance(node, Symbol):
            return self.symbol(node)
        if node.operator == "neg" and node.arguments == (INFINITY,):
            return -_mp().inf
        arguments = [self.value(argument) for argument in node.arguments]
        if any(not isinstance(value, Fraction) and _mp().isinf(value) for value in arguments):
            raise Undefined("Infinity is no number to compute with.")
        return self.apply(node.operator, arguments)

    def symbol(self, node: Symbol) -> Value:
        if node.name in self.point:
            return self.point[node.name]
        if node == E:
            return +_mp().e
        if node == PI:
            return +_mp().pi
        if node == I:
            return _mp().j
        if node == INFINITY:
            return _mp().inf
        raise Undefined(f"{node.name} has no value.")

    def apply(self, operator: str, arguments: list[Value]) -> Value:
        if operator in ("+", "-", "*", "/"):
            return _binary(operator, arguments[0], arguments[1])
        if operator == "^":
            return self.power(arguments[0], arguments[1])
        if operator == "root":
            return self.root(arguments[0], arguments[1])
        if operator == "neg":
            return -arguments[0]
        if operator == "abs":
            return abs(arguments[0])
        if operator in ("factorial", "binomial", "floor", "ceil"):
            return _of_integers(operator, arguments)
        return self.function(operator, arguments[0])

    def power(self, base: Value, exponent: Value) -> Value:
        if exponent == 0 and base == 0:
            raise Undefined("0^0 has no value.")
        if base == 0:
            if not (is_real(exponent) and exponent > 0):
                raise Undefined("A division by zero.")
            return Fraction(0)
        if base == 1:
            return Fraction(1)
        self._check_power(base, exponent)
        if isinstance(base, Fraction) and isinstance(exponent, Fraction):
            if exponent.denominator == 1:
                return base ** int(exponent)
            root: Value | None = None
            if exponent.denominator <= MAX_ROOT:
                root = self.root(base, Fraction(exponent.denominator))
            if isinstance(root, Fraction):
                return root ** int(exponent.numerator)
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            return inexact(base) ** int(exponent)
        if self.real and is_real(base) and base < 0:
            raise Undefined("The power of a negative number is not real.")
        return inexact(base) ** inexact(exponent)

    def _check_power(self, base: Value, exponent: Value) -> None:
        """Raise TooLarge before a power is computed that has too many digits."""
        size = abs(exponent)
        if size > MAX_BITS:
            raise TooLarge("An exponent is too large.")
        if isinstance(base, Fraction):
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        else:
            bits = abs(int(_mp().mag(base))) + 1
        if bits * size > MAX_BITS:
            raise TooLarge("A power is too large.")

    def root(self, base: Value, index: Value) -> Value:
        if not isinstance(index, Fraction) or index.denominator != 1 or not 2 <= index <= MAX_ROOT:
            return self.power(base, _binary("/", Fraction(1), index))
        degree = int(index)
        if not is_real(base):
            return inexact(base) ** (_mp().mpf(1) / degree)
        negative = bool(base < 0)
        size = abs(base)
        result: Value
        if isinstance(size, Fraction):
            result = _exact_root(size, degree)
        else:
            result = _mp().root(size, degree)
        if not negative:
            return result
        if degree % 2:
            return -result
        if self.real:
            raise Undefined("The root of a negative number is not real.")
        return inexact(result) * _mp().expjpi(_mp().mpf(1) / degree)

    def function(self, name: str, value: Value) -> Value:
        mp = _mp()
        argument = inexact(value)
        if mp.mag(argument) > 2_000:
            raise TooLarge("The argument of a function is too large.")
        if name in ("ln", "log", "lg"):
            return self.logarithm(name, argument)
        if name == "exp":
            self._check_power(+mp.e, value)
        if name in ("exp", "sinh", "cosh", "tanh") and abs(argument) > MAX_BITS:
            raise TooLarge("The argument of a function is too large.")
        if name in ("arcsin", "arccos", "asin", "acos") and self.real and abs(argument) > 1:
            raise Undefined(f"{name} is defined from -1 to 1.")
        functions: dict[str, Callable[[Inexact], Inexact]] = {
            **{"arcsin": mp.asin, "arccos": mp.acos, "arctan": mp.atan},
            **{"tan": _tangent, "cot": _cotangent, "sec": _secant, "csc": _cosecant},
        }
        if name in functions:
            return functions[name](argument)
        return cast(Inexact, getattr(mp, name)(argument))

    def logarithm(self, name: str, argument: Inexact) -> Inexact:
        if argument == 0:
            raise Undefined("The logarithm of 0.")
        if self.real and is_real(argument) and argument < 0:
            raise Undefined("The logarithm of a negative number is not real.")
        if name == "ln":
            return cast(Inexact, _mp().ln(argument))
        return cast(Inexact, _mp().ln(argument) / _mp().ln(10))


def _quotient(top: Inexact, bottom: Inexact) -> Inexact:
    """Return the quotient; Undefined where the denominator is 0 up to rounding."""
    if abs(bottom) < _mp().mpf(10) ** -40:
        raise Undefined("A division by zero.")
    return top / bottom


def _tangent(argument: Inexact) -> Inexact:
    return _quotient(_mp().sin(argument), _mp().cos(argument))


def _cotangent(argument: Inexact) -> Inexact:
    return _quotient(_mp().cos(argument), _mp().sin(argument))


def _secant(argument: Inexact) -> Inexact:
    return _quotient(_mp().mpf(1), _mp().cos(argument))


def _cosecant(argument: Inexact) -> Inexact:
    return _quotient(_mp().mpf(1), _mp().sin(argument))


def _exact_root(value: Fraction, degree: int) -> Value:
    """Return the root as a fraction if it is one, else as an inexact number."""
    guess = _mp().root(inexact(value), degree)
    if _mp().mag(guess) < 150:
        top = round(_mp().root(value.numerator, degree))
        bottom = round(_mp().root(value.denominator, degree))
        if top**degree == value.numerator and bottom**degree == value.denominator:
            return Fraction(int(top), int(bottom))
    return cast(Inexact, guess)


def _of_integers(operator: str, arguments: list[Value]) -> Value:
    first = arguments[0]
    if operator in ("floor", "ceil"):
        if not is_real(first):
            raise Undefined("Only real numbers are rounded.")
        if isinstance(first, Fraction):
            return Fraction(math.floor(first) if operator == "floor" else math.ceil(first))
        return Fraction(int(getattr(_mp(), operator)(first)))
    if not all(isinstance(value, Fraction) and value.denominator == 1 and value >= 0 for value in arguments):
        raise Undefined(f"A {operator} of something else than natural numbers.")
    numbers = [int(value) for value in arguments]
    if max(numbers) > MAX_FACTORIAL:
        raise TooLarge(f"A {operator} is too large.")
    if operator == "factorial":
        return Fraction(math.factorial(numbers[0]))
    return Fraction(math.comb(numbers[0], numbers[1]))
