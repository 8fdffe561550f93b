"""`Policy`: a language model with the primitives of custom training loops.

    policy = Policy("Qwen/Qwen2.5-0.5B-Instruct", lr=1e-6)
    groups = policy.sample(prompts, n=8, max_tokens=256)
    for trajectory in itertools.chain(*groups):
        trajectory.score = my_reward(policy.text(trajectory))
    policy.forward_backward(policy.batch(groups, advantages="grpo"), "vanilla")
    policy.optim_step()

The parts are those of a training run, so the numbers are too.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from strop.backends.updates import StepSettings
from strop.config.compose import load
from strop.config.schema.ppo import PpoConfig
from strop.config.short_keys import overrides
from strop.data.chat import stop_ids
from strop.models.lora import FIRST_ADAPTER
from strop.policy.batches import (
    Pairs,
    PromptLike,
    StepOutput,
    TokenRows,
    check_batch,
    check_trains,
    listed,
    pairs_batch,
    prompt_of,
    row_log_probs,
    split_rows,
    training_batch,
    with_advantages,
)
from strop.policy.core import PolicyFacts
from strop.policy.gate import Gate
from strop.policy.losses import OwnLoss, output_gradients, own_value
from strop.policy.ownership import find_tokenizer, module_device, release_module
from strop.policy.ranked import RankedCore
from strop.policy.start import start_core
from strop.policy.stops import Stops, cut_at_text, sampling_until
from strop.ppo.sampler import single_turn_trajectory
from strop.rollout.base import Request, Sampling, stream_seed
from strop.types import Batch, Prompt, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT = FIRST_ADAPTER


class Policy:
    """A model with primitives for sampling and training. Every operation takes an adapter; a policy without
    LoRA has one entry, "default", for all of its weights."""

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        lora_rank: int = 0,
        lora_alpha: float | None = None,
        device: str = "auto",
        ranks: int = 1,
        runtime: Literal["local", "ray"] = "local",
        seed: int = 0,
        **keys: object,
    ) -> None:
        """`model`: a folder, a name, or a loaded model of transformers, which is trained in place and belongs
        to this policy until `close`. `ranks`: devices that share the model (FSDP2), each in a process of its
        own; with runtime="ray" they are actors of a Ray cluster. `keys`: any key of a training run, by its
        full name or last word."""
        given: dict[str, object] = {"trainer.seed": seed, "trainer.device": device, **keys}
        given["trainer.n_gpus_per_node"] = ranks
        given["actor_rollout_ref.model.lora_rank"] = lora_rank
        if lora_alpha is not None:
            given["actor_rollout_ref.model.lora_alpha"] = lora_alpha
        self._module: PreTrainedModel | None = None
        if isinstance(model, str | Path):
            given["actor_rollout_ref.model.path"] = str(model)
        else:
            given["trainer.device"] = module_device(model, device)
            self._module = model
        self.config: PpoConfig = load("ppo_trainer", overrides("ppo_trainer", given)).config
        self.tokenizer: PreTrainedTokenizerBase = tokenizer or find_tokenizer(
            self.config.actor_rollout_ref.model, self._module
        )
        self.seed = seed
        self.calls = 0
        """How often `sample` and `asample` drew with a seed of the policy."""
        self._gate = Gate()
        self._core = start_core(self.config, ranks, runtime, self._module)
        self.config = self._core.config
        self._facts = self._core.facts()

    @property
    def facts(self) -> PolicyFacts:
        """Sizes and limits of the model."""
        return self._facts

    # --- adapters -------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> list[str]:
        """The names of all adapters."""
        return self._core.adapter_names()

    def add_adapter(
        self, name: str, *, rank: int | None = None, alpha: float | None = None, seed: int | None = None
    ) -> None:
        """Add a LoRA adapter with an optimizer of its own. Rank and alpha are by default those of the policy;
        only `seed` (by default that of the policy) determines its initial weights."""
        model = self.config.actor_rollout_ref.model
        with self._gate.training():
            self._core.add_adapter(
                name,
                model.lora_rank if rank is None else rank,
                model.lora_alpha if alpha is None else alpha,
                self.seed if seed is None else seed,
            )

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Add an adapter with the weights of a folder of `save_for_sampling`."""
        with self._gate.training():
            self._core.load_adapter(name, Path(path).expanduser())

    def remove_adapter(self, name: str) -> None:
        """Delete an adapter and its optimizer state."""
        with self._gate.training():
            self._core.remove_adapter(name)

    def publish(self, name: str, *, adapter: str = DEFAULT, folder: str | Path | None = None) -> None:
        """Keep a copy of the weights that an adapter has now, to sample from by `adapter=name`. `folder`: of
        an adapter that `save_for_sampling` wrote, instead. A name that exists gets the new weights."""
        with self._gate.training():
            if folder is None:
                self._core.publish(name, adapter)
            else:
                self._core.publish_folder(name, Path(folder).expanduser())

    def unpublish(self, name: str) -> None:
        """Delete a published copy."""
        with self._gate.training():
            self._core.unpublish(name)

    # --- sampling -------------------------------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[PromptLike],
        n: int = 1,
        *,
        max_tokens: int,
        temperature: float | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Stops = (),
        seed: int | None = None,
        adapter: str | None = DEFAULT,
    ) -> list[list[Trajectory]]:
        """n responses to each prompt.

        `temperature`: by default that of the policy (rollout.temperature), at which `log_probs` and losses
        are computed too. `stop`: token ids or texts that end a response, besides the end token of the model.
        `seed`: the same seed gives the same responses; without one, each call draws others. `adapter`: an
        adapter, a published name, or None for the model without adapter.
        """
        if isinstance(prompts, str):  # whose letters would be prompts
            raise ValueError(f"sample() takes several prompts; {prompts[:80]!r} is one: give it in a list.")
        sampling = self._sampling(n, max_tokens, temperature, top_k, top_p, stop)
        numbered = [(place, self._rendered(prompt, place)) for place, prompt in enumerate(prompts)]
        with self._gate.training():
            base, call = self._stream(seed)
            found = self._core.sample(numbered, sampling, n, base, call, adapter)
        groups: list[list[Trajectory]] = [[] for _ in numbered]
        for trajectory in found:
            groups[trajectory.group].append(self._cut(trajectory, stop))
        return groups

    async def asample(
        self,
        prompt: PromptLike,
        n: int = 1,
        *,
        max_tokens: int,
        temperature: float | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Stops = (),
        seed: int | None = None,
        adapter: str | None = DEFAULT,
    ) -> list[Trajectory]:
        """n responses to one prompt. The samples of concurrent coroutines share batches."""
        sampling = self._sampling(n, max_tokens, temperature, top_k, top_p, stop)
        rendered = self._rendered(prompt, 0)
        base, call = self._stream(seed)
        room = self._facts.longest - len(rendered.ids)
        request = Request(
            rendered.ids,
            n,
            seed=stream_seed(base, call, rendered.index, 0),
            max_tokens=min(max_tokens, room),
            images=rendered.images,
        )
        if isinstance(self._core, RankedCore):
            found = await asyncio.to_thread(self._sample_ranked, rendered, sampling, n, (base, call), adapter)
            return [self._cut(trajectory, stop) for trajectory in found]
        async with self._gate.sampling():
            completions = await self._core.asample(request, sampling, adapter)
        return [self._cut(single_turn_trajectory(rendered, 0, found), stop) for found in completions]

    def _sample_ranked(
        self, prompt: Prompt, sampling: Sampling, n: int, stream: tuple[int, int], adapter: str | None
    ) -> list[Trajectory]:
        """Ranks sample by operations that all of them take part in, one after the other."""
        with self._gate.training():
            return self._core.sample([(0, prompt)], sampling, n, *stream, adapter)

    def _stream(self, seed: int | None) -> tuple[int, int]:
        """Where the random numbers of a call begin. The n-th call without a seed draws as the n-th step of a
        training run."""
        if seed is not None:
            return seed, 0
        self.calls += 1
        return self.seed, self.calls

    def _rendered(self, given: PromptLike, place: int) -> Prompt:
        found = prompt_of(given, self.tokenizer, place)
        if len(found.ids) >= self._facts.longest:
            raise ValueError(
                f"Prompt {place} has {len(found.ids)} tokens, which leaves no room for a response: the model "
                f"takes {self._facts.longest} tokens of both together."
            )
        return found

    def _sampling(
        self, n: int, max_tokens: int, temperature: float | None, top_k: int, top_p: float, stop: Stops
    ) -> Sampling:
        if n < 1 or max_tokens < 1:
            raise ValueError(f"n={n} and max_tokens={max_tokens} must both be at least 1.")
        if temperature is None:
            temperature = self.config.actor_rollout_ref.rollout.temperature
        ends = stop_ids(self.tokenizer, self._facts.end_ids)
        return sampling_until(ends, stop, max_tokens, temperature, top_k, top_p)

    def _cut(self, trajectory: Trajectory, stop: Stops) -> Trajectory:
        return cut_at_text(trajectory, stop, self.tokenizer)

    def text(self, trajectory: Trajectory) -> str:
        """The response of a trajectory as text, without special tokens."""
        return str(self.tokenizer.decode(trajectory.response, skip_special_tokens=True))

    def prompt(self, given: PromptLike, *, index: int = 0, **extra_info: object) -> Prompt:
        """A rendered prompt. `index` is part of the random stream of its samples, and is the row number in a
        training run; `extra_info` is kept with it."""
        return dataclasses.replace(prompt_of(given, self.tokenizer, index), extra_info=extra_info)

    # --- passes ---------------------------------------------------------------------------------------------

    def batch(self, rows: TokenRows, *, advantages: str | None = None) -> Batch:
        """Trajectories (or groups of them, as `sample` returns) as tensors; rows without a score are masked.
        Each list is a group; rows without lists are grouped by `Trajectory.group`. `advantages`: an estimator
        by name (grpo, rloo, reinforce_plus_plus ...), with the settings of the `algorithm` section.
        """
        rows = listed(rows)
        batch = check_batch(training_batch(rows), self._facts.vocabulary, self._facts.longest)
        if advantages is None:
            return batch
        return with_advantages(batch, rows, advantages, self.config)

    def log_probs(self, sequences: Pairs, *, adapter: str = DEFAULT, reference: bool = False) -> list[Tensor]:
        """The log-probs of the response tokens of each trajectory, or of each pair (prompt ids, response
        ids). `reference`: of the model without its adapter."""
        batch = check_batch(pairs_batch(sequences), self._facts.vocabulary, self._facts.longest)
        with self._gate.training():
            outputs = self._core.forward(batch, ["log_probs"], adapter, reference)
        assert outputs.log_probs is not None
        return split_rows(outputs.log_probs, batch)

    def forward(
        self,
        batch: TokenRows,
        loss: str | OwnLoss,
        *,
        adapter: str = DEFAULT,
        want: Sequence[str] = ("log_probs",),
        aggregation: str | None = None,
        **settings: object,
    ) -> StepOutput:
        """What `forward_backward` returns, without gradients."""
        rows = check_batch(training_batch(batch), self._facts.vocabulary, self._facts.longest)
        with self._gate.training():
            if isinstance(loss, str):
                return self._core.evaluate(rows, loss, settings, aggregation, adapter)
            outputs = self._core.forward(rows, want, adapter)
            value = float(own_value(loss, outputs, rows, gradient=False))
            return StepOutput(value, {}, row_log_probs(outputs, rows))

    def forward_backward(
        self,
        batch: TokenRows,
        loss: str | OwnLoss,
        *,
        adapter: str = DEFAULT,
        want: Sequence[str] = ("log_probs",),
        aggregation: str | None = None,
        **settings: object,
    ) -> StepOutput:
        """Add the gradients of a loss to those of the adapter.

        `loss`: a policy loss by name (vanilla, gspo, cispo ...), "cross_entropy", "importance_sampling",
        "ppo", or a function (outputs, batch) -> scalar of the whole batch, where `want` names the outputs
        that it needs. `settings` are keyword arguments of a named loss (clip_low, clip_high ...);
        `aggregation` replaces actor.loss_agg_mode. A loss that is not finite is refused, and
        accumulated gradients are dropped.
        """
        rows = check_batch(training_batch(batch), self._facts.vocabulary, self._facts.longest)
        with self._gate.training():
            if isinstance(loss, str):
                return self._core.forward_backward(rows, loss, settings, aggregation, adapter)
            if settings or aggregation:
                raise ValueError(
                    "A loss function takes no settings; bind them, for instance by functools.partial."
                )
            check_trains(rows)
            return self._own_loss(rows, loss, list(want), adapter)

    def _own_loss(self, rows: Batch, loss: OwnLoss, want: list[str], adapter: str) -> StepOutput:
        found = self._core.backward_own(rows, want, loss, adapter)
        if found is not None:
            return found
        outputs = self._core.forward(rows, want, adapter)
        value, gradients = output_gradients(loss, outputs, rows, want)
        learned = self._core.backward_gradients(rows, gradients, adapter)
        return dataclasses.replace(learned, loss=value)

    # --- updates and state ----------------------------------------------------------------------------------

    def optim_step(
        self,
        *,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        grad_clip: float | None = None,
        adapter: str = DEFAULT,
    ) -> dict[str, float]:
        """Update the adapter with its accumulated gradients, and clear them. Omitted settings come from the
        configuration and its schedule; grad_clip=0 clips nothing."""
        settings = StepSettings(lr, betas, eps, weight_decay, grad_clip)
        with self._gate.training():
            return self._core.optim_step(settings, adapter)

    def drop_gradients(self, *, adapter: str = DEFAULT) -> None:
        """Clear the accumulated gradients of an adapter."""
        with self._gate.training():
            self._core.drop_gradients(adapter)

    def save_state(self, path: str | Path, *, adapter: str = DEFAULT) -> None:
        """Save weights, optimizer, schedule, accumulated gradients and random streams into a folder."""
        with self._gate.training():
            self._core.save_state(Path(path).expanduser(), adapter, {"calls": self.calls})

    def load_state(self, path: str | Path, *, adapter: str = DEFAULT, optimizer: bool = True) -> None:
        """Restore the exact state of `save_state`. Without `optimizer`: the weights only."""
        with self._gate.training():
            counters = self._core.load_state(Path(path).expanduser(), adapter, optimizer)
            if optimizer:
                self.calls = counters["calls"]

    def save_for_sampling(self, path: str | Path, *, adapter: str = DEFAULT) -> None:
        """Write a folder that transformers loads, or an adapter of peft where the policy has LoRA."""
        with self._gate.training():
            self._core.save_for_sampling(Path(path).expanduser(), adapter, self.tokenizer)

    def close(self) -> None:
        """Free the engine and remove all patches from a model that the caller loaded."""
        if self._gate.closed:
            return
        with self._gate.closing():
            self._core.close()
        if self._module is not None:
            release_module(self._module)

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
