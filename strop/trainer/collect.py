"""From prompts to scored trajectories.

The collector owns everything that samples: the engine, the scorer, how many samples a prompt gets, whether prompts without
signal are replaced (dynamic sampling), whether a greedy answer is needed as a baseline. The loop only asks for a step's worth.
Whether answers are made when they are asked for, or ahead of training, is the window's business.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import islice
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
from strop.trainer.staleness import staleness
from strop.trainer.surplus import ROUNDS, Surplus, left_over
from strop.trainer.window import Answers, Draw, Numbered, Order, Window
from strop.types import Prompt, Trajectory

log = logging.getLogger(__name__)


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
    team: int = 1
    """Neighbouring ranks that sample the same prompts together, because each engine holds a part of every matrix."""
    rows: int = 0
    """Samples that the engine runs at once, where it takes further requests meanwhile; prompts beyond them may be answered by
    any rank. 0: every rank answers what it was dealt."""
    window: Window = field(default_factory=Window)
    """How far sampling runs ahead of training."""

    _reports: list[Any] = field(default_factory=list)
    """Of the draws of this step."""
    _runners: dict[int, EpisodeRunner] = field(default_factory=dict)
    """By the engine they talk to."""
    _dealt: list[list[Numbered]] = field(default_factory=list)
    """What each rank was given last."""
    _round: int = 0
    """The number of that deal, the same on all ranks."""
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
        """End what runs ahead, the worker processes of the scorer, tools and the engine."""
        alive = self.window.close()
        try:
            self.scorer.close()
            for runner in self._runners.values():
                runner.close()
        finally:
            if alive:
                self.engine.close()
            else:  # it may never give back what closing waits for
                log.error("The rollout engine does not end what it is doing; it is left behind.")
                threading.Thread(target=self.engine.close, daemon=True).start()

    def collect(self, draw: Draw, prompts: int, step: int, record: StepRecord) -> list[Trajectory]:
        """`prompts` scored groups, in the order they were drawn."""
        self._reports = []
        with self.awake(), self.window.flowing():
            trajectories = self._collect(draw, prompts, step, record)
        record.add(self.episode_metrics())
        if self.window.engine is not None:
            record.add({**staleness(trajectories, step), "staleness/prompts_ahead": self.window.ahead})
        return trajectories

    def _collect(self, draw: Draw, prompts: int, step: int, record: StepRecord) -> list[Trajectory]:
        if self.group_filter is None:
            return self._sample(draw, prompts, step, 0, record)[1]
        kept: list[Trajectory] = []
        draws = drawn = 0
        while (have := len({t.group for t in kept})) < prompts:
            if self.group_filter.max_draws and draws >= self.group_filter.max_draws:
                raise ValueError(
                    f"After {draws} draws only {have} of {prompts} prompts had samples that disagree. Raise "
                    "algorithm.filter_groups.max_num_gen_batches or rollout.n, or use easier or harder prompts."
                )
            answered, fresh = self._sample(draw, 1, step, drawn, record)
            kept += [t for t, keep in zip(fresh, self.group_filter.keep(fresh)) if keep]
            draws, drawn = draws + 1, drawn + answered
        record.add({"train/num_gen_batches": draws, "train/filtered_groups": drawn - have})
        chosen = list(dict.fromkeys(t.group for t in kept))[:prompts]
        return [t for t in kept if t.group in set(chosen)]

    def _sample(self, draw: Draw, prompts: int, step: int, first: int, record: StepRecord) -> tuple[int, list[Trajectory]]:
        """At least `prompts` prompts (how many), and n scored samples of each; groups are numbered from `first`."""
        with record.phase("gen"):
            order, answers = self.window.take(draw, prompts, step, self)
            trajectories = self._told(answers.trajectories, order, first)
            greedy = self._told(answers.greedy, order, first) if self.greedy_baseline else []
            self._episodes += answers.episodes
        with record.phase("reward"):
            report = self.score(trajectories)
            if greedy:
                record.add({"reward/baseline_failed": self.score(greedy).failed})
        record.add(self._scored(report))
        scores = {t.group: t.reward for t in greedy}
        for t in trajectories if greedy else ():
            score = scores[t.group]
            t.baseline = score or 0.0
            t.score = None if score is None else t.score  # without its baseline the sample teaches nothing
        return len(order.prompts), trajectories

    def _told(self, made: list[Trajectory], order: Order, first: int) -> list[Trajectory]:
        """What all ranks made of an order, with its groups numbered from `first`."""
        known = dict(enumerate(order.prompts, order.first))
        told = [copy(t) for t in told_to_all(made, known, self.ranks, self.team)]
        for t in told:
            t.group += first - order.first
        return told

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
        numbered = list(enumerate(prompts, first))
        mine = self.share(numbered)
        made = self.ranks.together(lambda: self._answers(mine, sampling, n, step, self.engine), "sampling")
        self._episodes += made.episodes
        return told_to_all(made.trajectories, dict(numbered), self.ranks, self.team)

    def share(self, numbered: Sequence[Numbered]) -> list[Numbered]:
        """What this rank answers of them; the same moment on all ranks."""
        dealt = deal_prompts([prompt for _, prompt in numbered], self.ranks, self.team)
        self._dealt = [[numbered[place] for place in places] for places in dealt]
        self._round = next(ROUNDS) if self.ranks.world > 1 else 0
        return self._dealt[self.ranks.rank // self.team]

    def answer(self, numbered: Sequence[Numbered], step: int) -> Answers:
        """What training wants to know about these prompts; called by the window, in whatever thread."""
        engine = self.window.engine or self.engine
        answers = self._answers(numbered, self.sampling, self.samples_per_prompt, step, engine)
        if self.greedy_baseline:
            greedy = self._answers(numbered, replace(self.sampling, temperature=0.0), 1, step, engine)
            answers += Answers(greedy=greedy.trajectories, episodes=greedy.episodes)
        return answers

    def _answers(self, numbered: Sequence[Numbered], sampling: Sampling, n: int, step: int, engine: Engine) -> Answers:
        if self.cast is None:
            return Answers(self._in_one_batch(numbered, sampling, n, step, engine))
        alone = {group for group, prompt in numbered if not self.cast.loops.batched(prompt.agent_name)}
        made = self._in_one_batch([pair for pair in numbered if pair[0] not in alone], sampling, n, step, engine)
        episodes = self._in_episodes([pair for pair in numbered if pair[0] in alone], sampling, n, step, engine)
        made += [episode.trajectory() for episode in episodes]
        return Answers(sorted(made, key=lambda t: t.group) if alone else made, episodes=episodes)

    def _in_one_batch(
        self, prompts: Sequence[Numbered], sampling: Sampling, n: int, step: int, engine: Engine
    ) -> list[Trajectory]:
        def request(numbered: Numbered) -> Request:
            group, prompt = numbered
            seed = stream_seed(self.seed, step, prompt.index, group)
            return Request(prompt.ids, n, seed=seed, max_tokens=min(sampling.max_tokens, self.longest - len(prompt.ids)))

        surplus = self._surplus(n, sampling)
        if surplus is None:
            answered = list(prompts)
            answers = engine.generate([request(numbered) for numbered in prompts], sampling) if prompts else []
        else:
            answered, supply = list(prompts[: self.rows // n]), surplus.taken()

            def more(rows: int) -> list[Request]:
                fresh = list(islice(supply, max(1, rows // n)))
                answered.extend(fresh)
                return [request(numbered) for numbered in fresh]

            fed: Any = engine
            answers = fed.generate([request(numbered) for numbered in answered], sampling, more)
        return [
            _trajectory(prompt, group, completion)
            for (group, prompt), completions in zip(answered, answers)
            for completion in completions
        ]

    def _surplus(self, n: int, sampling: Sampling) -> Surplus | None:
        """What may be answered by any rank; None where all of it fits, or ranks answer at moments of their own."""
        if self.rows < n or self.team > 1 or self.window.engine is not None or self.ranks.world == 1:
            return None
        if self.cast is not None and any(not self.cast.loops.batched(p.agent_name) for share in self._dealt for _, p in share):
            return None
        shares = left_over(self._dealt, self.rows // n)
        return Surplus(self.ranks, f"{self._round}/{sampling.temperature}", shares) if any(shares) else None

    def _in_episodes(self, prompts: Sequence[Numbered], sampling: Sampling, n: int, step: int, engine: Engine) -> list[Episode]:
        if not prompts:
            return []
        assert self.cast is not None
        if id(engine) not in self._runners:
            self._runners[id(engine)] = self.cast.runner(engine, longest=self.longest, seed=stream_seed)
        starts = [
            Start(prompt, sampling, (self.seed, step, prompt.index, group, i), group)
            for group, prompt in prompts
            for i in range(n)
        ]
        return self._runners[id(engine)].run(starts)


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
        versions=list(completion.versions),
    )
