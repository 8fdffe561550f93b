"""The code tool: what the model is told, and that programs stay in the sandbox."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from strop.agents.parsers.base import ToolCall
from strop.agents.python_tool import PythonTool
from strop.agents.tool_session import CallLimits
from strop.agents.tool_set import ToolSet
from strop.rewards.sandbox.limits import ProgramOutcome

LIMITS = CallLimits(timeout=30.0, max_response_length=2000, truncate_side="middle", max_parallel=16)


def told(*programs: str, **config):
    box = ToolSet([PythonTool(config)], LIMITS)

    async def episode():
        session = await box.open()
        results = await session.run([ToolCall("python", {"code": program}) for program in programs])
        await session.close()
        return results

    return asyncio.run(episode())


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("print(2 ** 10)", "1024"),
        ("x = 1", "The program ran and printed nothing."),
        ("print('a'); raise ValueError('b')", "ValueError: b"),
        ("import sys; sys.exit(3)", "The program ended with exit code 3."),
        ("while True: pass", "The program was stopped after 1 seconds."),
        ("print('x' * 10**7)", "stopped because it printed too much"),
        ("x = bytearray(10**10)", "MemoryError"),
    ],
)
def test_what_the_model_is_told(program, text):
    [result] = told(program, timeout=1 if program == "while True: pass" else 20)
    assert text in result.text and not result.failed
    assert result.metrics["program_failed"] == float(program not in ("print(2 ** 10)", "x = 1"))


def test_programs_run_side_by_side_and_share_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("strop.agents.python_tool.cores_per_rank", lambda: 2)
    both = threading.Barrier(2)
    run = PythonTool._run

    def run_beside_the_other(self: PythonTool, program: str) -> ProgramOutcome:
        both.wait(20)  # breaks if they run one after the other
        return run(self, program)

    monkeypatch.setattr(PythonTool, "_run", run_beside_the_other)
    results = told(
        "open('a', 'w')\nimport time; time.sleep(0.5)\nprint(1)", "import os; print(os.listdir('.'))"
    )
    assert [r.text for r in results] == ["1", "[]"]


def test_calls_that_time_out_in_the_queue_are_not_run_later(monkeypatch: pytest.MonkeyPatch):
    """They kept the tool busy for minutes after the episodes had gone on, and every later call was refused."""
    monkeypatch.setattr("strop.agents.python_tool.cores_per_rank", lambda: 1)
    begun: list[str] = []
    ends = threading.Event()

    def run(self: PythonTool, program: str) -> ProgramOutcome:
        begun.append(program)
        ends.wait(60)
        return ProgramOutcome("ok", "done")

    monkeypatch.setattr(PythonTool, "_run", run)
    patient = ToolSet([PythonTool()], CallLimits(100.0, 256, "left", 1))
    hurried = ToolSet(patient.tools.values(), CallLimits(0.2, 256, "left", 1), patient.loop)

    async def call(tools: ToolSet, program: str) -> str:
        session = await tools.open({})
        [result] = await session.run([ToolCall("python", {"code": program})])
        return result.text

    async def flood() -> tuple[str, list[str], str]:
        first = asyncio.ensure_future(call(patient, "first"))
        while not begun:
            await asyncio.sleep(0.001)
        queued = await asyncio.gather(*(call(hurried, "queued") for _ in range(100)))
        ends.set()
        return await first, queued, await call(patient, "later")

    first, queued, later = asyncio.run(flood())
    patient.close()
    assert all("no answer within 0.2 seconds" in text for text in queued)
    assert first == later == "done" and begun == ["first", "later"]


def test_from_a_yaml_under_another_name(tmp_path: Path):
    file = tmp_path / "tools.yaml"
    file.write_text(
        "tools:\n  - class_name: strop.agents.python_tool.PythonTool\n    config: {timeout: 5}\n"
        "    tool_schema: {type: function, function: {name: interpreter, parameters: {properties: {program: {type: string}}, required: [program]}}}\n"
    )
    box = ToolSet.from_config(
        str(file), timeout=20, max_response_length=100, truncate_side="left", max_parallel=1
    )

    async def episode():
        session = await box.open()
        return await session.run([ToolCall("interpreter", {"program": "print(1)"})])

    assert asyncio.run(episode())[0].text == "1"


def test_bad_settings_are_refused(tmp_path: Path):
    file = tmp_path / "tools.yaml"
    file.write_text("tools:\n  - class_name: strop.agents.python_tool.PythonTool\n    config: {timeuot: 5}\n")
    with pytest.raises(ValueError, match=r"unknown setting 'timeuot'. Did you mean 'timeout'"):
        ToolSet.from_config(
            str(file), timeout=20, max_response_length=100, truncate_side="left", max_parallel=1
        )
