"""Speculative decoding as the step loop sees it: how many tokens to draft now, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor, nn

from strop.config.schema.rollout import SpeculationConfig
from strop.rollout.native.meter import Meter
from strop.rollout.native.requests import ScheduledSample
from strop.rollout.native.runner import Runner
from strop.rollout.native.speculation.controller import Controller
from strop.rollout.native.speculation.draft_model import ModelDrafts, load_draft_model
from strop.rollout.native.speculation.drafts import Drafts
from strop.rollout.native.speculation.mtp import build_mtp_drafts

_PASSES_PER_SYNC = {"cpu": 1, "cuda": 8}
"""Passes with drafts between two reads of the rows' states from the device."""
_PROBE_STEPS = 4


class Speculator:
    def __init__(self, settings: SpeculationConfig, runner: Runner, drafts: Drafts, meter: Meter) -> None:
        self._runner = runner
        self._drafts = drafts
        self._meter = meter
        self._controller = Controller(settings, adaptive=settings.enable == "auto")
        self._max_rows = settings.max_rows
        drawn = settings.draft_model is not None or settings.mtp
        self._remembers = settings.memory_megabytes > 0 and not drawn
        self._known = False
        """Most of the running rows have earlier answers to guess from."""

    def num_drafts(self, samples: Sequence[ScheduledSample]) -> int:
        """Drafts of each running row in the coming passes, 0: ordinary decode steps."""
        rows = len(samples)
        if rows > self._max_rows:
            return 0
        self._known = self._drafts.num_known(samples) * 2 > rows
        return self._controller.num_drafts(rows, known=self._known)

    def num_passes(self, drafts: int, steps: int) -> int:
        """Passes until the rows are read again, where `steps` ordinary steps are usual."""
        if drafts:
            steps = _PASSES_PER_SYNC.get(self._runner.device.type, 1)
        if self._controller.probing:
            steps = min(steps, _PROBE_STEPS)
        return steps

    def measured(self, rows: int, drafts: int, passes: int, seconds: float | None) -> None:
        """So many passes ran; `seconds` is None if it took longer than it will the next time."""
        if seconds is not None and rows <= self._max_rows:
            self._controller.measured(rows, drafts, seconds / passes)
        if drafts:
            counts = self._drafts.read_counts(drafts)
            self._controller.kept(self._known, counts.kept)
            self._meter.speculated(passes, counts.drafted, counts.accepted)

    def remember(self, sample: ScheduledSample) -> None:
        """A sample has finished: guess later answers to its prompt from it."""
        if self._remembers:
            start = time.perf_counter()
            answer = sample.tokens if sample.packed is None else sample.packed
            self._drafts.memory.add(sample.request, sample.prompt, answer)
            self._meter.memory_seconds += time.perf_counter() - start


def _has_sinks(model: nn.Module) -> bool:
    return any(isinstance(getattr(part, "sinks", None), Tensor) for part in model.modules())


def build_speculator(settings: SpeculationConfig, runner: Runner, meter: Meter) -> Speculator | None:
    """None if speculation is off. With `auto` it is on for a GPU that computes the model alone: the choice
    follows the clock, which ranks of one model do not share, and a run on a CPU must be repeatable to the
    bit."""
    if settings.enable is False:
        return None
    if runner.cache.has_states:
        if settings.enable == "auto":
            return None
        raise ValueError(
            "rollout.speculation.enable=true: the model carries states along the row (linear attention, "
            "state spaces or convolutions), and a state cannot be taken back where a guess was wrong. Set it "
            "to auto."
        )
    if settings.enable == "auto" and (runner.device.type != "cuda" or runner.divided):
        return None
    if runner.device.type == "cuda" and _has_sinks(runner.model):
        if settings.enable == "auto":
            return None
        raise ValueError(
            "rollout.speculation.enable=true: on a GPU, a test of guesses fails for models with attention "
            "sinks. Set it to auto or false."
        )
    drafts = Drafts(settings, runner.device)
    if settings.draft_model is not None:
        model = load_draft_model(settings.draft_model, runner.model, runner.device)
        drafts = ModelDrafts(settings, model, runner.device)
    elif settings.mtp:
        drafts = build_mtp_drafts(settings, runner.model, runner.device)
    runner.use_drafts(drafts)
    return Speculator(settings, runner, drafts, meter)
