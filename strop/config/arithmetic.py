"""Batch arithmetic: what the sizes in a configuration amount to, in one unit, before anything runs.

Two units cause most confusion in this field. `data.train_batch_size` and `ppo_mini_batch_size` count PROMPTS;
`*_micro_batch_size_per_gpu` count SEQUENCES (prompts times rollout.n). OpenRLHF's `train_batch_size` counts sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from strop.config.asynchrony import in_words
from strop.config.pools import devices_of, pools

DERIVED_MICRO_BATCH = 8
"""Sequences per forward when a configuration names none: small enough for memory, large enough to keep a device busy."""


@dataclass(frozen=True)
class Plan:
    """What one step does."""

    devices: int
    data_parallel: int
    prompts_per_step: int
    samples_per_prompt: int
    sequences_per_step: int
    mini_batch_prompts: int
    mini_batch_sequences: int
    updates_per_epoch: int
    ppo_epochs: int
    updates_per_step: int
    sequences_per_device: int
    micro_batch: int | None
    accumulation: int | None
    rows: int | None
    steps_per_epoch: int | None
    total_steps: int | None
    on_policy: bool
    why: str
    ahead: tuple[str, str] | None = None
    """How far sampling runs ahead, and what that means; None: it does not."""

    def table(self) -> list[tuple[str, str, str]]:
        """(quantity, value, how it comes about) for people."""
        n, mini = self.samples_per_prompt, self.mini_batch_prompts
        unknown = "known once the files are read"
        rows = [
            ("devices", str(self.devices), f"data-parallel ranks: {self.data_parallel}"),
            ("prompts per step", str(self.prompts_per_step), "data.train_batch_size"),
            ("sequences per step", str(self.sequences_per_step), f"{self.prompts_per_step} prompts x rollout.n {n}"),
            ("sequences per update", str(self.mini_batch_sequences), f"ppo_mini_batch_size {mini} x rollout.n {n}"),
            (
                "updates per step",
                str(self.updates_per_step),
                f"{self.updates_per_epoch} mini-batches x ppo_epochs {self.ppo_epochs}",
            ),
            (
                "accumulation per update",
                "by tokens" if self.accumulation is None else str(self.accumulation),
                f"{self.sequences_per_device} sequences per device in micro-batches of "
                + ("max_token_len tokens" if self.micro_batch is None else str(self.micro_batch)),
            ),
            ("steps per epoch", _known(self.steps_per_epoch), unknown if self.rows is None else f"{self.rows} rows"),
            (
                "total steps",
                _known(self.total_steps),
                unknown if self.total_steps is None else "total_epochs or total_training_steps",
            ),
            ("policy", "on-policy" if self.on_policy else "off-policy", self.why),
        ]
        return rows if self.ahead is None else [*rows, ("sampling", *self.ahead)]


def _known(number: int | None) -> str:
    return "?" if number is None else str(number)


def plan_ppo(config: Any, rows: int | None = None, role: str = "actor") -> Plan:
    """The plan of a ppo_trainer configuration; `rows` is the number of training rows when it is known."""
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    section = actor if role == "actor" else config.critic
    apart = role == "critic" and "critic" in pools(config)
    devices = devices_of(section if apart else trainer)
    sharing = section if apart else actor
    parallel = max(1, devices // (sharing.ulysses_sequence_parallel_size * sharing.tensor_parallel_size))
    prompts, n, mini = config.data.train_batch_size, rollout.n, section.ppo_mini_batch_size
    per_epoch = math.ceil(prompts / mini)
    updates = per_epoch * section.ppo_epochs
    local = max(1, math.ceil(min(mini, prompts) * n / parallel))
    micro = None if section.use_dynamic_bsz else micro_batch(section, "ppo_micro_batch_size", local, parallel)
    steps = None if rows is None else rows // prompts
    total = trainer.total_training_steps or (None if steps is None else steps * trainer.total_epochs)
    on_policy = updates == 1
    return Plan(
        devices=devices,
        data_parallel=parallel,
        prompts_per_step=prompts,
        samples_per_prompt=n,
        sequences_per_step=prompts * n,
        mini_batch_prompts=mini,
        mini_batch_sequences=mini * n,
        updates_per_epoch=per_epoch,
        ppo_epochs=section.ppo_epochs,
        updates_per_step=updates,
        sequences_per_device=local,
        micro_batch=micro,
        accumulation=None if micro is None else math.ceil(local / micro),
        rows=rows,
        steps_per_epoch=steps,
        total_steps=total,
        on_policy=on_policy,
        why=_why(on_policy, per_epoch, section.ppo_epochs, prompts),
        ahead=in_words(config),
    )


def _why(on_policy: bool, per_epoch: int, epochs: int, prompts: int) -> str:
    if on_policy:
        return "one update per step, so the ratio is exactly 1 and clipping never acts"
    causes = []
    if per_epoch > 1:
        causes.append(f"{per_epoch} mini-batches per step (ppo_mini_batch_size={prompts} would make it one)")
    if epochs > 1:
        causes.append(f"ppo_epochs={epochs}")
    return "later updates of a step see older samples: " + " and ".join(causes)


def micro_batch(section: Any, name: str, sequences: int, ranks: int) -> int:
    """Sequences per forward on one device: the setting, its old global form, or a derived size."""
    per_gpu, everywhere = getattr(section, f"{name}_per_gpu"), getattr(section, name)
    if per_gpu is None and everywhere is not None:
        per_gpu = max(1, everywhere // ranks)
    return int(min(per_gpu or DERIVED_MICRO_BATCH, sequences))


@dataclass(frozen=True)
class SupervisedPlan:
    """What one supervised update does."""

    devices: int
    rows_per_update: int
    rows_per_device: int
    micro_batch: int | None
    accumulation: int | None
    rows: int | None
    steps_per_epoch: int | None
    total_steps: int | None

    def table(self) -> list[tuple[str, str, str]]:
        return [
            ("devices", str(self.devices), "nnodes x n_gpus_per_node"),
            ("rows per update", str(self.rows_per_update), "data.train_batch_size"),
            (
                "accumulation per update",
                "by tokens" if self.accumulation is None else str(self.accumulation),
                f"{self.rows_per_device} rows per device in micro-batches of {self.micro_batch or 'max_token_len tokens'}",
            ),
            ("steps per epoch", _known(self.steps_per_epoch), "" if self.rows is None else f"{self.rows} rows"),
            ("total steps", _known(self.total_steps), "total_epochs or total_training_steps"),
        ]


def plan_supervised(config: Any, rows: int | None = None) -> SupervisedPlan:
    data, trainer = config.data, config.trainer
    devices = trainer.nnodes * trainer.n_gpus_per_node
    ranks = max(1, devices // (config.ulysses_sequence_parallel_size * config.tensor_parallel_size))
    local = max(1, math.ceil(data.train_batch_size / ranks))
    micro = None if data.use_dynamic_bsz else micro_batch(data, "micro_batch_size", local, ranks)
    steps = None if rows is None else rows // data.train_batch_size
    return SupervisedPlan(
        devices=devices,
        rows_per_update=data.train_batch_size,
        rows_per_device=local,
        micro_batch=micro,
        accumulation=None if micro is None else math.ceil(local / micro),
        rows=rows,
        steps_per_epoch=steps,
        total_steps=trainer.total_training_steps or (None if steps is None else steps * trainer.total_epochs),
    )
