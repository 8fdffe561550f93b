"""A model that answers rows, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from strop.agents.build import Cast
from strop.agents.episode import Episode
from strop.agents.runner import EpisodeRunner
from strop.config.engine import holds_weights
from strop.config.schema.inference import Generation
from strop.data.chat import Chat
from strop.data.prompts import PromptDataset, truncate
from strop.data.schema import Keys
from strop.models.build import build_policy, compute_dtype
from strop.rollout.base import Request
from strop.run.parts import Parts
from strop.trainer.build import engine_for, longest, sampling_for, tokenizer_of
from strop.trainer.generation_agents import converse, said
from strop.trainer.generation_input import Questions
from strop.trainer.seeds import stream_seed
from strop.types import Prompt

Value = list[str] | dict[str, str]
"""The answers to a row, or {"error": why there are none}."""


@dataclass
class Count:
    """What a batch of rows gave."""

    rows: int = 0
    responses: int = 0
    tokens: int = 0
    cut_prompts: int = 0
    """Prompts over rollout.prompt_length, of which the end was kept."""
    cut_responses: int = 0
    """Responses that reached rollout.response_length."""

    def __add__(self, other: Count) -> Count:
        return Count(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


class Answerer:
    """A model that answers rows."""

    def __init__(self, config: Generation, questions: Questions, device: Any):
        rollout = config.rollout
        self.config = config
        self.tokenizer = tokenizer_of(config.model)
        chat = Chat(
            self.tokenizer,
            kwargs=dict(config.data.apply_chat_template_kwargs),
            plain=not config.data.apply_chat_template,
        )
        key = "prompt" if config.data.benchmark else config.data.prompt_key
        self.cast = Cast(rollout, chat)
        listing = self.cast.listing()
        self.prompts = PromptDataset(questions.rows, chat, keys=Keys(prompt=key), max_prompt_length=1 << 40, listing=listing)
        name = ("bfloat16" if device.type == "cuda" else "float32") if rollout.dtype == "auto" else rollout.dtype
        dtype = compute_dtype(name, device)
        model = build_policy(config.model, dtype=dtype).requires_grad_(False).eval()
        if not holds_weights(rollout):
            model = model.to(device)
        self.engine = engine_for(rollout, model)
        self.sampling = sampling_for(rollout, self.tokenizer, model)
        self.longest = longest(rollout)
        self._runner: EpisodeRunner | None = None

    def answer(self, rows: Sequence[int]) -> tuple[dict[int, Value], Count]:
        self.engine.wake()
        count = Count(rows=len(rows))
        values: dict[int, Value] = {}
        requests: dict[int, Request] = {}
        talks: dict[int, Prompt] = {}
        limit, n = self.config.rollout.prompt_length, self.config.data.n_samples
        for row in rows:
            try:
                prompt = self.prompts[row]
            except ValueError as error:
                values[row] = {"error": str(error)}
                continue
            count.cut_prompts += len(prompt.ids) > limit
            ids = truncate(prompt.ids, limit, "left")
            if not self.cast.loops.batched(prompt.agent_name):
                talks[row] = replace(prompt, ids=ids)
                continue
            room = min(self.sampling.max_tokens, self.longest - len(ids))
            requests[row] = Request(ids, n, seed=stream_seed(self.config.rollout.seed or 0, row), max_tokens=room)
        for row, completions in zip(requests, self.engine.generate(list(requests.values()), self.sampling), strict=True):
            broken = next((c.error for c in completions if c.finish == "error"), None)
            if broken is not None:
                values[row] = {"error": str(broken)}
                continue
            values[row] = self._texts([c.ids for c in completions])
            count.responses += len(completions)
            count.tokens += sum(len(c.ids) for c in completions)
            count.cut_responses += sum(c.finish == "length" for c in completions)
        for row, episodes in self._conversations(talks).items():
            values[row] = said(episodes, self.tokenizer)
            samples = [episode.trajectory() for episode in episodes]
            count.responses += len(samples)
            count.tokens += sum(sum(t.mask) for t in samples)
            count.cut_responses += sum(t.finish == "length" for t in samples)
        return values, count

    def _conversations(self, prompts: dict[int, Prompt]) -> dict[int, list[Episode]]:
        if not prompts:
            return {}
        if self._runner is None:
            self._runner = self.cast.runner(self.engine, longest=self.longest, seed=stream_seed)
        seed, n = self.config.rollout.seed or 0, self.config.data.n_samples
        return converse(self._runner, prompts, self.sampling, n, seed=seed)

    def _texts(self, ids: list[list[int]]) -> list[str]:
        end = str(self.tokenizer.eos_token or "")  # some tokenizers do not mark it as special
        texts = [text.removesuffix(end) for text in self.tokenizer.batch_decode(ids, skip_special_tokens=True)]
        for stop in self.config.rollout.stop:
            texts = [text.partition(stop)[0] for text in texts]
        return texts

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self.engine.close()


def answer_rows(answerer: Answerer, todo: Sequence[int], parts: Parts, batch_size: int) -> Iterator[Count]:
    """Answer batch by batch; each is safe before the next begins."""
    for start in range(0, len(todo), batch_size):
        values, count = answerer.answer(todo[start : start + batch_size])
        parts.add(values)
        yield count
