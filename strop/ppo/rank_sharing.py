"""Sampling and scoring shared between ranks; not used when one process trains alone.

Whole prompts are sharded over the ranks. Every rank samples and scores its shard, and an all-gather gives
every rank the results of all, in the order that a single rank would produce.
"""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from strop.data.balance import balanced_partitions
from strop.ppo.collect import TrajectoryScorer
from strop.ppo.sampler import NumberedPrompt, Sampler, Samples
from strop.ranks import Ranks, SharedFailure
from strop.rewards.scorer import BrokenScorer, ScoreReport, merge_score_metrics
from strop.rollout.base import Sampling
from strop.types import Images, Prompt, TokenArrays, Trajectory

NOT_PACKED = ("prompt", *TokenArrays._fields)
"""Fields of a trajectory that are not sent one by one: tokens travel as arrays, and prompts, which may have
images, are known to every rank."""
_calls = itertools.count()
"""Numbers the calls of `RankSampler.generate`. All ranks call it equally often, so numbers agree."""


@dataclass
class RankSampler:
    """Shares the prompts of each call between the ranks, and gathers the trajectories of all of them."""

    sampler: Sampler
    ranks: Ranks
    tensor_parallel: int = 1
    """Neighbouring ranks that sample the same prompts together, each with a part of every weight matrix."""
    max_num_seqs: int = 0
    """Samples that the engine runs at once. Prompts beyond them may be sampled by any rank, if the engine
    takes requests while it runs. 0: every rank samples its own shard."""

    def generate(self, prompts: Sequence[NumberedPrompt], sampling: Sampling, n: int, step: int) -> Samples:
        """n samples of each prompt, the same on every rank; episodes are those of this rank."""
        shards = shard_prompts(prompts, self.ranks, self.tensor_parallel)
        call = next(_calls)
        mine = shards[self.ranks.rank // self.tensor_parallel]
        waiting = None
        if self._can_share_waiting(shards, n):
            limit = self.max_num_seqs // n
            beyond = [shard[limit:] for shard in shards]
            if any(beyond):
                mine = mine[:limit]
                waiting = WaitingPrompts(self.ranks, str(call), beyond).claim()
        local = self.ranks.run_or_raise_on_all(
            lambda: self.sampler.generate(mine, sampling, n, step, waiting),
            "sampling",
            can_drop=self.tensor_parallel == 1,  # with more, ranks sample by collective operations
        )
        gathered = all_gather_trajectories(
            local.trajectories, dict(prompts), self.ranks, self.tensor_parallel
        )
        return Samples(gathered, episodes=local.episodes)

    def close(self) -> None:
        self.sampler.close()

    def _can_share_waiting(self, shards: Sequence[Sequence[NumberedPrompt]], n: int) -> bool:
        if self.max_num_seqs < n or self.tensor_parallel > 1:
            return False
        for shard in shards:
            for _, prompt in shard:
                if not self.sampler.is_single_turn(prompt):
                    return False
        return True


@dataclass(frozen=True)
class WaitingPrompts:
    """Prompts that do not fit into the engine of their rank at once. Any rank with free rows may claim one.

    It does not matter which rank samples a prompt, because each prompt has its own random stream.
    """

    ranks: Ranks
    name: str
    """The same on all ranks, and different for every call."""
    by_rank: Sequence[Sequence[NumberedPrompt]]

    def claim(self) -> Iterator[NumberedPrompt]:
        """Prompts for this rank: first its own in order, then those of other ranks from the end."""
        world = self.ranks.world
        rank = self.ranks.rank
        for offset in range(world):
            owner = (rank + offset) % world
            shard = self.by_rank[owner]
            for numbered in shard if owner == rank else reversed(shard):
                if self.ranks.first_to_claim(f"{self.name}/{numbered[0]}"):
                    yield numbered


def shard_prompts(
    prompts: Sequence[NumberedPrompt], ranks: Ranks, tensor_parallel: int = 1
) -> list[list[NumberedPrompt]]:
    """The prompts of each group of `tensor_parallel` ranks: equal counts, give or take one, and about equal
    numbers of tokens.

    Depends on the prompts alone, so a resumed run shards them alike.
    """
    groups = ranks.world // tensor_parallel
    if ranks.world == 1 or not prompts:
        return [list(prompts) for _ in range(groups)]
    ranks.check_equal("the prompts of this step (data.train_files)", prompt_checksum(prompts))
    even = len(prompts) // groups * groups
    shards: list[list[NumberedPrompt]] = [[] for _ in range(groups)]
    if even:
        lengths = [len(prompt.ids) for _, prompt in prompts[:even]]
        for shard, places in zip(shards, balanced_partitions(lengths, groups, equal_size=True)):
            shard.extend(prompts[place] for place in places)
    for shard, numbered in zip(shards, prompts[even:]):
        shard.append(numbered)
    return shards


def prompt_checksum(prompts: Sequence[NumberedPrompt]) -> str:
    """Differs when two ranks read different data."""
    code = 0
    for _, prompt in prompts:
        code = zlib.crc32(array("q", [prompt.index, *prompt.ids]), code)
    return f"rows {[prompt.index for _, prompt in prompts[:4]]}... (checksum {code:08x})"


def all_gather_trajectories(
    local: list[Trajectory], prompts: Mapping[int, Prompt], ranks: Ranks, tensor_parallel: int = 1
) -> list[Trajectory]:
    """The trajectories of all ranks, sorted by group. Of ranks that sample together, the first one sends."""
    if ranks.world == 1:
        return local
    sends = ranks.rank % tensor_parallel == 0
    gathered: list[Trajectory] = []
    for packed in ranks.all_gather_object(PackedTrajectories.pack(local if sends else [], prompts)):
        gathered.extend(packed.unpack(prompts))
    assert {t.group for t in gathered} == set(prompts), "every prompt is sampled by some rank"
    return sorted(gathered, key=lambda t: t.group)


@dataclass(frozen=True)
class PackedTrajectories:
    """Trajectories in the form that is sent between ranks.

    Tokens are three arrays and stay arrays after they are received: every rank receives the tokens of all
    ranks, so work per token on them would be done for the whole cluster.
    """

    rest: list[dict[str, object]]
    """Everything but tokens and prompts."""
    lengths: list[int]
    tokens: TokenArrays
    """The tokens of all trajectories, concatenated."""
    prompt_ids: list[list[int] | None]
    """Of prompts that an agent loop replaced."""
    images: list[Images]
    """Images that tools returned; those of prompts are known to every rank."""

    @staticmethod
    def pack(trajectories: Sequence[Trajectory], prompts: Mapping[int, Prompt]) -> PackedTrajectories:
        arrays = [t.arrays for t in trajectories]
        names = [field.name for field in fields(Trajectory) if field.name not in NOT_PACKED]
        columns = zip(TokenArrays.of([], [], []), *arrays)
        return PackedTrajectories(
            rest=[{name: getattr(t, name) for name in names} for t in trajectories],
            lengths=[len(one.mask) for one in arrays],
            tokens=TokenArrays(*(np.concatenate(column) for column in columns)),
            prompt_ids=[_replaced_ids(t, prompts) for t in trajectories],
            images=[t.prompt.images[len(prompts[t.group].images) :] for t in trajectories],
        )

    def unpack(self, prompts: Mapping[int, Prompt]) -> Iterator[Trajectory]:
        start = 0
        rows = zip(self.rest, self.lengths, self.prompt_ids, self.images, strict=True)
        for rest, length, ids, images in rows:
            group = rest["group"]
            assert isinstance(group, int)
            tokens = TokenArrays(*(column[start : start + length] for column in self.tokens))
            prompt = prompts[group]
            if ids is not None:
                prompt = replace(prompt, ids=ids)
            if images:
                prompt = replace(prompt, images=prompt.images + images)
            yield ReceivedTrajectory.of(tokens, {**rest, "prompt": prompt})
            start += length


def _replaced_ids(trajectory: Trajectory, prompts: Mapping[int, Prompt]) -> list[int] | None:
    known = prompts[trajectory.group].ids
    ids = trajectory.prompt.ids
    if ids is known or ids == known:
        return None
    return ids


class ReceivedTrajectory(Trajectory):  # noqa: PLW1641 -- like every trajectory it has no hash
    """A trajectory whose tokens are arrays. Lists of tokens are made when they are first read, and count from
    then on, because the reader may change them."""

    _received: TokenArrays

    @classmethod
    def of(cls, tokens: TokenArrays, rest: Mapping[str, object]) -> ReceivedTrajectory:
        received = cls.__new__(cls)
        vars(received).update(rest, _received=tokens)
        return received

    def __getattr__(self, name: str) -> list[int] | list[float]:
        """Called for attributes that do not exist yet."""
        if name not in TokenArrays._fields:
            raise AttributeError(name)
        values: list[int] | list[float] = getattr(self._received, name).tolist()
        vars(self)[name] = values
        return values

    @property
    def sampled(self) -> int:
        return int(np.count_nonzero(self.arrays.mask))

    @property
    def arrays(self) -> TokenArrays:
        untouched = vars(self).keys().isdisjoint(TokenArrays._fields)
        return self._received if untouched else super().arrays

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trajectory):
            return False
        compared = [field.name for field in fields(Trajectory) if field.compare]
        return all(getattr(self, name) == getattr(other, name) for name in compared)


@dataclass
class RankScorer:
    """Shares scoring between ranks. Samples of one prompt are scored by one rank, since some scorers compare
    them."""

    scorer: TrajectoryScorer
    ranks: Ranks

    def score(self, trajectories: Sequence[Trajectory]) -> ScoreReport:
        """Fill in `score` and `extras` of all trajectories, on every rank."""
        mine = self._places_of_this_rank(trajectories)
        shard = [trajectories[place] for place in mine]
        report, failure = self.ranks.run_or_raise_on_all(lambda: self._try(shard), "scoring", can_drop=True)
        scores = [(place, t.score, t.unpenalized, t.turn_rewards, t.extras) for place, t in zip(mine, shard)]
        gathered = self.ranks.all_gather_object((scores, report, failure))
        failures = [reason for _, _, reason in gathered if reason is not None]
        if failures and all(reason is not None or not scores for scores, _, reason in gathered):
            raise BrokenOnAllRanks(*failures[0])
        for scores, _, _ in gathered:
            for place, score, unpenalized, turn_rewards, extras in scores:
                trajectory = trajectories[place]
                trajectory.score = score
                trajectory.unpenalized = unpenalized
                trajectory.turn_rewards = turn_rewards
                trajectory.extras = extras
        return merge_reports([report for _, report, _ in gathered])

    def close(self) -> None:
        self.scorer.close()

    def _places_of_this_rank(self, trajectories: Sequence[Trajectory]) -> list[int]:
        order: dict[int, int] = {}
        for t in trajectories:
            order.setdefault(t.group, len(order))
        world = self.ranks.world
        rank = self.ranks.rank
        return [place for place, t in enumerate(trajectories) if order[t.group] % world == rank]

    def _try(self, shard: Sequence[Trajectory]) -> tuple[ScoreReport, tuple[str, int] | None]:
        """All samples of one rank may fail by chance. The scorer is broken only if this happens on all
        ranks."""
        try:
            return self.scorer.score(shard), None
        except BrokenScorer as problem:
            return problem.report, (str(problem), problem.exit_code)


class BrokenOnAllRanks(SharedFailure, BrokenScorer):
    """No rank could score any sample."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def merge_reports(reports: Sequence[ScoreReport]) -> ScoreReport:
    """One report of what several ranks scored at the same time."""
    return replace(
        reports[0],
        samples=sum(report.samples for report in reports),
        failed=sum(report.failed for report in reports),
        timed_out=sum(report.timed_out for report in reports),
        retried=sum(report.retried for report in reports),
        seconds=max(report.seconds for report in reports),
        metrics=merge_score_metrics(reports, elapsed=max),
    )
