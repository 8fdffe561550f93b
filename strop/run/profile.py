"""Profiles of chosen steps: traces of torch.profiler, snapshots of the CUDA allocator, or marks for Nsight Systems.

    profiling = Profiling.of(config, rank=0, directory=run)
    with profiling.phase(12, "step"):            # a capture begins with a step that is to be profiled
        with profiling.phase(12, "update_actor"):  # phases are named ranges inside
            ...

A profiler that fails is told of once and switched off: it must not end a run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from strop.run.profiled import ROLES, enabled, is_profiled

log = logging.getLogger(__name__)

STEP = "step"
Stop = Callable[[], None]


@dataclass
class Profiling:
    tool: str | None = None
    steps: frozenset[int] = frozenset()
    continuous: bool = False
    """Neighbouring steps share one capture."""
    phases: frozenset[str] | None = None
    """One capture for each of these; None: one for the whole step."""
    folder: Path = Path("outputs/profile")
    rank: int = 0
    contents: frozenset[str] = frozenset()
    memory: Any = None
    """The torch_memory section."""
    _stop: Stop | None = field(default=None, repr=False)
    _opened_by: str = ""

    @classmethod
    def of(cls, config: Any, rank: int) -> Profiling:
        """What the configuration asks for on this rank; switched off where it asks for nothing."""
        settings = getattr(config, "global_profiler", None)
        if settings is None or not settings.tool or not settings.steps:
            return cls()
        if not is_profiled(config, rank):
            return cls()
        roles = enabled(config)
        tools = [section.tool_config for section in roles.values()]
        nsys = settings.global_tool_config.nsys
        discrete = nsys.discrete if settings.tool == "nsys" else any(tool.torch.discrete for tool in tools)
        phases = frozenset(phase for phase, role in ROLES.items() if not roles or role in roles) if discrete else None
        made = cls(
            tool=settings.tool,
            steps=frozenset(settings.steps),
            continuous=settings.profile_continuous_steps,
            phases=phases,
            folder=Path(settings.save_path),
            rank=rank,
            contents=frozenset(name for tool in tools for name in tool.torch.contents) or frozenset({"cpu", "cuda"}),
            memory=settings.global_tool_config.torch_memory,
        )
        made._examine()
        return made

    def _examine(self) -> None:
        """What cannot be done here is said at the start."""
        cuda = torch.cuda.is_available()
        reason = None
        if self.tool == "npu":
            reason = "Ascend devices are not supported"
        elif self.tool in ("nsys", "torch_memory") and not cuda:
            reason = "it looks at a GPU, and there is none here"
        if reason:
            log.warning("global_profiler.tool=%s does nothing: %s. tool=torch works everywhere.", self.tool, reason)
            self.tool = None

    @contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        """Around a phase, the step itself included."""
        if self.tool is None or step not in self.steps:
            yield
            return
        starts = name == STEP if self.phases is None else name in self.phases
        if starts and self._stop is None:
            label = f"step_{step}" if name == STEP else f"step_{step}_{name}"
            self._stop, self._opened_by = self._guarded(lambda: self._start(label)), name
        with self._range(name):
            yield
        if starts and self._opened_by == name and not (name == STEP and self.continuous and step + 1 in self.steps):
            self.close()

    def close(self) -> None:
        """Write what is open."""
        stop, self._stop = self._stop, None
        if stop is not None:
            self._guarded(stop)

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - a profile may fail, training may not
            log.warning("Profiling with %s failed and is switched off: %s: %s", self.tool, type(error).__name__, error)
            self.tool = None
            return None

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        with ExitStack() as open_ranges:
            if self.tool == "torch":
                open_ranges.enter_context(torch.profiler.record_function(f"strop/{name}"))
            elif self.tool == "nsys":
                torch.cuda.nvtx.range_push(f"strop/{name}")
                open_ranges.callback(torch.cuda.nvtx.range_pop)
            yield

    def _start(self, label: str) -> Stop:
        path = self.folder / f"{label}_rank_{self.rank}"
        if self.tool == "nsys":
            torch.cuda.profiler.start()
            return torch.cuda.profiler.stop
        self.folder.mkdir(parents=True, exist_ok=True)
        return self._memory(path) if self.tool == "torch_memory" else self._trace(path)

    def _trace(self, path: Path) -> Stop:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(
            activities=activities,
            record_shapes="shapes" in self.contents,
            profile_memory="memory" in self.contents,
            with_stack="stack" in self.contents,
        )
        profiler.start()

        def stop() -> None:
            profiler.stop()
            target = path.with_suffix(".json.gz")
            profiler.export_chrome_trace(str(target))
            log.info("Trace of %s: open it at https://ui.perfetto.dev.", target)

        return stop

    def _memory(self, path: Path) -> Stop:
        torch.cuda.memory._record_memory_history(
            enabled=self.memory.context,
            stacks=self.memory.stacks,
            max_entries=self.memory.trace_alloc_max_entries,
            **self.memory.kw_args,
        )

        def stop() -> None:
            target = path.with_suffix(".memory.pickle")
            torch.cuda.memory._dump_snapshot(str(target))
            torch.cuda.memory._record_memory_history(enabled=None)
            log.info("Snapshot of the allocator: open %s at https://pytorch.org/memory_viz.", target)

        return stop
