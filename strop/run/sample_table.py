"""The parquet files of samples, `<run>/samples/train_000012.parquet`: their names, columns and how they are
written.

One row per sample:
    step group sample index data_source                    where it comes from
    score failed truncated zero_variance group_mean ...    what the board filters and sorts by
    prompt response ground_truth reported                  texts; `reported` is JSON of scorer and agent
    turns                                                  role, start, end and reward of each turn
    images                                                 small pictures, see sample_images.py
    ids tokens role rollout_log_probs entropy ...          lists with one entry per response token
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from strop.run.atomic_files import to_json
from strop.run.sample_images import IMAGE, image_rows, readable_ids
from strop.types import Trajectory

if TYPE_CHECKING:
    from numpy.typing import DTypeLike
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

FOLDER = "samples"
IMAGES = "images"
"""A column of files in which a sample has images."""
ROWS_PER_GROUP = 128
"""Rows of a parquet row group: reading one sample decompresses this many."""

ENVIRONMENT = 0
TRAINED = 1
SAMPLED_ONLY = 2
"""Roles of a token: written by the environment; sampled and trained; sampled but masked out of the loss."""
INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer returns for a token that holds only a part of a character."""

TOKEN_TABLES = ("trained_log_probs", "ref_log_probs", "entropy", "advantages", "values")
HIGH_CARDINALITY = ("rollout_log_probs", "trained_log_probs", "ref_log_probs", "entropy", "values")
"""Columns of floats that hardly repeat: a parquet dictionary of them would be larger than they are."""
TURN = pa.struct(
    [("role", pa.string()), ("start", pa.int32()), ("end", pa.int32()), ("reward", pa.float64())]
)
SAMPLE_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group", pa.int64()),
        ("sample", pa.int32()),
        ("index", pa.int64()),
        ("data_source", pa.string()),
        ("score", pa.float64()),
        ("group_mean", pa.float64()),
        ("zero_variance", pa.bool_()),
        ("failed", pa.bool_()),
        ("truncated", pa.bool_()),
        ("finish", pa.string()),
        ("version", pa.int64()),
        ("prompt_tokens", pa.int32()),
        ("response_tokens", pa.int32()),
        ("num_turns", pa.int32()),
        ("tool_results", pa.int32()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("ground_truth", pa.string()),
        ("reported", pa.string()),
        ("turns", pa.list_(TURN)),
    ]
)
_FILE_NAME = re.compile(r"(train|validation)_(\d{6,})\.parquet")


def file_name(split: str, step: int) -> str:
    return f"{split}_{step:06d}.parquet"


def parse_name(name: str) -> tuple[str, int] | None:
    """(split, step) of a sample file; None for any other file.

    >>> parse_name("train_000012.parquet"), parse_name(".train_000012.parquet.new")
    (('train', 12), None)
    """
    match = _FILE_NAME.fullmatch(name)
    if match is None:
        return None
    return match[1], int(match[2])


@dataclass(frozen=True)
class SampleJob:
    """The samples of one step, waiting to be written."""

    split: str
    step: int
    trajectories: Sequence[Trajectory]
    tables: Mapping[str, Tensor]
    """By name, [rows, T] on the host."""


@dataclass
class TokenTexts:
    """Tokens as text, special tokens included.

    It needs a tokenizer of its own: fast tokenizers cannot be used by two threads at once.
    """

    decode: Callable[[list[int]], str]
    raw: Callable[[int], str] = lambda token: ""
    """The vocabulary entry, which still shows a space that `decode` drops at the beginning of a text."""
    _cache: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TokenTexts:
        """Texts of a Hugging Face tokenizer."""

        def decode(ids: list[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=False))

        def raw(token: int) -> str:
            return str(tokenizer.convert_ids_to_tokens(token) or "")

        return cls(decode, raw)

    def one(self, token: int) -> str:
        """The text of a single token."""
        if token not in self._cache:
            text = self.decode([token])
            if self.raw(token).startswith("▁") and not text.startswith(" "):
                text = f" {text}"
            self._cache[token] = text
        return self._cache[token]

    def each(self, ids: Sequence[int]) -> list[str]:
        """One text per token. Of tokens that share a character, the last one gets it, the others are
        empty."""
        texts = [self.one(token) for token in ids]
        start = 0
        while start < len(texts):
            end = start
            while end < len(texts) and INCOMPLETE_CHARACTER in texts[end]:
                end += 1
            if end > start + 1:
                texts[start : end - 1] = [""] * (end - 1 - start)
                texts[end - 1] = self.decode(list(ids[start:end]))
            start = end + 1
        return texts


def sample_table(job: SampleJob, texts: TokenTexts) -> pa.Table:
    """All samples of a job as a table with the columns named at the top of this file."""
    scores: dict[int, list[float]] = {}
    for trajectory in job.trajectories:
        group_scores = scores.setdefault(trajectory.group, [])
        if trajectory.reward is not None:
            group_scores.append(trajectory.reward)
    rows = []
    counts: dict[int, int] = {}
    for trajectory in job.trajectories:
        number = counts.get(trajectory.group, 0)
        counts[trajectory.group] = number + 1
        row = _sample_row(trajectory, scores[trajectory.group], texts)
        rows.append({"step": job.step, "sample": number, **row})
    table = pa.Table.from_pylist(rows, schema=SAMPLE_SCHEMA)
    if any(trajectory.prompt.images for trajectory in job.trajectories):
        images = pa.array(image_rows(job.trajectories), pa.list_(IMAGE))
        table = table.append_column(IMAGES, images)
    for name, column in _token_columns(job, texts).items():
        table = table.append_column(name, column)
    return table


def _sample_row(
    trajectory: Trajectory, group_scores: Sequence[float], texts: TokenTexts
) -> dict[str, object]:
    prompt = trajectory.prompt
    turns = []
    for turn in trajectory.turns:
        reward = trajectory.turn_rewards.get(turn.end - 1)
        turns.append({"role": turn.role, "start": turn.start, "end": turn.end, "reward": reward})
    return {
        "group": trajectory.group,
        "index": prompt.index,
        "data_source": prompt.data_source,
        "score": trajectory.reward,
        "group_mean": statistics.fmean(group_scores) if group_scores else None,
        "zero_variance": len(group_scores) > 1 and max(group_scores) == min(group_scores),
        "failed": trajectory.score is None,
        "truncated": trajectory.finish == "length",
        "finish": trajectory.finish,
        "version": trajectory.version,
        "prompt_tokens": len(prompt.ids),
        "response_tokens": len(trajectory.response),
        "num_turns": trajectory.num_turns,
        "tool_results": sum(turn.role == "tool" for turn in trajectory.turns),
        "prompt": _valid_utf8(texts.decode(readable_ids(prompt) if prompt.images else prompt.ids)),
        "response": _valid_utf8(texts.decode(trajectory.response)),
        "ground_truth": _text(prompt.ground_truth),
        "reported": to_json(trajectory.extras),
        "turns": turns,
    }


def _token_columns(job: SampleJob, texts: TokenTexts) -> dict[str, pa.Array]:
    """Lists of one entry per response token; a table that was not computed is null."""
    lengths = [len(t.response) for t in job.trajectories]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())

    def as_lists(values: pa.Array) -> pa.Array:
        return pa.ListArray.from_arrays(offsets, values)

    words: list[str] = []
    for trajectory in job.trajectories:
        words.extend(map(_valid_utf8, texts.each(trajectory.response)))
    columns = {
        "ids": as_lists(pa.array(_flat([t.response for t in job.trajectories], np.int32))),
        "tokens": as_lists(pa.array(words, pa.string())),
        "role": as_lists(pa.array(_roles(job, lengths))),
        "rollout_log_probs": as_lists(pa.array(_flat([t.log_probs for t in job.trajectories], np.float32))),
    }
    for name in TOKEN_TABLES:
        if name in job.tables:
            values = _flat(_unpadded(job.tables[name], lengths), np.float32)
            columns[name] = as_lists(pa.array(values, from_pandas=True))
        else:
            columns[name] = pa.nulls(len(lengths), pa.list_(pa.float32()))
    columns["advantage"] = pa.array(_mean_advantages(job, lengths), pa.float64())
    return columns


def _roles(job: SampleJob, lengths: Sequence[int]) -> np.ndarray:
    sampled = _flat([t.mask for t in job.trajectories], np.int8)
    if "mask" not in job.tables:
        return sampled
    trained = _flat(_unpadded(job.tables["mask"], lengths), np.float32) > 0
    return np.where(sampled == 0, ENVIRONMENT, np.where(trained, TRAINED, SAMPLED_ONLY)).astype(np.int8)


def _mean_advantages(job: SampleJob, lengths: Sequence[int]) -> list[float | None]:
    """Mean over the trained tokens of each sample; None where no token is trained."""
    if "advantages" not in job.tables or "mask" not in job.tables:
        return [None] * len(lengths)
    advantages = _unpadded(job.tables["advantages"], lengths)
    masks = _unpadded(job.tables["mask"], lengths)
    means: list[float | None] = []
    for values, mask in zip(advantages, masks, strict=True):
        trained = values[mask > 0]
        means.append(float(trained.mean()) if len(trained) else None)
    return means


def _unpadded(table: Tensor, lengths: Sequence[int]) -> list[np.ndarray]:
    return [row[:length] for row, length in zip(table.numpy(), lengths, strict=True)]


def _flat(lists: Sequence[object], dtype: DTypeLike) -> np.ndarray:
    if not lists:
        return np.zeros(0, dtype)
    return np.concatenate([np.asarray(values, dtype=dtype) for values in lists])


def _text(value: object) -> str | None:
    if value is None:
        return None
    return _valid_utf8(value if isinstance(value, str) else to_json(value))


def _valid_utf8(text: str) -> str:
    """Replace half of a surrogate pair, which has no UTF-8."""
    return text.encode("utf-8", "replace").decode()


def write_samples(folder: Path, split: str, step: int, table: pa.Table) -> Path:
    """Write a table as the sample file of a step; returns its path."""
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / file_name(split, step)
    temporary = target.with_name(f".{target.name}.new")
    unique: list[str] = []
    repeated: list[str] = []
    for leaf in leaf_columns(table.schema):
        if leaf.removesuffix(".list.element") in HIGH_CARDINALITY:
            unique.append(leaf)
        else:
            repeated.append(leaf)
    try:
        pq.write_table(
            table,
            temporary,
            compression="zstd",
            row_group_size=ROWS_PER_GROUP,
            use_dictionary=repeated,
            use_byte_stream_split=unique,
        )
        return temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def leaf_columns(schema: pa.Schema) -> list[str]:
    """The leaf columns of a table under their parquet names."""
    names: list[str] = []

    def visit(name: str, kind: pa.DataType) -> None:
        if pa.types.is_list(kind):
            visit(f"{name}.list.element", kind.value_type)
        elif pa.types.is_struct(kind):
            for child in kind:
                visit(f"{name}.{child.name}", child.type)
        else:
            names.append(name)

    for column in schema:
        visit(column.name, column.type)
    return names
