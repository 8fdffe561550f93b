"""Starts a training program in the caller's process: what every training function does."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.api.callbacks import CallerObserver
from strop.api.models import plain_module, quiet_transformers
from strop.api.progress import is_interactive
from strop.api.run import Run
from strop.config.compose import Loaded, load
from strop.errors import STOPPED
from strop.registry import forget_changed_files
from strop.shared.in_process import InProcess

if TYPE_CHECKING:
    from strop.backends.base import Backend
    from strop.config.schema.roots import TrainingConfig
    from strop.preflight.report import PreflightReport
    from strop.ranks import Ranks

INPUTS = "inputs"
"""Folder, below that of a run, with what was given as objects."""
_running = threading.Lock()
"""Held by the run of this process: signal handlers, patches of libraries and random states are shared."""


@dataclass
class Prepared:
    """A run that is ready to start: its configuration, and the objects of the caller."""

    root: str
    verb: str
    module: str
    """Started with the same arguments, it becomes a rank."""
    arguments: list[str]
    reward: Callable[..., object] | None = None
    tools: tuple[Callable[..., object], ...] = ()
    problems: list[str] = field(default_factory=list)
    """Why other processes cannot do the same."""


def draft_config(root: str, arguments: list[str]) -> TrainingConfig:
    """The configuration as far as the caller has set it, for its folder and names of columns."""
    forget_changed_files()
    config: TrainingConfig = load(root, arguments).config
    return config


def inputs_folder(config: TrainingConfig) -> Path:
    """Where objects of the caller are written."""
    return Path(config.trainer.default_local_dir).expanduser() / INPUTS


def launch(prepared: Prepared, observer: CallerObserver) -> Run[Any]:
    """Examine the run, train, and return what it left."""
    from strop.preflight.examine import examine, require
    from strop.shared.start import TrainingProgram, start

    loaded = load(prepared.root, prepared.arguments)
    here = runs_here(loaded, prepared, observer)
    given = InProcess(prepared.reward, prepared.tools, observer if here else None)
    kept: dict[str, Any] = {}

    def train(loaded: Loaded[Any], ranks: Ranks, report: PreflightReport | None) -> None:
        backend, tokenizer, fit = _build(loaded, ranks, report, given)
        kept["backend"] = backend
        kept["tokenizer"] = tokenizer
        fit()

    program = TrainingProgram(
        prepared.module,
        lambda loaded: require(loaded, given, quiet=observer.quiet),
        lambda loaded: examine(loaded, given),
        train,
        keeps_process=True,
    )
    folder = Path(loaded.config.trainer.default_local_dir).expanduser().absolute()
    with only_run(), random_states_kept() if here else nullcontext(), quiet_transformers():
        code = start(loaded, program, prepared.arguments)
    step, total_steps = _progress(observer, folder, here, code)
    run = Run(
        loaded.config,
        prepared.verb,
        list(prepared.arguments),
        folder,
        step,
        total_steps,
        problems=list(prepared.problems),
        rows=observer.rows,
    )
    if "backend" in kept:
        backend: Backend = kept.pop("backend")
        run._model = plain_module(backend.module, dict(backend.export_weights()))
        run._tokenizer = kept.pop("tokenizer")
        del backend
        _free_memory()
    return _ended(run, observer, code)


def _build(
    loaded: Loaded[Any], ranks: Ranks, report: PreflightReport | None, given: InProcess
) -> tuple[Backend, Any, Callable[[], None]]:
    """The trained model, the tokenizer, and the loop."""
    if loaded.root == "ppo_trainer":
        from strop.models.build import build_tokenizer
        from strop.ppo.build import build_ppo
        from strop.replay.recording import trainer_class

        trainer = build_ppo(loaded, ranks, trainer_class(loaded.config), given)
        return trainer.roles.actor, build_tokenizer(loaded.config.actor_rollout_ref.model), trainer.fit
    from strop.supervised.build import build_chat_tokenizer, build_supervised_trainer

    datasets = None
    if report is not None:
        datasets = report.datasets
    supervised = build_supervised_trainer(loaded, datasets, ranks, given.observer)
    return supervised.model, build_chat_tokenizer(loaded.config), supervised.fit


def runs_here(loaded: Loaded[Any], prepared: Prepared, observer: CallerObserver) -> bool:
    """Whether the run is in this process; a ValueError if it is in others and uses objects of this one."""
    from strop.runtime.local import is_rank
    from strop.shared.start import uses_ray

    trainer = loaded.config.trainer
    if is_rank():
        raise ValueError(
            "This process is a rank of torchrun. Call strop in one process; it starts its ranks itself "
            "(n_gpus_per_node)."
        )
    if loaded.config.global_profiler.tool == "nsys":
        raise ValueError(
            "global_profiler.tool=nsys starts the process again under nsys. Use the command line that "
            "run.command() of a run without it gives."
        )
    devices = trainer.nnodes * trainer.n_gpus_per_node
    if devices == 1 and not trainer.max_restarts and not uses_ray(loaded.config):
        return True
    why = f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
    if trainer.max_restarts:
        why = f"trainer.max_restarts={trainer.max_restarts}"
    if uses_ray(loaded.config):
        why = "Ray"
    if prepared.problems:
        raise ValueError(f"With {why} the run is in processes of its own. {' '.join(prepared.problems)}")
    if observer.on_step or observer.samples_function or observer.stop:
        raise ValueError(
            f"With {why} the run is in processes of its own, which cannot call on_step, on_samples or stop. "
            "Leave them out, and read run.metrics and run.samples() afterwards."
        )
    return False


def _progress(observer: CallerObserver, folder: Path, here: bool, code: int) -> tuple[int, int]:
    """The last finished step, and the number of steps."""
    from strop.run.checkpoint.layout import read_latest

    if not here:
        step = read_latest(folder) or 0
        return step, step if code == 0 else step + 1
    steps = [observer.first_step]
    steps += [row["step"] for row in observer.rows if isinstance(row["step"], int)]
    return max(steps), observer.total_steps


def _ended(run: Run[Any], observer: CallerObserver, code: int) -> Run[Any]:
    """The run, or what is raised after it."""
    if observer.error is not None:
        observer.error.add_note(f"{run!r} has ended in order after this error of a callback.")
        raise observer.error
    if code == 0 or observer.asked_to_stop:
        return run
    if code in (STOPPED, 128 + signal.SIGINT, 128 + signal.SIGTERM):
        if is_interactive():
            return run
        raise KeyboardInterrupt(f"{run!r} was interrupted. The same call continues from its last checkpoint.")
    raise ValueError(
        f"The run ended with exit code {code}. Its messages are above; {run.folder}/workers has the output "
        "of each rank."
    )


@contextmanager
def only_run() -> Iterator[None]:
    """Refuse a second run of this process at the same time."""
    if not _running.acquire(blocking=False):
        raise ValueError(
            "Another run of this process has not ended. Runs share the process's signal handlers, random "
            "states and patches of libraries, so one of them runs at a time. Wait for it, or start the "
            "command line that run.command() gives in another process."
        )
    try:
        yield
    finally:
        _running.release()


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random generators of the caller after the block."""
    from strop.run.checkpoint.contents import capture_random_states, restore_random_states

    before = capture_random_states()
    try:
        yield
    finally:
        restore_random_states(before)


def _free_memory() -> None:
    """Give back what only the run needed: optimizer states, the engine's cache."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
