"""Tools from functions, classes and a YAML; a session that gives every call a result, whatever the tool does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from strop.agents.call_threads import MAX_ABANDONED
from strop.agents.parsers.base import Malformed, Raw, ToolCall
from strop.agents.tool_session import CallLimits, fit_arguments, truncated
from strop.agents.tool_set import ToolSet
from strop.agents.tools import (
    StatelessTool,
    ToolResult,
    ToolSchema,
    schema_of,
    stateless,
    tool_from_function,
)

LIMITS = CallLimits(timeout=60.0, max_response_length=256, truncate_side="middle", max_parallel=8)


def add(a: int, b: int = 1) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b (int, optional): The second,
            which may be left out.
    """
    return str(a + b)


async def shout(text: str) -> str:
    """Louder."""
    await asyncio.sleep(0)
    return text.upper()


def box_of(*functions: Any, **limits: Any) -> ToolSet:
    made = [f if hasattr(f, "schema") else tool_from_function(f) for f in functions]
    return ToolSet(made, CallLimits(**{**vars(LIMITS), **limits}))


def run(box: ToolSet, *calls: Any, kwargs: dict[str, Any] | None = None) -> tuple[list[ToolResult], Any]:
    async def episode() -> tuple[list[ToolResult], Any]:
        session = await box.open(kwargs)
        results = await session.run(calls)
        await session.close()
        return results, session

    return asyncio.run(episode())


# --- schemas ---------------------------------------------------------------------------------------------------------------


def test_schema_of_a_function():
    assert schema_of(add).as_openai() == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first."},
                    "b": {"type": "integer", "description": "The second, which may be left out."},
                },
                "required": ["a"],
            },
        },
    }


def test_schema_agrees_with_transformers():
    from transformers.utils import get_json_schema

    def search(query: str, tags: list[str], mode: Literal["fast", "deep"], most: int | None = None) -> str:
        """Search.

        Args:
            query: What to look for.
            tags: All of these.
            mode: How.
            most: At most.
        """
        return ""

    theirs = get_json_schema(search)["function"]
    ours = schema_of(search).as_openai()["function"]
    assert ours["parameters"]["required"] == theirs["parameters"]["required"]
    for name, form in theirs["parameters"]["properties"].items():
        assert dict(ours["parameters"]["properties"][name].items()) == form


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def f(x): ...", "'x' without a type"),
        ("def f(*x: int): ...", "gives every argument by name"),
        ("def f(x: complex): ...", "no form in JSON"),
        ("def f(x: 'Missing'): ...", "type hints that cannot be read"),
    ],
)
def test_functions_without_a_schema_are_refused(code, why):
    space: dict[str, Any] = {}
    exec(code, space)
    with pytest.raises(ValueError, match=why):
        tool_from_function(space["f"])


def test_sphinx_docstrings_are_read():
    def f(x: int) -> str:
        """Do it.

        :param x: How often.
        :return: nothing
        """
        return ""

    schema = schema_of(f)
    assert schema.description == "Do it."
    assert schema.parameters["properties"]["x"]["description"] == "How often."


# --- arguments -------------------------------------------------------------------------------------------------------------

OBJECT = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "on": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "mode": {"type": "string", "enum": ["a", "b"]},
        "where": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "maybe": {"type": "integer", "nullable": True},
    },
    "required": ["n"],
}


def test_arguments_that_fit():
    given = {
        "n": 3.0,
        "x": 1,
        "on": True,
        "tags": ["a"],
        "mode": "b",
        "where": {"city": "Rome"},
        "either": "x",
        "maybe": None,
    }
    assert fit_arguments(given, OBJECT) == {**given, "n": 3}
    assert type(fit_arguments(given, OBJECT)["n"]) is int


def test_a_fraction_stays_one_where_both_kinds_of_numbers_are_allowed():
    schema = {"properties": {"x": {"type": ["integer", "number"]}}, "additionalProperties": {}}
    assert fit_arguments({"x": 3.5, "more": 1}, schema) == {"x": 3.5, "more": 1}


def test_raw_text_gets_the_type_of_the_schema():
    raw = {
        "n": "3",
        "x": "2.5",
        "on": "True",
        "tags": '["a", "1"]',
        "mode": "a",
        "where": '{"city": "1"}',
        "either": "7",
        "maybe": "null",
    }
    assert fit_arguments({k: Raw(v) for k, v in raw.items()}, OBJECT) == {
        "n": 3, "x": 2.5, "on": True, "tags": ["a", "1"], "mode": "a", "where": {"city": "1"}, "either": 7, "maybe": None,
    }  # fmt: skip
    assert type(fit_arguments({"n": Raw("1"), "mode": Raw("a")}, OBJECT)["mode"]) is str


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"n": "3"}, "argument 'n' must be an integer, not a string ('3')"),
        ({"n": True}, "must be an integer, not a boolean"),
        ({"n": 1.5}, "must be an integer"),
        ({"n": Raw("three")}, "must be an integer, not a string"),
        ({"mode": "c"}, "must be one of 'a', 'b'"),
        ({"tags": ["a", 1]}, "item 1 of argument 'tags' must be a string"),
        ({"where": {"town": "x"}}, "in argument 'where': argument 'city' is missing"),
        ({"either": []}, "must be an integer, not a list ([]) or argument 'either' must be a string"),
        ({"tag": 1}, "there is no argument 'tag'. Did you mean 'tags'?"),
    ],
)
def test_arguments_that_do_not_fit(change, why):
    with pytest.raises(ValueError) as caught:
        fit_arguments({"n": 1, **change}, OBJECT)
    assert why in str(caught.value)


# --- sessions --------------------------------------------------------------------------------------------------------------


def test_calls_run_and_keep_their_order():
    results, session = run(
        box_of(add, shout),
        ToolCall("shout", {"text": "hi"}),
        ToolCall("add", {"a": 2}),
        ToolCall("add", {"a": 2, "b": 5}),
    )
    assert [r.text for r in results] == ["HI", "3", "7"]
    assert session.counts == {"tool_calls": 3}


def test_calls_of_one_turn_run_side_by_side_and_threads_do_not_hold_up_the_loop():
    begun: list[int] = []
    all_begun = threading.Event()

    def slow() -> str:
        """Waits for the event loop."""
        begun.append(threading.get_ident())
        return "done" if all_begun.wait(60) else "the others never began"

    async def turn() -> list[ToolResult]:
        session = await box_of(slow, timeout=100.0).open()
        calls = asyncio.ensure_future(session.run([ToolCall("slow")] * 8))
        while len(begun) < 8 and not calls.done():
            await asyncio.sleep(0.001)  # this loop goes on while the calls wait
        all_begun.set()
        return await calls

    assert [r.text for r in asyncio.run(turn())] == ["done"] * 8
    assert len(set(begun)) == 8


def test_a_thousand_episodes_wait_together():
    """Each call waits until all have begun."""
    barrier = threading.Barrier(1000)

    def slow() -> str:
        """Wait."""
        barrier.wait(60)
        return "done"

    box = box_of(slow, timeout=100.0)

    async def all_of_them() -> int:
        async def one() -> bool:
            session = await box.open()
            [result] = await session.run([ToolCall("slow")])
            return result.text == "done"

        return sum(await asyncio.gather(*(one() for _ in range(1000))))

    assert asyncio.run(all_of_them()) == 1000


def hang() -> str:
    """Never returns."""
    threading.Event().wait()
    return ""


let_go = threading.Event()
"""Ends the calls that do not return by themselves."""


async def block_the_loop() -> str:
    """Async, but it blocks."""
    let_go.wait(100)
    return ""


async def ignore_cancelling() -> str:
    """Will not be cancelled."""
    while not let_go.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)
    return ""


def explode() -> str:
    """Raises."""
    raise KeyError("missing")


async def leave() -> str:
    """Tries to end the program."""
    raise SystemExit(3)


def leave_too() -> str:
    """Tries to end the program from a thread."""
    raise SystemExit(3)


def five_megabytes() -> str:
    """Much."""
    return "x" * 5_000_000


def raw_bytes() -> Any:
    """No text."""
    return b"\x00"


def surrogate() -> str:
    """Text that cannot be encoded."""
    return "\ud800!"


@pytest.mark.parametrize(
    ("function", "limit", "kind", "says"),
    [
        (explode, 60.0, "raised", "explode failed: KeyError: 'missing'"),
        (leave, 60.0, "raised", "SystemExit: 3"),
        (leave_too, 60.0, "raised", "SystemExit: 3"),
        (raw_bytes, 60.0, "not_text", "it returned bytes"),
        (hang, 0.5, "timed_out", "no answer within 0.5 seconds"),
        (block_the_loop, 0.5, "timed_out", "no answer within 0.5 seconds"),
        (ignore_cancelling, 0.5, "timed_out", "no answer within 0.5 seconds"),
    ],
)
def test_bad_tools_get_a_message_and_are_counted(function, limit, kind, says):
    let_go.clear()
    box = box_of(function, add, timeout=limit, max_response_length=1000)
    try:
        start = time.perf_counter()
        [result], session = run(box, ToolCall(function.__name__))
        assert time.perf_counter() - start < 50, "the call that hangs is not waited for"
        assert result.failed and says in result.text and result.reward == 0.0
        assert session.counts["tool_failures"] == session.counts[f"tool_failures/{kind}"] == 1
        box.loop.close()
        box.limits = LIMITS
        [fine], _ = run(box, ToolCall("add", {"a": 1}))
        assert fine.text == "2"
    finally:
        let_go.set()


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (Malformed("{oops", "invalid JSON"), "malformed", "invalid JSON. You wrote: {oops"),
        (ToolCall("ad", {"a": 1}), "unknown_tool", "There is no tool 'ad'. Did you mean 'add'? Tools: add."),
        (
            ToolCall("add", {"a": "1"}),
            "wrong_arguments",
            "Wrong arguments for add: argument 'a' must be an integer",
        ),
        (ToolCall("add", {}), "wrong_arguments", "argument 'a' is missing"),
    ],
)
def test_bad_calls_get_a_message_and_are_counted(call, kind, says):
    [bad, good], session = run(box_of(add), call, ToolCall("add", {"a": 1}))
    assert bad.failed and says in bad.text
    assert not good.failed and good.text == "2"
    assert session.counts == {"tool_calls": 2, "tool_failures": 1, f"tool_failures/{kind}": 1}


def test_more_calls_than_allowed_are_refused():
    results, session = run(box_of(add, max_parallel=1), *[ToolCall("add", {"a": n}) for n in range(3)])
    assert [r.failed for r in results] == [False, True, True]
    assert "at most 1 tool call is made per turn" in results[1].text
    assert session.counts["tool_failures/too_many"] == 2


def test_long_and_strange_text_is_made_fit():
    [long, odd], session = run(
        box_of(five_megabytes, surrogate), ToolCall("five_megabytes"), ToolCall("surrogate")
    )
    assert len(long.text) < 300 and "4999744 characters cut" in long.text and not long.failed
    assert odd.text == "?!"
    odd.text.encode()
    assert session.counts["tool_truncated"] == 1


@pytest.mark.parametrize(
    ("side", "kept"),
    [
        ("left", "abc...(5 characters cut)..."),
        ("right", "...(5 characters cut)...fgh"),
        ("middle", "ab...(5 characters cut)...h"),
    ],
)
def test_truncation(side, kept):
    assert truncated("abcdefgh", 3, side) == kept
    assert truncated("abc", 3, side) == "abc"


def test_values_are_told_as_json():
    def facts() -> dict[str, Any]:
        """Facts."""
        return {"city": "Łódź", "people": [1, 2], "none": None}

    [result], _ = run(box_of(facts), ToolCall("facts"))
    assert json.loads(result.text) == {"city": "Łódź", "people": [1, 2], "none": None}


def test_a_tool_that_always_hangs_is_not_called_for_ever():
    box = box_of(hang)
    tool = box.tools["hang"]
    tool._threads.abandoned = MAX_ABANDONED  # type: ignore[attr-defined]
    [result], _ = run(box, ToolCall("hang"))
    assert "never returned" in result.text


def end_the_limit_with(hanging: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a call passes once `hanging` is set, not before: a thread may start late."""

    async def wait(futures: Collection[asyncio.Future[Any]], *, timeout: float) -> Any:
        while True:
            done, waiting = await asyncio.wait(futures, timeout=0.001)
            if done or hanging.is_set():
                return done, waiting

    patched = SimpleNamespace(**{**vars(asyncio), "wait": wait})
    monkeypatch.setattr("strop.agents.tool_session.asyncio", patched)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_threads_that_come_back_are_no_longer_counted(monkeypatch):
    hanging, come_back = threading.Event(), threading.Event()

    def nap() -> str:
        """Sleep."""
        hanging.set()
        come_back.wait(60)
        return ""

    end_the_limit_with(hanging, monkeypatch)
    box = box_of(nap)
    [result], _ = run(box, ToolCall("nap"))
    threads = box.tools["nap"]._threads  # type: ignore[attr-defined]
    assert result.failed and threads.abandoned == 1
    come_back.set()
    wait_until(lambda: threads.abandoned == 0)


def test_a_thread_is_used_again_but_never_one_that_hangs(monkeypatch):
    used: list[int] = []
    hanging, come_back = threading.Event(), threading.Event()

    def who(block: bool) -> str:
        """Which thread."""
        used.append(threading.get_ident())
        if block:
            hanging.set()
            come_back.wait(60)
        return "done"

    end_the_limit_with(hanging, monkeypatch)
    box = box_of(who)
    threads = box.tools["who"]._threads  # type: ignore[attr-defined]
    for block in (False, False, True, False):
        hanging.clear()
        run(box, ToolCall("who", {"block": block}))
        if not block:
            wait_until(lambda: threads._num_idle == 1)
    come_back.set()
    assert used[0] == used[1] == used[2] != used[3]


def test_a_tool_without_state_is_not_asked_to_begin_or_end_and_keeps_its_instance():
    class Plain(StatelessTool):
        schema = ToolSchema("plain", "", {"type": "object", "properties": {}})

        async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResult:
            return ToolResult(instance_id)

    class Ended(Plain):
        schema = ToolSchema("ended", "", {"type": "object", "properties": {}})
        released = 0

        async def release(self, instance_id: str) -> None:
            Ended.released += 1

    assert stateless(Plain()) and not stateless(Ended())
    box = box_of(Plain(), Ended())
    (one, two, _), _ = run(box, ToolCall("plain"), ToolCall("plain"), ToolCall("ended"))
    assert one.text == two.text != "" and Ended.released == 1


class Counting(StatelessTool):
    """Keeps one number per episode; rewards the sum."""

    schema = ToolSchema("count", "Counts.", {"type": "object", "properties": {"by": {"type": "integer"}}})

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}
        self.log: list[str] = []

    async def create(self, instance_id: str, start: int = 0, **kwargs: Any) -> str:
        self.log.append("create")
        await asyncio.sleep(0.05)
        self.sums[instance_id] = start
        return instance_id

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResult:
        self.sums[instance_id] += arguments.get("by", 1)
        return ToolResult(str(self.sums[instance_id]), reward=0.5, metrics={"n": 1.0})

    async def calc_reward(self, instance_id: str) -> float:
        return float(self.sums[instance_id])

    async def release(self, instance_id: str) -> None:
        self.log.append("release")
        del self.sums[instance_id]


def test_a_tool_keeps_its_state_over_the_turns_of_an_episode():
    tool = Counting()
    box = box_of(tool, add)

    async def episode(start: int | None) -> tuple[list[str], dict[str, float]]:
        session = await box.open({"count": {"create_kwargs": {"start": start}}, "other": None})
        first = await session.run([ToolCall("count", {"by": 2}), ToolCall("count", {"by": 3})])
        second = await session.run([ToolCall("count", {"by": 10})])
        rewards = await session.rewards()
        await session.close()
        assert first[0].reward == 0.5 and first[0].metrics == {"n": 1.0}
        return [r.text for r in second], rewards

    async def both() -> Any:
        return await asyncio.gather(episode(100), episode(None))

    assert asyncio.run(both()) == [(["115"], {"count": 115.0}), (["15"], {"count": 15.0})]
    assert tool.log.count("create") == tool.log.count("release") == 2 and not tool.sums


def test_an_episode_that_does_not_use_a_tool_does_not_create_it():
    tool = Counting()
    _, session = run(box_of(tool, add), ToolCall("add", {"a": 1}))
    assert tool.log == []
    assert asyncio.run(session.rewards()) == {}


class Broken(Counting):
    def __init__(self, **broken: Any):
        super().__init__()
        self.broken = broken

    async def create(self, instance_id: str, start: int = 0, **kwargs: Any) -> str:
        if "create" in self.broken:
            await self.broken["create"]()
        return await super().create(instance_id)

    async def calc_reward(self, instance_id: str) -> float:
        return self.broken.get("reward", 0.0)

    async def release(self, instance_id: str) -> None:
        raise RuntimeError("stuck")


def test_rewards_and_releases_that_fail_are_counted():
    async def episode() -> Any:
        session = await box_of(Broken(reward=float("nan"))).open()
        await session.run([ToolCall("count")])
        rewards = await session.rewards()
        await session.close()
        return rewards, session.counts

    rewards, counts = asyncio.run(episode())
    assert rewards == {}
    assert counts["tool_errors/calc_reward"] == counts["tool_errors/release"] == 1


async def _forever() -> None:
    await asyncio.sleep(1000)


async def _refuse() -> None:
    raise OSError("no room")


@pytest.mark.parametrize(
    ("create", "limit", "kind"), [(_refuse, 60.0, "raised"), (_forever, 0.3, "timed_out")]
)
def test_a_create_that_fails_or_hangs_fails_the_call(create, limit, kind):
    start = time.perf_counter()
    [result], session = run(box_of(Broken(create=create), timeout=limit), ToolCall("count"))
    assert result.failed and session.counts[f"tool_failures/{kind}"] == 1
    assert time.perf_counter() - start < 50


def test_tools_survive_from_one_event_loop_to_the_next():
    """A trainer may run every step on a loop of its own; what a tool holds belongs to the tools' loop."""

    class Keeper(StatelessTool):
        schema = ToolSchema("keep", "", {"type": "object", "properties": {}})
        queue: asyncio.Queue[int] | None = None

        async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResult:
            if self.queue is None:
                self.queue = asyncio.Queue()
                asyncio.get_running_loop().call_later(0.2, self.queue.put_nowait, 7)
                return ToolResult("started")
            return ToolResult(str(await self.queue.get()))

    box = box_of(Keeper())
    assert run(box, ToolCall("keep"))[0][0].text == "started"
    assert run(box, ToolCall("keep"))[0][0].text == "7"


# --- the YAML --------------------------------------------------------------------------------------------------------------

VERL_TOOL = '''
class Response:
    def __init__(self, text=None, image=None, video=None): self.text, self.image, self.video = text, image, video

class Grader:
    """As verl's tools are written: config and schema, tuples of three."""
    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name
        self.truths, self.released = {}, []
    def get_openai_tool_schema(self): return self.tool_schema
    async def create(self, instance_id=None, ground_truth=None, **kwargs):
        self.truths[instance_id] = ground_truth or kwargs["create_kwargs"]["ground_truth"]
        return instance_id, Response()
    async def execute(self, instance_id, parameters, **kwargs):
        if parameters["answer"] == "picture":
            return Response(image=["pixels"]), 0.0, {}
        if parameters["answer"] == "film":
            return Response(text="a film", video=[["frame", "frame"]]), 0.0, {}
        kwargs["agent_data"].extra_fields["asked"] = True
        right = parameters["answer"] == self.truths[instance_id]
        return Response(text=f"right={right}"), self.config["bonus"] if right else -0.05, {"right": right}
    async def calc_reward(self, instance_id, **kwargs): return 1.0
    async def release(self, instance_id, **kwargs): self.released.append(instance_id)

class NoSchema:
    def __init__(self, config, tool_schema): pass
    def execute(self, instance_id, parameters): return "x"

class NotATool:
    def __init__(self, config, tool_schema): pass

class Fails:
    def __init__(self, config, tool_schema): raise RuntimeError("no index at " + config["index"])

def weather(city: str) -> str:
    """Weather of a city."""
    return f"Sunny in {city}"
'''
SCHEMA = "{type: function, function: {name: grade, description: Grades., parameters: {type: object, properties: {answer: {type: string}}, required: [answer]}}}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_tools.py").write_text(VERL_TOOL)
    return tmp_path


def from_yaml(folder: Path, text: str) -> ToolSet:
    file = folder / "tools.yaml"
    file.write_text(text)
    return ToolSet.from_config(
        str(file), timeout=5.0, max_response_length=256, truncate_side="middle", max_parallel=4
    )


def test_verl_tools_and_functions_from_one_yaml(folder):
    box = from_yaml(
        folder,
        f"tools:\n  - class_name: my_tools.py:Grader\n    config: {{type: native, bonus: 2.0}}\n    tool_schema: {SCHEMA}\n"
        "  - function: my_tools.py:weather\n",
    )
    assert [schema["function"]["name"] for schema in box.schemas] == ["grade", "weather"]
    kwargs = {"grade": {"create_kwargs": {"ground_truth": "4"}, "execute_kwargs": None}, "weather": None}
    calls = [
        ToolCall("grade", {"answer": "4"}),
        ToolCall("grade", {"answer": "5"}),
        ToolCall("weather", {"city": "Rome"}),
    ]
    results, session = run(box, *calls, ToolCall("grade", {"answer": "picture"}), kwargs=kwargs)
    assert [r.text for r in results[:3]] == ["right=True", "right=False", "Sunny in Rome"]
    assert [r.reward for r in results[:2]] == [2.0, -0.05]
    assert results[0].metrics == {"right": 1.0}
    assert results[3].images == ("pixels",) and results[3].text == ""
    assert len(box.tools["grade"].tool.released) == 1  # type: ignore[attr-defined]
    assert asyncio.run(session.rewards()) == {}  # closed
    [film], _ = run(box, ToolCall("grade", {"answer": "film"}), kwargs=kwargs)
    assert film.failed and "returned a video, and only text and images can be shown" in film.text


def test_base_tool_can_take_the_place_of_verls(folder):
    (folder / "own.py").write_text(
        "from strop.agents.verl_tool import BaseTool, ToolResponse\n"
        "class Echo(BaseTool):\n"
        "    async def execute(self, instance_id, parameters, **kwargs):\n"
        "        return ToolResponse(text=self.name + parameters['answer']), 1.0, {}\n"
    )
    box = from_yaml(folder, f"tools:\n  - class_name: own.py:Echo\n    tool_schema: {SCHEMA}\n")
    [result], _ = run(box, ToolCall("grade", {"answer": "!"}))
    assert (result.text, result.reward) == ("grade!", 1.0)


def test_verls_gsm8k_tool_by_its_name(folder):
    box = from_yaml(
        folder, "tools:\n  - class_name: verl.tools.gsm8k_tool.Gsm8kTool\n    config: {type: native}\n"
    )

    async def episode() -> Any:
        session = await box.open({"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}})
        results = []
        for answer in ("70", "72", "72"):
            results += await session.run([ToolCall("calc_gsm8k_reward", {"answer": answer})])
        rewards = await session.rewards()
        await session.close()
        return results, rewards

    results, rewards = asyncio.run(episode())
    assert [(r.text, r.reward) for r in results] == [
        ("70 is wrong.", -0.05),
        ("72 is right.", 0.0),
        ("72 is right.", -0.05),
    ]
    assert rewards == {"calc_gsm8k_reward": 1.0}
    [failed], _ = run(box, ToolCall("calc_gsm8k_reward", {"answer": "72"}))
    assert failed.failed and "no tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth" in failed.text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tools: []", "at least one entry"),
        ("- a", "needs a list under `tools:`"),
        ("tools: [{", "is not YAML"),
        ("tools:\n  - {config: {}}", "exactly one of class_name, function, mcp"),
        ("tools:\n  - {class_nam: x}", "unknown key 'class_nam'. Did you mean 'class_name'?"),
        ("tools:\n  - class_name: my_tools.py:NoSchema", "brings none, so it.*needs a schema of the form"),
        (
            f"tools:\n  - class_name: my_tools.py:Grade\n    tool_schema: {SCHEMA}",
            "defines no 'Grade'. Did you mean 'Grader'",
        ),
        (f"tools:\n  - class_name: gone.py:Grader\n    tool_schema: {SCHEMA}", "'gone.py' does not exist"),
        (
            f"tools:\n  - class_name: no_such_module.Grader\n    tool_schema: {SCHEMA}",
            "'no_such_module' cannot be imported",
        ),
        (
            f"tools:\n  - class_name: my_tools.py:NotATool\n    tool_schema: {SCHEMA}",
            "has no method `execute",
        ),
        (
            f"tools:\n  - class_name: my_tools.py:weather\n    tool_schema: {SCHEMA}",
            "is no class. A function goes under",
        ),
        (
            f"tools:\n  - class_name: my_tools.py:Fails\n    config: {{index: x}}\n    tool_schema: {SCHEMA}",
            "RuntimeError: no index at x",
        ),
        (
            "tools:\n  - class_name: my_tools.py:Grader\n    tool_schema: {type: function}",
            "needs a schema of the form",
        ),
        (
            "tools:\n  - function: my_tools.py:weather\n  - function: my_tools.py:weather",
            "Two tools are called 'weather'",
        ),
        ("tools:\n  - function: my_tools.py:weathr", "defines no 'weathr'"),
    ],
)
def test_a_bad_yaml_is_refused_at_once(folder, text, why):
    with pytest.raises(ValueError, match=why):
        from_yaml(folder, text)


def test_a_file_that_needs_verl_says_what_to_do(folder):
    (folder / "theirs.py").write_text("from verl.tools.base_tool import BaseTool\n")
    with pytest.raises(ValueError, match=r"can be imported from strop.agents.verl_tool instead"):
        from_yaml(folder, "tools:\n  - class_name: theirs.py:X")


def test_a_missing_yaml_and_no_yaml(tmp_path):
    settings: Any = {"timeout": 1.0, "max_response_length": 10, "truncate_side": "left", "max_parallel": 1}
    with pytest.raises(ValueError, match=r"tool_config_path=.*gone.yaml does not exist"):
        ToolSet.from_config(str(tmp_path / "gone.yaml"), **settings)
    assert ToolSet.from_config(None, **settings).schemas == []


def test_a_tool_that_deletes_its_own_file_goes_on_working(folder):
    box = from_yaml(folder, "tools:\n  - function: my_tools.py:weather")
    (folder / "my_tools.py").unlink()
    [result], _ = run(box, ToolCall("weather", {"city": "Rome"}))
    assert result.text == "Sunny in Rome"


def test_select():
    box = box_of(add, shout)
    assert list(box.select(["shout"]).tools) == ["shout"]
    with pytest.raises(ValueError, match=r"There is no tool 'shot'. Did you mean 'shout'"):
        box.select(["shot"])
