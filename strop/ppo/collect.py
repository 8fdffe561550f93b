"""Scored trajectories for a training step or a validation: sampling, scoring, dynamic sampling, greedy
baseline."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import torch

from strop.agents.episode import Episode
from strop.agents.metrics import EpisodeFacts, episode_metrics
from strop.algorithms.metrics.training import StepRecord, staleness
from strop.algorithms.metrics.validation import summarise
from strop.algorithms.selection import groups_that_disagree, groups_within
from strop.config.schema.rollout import AgentConfig, RewardWeightsConfig
from strop.data.loader import Loader
from strop.ppo.episodes.rows import rows_of_episodes
from strop.ppo.sampler import Samples, StepRollout
from strop.ranks import Ranks
from strop.rewards.base import unpenalized_score
from strop.rewards.scorer import ScoreReport, merge_score_metrics
from strop.rollout.base import Engine, Sampling
from strop.types import Prompt, Trajectory

log = logging.getLogger(__name__)

FIRST_NOTICE = 3
"""Draws in a row without a usable prompt after which dynamic sampling warns; again after twice as many."""
MAX_EMPTY_DRAWS = 10
"""Such draws, and multiples of the prompts of a step, after which it ends the run by default."""
SHOWN_PROMPTS = 3
SHOWN_SCORES = 8

Draw = Callable[[], list[Prompt]]
"""Returns the next prompts of the training data."""


class TrajectoryScorer(Protocol):
    """`Scorer`, or its wrapper that shares the work between ranks."""

    def score(self, trajectories: Sequence[Trajectory]) -> ScoreReport:
        """Fill in `score` and `extras` of each trajectory."""
        ...

    def close(self) -> None: ...


class SampleQueue(Protocol):
    """Sampling ahead of training: `AsyncRollout` or `OverSampling`."""

    def sampling_allowed(self) -> AbstractContextManager[None]: ...

    def take(self, draw: Draw, prompts: int, step: int, first: int) -> tuple[int, Samples]: ...

    def metrics(self) -> dict[str, float]: ...

    def close(self) -> bool: ...


@dataclass(frozen=True)
class GroupFilter:
    """Dynamic sampling: which prompts are worth training on."""

    metric: str
    """score: before penalties for the length, with which all wrong answers of a prompt would disagree."""
    bounds: tuple[float, float] | None
    max_draws: int | None
    """None: no limit while some prompts are kept; see `EmptyDraws`. 0: no limit."""

    def keep(self, trajectories: Sequence[Trajectory]) -> list[bool]:
        """Whether to keep each trajectory. A prompt needs at least two samples with a score."""
        peers = Counter(t.group for t in trajectories if t.score is not None)
        scored = [t for t in trajectories if t.score is not None and peers[t.group] > 1]
        if not scored:
            return [False] * len(trajectories)
        values = torch.tensor([self._value(t) for t in scored], dtype=torch.float64)
        numbers = torch.tensor([t.group for t in scored], dtype=torch.long)
        groups = torch.unique(numbers, return_inverse=True)[1]
        if self.bounds is None:
            kept = groups_that_disagree(values.float(), groups)  # as a batch holds them
        else:
            kept = groups_within(values, groups, low=self.bounds[0], high=self.bounds[1])
        chosen = {t.group for t, keep in zip(scored, kept) if keep}
        return [t.group in chosen for t in trajectories]

    def _value(self, trajectory: Trajectory) -> float:
        if self.metric in ("score", "seq_reward", "seq_final_reward"):
            score = unpenalized_score(trajectory) if self.metric == "score" else trajectory.score
            assert score is not None
            return score + sum(trajectory.turn_rewards.values())
        if self.metric not in trajectory.extras:
            known = ", ".join(["score", *trajectory.extras])
            raise ValueError(
                f"algorithm.filter_groups.metric={self.metric!r} is not reported by the scorer, which gives "
                f"{known}."
            )
        return float(trajectory.extras[self.metric])


@dataclass
class EmptyDraws:
    """Counts the draws in a row of which the filter kept no prompt."""

    group_filter: GroupFilter
    wanted: int
    """Prompts of a step."""
    draws: int = 0
    prompts: int = 0
    next_notice: int = FIRST_NOTICE

    def count(self, prompts: int, kept: int, fresh: Sequence[Trajectory], *, found: int) -> None:
        """Count a draw; warn after some empty ones, and end a run that would never complete a step. `found`:
        the prompts that the step has."""
        if kept:
            self.draws = 0
            self.prompts = 0
            self.next_notice = FIRST_NOTICE
            return
        self.draws += 1
        self.prompts += prompts
        situation = (
            f"Dynamic sampling kept none of the last {self.prompts} prompts ({self.draws} draws in a row); "
            f"the step has {found} of {self.wanted}. Scores of the last ones: {shown_scores(fresh)}."
        )
        endless = self.draws >= MAX_EMPTY_DRAWS and self.prompts >= MAX_EMPTY_DRAWS * self.wanted
        if endless and self.group_filter.max_draws is None:
            raise ValueError(
                f"{situation} Does the reward distinguish responses? Raise rollout.n, use easier or harder "
                "prompts, or set algorithm.filter_groups.max_num_gen_batches (0: no limit)."
            )
        if self.draws >= self.next_notice:
            self.next_notice = 2 * self.draws
            log.warning("%s", situation)


def shown_scores(trajectories: Sequence[Trajectory]) -> str:
    """The scores of the last prompts, for messages."""
    scores: dict[int, list[str]] = {}
    rows: dict[int, int] = {}
    for t in trajectories:
        rows[t.group] = t.prompt.index
        score = unpenalized_score(t)
        scores.setdefault(t.group, []).append("failed" if score is None else f"{score:g}")
    parts = []
    for group in list(scores)[-SHOWN_PROMPTS:]:
        more = "" if len(scores[group]) <= SHOWN_SCORES else " ..."
        parts.append(f"row {rows[group]}: {' '.join(scores[group][:SHOWN_SCORES])}{more}")
    return "; ".join(parts) or "none"


@dataclass
class Collector:
    """Samples and scores what a step trains on."""

    engine: Engine
    rollout: StepRollout
    scorer: TrajectoryScorer
    group_filter: GroupFilter | None = None
    free_cache: bool = False
    """Free the engine's KV cache while the models train."""
    weights: RewardWeightsConfig = field(default_factory=RewardWeightsConfig)
    """How the rewards of a conversation add up."""
    credit: str = AgentConfig.credit
    """What the sequences of an episode share (rollout.agent.credit)."""
    task_reward: bool = True
    """False: training samples are not scored, and their score is 0."""
    run_ahead: SampleQueue | None = None
    """None: a step samples when it begins, and trains when all of it is there."""
    ranks: Ranks = field(default_factory=Ranks)
    tensor_parallel: int = 1
    """Neighbouring ranks that sample the same prompts together."""

    _reports: list[ScoreReport] = field(default_factory=list)
    """Of the draws of this step."""
    _episodes: list[Episode] = field(default_factory=list)
    """Since `episode_metrics` was last called."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Around everything that samples."""
        self.engine.wake()
        yield
        if self.free_cache:
            self.engine.sleep()

    def collect(self, draw: Draw, prompts: int, step: int, record: StepRecord) -> list[Trajectory]:
        """The scored samples of `prompts` prompts, with all their sequences, in the order of the prompts."""
        self._reports = []
        ahead = self.run_ahead
        with self.awake(), nullcontext() if ahead is None else ahead.sampling_allowed():
            trajectories = self._collect(draw, prompts, step, record)
        record.add(self.episode_metrics())
        if ahead is not None:
            record.add(staleness(trajectories, step))
            record.add(ahead.metrics())
        if any(t.branches for t in trajectories):
            return rows_of_episodes(trajectories, self.credit)
        return trajectories

    def _collect(self, draw: Draw, prompts: int, step: int, record: StepRecord) -> list[Trajectory]:
        if self.group_filter is None:
            return self._sample_and_score(draw, prompts, step, 0, record)[1]
        return self._collect_filtered(self.group_filter, draw, prompts, step, record)

    def _collect_filtered(
        self, group_filter: GroupFilter, draw: Draw, prompts: int, step: int, record: StepRecord
    ) -> list[Trajectory]:
        """Dynamic sampling: draw until enough prompts pass the filter."""
        kept: list[Trajectory] = []
        groups: dict[int, None] = {}
        draws = 0
        drawn = 0
        empty = EmptyDraws(group_filter, prompts)
        while len(groups) < prompts:
            if group_filter.max_draws and draws >= group_filter.max_draws:
                raise ValueError(
                    f"After {draws} draws only {len(groups)} of {prompts} prompts had samples that disagree. "
                    "Raise algorithm.filter_groups.max_num_gen_batches or rollout.n, or use easier or harder "
                    "prompts."
                )
            count, fresh = self._sample_and_score(draw, 1, step, drawn, record)
            before = len(groups)
            for trajectory, keep in zip(fresh, group_filter.keep(fresh)):
                if keep:
                    kept.append(trajectory)
                    groups[trajectory.group] = None
            empty.count(count, len(groups) - before, fresh, found=len(groups))
            draws += 1
            drawn += count
        record.add({"train/num_gen_batches": draws, "train/filtered_groups": drawn - len(groups)})
        chosen = set(list(groups)[:prompts])
        return [t for t in kept if t.group in chosen]

    def _sample_and_score(
        self, draw: Draw, prompts: int, step: int, first: int, record: StepRecord
    ) -> tuple[int, list[Trajectory]]:
        """Draw at least `prompts` prompts: how many were drawn, and the scored samples of each. Groups are
        numbered from `first`."""
        with record.phase("gen"):
            count, samples = self._sample(draw, prompts, step, first)
        if unusable := count_unusable(samples.trajectories):
            earlier = record.metrics.get("data/unusable_samples", 0.0)
            record.add({"data/unusable_samples": earlier + unusable})
        if not self.task_reward:
            for t in samples.trajectories:
                t.score = None if t.finish == "error" else 0.0
            return count, samples.trajectories
        with record.phase("reward"):
            self._reports.append(self.score(samples.trajectories))
            if samples.greedy:
                record.add({"reward/baseline_failed": self.score(samples.greedy).failed})
        record.add(merge_score_metrics(self._reports, elapsed=sum))
        if samples.greedy:
            set_baselines(samples.trajectories, samples.greedy)
        return count, samples.trajectories

    def _sample(self, draw: Draw, prompts: int, step: int, first: int) -> tuple[int, Samples]:
        if self.run_ahead is not None:
            count, samples = self.run_ahead.take(draw, prompts, step, first)
        else:
            drawn, _ = draw_prompts(draw, prompts)
            count = len(drawn)
            samples = self.rollout.generate(list(enumerate(drawn, first)), step)
        self._episodes += samples.episodes
        return count, samples

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int, step: int, first: int = 0
    ) -> list[Trajectory]:
        """n unscored samples of each prompt, for validation. Groups are numbered from `first`."""
        samples = self.rollout.sampler.generate(list(enumerate(prompts, first)), sampling, n, step)
        self._episodes += samples.episodes
        return samples.trajectories

    def score(self, trajectories: Sequence[Trajectory]) -> ScoreReport:
        """Fill in scores, and add the rewards of tools and turns. A failed episode stays without a score."""
        finished = [t for t in trajectories if t.finish != "error"]
        if not self.weights.score:
            for t in finished:
                t.score = 0.0
        report = self.scorer.score(finished)
        for t in finished:
            weigh_rewards(t, self.weights)
        return report

    def episode_metrics(self) -> dict[str, float]:
        """The metrics of all agent episodes since the last call, of all ranks."""
        episodes: list[EpisodeFacts] = []
        if self.ranks.rank % self.tensor_parallel == 0:
            episodes = [EpisodeFacts.of(episode) for episode in self._episodes]
        self._episodes = []
        if self.ranks.world > 1:
            episodes = list(chain.from_iterable(self.ranks.all_gather_object(episodes)))
        return episode_metrics(episodes) if episodes else {}

    def close(self) -> None:
        """Stop background sampling, and close the scorer, the tools and the engine, each also if another one
        fails."""
        ended = self.run_ahead is None

        def close_engine() -> None:
            if ended:
                self.engine.close()
            else:  # the thread that hangs may hold a lock that closing waits for
                log.error("The rollout engine does not end what it is doing; it is left behind.")
                threading.Thread(target=self.engine.close, daemon=True).start()

        with ExitStack() as stack:
            stack.callback(close_engine)
            stack.callback(self.rollout.sampler.close)
            stack.callback(self.scorer.close)
            if self.run_ahead is not None:
                ended = self.run_ahead.close()


def draw_prompts(draw: Draw, prompts: int) -> tuple[list[Prompt], int]:
    """At least `prompts` prompts, and how many draws they took."""
    drawn: list[Prompt] = []
    draws = 0
    while len(drawn) < prompts:
        drawn += draw()
        draws += 1
    return drawn, draws


def count_unusable(trajectories: Sequence[Trajectory]) -> int:
    """Samples whose prompt cannot be made; ValueError if there are no others."""
    reasons = [t.prompt.unusable for t in trajectories if t.prompt.unusable]
    if reasons and len(reasons) == len(trajectories):
        raise ValueError(
            f"None of the {len(reasons)} samples of the step has a prompt. The first: {reasons[0]}"
        )
    return len(reasons)


def set_baselines(trajectories: Sequence[Trajectory], greedy: Sequence[Trajectory]) -> None:
    """The reward of the greedy response is the baseline of its prompt. A sample whose baseline failed loses
    its score, so that it does not count."""
    rewards = {t.group: t.reward for t in greedy}
    for t in trajectories:
        reward = rewards[t.group]
        t.baseline = reward or 0.0
        if reward is None:
            t.score = None


def weigh_rewards(trajectory: Trajectory, weights: RewardWeightsConfig) -> None:
    """Scale the score and the turn rewards, and add the final rewards of tools to the score."""
    if trajectory.score is None:
        return
    tools = sum(trajectory.extras.get("tool_rewards", {}).values())
    trajectory.score = weights.score * trajectory.score + weights.tool * tools
    if trajectory.unpenalized is not None:
        trajectory.unpenalized = weights.score * trajectory.unpenalized + weights.tool * tools
    for branch in trajectory.branches:
        if branch.score is not None:  # of another player
            branch.score *= weights.score
    for row in (trajectory, *trajectory.branches):
        row.turn_rewards = {place: weights.turn * reward for place, reward in row.turn_rewards.items()}


# --- validation ---------------------------------------------------------------------------------------------


@dataclass
class Validator:
    """The held-out prompts, answered, scored and summarised per data source."""

    loader: Loader
    collector: Collector
    """Shares the engine and the scorer with training."""
    sampling: Sampling
    samples_per_prompt: int
    best_of_n: str = "exact"
    """How best@n is estimated: "exact" or "bootstrap"."""

    def run(self, step: int, record: StepRecord) -> list[Trajectory]:
        """Answer every validation prompt and add val-core/... and val-aux/... to the record."""
        self.loader.rewind()  # the random stream of a sample depends on its place in the order
        trajectories: list[Trajectory] = []
        groups = 0
        with self.collector.awake():
            for prompts in self.loader:
                trajectories += self.collector.generate(
                    prompts, self.sampling, self.samples_per_prompt, step, groups
                )
                groups += len(prompts)
        report = self.collector.score(trajectories)
        record.add(report.metrics, prefix="val-aux/")
        record.add(self.collector.episode_metrics(), prefix="val-aux/")
        record.add(summarise(trajectories, self.best_of_n))
        return trajectories
