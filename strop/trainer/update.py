"""Learning from a batch: mini-batches, epochs, losses. Denominators are counted once per optimizer step and passed down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.aggregation import Totals, aggregate
from strop.algorithms.kl import kl_penalty
from strop.algorithms.policy_losses import policy_loss
from strop.algorithms.value_loss import value_loss
from strop.backends.base import Backend, Loss, MicroBatching, Outputs
from strop.catalog import POLICY_LOSSES
from strop.config.objective import clip_range
from strop.ranks import Ranks
from strop.run.samples import Known
from strop.trainer.experience import drift
from strop.types import Batch, pad_columns

Beside = Callable[[Backend, MicroBatching], Mapping[str, float]]
"""Adds gradients of something else to an update, and reports on it."""
Observe = Callable[[Batch, Tensor], None]
"""Is told the loss of every token of a micro-batch."""


def mini_batches(batch: Batch, rows: int, epochs: int, shuffle: bool, seed: int) -> Iterator[Batch]:
    """The mini-batches of one step: every sequence once per epoch; groups stay together unless shuffled."""
    for epoch in range(epochs):
        order = torch.arange(len(batch))
        if shuffle:
            order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        for start in range(0, len(batch), rows):
            yield batch.select(order[start : start + rows])


def token_mean(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    return aggregate(values, mask, "token-mean", totals).detach()


@dataclass
class ActorUpdate:
    """The actor's objective: surrogate, KL to the reference, entropy bonus, load balance of experts."""

    config: Any
    width: int
    """Length that seq-mean-token-sum-norm divides by."""
    captured: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)
    """Row ids, log-probs and entropy of the update itself, kept when nobody computed the old ones beforehand."""
    observe: Observe | None = None

    def want(self) -> list[str]:
        actor = self.config.actor_rollout_ref.actor
        wanted = {
            "entropy": actor.entropy_coeff,
            "observed_entropy": actor.calculate_entropy and not actor.entropy_coeff,
            "auxiliary": actor.aux_loss_coef,
        }
        return ["log_probs", *(name for name, on in wanted.items() if on)]

    def active(self, mini: Batch) -> Batch:
        """The rows that can move the weights. A group whose samples all scored the same has advantages of 0, and a loss
        that is proportional to them has no gradient there: such rows count in every denominator, but need no pass."""
        actor = self.config.actor_rollout_ref.actor
        others = actor.use_kl_loss or actor.entropy_coeff or actor.aux_loss_coef
        if others or not actor.skip_zero_advantages or not POLICY_LOSSES.entry(self.loss_mode).facts["proportional"]:
            return mini
        assert mini.advantages is not None
        moving = ((mini.advantages != 0) & (mini.mask > 0)).any(-1)
        if not bool(moving.any()):  # momentum still has its say, so the step is taken
            moving = mini.mask.any(-1) & (mini.mask.any(-1).cumsum(0) == 1)
        return mini.select(moving.nonzero()[:, 0])

    def loss(self, mini: Batch, active: Batch) -> Loss:
        """The loss of micro-batches of `active`, as parts of that of the whole mini-batch. What is only reported is averaged
        over the rows that were computed."""
        actor = self.config.actor_rollout_ref.actor
        totals, whole = Totals.of(mini.mask, width=self.width), sum(mini.lengths)
        shown = totals if active is mini else Totals.of(active.mask, width=self.width)
        mode = POLICY_LOSSES.entry(self.loss_mode).facts["aggregation"] or actor.loss_agg_mode

        def loss(outputs: Outputs, micro: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
            log_probs, mask = outputs.log_probs, micro.mask
            entropies = outputs.observed_entropy if outputs.entropy is None else outputs.entropy
            assert log_probs is not None
            if micro.old_log_probs is None:
                self._capture(micro, log_probs, entropies)
            found = policy_loss(self.loss_mode, **self._arguments(log_probs, micro))
            if self.observe is not None:
                self.observe(micro, found.per_token)
            total = aggregate(found.per_token, mask, mode, totals)
            reported = {"actor/pg_loss": total.detach()}
            reported |= {f"actor/{name}": token_mean(values, mask, shown) for name, values in found.metrics.items()}
            if actor.use_kl_loss:
                assert micro.ref_log_probs is not None
                kl = aggregate(kl_penalty(log_probs, micro.ref_log_probs, estimator=actor.kl_loss_type), mask, mode, totals)
                total = total + actor.kl_loss_coef * kl
                reported["actor/kl_loss"] = kl.detach()
            if entropies is not None:
                entropy = aggregate(entropies, mask, mode, shown)
                if actor.entropy_coeff:
                    total = total - actor.entropy_coeff * entropy
                reported["actor/entropy_loss"] = entropy.detach()
                if micro.old_log_probs is None:  # nobody asked before the update
                    reported["actor/entropy"] = token_mean(entropies, mask, shown)
            if actor.aux_loss_coef and outputs.auxiliary is not None:
                balance = outputs.auxiliary * (sum(micro.lengths) / whole)  # a mean over tokens, weighed by its share of them
                total = total + actor.aux_loss_coef * balance
                reported["actor/aux_loss"] = balance.detach()
            return total, reported

        return loss

    @property
    def loss_mode(self) -> str:
        bypass = self.config.algorithm.rollout_correction.bypass_mode
        return "bypass_mode" if bypass else self.config.actor_rollout_ref.actor.policy_loss.loss_mode

    def _arguments(self, log_probs: Tensor, micro: Batch) -> dict[str, Any]:
        """Everything any policy loss may ask for; each takes what it names."""
        actor, correction = self.config.actor_rollout_ref.actor, self.config.algorithm.rollout_correction
        low, high = clip_range(actor)
        own = {name: value for name, value in vars(actor.policy_loss).items() if name != "loss_mode"}
        bypass = {}
        if correction.bypass_mode:
            bypass = {name: value for name, value in vars(correction).items() if name != "bypass_mode"}
        return {
            "log_probs": log_probs,
            "old_log_probs": log_probs.detach() if micro.old_log_probs is None else micro.old_log_probs,
            "advantages": micro.advantages,
            "mask": micro.mask,
            "rollout_weights": micro.rollout_weights,
            "rollout_log_probs": micro.rollout_log_probs,
            "clip_low": low,
            "clip_high": high,
            "clip_c": actor.clip_ratio_c,
            "tau_pos": actor.tau_pos,
            "tau_neg": actor.tau_neg,
            **own,
            **bypass,
        }

    def known(self, batch: Batch, ranks: Ranks) -> Known | None:
        """On-policy nobody knows the trainer's own log-probs before the update: what all ranks found in it."""
        mine = [[None if table is None else table.cpu() for table in tables] for tables in self.captured]
        captured = [tables for share in ranks.gather(mine) for tables in share]
        if not captured:
            return None
        width = batch.mask.shape[1]
        ids, log_probs, entropy = zip(*captured)

        def whole(tables: Sequence[Tensor]) -> Tensor:
            return torch.cat([pad_columns(table, width)[:, :width] for table in tables])

        return Known(torch.cat(ids), whole(log_probs), None if None in entropy else whole(entropy))

    @staticmethod
    def drift(batch: Batch, known: Known) -> dict[str, float]:
        """How far the engine's log-probs were from those of the update."""
        assert batch.row_ids is not None
        rows = known.rows
        place = torch.full((int(max(rows.max(), batch.row_ids.max())) + 1,), -1)
        place[rows] = torch.arange(len(rows))
        found = place[batch.row_ids.cpu()]
        kept = batch.select((found >= 0).nonzero().flatten())
        return drift(kept, known.log_probs[found[found >= 0], : kept.mask.shape[1]])

    def _capture(self, micro: Batch, log_probs: Tensor, entropy: Tensor | None) -> None:
        assert micro.row_ids is not None
        seen = None if entropy is None else entropy.detach().float()
        self.captured.append((micro.row_ids, log_probs.detach().float(), seen))


@dataclass
class CriticUpdate:
    """The critic's objective: values close to returns, not too far from the old ones."""

    config: Any
    width: int
    observe: Observe | None = None

    def want(self) -> list[str]:
        return ["values"]

    def active(self, mini: Batch) -> Batch:
        return mini

    def loss(self, mini: Batch, active: Batch) -> Loss:
        critic = self.config.critic
        return CriticLoss(critic.cliprange_value, critic.loss_agg_mode, Totals.of(mini.mask, width=self.width), self.observe)


@dataclass(frozen=True)
class CriticLoss:
    """A `Loss` that can be sent to where the critic lives."""

    clip_range: float
    mode: str
    totals: Totals
    observe: Observe | None = None

    def __call__(self, outputs: Outputs, micro: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        values, mask, totals = outputs.values, micro.mask, self.totals
        assert values is not None and micro.values is not None and micro.returns is not None
        found = value_loss(values, micro.values, micro.returns, mask, clip_range=self.clip_range)
        if self.observe is not None:
            self.observe(micro, found.per_token)
        total = aggregate(found.per_token, mask, self.mode, totals)
        reported = {"critic/vf_loss": total.detach(), "critic/vpred_mean": token_mean(values, mask, totals)}
        reported |= {f"critic/{name}": token_mean(table, mask, totals) for name, table in found.metrics.items()}
        return total, reported


def update(
    backend: Backend,
    batch: Batch,
    objective: ActorUpdate | CriticUpdate,
    section: Any,
    rows: int,
    micro: MicroBatching,
    step: int,
    name: str,
    beside: Beside | None = None,
    after: Sequence[Callable[[], None]] = (),
) -> dict[str, float]:
    """All optimizer updates of one step for one role; returns the mean of what they reported.

    `beside` adds its gradients to each of them, `after` is called when each is done.
    """
    seen: dict[str, list[float]] = {}
    before = backend.out_of_memory
    seed = (section.data_loader_seed or 0) + step
    for mini in mini_batches(batch, rows, section.ppo_epochs, section.shuffle, seed):
        if not bool(mini.mask.any()):  # every sample failed or was rejected: nothing to learn
            seen.setdefault(f"{name}/empty_updates", []).append(1.0)
            continue
        active = objective.active(mini)
        reported = {**backend.forward_backward(active, objective.want(), objective.loss(mini, active), micro)}
        if isinstance(objective, ActorUpdate):
            reported[f"{name}/active_rows"] = len(active) / len(mini)
        if beside is not None:
            reported |= beside(backend, micro)
        info = backend.step()
        for follow in after:
            follow()
        for key, value in {
            **reported,
            f"{name}/grad_norm": info.grad_norm,
            f"{name}/lr": info.lr,
            f"{name}/skipped_updates": float(info.skipped),
            **({} if info.loss_scale is None else {f"{name}/loss_scale": info.loss_scale}),
        }.items():
            seen.setdefault(key, []).append(value)
    backend.advance_schedule()
    if backend.out_of_memory > before:
        seen[f"{name}/out_of_memory"] = [float(backend.out_of_memory - before)]
    sums = (f"{name}/empty_updates", f"{name}/skipped_updates")
    return {key: sum(values) / (1 if key in sums else len(values)) for key, values in seen.items()}
