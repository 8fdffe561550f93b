"""A tool that runs Python in the sandbox:

tools:
  - class_name: strop.agents.python_tool.PythonTool
    config: {name: python, timeout: 10, memory_limit_mb: 512}       # all of it may be left out

A program that fails is not a failed call: the model is told what went wrong, as a programmer would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.agents.tool_schema import ToolSchema
from strop.agents.tools import AbandonableThreads, StatelessTool, ToolResult
from strop.registry import did_you_mean
from strop.rewards.sandbox.isolation import isolation
from strop.rewards.sandbox.launch import run_tests
from strop.rewards.sandbox.limits import Limits, Outcome

DESCRIPTION = "Run a Python program and see what it prints. Nothing is kept from one call to the next."
KEYS = ("type", "name", "timeout", "memory_limit_mb", "packages", "isolation")
_ENDS = {
    "timeout": "The program was stopped after {seconds:g} seconds.",
    "memory": "The program was stopped because it used more than {memory_mb} MB of memory.",
    "output": "The program was stopped because it printed too much.",
}


class PythonTool(StatelessTool):
    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None):
        """`tool_schema` may rename the tool or describe it otherwise; the program is its only argument, of any name."""
        config = dict(config or {})
        strange = [key for key in config if key not in KEYS]
        if strange:
            raise ValueError(f"unknown setting {strange[0]!r}.{did_you_mean(strange[0], KEYS)} Known: {', '.join(KEYS)}.")
        self.schema = _schema(str(config.get("name", "python")), tool_schema)
        (self.argument,) = self.schema.parameters["properties"]
        seconds = float(config.get("timeout", 10.0))
        self.limits = Limits(seconds=seconds, total_seconds=seconds, memory_mb=int(config.get("memory_limit_mb", 512)))
        self.packages = bool(config.get("packages", True))
        self.isolation = isolation(str(config.get("isolation", "auto")))
        self._threads = AbandonableThreads(f"strop-tool-{self.schema.name}")

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResult:
        outcome = await self._threads.call(self._run, {"program": arguments[self.argument]})
        return ToolResult(_told(outcome, self.limits), metrics={"program_failed": float(outcome.status != "ok")})

    def _run(self, program: str) -> Outcome:
        [outcome] = run_tests(program, [{"stdin": ""}], self.limits, level=self.isolation.level, packages=self.packages)
        return outcome


def _schema(name: str, given: Mapping[str, Any] | None) -> ToolSchema:
    code = {"type": "string", "description": "The program. It prints what you want to know."}
    if given is None:
        return ToolSchema(name, DESCRIPTION, {"type": "object", "properties": {"code": code}, "required": ["code"]})
    schema = ToolSchema.from_openai(given, "PythonTool")
    if len(schema.parameters["properties"]) != 1:
        raise ValueError(f"the schema must have one parameter, the program; it has {list(schema.parameters['properties'])}.")
    return schema


def _told(outcome: Outcome, limits: Limits) -> str:
    parts = [outcome.stdout.rstrip(), outcome.stderr.rstrip()]
    if outcome.status in _ENDS:
        parts.append(_ENDS[outcome.status].format(seconds=limits.seconds, memory_mb=limits.memory_mb))
    elif outcome.exit_code and not outcome.stderr.strip():
        parts.append(f"The program ended with exit code {outcome.exit_code}.")
    return "\n".join(part for part in parts if part) or "The program ran and printed nothing."
