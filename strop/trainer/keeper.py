"""What a run leaves behind: checkpoints, metrics, samples. The loop says when; this says where and how."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from strop.backends.base import Backend
from strop.backends.nonfinite import NonFiniteLoss
from strop.catalog import TRACKERS
from strop.config.schema.model import Checkpoint
from strop.data.loader import Loader
from strop.ranks import Ranks, SharedFailure
from strop.run import random_state
from strop.run.checkpoint import Checkpoints, Export, load
from strop.run.contents import role_parts, role_state, selector
from strop.run.due import save_is_due
from strop.run.dumps import dump, rollout_rows, write_transcripts
from strop.run.health import Health
from strop.run.heartbeat import BETWEEN, beating
from strop.run.memory import memory_metrics
from strop.run.profile import Profiling
from strop.run.resume import Resumed, delete, resume
from strop.run.retention import Keep
from strop.run.samples import Known, SampleWriter
from strop.run.tracking import Run, Trackers, start
from strop.runtime.learners import FarBackend
from strop.trainer.changes import tell_changes
from strop.trainer.evidence import batch_rows, write_evidence
from strop.trainer.record import StepRecord
from strop.types import Batch, Trajectory

log = logging.getLogger(__name__)

SHOWN_GENERATIONS_SEED = 42


class Loop(Protocol):
    """What of a training loop belongs into a checkpoint beside its models."""

    step: int
    loader: Loader


@dataclass
class Keeper:
    config: Any
    tree: Mapping[str, Any]
    """The resolved configuration as plain values, for trackers."""
    decode: Callable[[list[int]], str]
    total_steps: int
    models: Mapping[str, Backend]
    """What is trained, by role."""
    contents: Mapping[str, Checkpoint]
    """What of each of them is saved and loaded."""
    keep: Keep = field(default_factory=Keep)
    """Which checkpoints stay."""
    save_freq: int = -1
    """Steps between two of them."""
    stateful: dict[str, Any] = field(default_factory=dict)
    """Further things with state_dict and load_state_dict that belong into a checkpoint."""
    exports: Callable[[], Mapping[str, Export]] = dict
    """Folders that other libraries load, written when save_contents asks for hf_model."""
    validation: dict[str, float] = field(default_factory=dict)
    """Results of the latest validation; the best checkpoint is known by them."""
    ranks: Ranks = field(default_factory=Ranks)
    """All of them save their parts of the models; rank 0 alone writes everything else."""
    samples: SampleWriter | None = None
    """Keeps some groups of each step for the board."""
    longest_step: float = 0.0

    def __post_init__(self) -> None:
        trainer = self.config.trainer
        self.directory = Path(trainer.default_local_dir).expanduser()
        background = next(iter(self.contents.values())).async_save
        self.checkpoints = Checkpoints(
            self.directory, background=background, keep=self.keep, copy_to=trainer.default_hdfs_dir, ranks=self.ranks
        )
        self.trackers: Trackers | None = None
        self.health: Health | None = None
        self.profiling = Profiling.of(self.config, self.ranks.rank)

    def __enter__(self) -> Keeper:
        self._open = ExitStack()
        self._open.callback(self.profiling.close)
        self._heart = self._open.enter_context(beating(self.directory, self.ranks.rank, self.ranks.world))
        return self

    def record(self, step: int) -> StepRecord:
        """An empty record, whose phases are told to whoever watches the run."""
        return StepRecord(
            lambda phase: self._heart.beat(step, phase or BETWEEN), around=lambda phase: self.profiling.phase(step, phase)
        )

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.checkpoints.close()
        except OSError as problem:
            if error is None or error is problem:
                raise
            log.error("%s", problem)  # what stopped the run is the news; this came on top
        finally:
            if self.samples is not None:
                self.samples.close()
            if self.trackers is not None:
                self.trackers.close()
            self._open.__exit__(type(error) if error else None, error, None)

    def resume(self, loop: Loop) -> int:
        """Put everything back where a checkpoint left it and start the trackers; returns the step to go on from."""
        settings = self.config.trainer
        found = self._found()
        if found is not None:
            self._restore(loop, found)
            self.ranks.gather(None)  # all have read it
            if settings.del_local_ckpt_after_load and self.ranks.lead:
                delete(found.path)
            log.info("Going on from %s, step %d of %d.", found.path, found.step, self.total_steps)
            if self.ranks.lead and settings.resume_mode == "auto":  # nobody named this checkpoint
                tell_changes(found.parts.get("config", {}), self.tree)
            if found.step >= self.total_steps and not settings.val_only:
                log.info("All steps are done: raise trainer.total_training_steps or total_epochs to train further.")
        wanted = [settings.logger] if isinstance(settings.logger, str) else settings.logger
        if not self.ranks.lead:
            self.trackers = Trackers({})
            return found.step if found else 0
        if self.samples is not None:
            self.samples.begin(found.step if found else None)
        self.trackers = start(
            [name for name in wanted if name in TRACKERS],  # the preflight has said which are left out
            Run(
                self.directory,
                project=settings.project_name,
                experiment=settings.experiment_name,
                config=self.tree,
                resumed_from=found.step if found else None,
                total_steps=self.total_steps,
            ),
        )
        if settings.health:
            self.health = Health(self.directory, found.step if found else None)
        return found.step if found else 0

    def _found(self) -> Resumed | None:
        """The checkpoint to go on from. Rank 0 chooses and examines it; with many ranks, or a model elsewhere,
        models are read piece by piece."""
        settings = self.config.trainer
        only = selector({role: self._load_contents(role) for role in self.contents})

        def later(part: str) -> bool:
            model = self.models.get(part.partition("/")[0])
            return model is not None and (self.ranks.world > 1 or isinstance(model, FarBackend))

        def choose() -> Resumed | None:
            mode, path, copies = settings.resume_mode, settings.resume_from_path, settings.default_hdfs_dir
            return resume(self.directory, mode=mode, path=path, copied_to=copies, only=only, later=later)

        mine = self.ranks.together(lambda: choose() if self.ranks.lead else None, "choosing a checkpoint")
        chosen = self.ranks.from_lead(None if mine is None else (mine.path, mine.step))
        if self.ranks.lead or chosen is None:
            return mine
        return Resumed(*chosen, load(chosen[0], only=only, later=later, check=False))

    def save(self, loop: Loop, record: StepRecord) -> None:
        with record.phase("save_checkpoint"):
            parts = self.state(loop, {role: list(self.contents[role].save_contents) for role in self.models})
            self.checkpoints.save(loop.step, parts, exports=self.exports(), metrics=self.validation)

    def state(self, loop: Loop, contents: Mapping[str, list[str]]) -> dict[str, Any]:
        """Everything a run goes on from, as the parts of a checkpoint; `contents` says what of each model."""
        parts: dict[str, Any] = {
            "config": dict(self.tree),
            "data": loop.loader.state_dict(),
            "trainer": {
                "step": loop.step,
                "program": type(self.config).__name__,
                "random": random_state.capture(),
                **{name: thing.state_dict() for name, thing in self.stateful.items()},
            },
        }
        for role, model in self.models.items():
            parts |= role_parts(role, model.state_dict(), contents[role])
        return parts

    def _restore(self, loop: Loop, found: Resumed) -> None:
        state, program = found.parts["trainer"], type(self.config).__name__
        try:
            if state.get("program", program) != program:
                raise ValueError(f"It was saved by a {state['program']}, and this is a {program}.")
            for role, model in self.models.items():
                model.load_state_dict(role_state(role, found.parts, self._load_contents(role)))
        except ValueError as error:
            raise ValueError(
                f"The run cannot go on from {found.path}: {error} A new run needs a trainer.default_local_dir of its own, or "
                "trainer.resume_mode=disable."
            ) from error
        loop.loader.load_state_dict(found.parts["data"])
        for name, thing in self.stateful.items():
            if name not in state:
                raise ValueError(
                    f"{found.path} holds no state of {name}: it was saved without it. Switch {name} off to go on, or "
                    "begin a new run (trainer.resume_mode=disable, another trainer.default_local_dir)."
                )
            thing.load_state_dict(state[name])
        random_state.restore(state["random"])

    def _load_contents(self, role: str) -> list[str]:
        return list(self.contents[role].load_contents or self.contents[role].save_contents)

    def save_due(self, step: int, last: bool, record: StepRecord) -> bool:
        self.longest_step = max(self.longest_step, record.seconds.get("step", 0.0))
        due = save_is_due(
            step,
            save_freq=self.save_freq,
            last=last,
            longest_step=self.longest_step,
            spare=self.config.trainer.esi_redundant_time,
        )
        return self.ranks.from_lead(due)  # clocks differ

    def log(self, record: StepRecord, step: int) -> None:
        assert self.trackers is not None
        late = {f"timing_s/{name}": record.seconds[name] for name in ("testing", "save_checkpoint") if name in record.seconds}
        metrics = {**record.metrics, **late, **memory_metrics()}
        if self.health is not None:
            metrics |= self.health.examine(metrics, step)
        self.trackers.log(metrics, step)

    def log_validation(self, samples: list[Trajectory], record: StepRecord, step: int) -> None:
        """Dump validation samples, show some of them to the trackers, and remember the numbers."""
        trainer = self.config.trainer
        self.validation = {name: value for name, value in record.metrics.items() if name.startswith("val-")}
        if not self.ranks.lead:
            return
        if trainer.validation_data_dir:
            dump(trainer.validation_data_dir, step, rollout_rows(samples, step=step, decode=self.decode))
            write_transcripts(trainer.validation_data_dir, step, samples, decode=self.decode)
        if self.samples is not None:
            self.samples.keep("validation", step, samples)
        if trainer.log_val_generations and self.trackers is not None:
            import random

            chosen = sorted(samples, key=lambda t: (t.prompt.index, t.group))
            random.Random(SHOWN_GENERATIONS_SEED).shuffle(chosen)  # the same prompts every time
            shown = chosen[: trainer.log_val_generations]
            self.trackers.log_generations(rollout_rows(shown, step=step, decode=self.decode), step)

    def evidence(
        self, problem: NonFiniteLoss, batch: Batch, step: int, trajectories: list[Trajectory] | None = None
    ) -> ValueError:
        """Write the batch of a loss that is not finite; the error to raise instead says where it is."""
        folder = self.directory / f"nonfinite_step_{step}"
        failure = SharedFailure if self.ranks.world > 1 else ValueError
        if not self.ranks.lead:
            return failure(f"Step {step}: {problem} The whole batch is in {folder}.")
        texts = rollout_rows(trajectories, step=step, decode=self.decode) if trajectories else batch_rows(batch, self.decode)
        write_evidence(folder, problem, batch, texts, step=step)
        return failure(
            f"Step {step}: {problem} The whole batch is in {folder}: rows.json to read, batch.safetensors to compute with."
        )

    def dump_rollouts(self, trajectories: list[Trajectory], step: int, record: StepRecord) -> None:
        folder = self.config.trainer.rollout_data_dir
        if folder and self.ranks.lead:
            with record.phase("dump_rollout_generations"):
                dump(folder, step, rollout_rows(trajectories, step=step, decode=self.decode))
                write_transcripts(folder, step, trajectories, decode=self.decode)

    def remember(self, known: Known | None) -> None:
        """Log-probs that the update of this step computed on the way."""
        if self.samples is not None and self.ranks.lead:
            self.samples.remember(known)

    def keep_samples(self, trajectories: list[Trajectory], batch: Batch, step: int, record: StepRecord) -> None:
        if self.samples is not None and self.ranks.lead:
            with record.phase("keep_samples"):
                self.samples.keep("train", step, trajectories, batch)
