"""Losses of the policy by name, and a user's own function.

The policy losses of the catalog are computed by `ppo/update.py`, exactly as in a training run, after the
correction of `algorithm.rollout_correction` (`ppo/experience.py`). `ppo` and
`importance_sampling` are its clipped loss without dual clip, and without any clip; their old log-probs are
those of the sampler. `cross_entropy` is the loss of supervised training, with weights of tokens.

A user's function sees the whole batch at once, so its result depends neither on micro-batches nor on ranks.
Where a batch has several micro-batches, the function is computed on the outputs of a first pass, and a second
pass gives the model the gradient of each output (the chain rule: nothing is approximated). A `SumLoss` needs
no second pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from strop.algorithms.aggregation import Totals
from strop.algorithms.losses import sft_loss
from strop.algorithms.metrics.training import StepRecord
from strop.backends.base import Backend, Loss, MicroBatching, Outputs
from strop.backends.micro_batches import NonFiniteLoss, suspects
from strop.catalog import POLICY_LOSSES
from strop.config.derived import corrects_before_update
from strop.config.schema.ppo import PpoConfig
from strop.policy.batches import check_trains
from strop.ppo.experience import ExperienceFacts, add_old_log_probs, correct_off_policy
from strop.ppo.update import ActorUpdate
from strop.ranks import Ranks
from strop.registry import did_you_mean
from strop.types import Batch

OwnLoss = Callable[[Outputs, Batch], Tensor]
"""(outputs of the model [B, T], the whole batch) -> the loss, a scalar."""
CROSS_ENTROPY = "cross_entropy"
UNCLIPPED: dict[str, object] = {"clip_low": 1.0, "clip_high": math.inf, "clip_c": None}
AS_SAMPLED: dict[str, dict[str, object]] = {"ppo": {"clip_c": None}, "importance_sampling": UNCLIPPED}
"""Names for the clipped loss -> its settings. Old log-probs are those of the sampler."""
TOTAL = "loss"


@dataclass
class Objective:
    """What is computed of a batch, and the loss of its micro-batches."""

    want: list[str]
    whole: Batch
    """All rows."""
    rows: Batch
    """The rows that need a pass."""
    loss: Loss
    update: ActorUpdate | None = None
    """Where a policy loss is computed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the correction before it."""


def objective_of(
    config: PpoConfig,
    batch: Batch,
    name: str,
    settings: Mapping[str, object],
    aggregation: str | None,
    backend: Backend,
    micro: Callable[[Batch, str], MicroBatching],
) -> Objective:
    """The objective of a loss by its name. `settings` are keyword arguments of the loss; `aggregation`
    replaces actor.loss_agg_mode. `backend` computes the log-probs that a correction needs, and `micro` says
    how its pass over a batch is cut."""
    known = sorted({*POLICY_LOSSES.names(), CROSS_ENTROPY, *AS_SAMPLED})
    if name not in AS_SAMPLED and name != CROSS_ENTROPY and name not in POLICY_LOSSES:
        raise ValueError(
            f"There is no loss {name!r}.{did_you_mean(str(name), known)} Known: {', '.join(known)}; or give "
            "a function (outputs, batch) -> loss."
        )
    check_trains(batch)
    mode = aggregation or config.actor_rollout_ref.actor.loss_agg_mode
    if name == CROSS_ENTROPY:
        if settings:
            raise ValueError(f"cross_entropy takes no settings, got {', '.join(settings)}.")
        return _cross_entropy(batch, mode)
    if batch.advantages is None:
        raise ValueError(f"The loss {name!r} needs advantages, and the batch has none. Set batch.advantages.")
    metrics: dict[str, float] = {}
    if name not in AS_SAMPLED:
        batch, metrics = _corrected(config, batch, backend, micro(batch, "log_prob"))
    objective = _policy_objective(config, batch, name, settings, mode)
    objective.metrics = metrics
    return objective


def _corrected(
    config: PpoConfig, batch: Batch, backend: Backend, micro: MicroBatching
) -> tuple[Batch, dict[str, float]]:
    """The batch with the importance weights and rejections of algorithm.rollout_correction, and metrics.
    Weights from log-probs of the update itself are computed in the update."""
    if batch.rollout_log_probs is None or batch.rollout_weights is not None:
        return batch, {}
    record = StepRecord()
    facts = ExperienceFacts.of(config, on_policy=True)
    if batch.old_log_probs is None and corrects_before_update(config):
        batch = add_old_log_probs(batch, backend, facts, micro, record)
    if facts.correction.rollout_is or facts.correction.rollout_rs:
        batch = correct_off_policy(batch, facts, record)
    if not bool(batch.mask.any()):
        chosen = facts.correction
        raise ValueError(
            f"algorithm.rollout_correction.rollout_rs={chosen.rollout_rs} rejected every token of this batch "
            f"at rollout_rs_threshold={chosen.rollout_rs_threshold}, so there is nothing to train on. Leave "
            "the batch out, or widen the threshold."
        )
    return batch, record.metrics


def _cross_entropy(batch: Batch, mode: str) -> Objective:
    totals = Totals.of(batch.mask)

    def loss(outputs: Outputs, piece: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        log_probs = outputs.log_probs
        assert log_probs is not None
        if piece.weights is not None:
            log_probs = log_probs * piece.weights
        return sft_loss(log_probs, piece.mask, totals, mode=mode), {}

    return Objective(["log_probs"], batch, batch, loss)


def _policy_objective(
    config: PpoConfig, batch: Batch, name: str, settings: Mapping[str, object], mode: str
) -> Objective:
    kwargs = dict(settings)
    if name in AS_SAMPLED:
        kwargs = {**AS_SAMPLED[name], **settings}
        if batch.old_log_probs is None:
            if batch.rollout_log_probs is None:
                raise ValueError(
                    f"The loss {name!r} needs the log-probs of the policy that sampled: give log_probs to "
                    "each Datum, or set batch.old_log_probs."
                )
            batch = batch.replace(old_log_probs=batch.rollout_log_probs)
        name = "vanilla"
    chosen = _with_loss(config, name, kwargs, mode)
    width = chosen.actor_rollout_ref.actor.loss_scale_factor or chosen.data.max_response_length
    update = ActorUpdate(chosen, width)
    active = update.active(batch)
    return Objective(update.want(), batch, active, update.loss(batch, active), update)


def _with_loss(config: PpoConfig, name: str, kwargs: Mapping[str, object], mode: str) -> PpoConfig:
    """The configuration with another policy loss."""
    whole = config.actor_rollout_ref
    kept = whole.actor.policy_loss.kwargs if whole.actor.policy_loss.loss_mode == name else {}
    chosen = dataclasses.replace(whole.actor.policy_loss, loss_mode=name, kwargs={**kept, **kwargs})
    actor = dataclasses.replace(whole.actor, policy_loss=chosen, loss_agg_mode=mode)
    return dataclasses.replace(config, actor_rollout_ref=dataclasses.replace(whole, actor=actor))


# --- what a pass shows --------------------------------------------------------------------------------------


@dataclass
class Seen:
    """A loss that keeps its own value and the log-probs of every row, for the caller."""

    inner: Loss
    log_probs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Row numbers, and the log-probs of these rows."""

    def __call__(self, outputs: Outputs, piece: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        value, report = self.inner(outputs, piece)
        if outputs.log_probs is not None:
            assert piece.row_ids is not None
            self.log_probs.append((piece.row_ids, outputs.log_probs.detach().float()))
        return value, {**report, TOTAL: value.detach()}

    def rows(self, batch: Batch, ranks: Ranks) -> list[Tensor | None]:
        """The log-probs of each row of the batch, on every rank. If a pass was tried again, the latest."""
        found: list[Tensor | None] = [None] * len(batch)
        lengths = batch.response_lengths.tolist()
        # Copied after the last micro-batch: a copy in between would make the host wait for the device.
        own = [(numbers.cpu(), table.cpu()) for numbers, table in self.log_probs]
        for shard in ranks.all_gather_object(own):
            for numbers, table in shard:
                for number, values in zip(numbers.tolist(), table, strict=True):
                    found[number] = values[: lengths[number]]
        return found


# --- own functions ------------------------------------------------------------------------------------------


def own_value(function: OwnLoss, outputs: Outputs, batch: Batch, *, gradient: bool = True) -> Tensor:
    """Call a user's loss; refuse what is not a scalar with a gradient."""
    value = function(outputs, batch)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
        raise ValueError(f"The loss function returned {shown}; it must return a tensor with one number.")
    if gradient and not value.requires_grad:
        raise ValueError(
            "The loss that the function returned has no gradient. Compute it from outputs.log_probs (or "
            "entropy, with want=), without detach() or .item()."
        )
    return value.reshape(())


@dataclass(frozen=True)
class SumLoss:
    """A user's loss that is a sum over rows. The sum of its values over micro-batches is its value of the
    batch, so one pass is enough for any number of micro-batches."""

    function: OwnLoss
    """(outputs of some rows, these rows) -> their part of the sum. `row_ids` are their numbers."""

    def __call__(self, outputs: Outputs, batch: Batch) -> Tensor:
        return self.function(outputs, batch)

    def of_piece(self, outputs: Outputs, piece: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of one micro-batch."""
        return own_value(self.function, outputs, piece), {}


def in_original_order(function: OwnLoss) -> Loss:
    """A user's loss as the loss of the only micro-batch, whose rows are sorted by length."""

    def loss(outputs: Outputs, piece: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        assert piece.row_ids is not None
        order = piece.row_ids.argsort()
        tables = {}
        for name, table in vars(outputs).items():
            tables[name] = table[order] if isinstance(table, Tensor) and table.dim() else table
        return own_value(function, Outputs(**tables), piece.select(order)), {}

    return loss


def output_gradients(
    function: OwnLoss, outputs: Outputs, batch: Batch, want: Sequence[str]
) -> tuple[float, dict[str, Tensor]]:
    """The value of a user's loss, and its gradient with respect to each output. Parameters of the user's own
    get theirs, as in one pass."""
    leaves: dict[str, Tensor] = {}
    for name in want:
        leaves[name] = getattr(outputs, name).detach().clone().requires_grad_()
    value = own_value(function, Outputs(**leaves), batch)
    if not bool(value.isfinite()):
        rows, causes = suspects(batch, {name: leaf.detach() for name, leaf in leaves.items()})
        raise NonFiniteLoss(rows or list(range(len(batch))), causes, float(value.detach()))
    value.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return float(value.detach()), gradients


def linear_loss(gradients: Mapping[str, Tensor]) -> Loss:
    """The loss whose gradient with respect to the outputs is `gradients` [B, T], by row number."""

    def loss(outputs: Outputs, piece: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        assert piece.row_ids is not None
        total: Tensor | None = None
        for name, slope in gradients.items():
            output: Tensor = getattr(outputs, name)
            own = slope[piece.row_ids.cpu(), : output.shape[1]].to(output.device)
            part = (own * output).sum()
            total = part if total is None else total + part
        assert total is not None
        return total, {}

    return loss
