"""Assertions: what they can use of a program, and that a program cannot deceive them."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading

import pytest

from strop.config.schema.reward import SandboxFusionConfig
from strop.rewards.rules.code import compute_score
from strop.rewards.sandbox.checker import NotTrusted, ProgramCalls, StandIn
from strop.rewards.sandbox.launch import STRONG_LEVELS, isolation_problem
from strop.rewards.sandbox.limits import ProgramOutcome
from strop.rewards.sandbox.literal_calls import all_hold, split_assertions
from strop.rewards.sandbox.remote import build_script, parse_outcome

LEVEL = next(level for level in (*STRONG_LEVELS, "limits") if not isolation_problem(level))
QUICK = SandboxFusionConfig(timeout=3.0, total_timeout=20.0, isolation=LEVEL)


def score(program: str, *assertions: str) -> object:
    return compute_score(f"```python\n{program}\n```", list(assertions), sandbox=QUICK)["score"]


HONEST = """
import math
from collections import Counter, deque, namedtuple
def add(a, b=0): return a + b
def kinds(): return [1, (2.5, None), {3}, {'k': b'x'}, frozenset([4]), 1j, range(3), 10**400, True, 'ü']
def sort_it(items): items.sort()
def fill(rows, table):
    rows[0].append(1); table['x'] = [rows[0][:]]
def apply(function, *values): return [function(value) for value in values]
def count(text): return Counter(text)
def numbers():
    yield 1
    yield 2
class OwnError(ValueError): pass
def fail(kind):
    raise {'own': OwnError, 'key': KeyError}[kind](kind)
class Stack:
    size = 0
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item); self.size += 1; return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __getitem__(self, key): return self.items[key]
    def __contains__(self, item): return item in self.items
def adder(step): return lambda value: value + step
class Solution:
    def twice(self, value): return 2 * value
"""


@pytest.mark.parametrize(
    "assertions",
    [
        "assert add(1, b=2) == 3 and add('a', 'b') == 'ab'\nassert not add(0)\nassert add(1) is not None",
        "assert kinds() == [1, (2.5, None), {3}, {'k': b'x'}, frozenset([4]), 1j, range(3), 10**400, True, 'ü']\n"
        "assert type(kinds()[8]) is bool and isinstance(kinds()[1], tuple)",
        "items = [3, 1, 2]\nassert sort_it(items) is None\nassert items == [1, 2, 3]",
        "row = []\nrows = [row]\ntable = {}\nfill(rows, table)\nassert row == [1] and table == {'x': [[1]]}",
        "assert apply(lambda value: value * 2, 1, 2) == [2, 4]\nassert apply(len, 'a', 'bc') == [1, 2]",
        "def double(x): return 2 * x\nassert apply(double, 4) == [8]",
        "assert count('aab') == {'a': 2, 'b': 1}\nassert list(numbers()) == [1, 2] and sum(numbers()) == 3",
        "assert [x for x in numbers()] == [1, 2]\nassert next(numbers()) == 1",
        "try:\n    fail('own')\n    assert False\nexcept OwnError as error:\n    assert str(error) == 'own'",
        "try:\n    fail('own')\n    assert False\nexcept ValueError: pass\n"
        "try:\n    fail('key')\n    assert False\nexcept KeyError: pass",
        "stack = Stack()\nstack.push(1).push((2,))\nassert len(stack) == 2 and stack[0] == 1 and 1 in stack\n"
        "assert stack.pop() == (2,) and stack.items == [1] and stack.size == 2\nstack.size = 7\nassert stack.size == 7",
        "assert adder(2)(3) == 5\nassert callable(adder(2)) and adder(1) is not None",
        "assert Solution().twice(4) == 8",
        "assert math.isclose(add(0.1, 0.2), 0.3)\nassert abs(add(0.1, 0.2) - 0.3) < 1e-9",
        "import datetime, decimal, fractions\nassert add(datetime.date(2024, 1, 1), datetime.timedelta(1)) == datetime.date(2024, 1, 2)\n"
        "assert add(decimal.Decimal('0.1'), decimal.Decimal('0.2')) == decimal.Decimal('0.3')\n"
        "assert add(fractions.Fraction(1, 3)) == fractions.Fraction(1, 3)",
        "METADATA = {'author': 'x'}\ndef check(candidate):\n    for n in range(20):\n        assert candidate(n, n) == 2 * n, 'no'\ncheck(add)",
    ],
)
def test_what_assertions_can_use(assertions):
    assert score(HONEST, assertions) == 1.0
    assert score(HONEST, f"{assertions}\nassert add(1, 1) == 3") == 0.0


def test_arrays():
    program = "import numpy as np\ndef ones(n): return np.ones(n) * np.float64(2)"
    assertions = (
        "import numpy as np\nassert np.allclose(ones(3), 2)\nassert (ones(2) == np.array([2, 2])).all()"
    )
    settings = SandboxFusionConfig(timeout=20.0, memory_limit_mb=2048, isolation=LEVEL)
    assert compute_score(f"```python\n{program}\n```", [assertions], sandbox=settings)["score"] == 1.0


ALWAYS_EQUAL = "class Yes{base}:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n" \
    "    def __bool__(self): return True\n    __hash__ = None\n    def __lt__(self, other): return True\n    __gt__ = __le__ = __ge__ = __lt__\n"  # fmt: skip
READ_SELF = """
import gc, re, sys, os
def search(text):
    found = re.findall(r'assert f\\(\\d*\\) == (\\d+)', text)
    return int(found[0]) if found else None
def everything():
    frame = sys._getframe()
    while frame:
        yield repr(frame.f_locals) + repr(frame.f_globals.get('request'))
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, (str, bytes, list, tuple, dict)):
            try: yield repr(thing)
            except Exception: pass
    for pid in ('self', str(os.getppid()), *[str(n) for n in range(1, 12)]):
        try:
            maps = open(f'/proc/{pid}/maps').read().splitlines()
            memory = open(f'/proc/{pid}/mem', 'rb', 0)
        except OSError:
            continue
        for line in maps:
            first, last = (int(n, 16) for n in line.split()[0].split('-'))
            try:
                memory.seek(first)
                yield memory.read(min(last - first, 1 << 24)).decode('latin-1')
            except (OSError, ValueError, OverflowError): pass
    for number in range(64):
        for path in (f'/proc/self/fd/{number}', f'/proc/{os.getppid()}/fd/{number}'):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                yield os.read(descriptor, 1 << 20).decode('latin-1')
            except OSError: pass
# The pattern itself must not be found.
def f(x):
    for text in everything():
        value = search(text)
        if value is not None: return value
    return 0
"""
DECEIVERS = {
    "an object that equals everything": ALWAYS_EQUAL.format(base="") + "def f(x): return Yes()",
    "an integer that equals everything": ALWAYS_EQUAL.format(base="(int)") + "def f(x): return Yes(3)",
    "a list that equals everything": ALWAYS_EQUAL.format(base="(list)") + "def f(x): return Yes()",
    "writing the report": "import os\nfor d in range(3, 256):\n    try: os.write(d, b'{\"value\": true}')\n    except OSError: pass\nos._exit(0)",
    "writing the report in a call": "import os\ndef f(x):\n    for d in range(3, 256):\n"
    "        try: os.write(d, b'{\"value\": true}\\n')\n        except OSError: pass\n    os._exit(0)",
    "changing frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        frame.f_globals['AssertionError'] = Warning\n        frame.f_globals['f'] = frame.f_locals['f'] = lambda x: 0\n"
    "        frame = frame.f_back\n    return 0",
    "replacing the runner": "import sys, builtins\nfor name, module in list(sys.modules.items()):\n"
    "    if 'sandbox' in name:\n        for key in list(vars(module)):\n"
    "            if callable(getattr(module, key)): setattr(module, key, lambda *a, **k: True)\n"
    "builtins.exec = builtins.compile = lambda *a, **k: None\nbuiltins.AssertionError = Exception\ndef f(x): return 0",
    "reading the assertions": READ_SELF,
    "names of builtins": "def abs(x): return 0\ndef len(x): return 0\ndef isinstance(*a): return True\ndef all(x): return True\ndef f(x): return 0",
    "leaving": "import sys\nsys.exit(0)",
    "leaving in a call": "import sys\ndef f(x): sys.exit(0)",
    "an end without a word": "import os\ndef f(x): os._exit(0)",
    "killing the others": "import os, signal\ndef f(x):\n    os.kill(-1, signal.SIGKILL)\n    return 0",
    "replies without end": "import os\ndef f(x):\n    for d in range(3, 64):\n        try:\n            while True: os.write(d, b'x' * 65536)\n        except OSError: pass",
    "calls back to nothing": 'import os\ndef f(x):\n    for d in range(3, 64):\n        try: os.write(d, b\'{"callback": 0, "arguments": ["list", []]}\\n\')\n        except OSError: pass\n    return 0',
}


@pytest.mark.parametrize("name", DECEIVERS)
def test_a_program_cannot_deceive_assertions(name):
    number = 10**6 + secrets.randbelow(10**6)
    settings = SandboxFusionConfig(timeout=2.0, total_timeout=20.0, isolation=LEVEL)
    program = f"```python\n{DECEIVERS[name]}\n```"
    truth = [
        f"assert f(1) == {number}",
        f"assert abs(f(2) - {number}) < 1e-6",
        f"assert len([f(3)] * {number}) == 0",
    ]
    assert compute_score(program, truth, sandbox=settings)["score"] == 0.0


def test_what_a_test_prints_does_not_reach_the_next_one():
    """The process of the next test is a copy of the one that reads the output."""
    show = "import sys\nfor stream in (sys.stdout, sys.stderr):\n    print('assert f(1) == 1234567', file=stream, flush=True)\n"
    assert score(READ_SELF, f"{show}assert f(1) == 1234567", "assert f(2) == 1234567") == 0.0


def test_conditions_on_objects_of_the_program_fail():
    program = ALWAYS_EQUAL.format(base="") + "def f(): return Yes()\ndef lists(): return [Yes()]"
    assertions = [
        "assert f() == 3",
        "assert 3 == f()",
        "assert f() != 3",
        "assert f()",
        "assert not f()",
        "assert f() < 3",
        "assert 3 in lists()",
        "assert lists() == [3]",
        "assert isinstance(3, Yes)",
        "try:\n    assert f() == 3\nexcept Exception: pass",
        "assert {f(): 1}",
    ]
    result = compute_score(f"```python\n{program}\n```", assertions, max_tests=20, sandbox=QUICK)
    assert result["score"] == 0.0


def test_an_object_of_the_test_cannot_be_given_to_a_program(caplog):
    test = "class Point: pass\nassert f(Point()) == 1"
    assert score("def f(point): return 1", test) == 0.0
    assert "fails for every program" in caplog.text and "Point" in caplog.text


# --- replies of a program that writes them itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"garbage\n",
        b"\xff\xfe\n",
        b"[1]\n",
        b"3\n",
        b"[" * 100_000 + b"\n",
        b'{"value": ' + b"9" * 5000 + b"}\n",
        b'{"value": {"a": 1}}\n',
        b'{"value": ["unknown", 1]}\n',
        b'{"value": ["list"]}\n',
        b'{"value": []}\n',
        b'{"value": ["set", [["list", []]]]}\n',
        b'{"value": ["dict", [1]]}\n',
        b'{"value": ["int", "zz"]}\n',
        b'{"value": ["bytes", 3]}\n',
        b'{"value": ["builtin", "exec"]}\n',
        b'{"value": ["builtin", "gone"]}\n',
        b'{"value": ["exception", 0, "E", "SystemExit"]}\n',
        b'{"value": ["exception", 0, "E", "exec"]}\n',
        b'{"value": ["ndarray", "O", ["list", []]]}\n',
        b'{"value": ["Decimal", "x"]}\n',
        b'{"value": ["date", "x"]}\n',
        b'{"value": ["timedelta", 1e400, 0, 0]}\n',
        b'{"value": ["range", 0, 1, 0]}\n',
        b'{"error": ["builtin", "SystemExit"], "message": ""}\n',
        b'{"error": 3}\n',
        b'{"error": ["object", 3]}\n',
        b"x" * 200_000 + b"\n",
    ],
)
def test_no_reply_gives_anything_but_values(line):
    calls_read, calls_write = os.pipe()
    replies_read, replies_write = os.pipe()
    writer = threading.Thread(target=write_all, args=(replies_write, line))
    writer.start()
    program = ProgramCalls(calls_write, replies_read, limit=150_000)
    with pytest.raises(NotTrusted):
        program.call(StandIn(program, 0), (), {})
    program.replies.close()
    writer.join()
    os.close(calls_read)
    os.close(calls_write)


def write_all(descriptor: int, content: bytes) -> None:
    with os.fdopen(descriptor, "wb") as pipe:
        try:
            pipe.write(content)
            pipe.flush()
        except BrokenPipeError:
            os.close(pipe.detach().detach())


HUMAN_EVAL = """
METADATA = {'author': 'x'}

def check(candidate):
    \"\"\"Tests.\"\"\"
    assert candidate([1.0, 2.0], 0.3) == True, "first"
    assert abs(candidate([3.5], 1) - 0.25) < 1e-6
    assert True

check(close)
"""


# --- assertions on a sandbox server -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "values", "holds"),
    [
        ("assert f(1, x=[2]) == 3", "[3]", True),
        ("assert f(1) == 3", "[4]", False),
        ("assert 3 == f(1)\nassert f(2) != 3", "[3, 4]", True),
        ("assert f(1) is None", "[None]", True),
        ("assert f(1) is None", "[0]", False),
        ("assert f()\nassert not f()", "[1, 0]", True),
        ("assert Solution().f([1]) == (1, {2})", "[(1, {2})]", True),
        ("assert f(1) == 3", "[3, 3]", False),
        ("assert abs(f(1) - 0.5) < 1e-6", "[0.5000001]", True),
        ("assert abs(f(1) - 0.5) < 1e-6", "[0.6]", False),
        ("assert abs(f(1) - 0.5) < 1e-6", "['x']", False),
        ("assert abs(f(1) - 0.5) < 1e-6", f"[1{'0' * 400}]", False),
        (HUMAN_EVAL, "[True, 0.25]", True),
        (HUMAN_EVAL, "[False, 0.25]", False),
        ("assert f(1) == 3", "Yes()", False),
        ("assert f(1) == 3", "", False),
    ],
)
def test_assertions_with_literals_are_compared_here(source, values, holds):
    split = split_assertions(source)
    assert split
    assert all_hold(split, values) is holds


@pytest.mark.parametrize(
    "source",
    [
        "x = 1",
        "assert f(g(1)) == 3",
        "assert len(f(1)) == 3",
        "assert f(1) == f(2)",
        "if",
        "assert f(1) is 3",
        "assert f(1) < 3",
        "assert abs(f(1) - g(1)) < 3",
        "def check(candidate):\n    for x in (1, 2):\n        assert candidate(x) == x\ncheck(f)",
        "def check(candidate, other):\n    assert candidate(1) == 1\ncheck(f)",
        "def check(candidate):\n    assert candidate(1) == 1\ncheck(lambda x: 1)",
        "def check(candidate):\n    assert candidate(1) == 1\n",
    ],
)
def test_other_assertions_are_not_split(source):
    assert split_assertions(source) is None


@pytest.mark.parametrize("text", ["", "{", '"', "[" * 100_000, "9" * 5000, "3 and more"])
def test_what_a_program_prints_behind_its_value_is_no_error(text):
    reply = {
        "status": "Success",
        "run_result": {"status": "Finished", "return_code": 0, "stdout": f"a\nMARK{text}"},
    }
    outcome = parse_outcome(reply, "MARK", {"function": "f", "arguments": []})
    assert outcome.status == "ok" and not outcome.returned


def test_a_check_of_humaneval_calls_the_program_by_its_name():
    script = build_script("", {"assertions": HUMAN_EVAL}, "MARK")
    assert "[close([1.0, 2.0], 0.3), close([3.5], 1)]" in script and "0.25" not in script


def test_assertions_that_would_run_with_the_program_are_refused():
    """A program that ends with `class int: ...` or an `__eq__` of its own would pass them on a server."""
    sandbox = SandboxFusionConfig(url="http://127.0.0.1:9/run_code")
    with pytest.raises(ValueError, match=r"assert len\(f\(1\)\) == 3.*shared_assertions=true"):
        compute_score("```python\ndef f(x): pass\n```", "assert len(f(1)) == 3", sandbox=sandbox)


def test_the_script_for_a_server_holds_no_expected_value():
    script = build_script("def f(x): return x", {"assertions": "assert f(1) == 424242"}, "MARK")
    assert "424242" not in script and "f(1)" in script
    assert json.dumps(script)


def run_script(program: str, test: dict[str, object]) -> ProgramOutcome:
    """What a server that runs the script for this test answers."""
    done = subprocess.run(
        [sys.executable, "-c", build_script(program, test, "MARK")], capture_output=True, text=True
    )
    result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout}
    return parse_outcome({"status": "Success", "run_result": result}, "MARK", test)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("numpy.mean([1, 2])", "1.5"),
        ("[numpy.int64(2)]", "[2]"),
        ("numpy.bool_(True)", "True"),
        ("collections.Counter('aab')", "{'a': 2, 'b': 1}"),
        ("collections.defaultdict(list, a=[1])", "{'a': [1]}"),
        ("collections.namedtuple('P', 'x y')(1, 2)", "(1, 2)"),
        ("frozenset([1])", "{1}"),
        ("fractions.Fraction(1, 2)", "0.5"),
        ("decimal.Decimal('0.5')", "0.5"),
    ],
)
def test_a_server_gives_the_verdict_of_the_local_sandbox(value: str, expected: str) -> None:
    program = f"import collections, decimal, fractions, numpy\ndef f(x): return {value}"
    for test, right in ((f"assert f(1) == {expected}", True), ("assert f(1) == 'other'", False)):
        assert score(program, test) == float(right)
        assert run_script(program, {"assertions": test}).returned is right


def test_a_program_on_a_server_may_use_names_of_builtins() -> None:
    program = "dict = {}\nlist = [1]\nmap = isinstance = None\ndef f(x): return [x, {x: x}]"
    assert run_script(program, {"assertions": "assert f(1) == [1, {1: 1}]"}).returned


def test_a_server_returns_numbers_of_numpy() -> None:
    program = "import numpy\ndef f(x): return [numpy.int64(x), numpy.array([x])]"
    assert run_script(program, {"function": "f", "arguments": [1]}).value == [1, [1]]
