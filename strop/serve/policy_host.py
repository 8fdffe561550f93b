"""The model of the service over `Policy`: one adapter per trained model, and one copy in the engine for each
set of weights that is sampled from. All samples share the batches of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strop.config.schema.reflect import keys as schema_keys
from strop.config.schema.training_service import ServiceModelConfig, TrainingServiceConfig
from strop.policy.policy import Policy
from strop.rewards.server_requests import RequestRefused
from strop.serve.host import HostFacts, PassResult
from strop.serve.losses import ServedLoss
from strop.serve.messages import LossDatum, SampledSequence
from strop.serve.requests import AdamStep, SampleRequest
from strop.serve.targets import TargetRows
from strop.types import Trajectory

BASE = "default"
"""The policy's first adapter. It is never trained, so its product stays 0: it is the base model."""
FINISHES = {"stop": "stop", "length": "length"}


@dataclass(frozen=True)
class PublishedSampler:
    """Weights that the engine has a copy of."""

    name: str
    folder: Path

    @property
    def scorer(self) -> str:
        """The adapter that computes log-probs of prompts, where they were asked for."""
        return f"{self.name}-scores"


class PolicyHost:
    """See `AdapterHost`."""

    def __init__(self, policy: Policy, alpha: float) -> None:
        self.policy = policy
        self._alpha = alpha
        self._samplers: dict[str, PublishedSampler] = {}
        """By path of the weights."""
        self._published = 0
        facts = policy.facts
        self.facts = HostFacts(facts.vocabulary, facts.longest, facts.architecture)

    @staticmethod
    def build(config: TrainingServiceConfig) -> PolicyHost:
        """Load the model of a configuration."""
        server = config.server
        given: dict[str, Any] = {
            "use_dynamic_bsz": True,
            "ppo_max_token_len_per_gpu": server.max_token_len_per_gpu,
            "log_prob_use_dynamic_bsz": True,
            "log_prob_max_token_len_per_gpu": server.max_token_len_per_gpu,
            **changed_keys(config.model),
            **config.policy,
        }
        policy = Policy(
            str(config.model.path),
            lora_rank=1,
            lora_alpha=server.lora_alpha,
            device=server.device,
            seed=server.seed,
            **given,
        )
        return PolicyHost(policy, server.lora_alpha)

    # --- training -------------------------------------------------------------------------------------------

    def add(self, adapter: str, *, rank: int, seed: int) -> None:
        self.policy.add_adapter(_plain(adapter), rank=rank, alpha=self._alpha, seed=seed)

    def remove(self, adapter: str) -> None:
        self.policy.remove_adapter(_plain(adapter))

    def training_pass(
        self,
        adapter: str,
        data: Sequence[LossDatum],
        loss: ServedLoss,
        settings: Mapping[str, float],
        *,
        backward: bool,
    ) -> PassResult:
        rows = TargetRows(data, loss, backward=backward)
        run = self.policy.forward_backward if backward else self.policy.forward
        output = run(rows.data, rows.loss(loss, settings), adapter=_plain(adapter))
        found = []
        for row in output.log_probs:
            assert row is not None
            found.append(row.float().cpu().numpy())
        return PassResult(output.loss, rows.log_probs(found))

    def step(self, adapter: str, settings: AdamStep) -> dict[str, float]:
        return self.policy.optim_step(
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            grad_clip=settings.grad_clip or 0.0,
            adapter=_plain(adapter),
        )

    # --- weights --------------------------------------------------------------------------------------------

    def save(self, adapter: str, folder: Path) -> None:
        self.policy.save_state(folder, adapter=_plain(adapter))

    def load(self, adapter: str, folder: Path, *, optimizer: bool) -> None:
        self.policy.load_state(folder, adapter=_plain(adapter), optimizer=optimizer)
        self.policy.drop_gradients(adapter=_plain(adapter))

    def save_sampler(self, adapter: str, folder: Path) -> None:
        self.policy.save_for_sampling(folder, adapter=_plain(adapter))

    def publish(self, sampler: str, folder: Path) -> None:
        self._published += 1
        name = f"sampler-{self._published}"
        self.policy.publish(name, folder=folder)
        self._samplers[sampler] = PublishedSampler(name, folder)

    def withdraw(self, sampler: str) -> None:
        gone = self._samplers.pop(sampler)
        self.policy.unpublish(gone.name)
        if gone.scorer in self.policy.adapters:
            self.policy.remove_adapter(gone.scorer)

    # --- sampling -------------------------------------------------------------------------------------------

    async def sample(self, sampler: str | None, request: SampleRequest, seed: int) -> list[SampledSequence]:
        if request.stop == []:
            raise RequestRefused(400, "stop=[] is not offered: a response ends at the model's end token.")
        found = await self.policy.asample(
            request.prompt,
            request.n,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            stop=request.stop or (),
            seed=seed,
            adapter=BASE if sampler is None else self._samplers[sampler].name,
        )
        return [_sampled(trajectory) for trajectory in found]

    def score(self, sampler: str | None, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        pairs = [(prompt[:1], prompt[1:]) for prompt in prompts if len(prompt) > 1]
        rows = iter(self.policy.log_probs(pairs, adapter=self._scorer(sampler)) if pairs else [])
        found = []
        for prompt in prompts:
            scores = np.zeros(0, np.float32)
            if len(prompt) > 1:
                scores = next(rows).float().cpu().numpy()
            found.append(scores)
        return found

    def _scorer(self, sampler: str | None) -> str:
        """An adapter with the weights of a sampler: the module computes log-probs, not the engine."""
        if sampler is None:
            return BASE
        found = self._samplers[sampler]
        if found.scorer not in self.policy.adapters:
            self.policy.load_adapter(found.scorer, found.folder)
        return found.scorer

    def close(self) -> None:
        self.policy.close()


def changed_keys(model: ServiceModelConfig) -> dict[str, object]:
    """The keys of the model that are not at their defaults, by the names that a training run has for them."""
    found: dict[str, object] = {}
    for key in schema_keys(ServiceModelConfig):
        value: object = model
        for part in key.path.split("."):
            value = getattr(value, part)
        if key.path != "path" and value != key.default:
            found[f"actor_rollout_ref.model.{key.path}"] = value
    return found


def _sampled(trajectory: Trajectory) -> SampledSequence:
    if trajectory.finish not in FINISHES:
        reason = trajectory.extras.get("error", trajectory.finish)
        raise RuntimeError(f"The sample ended with {reason}.")
    return SampledSequence(trajectory.response, trajectory.log_probs, FINISHES[trajectory.finish])


def _plain(model_id: str) -> str:
    """The name of a model's adapter in the policy, which has no colons."""
    return model_id.replace(":", "-")
