"""`strop replay RUN --step K`: compute a recorded step again with the code of today, and show the first
difference.

Every phase is given what was recorded before it, not what was just computed. So a difference in one phase
does not spread to the next, and the phases that are named are those that changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from strop.algorithms.metrics.training import StepRecord
from strop.config.aliases import flatten
from strop.config.compose import Loaded, reload
from strop.config.schema.ppo import PpoConfig
from strop.replay.recording import (
    ALL_CONTENTS,
    PHASES,
    HookedTrainer,
    environment_facts,
    phase_tensors,
    record_folder,
    recorded_steps,
    reproducible_metrics,
    trajectories_of,
)
from strop.run.checkpoint.layout import checkpoint_folder as checkpoint_of
from strop.run.checkpoint.store import load
from strop.run.checkpoint.tensor_files import read_tensors
from strop.types import Batch, Trajectory, batch_of

BATCH_FIELDS = frozenset(field.name for field in dataclasses.fields(Batch))


@dataclass(frozen=True)
class Difference:
    """Where two tensors differ first. Values are compared bit for bit, and NaN equals NaN."""

    tensor: str
    place: tuple[int, ...]
    """Index of the first difference; (row, token) in tables of tokens. Empty: the shapes differ."""
    recorded: str
    now: str
    count: int = 0
    total: int = 0
    largest: float = 0.0
    """Largest absolute difference."""

    def __str__(self) -> str:
        if not self.place:
            return f"{self.tensor}: recorded {self.recorded}, now {self.now}"
        if len(self.place) == 2:
            where = f"row {self.place[0]}, token {self.place[1]}"
        else:
            where = f"index {list(self.place)}"
        return (
            f"{self.tensor}, {where}: recorded {self.recorded}, now {self.now} ({self.count} of {self.total} "
            f"values differ, by {self.largest:.3g} at most)"
        )


def difference(name: str, recorded: Tensor, now: Tensor) -> Difference | None:
    """The first place, in the order of memory, at which two tensors differ."""
    recorded = recorded.detach().cpu()
    now = now.detach().cpu()
    if recorded.shape != now.shape or recorded.dtype != now.dtype:
        return Difference(name, (), _shape_and_dtype(recorded), _shape_and_dtype(now))
    differs = recorded != now
    if recorded.is_floating_point():
        differs = differs & ~(recorded.isnan() & now.isnan())
    if not bool(differs.any()):
        return None
    place = tuple(differs.nonzero()[0].tolist())
    gaps = (recorded[differs].double() - now[differs].double()).abs()
    return Difference(
        name,
        place or (0,),
        _shown(recorded[place]),
        _shown(now[place]),
        count=int(differs.sum()),
        total=differs.numel(),
        largest=float(gaps.nan_to_num(torch.inf).max()),
    )


def differences(recorded: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> list[Difference]:
    """The differences in the order of the record; a tensor that one side lacks is a difference, too."""
    found: list[Difference] = []
    for name, tensor in recorded.items():
        if name not in now:
            found.append(Difference(name, (), _shape_and_dtype(tensor), "nothing"))
        elif (gap := difference(name, tensor, now[name])) is not None:
            found.append(gap)
    for name, tensor in now.items():
        if name not in recorded:
            found.append(Difference(name, (), "nothing", _shape_and_dtype(tensor)))
    return found


def _shape_and_dtype(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"


def _shown(value: Tensor) -> str:
    """Enough digits to tell two neighbours apart."""
    if value.is_floating_point():
        return f"{value.item():.9g}"
    return str(value.item())


@dataclass(frozen=True)
class ReplayOutcome:
    """The comparison of one phase."""

    phase: str
    values: int
    """Numbers that were compared."""
    found: list[Difference]


@dataclass
class Replayer:
    """Compares each phase with the record, and returns the recorded values for the next phase."""

    folder: Path
    outcomes: list[ReplayOutcome] = dataclasses.field(default_factory=list)

    def sampled(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        now = batch_of(trajectories)
        for name in ("gen", "reward"):
            self._compare(name, phase_tensors(now, name))
        return trajectories_of(json.loads((self.folder / "trajectories.json").read_text()))

    def phase(self, name: str, batch: Batch) -> Batch:
        self._compare(name, phase_tensors(batch, name))
        recorded: dict[str, Tensor] = {}
        for key, value in self._read(name).items():
            if key in BATCH_FIELDS:
                recorded[key] = value
        return batch.replace(**recorded)

    def updated(self, name: str, losses: dict[str, Tensor], metrics: dict[str, float]) -> None:
        self._compare(name, losses)
        recorded = json.loads((self.folder / f"{name}.json").read_text())
        self._compare_numbers(name, recorded, reproducible_metrics(metrics))

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
        self.outcomes.append(ReplayOutcome(name, values, differences(recorded, now)))

    def _compare_numbers(self, name: str, recorded: dict[str, float], now: dict[str, float]) -> None:
        found: list[Difference] = []
        for key in sorted(recorded.keys() | now.keys()):
            if str(recorded.get(key)) != str(now.get(key)):
                before_text = str(recorded.get(key, "nothing"))
                found.append(Difference(key, (), before_text, str(now.get(key, "nothing"))))
        before = self.outcomes.pop()
        self.outcomes.append(ReplayOutcome(name, before.values + len(recorded), before.found + found))


def replay(run: Path, step: int, *, trust_code: bool = False) -> tuple[list[ReplayOutcome], dict[str, Any]]:
    """The outcome of every phase of the step in order, and the facts of the record.

    A record whose configuration names code of its own is refused without `trust_code`.
    """
    folder = _recorded(run, step)
    facts = json.loads((folder / "facts.json").read_text())
    before = checkpoint_of(folder, step - 1)
    from strop.ppo.build import build_ppo

    with tempfile.TemporaryDirectory() as scratch:
        trainer = build_ppo(_loaded(before, scratch, trust_code), trainer_class=HookedTrainer)
        assert isinstance(trainer, HookedTrainer)
        hooks = Replayer(folder)
        with trainer.output, closing(trainer):
            trainer.step = trainer.output.resume(trainer)
            trainer.sync_weights(trainer.step)
            trainer.step += 1
            record = StepRecord()
            with record.phase("step"):
                trainer.train_step_with_hooks(hooks, record)
            facts["here"] = environment_facts(next(trainer.roles.actor.module.parameters()).device)
    outcomes = list(hooks.outcomes)
    replayed = {outcome.phase for outcome in outcomes}
    for name in facts["phases"]:
        if name not in replayed:
            outcomes.append(ReplayOutcome(name, 0, [Difference("phase", (), "computed", "left out")]))
    order = [*PHASES, "update_critic", "update_actor", "after"]
    return sorted(outcomes, key=lambda outcome: order.index(outcome.phase)), facts


def _recorded(run: Path, step: int) -> Path:
    """The folder of a complete record; raises if there is none."""
    folder = record_folder(run, step)
    known = recorded_steps(run)
    if step not in known:
        others = "None is: set trainer.record_steps=[...] in a run."
        if known:
            others = f"Steps {', '.join(map(str, known))} are."
        raise ValueError(f"{run} has no record of step {step}. {others}")
    if not (folder / "facts.json").exists():
        raise ValueError(f"{folder} is not whole: the run ended while it was recorded.")
    return folder


RUNS_CODE = (
    "plugins",
    "trust_remote_code",
    "external_lib",
    "optimizer_impl",
    "custom_reward_function.path",
    "reward_manager.module.path",
    "data.custom_cls.path",
    "data.sampler.class_path",
    "tool_config_path",
    "interaction_config_path",
    "agent_loop_config_path",
    "rollout.agent.command",
    "rollout.environment",
    "sandbox_fusion.isolation",
    "reward_model.remote_url",
    "sandbox_fusion.url",
    "judge.url",
    "distillation.url",
)
"""Ends of keys that run code of the user's or isolate programs less, and of those that send the data of the
run to a server, some with the value of an environment variable."""
RUNS_CODE_INSIDE = ("engine_kwargs.", "ray_kwargs.ray_init.")
"""Free arguments, among which are an interpreter and an environment."""


def code_named(tree: Mapping[str, object]) -> list[str]:
    """The settings of a recorded configuration that run code or call a server, as key=value, where they are
    not the default."""
    default = flatten(dataclasses.asdict(PpoConfig()))
    found: list[str] = []
    for key, value in flatten(tree).items():
        runs_code = key.endswith(RUNS_CODE) or any(part in key for part in RUNS_CODE_INSIDE)
        if runs_code and value and value != default.get(key):
            found.append(f"{key}={value}")
    return found


def _loaded(before: Path, scratch: str, trust_code: bool) -> Loaded:
    """The configuration of the run, changed so that it writes only to a temporary folder."""
    tree = load(before, only=lambda part: part == "config")["config"]
    if not isinstance(tree, Mapping):
        raise ValueError(f"{before} holds no configuration, but a {type(tree).__name__}.")
    named = code_named(tree)
    if named and not trust_code:
        raise ValueError(
            "The recorded run names code or servers, which a replay would run or call: "
            f"{', '.join(named[:5])}. If the record is yours, or you trust whoever made it, add --trust_code."
        )
    overrides = {
        "trainer.default_local_dir": scratch,
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
        "actor_rollout_ref.actor.checkpoint.load_contents": ALL_CONTENTS,
        "critic.checkpoint.load_contents": ALL_CONTENTS,
    }
    return reload("ppo_trainer", tree, overrides)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="strop replay", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run (trainer.default_local_dir)")
    parser.add_argument("--step", type=int, required=True, help="one of its trainer.record_steps")
    parser.add_argument(
        "--trust_code",
        action="store_true",
        help="run code that the recorded configuration names (plugins, reward functions, tools, programs, "
        "model code), and call its servers",
    )
    options = parser.parse_args(list(arguments))
    outcomes, facts = replay(options.run, options.step, trust_code=options.trust_code)
    sys.stdout.write(render(options.step, outcomes, facts))
    if first_difference(outcomes) is None:
        return 0
    return 1


def first_difference(outcomes: Sequence[ReplayOutcome]) -> ReplayOutcome | None:
    """The first phase that differs from the record."""
    for outcome in outcomes:
        if outcome.found:
            return outcome
    return None


def render(step: int, outcomes: Sequence[ReplayOutcome], facts: Mapping[str, Any]) -> str:
    """The report of a replay."""
    lines = [f"step {step}, computed again; each phase is given what was recorded before it"]
    then = facts.get("environment") or facts["surroundings"]  # the name in records of version 0.1
    here = facts["here"]
    changed: list[str] = []
    for name in then:
        if then[name] != here.get(name):
            changed.append(f"{name} {then[name]} -> {here[name]}")
    if changed:
        lines.append(f"environment changed: {', '.join(changed)}")
    for outcome in outcomes:
        verdict = "equal" if not outcome.found else "DIFFERENT"
        lines.append(f"  {outcome.phase:<14} {verdict:<10} {outcome.values} numbers")
        for gap in outcome.found[:3]:
            lines.append(f"{'':<17}{gap}")
        if len(outcome.found) > 3:
            lines.append(f"{'':<17}... and {len(outcome.found) - 3} more")
    first = first_difference(outcomes)
    if first is None:
        lines.append("Equal, bit for bit.")
    else:
        lines.append(f"The first difference is in {first.phase}: {first.found[0]}.")
    return "\n".join(lines) + "\n"
