"""The updates of a step: mini-batches, epochs, and the loss of the actor.

The denominators of a loss are counted once per optimizer step and passed to all its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from strop.algorithms.aggregation import Aggregation, Totals, aggregate, mean_metric
from strop.algorithms.kl import kl_limits, kl_penalty
from strop.algorithms.policy_losses.clipped import PolicyLoss, policy_loss
from strop.algorithms.rollout_correction import correct_rollout, weights_of_rows
from strop.backends.base import Backend, Loss, MicroBatching, Observe, Outputs
from strop.catalog import AGGREGATIONS, POLICY_LOSSES
from strop.compat import conventions
from strop.config.derived import clip_range, rollout_correction, uses_engine_log_probs
from strop.config.hyperparameters import policy_loss_kwargs, policy_loss_name
from strop.config.schema.actor import ActorConfig
from strop.config.schema.critic import CriticConfig
from strop.config.schema.distillation import TOPK
from strop.config.schema.ppo import PpoConfig
from strop.ppo.critic_update import CriticUpdate
from strop.ppo.episodes.rows import rows_by_number
from strop.ppo.experience import rollout_drift
from strop.ppo.teacher import teacher_loss
from strop.ranks import Ranks
from strop.run.samples import UpdateLogProbs
from strop.types import Batch, pad_columns

ExtraLoss = Callable[[Backend, MicroBatching], Mapping[str, float]]
"""Adds the gradients of a further loss to an update; returns its metrics."""


def mini_batches(batch: Batch, rows: int, epochs: int, shuffle: bool, seed: int) -> Iterator[Batch]:
    """The mini-batches of one step: every sequence once per epoch. Groups stay together unless shuffled, and
    sequences of one sample always; `rows` counts samples."""
    members = [[row] for row in range(len(batch))]
    if batch.samples is not None:
        members = rows_by_number(batch.samples)
    for epoch in range(epochs):
        order = torch.arange(len(members))
        if shuffle:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            order = torch.randperm(len(members), generator=generator)
        for start in range(0, len(members), rows):
            chosen: list[int] = []
            for place in order[start : start + rows].tolist():
                chosen += members[place]
            yield batch.select(chosen)


@dataclass
class ActorUpdate:
    """The loss of the actor: policy loss, KL to the reference, entropy bonus, load balance of experts."""

    config: PpoConfig
    width: float
    """The length that seq-mean-token-sum-norm divides by."""
    captured: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)
    """Row ids, log-probs and entropy from passes with the weights that the step began with, where the trainer
    computed no old log-probs before."""
    updates: int = 0
    """Updates of this step so far."""
    observe: Observe | None = None

    def __post_init__(self) -> None:
        self.actor: ActorConfig = self.config.actor_rollout_ref.actor
        correction = self.config.algorithm.rollout_correction
        entry = POLICY_LOSSES.entry(policy_loss_name(self.config))
        self.loss_mode = entry.name  # the configuration may spell it in capitals
        facts = entry.facts
        self.policy_loss: Callable[..., PolicyLoss] = entry.load()
        self.aggregation: Aggregation = AGGREGATIONS.get(facts["aggregation"] or self.actor.loss_agg_mode)
        teacher = self.config.algorithm.distillation
        self.teacher = teacher if teacher.is_loss else None
        other_terms = (
            self.actor.use_kl_loss or self.actor.entropy_coeff or self.actor.aux_loss_coef or self.teacher
        )
        self.skips_zero_advantages = (
            self.actor.skip_zero_advantages and facts["proportional"] and not other_terms
        )
        self.rules = conventions(self.config.algorithm.compat)
        low, high = clip_range(self.actor)
        if self.loss_mode == "cispo" and self.rules.cispo_cap == "clip_ratio_high":
            low, high = 1.0, high - 1.0  # ratios in [0, clip_ratio_high]
        self.fixed_arguments: dict[str, object] = {
            "clip_low": low,
            "clip_high": high,
            "clip_c": self.actor.clip_ratio_c,
            "tau_pos": self.actor.tau_pos,
            "tau_neg": self.actor.tau_neg,
            **_settings(self.actor.policy_loss, without=("loss_mode", "kwargs")),
        }
        if correction.bypass_mode:
            self.fixed_arguments |= _settings(correction, without=("bypass_mode",))
        self.fixed_arguments |= policy_loss_kwargs(self.config).converted()
        self.old_from_engine = uses_engine_log_probs(self.config)
        self.correction = rollout_correction(self.config)

    def begin_step(self) -> None:
        """Forget what the passes of the last step found."""
        self.captured.clear()
        self.updates = 0

    def want(self) -> list[str]:
        """The outputs of the model that the loss needs."""
        wanted = ["log_probs"]
        if self.actor.entropy_coeff:
            wanted.append("entropy")
        elif self.actor.calculate_entropy:
            wanted.append("observed_entropy")
        if self.actor.aux_loss_coef:
            wanted.append("auxiliary")
        if self.teacher is not None and self.teacher.loss_mode == TOPK:
            wanted.append("student_top_log_probs")
        return wanted

    def active(self, mini: Batch) -> Batch:
        """The rows that can change the weights.

        A group whose samples all have the same reward has advantages of 0. If the loss is proportional to
        the advantages, its gradient is 0: such rows count in every denominator, but need no pass.
        """
        if not self.skips_zero_advantages:
            return mini
        assert mini.advantages is not None
        moving = ((mini.advantages != 0) & (mini.mask > 0)).any(-1)
        if not bool(moving.any()):  # keep one row: the optimizer steps anyway, because of its momentum
            moving = mini.mask.any(-1) & (mini.mask.any(-1).cumsum(0) == 1)
        return mini.select(moving.nonzero()[:, 0])

    def loss(self, mini: Batch, active: Batch) -> Loss:
        """The loss of micro-batches of `active`, as parts of the loss of the whole mini-batch. Metrics are
        means over the rows of `active`."""
        totals = self._totals(mini)
        active_totals = totals
        if active is not mini:
            active_totals = self._totals(active)
        all_tokens = sum(mini.lengths)
        captures = mini.old_log_probs is None or (self.old_from_engine and self.updates == 0)
        self.updates += 1

        def loss(outputs: Outputs, micro: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
            entropies = _entropies(outputs)
            if captures:
                self._capture(micro, outputs, entropies)
            total, metrics = self._policy_loss(outputs, micro, totals, active_totals)
            if self.actor.use_kl_loss:
                kl = self._kl_loss(outputs, micro, totals)
                total = total + self.actor.kl_loss_coef * kl
                metrics["actor/kl_loss"] = kl.detach()
            if self.teacher is not None:
                per_token, tables = teacher_loss(self.teacher, self.rules, outputs, micro)
                term = aggregate(per_token, micro.mask, self.aggregation, totals)
                total = total + self.teacher.coef * term
                metrics["distillation/loss"] = term.detach()
                for name, values in tables.items():
                    metrics[f"distillation/{name}"] = mean_metric(values, micro.mask, totals)
            if entropies is not None:
                entropy = aggregate(entropies, micro.mask, self.aggregation, active_totals)
                if self.actor.entropy_coeff:
                    total = total - self.actor.entropy_coeff * entropy
                metrics["actor/entropy_loss"] = entropy.detach()
                if micro.entropy is None:  # it was not measured before the update
                    metrics["actor/entropy"] = mean_metric(entropies, micro.mask, active_totals)
            if self.actor.aux_loss_coef and outputs.auxiliary is not None:
                # A mean over the tokens of the micro-batch, weighted by its share of all tokens.
                balance = outputs.auxiliary * (sum(micro.lengths) / all_tokens)
                total = total + self.actor.aux_loss_coef * balance
                metrics["actor/aux_loss"] = balance.detach()
            return total, metrics

        return loss

    def _totals(self, batch: Batch) -> Totals:
        """What the loss of these rows is divided by."""
        totals = Totals.of(batch.mask, width=self.width)
        counted = self.rules.empty_rows == "counted"
        if self.rules.empty_rows == "counted in geo_mean":
            counted = self.loss_mode == "geo_mean"
        if counted:
            return replace(totals, sequences=len(batch))
        return totals

    def _policy_loss(
        self, outputs: Outputs, micro: Batch, totals: Totals, active_totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs = outputs.log_probs
        assert log_probs is not None
        old_log_probs = micro.old_log_probs
        rollout_weights = micro.rollout_weights
        if old_log_probs is None:
            old_log_probs = log_probs.detach()
            if rollout_weights is None:
                rollout_weights = self._weights(old_log_probs, micro)
        found = policy_loss(
            self.policy_loss,
            log_probs=log_probs,
            old_log_probs=old_log_probs,
            advantages=micro.advantages,
            mask=micro.mask,
            rollout_weights=rollout_weights,
            rollout_log_probs=micro.rollout_log_probs,
            **self.fixed_arguments,
        )
        if self.observe is not None:
            self.observe(micro, found.per_token)
        total = aggregate(found.per_token, micro.mask, self.aggregation, totals)
        metrics = {"actor/pg_loss": total.detach()}
        for name, values in found.metrics.items():
            full_name = name if "/" in name else f"actor/{name}"
            metrics[full_name] = mean_metric(values, micro.mask, active_totals)
        return total, metrics

    def _weights(self, log_probs: Tensor, micro: Batch) -> Tensor | None:
        """Importance weights, if nothing was computed before the update."""
        level, threshold = self.correction.rollout_is, self.correction.rollout_is_threshold
        if level is None or threshold is None or micro.rollout_log_probs is None:
            return None
        return weights_of_rows(
            log_probs - micro.rollout_log_probs, micro.mask, level=level, threshold=threshold
        )

    def _kl_loss(self, outputs: Outputs, micro: Batch, totals: Totals) -> Tensor:
        assert outputs.log_probs is not None and micro.ref_log_probs is not None
        estimator = self.actor.kl_loss_type
        limits = kl_limits(estimator, self.rules)
        per_token = kl_penalty(outputs.log_probs, micro.ref_log_probs, estimator=estimator, **limits)
        return aggregate(per_token, micro.mask, self.aggregation, totals)

    def _capture(self, micro: Batch, outputs: Outputs, entropy: Tensor | None) -> None:
        assert micro.row_ids is not None and outputs.log_probs is not None
        detached = None if entropy is None else entropy.detach().float()
        self.captured.append((micro.row_ids, outputs.log_probs.detach().float(), detached))

    def known(self, batch: Batch, ranks: Ranks) -> UpdateLogProbs | None:
        """The log-probs that were captured on the way, of all ranks. None: there are none."""
        local = []
        for row_ids, log_probs, entropy in self.captured:
            local.append((row_ids.cpu(), log_probs.cpu(), None if entropy is None else entropy.cpu()))
        shards = [local]
        if ranks.world > 1:
            shards = ranks.all_gather_object(local)
        found = list(chain.from_iterable(shards))
        if not found:
            return None
        width = batch.mask.shape[1]
        tables = [pad_columns(table, width)[:, :width] for _, table, _ in found]
        entropies = [pad_columns(table, width)[:, :width] for _, _, table in found if table is not None]
        return UpdateLogProbs(
            torch.cat([row_ids for row_ids, _, _ in found]),
            torch.cat(tables),
            torch.cat(entropies) if len(entropies) == len(found) else None,
        )

    def drift(self, batch: Batch, known: UpdateLogProbs) -> dict[str, float]:
        """How far the log-probs of the engine are from those of the update, and its importance weights."""
        assert batch.row_ids is not None
        rows = known.rows
        place = torch.full((int(max(rows.max(), batch.row_ids.max())) + 1,), -1)
        place[rows] = torch.arange(len(rows))
        found = place[batch.row_ids.cpu()]
        kept = batch.select((found >= 0).nonzero().flatten())
        log_probs = known.log_probs[found[found >= 0], : kept.mask.shape[1]]
        metrics = rollout_drift(kept, log_probs)
        known_before = batch.old_log_probs is not None or batch.rollout_weights is not None
        if not metrics or not self.correction.rollout_is or known_before:
            return metrics
        assert kept.rollout_log_probs is not None
        correction = correct_rollout(
            log_probs,
            kept.rollout_log_probs,
            kept.mask,
            rollout_is=self.correction.rollout_is,
            rollout_is_threshold=self.correction.rollout_is_threshold,
        )
        return metrics | {name: float(value) for name, value in correction.metrics.items()}


def _settings(section: object, *, without: Sequence[str]) -> dict[str, object]:
    return {name: value for name, value in vars(section).items() if name not in without}


def _entropies(outputs: Outputs) -> Tensor | None:
    return outputs.observed_entropy if outputs.entropy is None else outputs.entropy


def run_updates(
    backend: Backend,
    batch: Batch,
    objective: ActorUpdate | CriticUpdate,
    section: ActorConfig | CriticConfig,
    rows: int,
    micro: MicroBatching,
    step: int,
    name: str,
    extra_loss: ExtraLoss | None = None,
    after_update: Sequence[Callable[[], None]] = (),
) -> dict[str, float]:
    """All optimizer updates of one step for one role; returns the means of their metrics.

    `rows` is the size of a mini-batch. `extra_loss` adds its gradients to each update.
    """
    seen: dict[str, list[float]] = {}
    oom_before = backend.out_of_memory
    seed = (section.data_loader_seed or 0) + step
    schedule_unit = objective.rules.schedule_unit
    for mini in mini_batches(batch, rows, section.ppo_epochs, section.shuffle, seed):
        if not bool(mini.mask.any()):  # every sample failed or was rejected: there is nothing to train on
            seen.setdefault(f"{name}/empty_updates", []).append(1.0)
            continue
        active = objective.active(mini)
        loss = objective.loss(mini, active)
        metrics = dict(backend.forward_backward(active, objective.want(), loss, micro))
        if isinstance(objective, ActorUpdate):
            metrics[f"{name}/active_rows"] = len(active) / len(mini)
        if extra_loss is not None:
            metrics |= extra_loss(backend, micro)
        metrics |= _optimizer_step(backend, name)
        for call in after_update:
            call()
        if schedule_unit == "update":
            backend.advance_schedule()
        for key, value in metrics.items():
            seen.setdefault(key, []).append(value)
    if schedule_unit == "step":
        backend.advance_schedule()
    if backend.out_of_memory > oom_before:
        seen[f"{name}/out_of_memory"] = [float(backend.out_of_memory - oom_before)]
    return _summary(seen, summed=(f"{name}/empty_updates", f"{name}/skipped_updates"))


def _optimizer_step(backend: Backend, name: str) -> dict[str, float]:
    info = backend.step()
    metrics = {
        f"{name}/grad_norm": info.grad_norm,
        f"{name}/lr": info.lr,
        f"{name}/skipped_updates": float(info.skipped),
    }
    if info.loss_scale is not None:
        metrics[f"{name}/loss_scale"] = info.loss_scale
    return metrics


def _summary(seen: Mapping[str, Sequence[float]], summed: Sequence[str]) -> dict[str, float]:
    """The mean of each metric, or its sum for those in `summed`."""
    found: dict[str, float] = {}
    for key, values in seen.items():
        found[key] = sum(values)
        if key not in summed:
            found[key] /= len(values)
    return found
