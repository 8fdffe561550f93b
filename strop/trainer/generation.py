"""`strop generate`: n answers to every row of a file, in a file of the same rows with a column `responses`.

Every row has a random stream of its own, and no batch sees what the one before it left in the engine's cache, so a job that was
killed and goes on ends with what it would have ended with.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.config.schema.inference import Generation
from strop.data.files import fetch
from strop.run.parts import Parts, refuse_other_job
from strop.trainer.generation_devices import answer_on_devices
from strop.trainer.generation_input import Questions, open_questions
from strop.trainer.generation_model import Count, Value
from strop.trainer.progress import Progress

log = logging.getLogger(__name__)

METADATA = b"strop.generation"
RESPONSES = "responses"


@dataclass(frozen=True)
class Summary:
    output: str
    rows: int
    fresh: Count
    """Of this process; the other rows were finished before."""
    failed: dict[int, str]
    """Rows without answers, and why."""
    seconds: float

    def __str__(self) -> str:
        lines = [f"{self.output}: {self.rows} rows, {self.fresh.rows} of them answered now"]
        if self.fresh.tokens:
            speed = self.fresh.tokens / max(self.seconds, 1e-9)
            lines[0] += f" ({self.fresh.tokens} tokens in {self.seconds:.1f} s, {speed:.0f} tokens/s)"
        if self.fresh.cut_responses:
            lines.append(f"{self.fresh.cut_responses} of {self.fresh.responses} responses were cut at rollout.response_length.")
        if self.fresh.cut_prompts:
            lines.append(f"{self.fresh.cut_prompts} prompts were longer than rollout.prompt_length and lost their beginning.")
        if self.failed:
            row, why = next(iter(self.failed.items()))
            lines.append(f"{len(self.failed)} rows have no responses (null); the first, row {row}: {why}")
        return "\n".join(lines)


def generate(config: Generation) -> Summary:
    """Answer every row that is not answered yet and write the output."""
    questions = open_questions(config)
    output = str(config.data.output_path)
    if not output.endswith(".parquet"):
        raise ValueError(f"data.output_path={output} must end in .parquet.")
    table = questions.table()  # what cannot be written in the end is refused before the first answer
    job = _job(config, questions)
    parts = Parts(output, job)
    if _complete(parts, job):
        return Summary(output, len(questions.rows), Count(), {}, 0.0)
    done = {row: value for row, value in parts.open().items() if isinstance(value, list)}
    if done:
        log.info("%d of %d rows are answered already; going on with the others.", len(done), len(questions.rows))
    todo = [row for row in range(len(questions.rows)) if row not in done]
    start, fresh = time.perf_counter(), Count()
    if todo:
        counts = answer_on_devices(config, questions, todo, parts)
        next(counts)  # the models are loaded
        start = time.perf_counter()
        with Progress("generate", len(questions.rows), done=len(done), unit="rows") as progress:
            for count in counts:
                fresh += count
                progress.advance(count.rows, tokens=count.tokens)
    seconds = time.perf_counter() - start
    answers = parts.finished()
    failed = {row: value["error"] for row, value in sorted(answers.items()) if isinstance(value, dict)}
    if len(failed) == len(questions.rows):
        raise ValueError(f"No row could be answered. The first: {failed[0]}")
    assert answers.keys() == set(range(len(questions.rows))), "every row is answered once"
    parts.finish(lambda path: _write(path, table, answers, job))
    return Summary(output, len(questions.rows), fresh, failed, seconds)


def _job(config: Generation, questions: Questions) -> dict[str, Any]:
    """What answers depend on, by the key that says it."""
    rollout, data = config.rollout, config.data
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
        **{f"data.{name}": getattr(data, name) for name in ("prompt_key", "n_samples", "benchmark", "apply_chat_template")},
        "data.apply_chat_template_kwargs": data.apply_chat_template_kwargs,
        **{f"rollout.{name}": getattr(rollout, name) for name in (*sampled, "prompt_length", "response_length")},
    }


def _version_of(path: str | None) -> str:
    """Changes when the files of a model folder do; a hub name stands for itself."""
    folder = Path(str(path)).expanduser()
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder] if folder.is_file() else []
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16] if facts else ""


def _complete(parts: Parts, job: dict[str, Any]) -> bool:
    """Whether the output is there and is this job's; an output of something else is never overwritten."""
    import pyarrow
    import pyarrow.parquet

    if not parts.output_exists:
        return False
    try:
        schema = pyarrow.parquet.read_schema(fetch(parts.output))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if parts.started:
            log.warning("%s cannot be read; it is written again from the finished rows beside it.", parts.output)
            return False
        raise ValueError(
            f"{parts.output} exists but is no whole parquet file ({' '.join(str(error).split())[:200]}). Perhaps another "
            "program was stopped while it wrote it. Delete it, or choose another data.output_path."
        ) from error
    made_by = (schema.metadata or {}).get(METADATA)
    if made_by is None:
        raise ValueError(
            f"{parts.output} exists and was not written by strop generate, so it is not overwritten. Delete it, or choose "
            "another data.output_path."
        )
    refuse_other_job(f"{parts.output} exists and is of another job", json.loads(made_by), job)
    log.info("%s is complete already.", parts.output)
    return True


def _write(path: Path, table: Any, answers: dict[int, Value], job: dict[str, Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    if RESPONSES in table.column_names:
        log.info("The input has a column %s already; the output has the new ones.", RESPONSES)
        table = table.drop_columns([RESPONSES])
    texts = [value if isinstance(value := answers[row], list) else None for row in range(table.num_rows)]
    table = table.append_column(RESPONSES, pyarrow.array(texts, type=pyarrow.list_(pyarrow.string())))
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), METADATA: json.dumps(job)})
    pyarrow.parquet.write_table(table, path)
