"""Runs the module: prefill of admitted samples, and decode steps of all running rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from strop.models.attention import other_kinds
from strop.models.layouts.delta_rule import DELTA_RULE
from strop.models.layouts.mixers import prepare_mixers
from strop.models.layouts.states import RowStates
from strop.models.lora import base_model
from strop.models.patches import is_named, record_kernels
from strop.rollout.native.attention import (
    Cache,
    Decode,
    Prefill,
    ShapeProbe,
    SharedDecode,
    Step,
)
from strop.rollout.native.cpu import decode_attention as compiled_attention
from strop.rollout.native.cuda_graphs import CudaGraphs
from strop.rollout.native.decode_rows import RUNNING, DecodeRows, Features
from strop.rollout.native.experts.recording import ExpertRecorder
from strop.rollout.native.images import ImagePrefill
from strop.rollout.native.kv_cache import CacheTensors, KVCache, kernels
from strop.rollout.native.lora_bank import LoraBank
from strop.rollout.native.pages import PagedKVCache
from strop.rollout.native.prefixes.kept_states import KeptStates, fit_row_states
from strop.rollout.native.prefixes.snapshots import StateSnapshots
from strop.rollout.native.quantization.cache import ShortTensors
from strop.rollout.native.requests import Admission, PrefillChunk, ScheduledSample
from strop.rollout.native.speculation.attention import AheadDecode
from strop.rollout.native.speculation.drafts import Drafts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SPAN_ROWS = 16
"""Rows of one span: see Runner._spans."""

Span = tuple[int, int, int]
"""First row, end row, used length."""


def uses_pages(device: torch.device) -> bool:
    """Whether the cache is one of pages, which only kernels read without copying them."""
    return kernels(device.type) is not None


class Runner:
    def __init__(
        self,
        model: PreTrainedModel,
        lora: LoraBank,
        *,
        batch_tokens: int,
        chunked: bool,
        cuda_graphs: bool,
        fp8_cache: bool,
        record_experts: bool = False,
    ) -> None:
        """`batch_tokens`: most prompt tokens of a pass; `chunked`: split a longer prompt, or run it alone;
        `cuda_graphs`: not if other ranks take part in a step, which a graph cannot record."""
        self.model = model
        self.lora = lora
        self.batch_tokens = batch_tokens
        self.device = cast("nn.Embedding", model.get_input_embeddings()).weight.device
        self.rows = DecodeRows(self.device)
        self.images = ImagePrefill(model)
        self.experts = ExpertRecorder(model) if record_experts else None
        self.cache = self._build_cache(fp8_cache)
        # A prompt in several passes would have its states summed in another order than in training.
        self.chunked = chunked and not self.cache.has_states
        self.kept: KeptStates | None = None
        """States that are kept besides those of the rows."""
        self._selects_logits = "logits_to_keep" in inspect.signature(base_model(model).forward).parameters
        self._graphs: CudaGraphs | None = None
        if cuda_graphs and self.device.type == "cuda":
            self._graphs = CudaGraphs()
        # On a GPU a step takes as long for one row as for many, and its shape must not depend on what was
        # sampled.
        self._dedup_rows = self.device.type == "cpu" and not self.cache.has_states
        self.divided = getattr(model, "divided", None) is not None
        """Other ranks compute a part of the model."""
        self._drafts: Drafts | None = None

    def keep_states(self) -> StateSnapshots:
        """Keep states of prompts and turns from now on; returns where they are found."""
        snapshots = StateSnapshots()
        self.kept = KeptStates(self.cache.states, snapshots)
        return snapshots

    def use_drafts(self, drafts: Drafts) -> None:
        """What passes with drafts need; see `decode`."""
        self._drafts = drafts
        if self._graphs is not None:
            drafts.before_resize(self._graphs.clear)

    def rows_and_tokens(self, size: int, rows: int) -> tuple[int, int]:
        """How many of `rows` rows, and how many tokens of them together, fit into `size` bytes."""
        if self.kept is not None:
            rows, size = self.kept.fit_memory(size, rows)
        elif self.cache.has_states:
            rows, size = fit_row_states(self.cache.states, size, rows)
        return rows, size // self.cache.bytes_per_token

    def draft_bytes(self, size: int, longest: int) -> int:
        """Memory of a draft model and its cache, out of `size` bytes, for rows of up to `longest` tokens."""
        if self._drafts is None:
            return 0
        return self._drafts.claim(size, self.cache.bytes_per_token, longest)

    def _build_cache(self, fp8: bool) -> Cache:
        """An empty cache, after a forward pass of one token that shows the shapes of the layers."""
        prepare_mixers(self.model)
        probe = ShapeProbe(states=RowStates(kernels=is_named(self.model, DELTA_RULE)))
        zero = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._forward(zero, zero, probe)
        if probe.states:
            record_kernels(self.model, DELTA_RULE, used=probe.states.has_kernels)
        kinds = other_kinds(self.model.config)
        if kinds and not probe.states:
            raise self._refusal(f"has layers of the kind {', '.join(kinds)}")
        if not probe.layers and not probe.states:
            raise self._refusal("does not take a registered attention function")
        self._compiled = not fp8 and self._compiles_attention(probe)
        if self._compiled:
            record_kernels(self.model, compiled_attention.NAME, used=True)
        kind = PagedKVCache if uses_pages(self.device) else KVCache
        tensors: Callable[..., CacheTensors] = ShortTensors if fp8 else CacheTensors
        if self.experts is not None:
            tensors = self.experts.tensors(short=fp8)
        return kind(probe.layers, probe.states, dtype=probe.dtype, device=self.device, tensors=tensors)

    def _compiles_attention(self, probe: ShapeProbe) -> bool:
        """Whether the C function for CPUs computes decode steps."""
        wanted = self.device.type == "cpu" and is_named(self.model, compiled_attention.NAME)
        sizes = [layer[1:] for layer in probe.layers.values()]
        fits = bool(sizes) and all(compiled_attention.takes(probe.dtype, *each) for each in sizes)
        return wanted and fits and compiled_attention.is_available(probe.dtype)

    def _refusal(self, problem: str) -> ValueError:
        name = type(base_model(self.model)).__name__
        return ValueError(f"{name} {problem}; set rollout.name=hf.")

    def _forward(self, ids: Tensor, positions: Tensor, step: Step, **more: Tensor) -> Tensor:
        if self.experts is not None:
            self.experts.begin()
        output = self.model(input_ids=ids, position_ids=positions, use_cache=False, rollout=step, **more)
        logits: Tensor = output.logits
        return logits

    def fit(self, rows: int, capacity: int, keep: int, num_stops: int) -> None:
        """Grow the cache, or shrink one dimension to grow the other; the first `keep` rows stay."""
        cache = self.cache
        assert isinstance(cache, KVCache)
        if rows > cache.rows or capacity > cache.capacity:
            if self._graphs is not None:
                self._graphs.clear()
            cache.resize(rows, capacity, keep)
        self._fit_rows(keep, num_stops)

    def fit_pages(self, rows: int, capacity: int, pages: int, keep: int, num_stops: int) -> None:
        """Grow the cache to so many pages, for so many rows of up to `capacity` tokens."""
        cache = self.cache
        assert isinstance(cache, PagedKVCache)
        if pages > cache.pool.size:
            if self._graphs is not None:
                self._graphs.clear()
            cache.resize_pool(pages)
        if rows > cache.rows or capacity > cache.capacity:
            if self._graphs is not None:
                self._graphs.clear()
            cache.resize_table(max(rows, cache.rows), max(capacity, cache.capacity))
        self._fit_rows(keep, num_stops)

    def _fit_rows(self, keep: int, num_stops: int) -> None:
        """The rows have the size of the cache."""
        cache = self.cache
        same_size = (cache.rows, cache.capacity) == (self.rows.rows, self.rows.capacity)
        if not same_size or num_stops > self.rows.num_stops:
            if self._graphs is not None:
                self._graphs.clear()
            self.rows.resize(cache.rows, cache.capacity, keep, max(num_stops, self.rows.num_stops))

    @property
    def num_recorded(self) -> int:
        """CUDA graphs that were recorded; they point into the cache."""
        return 0 if self._graphs is None else len(self._graphs)

    def free(self) -> None:
        """Free the cache and the rows."""
        if self._graphs is not None:
            self._graphs.clear()
        self.cache.free()
        if self.lora.num_slots:
            self.lora.free()
        if self._drafts is not None:
            self._drafts.free()
        self.rows.resize(0, 0, 0, 1)

    # --- prefill --------------------------------------------------------------------------------------------

    def prefill(self, admissions: Sequence[Admission]) -> int:
        """Compute the uncached tokens of admitted samples and sample the next token of each. Cached tokens
        are in their rows already. Returns the number of tokens computed, those of decode prefills
        included."""
        if self._graphs is not None:
            self._graphs.check(self.model)
        self.rows.fill(admissions)
        if self.kept is not None:
            self.kept.load(admissions)
        computed = 0
        chunks = []
        by_row: dict[int, Admission] = {}
        duplicates: dict[int, list[Admission]] = {}
        for admission in admissions:
            if admission.duplicate_of is not None:
                duplicates.setdefault(admission.duplicate_of, []).append(admission)
                continue
            sample = admission.sample
            num_cached = admission.num_cached_tokens
            computed += sample.length - num_cached
            if not admission.decode_prefill:
                by_row[admission.row] = admission
                tokens = sample.sequence[num_cached:]
                chunks.append(PrefillChunk(admission.row, num_cached, tokens, images=sample.images))
        if self.kept is not None:
            chunks = self.kept.with_slots(chunks, by_row)
        chunks.sort(key=lambda chunk: by_row[chunk.row].sample.adapter)
        for batch in self._batches(chunks):
            self._run_chunks(batch, by_row, duplicates)
        return computed

    def _run_chunks(
        self,
        batch: list[PrefillChunk],
        by_row: dict[int, Admission],
        duplicates: dict[int, list[Admission]],
    ) -> None:
        """One forward pass. Rows whose last chunk is in it sample a token, with their duplicates."""
        step = Prefill(self.cache, batch, self.device)
        complete = [i for i, chunk in enumerate(batch) if chunk.end == by_row[chunk.row].sample.length]
        last = step.last[complete]
        more = {"logits_to_keep": last} if self._selects_logits else {}
        if self.lora.hooks:
            spans = [(by_row[chunk.row].sample.adapter, len(chunk.tokens)) for chunk in batch]
            self.lora.use_tokens(spans, complete if more else None)
        images = [chunk.images for chunk in batch]
        if any(images):
            logits = self.images.prefill(self._forward, step, batch, images, more)[0]
        else:
            logits = self._forward(step.ids, step.positions[None], step, **more)[0]
        if self.experts is not None:
            self.experts.store(self.cache, step.slots)
        if not complete:
            return
        if not self._selects_logits:
            logits = logits[last]
        rows = []
        samples = []
        logits_index = []
        placements = []
        for i, chunk_index in enumerate(complete):
            first = by_row[batch[chunk_index].row]
            copies = duplicates.get(first.row, [])
            for admission in (first, *copies):
                rows.append(admission.row)
                samples.append(admission.sample)
                logits_index.append(i)
            placements += [admission.placement for admission in copies]
        longest = max(sample.length for sample in samples)
        self.cache.share(placements)
        row_index = torch.tensor(rows, device=self.device)
        self._sample(row_index, logits[logits_index], self.rows.features(samples), longest)

    def _batches(self, chunks: list[PrefillChunk]) -> list[list[PrefillChunk]]:
        """Chunks in batches of at most `batch_tokens`; longer ones are split or, not `chunked`, run alone."""
        batches: list[list[PrefillChunk]] = [[]]
        room = self.batch_tokens
        for chunk in chunks:
            while len(chunk.tokens) > room:
                fits_in_no_batch = len(chunk.tokens) > self.batch_tokens
                count = chunk.room(room)
                if self.chunked and count > 0 and (not batches[-1] or fits_in_no_batch):
                    begin, chunk = chunk.split(count)
                    batches[-1].append(begin)
                elif not batches[-1]:
                    break
                batches.append([])
                room = self.batch_tokens
            batches[-1].append(chunk)
            room -= len(chunk.tokens)
        return [batch for batch in batches if batch]

    # --- decode ---------------------------------------------------------------------------------------------

    def decode(
        self, samples: Sequence[ScheduledSample], lengths: Sequence[int], steps: int, drafts: int = 0
    ) -> None:
        """`steps` passes for all running rows: each samples a token, and up to `drafts` guessed ones."""
        used = self.rows.features(samples)
        used["adapters"] = 0
        if self.lora.hooks:
            used["adapters"] = self.lora.set_rows([sample.adapter for sample in samples], self.cache.rows)
        used["drafts"] = drafts
        # A row may finish before the last of these steps, and its states must stay as they are then.
        used["stops_states"] = self.kept is not None and steps > 1 and any(one.multi_turn for one in samples)
        if drafts:
            assert self._drafts is not None
            ahead = steps * (drafts + 1)
            used["line_width"] = self._drafts.set_rows(samples, lengths, self.rows, ahead)
        elif self._drafts is not None:
            self._drafts.passed_by()
        for i in range(steps):
            more = i * (drafts + 1) + drafts
            if self._graphs is not None:
                self._graphs.step(self, self.cache, len(samples), max(lengths) + more, used)
            elif drafts:
                self.step(len(samples), [(0, len(samples), max(lengths) + more)], used)
            else:
                self.step(len(samples), self._spans(lengths, i), used)

    def _spans(self, lengths: Sequence[int], ahead: int) -> list[Span]:
        """Spans of rows with their own used length, if that saves reading."""
        count = len(lengths)
        if self.device.type == "cuda" or max(lengths) <= 1.25 * min(lengths) + _SPAN_ROWS:
            return [(0, count, max(lengths) + ahead)]
        spans = []
        for first in range(0, count, _SPAN_ROWS):
            end = min(first + _SPAN_ROWS, count)
            spans.append((first, end, max(lengths[first:end]) + ahead))
        return spans

    def step(self, count: int, spans: Sequence[Span], used: Features) -> None:
        """One token for the first `count` rows. It reads and writes tensors at fixed addresses only, so a
        CUDA graph can record it."""
        longest = max(length for *_, length in spans)
        if self._drafts is not None and used["drafts"]:
            self._step_ahead(self._drafts, count, min(longest, self.cache.capacity), used)
            return
        rows = torch.arange(count, device=self.device)
        ids, positions = self.rows.inputs(rows)
        turns = self.rows.rotary(rows, positions, used)[:, None]
        shared = None
        if self._dedup_rows and len(spans) == 1:
            shared = self.rows.shared_rows(count)
        if shared is None:
            if self.lora.hooks:
                self.lora.use_rows(count)
            running = self.rows.fields["state"][:count] == RUNNING if used["stops_states"] else None
            decode = Decode(self.cache, rows, positions, spans, running, compiled=self._compiled)
            logits = self._forward(ids[:, None], turns, decode)[:, -1]
            if self.experts is not None:
                self.experts.store(self.cache, decode.slots)
        else:
            first = shared.first
            if self.lora.hooks:
                self.lora.use_rows(count, first)
            shared_decode = SharedDecode(
                self.cache, rows, positions, longest, shared, compiled=self._compiled
            )
            logits = self._forward(ids[first, None], turns[first], shared_decode)[:, -1]
            logits = logits[shared.group]
            if self.experts is not None:
                self.experts.store(self.cache, shared_decode.slots, shared.group)
        self._sample(rows, logits, used, longest)

    def _sample(self, rows: Tensor, logits: Tensor, used: Features, longest: int) -> None:
        self.rows.sample_next(rows, logits, used, longest)
        if self._dedup_rows:
            self.rows.split_groups(rows, self.rows.inputs(rows)[0][:, None])

    def _step_ahead(self, drafts: Drafts, count: int, longest: int, used: Features) -> None:
        """The same for a pass with drafts: one to several tokens for each row."""
        ahead = int(used["drafts"]) + 1
        drafted = drafts.propose(self.rows, count, ahead - 1, used, longest)
        rows = torch.arange(count, device=self.device)
        index = torch.arange(count * ahead, device=self.device) // ahead
        ids, positions = self.rows.inputs_ahead(index, ahead)
        if self.lora.hooks:
            self.lora.use_rows(count, index)
        decode = AheadDecode(self.cache, index, positions, ahead, longest)
        turns = self.rows.rotary(index, positions, used)[:, None]
        logits = self._forward(ids[:, None], turns, decode)[:, -1]
        if self.experts is not None:
            self.experts.store(self.cache, decode.slots)
        sampled = drafts.sample(self.rows, index, drafted, logits, used, longest)
        before = self.rows.fields["length"][:count].clone()
        drafts.keep(self.rows, drafted, sampled)
        if self._dedup_rows:
            self.rows.split_groups(rows, self.rows.tokens_from(rows, before, ahead))
