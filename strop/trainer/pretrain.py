"""Text beside rewards (PPO-ptx of InstructGPT): every update of the actor also lowers the language-model loss of some text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from strop.algorithms.aggregation import Totals
from strop.algorithms.sft import ptx_loss
from strop.backends.base import Backend, MicroBatching, Outputs
from strop.data.chat import Chat, Rendered
from strop.data.files import Rows, open_rows
from strop.data.loader import Loader
from strop.data.schema import as_messages
from strop.trainer.supervised_batches import conversations
from strop.types import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "algorithm.pretrain_files"
COLUMNS = ("text", "messages")


class Texts(Sequence[list[int]]):
    """Rows as token ids: a `text` column as it stands and closed by the end-of-text token, or `messages` as a conversation."""

    def __init__(self, rows: Rows, tokenizer: PreTrainedTokenizerBase, *, longest: int):
        self.rows, self.tokenizer, self.longest = rows, tokenizer, longest
        for file in rows.files:
            if not set(COLUMNS) & set(file.columns):
                raise ValueError(
                    f"{KEY}: {file.address} has neither a column `text` (plain text) nor `messages` (a conversation). Its "
                    f"columns: {', '.join(file.columns) or 'none'}."
                )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: Any) -> Any:
        row, where = self.rows[int(place)], self.rows.where(int(place))
        if row.get("text") is not None:
            ids = Chat(self.tokenizer, plain=True).encode(str(row["text"]), start=True)
            ids += [] if self.tokenizer.eos_token_id is None else [int(self.tokenizer.eos_token_id)]
        elif row.get("messages") is not None:
            ids = Chat(self.tokenizer).ids(as_messages(row["messages"], where=where), generate=False)
        else:
            raise ValueError(f"{KEY}: {where} has neither text nor messages.")
        return ids[: self.longest]

    def fingerprint(self) -> str:
        return self.rows.fingerprint()


@dataclass
class Pretraining:
    """Adds coef times the cross entropy of the next texts to the gradients that are being collected."""

    loader: Loader
    coef: float

    def __call__(self, backend: Backend, micro: MicroBatching) -> dict[str, float]:
        texts = [ids for ids in self.loader.draw() if len(ids) > 1]  # the first token of a text is predicted by nothing
        if not texts:
            return {}
        batch = conversations([Rendered(ids, [1] * len(ids)) for ids in texts])
        totals = Totals.of(batch.mask)

        def loss(outputs: Outputs, piece: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
            assert outputs.log_probs is not None
            weighted = ptx_loss(outputs.log_probs, piece.mask, totals, coef=self.coef)
            plain = ptx_loss(outputs.log_probs.detach(), piece.mask, totals, coef=1.0)
            return weighted, {"actor/ptx_loss": plain}

        with as_written(backend):
            return backend.forward_backward(batch, ["log_probs"], loss, micro)


@contextmanager
def as_written(backend: Backend) -> Iterator[None]:
    """Text was not sampled at the rollout's temperature; its log-probs are those at 1."""
    before, backend.temperature = backend.temperature, 1.0
    try:
        yield
    finally:
        backend.temperature = before


def build_pretraining(config: Any, tokenizer: PreTrainedTokenizerBase, rows_per_update: int) -> Pretraining | None:
    """As many texts per update as sequences, in an order of their own."""
    files = config.algorithm.pretrain_files
    if not files:
        return None
    longest = config.data.max_prompt_length + config.data.max_response_length
    texts = Texts(open_rows(files, key=KEY), tokenizer, longest=longest)
    loader = Loader(texts, min(rows_per_update, len(texts)), seed=config.trainer.seed)
    return Pretraining(loader, config.algorithm.ptx_coef)
