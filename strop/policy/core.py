"""The policy in one process: a backend, the engine that samples from its module, and adapters.

With several ranks every rank has a `PolicyCore`, and all of them run the same operations in the same order.
The parts are those of a training run (`ppo/roles.py`, `ppo/sampler.py`, `ppo/update.py`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from strop.backends.adapters import AdapterSet
from strop.backends.base import MicroBatching, Outputs
from strop.backends.micro_batches import largest_part, partition
from strop.backends.single import ModuleBackend
from strop.backends.updates import StepSettings
from strop.config.arithmetic import micro_batch_size
from strop.config.derived import engine_name, holds_weights
from strop.config.schema.ppo import PpoConfig
from strop.models.build import adopt_policy, build_policy
from strop.models.checkpointing import checkpointed_layers, keep_small
from strop.models.lora import (
    FIRST_ADAPTER,
    adapter_scale,
    base_model,
    has_adapters,
    without_adapter_name,
)
from strop.models.patches import undo_patches
from strop.policy.batches import StepOutput, split_rows
from strop.policy.losses import (
    TOTAL,
    Objective,
    OwnLoss,
    Seen,
    SumLoss,
    in_original_order,
    linear_loss,
    objective_of,
)
from strop.policy.samplers import Samplers
from strop.policy.state import (
    read_state,
    write_sampling_folder,
    write_state,
)
from strop.ppo.rank_sharing import RankSampler
from strop.ppo.roles import EngineMemory, backend_maker, build_actor, rollout_module
from strop.ppo.sampler import NumberedPrompt, PromptSampler, Sampler
from strop.ranks import Ranks
from strop.registry import load_plugins
from strop.rollout.base import Completion, Request, Sampling, num_embeddings
from strop.rollout.position_limit import resolve_max_model_len
from strop.shared.adapter_folders import load_weights, read_sampling_folder
from strop.shared.build import device_of, engine_for, max_model_len, tensor_parallel_size
from strop.types import Batch, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class PolicyFacts:
    """What a caller needs to know of the model."""

    vocabulary: int
    longest: int
    """Maximum tokens of a sequence."""
    end_ids: tuple[int, ...]
    """Tokens that end a response, of the model's generation_config."""
    weights: int
    """Trained weights."""
    architecture: str
    """Class of the model in transformers."""


class PolicyCore:
    """One rank of a policy."""

    def __init__(
        self, config: PpoConfig, ranks: Ranks | None = None, module: PreTrainedModel | None = None
    ) -> None:
        """`module`: a model that the caller has loaded, instead of that of model.path."""
        self.ranks = ranks or Ranks()
        self._borrowed = module is not None
        load_plugins(config.plugins)
        torch.manual_seed(config.trainer.seed)
        self.device = device_of(config.trainer.device)
        memory = EngineMemory()
        total_steps = config.trainer.total_training_steps or 0
        make = backend_maker(config, self.device, total_steps, self.ranks, memory.release)
        if module is None:
            self.backend: ModuleBackend = build_actor(config, make, build_policy)
        else:
            given = module
            self.backend = build_actor(config, make, lambda settings, **_: adopt_policy(given, settings))
        self.config = _with_model_limit(config, self.backend.module)
        self.adapters = AdapterSet(self.backend)
        self._recomputed = checkpointed_layers(self.backend.module)
        rollout = self.config.actor_rollout_ref.rollout
        sampled = rollout_module(self.config, self.backend, self.device)
        self._copies = sampled is not self.backend.module or holds_weights(rollout)
        self.engine = engine_for(rollout, sampled)
        memory.engine = self.engine
        self.samplers = Samplers(self.engine, self._adapter_weights, refusal=self._one_adapter_only())
        self._updates: Counter[str] = Counter()
        """Optimizer steps of each adapter; the version of its weights."""
        self._synced = False
        """Whether the engine samples from the newest weights of the module."""

    def configuration(self) -> PpoConfig:
        """The configuration, with the limits of the model."""
        return self.config

    def facts(self) -> PolicyFacts:
        core = base_model(self.backend.module)
        generation = getattr(core, "generation_config", None)
        ends = getattr(generation, "eos_token_id", None)
        if ends is None:
            ends = []
        if isinstance(ends, int):
            ends = [ends]
        return PolicyFacts(
            vocabulary=num_embeddings(core),
            longest=max_model_len(self.config.actor_rollout_ref.rollout),
            end_ids=tuple(ends),
            weights=sum(master.numel() for master in self.backend.weights.masters.values()),
            architecture=type(core).__name__,
        )

    # --- adapters -------------------------------------------------------------------------------------------

    def adapter_names(self) -> list[str]:
        return self.adapters.names

    def add_adapter(self, name: str, rank: int, alpha: float, seed: int) -> None:
        self.samplers.check_adapter(name)
        self.adapters.add(name, rank=rank, alpha=alpha, seed=seed)

    def load_adapter(self, name: str, path: Path) -> None:
        """Add an adapter with the weights of a folder of peft."""
        rank, alpha, weights = read_sampling_folder(path)
        self.add_adapter(name, rank, alpha, seed=0)
        self.adapters.activate(name)
        names = {without_adapter_name(own): own for own in self.backend.weights.masters}
        try:
            load_weights({names.get(own, own): value for own, value in weights.items()}, self.backend)
        except ValueError:  # weights of another model
            self.adapters.remove(name)
            raise
        self._changed(name)

    def remove_adapter(self, name: str) -> None:
        self.adapters.remove(name)
        self.samplers.removed(name)
        del self._updates[name]

    def publish(self, name: str, adapter: str) -> None:
        self.adapters.check(adapter)
        self.samplers.publish(name, adapter, self.adapters.names, self._updates[adapter])

    def publish_folder(self, name: str, folder: Path) -> None:
        self.samplers.publish_folder(name, folder, self.adapters.names)

    def unpublish(self, name: str) -> None:
        self.samplers.unpublish(name)

    def _adapter_weights(self, adapter: str) -> tuple[dict[str, Tensor], float]:
        """Weights as peft's files name them, and what their product is multiplied by."""
        found = {}
        for name, weight in self.adapters.masters_of(adapter).items():
            found[without_adapter_name(name)] = weight
        return found, adapter_scale(self.backend.module, adapter)

    def _one_adapter_only(self) -> str | None:
        """Why the engine cannot sample with several adapters; None: it can."""
        if not has_adapters(self.backend.module):
            return "This policy trains all weights of the model. Give lora_rank > 0 to sample with adapters."
        if self.ranks.world > 1:
            return "With several ranks a policy samples with its first adapter only. Use ranks=1."
        name = engine_name(self.config.actor_rollout_ref.rollout)
        if name != "native":
            return f"rollout.name={name} samples with the first adapter only. Set rollout.name=native."
        return None

    # --- sampling -------------------------------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[NumberedPrompt],
        sampling: Sampling,
        n: int,
        seed: int,
        call: int,
        adapter: str | None,
    ) -> list[Trajectory]:
        """n responses to each prompt, in order. `adapter`: an adapter, a snapshot, or None for the model
        without adapter."""
        name = self._prepare_engine(adapter)
        rollout = self.config.actor_rollout_ref.rollout
        local = Sampler(self.engine, seed, max_model_len(rollout), adapter=name)
        sampler: PromptSampler = local
        if self.ranks.world > 1:
            sampler = RankSampler(local, self.ranks, tensor_parallel_size(rollout))
        self.engine.wake()
        found = sampler.generate(prompts, sampling, n, call).trajectories
        if rollout.free_cache_engine:
            self.engine.sleep()
        for trajectory in found:
            trajectory.version = self._version(adapter)
        return found

    async def asample(self, request: Request, sampling: Sampling, adapter: str | None) -> list[Completion]:
        """The completions of one request; those of other coroutines share its batches."""
        name = self._prepare_engine(adapter)
        version = self._version(adapter)
        found = await self.engine.agenerate(dataclasses.replace(request, adapter=name), sampling)
        return [dataclasses.replace(completion, version=version) for completion in found]

    def _prepare_engine(self, adapter: str | None) -> str | None:
        """The newest weights for the engine; returns what its requests name. The first adapter is always the
        active one while the engine samples: what it has recorded of the module stays valid."""
        name = self.samplers.name_of(adapter, self.adapters.names)
        self.adapters.activate(FIRST_ADAPTER)
        if not self._synced:
            weights = self.backend.export_weights() if self._copies else ()
            self.engine.update_weights(weights, self._updates[FIRST_ADAPTER])
            self._synced = True
        return name

    def _version(self, adapter: str | None) -> int:
        """Updates of the weights that sample."""
        if adapter is None:
            return 0
        return self.samplers.snapshots.get(adapter, self._updates[adapter])

    def _changed(self, adapter: str) -> None:
        """The weights of an adapter have changed."""
        self.samplers.changed(adapter)
        if adapter == FIRST_ADAPTER:
            self._synced = False

    # --- passes ---------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, want: Sequence[str], adapter: str, reference: bool = False) -> Outputs:
        """Outputs of the model without gradients. `reference`: without the adapter."""
        self.adapters.activate(adapter)
        if not reference:
            return self.backend.forward(batch, want, self._micro(batch, "log_prob"))
        with self.backend.reference():
            return self.backend.forward(batch, want, self._micro(batch, "log_prob"))

    def evaluate(
        self,
        batch: Batch,
        loss: str,
        settings: Mapping[str, object],
        aggregation: str | None,
        adapter: str,
    ) -> StepOutput:
        """The loss by name, without gradients."""
        self.adapters.activate(adapter)
        objective = objective_of(self.config, batch, loss, settings, aggregation, self.backend, self._micro)
        outputs = self.forward(batch, objective.want, adapter)
        with torch.no_grad():
            value, report = objective.loss(outputs, objective.whole)
        metrics = objective.metrics | {name: float(number) for name, number in report.items()}
        assert outputs.log_probs is not None
        return StepOutput(float(value), metrics, list(split_rows(outputs.log_probs, batch)))

    def forward_backward(
        self,
        batch: Batch,
        loss: str,
        settings: Mapping[str, object],
        aggregation: str | None,
        adapter: str,
    ) -> StepOutput:
        """The loss by name; gradients are added to those of earlier calls."""
        self.adapters.activate(adapter)
        objective = objective_of(self.config, batch, loss, settings, aggregation, self.backend, self._micro)
        output = self._learn(batch, objective)
        output.metrics |= objective.metrics
        if objective.update is not None:
            output.metrics["actor/active_rows"] = len(objective.rows) / len(batch)
            known = objective.update.known(batch, self.ranks)
            if known is not None and batch.rollout_log_probs is not None:
                output.metrics |= objective.update.drift(batch, known)
        return output

    def backward_own(
        self, batch: Batch, want: Sequence[str], loss: OwnLoss, adapter: str
    ) -> StepOutput | None:
        """A user's loss in one pass. None: the batch has several micro-batches or ranks, so it needs two."""
        if isinstance(loss, SumLoss) and self.ranks.world == 1:
            return self._backward_sum(batch, Objective(list(want), batch, batch, loss.of_piece), adapter)
        parts = partition(batch, self._micro(batch, "actor"))
        if self.ranks.world > 1 or len(parts) > 1:
            return None
        self.adapters.activate(adapter)
        return self._learn(batch, Objective(list(want), batch, batch, in_original_order(loss)))

    def _backward_sum(self, batch: Batch, objective: Objective, adapter: str) -> StepOutput:
        """One pass over each micro-batch."""
        self.adapters.activate(adapter)
        micro = dataclasses.replace(self._micro(batch, "actor"), unread=1)
        with keep_small(self._recomputed, largest_part(batch, micro), micro.max_tokens or 0):
            return self._learn(batch, objective, micro)

    def backward_gradients(self, batch: Batch, gradients: Mapping[str, Tensor], adapter: str) -> StepOutput:
        """Gradients of the model from those of its outputs [B, T]."""
        self.adapters.activate(adapter)
        return self._learn(batch, Objective(list(gradients), batch, batch, linear_loss(gradients)))

    def _learn(self, batch: Batch, objective: Objective, micro: MicroBatching | None = None) -> StepOutput:
        seen = Seen(objective.loss)
        micro = micro or self._micro(objective.rows, "actor")
        report = self.backend.forward_backward(objective.rows, objective.want, seen, micro)
        total = report.pop(TOTAL)
        return StepOutput(total, report, seen.rows(batch, self.ranks))

    def _micro(self, batch: Batch, role: str) -> MicroBatching:
        """How a pass over a batch is cut; it never changes a result."""
        actor = self.config.actor_rollout_ref.actor
        rollout = self.config.actor_rollout_ref.rollout
        world = self.ranks.world
        if role == "actor":
            rows = micro_batch_size(actor, "ppo_micro_batch_size", len(batch), world)
            return MicroBatching(rows, actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None)
        rows = micro_batch_size(rollout, "log_prob_micro_batch_size", len(batch), world)
        tokens = rollout.log_prob_max_token_len_per_gpu if rollout.log_prob_use_dynamic_bsz else None
        return MicroBatching(rows, tokens)

    # --- updates --------------------------------------------------------------------------------------------

    def optim_step(self, settings: StepSettings, adapter: str) -> dict[str, float]:
        """Update the weights of an adapter; its gradients are gone afterwards."""
        self.adapters.activate(adapter)
        if not self.backend.weights.gradients:
            raise ValueError(
                f"optim_step without gradients of {adapter!r}: call forward_backward first, for this adapter."
            )
        info = self.backend.step(settings)
        self.backend.advance_schedule()
        self._updates[adapter] += 1
        self._changed(adapter)
        found = {"grad_norm": info.grad_norm, "lr": info.lr, "skipped": float(info.skipped)}
        if info.loss_scale is not None:
            found["loss_scale"] = info.loss_scale
        return found

    def drop_gradients(self, adapter: str) -> None:
        """Forget accumulated gradients."""
        self.adapters.activate(adapter)
        self.backend.weights.clear_gradients()

    # --- state ----------------------------------------------------------------------------------------------

    def save_state(self, path: Path, adapter: str, counters: Mapping[str, int]) -> None:
        self.adapters.activate(adapter)
        write_state(path, self.backend, adapter, {**counters, "updates": self._updates[adapter]})

    def load_state(self, path: Path, adapter: str, optimizer: bool) -> dict[str, int]:
        """Returns the saved counters."""
        self.adapters.activate(adapter)
        counters = read_state(path, self.backend, adapter, optimizer=optimizer)
        self._updates[adapter] = counters["updates"]
        self._changed(adapter)
        return counters

    def save_for_sampling(self, path: Path, adapter: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.adapters.activate(adapter)
        write_sampling_folder(path, self.backend, adapter, tokenizer)

    def close(self) -> None:
        """Close the engine, and give a loaded model back to its owner."""
        self.engine.close()
        undo_patches(self.backend.module)
        if self._borrowed:
            self.adapters.release()


def _with_model_limit(config: PpoConfig, module: nn.Module) -> PpoConfig:
    """Sequences may be as long as the model allows, unless rollout.max_model_len is set."""
    whole = config.actor_rollout_ref
    if whole.rollout.max_model_len:
        return config
    core = base_model(module)
    rollout = dataclasses.replace(whole.rollout, max_model_len=resolve_max_model_len(core.config, None))
    return dataclasses.replace(config, actor_rollout_ref=dataclasses.replace(whole, rollout=rollout))
