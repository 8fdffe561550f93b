"""Profiles of chosen steps: torch.profiler traces, CUDA allocator snapshots, or NVTX ranges for Nsight
Systems.

    profiler = StepProfiler.of(config, rank=0)
    with profiler.phase(12, "step"):            # a capture begins with a step that is to be profiled
        with profiler.phase(12, "update_actor"):  # phases are named ranges inside it
            ...

The roles that enable their `profiler` section are profiled, on the ranks that they name; without any, all
roles on rank 0. A profiler that fails is logged once and switched off: it must not stop a run.

With `global_profiler.tool=nsys` the run restarts itself under `nsys profile`. nsys follows the processes that
it starts: one file holds all ranks of a machine. On a Ray cluster it starts none of them; there each profiled
rank restarts itself.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar, cast

import torch

from strop.config.schema.model import ProfilerConfig
from strop.config.schema.ppo import PpoConfig
from strop.config.schema.supervised import SupervisedConfig
from strop.config.schema.trainer import GlobalProfilerConfig, TorchMemoryGlobalConfig

log = logging.getLogger(__name__)
ProfiledConfig: TypeAlias = PpoConfig | SupervisedConfig
Stop: TypeAlias = Callable[[], None]
T = TypeVar("T")
STEP = "step"
ROLES = {
    "gen": "actor_rollout_ref.rollout",
    "old_log_prob": "actor_rollout_ref.actor",
    "update_actor": "actor_rollout_ref.actor",
    "ref": "actor_rollout_ref.ref",
    "values": "critic",
    "update_critic": "critic",
    "reward": "reward_model",
}
"""Phase -> configuration section of the role that works in it."""
DEFAULT_CONTENTS = frozenset({"cpu", "cuda"})
NSYS_VARIABLE = "STROP_UNDER_NSYS"
"""Environment variable that is set in a process that nsys has started."""


def is_profiled(config: ProfiledConfig, rank: int) -> bool:
    """Whether the configuration asks for a profile of this rank."""
    ranks: set[int] = set()
    for profiler in enabled_profilers(config).values():
        if profiler.all_ranks:
            return True
        ranks.update(profiler.ranks)
    return rank in (ranks or {0})


def enabled_profilers(config: ProfiledConfig) -> dict[str, ProfilerConfig]:
    """The `profiler` section of every role that enables it, by the section of the role."""
    found = {}
    for role in {*ROLES.values(), "actor_rollout_ref", ""}:
        section: object = config
        for part in filter(None, role.split(".")):
            section = getattr(section, part, None)
        profiler = getattr(section, "profiler", None)
        if isinstance(profiler, ProfilerConfig) and profiler.enable:
            found[role] = profiler
    return found


@dataclass
class StepProfiler:
    """Captures the phases of chosen steps with one tool; `tool` None does nothing."""

    tool: str | None = None
    steps: frozenset[int] = frozenset()
    continuous: bool = False
    """Neighbouring steps share one capture."""
    phases: frozenset[str] | None = None
    """One capture for each of these phases; None: one for the whole step."""
    folder: Path = Path("outputs/profile")
    rank: int = 0
    contents: frozenset[str] = frozenset()
    memory: TorchMemoryGlobalConfig = field(default_factory=TorchMemoryGlobalConfig)
    _stop: Stop | None = field(default=None, repr=False)
    _opened_by: str = ""

    @classmethod
    def of(cls, config: ProfiledConfig, rank: int) -> StepProfiler:
        """The profiler that the configuration asks for on this rank; switched off where it asks for none."""
        settings = config.global_profiler
        if not settings.tool or not settings.steps or not is_profiled(config, rank):
            return cls()
        profilers = enabled_profilers(config)
        contents: set[str] = set()
        for section in profilers.values():
            contents.update(section.tool_config.torch.contents)
        profiler = cls(
            tool=settings.tool,
            steps=frozenset(settings.steps),
            continuous=settings.profile_continuous_steps,
            phases=_captured_phases(settings, profilers),
            folder=Path(settings.save_path).expanduser(),
            rank=rank,
            contents=frozenset(contents) or DEFAULT_CONTENTS,
            memory=settings.global_tool_config.torch_memory,
        )
        profiler._check_support()
        return profiler

    def _check_support(self) -> None:
        """Switch off, with a warning, a tool that cannot work on this machine."""
        cuda = torch.cuda.is_available()
        reason = None
        if self.tool == "npu":
            reason = "Ascend devices are not supported"
        elif self.tool in ("nsys", "torch_memory") and not cuda:
            reason = "it looks at a GPU, and there is none here"
        if reason:
            log.warning(
                "global_profiler.tool=%s does nothing: %s. tool=torch works everywhere.", self.tool, reason
            )
            self.tool = None

    @contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        """Context of a phase; the phase "step" is the whole step."""
        if self.tool is None or step not in self.steps:
            yield
            return
        starts = name == STEP if self.phases is None else name in self.phases
        if starts and self._stop is None:
            label = f"step_{step}" if name == STEP else f"step_{step}_{name}"
            self._stop = self._guarded(lambda: self._start(label))
            self._opened_by = name
        with self._range(name):
            yield
        next_step_continues = name == STEP and self.continuous and step + 1 in self.steps
        if starts and self._opened_by == name and not next_step_continues:
            self.close()

    def close(self) -> None:
        """End an open capture and write it."""
        stop = self._stop
        self._stop = None
        if stop is not None:
            self._guarded(stop)

    def _guarded(self, action: Callable[[], T]) -> T | None:
        """The result of an action of the profiler; None, and the profiler switched off, where it fails."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - a profile may fail, training may not
            log.warning(
                "Profiling with %s failed and is switched off: %s: %s", self.tool, type(error).__name__, error
            )
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
        if self.tool == "torch_memory":
            return self._start_memory_history(path)
        return self._start_trace(path)

    def _start_trace(self, path: Path) -> Stop:
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

    def _start_memory_history(self, path: Path) -> Stop:
        torch.cuda.memory._record_memory_history(
            enabled=cast(Literal["state", "all"], self.memory.context),
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


def _captured_phases(
    settings: GlobalProfilerConfig, profilers: dict[str, ProfilerConfig]
) -> frozenset[str] | None:
    """The phases with a capture of their own; None where a capture spans a whole step."""
    if settings.tool == "nsys":
        discrete = settings.global_tool_config.nsys.discrete
    else:
        discrete = any(section.tool_config.torch.discrete for section in profilers.values())
    if not discrete:
        return None
    if not profilers:
        return frozenset(ROLES)
    return frozenset(phase for phase, role in ROLES.items() if role in profilers)


def nsys_options(given: Mapping[str, object], captures: int) -> list[str]:
    """The options as arguments of nsys; without a capture-range-end, nsys stops after the last capture.

    >>> nsys_options({"trace": "cuda", "capture-range-end": None, "kill": None}, 2)
    ['--trace=cuda', '--capture-range-end=repeat-shutdown:2']
    """
    arguments = []
    for key, value in given.items():
        if key == "capture-range-end" and value is None:
            value = f"repeat-shutdown:{captures}"
        if value is not None:
            arguments.append(f"--{key}={value}")
    return arguments


def nsys_command(command: Sequence[str], config: ProfiledConfig, rank: int | None = None) -> list[str] | None:
    """The command under nsys; None where it is not asked for, not installed (which is logged), or already
    running under nsys. `rank` is given by a process that restarts itself."""
    settings = config.global_profiler
    if settings.tool != "nsys" or not settings.steps or NSYS_VARIABLE in os.environ:
        return None
    if rank is not None and not is_profiled(config, rank):
        return None
    program = shutil.which("nsys")
    if program is None:
        log.warning(
            "global_profiler.tool=nsys, but `nsys` is not on the PATH of %s: nothing is captured. Install "
            "Nsight Systems, or set global_profiler.tool=torch.",
            socket.gethostname(),
        )
        return None
    nsys = settings.global_tool_config.nsys
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    # A process that trains is a worker. One that only starts ranks is a controller: its ranks inherit nsys.
    given = dict(nsys.worker_nsight_options)
    if devices > 1 and rank is None:
        given = {**nsys.controller_nsight_options, **given}
    folder = Path(settings.save_path).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    per_step = 6 if nsys.discrete else 1
    chosen = nsys_options(given, per_step * len(settings.steps))
    return [
        program,
        "profile",
        *chosen,
        "--force-overwrite=true",
        f"--output={folder / 'run_%h_%p'}",
        *command,
    ]


def restart_under_nsys(command: Sequence[str], config: ProfiledConfig, rank: int | None = None) -> None:
    """Replace this process by the same command under nsys, where the configuration asks for it."""
    again = nsys_command(command, config, rank)
    if again is not None:
        log.info("Starting again under nsys: %s", " ".join(again[: again.index(command[0])]))
        os.environ[NSYS_VARIABLE] = "1"
        os.execv(again[0], again)
