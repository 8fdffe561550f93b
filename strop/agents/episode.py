"""One conversation on its way, token by token.

    said = await episode.answer()                                  # the policy speaks; its ids are kept as sampled, mask 1
    episode.tell({"role": "tool", "content": "4"})                 # the environment speaks; mask 0
    episode.reward(0.5)                                            # for the answer before, on its last token

A loop calls these in any order it likes; the episode keeps ids, mask, log-probs and turns in step, and spends one budget:
`data.max_response_length` tokens over all turns.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strop.agents.world import World
from strop.rollout.base import Request, Sampling
from strop.rollout.partial import merged, stretches, up_to
from strop.types import Prompt, Trajectory, Turn


@dataclass(frozen=True)
class Said:
    """An answer of the policy."""

    text: str
    """With special tokens, which some formats of tool calls are made of; without the token that ended it."""
    finish: str
    """stop | length | abort."""


class EpisodeError(ValueError):
    """Why an episode cannot go on. Its sample is masked and counted; the others go on."""


class Episode:
    def __init__(self, world: World, prompt: Prompt, sampling: Sampling, *, seeds: Sequence[int], group: int = 0) -> None:
        """Answer number t draws from the random stream of `seeds` and t, whatever else is in the batch."""
        self.world, self.prompt, self.sampling, self.group = world, prompt, sampling, group
        self.messages: list[dict[str, Any]] = [dict(message) for message in prompt.messages]
        """The conversation so far, as interactions read it."""
        self.tools: Sequence[Mapping[str, Any]] | None = None
        """Schemas that the template listed in the prompt."""
        self.score: float | None = None
        """Set it to score the whole conversation here; no scorer is asked then."""
        self.extras: dict[str, Any] = {}
        """Whatever should be seen in dumps, validation metrics and by the scorer."""
        self.counts: Counter[str] = Counter()
        """What happened, for the metrics of the step."""
        self.seconds = {"generate_sequences": 0.0, "tool_calls": 0.0}
        self.stopped = ""
        """Why the conversation ended, where it was not simply over."""
        self.error: Exception | None = None
        self._seeds = tuple(seeds)
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._log_probs: list[float] = []
        self._turns: list[Turn] = []
        self._rewards: dict[int, float] = {}
        self._finish = "stop"
        self._versions: list[tuple[int, int]] = []

    # --- what a loop may ask ---------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Tokens that are left of the budget."""
        limits = self.world.limits
        return min(limits.response_length, limits.longest - len(self.prompt.ids)) - len(self._ids)

    def __len__(self) -> int:
        """Tokens after the prompt."""
        return len(self._ids)

    @property
    def assistant_turns(self) -> int:
        return sum(turn.role == "assistant" for turn in self._turns)

    @property
    def user_turns(self) -> int:
        """Turns of tools and users."""
        return len(self._turns) - self.assistant_turns

    def may_go_on(self) -> bool:
        """Whether another round is allowed; if not, `stopped` says why."""
        limits = self.world.limits
        if self.stopped:
            return False
        if self.room < 1:
            self._finish = self.stopped = "length"
        elif limits.max_assistant_turns is not None and self.assistant_turns >= limits.max_assistant_turns:
            self.stopped = "max_assistant_turns"
        elif limits.max_user_turns is not None and self.user_turns >= limits.max_user_turns:
            self.stopped = "max_user_turns"
        return not self.stopped

    # --- what a loop may do ----------------------------------------------------------------------------------------------

    def open(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Begin with another prompt than the row's, for loops that explain themselves to the model."""
        assert not self._turns, "a prompt cannot change after the first answer"
        ids = self.world.chat.ids(messages, tools=tools)
        if len(ids) > self.world.limits.prompt_length:
            raise EpisodeError(
                f"with what the agent loop adds, the prompt has {len(ids)} tokens, over data.max_prompt_length="
                f"{self.world.limits.prompt_length}. Raise it, or drop the row."
            )
        self.messages, self.tools = [dict(message) for message in messages], tools
        self.prompt = replace(self.prompt, ids=ids, messages=self.messages)

    async def answer(self, *, until: str | None = None, max_tokens: int | None = None) -> Said:
        """Let the policy speak. An answer that comes to the text `until` is cut before it."""
        if self._finish != "stop" or self.room < 1:
            raise EpisodeError(f"no room for another answer: {len(self._ids)} tokens are spent; ask may_go_on() first.")
        room = self.room if max_tokens is None else min(self.room, max_tokens)
        seed = self.world.seed(*self._seeds, self.assistant_turns)
        request = Request([*self.prompt.ids, *self._ids], seed=seed, max_tokens=room)
        start = time.perf_counter()
        [completion] = await self.world.engine.agenerate(request, self.sampling)
        self.seconds["generate_sequences"] += time.perf_counter() - start
        if completion.finish == "error":
            raise EpisodeError(f"the engine refused: {completion.error}.")
        kept = len(completion.ids) if until is None else self._before(list(completion.ids), until)
        ids = list(completion.ids[:kept])
        if not ids:
            raise EpisodeError(f"an answer without a single token (finish={completion.finish}).")
        self._append("assistant", ids, list(completion.log_probs[:kept]))
        self._versions = merged([*self._versions, *up_to(stretches(completion), kept)])
        finish = completion.finish if kept == len(completion.ids) else "stop"
        if finish != "stop" and not (finish == "length" and self.room > 0):
            self._finish = self.stopped = finish
        said = ids[:-1] if ids[-1] in self.sampling.stop_ids else ids
        text, content = self.world.texts(said)
        self.messages.append({"role": "assistant", "content": content})
        return Said(text, finish)

    def tell(self, *messages: Mapping[str, Any]) -> bool:
        """Append what tools or a user said and open the next answer; False, and nothing appended, when it does not fit."""
        assert self._turns and self._turns[-1].role == "assistant", "the policy speaks first, and after each tell()"
        ids = self.world.rendering.after(self.messages[:-1], messages, last_id=self._ids[-1], tools=self.tools)
        if len(ids) >= self.room:
            self._finish = self.stopped = "length"
            return False
        self._append(str(messages[0]["role"]), ids, None)
        self.messages += [dict(message) for message in messages]
        return True

    def reward(self, amount: float) -> None:
        """A reward for the latest answer; it stands on the last token that was sampled."""
        if not math.isfinite(amount):
            raise EpisodeError(f"a reward of {amount} for turn {self.assistant_turns} is not a number to learn from.")
        place = max(turn.end for turn in self._turns if turn.role == "assistant") - 1
        self._rewards[place] = self._rewards.get(place, 0.0) + float(amount)

    async def waiting(self, work: Any) -> Any:
        """Await something of the environment; its time counts as that of tools."""
        start = time.perf_counter()
        try:
            return await work
        finally:
            self.seconds["tool_calls"] += time.perf_counter() - start

    # --- what comes of it ------------------------------------------------------------------------------------------------

    def trajectory(self) -> Trajectory:
        """The sample to train on; a failed episode has finish=error."""
        made = Trajectory(
            prompt=self.prompt,
            group=self.group,
            response=self._ids,
            mask=self._mask,
            log_probs=self._log_probs,
            finish="error" if self.error is not None else self._finish,
            version=max((version for version, _ in self._versions), default=0),
            versions=self._versions if len(self._versions) > 1 else [],
            num_turns=1 + len(self._turns),
            score=None if self.error is not None else self.score,
            turn_rewards=self._rewards,
            extras={**self.extras, **({"stopped": self.stopped} if self.stopped else {})},
            turns=self._turns,
        )
        check_exact(made)
        return made

    def _append(self, role: str, ids: Sequence[int], log_probs: Sequence[float] | None) -> None:
        start = len(self._ids)
        self._ids += ids
        self._mask += [int(log_probs is not None)] * len(ids)
        self._log_probs += log_probs if log_probs is not None else [0.0] * len(ids)
        self._turns.append(Turn(role, start, len(self._ids)))

    def _before(self, ids: list[int], until: str) -> int:
        """How many ids stand before `until` begins; all where it does not occur, or nothing stands before it."""
        decode = self.world.chat.tokenizer.decode
        place = str(decode(ids, skip_special_tokens=False)).find(until)
        low, high = 0, len(ids)
        while place >= 0 and high - low > 1:
            middle = (low + high) // 2
            fits = len(decode(ids[:middle], skip_special_tokens=False)) <= place
            low, high = (middle, high) if fits else (low, middle)
        return low or len(ids)


def check_exact(trajectory: Trajectory) -> None:
    """Turns make up the response without gap; exactly the assistant's tokens are sampled ones; rewards stand on their ends."""
    place = 0
    for turn in trajectory.turns:
        assert turn.start == place < turn.end, f"turn {turn} does not follow token {place}"
        sampled = int(turn.role == "assistant")
        assert trajectory.mask[turn.start : turn.end] == [sampled] * (turn.end - turn.start), f"mask of {turn} is not {sampled}"
        assert sampled or not any(trajectory.log_probs[turn.start : turn.end]), f"{turn} was not sampled, but has log-probs"
        place = turn.end
    assert place == len(trajectory.response), f"{len(trajectory.response) - place} tokens belong to no turn"
    ends = {turn.end - 1 for turn in trajectory.turns if turn.role == "assistant"}
    assert set(trajectory.turn_rewards) <= ends, "a reward stands inside a turn"


async def within(work: Any, seconds: float, what: str) -> Any:
    """Await `work`; late is an EpisodeError that names it."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError as error:
        raise EpisodeError(f"{what} did not answer within {seconds:g} seconds (multi_turn.call_timeout).") from error
