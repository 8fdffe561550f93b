"""The model of `strop generate`: responses to rows of a file or benchmark, with agents if rows name one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from strop.agents.episode import Episode
from strop.agents.runner import AgentSetup, EpisodeRequest, EpisodeRunner
from strop.catalog import DATASETS
from strop.config.derived import holds_weights
from strop.config.schema.inference import GenerationConfig
from strop.data.chat import Chat
from strop.data.files import Row, open_rows
from strop.data.images import ImageProcessor
from strop.data.make import published_rows
from strop.data.prompts import PromptDataset, ToolListing, truncate
from strop.data.schema import ColumnKeys, require_column
from strop.inference.resumable_rows import PartialOutput
from strop.models.build import build_policy, build_tokenizer, compute_dtype
from strop.models.vision.processor import processor_loader
from strop.rewards.base import response_texts
from strop.rollout.base import Request, Sampling, stream_seed
from strop.shared.build import engine_for, max_model_len, sampling_for
from strop.types import Prompt

if TYPE_CHECKING:
    import pyarrow
    from transformers import PreTrainedTokenizerBase


def run_episodes(
    runner: EpisodeRunner, prompts: Mapping[int, Prompt], sampling: Sampling, n: int, *, seed: int
) -> dict[int, list[Episode]]:
    """n finished episodes of each row."""
    starts: list[EpisodeRequest] = []
    for row, prompt in prompts.items():
        for i in range(n):
            starts.append(EpisodeRequest(prompt, sampling, (seed, row, i), row))
    found: defaultdict[int, list[Episode]] = defaultdict(list)
    for start, episode in zip(starts, runner.run(starts, all_may_fail=True), strict=True):
        found[start.group].append(episode)
    return dict(found)


def episode_texts(episodes: list[Episode], tokenizer: PreTrainedTokenizerBase) -> list[str] | dict[str, str]:
    """The responses of each episode, one line per turn; or the error of the first that failed."""
    error = next((episode.error for episode in episodes if episode.error is not None), None)
    if error is not None:
        return {"error": f"{type(error).__name__}: {error}"}
    return response_texts([episode.trajectory() for episode in episodes], tokenizer, whole_transcript=False)


@dataclass(frozen=True)
class InputRows:
    """The input rows."""

    rows: Sequence[Row]
    fingerprint: str
    table: Callable[[], pyarrow.Table]


def open_input_rows(config: GenerationConfig) -> InputRows:
    """The input rows; raises if a column is missing."""
    data = config.data
    files = open_rows(data.path, key="data.path")
    if data.benchmark:
        made = published_rows(data.benchmark, files)
        return InputRows(made, files.fingerprint(), lambda: _table_of(made))
    for file in files.files:
        if data.prompt_key not in file.columns and (name := _published_dataset_with(file.columns)):
            raise ValueError(
                f"{file.address} has no column {data.prompt_key!r}. Its columns are those of {name} as it is "
                f"published: set data.benchmark={name}."
            )
        require_column(file.columns, data.prompt_key, setting="data.prompt_key", where=file.address)
    return InputRows(files, files.fingerprint(), files.table)


def _published_dataset_with(columns: Sequence[str]) -> str | None:
    """The published data set that has these columns."""
    for name in DATASETS.names():
        if set(DATASETS.entry(name).facts["columns"]) <= set(columns):
            return name
    return None


def _table_of(rows: Sequence[Row]) -> pyarrow.Table:
    import pyarrow

    return pyarrow.Table.from_pylist(list(rows))


RowResult = list[str] | dict[str, str]
"""The responses to a row, or {"error": message}."""


@dataclass
class GenerationCounts:
    """Counts of a batch of rows."""

    rows: int = 0
    responses: int = 0
    tokens: int = 0
    cut_prompts: int = 0
    """Prompts longer than rollout.prompt_length; only their last tokens were used."""
    cut_responses: int = 0
    """Responses that reached rollout.response_length before any of rollout.stop."""

    def __add__(self, other: GenerationCounts) -> GenerationCounts:
        return GenerationCounts(
            rows=self.rows + other.rows,
            responses=self.responses + other.responses,
            tokens=self.tokens + other.tokens,
            cut_prompts=self.cut_prompts + other.cut_prompts,
            cut_responses=self.cut_responses + other.cut_responses,
        )


def chat_of(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> Chat:
    """The chat template that renders the rows."""
    return Chat(
        tokenizer,
        kwargs=dict(config.data.apply_chat_template_kwargs),
        plain=not config.data.apply_chat_template,
        images=ImageProcessor(processor_loader(config.model)),
    )


def prompts_of(
    config: GenerationConfig, inputs: InputRows, chat: Chat, listing: ToolListing | None = None
) -> PromptDataset:
    """The prompts of the rows, of any length."""
    key = "prompt" if config.data.benchmark else config.data.prompt_key
    return PromptDataset(
        inputs.rows, chat, keys=ColumnKeys(prompt=key), max_prompt_length=1 << 40, listing=listing
    )


class ResponseGenerator:
    """The engine and the prompts: generates responses to rows."""

    def __init__(self, config: GenerationConfig, inputs: InputRows, device: torch.device):
        rollout = config.rollout
        self.config = config
        self.tokenizer = build_tokenizer(config.model)
        chat = chat_of(config, self.tokenizer)
        self.agents = AgentSetup(rollout, chat)
        self.prompts = prompts_of(config, inputs, chat, self.agents.listing())
        dtype_name = rollout.dtype
        if dtype_name == "auto":
            dtype_name = "bfloat16" if device.type == "cuda" else "float32"
        dtype = compute_dtype(dtype_name, device)
        model = build_policy(config.model, dtype=dtype).requires_grad_(False).eval()
        if not holds_weights(rollout):
            model = model.to(device)
        self.engine = engine_for(rollout, model)
        self.sampling = sampling_for(rollout, self.tokenizer, model)
        self.max_model_len = max_model_len(rollout)
        self._runner: EpisodeRunner | None = None

    def generate(self, rows: Sequence[int]) -> tuple[dict[int, RowResult], GenerationCounts]:
        """The responses to these rows, and their counts."""
        self.engine.wake()
        count = GenerationCounts(rows=len(rows))
        values: dict[int, RowResult] = {}
        requests: dict[int, Request] = {}
        conversations: dict[int, Prompt] = {}
        limit = self.config.rollout.prompt_length
        n = self.config.data.n_samples
        for row in rows:
            try:
                prompt = self.prompts[row]
            except ValueError as error:
                values[row] = {"error": str(error)}
                continue
            if prompt.unusable:
                values[row] = {"error": prompt.unusable}
                continue
            count.cut_prompts += len(prompt.ids) > limit
            ids = truncate(prompt.ids, limit, "left")
            if not self.agents.loops.batched(prompt.agent_name):
                conversations[row] = replace(prompt, ids=ids)
                continue
            room = min(self.sampling.max_tokens, self.max_model_len - len(ids))
            requests[row] = Request(
                ids,
                n,
                seed=stream_seed(self.config.rollout.seed or 0, row),
                max_tokens=room,
                images=prompt.images,
            )
        for row, completions in zip(
            requests, self.engine.generate(list(requests.values()), self.sampling), strict=True
        ):
            broken = next((c.error for c in completions if c.finish == "error"), None)
            if broken is not None:
                values[row] = {"error": str(broken)}
                continue
            texts: list[str] = []
            for completion in completions:
                text, ends = self._text(completion.ids)
                texts.append(text)
                count.tokens += len(completion.ids)
                count.cut_responses += completion.finish == "length" and not ends
            values[row] = texts
            count.responses += len(completions)
        for row, episodes in self._run_conversations(conversations).items():
            values[row] = episode_texts(episodes, self.tokenizer)
            samples = [episode.trajectory() for episode in episodes]
            count.responses += len(samples)
            for trajectory in samples:
                count.tokens += sum(trajectory.mask)
                count.cut_responses += trajectory.finish == "length"
        return values, count

    def _run_conversations(self, prompts: dict[int, Prompt]) -> dict[int, list[Episode]]:
        if not prompts:
            return {}
        if self._runner is None:
            self._runner = self.agents.runner(self.engine, max_model_len=self.max_model_len, seed=stream_seed)
        seed = self.config.rollout.seed or 0
        n = self.config.data.n_samples
        return run_episodes(self._runner, prompts, self.sampling, n, seed=seed)

    def _text(self, ids: list[int]) -> tuple[str, bool]:
        """A response up to the first of rollout.stop, and whether it has one of them."""
        end = str(self.tokenizer.eos_token or "")  # some tokenizers do not mark it as special
        whole = str(self.tokenizer.decode(ids, skip_special_tokens=True)).removesuffix(end)
        text = whole
        for stop in filter(None, self.config.rollout.stop):
            text = text.partition(stop)[0]
        return text, len(text) < len(whole)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self.engine.close()


def generate_batches(
    generator: ResponseGenerator, todo: Sequence[int], partial: PartialOutput, batch_size: int
) -> Iterator[GenerationCounts]:
    """Generate batch by batch; the rows of a batch are stored before the next batch begins."""
    for start in range(0, len(todo), batch_size):
        values, count = generator.generate(todo[start : start + batch_size])
        partial.add(values)
        yield count
