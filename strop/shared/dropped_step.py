"""The end of a step, and of a run without a loss: the state before an unfinished step is saved.

While a step samples and scores, the models are those of the step before. So when a signal ends the run, or no
sample can be scored, the step is dropped, and a checkpoint of the step before is written with the loader and
the random states as they were. The resumed run does the step again, with the same result.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from strop.algorithms.metrics.training import StepRecord
from strop.run.checkpoint.contents import Loop, LoopState
from strop.shared.run_output import RunOutput
from strop.stopping import StoppedByCaller, StopRequested, first_request, mark_saved, requested

log = logging.getLogger(__name__)


class ValidatingLoop(Loop, Protocol):
    """A training loop that validates."""

    def validate(self, record: StepRecord) -> None: ...


def save_before_end(
    output: RunOutput, loop: Loop, record: StepRecord, state: LoopState, stop: StopRequested
) -> None:
    """Save `state` because of a signal, unless it is saved; says whether the run can go on from it."""
    dropped = f"Step {loop.step} is dropped. " if loop.step > state.step else ""
    loop.step = state.step
    stop.resumable = state.step == 0 or output.save_if_missing(loop, record, state)
    if stop.resumable:
        mark_saved()
    if state.step == 0:
        log.warning("%sNothing is trained yet; the same command starts again.", dropped)
    elif stop.resumable:
        log.warning(
            "%sThe state after step %d is saved; %s resumes from it.",
            *(dropped, state.step, resuming_command(output)),
        )
    else:
        log.warning(
            "%strainer.save_freq=%d: no checkpoint is written; steps since the last one are lost.",
            *(dropped, output.save_freq),
        )


def resuming_command(output: RunOutput) -> str:
    """What continues a run that was started with this configuration, in words."""
    if output.config.trainer.resume_mode == "auto":
        return "the same command"
    return "the same command with trainer.resume_mode=auto"


def raise_if_stopped(output: RunOutput) -> None:
    """Raise StopRequested on all ranks if a signal came to any of them. A collective operation."""
    number = first_request(output.ranks.all_gather_object(requested()))
    if number is not None:
        raise StopRequested(number)


@contextmanager
def drop_validation(output: RunOutput) -> Iterator[None]:
    """Around a validation. A signal ends it, and the resumed run does it again."""
    try:
        yield
    except StopRequested:
        output.validation_dropped = True
        output.validation = {}


def save_unvalidated(output: RunOutput, loop: Loop, record: StepRecord, state: LoopState) -> None:
    """Save and log a step whose validation failed: its weights are complete, and the resumed run validates
    them."""
    output.validation_dropped = True
    output.validation = {}
    if output.save_if_missing(loop, record, state):
        log.error(
            "The validation of step %d failed. The step is saved; %s validates it again and goes on.",
            *(state.step, resuming_command(output)),
        )
    output.log(record, state.step)


def validate_again(output: RunOutput, loop: ValidatingLoop) -> None:
    """Do the validation that a signal ended, and save its result with the checkpoint of the step."""
    record = output.record(loop.step)
    state = LoopState.of(loop, loop.step)
    loop.validate(record)
    output.validation_dropped = False
    output.save(loop, record, state)
    output.log(record, loop.step)


def save_and_log(output: RunOutput, loop: Loop, record: StepRecord) -> None:
    """Save a checkpoint if it is due, and log the step even if saving fails (a full disk)."""
    try:
        if output.save_due(loop.step, record):
            output.save(loop, record)
    finally:
        output.log(record, loop.step)


def end_if_stopped(output: RunOutput, loop: Loop, record: StepRecord, state: LoopState) -> None:
    """After a step: if a signal came or the caller asks for the end, save and raise StopRequested. `state` is
    that before the validation, from which a resumed run goes on if it must do the validation again."""
    if output.stop_signal is not None:
        stop = StopRequested(output.stop_signal)
    elif output.observer is not None and output.observer.stop_requested:
        stop = StoppedByCaller()
    else:
        return
    if loop.step < output.total_steps or output.validation_dropped:
        if not output.validation_dropped:  # its scorers may have drawn random numbers
            state = LoopState.of(loop, loop.step)
        save_before_end(output, loop, record, state, stop)
        raise stop
