"""From prompts to scored trajectories.

The collector owns everything that samples: the engine, the scorer, how many samples a prompt gets, whether prompts without
signal are replaced (dynamic sampling), whether a greedy answer is needed as a baseline. The loop only asks for a step's worth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from strop.agents.build import Cast
from strop.agents.episode import Episode
from strop.agents.report import episode_metrics
from strop.agents.runner import EpisodeRunner, Start
from strop.algorithms.selection import groups_that_disagree, groups_within
from strop.config.schema.rollout import RewardWeights
from strop.ranks import Ranks
from strop.rollout.base import Completion, Engine, Request, Sampling
from strop.trainer.record import StepRecord
from strop.trainer.seeds import stream_seed
from strop.trainer.shares import deal_prompts, merged_metrics, score_in_shares, told_to_all
from strop.types import Prompt, Trajectory

Draw = Callable[[], list[Prompt]]
"""The next prompts of the training data."""


class Scorer(Protocol):
    def score(self, trajectories: Sequence[Trajectory]) -> Any:
        """Fill in `score` and `extras` of each; the result has `metrics`."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class GroupFilter:
    """Dynamic sampling: which prompts are worth training on."""

    metric: str
    bounds: tuple[float, float] | None
    max_draws: int
    """0: as many as it takes."""

    def keep(self, trajectories: Sequence[Trajectory]) -> list[bool]:
        """Judged by the samples that have a score; a prompt with fewer than two of them has nothing to compare."""
        peers = Counter(t.group for t in trajectories if t.score is not None)
        scored = [t for t in trajectories if t.score is not None and peers[t.group] > 1]
        if not scored:
            return [False] * len(trajectories)
        values = torch.tensor([self._value(t) for t in scored], dtype=torch.float64)
        groups = torch.unique(torch.tensor([t.group for t in scored], dtype=torch.long), return_inverse=True)[1]
        if self.bounds is None:
            kept = groups_that_disagree(values, groups)
        else:
            kept = groups_within(values, groups, low=self.bounds[0], high=self.bounds[1])
        chosen = {t.group for t, keep in zip(scored, kept) if keep}
        return [t.group in chosen for t in trajectories]

    def _value(self, trajectory: Trajectory) -> float:
        if self.metric in ("score", "seq_reward", "seq_final_reward"):
            assert trajectory.reward is not None
            return trajectory.reward
        if self.metric not in trajectory.extras:
            known = ", ".join(["score", *trajectory.extras])
            raise ValueError(
                f"algorithm.filter_groups.metric={self.metric!r} is not reported by the scorer, which gives {known}."
            )
        return float(trajectory.extras[self.metric])


@dataclass
class Collector:
    engine: Engine
    scorer: Scorer
    sampling: Sampling
    samples_per_prompt: int
    seed: int
    longest: int
    """Tokens of prompt and response together that the engine can hold."""
    group_filter: GroupFilter | None = None
    greedy_baseline: bool = False
    free_cache: bool = False
    """Give the engine's memory back while the models learn."""
    cast: Cast | None = None
    """Agent loops, tools and interactions; None: every row is one answer."""
    weights: RewardWeights = field(default_factory=RewardWeights)
    """How the rewards of a conversation add up."""
    ranks: Ranks = field(default_factory=Ranks)
    """Each samples and scores its share of the prompts, and is told what the others found."""

    _reports: list[Any] = field(default_factory=list)
    """Of the draws of this step."""
    _runner: EpisodeRunner | None = None
    _episodes: list[Episode] = field(default_factory=list)
    """Since their numbers were last asked for."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Around everything that samples."""
        self.engine.wake()
        yield
        if self.free_cache:
            self.engine.sleep()

    def close(self) -> None:
        """End the worker processes of the scorer, tools and the engine."""
        try:
            self.scorer.close()
            if self._runner is not None:
                self._runner.close()
        finally:
            self.engine.close()

    def collect(self, draw: Draw, prompts: int, step: int, record: StepRecord) -> list[Trajectory]:
        """`prompts` scored groups, in the order they were drawn."""
        self._reports = []
        with self.awake():
            trajectories = self._collect(draw, prompts, step, record)
        record.add(self.episode_metrics())
        return trajectories

    def _collect(self, draw: Draw, prompts: int, step: int, record: StepRecord) -> list[Trajectory]:
        if self.group_filter is None:
            return self._sample(draw(), step, 0, record)
        kept: list[Trajectory] = []
        draws = drawn = 0
        while (have := len({t.group for t in kept})) < prompts:
            if self.group_filter.max_draws and draws >= self.group_filter.max_draws:
                raise ValueError(
                    f"After {draws} draws only {have} of {prompts} prompts had samples that disagree. Raise "
                    "algorithm.filter_groups.max_num_gen_batches or rollout.n, or use easier or harder prompts."
                )
            fresh_prompts = draw()
            fresh = self._sample(fresh_prompts, step, drawn, record)
            kept += [t for t, keep in zip(fresh, self.group_filter.keep(fresh)) if keep]
            draws, drawn = draws + 1, drawn + len(fresh_prompts)
        record.add({"train/num_gen_batches": draws, "train/filtered_groups": drawn - have})
        chosen = list(dict.fromkeys(t.group for t in kept))[:prompts]
        return [t for t in kept if t.group in set(chosen)]

    def _sample(self, prompts: list[Prompt], step: int, first: int, record: StepRecord) -> list[Trajectory]:
        """n scored samples of each prompt; groups are numbered from `first`."""
        with record.phase("gen"):
            trajectories = self.generate(prompts, self.sampling, self.samples_per_prompt, step, first)
            greedy = (
                self.generate(prompts, replace(self.sampling, temperature=0.0), 1, step, first) if self.greedy_baseline else []
            )
        with record.phase("reward"):
            report = self.score(trajectories)
            if greedy:
                record.add({"reward/baseline_failed": self.score(greedy).failed})
        record.add(self._scored(report))
        answers = {t.group: t.reward for t in greedy}
        for t in trajectories if greedy else ():
            score = answers[t.group]
            t.baseline = score or 0.0
            t.score = None if score is None else t.score  # without its baseline the sample teaches nothing
        return trajectories

    def _scored(self, report: Any) -> dict[str, float]:
        """How scoring went over all draws of the step: counts add up, means weigh by samples."""
        self._reports.append(report)
        return merged_metrics(self._reports, sum)

    def score(self, trajectories: Sequence[Trajectory]) -> Any:
        """Fill in scores, and weigh in what tools and turns earned. An episode that failed stays without a score."""
        alive = [t for t in trajectories if t.finish != "error"]
        if not self.weights.score:
            for t in alive:
                t.score = 0.0
        return score_in_shares(alive, self._score_here, self.ranks)

    def _score_here(self, trajectories: Sequence[Trajectory]) -> Any:
        report = self.scorer.score(trajectories)
        for t in trajectories:
            weigh(t, self.weights)
        return report

    def episode_metrics(self) -> dict[str, float]:
        """The numbers of all episodes since the last call."""
        episodes, self._episodes = self._episodes, []
        return episode_metrics(episodes)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, n: int, step: int, first: int = 0) -> list[Trajectory]:
        """n unscored samples of each prompt; a request's seed depends on the run's seed, the step and the row alone.

        Rows whose agent gives a single answer go to the engine in one batch; each sample of the others is an episode.
        """
        numbered = [(first + i, prompt) for i, prompt in enumerate(prompts)]
        mine = [numbered[place] for place in deal_prompts(prompts, self.ranks)]
        made = self.ranks.together(lambda: self._generate_here(mine, sampling, n, step), "sampling")
        return told_to_all(made, dict(numbered), self.ranks)

    def _generate_here(self, numbered: Sequence[tuple[int, Prompt]], sampling: Sampling, n: int, step: int) -> list[Trajectory]:
        if self.cast is None:
            return self._in_one_batch(numbered, sampling, n, step)
        alone = {group for group, prompt in numbered if not self.cast.loops.batched(prompt.agent_name)}
        made = self._in_one_batch([pair for pair in numbered if pair[0] not in alone], sampling, n, step)
        made += self._in_episodes([pair for pair in numbered if pair[0] in alone], sampling, n, step)
        return sorted(made, key=lambda t: t.group) if alone else made

    def _in_one_batch(self, prompts: Sequence[tuple[int, Prompt]], sampling: Sampling, n: int, step: int) -> list[Trajectory]:
        if not prompts:
            return []
        requests = [
            Request(
                prompt.ids,
                n,
                seed=stream_seed(self.seed, step, prompt.index, group),
                max_tokens=min(sampling.max_tokens, self.longest - len(prompt.ids)),
            )
            for group, prompt in prompts
        ]
        answers = self.engine.generate(requests, sampling)
        return [
            _trajectory(prompt, group, completion)
            for (group, prompt), completions in zip(prompts, answers)
            for completion in completions
        ]

    def _in_episodes(self, prompts: Sequence[tuple[int, Prompt]], sampling: Sampling, n: int, step: int) -> list[Trajectory]:
        if not prompts:
            return []
        if self._runner is None:
            assert self.cast is not None
            self._runner = self.cast.runner(self.engine, longest=self.longest, seed=stream_seed)
        starts = [
            Start(prompt, sampling, (self.seed, step, prompt.index, group, i), group)
            for group, prompt in prompts
            for i in range(n)
        ]
        episodes = self._runner.run(starts)
        self._episodes += episodes
        return [episode.trajectory() for episode in episodes]


def weigh(trajectory: Trajectory, weights: RewardWeights) -> None:
    """Scale what was earned on the way, and add what tools said at the end to the score."""
    if trajectory.score is None:
        return
    tools = sum(trajectory.extras.get("tool_rewards", {}).values())
    trajectory.score = weights.score * trajectory.score + weights.tool * tools
    trajectory.turn_rewards = {place: weights.turn * reward for place, reward in trajectory.turn_rewards.items()}


def _trajectory(prompt: Prompt, group: int, completion: Completion) -> Trajectory:
    if completion.finish == "error":
        raise ValueError(f"Row {prompt.index} of {prompt.data_source} cannot be answered: {completion.error}.")
    return Trajectory(
        prompt=prompt,
        group=group,
        response=list(completion.ids),
        mask=[1] * len(completion.ids),
        log_probs=list(completion.log_probs),
        finish=completion.finish,
        version=completion.version,
    )
