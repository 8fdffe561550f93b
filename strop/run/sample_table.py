"""One step's samples as a table: what a reader filters by, the texts, and lists with one entry per token.

step group sample index data_source                          where it comes from
score failed truncated zero_variance group_mean advantage    what is filtered and sorted by
prompt response ground_truth reported                        texts; `reported` is JSON of all the scorer and the agent said
turns                                                        role, start, end, reward of each turn of a conversation
ids tokens role rollout_log_probs trained_log_probs ...      one entry per token of the response
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from strop.run.plain_json import to_json
from strop.types import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

ENVIRONMENT, TRAINED, SAMPLED_ONLY = 0, 1, 2
"""Roles of a token: written by the environment; sampled and trained; sampled but masked out of the loss."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer says for a token that holds only a part of a character."""
TOKEN_TABLES = ("trained_log_probs", "ref_log_probs", "entropy", "advantages", "values")

TURN = pa.struct([("role", pa.string()), ("start", pa.int32()), ("end", pa.int32()), ("reward", pa.float64())])


@dataclass(frozen=True)
class Job:
    """A step's samples on their way to the disk."""

    split: str
    step: int
    trajectories: Sequence[Trajectory]
    tables: Mapping[str, Tensor]
    """By name, [rows, T] on the host."""


@dataclass
class TextOf:
    """Tokens as text, special ones included: what the model saw and said, as it is.

    It must own its tokenizer: fast tokenizers cannot be used by two threads at once.
    """

    decode: Callable[[list[int]], str]
    raw: Callable[[int], str] = lambda token: ""
    """The entry of the vocabulary, which still shows a space that `decode` drops at the beginning of a text."""
    _seen: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Any) -> TextOf:
        def raw(token: int) -> str:
            return tokenizer.convert_ids_to_tokens(token) or ""

        return cls(lambda ids: tokenizer.decode(ids, skip_special_tokens=False), raw)

    def one(self, token: int) -> str:
        if token not in self._seen:
            text = self.decode([token])
            space = self.raw(token).startswith("▁") and not text.startswith(" ")
            self._seen[token] = f" {text}" if space else text
        return self._seen[token]

    def each(self, ids: Sequence[int]) -> list[str]:
        """One text per token. Tokens that share a character: the last one has it, those before have nothing."""
        texts = [self.one(token) for token in ids]
        start = 0
        while start < len(texts):
            end = start
            while end < len(texts) and UNFINISHED in texts[end]:
                end += 1
            if end > start + 1:
                texts[start:end] = [*[""] * (end - start - 1), self.decode(list(ids[start:end]))]
            start = end + 1
        return texts


def sample_table(job: Job, texts: TextOf) -> pa.Table:
    chosen = job.trajectories
    columns: dict[str, pa.Array] = {
        "step": pa.array([job.step] * len(chosen), pa.int64()),
        "group": pa.array([t.group for t in chosen], pa.int64()),
        "sample": pa.array(_numbers_in_group(chosen), pa.int32()),
        "index": pa.array([t.prompt.index for t in chosen], pa.int64()),
        "data_source": pa.array([t.prompt.data_source for t in chosen], pa.string()),
        **_outcome(chosen),
        "prompt": pa.array([_clean(texts.decode(t.prompt.ids)) for t in chosen], pa.string()),
        "response": pa.array([_clean(texts.decode(t.response)) for t in chosen], pa.string()),
        "ground_truth": pa.array([_text(t.prompt.ground_truth) for t in chosen], pa.string()),
        "reported": pa.array([to_json(t.extras) for t in chosen], pa.string()),
        "turns": pa.array([_turns(t) for t in chosen], pa.list_(TURN)),
        **_tokens(job, texts),
    }
    return pa.table(columns)


def _outcome(chosen: Sequence[Trajectory]) -> dict[str, pa.Array]:
    scores: dict[int, list[float]] = {}
    for t in chosen:
        if t.reward is not None:
            scores.setdefault(t.group, []).append(t.reward)
    mean = {group: statistics.fmean(values) for group, values in scores.items()}
    same = {group for group, values in scores.items() if len(values) > 1 and max(values) == min(values)}
    return {
        "score": pa.array([t.reward for t in chosen], pa.float64()),
        "group_mean": pa.array([mean.get(t.group) for t in chosen], pa.float64()),
        "zero_variance": pa.array([t.group in same for t in chosen]),
        "failed": pa.array([t.score is None for t in chosen]),
        "truncated": pa.array([t.finish == "length" for t in chosen]),
        "finish": pa.array([t.finish for t in chosen], pa.string()),
        "version": pa.array([t.version for t in chosen], pa.int64()),
        "prompt_tokens": pa.array([len(t.prompt.ids) for t in chosen], pa.int32()),
        "response_tokens": pa.array([len(t.response) for t in chosen], pa.int32()),
        "num_turns": pa.array([t.num_turns for t in chosen], pa.int32()),
        "tool_results": pa.array([sum(turn.role == "tool" for turn in t.turns) for t in chosen], pa.int32()),
    }


def _tokens(job: Job, texts: TextOf) -> dict[str, pa.Array]:
    """Lists of one entry per response token; a list that nobody computed is null."""
    chosen, tables = job.trajectories, job.tables
    lengths = [len(t.response) for t in chosen]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())

    def lists(values: pa.Array) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, values)

    words = pa.array([_clean(text) for t in chosen for text in texts.each(t.response)], pa.string())
    columns = {
        "ids": lists(pa.array(_flat([t.response for t in chosen], np.int32))),
        "tokens": lists(words),
        "role": lists(pa.array(_roles(job, lengths))),
        "rollout_log_probs": lists(pa.array(_flat([t.log_probs for t in chosen], np.float32))),
    }
    for name in TOKEN_TABLES:
        if name in tables:
            cut = [row[:length] for row, length in zip(tables[name].numpy(), lengths, strict=True)]
            columns[name] = lists(pa.array(_flat(cut, np.float32), from_pandas=True))
        else:
            columns[name] = pa.nulls(len(chosen), pa.list_(pa.float32()))
    columns["advantage"] = pa.array(_mean_advantages(job, lengths), pa.float64())
    return columns


def _roles(job: Job, lengths: Sequence[int]) -> np.ndarray:
    sampled = _flat([t.mask for t in job.trajectories], np.int8)
    if "mask" not in job.tables:
        return sampled
    trained = _flat([row[:n] for row, n in zip(job.tables["mask"].numpy(), lengths, strict=True)], np.float32) > 0
    return np.where(sampled == 0, ENVIRONMENT, np.where(trained, TRAINED, SAMPLED_ONLY)).astype(np.int8)


def _mean_advantages(job: Job, lengths: Sequence[int]) -> list[float | None]:
    """Over the tokens that are trained."""
    if "advantages" not in job.tables or "mask" not in job.tables:
        return [None] * len(lengths)
    found: list[float | None] = []
    for values, mask, length in zip(job.tables["advantages"].numpy(), job.tables["mask"].numpy(), lengths, strict=True):
        trained = values[:length][mask[:length] > 0]
        found.append(float(trained.mean()) if len(trained) else None)
    return found


def _flat(lists: Sequence[Any], dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(values, dtype=dtype) for values in lists]) if lists else np.zeros(0, dtype)


def _numbers_in_group(chosen: Sequence[Trajectory]) -> list[int]:
    counts: dict[int, int] = {}
    numbers = []
    for t in chosen:
        numbers.append(counts.get(t.group, 0))
        counts[t.group] = numbers[-1] + 1
    return numbers


def _turns(t: Trajectory) -> list[dict[str, Any]]:
    return [
        {"role": turn.role, "start": turn.start, "end": turn.end, "reward": t.turn_rewards.get(turn.end - 1)}
        for turn in t.turns
    ]


def _text(value: Any) -> str | None:
    return None if value is None else _clean(value if isinstance(value, str) else to_json(value))


def _clean(text: str) -> str:
    """Half a surrogate pair has no UTF-8."""
    return text.encode("utf-8", "replace").decode()
