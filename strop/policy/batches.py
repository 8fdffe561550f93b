"""What a researcher's loop passes to the policy: prompts in several forms, and rows of tokens to train on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strop.backends.base import Outputs
from strop.config.schema.ppo import PpoConfig
from strop.data.chat import Chat
from strop.ppo.experience import ExperienceFacts, add_advantages
from strop.types import Batch, Images, Prompt, Trajectory, batch_of, rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
PromptLike = Prompt | str | Sequence[int] | Sequence[Message]
"""A prompt: rendered, a text, token ids, or messages for the chat template."""


@dataclass(frozen=True)
class Datum:
    """One sequence to train on. The lists belong to the response tokens, one number each."""

    prompt: Sequence[int]
    """Token ids of the prompt, which are not trained; at least one."""
    response: Sequence[int]
    """Token ids that are trained where the mask is set."""
    mask: Sequence[float] | None = None
    """1 on tokens that are trained. None: those with a weight other than 0, or all."""
    weights: Sequence[float] | None = None
    """Weights of the tokens, for cross_entropy."""
    advantages: Sequence[float] | None = None
    """For policy losses."""
    log_probs: Sequence[float] | None = None
    """Log-probs of the policy that sampled the tokens, for policy losses."""


TokenRows = Batch | Sequence[Datum] | Sequence[Trajectory] | Sequence[Sequence[Trajectory]]
"""What can be trained on."""
Pairs = Sequence[Trajectory] | Sequence[Datum] | Sequence[tuple[Sequence[int], Sequence[int]]]
"""Prompts with responses whose log-probs are asked for."""


@dataclass
class StepOutput:
    """The result of a forward (and backward) pass over a batch."""

    loss: float
    """The loss of the whole batch."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the loss reports; the names are those of a training run."""
    log_probs: list[Tensor | None] = field(default_factory=list)
    """Of the response tokens of each row. None: the row has no gradient and was not computed (see
    actor.skip_zero_advantages), or log-probs were not wanted."""


# --- prompts ------------------------------------------------------------------------------------------------


def prompt_of(given: PromptLike, tokenizer: PreTrainedTokenizerBase, index: int) -> Prompt:
    """A prompt in any of its forms, rendered. A text is tokenized as it stands; messages go through the chat
    template."""
    if isinstance(given, Prompt):
        return given
    if isinstance(given, str):
        ids = Chat(tokenizer, plain=True).encode(given, start=True)
        return Prompt(index, ids, [{"role": "user", "content": given}], data_source="policy")
    items = list(given) if isinstance(given, Iterable) else []
    if items and all(isinstance(item, int) for item in items):
        return Prompt(index, [int(item) for item in items if isinstance(item, int)], [], data_source="policy")
    messages = [dict(item) for item in items if isinstance(item, Mapping)]
    if not items or len(messages) != len(items):
        raise ValueError(
            f"Prompt {index} is {str(given)[:80]!r}. Give a text, a list of token ids, or a list of messages "
            '({"role": ..., "content": ...}).'
        )
    return Prompt(index, Chat(tokenizer).ids(messages), messages, data_source="policy")


# --- rows to train on ---------------------------------------------------------------------------------------


def listed(rows: TokenRows) -> TokenRows:
    """Rows that can be read several times: the first reading of an iterator uses it up."""
    return rows if isinstance(rows, Batch) else list(rows)  # type: ignore[return-value] # the same kinds


def training_batch(rows: TokenRows) -> Batch:
    """The batch of rows in any of their forms."""
    rows = listed(rows)
    if isinstance(rows, Batch):
        if not len(rows):
            raise ValueError("The batch is empty.")
        return rows
    flat = flat_rows(rows)
    data = [row for row in flat if isinstance(row, Datum)]
    if data and len(data) == len(flat):
        return _batch_of_data(data)
    trajectories = [row for row in flat if isinstance(row, Trajectory)]
    if trajectories and len(trajectories) == len(flat):
        return batch_of(trajectories)
    kinds = sorted({type(row).__name__ for row in flat})
    raise ValueError(
        "A batch is a Batch, or a list of Datum or Trajectory; this list holds "
        f"{', '.join(kinds) or 'nothing'}."
    )


def with_advantages(batch: Batch, rows: TokenRows, estimator: str, config: PpoConfig) -> Batch:
    """The batch of these trajectories with advantages, as a training run computes them."""
    if isinstance(rows, Batch) or batch.scores is None:
        raise ValueError(f"advantages={estimator!r} are estimated from scored trajectories; give these.")
    flat = [row for row in flat_rows(rows) if isinstance(row, Trajectory)]
    algorithm = dataclasses.replace(config.algorithm, adv_estimator=estimator)
    facts = ExperienceFacts.of(dataclasses.replace(config, algorithm=algorithm), on_policy=True)
    if facts.compares_episodes or facts.score_baseline is not None:
        check_groups(rows, flat)
    return add_advantages(batch.replace(rewards=batch.scores), algorithm, facts, flat)


def check_groups(rows: Sequence[object], flat: Sequence[Trajectory]) -> None:
    """Refuse rows of one group with different prompts, where the caller did not say that they are compared.
    Each call of `sample` counts its prompts from 0, so rows of several calls may have the same number."""
    if all(isinstance(row, list | tuple) for row in rows):
        return
    first: dict[int, int] = {}
    for place, row in enumerate(flat):
        other = first.setdefault(row.group, place)
        if row.prompt.ids != flat[other].prompt.ids:
            raise ValueError(
                f"Rows {other} and {place} both have group={row.group}, but different prompts; a group is "
                "compared as the samples of one prompt. Give each group as a list of its own "
                "([[a, b], [c, d]]), or set Trajectory.group."
            )


def flat_rows(rows: Sequence[Datum] | Sequence[Trajectory] | Sequence[Sequence[Trajectory]]) -> list[object]:
    """Rows, or groups of rows, as one list. Each list of trajectories is a group, whatever their numbers: two
    calls of `sample` both begin to count at 0."""
    grouped = all(isinstance(row, list | tuple) for row in rows)
    flat: list[object] = []
    for number, row in enumerate(rows):
        if isinstance(row, list | tuple):
            for member in row:
                if grouped and isinstance(member, Trajectory) and member.group != number:
                    member = dataclasses.replace(member, group=number)
                flat.append(member)
        else:
            flat.append(row)
    return flat


def pairs_batch(pairs: Pairs) -> Batch:
    """A batch of prompts and responses, of which only the log-probs are asked for."""
    data = []
    images: list[Images] = []
    for pair in pairs:
        images.append(pair.prompt.images if isinstance(pair, Trajectory) else ())
        if isinstance(pair, Trajectory):
            data.append(Datum(pair.prompt.ids, pair.response))
        elif isinstance(pair, Datum):
            data.append(Datum(pair.prompt, pair.response))
        else:
            prompt, response = pair
            data.append(Datum(prompt, response))
    batch = _batch_of_data(data)
    return batch.replace(images=images) if any(images) else batch


def _batch_of_data(data: Sequence[Datum]) -> Batch:
    width = 0
    for row, datum in enumerate(data):
        if not len(datum.prompt) or not len(datum.response):
            raise ValueError(
                f"Row {row} has {len(datum.prompt)} prompt and {len(datum.response)} response tokens; each "
                "needs at least one."
            )
        width = max(width, len(datum.response))
    return Batch(
        sequences=[torch.tensor([*datum.prompt, *datum.response]) for datum in data],
        prompt_lengths=torch.tensor([len(datum.prompt) for datum in data]),
        groups=torch.arange(len(data)),
        weights=_table(data, "weights", width),
        advantages=_table(data, "advantages", width),
        rollout_log_probs=_table(data, "log_probs", width),
        mask=rows_of(_checked("mask values", data, [_mask(datum) for datum in data]), width),
        row_ids=torch.arange(len(data)),
    )


def _mask(datum: Datum) -> Sequence[float]:
    if datum.mask is not None:
        return datum.mask
    if datum.weights is not None:
        return [float(weight != 0) for weight in datum.weights]
    return [1.0] * len(datum.response)


def _table(data: Sequence[Datum], name: str, width: int) -> Tensor | None:
    """One field of all rows; None if no row has it."""
    values = [getattr(datum, name) for datum in data]
    missing = [row for row, value in enumerate(values) if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        raise ValueError(
            f"Row {missing[0]} has no {name}, but other rows of the batch have. Give it to all or none."
        )
    return rows_of(_checked(name, data, values), width)


def _checked(
    name: str, data: Sequence[Datum], values: Sequence[Sequence[float]]
) -> Sequence[Sequence[float]]:
    """The values of all rows, if every response token has one."""
    for row, (datum, value) in enumerate(zip(data, values, strict=True)):
        if len(value) != len(datum.response):
            raise ValueError(
                f"Row {row} has {len(value)} {name} for {len(datum.response)} response tokens; each token "
                "needs one."
            )
    return values


def check_batch(batch: Batch, vocabulary: int, longest: int) -> Batch:
    """Refuse what a model cannot read, or what would train nothing; number the rows."""
    for row, sequence in enumerate(batch.sequences):
        low, high = int(sequence.min()), int(sequence.max())
        if low < 0 or high >= vocabulary:
            wrong = high if high >= vocabulary else low
            raise ValueError(
                f"Row {row} has the token id {wrong}, which is outside the vocabulary of {vocabulary}."
            )
        if len(sequence) > longest:
            raise ValueError(f"Row {row} has {len(sequence)} tokens; the model takes at most {longest}.")
    return batch.replace(row_ids=torch.arange(len(batch)))


def check_trains(batch: Batch) -> None:
    """Refuse a batch without a trained token."""
    if not bool(batch.mask.any()):
        raise ValueError(
            "No token of this batch is trained: its mask is 0 everywhere. Rows without a score are masked: "
            "set trajectory.score."
        )


def split_rows(table: Tensor, batch: Batch) -> list[Tensor]:
    """[B, T] as one tensor per row, without padding."""
    return [row[:length] for row, length in zip(table, batch.response_lengths.tolist(), strict=True)]


def row_log_probs(outputs: Outputs, batch: Batch) -> list[Tensor | None]:
    """The log-probs of each row; None where they were not wanted."""
    if outputs.log_probs is None:
        return [None] * len(batch)
    return list(split_rows(outputs.log_probs, batch))
