"""Over-sampling (rollout.over_sampling): a step starts more prompts than it trains on. It uses the prompts
whose samples finish first; the others continue in the next step, with its weights.

No prompt is dropped and none is trained twice. Unfinished prompts are admitted before new ones, and a step
waits for a prompt that has reached the age limit. With the native engine, only the seeds determine which
prompts a step uses and where the others are interrupted.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from strop.data.loader import Loader
from strop.ppo.collect import Draw
from strop.ppo.open_groups import OpenGroup, PackedSamples
from strop.ppo.rank_sharing import shard_prompts
from strop.ppo.sampler import NumberedPrompt, Sampler, Samples, StepRollout, single_turn_trajectory
from strop.ranks import Ranks
from strop.rollout.base import Request
from strop.rollout.first_finished import generate_until
from strop.types import Prompt, Trajectory

log = logging.getLogger(__name__)


@dataclass
class OpenPrompts:
    """A loader, and the prompts that were drawn from it and not trained on yet.

    A state has the position before the oldest draw that is not used up. A resumed run repeats these draws,
    leaves out the prompts that were trained on, and gives the others the tokens that they had.
    """

    loader: Loader[Prompt]
    samples_per_prompt: int
    response_length: int
    """Maximum tokens of a sample."""
    groups: list[OpenGroup] = field(default_factory=list)
    """In the order in which they were drawn."""
    asked_below: int = 0
    """Groups with a lower number were given to the engine in an earlier step."""
    _draws: deque[tuple[dict[str, Any], int]] = field(default_factory=deque)
    """The state before each draw that is not used up, and the number of its first prompt."""
    _drawn: int = 0
    """Prompts drawn so far."""

    def draw(self) -> list[Prompt]:
        state = copy.deepcopy(self.loader.state_dict())
        prompts = self.loader.draw()
        self._draws.append((state, self._drawn))
        for number, prompt in enumerate(prompts, self._drawn):
            self.groups.append(OpenGroup(number, prompt))
        self._drawn += len(prompts)
        return prompts

    def take(self, groups: Sequence[OpenGroup]) -> None:
        """These groups are trained on now."""
        taken = {group.number for group in groups}
        self.groups = [group for group in self.groups if group.number not in taken]
        oldest = min((group.number for group in self.groups), default=self._drawn)
        while len(self._draws) > 1 and self._draws[1][1] <= oldest:
            self._draws.popleft()
        if not self.groups:
            self._draws.clear()

    @property
    def epoch(self) -> int:
        return int(self._draws[0][0]["epoch"]) if self._draws else self.loader.epoch

    def state_dict(self) -> dict[str, Any]:
        first = self._draws[0][1] if self._draws else self._drawn
        state = dict(self._draws[0][0]) if self._draws else self.loader.state_dict()
        groups = [group.state_dict() for group in self.groups]
        saved = {
            "first": first,
            "draws": len(self._draws),
            "drawn": self._drawn,
            "asked_below": self.asked_below,
            "groups": groups,
        }
        return {**state, "open": saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.groups = []
        self._draws.clear()
        self.loader.load_state_dict(state)
        saved = state.get("open")
        if saved is None:  # the checkpoint of a run without over-sampling
            return
        self._drawn = saved["first"]
        self.asked_below = saved["asked_below"]
        # Draws may have another size now. Checkpoints of earlier versions only have the number of draws.
        drawn = saved.get("drawn", saved["first"] + saved["draws"] * self.loader.batch_size)
        while self._drawn < drawn:
            self.draw()
        by_number = {group.number: group for group in self.groups}
        new = [group for group in self.groups if group.number >= drawn]
        self.groups = []
        restarted = 0
        for one in saved["groups"]:
            group = by_number[one["number"]]
            if one.get("row", group.prompt.index) != group.prompt.index:
                raise ValueError(
                    f"The checkpoint has an unfinished prompt of row {one['row']}, where row "
                    f"{group.prompt.index} is drawn now. Was data.train_batch_size or gen_batch_size "
                    "changed? At the end of an epoch other rows are left out then. Restore it, or "
                    "begin a new run (trainer.resume_mode=disable)."
                )
            group.load_state_dict(one)
            if not group.fits(self.samples_per_prompt, self.response_length):
                group.restart()
                restarted += 1
            self.groups.append(group)
        self.groups += new
        if restarted:
            log.warning(
                "rollout.n or data.max_response_length was changed: %d prompts with saved samples are "
                "sampled again.",
                restarted,
            )

    def update(self, trajectories: list[Trajectory]) -> None:
        self.loader.update(trajectories)

    def close(self) -> None:
        self.loader.close()


@dataclass
class OverSampling:
    """Samples more prompts than a step needs, and takes the first that finish."""

    sampler: Sampler
    """Of this rank alone."""
    rollout: StepRollout
    """Samples greedy baselines, shared between ranks."""
    pool: OpenPrompts
    factor: float
    """Prompts that run at once, as a multiple of those that are taken."""
    max_age: int
    """Steps after which a prompt is waited for."""
    last_step: int
    calls_back: bool
    """The engine calls `Request.on_done`."""
    ranks: Ranks = field(default_factory=Ranks)
    tensor_parallel: int = 1
    """Neighbouring ranks that sample the same prompts together."""
    _step: int = 0
    _carried: list[int] = field(default_factory=list)
    """Age in steps of each carried prompt that the step took."""

    @contextmanager
    def sampling_allowed(self) -> Iterator[None]:
        """Nothing is sampled outside of `take`."""
        yield

    def take(self, draw: Draw, prompts: int, step: int, first: int) -> tuple[int, Samples]:
        """At least `prompts` prompts, in whole draws as without over-sampling: their count, and their samples
        with groups numbered from `first`."""
        batch = self.pool.loader.batch_size
        wanted = -(-prompts // batch) * batch
        running = wanted if step >= self.last_step else round(self.factor * wanted)
        while len(self.pool.groups) < running:
            draw()
        started = self.pool.groups[:running]
        ready = [group for group in started if group.done][:wanted]
        taken = ready + self._sample(started, wanted - len(ready), step)
        taken.sort(key=lambda group: group.number)
        assert len(taken) == wanted, (len(taken), wanted)
        self._count(taken, step)
        self.pool.take(taken)
        self.pool.asked_below = max(self.pool.asked_below, started[-1].number + 1)
        for group in self.pool.groups:
            group.pack()
        return wanted, self._samples_of(taken, step, first)

    def metrics(self) -> dict[str, float]:
        """What the step that was sampled last took from earlier steps and left for later ones."""
        waiting = [group for group in self.pool.groups if group.step]
        ages = self._carried
        return {
            "staleness/prompts_ahead": len(waiting),
            "over_sampling/carried_prompts": len(ages),
            "over_sampling/carried_age_mean": sum(ages) / len(ages) if ages else 0.0,
            "over_sampling/carried_age_max": max(ages, default=0),
            "over_sampling/unfinished_prompts": sum(not group.done for group in waiting),
            "over_sampling/unfinished_tokens": sum(group.tokens for group in waiting if not group.done),
        }

    def close(self) -> bool:
        """Nothing runs in the background."""
        return True

    def _count(self, taken: Sequence[OpenGroup], step: int) -> None:
        if step != self._step:
            self._step = step
            self._carried = []
        for group in taken:
            if group.step < step:
                self._carried.append(step - group.step)

    def _sample(self, started: Sequence[OpenGroup], wanted: int, step: int) -> list[OpenGroup]:
        """Sample until `wanted` groups are finished on all ranks together; returns these. `started`: all
        groups that run."""
        due: list[NumberedPrompt] = []
        others: list[NumberedPrompt] = []
        for group in started:
            if not group.done:
                is_due = group.step > 0 and step - group.step >= self.max_age and len(due) < wanted
                (due if is_due else others).append((group.number, group.prompt))
        rank = self.ranks.rank // self.tensor_parallel
        shards = self.ranks.world // self.tensor_parallel
        # Each rank waits for its share. Shares of prompts that are due, and of others, are equal but for one.
        due_here = self._shard(due)[rank]
        others_here = self._shard(others)[rank]
        share = -(-(wanted - len(due) - rank) // shards)
        by_number = {group.number: group for group in started}
        mine = [by_number[number] for number, _ in (*due_here, *others_here)]
        must = {number for number, _ in due_here}
        finished = self.ranks.run_or_raise_on_all(
            lambda: self._sample_here(mine, must, len(must) + share, step),
            "sampling",
            can_drop=self.tensor_parallel == 1,  # with more, ranks sample by collective operations
        )
        taken = [by_number[number] for number in finished]
        return self._exchange(mine, taken, by_number)

    def _shard(self, prompts: Sequence[NumberedPrompt]) -> list[list[NumberedPrompt]]:
        return shard_prompts(prompts, self.ranks, self.tensor_parallel)

    def _sample_here(self, mine: list[OpenGroup], must: set[int], wanted: int, step: int) -> list[int]:
        """Sample the groups of this rank until `wanted` of them are finished, those that `must` among them;
        returns the numbers of these."""
        requests: list[Request] = []
        places: list[tuple[OpenGroup, int | None]] = []
        """The group of each request, and the sample that it continues; None: all samples, from the
        beginning."""
        for group in self._admission_order(mine):
            if not group.step:
                group.step = step
            if not self.sampler.is_single_turn(group.prompt):
                raise ValueError(
                    f"Row {group.prompt.index} of {group.prompt.data_source} is a conversation (agent "
                    f"{group.prompt.agent_name!r}), which rollout.over_sampling={self.factor:g} cannot cut "
                    "and continue. Set rollout.over_sampling=1, or trainer.async_training.partial_rollout."
                )
            for request, sample in self._requests(group):
                requests.append(request)
                places.append((group, sample))
        missing = {group.number: 0 for group in mine}
        for group, _ in places:
            missing[group.number] += 1
        finished: list[int] = []

        def enough(index: int) -> bool:
            number = places[index][0].number
            missing[number] -= 1
            if missing[number] == 0:
                finished.append(number)
            return len(finished) >= wanted and must.issubset(finished)

        if wanted > 0:
            results = generate_until(
                self.sampler.engine, requests, self.rollout.sampling, enough, calls_back=self.calls_back
            )
            for (group, sample), completions in zip(places, results, strict=True):
                group.add(completions, sample)
        for group in mine:
            group.forget_if_empty()
        early = [number for number in finished if number not in must]
        return [*must, *early[: wanted - len(must)]]

    def _admission_order(self, mine: list[OpenGroup]) -> list[OpenGroup]:
        """Prompts that were in the engine in an earlier step first, also those that only waited there."""
        earlier = [group for group in mine if group.number < self.pool.asked_below]
        new = [group for group in mine if group.number >= self.pool.asked_below]
        if self.rollout.lengths is not None:
            new = self.rollout.lengths.longest_first(new, lambda group: group.prompt)
        return earlier + new

    def _requests(self, group: OpenGroup) -> Iterator[tuple[Request, int | None]]:
        sampling = self.rollout.sampling
        n = self.rollout.samples_per_prompt
        whole = self.sampler.request((group.number, group.prompt), sampling, n, group.step)
        if not group.samples:
            yield whole, None
            return
        for sample in group.unfinished():
            yield (
                group.continued(whole, sampling, sample, same_stream=self.sampler.engine.same_stream),
                sample,
            )

    def _exchange(
        self, mine: Sequence[OpenGroup], taken: list[OpenGroup], by_number: dict[int, OpenGroup]
    ) -> list[OpenGroup]:
        """Give every rank the samples of all, and which groups are taken. Of ranks that sample together, the
        first one sends."""
        if self.ranks.world == 1:
            return taken
        sends = self.ranks.rank % self.tensor_parallel == 0
        packed = [(g.number, g.step, PackedSamples.pack(g.samples)) for g in mine] if sends else []
        chosen = [group.number for group in taken] if sends else []
        all_taken: list[OpenGroup] = []
        for sent, numbers in self.ranks.all_gather_object((packed, chosen)):
            for number, step, samples in sent:
                by_number[number].step = step
                by_number[number].samples = samples.unpack()
            all_taken += [by_number[number] for number in numbers]
        return all_taken

    def _samples_of(self, taken: Sequence[OpenGroup], step: int, first: int) -> Samples:
        trajectories: list[Trajectory] = []
        for number, group in enumerate(taken, first):
            for completion in group.samples:
                trajectories.append(single_turn_trajectory(group.prompt, number, completion))
        if not self.rollout.greedy_baseline:
            return Samples(trajectories)
        prompts = [(number, group.prompt) for number, group in enumerate(taken, first)]
        greedy = replace(self.rollout.sampling, temperature=0.0)
        baseline = self.rollout.sampler.generate(prompts, greedy, 1, step)
        return Samples(trajectories, baseline.trajectories)
