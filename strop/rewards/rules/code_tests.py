"""The tests of a programming problem, in the forms in which data sets give them, and whether an outcome passes one.

    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                    a script: standard input and output
    {"fn_name": "add", "inputs": [[1, 2], ...], "outputs": [[3], ...]}      a function, or a method of a class Solution
    [{"input": "1 2", "output": "3"}, ...]                                  a script, one mapping per test
    {"assert_case": ["assert add(1, 2) == 3", ...]}, or the list alone      assertions about names of the program
    {"test": "def check(candidate): ...", "entry_point": "add"}             the same, as in HumanEval
    "assert add(1, 2) == 3"                                                 the same

Each may be JSON text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strop.rewards.sandbox.limits import Outcome

RELATIVE, ABSOLUTE = 1e-5, 1e-8  # of numbers with a fraction; whole numbers must be equal


@dataclass(frozen=True)
class Test:
    run: dict[str, Any]
    """What the sandbox is asked to do."""
    expected: Any = True
    """Text of the output, value of the function, or True where assertions decide."""

    def passed(self, outcome: Outcome) -> bool:
        if outcome.status != "ok":
            return False
        if "stdin" in self.run:
            return same_output(outcome.stdout, self.expected)
        if "assertions" in self.run:
            return outcome.value is True
        wrapped = isinstance(self.expected, list) and len(self.expected) == 1 and same_value(outcome.value, self.expected[0])
        return wrapped or same_value(outcome.value, self.expected)


def tests_of(ground_truth: Any, most: int | None = None) -> list[Test]:
    """The first `most` tests; ValueError if the ground truth has none of the known forms."""
    truth = _plain(ground_truth)
    if isinstance(truth, str):
        truth = _decoded(truth)
    if isinstance(truth, Mapping):
        tests = _of_mapping(truth)
    elif isinstance(truth, list) and truth and all(isinstance(item, Mapping) for item in truth):
        tests = [_script(_key(item, "input", "stdin"), _key(item, "output", "expected_output")) for item in truth]
    elif isinstance(truth, list) and truth and all(isinstance(item, str) for item in truth):
        tests = [Test({"assertions": item}) for item in truth]
    elif isinstance(truth, str) and "assert" in truth:
        tests = [Test({"assertions": truth})]
    else:
        raise ValueError(f"The ground truth of a programming problem has no tests in a known form: {_shown(truth)}")
    if not tests:
        raise ValueError(f"The ground truth of a programming problem has an empty list of tests: {_shown(truth)}")
    return tests[:most]


def _of_mapping(truth: Mapping[str, Any]) -> list[Test]:
    if truth.get("assert_case"):
        cases = truth["assert_case"]
        return [Test({"assertions": case}) for case in (cases if isinstance(cases, list) else [cases])]
    if truth.get("test"):
        entry = truth.get("entry_point")
        return [Test({"assertions": f"{truth['test']}\ncheck({entry})\n" if entry else truth["test"]})]
    inputs, outputs = _key(truth, "inputs", "input"), _key(truth, "outputs", "output")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(
            f"The ground truth of a programming problem needs lists `inputs` and `outputs` of one length, not {_shown(truth)}"
        )
    name = truth.get("fn_name")
    if name:
        return [_function(str(name), given, expected) for given, expected in zip(inputs, outputs)]
    return [_script(given, expected) for given, expected in zip(inputs, outputs)]


def _script(given: Any, expected: Any) -> Test:
    return Test({"stdin": _lines(given)}, _lines(expected))


def _function(name: str, given: Any, expected: Any) -> Test:
    if isinstance(given, str):  # one argument per line, and the value, as JSON text
        given = [_decoded(line) for line in given.splitlines() if line.strip()]
        expected = _decoded(expected) if isinstance(expected, str) else expected
    elif not isinstance(given, list):
        given = [given]
    return Test({"function": name, "arguments": given}, expected)


def same_output(written: str, expected: str) -> bool:
    """Equal line by line, but for spaces at the ends; and number by number, where a line holds numbers.

    >>> same_output("1.0000001  2\\n\\n", "1 2")
    True
    """
    ours, theirs = ([line.split() for line in text.strip().splitlines()] for text in (written, expected))
    return len(ours) == len(theirs) and all(
        mine == yours or (len(mine) == len(yours) and all(map(_same_word, mine, yours))) for mine, yours in zip(ours, theirs)
    )


def same_value(value: Any, expected: Any) -> bool:
    """Equal, with numbers compared as in `same_output`; tuples are lists here, as in JSON."""
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, int | float) and isinstance(value, int | float):
        return (
            _same_number(float(value), float(expected))
            if isinstance(value, float) or isinstance(expected, float)
            else value == expected
        )
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        theirs = {str(key): item for key, item in expected.items()}
        return set(value) == set(theirs) and all(same_value(value[key], theirs[key]) for key in value)
    return value == expected


def _same_word(mine: str, yours: str) -> bool:
    if mine == yours:
        return True
    try:
        int(mine), int(yours)
    except ValueError:
        pass
    else:
        return int(mine) == int(yours)
    try:
        return _same_number(float(mine), float(yours))
    except ValueError:
        return False


def _same_number(mine: float, yours: float) -> bool:
    return math.isclose(mine, yours, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _key(truth: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if name in truth:
            return truth[name]
    raise ValueError(
        f"A test of a programming problem needs {' or '.join(map(repr, names))}, it has {', '.join(map(str, truth))}."
    )


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _plain(value: Any) -> Any:
    """Arrays of a parquet reader as lists, at every depth; what other rows have and this one has not, left out."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
