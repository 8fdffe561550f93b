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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.multiprocessing as processes

from strop.config.schema.inference import GenerationConfig
from strop.data.files import fetch
from strop.inference.generation_model import Answerer, Count, Questions, Value, answer_rows, open_questions
from strop.inference.resumable_rows import Parts, ProgressBar, refuse_other_job
from strop.registry import load_plugins
from strop.shared.backend_maker import device_of
from strop.shared.process_setup import prepare_process

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    import pyarrow

POLL_SECONDS = 1.0


def answer_on_devices(
    config: GenerationConfig, questions: Questions, todo: Sequence[int], parts: Parts
) -> Iterator[Count]:
    """Generate for the rows `todo` on all devices of the `trainer` section.

    Yields an empty count when the models are loaded, then one count per batch."""
    device = device_of(config.trainer.device)
    count = config.trainer.n_gpus_per_node
    if config.trainer.nnodes > 1:
        raise ValueError(
            f"trainer.nnodes={config.trainer.nnodes}: generation runs on the devices of one machine. Divide "
            "the file and start one job per machine, with an output_path each."
        )
    if device.type == "cuda" and count > torch.cuda.device_count():
        raise ValueError(
            f"trainer.n_gpus_per_node={count}, but torch sees {torch.cuda.device_count()} GPUs here."
        )
    if count == 1 or len(todo) <= 1:
        answerer = Answerer(config, questions, device)
        yield Count()
        yield from answer_rows(answerer, todo, parts, config.data.batch_size)
        answerer.close()
        return
    yield from _spawn(config, todo, parts, device.type, count)


def _spawn(
    config: GenerationConfig, todo: Sequence[int], parts: Parts, kind: str, count: int
) -> Iterator[Count]:
    context = processes.get_context("spawn")
    counts: Queue[Count] = context.Queue()
    started = processes.spawn(
        _work, (config, list(todo), parts, kind, count, counts), nprocs=count, join=False
    )
    running = True
    while running or not counts.empty():
        try:
            yield counts.get(timeout=POLL_SECONDS)
        except queue.Empty:
            running = not started.join(timeout=0)  # raises the error of a worker, and ends all workers


def _work(
    rank: int,
    config: GenerationConfig,
    todo: list[int],
    parts: Parts,
    kind: str,
    count: int,
    counts: Queue[Count],
) -> None:
    prepare_process()
    load_plugins(config.plugins)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, rank)
    if kind == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // count))
    answerer = Answerer(config, open_questions(config), device)
    counts.put(Count())
    for batch in answer_rows(answerer, todo[rank::count], parts, config.data.batch_size):
        counts.put(batch)
    answerer.close()


log = logging.getLogger(__name__)

METADATA = b"strop.generation"
RESPONSES = "responses"


@dataclass(frozen=True)
class Summary:
    output: str
    rows: int
    fresh: Count
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


def generate(config: GenerationConfig) -> Summary:
    """Generate for every row that is not finished yet, and write the output."""
    questions = open_questions(config)
    output = str(config.data.output_path)
    if not output.endswith(".parquet"):
        raise ValueError(f"data.output_path={output} must end in .parquet.")
    table = questions.table()  # raises before generation if the input cannot be copied
    job = _job(config, questions)
    parts = Parts(output, job)
    if _complete(parts, job):
        return Summary(output, len(questions.rows), Count(), {}, 0.0)
    done = {row: value for row, value in parts.open().items() if isinstance(value, list)}
    if done:
        log.info(
            "%d of %d rows are answered already; going on with the others.", len(done), len(questions.rows)
        )
    todo = [row for row in range(len(questions.rows)) if row not in done]
    start = time.perf_counter()
    fresh = Count()
    if todo:
        counts = answer_on_devices(config, questions, todo, parts)
        next(counts)  # the models are loaded
        start = time.perf_counter()
        with ProgressBar("generate", len(questions.rows), done=len(done), unit="rows") as progress:
            for count in counts:
                fresh += count
                progress.advance(count.rows, tokens=count.tokens)
    seconds = time.perf_counter() - start
    answers = parts.finished()
    failed: dict[int, str] = {}
    for row, value in sorted(answers.items()):
        if isinstance(value, dict):
            failed[row] = value["error"]
    if len(failed) == len(questions.rows):
        raise ValueError(f"No row could be answered. The first: {failed[0]}")
    assert answers.keys() == set(range(len(questions.rows))), "every row is answered once"
    parts.finish(lambda path: _write(path, table, answers, job))
    return Summary(output, len(questions.rows), fresh, failed, seconds)


def _job(config: GenerationConfig, questions: Questions) -> dict[str, object]:
    """The settings that determine the responses, by config key."""
    rollout = config.rollout
    data = config.data
    sampled = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "do_sample",
        "ignore_eos",
        "repetition_penalty",
        "seed",
        "dtype",
        "stop",
    )
    return {
        "the content of data.path": questions.fingerprint,
        "model.path": config.model.path,
        "the weights in model.path": _version_of(config.model.path),
        "model.lora_adapter_path": config.model.lora_adapter_path,
        **{
            f"data.{name}": getattr(data, name)
            for name in ("prompt_key", "n_samples", "benchmark", "apply_chat_template")
        },
        "data.apply_chat_template_kwargs": data.apply_chat_template_kwargs,
        **{
            f"rollout.{name}": getattr(rollout, name)
            for name in (*sampled, "prompt_length", "response_length")
        },
    }


def _version_of(path: str | None) -> str:
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


def _complete(parts: Parts, job: Mapping[str, object]) -> bool:
    """Whether the output of this job exists; raises if the file belongs to something else."""
    import pyarrow
    import pyarrow.parquet

    if not parts.output_exists:
        return False
    try:
        schema = pyarrow.parquet.read_schema(fetch(parts.output))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if parts.started:
            log.warning(
                "%s cannot be read; it is written again from the finished rows beside it.", parts.output
            )
            return False
        raise ValueError(
            f"{parts.output} exists but is no whole parquet file ({' '.join(str(error).split())[:200]}). "
            "Perhaps another program was stopped while it wrote it. Delete it, or choose another "
            "data.output_path."
        ) from error
    made_by = (schema.metadata or {}).get(METADATA)
    if made_by is None:
        raise ValueError(
            f"{parts.output} exists and was not written by strop generate, so it is not overwritten. Delete "
            "it, or choose another data.output_path."
        )
    refuse_other_job(f"{parts.output} exists and is of another job", json.loads(made_by), job)
    log.info("%s is complete already.", parts.output)
    return True


def _write(path: Path, table: pyarrow.Table, answers: dict[int, Value], job: Mapping[str, object]) -> None:
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
