"""Batch arithmetic: updates, accumulation and steps that follow from the sizes in a configuration.

Two units cause most confusion in this field. `data.train_batch_size` and `ppo_mini_batch_size` count PROMPTS;
`*_micro_batch_size_per_gpu` count SEQUENCES (prompts times rollout.n). OpenRLHF's `train_batch_size` counts
sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.config.derived import (
    corrects_quantization,
    describe_async,
    device_count,
    off_policy_remedy,
    quantized_parts,
    resource_pools,
)
from strop.config.megatron import model_parallel_size, ranks_per_row, training_dtype

if TYPE_CHECKING:
    from strop.config.schema.actor import ActorConfig
    from strop.config.schema.critic import CriticConfig
    from strop.config.schema.ppo import PpoConfig
    from strop.config.schema.roots import AnySupervisedConfig
    from strop.config.schema.trainer import TrainerConfig

QUANTIZED = "8 bits"
"""The precision of an engine with 8-bit weights or an 8-bit KV cache."""
DERIVED_MICRO_BATCH = 8
"""Sequences per forward when a configuration names none: small enough for memory, large enough to keep a
device busy."""


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
    """How far sampling runs ahead, and what that means; None: it is synchronous."""
    quantized: tuple[str, str] | None = None
    """Precision of the engine's weights, and how the loss corrects for it; None: not quantised."""

    def table(self) -> list[tuple[str, str, str]]:
        """Rows (quantity, value, where it comes from) for the printed report."""
        n = self.samples_per_prompt
        mini = self.mini_batch_prompts
        micro = "max_token_len tokens" if self.micro_batch is None else str(self.micro_batch)
        unknown = "known once the files are read"
        rows = [
            ("devices", str(self.devices), f"data-parallel ranks: {self.data_parallel}"),
            ("prompts per step", str(self.prompts_per_step), "data.train_batch_size"),
            (
                "sequences per step",
                str(self.sequences_per_step),
                f"{self.prompts_per_step} prompts x rollout.n {n}",
            ),
            (
                "sequences per update",
                str(self.mini_batch_sequences),
                f"ppo_mini_batch_size {mini} x rollout.n {n}",
            ),
            (
                "updates per step",
                str(self.updates_per_step),
                f"{self.updates_per_epoch} mini-batches x ppo_epochs {self.ppo_epochs}",
            ),
            (
                "accumulation per update",
                _passes(self.accumulation),
                f"{self.sequences_per_device} sequences per device in micro-batches of {micro}",
            ),
            (
                "steps per epoch",
                _known(self.steps_per_epoch),
                unknown if self.rows is None else f"{self.rows} rows",
            ),
            (
                "total steps",
                _known(self.total_steps),
                unknown if self.total_steps is None else "total_epochs or total_training_steps",
            ),
            ("policy", "on-policy" if self.on_policy else "off-policy", self.why),
        ]
        if self.ahead is not None:
            rows.append(("sampling", *self.ahead))
        if self.quantized is not None:
            rows.append(("rollout precision", *self.quantized))
        return rows


def _known(number: int | None) -> str:
    return "?" if number is None else str(number)


def _passes(accumulation: int | None) -> str:
    return "by tokens" if accumulation is None else str(accumulation)


def plan_ppo(config: PpoConfig, rows: int | None = None, role: str = "actor") -> Plan:
    """The plan of a ppo_trainer configuration; `rows` is the number of training rows when it is known."""
    actor = config.actor_rollout_ref.actor
    trainer = config.trainer
    prompts = config.data.train_batch_size
    n = config.actor_rollout_ref.rollout.n
    section: ActorConfig | CriticConfig = actor
    sharding: ActorConfig | CriticConfig = actor
    devices = device_count(trainer)
    if role == "critic":
        section = config.critic
        if section.strategy == "megatron":
            sharding = section
        if "critic" in resource_pools(config):
            sharding = config.critic
            devices = device_count(config.critic)
    ranks = max(1, devices // model_parallel_size(sharding))
    mini = section.ppo_mini_batch_size
    per_epoch = math.ceil(prompts / mini)
    updates = per_epoch * section.ppo_epochs
    sequences = max(1, math.ceil(min(mini, prompts) * n / ranks))
    micro = None
    if not section.use_dynamic_bsz:
        micro = micro_batch_size(section, "ppo_micro_batch_size", sequences, ranks)
    return Plan(
        devices=devices,
        data_parallel=ranks,
        prompts_per_step=prompts,
        samples_per_prompt=n,
        sequences_per_step=prompts * n,
        mini_batch_prompts=mini,
        mini_batch_sequences=mini * n,
        updates_per_epoch=per_epoch,
        ppo_epochs=section.ppo_epochs,
        updates_per_step=updates,
        sequences_per_device=sequences,
        micro_batch=micro,
        accumulation=_accumulation(sequences, micro),
        rows=rows,
        steps_per_epoch=_steps_per_epoch(rows, prompts),
        total_steps=_total_steps(trainer, _steps_per_epoch(rows, prompts)),
        on_policy=updates == 1,
        why=_why(updates == 1, per_epoch, section.ppo_epochs, prompts),
        ahead=describe_async(config),
        quantized=_quantization(config),
    )


def sampling_precision(config: PpoConfig) -> str:
    """The precision that bounds how far the engine's log-probs are from the trainer's."""
    return QUANTIZED if quantized_parts(config) else training_dtype(config.actor_rollout_ref.actor)


def _quantization(config: PpoConfig) -> tuple[str, str] | None:
    """(precision of the engine's weights and KV cache, how the loss corrects for it) as text; None: not
    quantised."""
    parts = quantized_parts(config)
    if not parts:
        return None
    text = off_policy_remedy(config)
    if corrects_quantization(config):
        threshold = config.algorithm.rollout_correction.rollout_is_threshold
        text += f", truncated at {threshold} (the default with {' and '.join(parts)})"
    return ", ".join(parts.values()), text


def _accumulation(sequences: int, micro: int | None) -> int | None:
    """Micro-batches per update; None when tokens decide."""
    return None if micro is None else math.ceil(sequences / micro)


def _steps_per_epoch(rows: int | None, batch: int) -> int | None:
    return None if rows is None else rows // batch


def _total_steps(trainer: TrainerConfig, steps_per_epoch: int | None) -> int | None:
    if trainer.total_training_steps or steps_per_epoch is None:
        return trainer.total_training_steps
    return steps_per_epoch * trainer.total_epochs


def _why(on_policy: bool, per_epoch: int, epochs: int, prompts: int) -> str:
    if on_policy:
        return "one update per step, so the ratio is exactly 1 and clipping never acts"
    causes = []
    if per_epoch > 1:
        causes.append(f"{per_epoch} mini-batches per step (ppo_mini_batch_size={prompts} would make it one)")
    if epochs > 1:
        causes.append(f"ppo_epochs={epochs}")
    return "later updates of a step see older samples: " + " and ".join(causes)


def micro_batch_size(section: object, name: str, sequences: int, ranks: int) -> int:
    """Sequences per forward on one device: the old key over all devices (`name`), `{name}_per_gpu`, or a
    default. The old key comes first because the new one may follow another key."""
    per_gpu: int | None = getattr(section, f"{name}_per_gpu")
    over_all: int | None = getattr(section, name)
    if over_all is not None:
        per_gpu = max(1, over_all // ranks)
    return min(per_gpu or DERIVED_MICRO_BATCH, sequences)


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
        """Rows (quantity, value, where it comes from) for the printed report."""
        return [
            ("devices", str(self.devices), "nnodes x n_gpus_per_node"),
            ("rows per update", str(self.rows_per_update), "data.train_batch_size"),
            (
                "accumulation per update",
                _passes(self.accumulation),
                f"{self.rows_per_device} rows per device in micro-batches of "
                f"{self.micro_batch or 'max_token_len tokens'}",
            ),
            (
                "steps per epoch",
                _known(self.steps_per_epoch),
                "" if self.rows is None else f"{self.rows} rows",
            ),
            ("total steps", _known(self.total_steps), "total_epochs or total_training_steps"),
        ]


def plan_supervised(config: AnySupervisedConfig, rows: int | None = None) -> SupervisedPlan:
    """The plan of an SFT, reward model or DPO configuration; `rows` as in `plan_ppo`."""
    data = config.data
    devices = device_count(config.trainer)
    ranks = max(1, devices // ranks_per_row(config))
    rows_per_device = max(1, math.ceil(data.train_batch_size / ranks))
    micro = None
    if not data.use_dynamic_bsz:
        micro = micro_batch_size(data, "micro_batch_size", rows_per_device, ranks)
    steps = _steps_per_epoch(rows, data.train_batch_size)
    return SupervisedPlan(
        devices=devices,
        rows_per_update=data.train_batch_size,
        rows_per_device=rows_per_device,
        micro_batch=micro,
        accumulation=_accumulation(rows_per_device, micro),
        rows=rows,
        steps_per_epoch=steps,
        total_steps=_total_steps(config.trainer, steps),
    )
