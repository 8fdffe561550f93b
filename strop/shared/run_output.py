"""What a run writes: checkpoints, metrics, samples and dumps. The training loop says when."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.algorithms.metrics.training import StepRecord, memory_metrics
from strop.backends.micro_batches import NonFiniteLoss
from strop.catalog import TRACKERS
from strop.config.arithmetic import sampling_precision
from strop.config.schema.model import CheckpointConfig, FsdpConfig
from strop.config.schema.ppo import PpoConfig
from strop.ranks import Ranks, SharedFailure
from strop.run.checkpoint.contents import (
    Loop,
    LoopState,
    Stateful,
    capture_random_states,
    part_selector,
    restore_random_states,
    role_parts,
    role_state,
)
from strop.run.checkpoint.resume import ResumePoint, delete_checkpoint, log_config_changes, resume
from strop.run.checkpoint.retention import RetentionPolicy, save_is_due
from strop.run.checkpoint.store import Checkpoints, Export, load
from strop.run.health.monitor import HealthMonitor
from strop.run.heartbeat import start_heartbeat
from strop.run.profile.capture import StepProfiler
from strop.run.samples import (
    SampleWriter,
    UpdateLogProbs,
    batch_rows,
    dump_trajectories,
    rollout_rows,
    write_evidence,
)
from strop.run.trackers.base import TrackedRun, Tracker, Trackers, start
from strop.runtime.remote_backend import RemoteBackend
from strop.shared.in_process import RunObserver
from strop.stopping import first_request, requested
from strop.types import Batch, Trajectory

if TYPE_CHECKING:
    from strop.config.schema.roots import TrainingConfig

log = logging.getLogger(__name__)

SHOWN_GENERATIONS_SEED = 42


@dataclass
class RunOutput:
    """Checkpoints, trackers, samples and dumps of one run."""

    config: TrainingConfig
    tree: Mapping[str, Any]
    """The resolved configuration as plain values, for trackers."""
    decode: Callable[[list[int]], str]
    total_steps: int
    models: Mapping[str, Stateful]
    """The trained models, by role."""
    contents: Mapping[str, CheckpointConfig]
    """What of each model is saved and loaded."""
    keep: RetentionPolicy = field(default_factory=RetentionPolicy)
    """Which checkpoints are kept."""
    save_freq: int = -1
    """Steps between two checkpoints."""
    stateful: dict[str, Stateful] = field(default_factory=dict)
    """Further objects whose state belongs into a checkpoint."""
    exports: Callable[[], Mapping[str, Export]] = dict
    """Folders that transformers loads, if save_contents includes hf_model."""
    validation: dict[str, float] = field(default_factory=dict)
    """Metrics of the validation of the current weights, which decide what the best checkpoint is."""
    ranks: Ranks = field(default_factory=Ranks)
    """Every rank saves its shards of the models. Rank 0 writes everything else."""
    samples: SampleWriter | None = None
    """Keeps some samples of each step for the board."""
    observer: RunObserver | None = None
    """Follows the run from this process."""
    longest_step: float = 0.0
    saved_step: int | None = None
    """Step of the newest checkpoint."""
    validation_dropped: bool = False
    """Whether a signal ended the validation of the latest step; a resumed run does it again."""
    stop_signal: int | None = None
    """The signal that asks the run to end after this step, the same on all ranks."""

    def __post_init__(self) -> None:
        trainer = self.config.trainer
        self.directory = Path(trainer.default_local_dir).expanduser()
        background = next(iter(self.contents.values())).async_save
        self.checkpoints = Checkpoints(
            self.directory,
            background=background,
            keep=self.keep,
            copy_to=trainer.default_hdfs_dir,
            ranks=self.ranks,
        )
        self.trackers: Trackers | None = None
        self.health: HealthMonitor | None = None
        self.profiler = StepProfiler.of(self.config, self.ranks.rank)

    def __enter__(self) -> RunOutput:
        self._open = ExitStack()
        self._open.callback(self.profiler.close)
        self._heart = self._open.enter_context(
            start_heartbeat(self.directory, self.ranks.rank, self.ranks.world)
        )
        return self

    def record(self, step: int) -> StepRecord:
        """An empty record; its phases reach the heartbeat and the profiler."""
        on_phase = partial(self._heart.beat, step)
        if self.profiler.tool is None:
            return StepRecord(on_phase)
        return StepRecord(on_phase, around=lambda phase: self.profiler.phase(step, phase))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.checkpoints.close()
        except OSError as problem:
            if error is None or error is problem:
                raise
            log.error("%s", problem)  # the first error stopped the run and is raised
        finally:
            if self.samples is not None:
                self.samples.close()
            if self.trackers is not None:
                self.trackers.close(error)
            self._open.__exit__(type(error) if error else None, error, None)

    def resume(self, loop: Loop) -> int:
        """Load the checkpoint to resume from, if any, and start the trackers; returns its step, or 0."""
        found = self._find_checkpoint()
        if found is not None:
            try:
                self._restore(loop, found)
            except (LookupError, TypeError, AttributeError, OverflowError) as error:
                raise ValueError(
                    f"{found.path} holds other values than a run writes ({type(error).__name__}: "
                    f"{str(error)[:200]}). Resume from another checkpoint (trainer.resume_from_path), or "
                    "start over with trainer.resume_mode=disable."
                ) from error
            self._after_resume(found)
        step = None if found is None else found.step
        if self.ranks.is_rank0:
            self._start_trackers(step)
        else:
            self.trackers = Trackers({})
        return step or 0

    def _after_resume(self, found: ResumePoint) -> None:
        settings = self.config.trainer
        self.ranks.all_gather_object(None)  # all ranks have read it
        if found.path.parent.resolve() == self.directory.resolve():
            self.validation = dict(found.metrics)
            if not settings.del_local_ckpt_after_load:
                self.saved_step = found.step
        if settings.del_local_ckpt_after_load and self.ranks.is_rank0:
            delete_checkpoint(found.path)
        log.info("Resuming from %s, step %d of %d.", found.path, found.step, self.total_steps)
        if self.ranks.is_rank0 and settings.resume_mode == "auto":  # the user did not name this checkpoint
            log_config_changes(found.parts.get("config", {}), self.tree)
        if found.step >= self.total_steps and not settings.val_only:
            log.info(
                "All steps are done: raise trainer.total_training_steps or total_epochs to train further."
            )

    def _start_trackers(self, resumed_from: int | None) -> None:
        settings = self.config.trainer
        if self.samples is not None:
            self.samples.begin(resumed_from)
        wanted = [settings.logger] if isinstance(settings.logger, str) else settings.logger
        run = TrackedRun(
            self.directory,
            project=settings.project_name,
            experiment=settings.experiment_name,
            config=self.tree,
            resumed_from=resumed_from,
            total_steps=self.total_steps,
            console="full" if set(wanted) == {"console"} else settings.console,
        )
        # The preflight has reported the names that are left out here.
        wanted = [name for name in wanted if name in TRACKERS]
        more: dict[str, Tracker] = {}
        if self.observer is not None:
            more["caller"] = self.observer
            if self.observer.replaces_console:
                wanted = [name for name in wanted if name != "console"]
            self.observer.begin(resumed_from or 0, self.total_steps)
        self.trackers = start(wanted, run, more)
        if settings.health:
            precision = FsdpConfig.dtype
            if isinstance(self.config, PpoConfig):
                precision = sampling_precision(self.config)
            self.health = HealthMonitor(self.directory, resumed_from, precision)

    def _find_checkpoint(self) -> ResumePoint | None:
        """The checkpoint to resume from. Rank 0 chooses and verifies it. With several ranks, or a model on
        another machine, the weights are read later, shard by shard."""
        settings = self.config.trainer
        only = part_selector(self._loaded_contents())

        def later(part: str) -> bool:
            model = self.models.get(part.partition("/")[0])
            return model is not None and (self.ranks.world > 1 or isinstance(model, RemoteBackend))

        def choose() -> ResumePoint | None:
            if not self.ranks.is_rank0:
                return None
            return resume(
                self.directory,
                mode=settings.resume_mode,
                path=settings.resume_from_path,
                copied_to=settings.default_hdfs_dir,
                only=only,
                later=later,
            )

        mine = self.ranks.run_or_raise_on_all(choose, "choosing a checkpoint")
        chosen = self.ranks.broadcast_object(None if mine is None else (mine.path, mine.step))
        if self.ranks.is_rank0 or chosen is None:
            return mine
        return ResumePoint(*chosen, load(chosen[0], only=only, later=later, check=False))

    def save(self, loop: Loop, record: StepRecord, start: LoopState | None = None) -> None:
        """Save a checkpoint; with `start`, its states of the loader and of random generators."""
        with record.phase("save_checkpoint"):
            parts = self.state(loop, {role: list(self.contents[role].save_contents) for role in self.models})
            if start is not None:
                parts["data"] = start.data
                parts["trainer"]["random"] = start.random
            self.checkpoints.save(loop.step, parts, exports=self.exports(), metrics=self.validation)
        self.saved_step = loop.step

    def save_if_missing(self, loop: Loop, record: StepRecord, start: LoopState) -> bool:
        """Save the last finished step before the run ends, and wait until it is written; whether there is a
        checkpoint of it."""
        if self.save_freq <= 0:
            return False
        if loop.step and (self.saved_step != loop.step or self.checkpoints.failed_on_any_rank()):
            self.save(loop, record, start)
        self.ranks.run_or_raise_on_all(self.checkpoints.wait, "writing a checkpoint")
        return bool(loop.step)

    def state(self, loop: Loop, contents: Mapping[str, list[str]]) -> dict[str, Any]:
        """The parts of a checkpoint; `contents` says what to save of each model."""
        parts: dict[str, Any] = {
            "config": dict(self.tree),
            "data": loop.loader.state_dict(),
            "trainer": {
                "step": loop.step,
                "program": program_name(self.config),
                "random": capture_random_states(),
                "validation_dropped": self.validation_dropped,
                **{name: part.state_dict() for name, part in self.stateful.items()},
            },
        }
        for role, model in self.models.items():
            parts |= role_parts(role, model.state_dict(), contents[role])
        return parts

    def _restore(self, loop: Loop, found: ResumePoint) -> None:
        state = found.parts["trainer"]
        program = program_name(self.config)
        contents = self._loaded_contents()
        try:
            if state.get("program", program) != program:
                raise ValueError(f"It was saved by a {state['program']}, and this is a {program}.")
            found.refuse_other_meaning(self.tree, contents)
            for role, model in self.models.items():
                model.load_state_dict(role_state(role, found.parts, contents[role]))
        except ValueError as error:
            raise ValueError(
                f"The run cannot resume from {found.path}: {error} A new run needs a "
                "trainer.default_local_dir of its own, or trainer.resume_mode=disable."
            ) from error
        loop.loader.load_state_dict(found.parts["data"])
        for name, part in self.stateful.items():
            if name not in state:
                raise ValueError(
                    f"{found.path} holds no state of {name}: it was saved without it. Switch {name} off to "
                    "resume, or start a new run (trainer.resume_mode=disable, another "
                    "trainer.default_local_dir)."
                )
            part.load_state_dict(state[name])
        restore_random_states(state["random"])
        self.validation_dropped = bool(state.get("validation_dropped"))

    def _loaded_contents(self) -> dict[str, list[str]]:
        """What is loaded of each model."""
        return {role: list(own.load_contents or own.save_contents) for role, own in self.contents.items()}

    def save_due(self, step: int, record: StepRecord) -> bool:
        """Whether to save after this step; the same on all ranks, which also agree about a signal here."""
        self.longest_step = max(self.longest_step, record.seconds.get("step", 0.0))
        due = save_is_due(
            step,
            save_freq=self.save_freq,
            last=step == self.total_steps or self.checkpoints.failure is not None,  # make up for it
            longest_step=self.longest_step,
            spare=self.config.trainer.esi_redundant_time,
        )
        gathered = self.ranks.all_gather_object((due, requested()))  # clocks differ
        self.stop_signal = first_request([number for _, number in gathered])
        return gathered[0][0] and not self.validation_dropped  # then the end of the run saves

    def log(self, record: StepRecord, step: int) -> None:
        """Send the metrics of a step to the trackers."""
        assert self.trackers is not None
        metrics = dict(record.metrics)
        for name in ("testing", "save_checkpoint"):  # these phases end after the other timings were added
            if name in record.seconds:
                metrics[f"timing_s/{name}"] = record.seconds[name]
        metrics |= memory_metrics()
        if self.health is not None:
            metrics |= self.health.examine(metrics, step)
        self.trackers.log(metrics, step)

    def log_validation(self, samples: list[Trajectory], record: StepRecord, step: int) -> None:
        """Dump validation samples, send some of them to the trackers, and keep the metrics."""
        trainer = self.config.trainer
        self.validation = {name: value for name, value in record.metrics.items() if name.startswith("val-")}
        if not self.ranks.is_rank0:
            return
        if trainer.validation_data_dir:
            dump_trajectories(trainer.validation_data_dir, step, samples, decode=self.decode)
        self._show_samples("validation", step, samples)
        if self.samples is not None:
            self.samples.submit("validation", step, samples)
        if trainer.log_val_generations and self.trackers is not None:
            import random

            chosen = sorted(samples, key=lambda t: (t.prompt.index, t.group))
            random.Random(SHOWN_GENERATIONS_SEED).shuffle(chosen)  # the same prompts every time
            shown = chosen[: trainer.log_val_generations]
            self.trackers.log_generations(rollout_rows(shown, step=step, decode=self.decode), step)

    def evidence(
        self, problem: NonFiniteLoss, batch: Batch, step: int, trajectories: list[Trajectory] | None = None
    ) -> ValueError:
        """Write the batch of a non-finite loss to disk; returns the error to raise."""
        folder = self.directory / f"nonfinite_step_{step}"
        failure = SharedFailure if self.ranks.world > 1 else ValueError
        if not self.ranks.is_rank0:
            return failure(f"Step {step}: {problem} The whole batch is in {folder}.")
        if trajectories:
            texts = rollout_rows(trajectories, step=step, decode=self.decode)
        else:
            texts = batch_rows(batch, self.decode)
        write_evidence(
            folder,
            batch,
            texts,
            step=step,
            message=str(problem),
            suspects=problem.rows,
            not_finite=problem.causes,
        )
        return failure(
            f"Step {step}: {problem} The whole batch is in {folder}: rows.json to read, batch.safetensors to "
            "compute with."
        )

    def dump_rollouts(self, trajectories: list[Trajectory], step: int, record: StepRecord) -> None:
        """Write the samples of a step to trainer.rollout_data_dir, if it is set."""
        folder = self.config.trainer.rollout_data_dir
        if folder and self.ranks.is_rank0:
            with record.phase("dump_rollout_generations"):
                dump_trajectories(folder, step, trajectories, decode=self.decode)

    def keep_samples(
        self,
        trajectories: list[Trajectory],
        batch: Batch,
        step: int,
        record: StepRecord,
        log_probs: UpdateLogProbs | None,
    ) -> None:
        """Keep some samples of a step for the board. `log_probs`: what its update computed on the way."""
        self._show_samples("train", step, trajectories)
        if self.samples is not None and self.ranks.is_rank0:
            with record.phase("keep_samples"):
                self.samples.submit("train", step, trajectories, batch, log_probs)

    def _show_samples(self, split: str, step: int, samples: list[Trajectory]) -> None:
        if self.observer is not None and self.observer.wants_samples:
            self.observer.on_samples(split, step, rollout_rows(samples, step=step, decode=self.decode))


def program_name(config: object) -> str:
    """The program that a checkpoint belongs to. The names on disk are older than those of the schema."""
    return type(config).__name__.removesuffix("Config") + "Trainer"
