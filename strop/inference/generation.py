"""`strop generate`: n responses to every row of a file, in a copy of the file with a column `responses`.

Every device has a process with its own model, which generates for every n-th row. Every row has its own
random stream, and no batch uses the prefix cache of an earlier batch, so a job that resumes gives the same
output as one without an interruption.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.multiprocessing as processes

from strop.config.aliases import flatten
from strop.config.schema.inference import GenerationConfig
from strop.data.chat import template_text
from strop.data.fetch import fetch
from strop.inference.generation_model import (
    GenerationCounts,
    InputRows,
    ResponseGenerator,
    RowResult,
    generate_batches,
    open_input_rows,
)
from strop.inference.resumable_rows import PartialOutput, ProgressBar, reject_other_job
from strop.registry import load_plugins
from strop.shared.build import device_of
from strop.shared.process_setup import prepare_process

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    import pyarrow

POLL_SECONDS = 1.0


def generate_on_devices(
    config: GenerationConfig, inputs: InputRows, todo: Sequence[int], partial: PartialOutput
) -> Iterator[GenerationCounts]:
    """Generate for the rows `todo` on all devices of the `trainer` section.

    Yields an empty count when the models are loaded, then one count per batch."""
    device = device_of(config.trainer.device)
    count = config.trainer.n_gpus_per_node
    if device.type == "cuda" and count > torch.cuda.device_count():
        raise ValueError(
            f"trainer.n_gpus_per_node={count}, but torch sees {torch.cuda.device_count()} GPUs here."
        )
    if count == 1 or len(todo) <= 1:
        with closing(ResponseGenerator(config, inputs, device)) as generator:
            yield GenerationCounts()
            yield from generate_batches(generator, todo, partial, config.data.batch_size)
        return
    yield from _spawn(config, todo, partial, device.type, count)


def _spawn(
    config: GenerationConfig, todo: Sequence[int], partial: PartialOutput, kind: str, count: int
) -> Iterator[GenerationCounts]:
    context = processes.get_context("spawn")
    counts: Queue[GenerationCounts] = context.Queue()
    started = processes.spawn(
        _work, (config, list(todo), partial, kind, count, counts), nprocs=count, join=False
    )
    running = True
    try:
        while running or not counts.empty():
            try:
                yield counts.get(timeout=POLL_SECONDS)
            except queue.Empty:
                running = not started.join(timeout=0)  # raises the error of a worker, and ends all workers
    finally:
        for process in started.processes:
            process.terminate()  # if this process was interrupted; it does nothing to those that have ended


def _work(
    rank: int,
    config: GenerationConfig,
    todo: list[int],
    partial: PartialOutput,
    kind: str,
    count: int,
    counts: Queue[GenerationCounts],
) -> None:
    prepare_process()
    load_plugins(config.plugins)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, rank)
    if kind == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    with closing(ResponseGenerator(config, open_input_rows(config), device)) as generator:
        counts.put(GenerationCounts())
        for batch in generate_batches(generator, todo[rank::count], partial, config.data.batch_size):
            counts.put(batch)


log = logging.getLogger(__name__)

METADATA = b"strop.generation"
RESPONSES = "responses"


@dataclass(frozen=True)
class GenerationSummary:
    output: str
    rows: int
    fresh: GenerationCounts
    """Counts of this process; all other rows were finished by earlier processes."""
    failed: dict[int, str]
    """The error of each row without responses."""
    seconds: float

    def __str__(self) -> str:
        lines = [f"{self.output}: {self.rows} rows, {self.fresh.rows} of them answered now"]
        if self.fresh.tokens:
            speed = self.fresh.tokens / max(self.seconds, 1e-9)
            lines[0] += f" ({self.fresh.tokens} tokens in {self.seconds:.1f} s, {speed:.0f} tokens/s)"
        if self.fresh.cut_responses:
            lines.append(
                f"{self.fresh.cut_responses} of {self.fresh.responses} responses were cut at "
                "rollout.response_length."
            )
        if self.fresh.cut_prompts:
            lines.append(
                f"{self.fresh.cut_prompts} prompts were longer than rollout.prompt_length and lost their "
                "beginning."
            )
        if self.failed:
            row, why = next(iter(self.failed.items()))
            lines.append(f"{len(self.failed)} rows have no responses (null); the first, row {row}: {why}")
        return "\n".join(lines)


def generate(config: GenerationConfig) -> GenerationSummary:
    """Generate for every row that is not finished yet, and write the output."""
    inputs = open_input_rows(config)
    output = str(config.data.output_path)
    table = inputs.table()  # raises before generation if the input cannot be copied
    job = _job(config, inputs)
    partial = PartialOutput(output, job)
    if _complete(partial, job):
        log.info("%s is complete already.", output)
        return GenerationSummary(output, len(inputs.rows), GenerationCounts(), {}, 0.0)
    done = {row: value for row, value in partial.open().items() if isinstance(value, list)}
    if done:
        log.info(
            "%d of %d rows have responses already; the others are generated now.", len(done), len(inputs.rows)
        )
    todo = [row for row in range(len(inputs.rows)) if row not in done]
    start = time.perf_counter()
    fresh = GenerationCounts()
    if todo:
        counts = generate_on_devices(config, inputs, todo, partial)
        next(counts)  # the models are loaded
        start = time.perf_counter()
        with ProgressBar("generate", len(inputs.rows), done=len(done), unit="rows") as progress:
            for count in counts:
                fresh += count
                progress.advance(count.rows, tokens=count.tokens)
    seconds = time.perf_counter() - start
    answers = partial.finished()
    failed: dict[int, str] = {}
    for row, value in sorted(answers.items()):
        if isinstance(value, dict):
            failed[row] = value["error"]
    if len(failed) == len(inputs.rows):
        raise ValueError(f"No row could be answered. The first: {failed[0]}")
    assert answers.keys() == set(range(len(inputs.rows))), "every row is answered once"
    partial.finish(lambda path: _write(path, table, answers, job))
    return GenerationSummary(output, len(inputs.rows), fresh, failed, seconds)


def check_output(config: GenerationConfig, inputs: InputRows) -> None:
    """Raise what `generate` would raise about its output, before a model is loaded."""
    job = _job(config, inputs)
    partial = PartialOutput(str(config.data.output_path), job)
    if not _complete(partial, job):
        partial.reject_other()


RARELY_SET = (
    "model.tokenizer_path",
    "model.hf_config_path",
    "model.override_config",
    "model.quantization",
    "rollout.max_model_len",
    "rollout.quantization",
    "rollout.kv_cache_dtype",
    "rollout.environment",
    "rollout.agent.default_agent_loop",
    "rollout.agent.agent_loop_config_path",
    "rollout.agent.command",
    "rollout.multi_turn.tool_config_path",
    "rollout.multi_turn.interaction_config_path",
    "rollout.multi_turn.format",
    "rollout.multi_turn.max_assistant_turns",
    "rollout.multi_turn.max_user_turns",
    "rollout.multi_turn.max_parallel_calls",
    "rollout.multi_turn.max_tool_response_length",
)
"""Beginnings of further keys that determine the responses. A job has those that are not the default."""


def _job(config: GenerationConfig, inputs: InputRows) -> dict[str, object]:
    """The settings that determine the responses, by config key."""
    rollout = config.rollout
    data = config.data
    more: dict[str, object] = {}
    default = flatten(asdict(GenerationConfig()))
    for key, value in flatten(asdict(config)).items():
        if key.startswith(RARELY_SET) and value != default.get(key):
            more[key] = value
    if config.model.lora_adapter_path:
        more["the weights in model.lora_adapter_path"] = _weights_fingerprint(config.model.lora_adapter_path)
    if config.model.custom_chat_template:
        text = template_text(config.model.custom_chat_template)
        more["the text of model.custom_chat_template"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {
        **more,
        "the content of data.path": inputs.fingerprint,
        "model.path": config.model.path,
        "the weights in model.path": _weights_fingerprint(config.model.path),
        "model.lora_adapter_path": config.model.lora_adapter_path,
        "data.prompt_key": data.prompt_key,
        "data.n_samples": data.n_samples,
        "data.benchmark": data.benchmark,
        "data.apply_chat_template": data.apply_chat_template,
        "data.apply_chat_template_kwargs": data.apply_chat_template_kwargs,
        "rollout.temperature": rollout.temperature,
        "rollout.top_k": rollout.top_k,
        "rollout.top_p": rollout.top_p,
        "rollout.min_p": rollout.min_p,
        "rollout.do_sample": rollout.do_sample,
        "rollout.ignore_eos": rollout.ignore_eos,
        "rollout.repetition_penalty": rollout.repetition_penalty,
        "rollout.seed": rollout.seed,
        "rollout.dtype": rollout.dtype,
        "rollout.stop": rollout.stop,
        "rollout.prompt_length": rollout.prompt_length,
        "rollout.response_length": rollout.response_length,
    }


def _weights_fingerprint(path: str | None) -> str:
    """A hash of the names, sizes and times of the files of a model; empty for a name on the hub."""
    folder = Path(str(path)).expanduser()
    files: list[Path] = []
    if folder.is_dir():
        files = sorted(folder.iterdir())
    elif folder.is_file():
        files = [folder]
    facts: list[tuple[str, int, int]] = []
    for file in files:
        if file.is_file():
            facts.append((file.name, file.stat().st_size, file.stat().st_mtime_ns))
    if not facts:
        return ""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _complete(partial: PartialOutput, job: Mapping[str, object]) -> bool:
    """Whether the output of this job exists; raises if the file belongs to something else."""
    import pyarrow
    import pyarrow.parquet

    if not partial.output_exists:
        return False
    try:
        schema = pyarrow.parquet.read_schema(fetch(partial.output))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if partial.started:
            log.warning(
                "%s cannot be read; it is written again from the finished rows in its .parts folder.",
                partial.output,
            )
            return False
        raise ValueError(
            f"{partial.output} exists but is no whole parquet file ({' '.join(str(error).split())[:200]}). "
            "Perhaps another program was stopped while it wrote it. Delete it, or choose another "
            "data.output_path."
        ) from error
    made_by = (schema.metadata or {}).get(METADATA)
    if made_by is None:
        raise ValueError(
            f"{partial.output} exists and was not written by strop generate, so it is not overwritten. "
            "Delete it, or choose another data.output_path."
        )
    reject_other_job(f"{partial.output} exists and is of another job", json.loads(made_by), job)
    return True


def _write(
    path: Path, table: pyarrow.Table, answers: dict[int, RowResult], job: Mapping[str, object]
) -> None:
    """Write the input table with the column of responses."""
    import pyarrow
    import pyarrow.parquet

    if RESPONSES in table.column_names:
        log.info("The input has a column %s already; the output has the new ones.", RESPONSES)
        table = table.drop_columns([RESPONSES])
    texts: list[list[str] | None] = []
    for row in range(table.num_rows):
        value = answers[row]
        texts.append(value if isinstance(value, list) else None)
    table = table.append_column(RESPONSES, pyarrow.array(texts, type=pyarrow.list_(pyarrow.string())))
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), METADATA: json.dumps(job)})
    pyarrow.parquet.write_table(table, path)
