"""How a training program starts: the preflight, then training in this process, in ranks of this machine, or
on a Ray cluster."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from strop.config.compose import Loaded
from strop.config.derived import resource_pools
from strop.config.schema.ppo import PpoConfig
from strop.config.schema.trainer import TrainerConfig
from strop.errors import CRASHED
from strop.ranks import Ranks
from strop.rollout.external_host import keep_output_in
from strop.run.heartbeat import run_lock, start_heartbeat, workers_folder
from strop.run.profile.capture import NSYS_VARIABLE, restart_under_nsys
from strop.run.watchdog import WatchdogLimits, start_watchdog
from strop.runtime.failure import RankFailure, supervise
from strop.runtime.local import LAUNCHED, is_rank, joined, run_ranks
from strop.stopping import StopRequested, handle_stop_signals

if TYPE_CHECKING:
    from strop.config.schema.roots import TrainingConfig
    from strop.runtime.remote_backend import BackendFactory
    from strop.runtime.rollout_replica import ReplicaSpec

Report = TypeVar("Report")
"""What the preflight of a program returns."""


@dataclass(frozen=True)
class RemoteModels:
    """What machines other than those of the ranks build."""

    replica: ReplicaSpec | None = None
    """A rollout replica."""
    frozen: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Models without training, by role."""
    learning: Mapping[str, BackendFactory] = field(default_factory=dict)
    """Models that train, by role."""


@dataclass(frozen=True)
class TrainingProgram(Generic[Report]):
    """A training program: what `start` calls."""

    module: str
    """Started with the same arguments, it becomes a rank."""
    require: Callable[[Loaded], Report]
    """The preflight: prints a report, and raises when something is wrong."""
    examine: Callable[[Loaded], Report]
    """The preflight without output, for ranks other than 0."""
    train: Callable[[Loaded, Ranks, Report | None], None]
    remote_models: Callable[..., RemoteModels] = lambda config: RemoteModels()
    keeps_process: bool = False
    """Whether the process belongs to a caller and goes on after the run (a notebook)."""


def start(loaded: Loaded[TrainingConfig], program: TrainingProgram[Report], arguments: Sequence[str]) -> int:
    """Examine the run and train; returns the exit code."""
    command = [sys.executable, "-m", program.module, *arguments]
    ray = uses_ray(loaded.config)
    if is_rank():
        if ray or LAUNCHED not in os.environ:  # its starter was not under nsys
            restart_under_nsys(command, loaded.config, int(os.environ["RANK"]))
        return _run_rank(loaded, program)
    if not ray:
        restart_under_nsys(command, loaded.config)
    report = program.require(loaded)
    with run_lock(Path(loaded.config.trainer.default_local_dir).expanduser()):
        if ray:
            return _run_on_ray(loaded, program, arguments)
        return _run_locally(loaded, program, command, report)


def _run_on_ray(
    loaded: Loaded[TrainingConfig], program: TrainingProgram[Report], arguments: Sequence[str]
) -> int:
    from strop.runtime.ray.cluster import RayCluster

    config = loaded.config
    directory = Path(config.trainer.default_local_dir).expanduser()
    remote = program.remote_models(config)
    with RayCluster(config, loaded.tree(), remote.replica, remote.frozen, remote.learning) as cluster:
        return supervise(
            lambda more: cluster.run(program.module, [*arguments, *more]),
            directory,
            config.trainer.max_restarts,
        )


def _run_locally(
    loaded: Loaded[TrainingConfig], program: TrainingProgram[Report], command: list[str], report: Report
) -> int:
    """Train in this process, or in one rank per device."""
    trainer = loaded.config.trainer
    devices = trainer.nnodes * trainer.n_gpus_per_node
    directory = Path(trainer.default_local_dir).expanduser()
    if trainer.nnodes > 1:
        raise ValueError(
            f"trainer.nnodes={trainer.nnodes} with trainer.runtime=local: one command starts the ranks of "
            f"one machine. Set trainer.runtime=ray, or start `torchrun --nnodes ... -m {program.module} ...` "
            "on each of them."
        )
    if devices == 1 and not trainer.max_restarts:
        with (
            handle_stop_signals(trainer.grace_seconds, ends_process=not program.keeps_process),
            start_heartbeat(directory) as heart,
            start_watchdog(heart, _limits(trainer)),
        ):
            return _train_and_restore(loaded, program, Ranks(), report)

    def attempt(more: Sequence[str]) -> RankFailure | None:
        return run_ranks([*command, *more], devices, directory, grace=trainer.grace_seconds)

    return supervise(attempt, directory, trainer.max_restarts)


def uses_ray(config: TrainingConfig) -> bool:
    """trainer.runtime, where auto means Ray for several machines, or if a cluster is named."""
    trainer = config.trainer
    if trainer.runtime != "auto":
        return trainer.runtime == "ray"
    return (
        trainer.nnodes > 1
        or bool(resource_pools(config))
        or bool(config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS"))
    )


def _run_rank(loaded: Loaded[TrainingConfig], program: TrainingProgram[Report]) -> int:
    """Train as one of several ranks."""
    from strop.shared.build import device_of

    trainer = loaded.config.trainer
    devices = trainer.nnodes * trainer.n_gpus_per_node
    device = device_of(trainer.device)
    directory = Path(trainer.default_local_dir).expanduser()
    rank = int(os.environ["RANK"])
    holds_lock = rank == 0 and LAUNCHED not in os.environ
    with (
        handle_stop_signals(trainer.grace_seconds),
        run_lock(directory) if holds_lock else nullcontext(),
        start_heartbeat(directory, rank, devices) as heart,
        start_watchdog(heart, _limits(trainer), _starter_pid()),
    ):
        try:
            with joined(devices, device, timeout=_collective_timeout(loaded.config)) as ranks:
                return _train_rank(loaded, program, ranks)
        except (ValueError, OSError):
            raise
        except Exception:  # noqa: BLE001 - reported by the exit code
            # The exit code says that this is a crash, not an error in the configuration.
            traceback.print_exc()
            raise SystemExit(CRASHED) from None


def _train_rank(loaded: Loaded[TrainingConfig], program: TrainingProgram[Report], ranks: Ranks) -> int:
    if not ranks.is_rank0:  # rank 0 logs what all ranks do
        logging.getLogger("strop").setLevel(logging.ERROR)
    if LAUNCHED not in os.environ:
        preflight = program.require if ranks.is_rank0 else program.examine
        ranks.run_or_raise_on_all(lambda: preflight(loaded), "examining the run")
    return _train_and_restore(loaded, program, ranks, None)


def _train_and_restore(
    loaded: Loaded[TrainingConfig], program: TrainingProgram[Report], ranks: Ranks, report: Report | None
) -> int:
    """Train, then undo the patches of all models (strop/models/patches.py). The exit code says whether a
    signal ended the run."""
    code = 0
    keep_output_in(workers_folder(Path(loaded.config.trainer.default_local_dir).expanduser()))
    try:
        program.train(loaded, ranks, report)
    except StopRequested as stop:
        code = stop.exit_code
    finally:
        keep_output_in(None)
        from strop.models.patches import undo_all_patches

        undo_all_patches()
    return code


def _starter_pid() -> int | None:
    """The process that the watchdog of a rank watches."""
    if NSYS_VARIABLE in os.environ:  # the rank started itself again under nsys, and is its child
        return os.getppid()
    if LAUNCHED in os.environ:
        return int(os.environ[LAUNCHED])
    return None


def _collective_timeout(config: TrainingConfig) -> float:
    return float(config.actor_rollout_ref.nccl_timeout) if isinstance(config, PpoConfig) else 600.0


def _limits(trainer: TrainerConfig) -> WatchdogLimits:
    return WatchdogLimits(warning=trainer.phase_warning, timeout=trainer.phase_timeout)
