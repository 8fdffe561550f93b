"""A tool that runs Python in the sandbox:

tools:
  - class_name: strop.agents.python_tool.PythonTool
    config: {name: python, timeout: 10, memory_limit_mb: 512}       # every key is optional

A program that fails is not a failed call: the model reads what went wrong, as a programmer would.
"""

from __future__ import annotations

import asyncio

from strop.agents.call_threads import AbandonableThreads
from strop.agents.tool_schema import JsonObject
from strop.agents.tools import StatelessTool, ToolResult, ToolSchema
from strop.host import cores_per_rank
from strop.registry import did_you_mean
from strop.rewards.sandbox.launch import choose_isolation, run_tests
from strop.rewards.sandbox.limits import ProgramOutcome, SandboxLimits

DESCRIPTION = "Run a Python program and see what it prints. Nothing is kept from one call to the next."
KEYS = ("type", "name", "timeout", "memory_limit_mb", "packages", "isolation")
_STOPPED = {
    "timeout": "The program was stopped after {seconds:g} seconds.",
    "memory": "The program was stopped because it used more than {memory_mb} MB of memory.",
    "output": "The program was stopped because it printed too much.",
    "disk": "The program was stopped because it wrote too many or too large files.",
}


class PythonTool(StatelessTool):
    """Runs one program per call."""

    def __init__(self, config: JsonObject | None = None, tool_schema: JsonObject | None = None) -> None:
        """`tool_schema` may rename the tool or change its description; its only parameter is the program."""
        config = dict(config or {})
        unknown = [key for key in config if key not in KEYS]
        if unknown:
            raise ValueError(
                f"unknown setting {unknown[0]!r}.{did_you_mean(unknown[0], KEYS)} Known: {', '.join(KEYS)}."
            )
        self.schema = _schema(str(config.get("name", "python")), tool_schema)
        (self.argument,) = self.schema.parameters["properties"]
        seconds = float(config.get("timeout", 10.0))
        self.limits = SandboxLimits(
            seconds=seconds, total_seconds=seconds, memory_mb=int(config.get("memory_limit_mb", 512))
        )
        self.packages = bool(config.get("packages", True))
        self.isolation = choose_isolation(str(config.get("isolation", "auto")))
        self._threads = AbandonableThreads(f"strop-tool-{self.schema.name}")
        # A call that times out while it waits must not run later, when nobody reads its result.
        self._places = asyncio.Semaphore(cores_per_rank())

    async def execute(self, instance_id: str, arguments: JsonObject) -> ToolResult:
        async with self._places:
            outcome = await self._threads.call(self._run, {"program": arguments[self.argument]})
        failed = float(outcome.status != "ok")
        return ToolResult(_describe(outcome, self.limits), metrics={"program_failed": failed})

    def _run(self, program: str) -> ProgramOutcome:
        [outcome] = run_tests(
            program, [{"stdin": ""}], self.limits, level=self.isolation.level, packages=self.packages
        )
        return outcome


def _schema(name: str, given: JsonObject | None) -> ToolSchema:
    if given is None:
        code = {"type": "string", "description": "The program. It prints what you want to know."}
        return ToolSchema(
            name, DESCRIPTION, {"type": "object", "properties": {"code": code}, "required": ["code"]}
        )
    schema = ToolSchema.from_openai(given, "PythonTool")
    if len(schema.parameters["properties"]) != 1:
        raise ValueError(
            "the schema must have one parameter, the program; it has "
            f"{list(schema.parameters['properties'])}."
        )
    return schema


def _describe(outcome: ProgramOutcome, limits: SandboxLimits) -> str:
    """Return what the model reads about a program: its output, and how it ended."""
    parts = [outcome.stdout.rstrip(), outcome.stderr.rstrip()]
    if outcome.status in _STOPPED:
        parts.append(_STOPPED[outcome.status].format(seconds=limits.seconds, memory_mb=limits.memory_mb))
    elif outcome.exit_code and not outcome.stderr.strip():
        parts.append(f"The program ended with exit code {outcome.exit_code}.")
    return "\n".join(part for part in parts if part) or "The program ran and printed nothing."
