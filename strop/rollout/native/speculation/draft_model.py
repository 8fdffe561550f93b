"""Drafts of a small model (rollout.speculation.draft_model).

The draft model runs one token after the other ahead of the policy and draws each from its own distribution.
It has a KV cache of its own, with a row for each running row. It follows the tokens only while drafts are
made; rows that it has not followed are computed by a prefill before the next draft. Its weights stay as they
were loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strop.config.schema.rollout import SpeculationConfig
from strop.models.load import load_config, load_language_model, resolve
from strop.rollout.base import num_embeddings
from strop.rollout.native.attention import Decode, Prefill, ShapeProbe, Step
from strop.rollout.native.borrowed_model import RolloutPatches
from strop.rollout.native.decode_rows import DecodeRows, Features
from strop.rollout.native.requests import PrefillChunk, ScheduledSample
from strop.rollout.native.speculation.attention import AheadDecode
from strop.rollout.native.speculation.draft_cache import DraftCache
from strop.rollout.native.speculation.drawn import DrawnDrafts, SampleKey

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFILL_TOKENS = 8192


def load_draft_model(path: str, policy: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The model in `path`, in the precision of the policy and ready to be driven; its vocabulary must be that
    of the policy."""
    source = resolve(path)
    config = load_config(source)
    dtype = next(policy.parameters()).dtype
    model: PreTrainedModel = load_language_model(source, config, dtype=dtype).to(device).eval()
    sizes = (num_embeddings(model), num_embeddings(policy))
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"rollout.speculation.draft_model={path} has a vocabulary of {sizes[0]} tokens, the policy one "
            f"of {sizes[1]}. Give a model with the same tokenizer, or null."
        )
    RolloutPatches(model).apply()
    return model


class ModelDrafts(DrawnDrafts):
    """Drafts from a model instead of from earlier tokens."""

    def __init__(self, settings: SpeculationConfig, model: PreTrainedModel, device: torch.device) -> None:
        self._model = model
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        probe = ShapeProbe()
        zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        with torch.no_grad():
            self._forward(zero, zero, probe)
        if not probe.layers or probe.states:
            raise ValueError(
                f"rollout.speculation.draft_model={settings.draft_model}: {type(model).__name__} carries "
                "states along the row, which cannot be taken back where a guess was wrong. Give a model with "
                "attention in all layers."
            )
        cache = DraftCache(probe.layers, dtype=probe.dtype, device=device)
        self._followed: dict[SampleKey, tuple[int, int]] = {}
        """By sample: its row in the cache, and how many of its tokens are there. While every pass has drafts,
        all but the newest two at most are."""
        super().__init__(settings, cache, sum(weight.nbytes for weight in model.parameters()))

    def free(self) -> None:
        super().free()
        self._followed = {}

    def _forward(self, ids: Tensor, positions: Tensor, step: Step, **more: int) -> Tensor:
        output = self._model(input_ids=ids, position_ids=positions, use_cache=False, rollout=step, **more)
        logits: Tensor = output.logits
        return logits

    def set_rows(
        self, samples: Sequence[ScheduledSample], lengths: Sequence[int], rows: DecodeRows, ahead: int
    ) -> int:
        if self.cache.fit(self.max_rows, rows.capacity):
            self._followed = {}
        keys = [(sample.request, sample.index) for sample in samples]
        moves = []
        for row, key in enumerate(keys):
            source, count = self._followed.get(key, (row, 0))
            if source != row and count:
                moves.append((source, row))
        self.cache.move(moves, 0)
        held = self.cache.hold([min(rows.capacity, length + ahead) for length in lengths])
        missing = []
        followed: dict[SampleKey, tuple[int, int]] = {}
        for row, (key, length) in enumerate(zip(keys, lengths)):
            if not held[row]:
                continue
            _, count = self._followed.get(key, (row, 0))
            if count and self._in_step:
                count = length - 2
            if count < length - 2:
                missing.append((row, max(0, count), length - 1))
                count = length - 1
            followed[key] = (row, count)
        self._followed = followed
        self._in_step = True
        tokens = [found.tolist() for found, _ in rows.read(missing)]
        chunks = [PrefillChunk(row, start, ids) for (row, start, _), ids in zip(missing, tokens)]
        for batch in _batches(chunks):
            step = Prefill(self.cache, batch, self.device)
            more = {"logits_to_keep": 1} if self._selects_logits else {}
            self._forward(step.ids, step.positions[None], step, **more)
        return 0

    def propose(self, rows: DecodeRows, count: int, num_tokens: int, used: Features, longest: int) -> Tensor:
        index = torch.arange(count, device=self.device)
        length = rows.fields["length"][:count]
        ready = self.cache.followed[:count]
        drafts = []
        chances = []
        logits = self._first(rows, count, longest)
        for ahead in range(num_tokens):
            token, chance = self.draw(rows, length + ahead, logits, used, longest, ready)
            drafts.append(token)
            chances.append(chance)
            if ahead + 1 < num_tokens:
                position = (length + ahead).clamp(max=self.cache.capacity - 1)
                step = Decode(self.cache, index, position, [(0, count, longest)])
                logits = self._forward(token.clamp(min=0)[:, None], position[:, None], step)[:, -1]
        self._chances = torch.stack(chances, 1)
        return torch.stack(drafts, 1)

    def _first(self, rows: DecodeRows, count: int, longest: int) -> Tensor:
        """The logits after the newest token of each row. The token before it is computed once more, because
        the cache lacks it where the last pass kept all of its drafts."""
        pairs = torch.arange(count * 2, device=self.device) // 2
        back = 1 - torch.arange(count * 2, device=self.device) % 2
        positions = (rows.fields["length"][pairs] - 1 - back).clamp(min=0)
        ids = rows.fields["tokens"][pairs, positions]
        step = AheadDecode(self.cache, pairs, positions, 2, longest)
        return self._forward(ids[:, None], positions[:, None], step)[1::2, -1]


def _batches(chunks: Sequence[PrefillChunk]) -> list[list[PrefillChunk]]:
    """Chunks that are computed together; a longer one alone."""
    batches: list[list[PrefillChunk]] = []
    room = 0
    for chunk in chunks:
        if len(chunk.tokens) > room:
            batches.append([])
            room = _PREFILL_TOKENS
        batches[-1].append(chunk)
        room -= len(chunk.tokens)
    return batches
