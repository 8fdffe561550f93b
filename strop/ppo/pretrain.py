"""PPO-ptx (InstructGPT): every actor update also minimizes the language-model loss of pretraining texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from torch import Tensor

from strop.algorithms.aggregation import Totals
from strop.algorithms.losses import ptx_loss
from strop.backends.base import Backend, MicroBatching, Outputs
from strop.config.schema.ppo import PpoConfig
from strop.data.chat import Chat, Rendered
from strop.data.files import FileRows, open_rows
from strop.data.loader import Loader
from strop.data.schema import as_messages
from strop.shared.rendered_batch import rendered_batch
from strop.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "algorithm.pretrain_files"
COLUMNS = ("text", "messages")


def check_columns(rows: FileRows) -> None:
    """ValueError if a file has neither text nor messages."""
    for file in rows.files:
        if not set(COLUMNS) & set(file.columns):
            raise ValueError(
                f"{KEY}: {file.address} has neither a column `text` (plain text) nor `messages` (a "
                f"conversation). Its columns: {', '.join(file.columns) or 'none'}."
            )


class Texts(Sequence[list[int]]):
    """Rows as token ids: the column `text` followed by the end-of-text token, or `messages` as a
    conversation. Rows are cut at `max_tokens`."""

    def __init__(self, rows: FileRows, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int):
        check_columns(rows)
        self.rows = rows
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> list[int]: ...

    @overload
    def __getitem__(self, place: slice) -> list[list[int]]: ...

    def __getitem__(self, place: int | slice) -> list[int] | list[list[int]]:
        if isinstance(place, slice):
            return [self._ids(one) for one in range(*place.indices(len(self)))]
        return self._ids(int(place))

    def _ids(self, place: int) -> list[int]:
        row = self.rows[place]
        where = self.rows.where(place)
        if row.get("text") is not None:
            ids = Chat(self.tokenizer, plain=True).encode(str(row["text"]), start=True)
            if self.tokenizer.eos_token_id is not None:
                ids.append(int(self.tokenizer.eos_token_id))
        elif row.get("messages") is not None:
            ids = Chat(self.tokenizer).ids(as_messages(row["messages"], where=where), generate=False)
        else:
            raise ValueError(f"{KEY}: {where} has neither text nor messages.")
        return ids[: self.max_tokens]

    def fingerprint(self) -> str:
        return self.rows.fingerprint()


@dataclass
class Pretraining:
    """Adds coef times the cross entropy of the next texts to the gradients of an update."""

    loader: Loader
    coef: float

    def __call__(self, backend: Backend, micro: MicroBatching) -> dict[str, float]:
        # The first token of a text is not predicted, so one token is not enough.
        texts = [ids for ids in self.loader.draw() if len(ids) > 1]
        if not texts:
            return {}
        batch = rendered_batch([Rendered(ids, [1] * len(ids)) for ids in texts])
        totals = Totals.of(batch.mask)

        def loss(outputs: Outputs, piece: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
            assert outputs.log_probs is not None
            weighted = ptx_loss(outputs.log_probs, piece.mask, totals, coef=self.coef)
            plain = ptx_loss(outputs.log_probs.detach(), piece.mask, totals, coef=1.0)
            return weighted, {"actor/ptx_loss": plain}

        with temperature_one(backend):
            return backend.forward_backward(batch, ["log_probs"], loss, micro)


@contextmanager
def temperature_one(backend: Backend) -> Iterator[None]:
    """Text was not sampled at the temperature of the rollout. Its log-probs are those at temperature 1."""
    before = backend.temperature
    backend.temperature = 1.0
    try:
        yield
    finally:
        backend.temperature = before


def build_pretraining(
    config: PpoConfig, tokenizer: PreTrainedTokenizerBase, rows_per_update: int
) -> Pretraining | None:
    """The loss of algorithm.pretrain_files, with as many texts per update as sequences; None: no files."""
    files = config.algorithm.pretrain_files
    if not files:
        return None
    max_tokens = config.data.max_prompt_length + config.data.max_response_length
    texts = Texts(open_rows(files, key=KEY), tokenizer, max_tokens=max_tokens)
    loader = Loader(texts, min(rows_per_update, len(texts)), seed=config.trainer.seed)
    return Pretraining(loader, config.algorithm.ptx_coef)
