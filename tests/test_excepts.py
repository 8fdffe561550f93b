"""Every broad `except` of the package: it raises again, or it is listed here with its reason.

A handler of everything hides mistakes: a self-check of kernels once took an exception with which torch steers a
pass for a broken kernel. A handler whose last statement is `raise` hides nothing and is not counted.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.source_trees import nodes

ROOT = Path(__file__).parent.parent / "strop"
BROAD = ("Exception", "BaseException")

HANDED_ON = "the error is raised where the result is awaited"
ALLOWED: dict[str, tuple[int, str]] = {
    "agents/mcp.py": (
        4,
        f"an MCP client may raise anything: {HANDED_ON}; one that fails a ping is dropped, its server is "
        "started again, and the last error is raised when no attempt succeeded",
    ),
    "agents/runner.py": (1, "an agent loop is user code: it fails one episode, which is counted"),
    "agents/tool_session.py": (3, "a tool is user code: it fails one call, which is counted"),
    "agents/call_threads.py": (1, f"a tool in a thread: {HANDED_ON}"),
    "api/callbacks.py": (1, "a callback is user code: it ends the run, and is raised when it has ended"),
    "concurrency.py": (2, "one item of many, in a thread: its error is its result"),
    "ppo/run_ahead.py": (1, f"sampling in a thread: {HANDED_ON}"),
    "preflight/ppo.py": (1, "a reward function is user code: its error is a finding"),
    "preflight/row_checks.py": (1, "a data set class is user code: its error is a finding"),
    "ranks.py": (1, "raised again on every rank"),
    "rewards/sandbox/calls.py": (2, "a program of the model may raise anything, also in __str__"),
    "rewards/sandbox/checker.py": (2, "assertions and callbacks of a test may raise anything"),
    "rewards/sandbox/program.py": (3, "a program of the model may raise anything and replace its streams"),
    "rewards/scorer.py": (1, "a reward manager is user code: all its samples fail, and are counted"),
    "rewards/server.py": (2, "one request of many: it is answered with the error, the server goes on"),
    "rewards/timelimit.py": (2, f"user code in a child process: {HANDED_ON}; an error may not unpickle"),
    "rollout/native/async_driver.py": (1, f"one request of many: {HANDED_ON}"),
    "rollout/native/engine.py": (1, f"all requests: {HANDED_ON}"),
    "rollout/native/requests.py": (1, f"a callback is user code: its request fails alone, {HANDED_ON}"),
    "rollout/vllm/driver.py": (2, f"the engine's thread: {HANDED_ON}"),
    "run/checkpoint/store.py": (2, f"a save in a thread ({HANDED_ON}), a copy to any remote file system"),
    "run/profile/capture.py": (1, "a profiler may fail and is switched off; the run goes on"),
    "run/samples.py": (1, "samples for the board may fail; the run goes on"),
    "run/trackers/base.py": (1, "one tracker may fail and gets nothing more; the run goes on"),
    "policy/ranked.py": (1, f"a call of ranks in a thread: {HANDED_ON}"),
    "policy/worker.py": (1, f"an operation of one rank: {HANDED_ON}"),
    "serve/dispatch.py": (1, f"scores of prompts: {HANDED_ON}"),
    "serve/service.py": (1, "one sample of many: it is answered with the error, the service goes on"),
    "serve/trainer.py": (
        2,
        "one request of many: it is answered with the error, the service goes on; a snapshot is tried again after "
        "the next step",
    ),
    "runtime/replica_engine.py": (1, f"a request in a thread: {HANDED_ON}"),
    "runtime/weight_transports.py": (2, "errors of other machines; the weights go by the object store"),
}


def names_of(kind: ast.expr | None) -> list[str]:
    """Names of the exceptions that a handler takes; a bare `except` takes BaseException."""
    if kind is None:
        return ["BaseException"]
    if isinstance(kind, ast.Tuple):
        return [name for part in kind.elts for name in names_of(part)]
    return [ast.unparse(kind).rpartition(".")[2]]


def called(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def broad_lines(found: Iterable[ast.AST]) -> list[int]:
    """Lines of the handlers of everything that do not end with `raise`, and of `suppress(Exception)`."""
    lines = []
    for node in found:
        taken: list[str] = []
        if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise):
            taken = names_of(node.type)
        elif isinstance(node, ast.Call) and called(node) == "suppress":
            taken = [name for argument in node.args for name in names_of(argument)]
        if set(taken) & set(BROAD):
            lines.append(node.lineno)
    return lines


def nodes_of(source: str) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(source))


def test_every_broad_except_is_listed_with_its_reason() -> None:
    found: Counter[str] = Counter()
    places: dict[str, list[int]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        lines = broad_lines(nodes(path))
        if lines:
            name = path.relative_to(ROOT).as_posix()
            found[name] = len(lines)
            places[name] = lines
    listed = {name: count for name, (count, _) in ALLOWED.items()}
    wrong = []
    for name in sorted(set(found) | set(listed)):
        if found[name] != listed.get(name, 0):
            wrong.append(
                f"{name}: {listed.get(name, 0)} listed, {found[name]} in lines {places.get(name, [])}"
            )
    assert not wrong, "name what a handler expects, raise again, or list it:\n" + "\n".join(wrong)
    assert all(reason for _, reason in ALLOWED.values())


@pytest.mark.parametrize(
    ("handler", "is_broad"),
    [
        ("except Exception:\n    pass", True),
        ("except BaseException as error:\n    note(error)", True),
        ("except:\n    pass", True),
        ("except (ValueError, Exception):\n    pass", True),
        ("except builtins.Exception:\n    pass", True),
        ("except Exception as error:\n    if rare:\n        raise", True),
        ("except Exception:\n    undo()\n    raise", False),
        ("except Exception as error:\n    raise ValueError from error", False),
        ("except (ValueError, OSError):\n    pass", False),
    ],
)
def test_the_search_finds_them(handler: str, is_broad: bool) -> None:
    assert bool(broad_lines(nodes_of(f"try:\n    work()\n{handler}\n"))) == is_broad


@pytest.mark.parametrize("call", ["suppress(Exception)", "contextlib.suppress(OSError, BaseException)"])
def test_suppress_counts_too(call: str) -> None:
    assert broad_lines(nodes_of(f"with {call}:\n    work()\n")) == [1]
    assert broad_lines(nodes_of("with suppress(OSError):\n    work()\n")) == []
