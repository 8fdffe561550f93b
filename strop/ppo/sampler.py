"""Samples unscored trajectories for prompts: one rollout engine, the agents that use it, and weight sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from strop.agents.episode import Episode
from strop.agents.runner import AgentSetup, EpisodeRequest, EpisodeRunner
from strop.backends.base import Backend
from strop.ppo.admission import AnswerLengths
from strop.rollout.base import Completion, Engine, Request, Sampling, stream_seed
from strop.types import Prompt, Trajectory

NumberedPrompt = tuple[int, Prompt]
"""The group number of a prompt within its step, and the prompt."""


@dataclass
class Samples:
    """What was sampled for some prompts; nothing has a score yet."""

    trajectories: list[Trajectory] = field(default_factory=list)
    greedy: list[Trajectory] = field(default_factory=list)
    """One greedy response per prompt, for estimators that use it as the baseline."""
    episodes: list[Episode] = field(default_factory=list)
    """The agent episodes of this rank."""

    def __add__(self, other: Samples) -> Samples:
        return Samples(
            self.trajectories + other.trajectories, self.greedy + other.greedy, self.episodes + other.episodes
        )


class PromptSampler(Protocol):
    """`Sampler`, or its wrapper that shares prompts between ranks."""

    def generate(
        self, prompts: Sequence[NumberedPrompt], sampling: Sampling, n: int, step: int
    ) -> Samples: ...

    def close(self) -> None: ...


@dataclass
class Sampler:
    """Samples with the engine of this process."""

    engine: Engine
    seed: int
    max_model_len: int
    """Maximum tokens of prompt and response together."""
    agents: AgentSetup | None = None
    """Agent loops, tools and interactions. None: every prompt gets single-turn responses."""
    adapter: str | None = None
    """The adapter of the engine that samples; None: the model as it is. Agents sample without one."""
    _runner: EpisodeRunner | None = None
    _single_turn: dict[str | None, bool] = field(default_factory=dict)
    """By the name of the agent loop."""

    def generate(
        self,
        prompts: Sequence[NumberedPrompt],
        sampling: Sampling,
        n: int,
        step: int,
        waiting: Iterator[NumberedPrompt] | None = None,
    ) -> Samples:
        """n samples of each prompt. Single-turn prompts go to the engine as one batch, each sample of an
        agent is an episode. `waiting` yields further single-turn prompts when the engine has free rows.

        The random stream of a sample depends on the seed of the run, the step, the row and the group alone.
        """
        if waiting is not None:
            return Samples(self._sample_from_queue(prompts, sampling, n, step, waiting))
        if self.agents is None:
            return Samples(self._sample_batch(prompts, sampling, n, step))
        single_turn: list[NumberedPrompt] = []
        multi_turn: list[NumberedPrompt] = []
        for numbered in prompts:
            (single_turn if self.is_single_turn(numbered[1]) else multi_turn).append(numbered)
        trajectories = self._sample_batch(single_turn, sampling, n, step)
        episodes = self._run_episodes(multi_turn, sampling, n, step)
        trajectories += [episode.trajectory() for episode in episodes]
        if multi_turn:
            trajectories.sort(key=lambda t: t.group)
        return Samples(trajectories, episodes=episodes)

    def is_single_turn(self, prompt: Prompt) -> bool:
        """Whether the response is one completion of the engine."""
        if self.agents is None or prompt.unusable:
            return True
        if prompt.agent_name not in self._single_turn:
            self._single_turn[prompt.agent_name] = self.agents.loops.batched(prompt.agent_name)
        return self._single_turn[prompt.agent_name]

    def close(self) -> None:
        """Close tools and their connections. The engine belongs to the caller."""
        if self._runner is not None:
            self._runner.close()

    def _sample_batch(
        self, prompts: Sequence[NumberedPrompt], sampling: Sampling, n: int, step: int
    ) -> list[Trajectory]:
        if not prompts:
            return []
        requests = [self.request(numbered, sampling, n, step) for numbered in prompts]
        return _trajectories(prompts, self.engine.generate(requests, sampling))

    def _sample_from_queue(
        self,
        prompts: Sequence[NumberedPrompt],
        sampling: Sampling,
        n: int,
        step: int,
        waiting: Iterator[NumberedPrompt],
    ) -> list[Trajectory]:
        started = list(prompts)

        def more(free_rows: int) -> list[Request]:
            fresh = list(islice(waiting, max(1, free_rows // n)))
            started.extend(fresh)
            return [self.request(numbered, sampling, n, step) for numbered in fresh]

        requests = [self.request(numbered, sampling, n, step) for numbered in prompts]
        return _trajectories(started, self.engine.generate(requests, sampling, more))

    def request(self, numbered: NumberedPrompt, sampling: Sampling, n: int, step: int) -> Request:
        """The request of all samples of a prompt."""
        group, prompt = numbered
        room = self.max_model_len - len(prompt.ids)
        return Request(
            prompt.ids,
            n,
            seed=stream_seed(self.seed, step, prompt.index, group),
            max_tokens=1 if prompt.unusable else min(sampling.max_tokens, room),
            adapter=self.adapter,
            images=prompt.images,
        )

    def _run_episodes(
        self, prompts: Sequence[NumberedPrompt], sampling: Sampling, n: int, step: int
    ) -> list[Episode]:
        if not prompts:
            return []
        starts = []
        for group, prompt in prompts:
            for sample in range(n):
                seeds = (self.seed, step, prompt.index, group, sample)
                starts.append(EpisodeRequest(prompt, sampling, seeds, group))
        if self._runner is None:
            assert self.agents is not None
            self._runner = self.agents.runner(self.engine, max_model_len=self.max_model_len, seed=stream_seed)
        return self._runner.run(starts)


def _trajectories(
    prompts: Sequence[NumberedPrompt], completions: Sequence[Sequence[Completion]]
) -> list[Trajectory]:
    made = []
    for (group, prompt), samples in zip(prompts, completions):
        for completion in samples:
            made.append(single_turn_trajectory(prompt, group, completion))
    return made


def single_turn_trajectory(prompt: Prompt, group: int, completion: Completion) -> Trajectory:
    """The trajectory of a prompt and one completion of the engine."""
    if completion.finish == "error":
        raise ValueError(
            f"Row {prompt.index} of {prompt.data_source} cannot be answered: {completion.error}."
        )
    usable = not prompt.unusable
    return Trajectory(
        prompt=prompt,
        group=group,
        response=list(completion.ids),
        mask=[int(usable)] * len(completion.ids),
        log_probs=list(completion.log_probs) if usable else [0.0] * len(completion.ids),
        finish=completion.finish if usable else "error",
        version=completion.version,
        versions=list(completion.versions),
        experts=completion.experts,
    )


@dataclass(frozen=True)
class StepRollout:
    """What a training step samples for each of its prompts."""

    sampler: PromptSampler
    sampling: Sampling
    samples_per_prompt: int
    greedy_baseline: bool = False
    """Also sample one greedy response per prompt."""
    lengths: AnswerLengths | None = None
    """Admits prompts with long answers in earlier epochs first. None: in the order drawn."""

    def generate(self, prompts: Sequence[NumberedPrompt], step: int) -> Samples:
        """Samples of all prompts, without scores."""
        if self.lengths is not None:
            prompts = self.lengths.longest_first(prompts, lambda numbered: numbered[1])
        samples = self.sampler.generate(prompts, self.sampling, self.samples_per_prompt, step)
        if self.greedy_baseline:
            greedy = self.sampler.generate(prompts, replace(self.sampling, temperature=0.0), 1, step)
            samples += Samples(greedy=greedy.trajectories, episodes=greedy.episodes)
        if self.lengths is not None:
            samples.trajectories.sort(key=lambda t: t.group)
            samples.greedy.sort(key=lambda t: t.group)
        return samples


@dataclass
class WeightSync:
    """Hands the weights of the actor to the rollout engine. Versions are training steps."""

    engine: Engine
    actor: Backend
    copies: bool
    """The engine holds a copy. One that samples from the actor's own module takes the version only."""
    every: int = 1
    """Steps from one weight sync to the next. A run that resumes between two syncs has one more."""
    last_step: int | None = None
    """This step is synced in any case."""
    on_sync: Callable[[], None] | None = None
    _synced: bool = False

    def __call__(self, version: int) -> None:
        """Sync the weights of step `version` if a sync is due: at multiples of `every`, where validations
        are, whatever step the run resumed from or began to train the actor with."""
        if self._synced and version % self.every and version != self.last_step:
            return
        self.engine.update_weights(self.actor.export_weights() if self.copies else (), version)
        self._synced = True
        if self.on_sync is not None:
            self.on_sync()
