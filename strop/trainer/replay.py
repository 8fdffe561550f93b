"""`strop replay RUN --step K`: compute a recorded step again with the code of today, and show the first difference.

Every phase is given what was recorded before it, not what was just computed. So a difference in one phase does not spread to
the next, and the phases that are named are those that changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from strop.config.compose import Loaded, reload
from strop.run.checkpoint import load
from strop.run.differences import Difference, differences
from strop.run.layout import folder_of as checkpoint_of
from strop.run.tensor_file import read_tensors
from strop.trainer.record import StepRecord
from strop.trainer.recording import EVERYTHING, TapedTrainer
from strop.trainer.tape import PHASES, compared, folder_of, recorded_steps, surroundings, tables, trajectories_of
from strop.types import Batch, Trajectory, batch_of


@dataclass(frozen=True)
class Outcome:
    phase: str
    values: int
    """Numbers that were compared."""
    found: list[Difference]


@dataclass
class Replayer:
    """Compares, and gives the next phase what was recorded."""

    folder: Path
    outcomes: list[Outcome] = field(default_factory=list)

    def sampled(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        now = batch_of(trajectories)
        for name in ("gen", "reward"):
            self._compare(name, tables(now, name))
        return trajectories_of(json.loads((self.folder / "trajectories.json").read_text()))

    def phase(self, name: str, batch: Batch) -> Batch:
        self._compare(name, tables(batch, name))
        known = {f.name for f in dataclasses.fields(Batch)}
        return batch.replace(**{key: value for key, value in self._read(name).items() if key in known})

    def updated(self, name: str, losses: dict[str, Tensor], metrics: dict[str, float]) -> None:
        self._compare(name, losses)
        recorded = json.loads((self.folder / f"{name}.json").read_text())
        self._compare_numbers(name, recorded, compared(metrics))

    def weights(self, weights: dict[str, Tensor]) -> None:
        self._compare("after", weights)

    def _read(self, name: str) -> dict[str, Tensor]:
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return {}
        with safe_open(path, "pt") as file:
            order = json.loads(file.metadata()["order"])
        found = read_tensors(path)
        return {key: found[key] for key in order}

    def _compare(self, name: str, now: dict[str, Tensor]) -> None:
        recorded = self._read(name)
        values = sum(tensor.numel() for tensor in recorded.values())
        self.outcomes.append(Outcome(name, values, differences(recorded, now)))

    def _compare_numbers(self, name: str, recorded: dict[str, float], now: dict[str, float]) -> None:
        found = [
            Difference(key, (), str(recorded.get(key, "nothing")), str(now.get(key, "nothing")))
            for key in sorted(recorded.keys() | now.keys())
            if str(recorded.get(key)) != str(now.get(key))
        ]
        before = self.outcomes.pop()
        self.outcomes.append(Outcome(name, before.values + len(recorded), before.found + found))


def replay(run: Path, step: int) -> tuple[list[Outcome], dict[str, Any]]:
    """Every phase of the step in order, and what was written down about the recording."""
    folder = _recorded(run, step)
    facts = json.loads((folder / "facts.json").read_text())
    before = checkpoint_of(folder, step - 1)
    from strop.trainer.build import build_ppo

    with tempfile.TemporaryDirectory() as aside:
        trainer = build_ppo(_loaded(before, aside), kind=TapedTrainer)
        assert isinstance(trainer, TapedTrainer)
        tape = Replayer(folder)
        with trainer.keeper, closing(trainer):
            trainer.step = trainer.keeper.resume(trainer)
            trainer.publish(trainer.step)
            trainer.step += 1
            record = StepRecord()
            with record.phase("step"):
                trainer.taped_step(tape, record)
            facts["here"] = surroundings(next(trainer.roles.actor.module.parameters()).device)
    missing = [name for name in facts["phases"] if name not in {outcome.phase for outcome in tape.outcomes}]
    gone = [Outcome(name, 0, [Difference("phase", (), "computed", "left out")]) for name in missing]
    order = [*PHASES, "update_critic", "update_actor", "after"]
    return sorted([*tape.outcomes, *gone], key=lambda outcome: order.index(outcome.phase)), facts


def _recorded(run: Path, step: int) -> Path:
    folder, known = folder_of(run, step), recorded_steps(run)
    if step not in known:
        there = f"Steps {', '.join(map(str, known))} are." if known else "None is: set trainer.record_steps=[...] in a run."
        raise ValueError(f"{run} has no record of step {step}. {there}")
    if not (folder / "facts.json").exists():
        raise ValueError(f"{folder} is not whole: the run ended while it was recorded.")
    return folder


def _loaded(before: Path, aside: str) -> Loaded:
    """The configuration of the run, changed so that it leaves nothing behind."""
    tree = load(before, only=lambda part: part == "config")["config"]
    quiet = {
        "trainer.default_local_dir": aside,
        "trainer.default_hdfs_dir": None,
        "trainer.rollout_data_dir": None,
        "trainer.validation_data_dir": None,
        "trainer.logger": [],
        "trainer.health": False,
        "trainer.samples_to_keep": 0,
        "trainer.record_steps": None,
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": str(before),
        "trainer.del_local_ckpt_after_load": False,
        "global_profiler.steps": None,
        "data.val_files": [],
        "actor_rollout_ref.actor.checkpoint.load_contents": EVERYTHING,
        "critic.checkpoint.load_contents": EVERYTHING,
    }
    return reload("ppo_trainer", tree, quiet)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="strop replay", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run (trainer.default_local_dir)")
    parser.add_argument("--step", type=int, required=True, help="one of its trainer.record_steps")
    asked = parser.parse_args(list(arguments))
    outcomes, facts = replay(asked.run, asked.step)
    sys.stdout.write(render(asked.step, outcomes, facts))
    return 1 if any(outcome.found for outcome in outcomes) else 0


def render(step: int, outcomes: Sequence[Outcome], facts: dict[str, Any]) -> str:
    lines = [f"step {step}, computed again; each phase is given what was recorded before it"]
    then, here = facts["surroundings"], facts["here"]
    changed = [f"{name} {then[name]} -> {here[name]}" for name in then if then[name] != here.get(name)]
    if changed:
        lines.append(f"other surroundings: {', '.join(changed)}")
    for outcome in outcomes:
        verdict = "equal" if not outcome.found else "DIFFERENT"
        lines.append(f"  {outcome.phase:<14} {verdict:<10} {outcome.values} numbers")
        lines += [f"{'':<17}{gap}" for gap in outcome.found[:3]]
        if len(outcome.found) > 3:
            lines.append(f"{'':<17}... and {len(outcome.found) - 3} more")
    first = next((outcome for outcome in outcomes if outcome.found), None)
    if first is None:
        lines.append("Equal, bit for bit.")
    else:
        lines.append(f"The first difference is in {first.phase}: {first.found[0]}.")
    return "\n".join(lines) + "\n"
