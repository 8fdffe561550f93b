"""Several policies in one run (rollout.agent.policies): each player has a LoRA adapter of its own.

All adapters are over one model. The first policy is the adapter of the engine's module; the others are loaded
into the engine after each update, and calls of their players name them. A step divides its sequences by
player, and each policy learns from its own: it has its own advantages, its own denominators, its own
optimizer and schedule, and its own folder in a checkpoint. The tokens of other players are context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from strop.algorithms.metrics.training import StepRecord
from strop.backends.adapters import AdapterSet
from strop.backends.base import Backend
from strop.backends.single import ModuleBackend
from strop.config.policies import KEY, AgentPolicy, agent_policies, other_size
from strop.config.schema.ppo import PpoConfig
from strop.models.lora import FIRST_ADAPTER, adapter_scale, with_adapter_name, without_adapter_name
from strop.rollout.base import AdapterEngine, Engine
from strop.run.checkpoint.store import Export
from strop.run.samples import UpdateLogProbs
from strop.shared.adapter_folders import load_weights, read_sampling_folder
from strop.shared.export import folder_of
from strop.types import Batch, Trajectory, batch_of, pad_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RENAMED = ("model", "optimizer")
"""Parts of a backend's state whose keys are names of weights."""


@dataclass
class PolicyShare:
    """What one policy learns from in a step."""

    policy: AgentPolicy
    batch: Batch
    """Its rows are numbered from 0."""
    trajectories: list[Trajectory]
    log_probs: UpdateLogProbs | None = None
    """What the update computed on the way."""


class PolicySet:
    """The policies of a run, as adapters of the actor."""

    def __init__(self, actor: ModuleBackend, policies: Sequence[AgentPolicy], seed: int) -> None:
        """`seed` decides about the first weights of new adapters."""
        self.policies = list(policies)
        self._actor = actor
        self._adapters = AdapterSet(actor)
        self._in_engine: set[str] = set()
        self._means: dict[str, list[float]] = {}
        rank = int(cast(Any, actor.module).peft_config[FIRST_ADAPTER].r)  # of peft
        alpha = rank * adapter_scale(actor.module, FIRST_ADAPTER)
        for place, policy in enumerate(self.policies):
            if place:
                self._adapters.add(self._adapter(policy), rank=rank, alpha=alpha, seed=seed + place)
            if policy.path is not None:
                self._load(policy, Path(policy.path).expanduser(), rank, alpha)

    def _adapter(self, policy: AgentPolicy) -> str:
        if policy is self.policies[0]:
            return FIRST_ADAPTER
        return f"policy-{policy.name}"

    def _load(self, policy: AgentPolicy, folder: Path, rank: int, alpha: float) -> None:
        """Begin with the adapter of a folder."""
        given_rank, given_alpha, weights = read_sampling_folder(folder)
        problem = other_size(policy, (given_rank, given_alpha), (rank, alpha))
        if problem is not None:
            raise ValueError(f"{KEY}.{policy.name}.path: {problem}")
        with self.active(policy):
            names = {without_adapter_name(own): own for own in self._actor.weights.masters}
            load_weights({names.get(own, own): value for own, value in weights.items()}, self._actor)

    @contextmanager
    def active(self, policy: AgentPolicy) -> Iterator[None]:
        """Inside the block the actor computes with the adapter of this policy and trains it."""
        self._adapters.activate(self._adapter(policy))
        try:
            yield
        finally:
            self._adapters.activate(FIRST_ADAPTER)  # the engine samples from the module

    # --- sampling -------------------------------------------------------------------------------------------

    def load_into(self, engine: Engine) -> None:
        """Give the engine the adapters that it does not have, and those that were trained."""
        for policy in self.policies[1:]:
            if policy.name in self._in_engine and not policy.train:
                continue
            name = self._adapter(policy)
            weights: dict[str, Tensor] = {}
            for own, weight in self._adapters.masters_of(name).items():
                weights[without_adapter_name(own)] = weight
            scale = adapter_scale(self._actor.module, name)
            cast(AdapterEngine, engine).load_adapter(policy.name, weights, scale)
            self._in_engine.add(policy.name)

    # --- learning -------------------------------------------------------------------------------------------

    def shares(self, trajectories: Sequence[Trajectory], record: StepRecord) -> list[PolicyShare]:
        """What each policy learns from. A sample of a failed episode, which is masked, may have no player;
        it counts for the first policy."""
        by_name: dict[str, list[Trajectory]] = {policy.name: [] for policy in self.policies}
        first = self.policies[0].name
        for trajectory in trajectories:
            by_name[trajectory.player or first].append(trajectory)
        trained: list[Trajectory] = []
        places: dict[str, range] = {}
        for policy in self.policies:
            own = by_name[policy.name]
            record.add(_score_metrics(own), prefix=f"policy/{policy.name}/")
            if policy.train and own:
                places[policy.name] = range(len(trained), len(trained) + len(own))
                trained += own
        if not trained:
            raise ValueError(
                f"No episode of this step has a call of a policy that is trained: {KEY} are "
                f"{[policy.name for policy in self.policies]}. Does the program call them?"
            )
        whole = batch_of(trained)
        found = []
        for policy in self.policies:
            if policy.name in places:
                own = by_name[policy.name]
                share = whole.select(places[policy.name]).replace(row_ids=torch.arange(len(own)))
                found.append(PolicyShare(policy, share, own))
        self._means = {}
        return found

    @contextmanager
    def learning(self, share: PolicyShare, record: StepRecord) -> Iterator[None]:
        """Inside the block this policy learns; its metrics are added under policy/<name>/."""
        own: dict[str, float] = {}
        with self.active(share.policy), record.metrics_into(own):
            yield
        record.add(own, prefix=f"policy/{share.policy.name}/")
        for name, value in own.items():
            self._means.setdefault(name, []).append(value)
        record.add({name: sum(values) / len(values) for name, values in self._means.items()})

    # --- checkpoints ----------------------------------------------------------------------------------------

    def states(self) -> dict[str, PolicyState]:
        """The weights and the training of each policy, by their folder in a checkpoint."""
        return {policy.role: PolicyState(self, policy) for policy in self.policies}

    def state(self, policy: AgentPolicy) -> dict[str, Any]:
        """The state of one policy. Weights have the names of a run with one adapter, which `strop merge`
        reads."""
        with self.active(policy):
            state = self._actor.state_dict()
        for part in _RENAMED:
            state[part] = {with_adapter_name(name, FIRST_ADAPTER): own for name, own in state[part].items()}
        return state

    def load_state(self, policy: AgentPolicy, state: Mapping[str, Any]) -> None:
        """The reverse of `state`."""
        adapter = self._adapter(policy)
        own = dict(state)
        for part in _RENAMED:
            if part in state:
                own[part] = {with_adapter_name(name, adapter): value for name, value in state[part].items()}
        with self.active(policy):
            self._actor.load_state_dict(own)
        self._in_engine.discard(policy.name)

    def exports(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Export]:
        """A folder that transformers loads for each policy, with its adapter merged."""
        found = {}
        for policy in self.policies:
            with self.active(policy):
                found[f"{policy.role}/huggingface"] = folder_of(self._actor, tokenizer)
        return found


@dataclass(frozen=True)
class PolicyState:
    """One policy, as something that is saved and loaded."""

    policies: PolicySet
    policy: AgentPolicy

    def state_dict(self) -> dict[str, Any]:
        return self.policies.state(self.policy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policies.load_state(self.policy, state)


def build_policies(config: PpoConfig, actor: Backend) -> PolicySet | None:
    """The policies of rollout.agent.policies; None: the run has one."""
    policies = agent_policies(config.actor_rollout_ref.rollout.agent)
    if not policies:
        return None
    assert isinstance(actor, ModuleBackend), "the rules refuse other backends"
    return PolicySet(actor, policies, config.trainer.seed)


def joined(shares: Sequence[PolicyShare]) -> tuple[list[Trajectory], Batch, UpdateLogProbs | None]:
    """All rows that were trained, one policy after the other, and what their updates computed."""
    trajectories: list[Trajectory] = []
    known: list[UpdateLogProbs] = []
    for share in shares:
        if share.log_probs is not None:
            known.append(replace(share.log_probs, rows=share.log_probs.rows + len(trajectories)))
        trajectories += share.trajectories
    batch = Batch.concat([share.batch for share in shares])
    batch = batch.replace(row_ids=torch.arange(len(batch)))
    return trajectories, batch, _joined_log_probs(known)


def _joined_log_probs(parts: Sequence[UpdateLogProbs]) -> UpdateLogProbs | None:
    if not parts:
        return None
    width = max(part.log_probs.shape[1] for part in parts)
    entropies = [part.entropy for part in parts if part.entropy is not None]
    entropy = None
    if len(entropies) == len(parts):
        entropy = torch.cat([pad_columns(one, width) for one in entropies])
    return UpdateLogProbs(
        torch.cat([part.rows for part in parts]),
        torch.cat([pad_columns(part.log_probs, width) for part in parts]),
        entropy,
    )


def _score_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean score of the episodes of one policy, and how many there are."""
    scores: dict[int, float] = {}
    for place, trajectory in enumerate(trajectories):
        if trajectory.score is not None:
            number = trajectory.episode
            scores[-1 - place if number is None else number] = trajectory.score
    metrics = {"episodes": float(len(scores))}
    if scores:
        metrics["score/mean"] = sum(scores.values()) / len(scores)
    return metrics
