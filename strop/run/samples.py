"""Writes the samples of a step: tables for the board, text for people, and the batch of a non-finite loss.

For the board, the training loop submits a step and continues; a thread decodes, compresses and writes some
groups (sample_table.py). A failure there never stops a run: it is logged once. A file appears under its name
only when it is complete.

As text (`trainer.rollout_data_dir`), a step is `<folder>/<step>.jsonl` with one line per response. The first
columns are verl's: input, output, gts, score, step. Then come the columns that the scorer or the agent loop
reported, then Strop's, which say where a response came from. A column that only some responses have is null
in the rest. Multi-turn conversations have their turns under `messages`, and the first of them are also
written as text in `<folder>/<step>.txt`.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.run.atomic_files import replace_text, to_json, write_file
from strop.run.checkpoint.tensor_files import write_tensors
from strop.run.sample_table import FOLDER, SampleJob, TokenTexts, parse_name, sample_table, write_samples
from strop.types import Batch, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
MAX_PENDING_STEPS = 2
"""Steps that may wait for the disk; more would take memory that training needs."""
Decode = Callable[[list[int]], str]
MAX_TRANSCRIPTS = 32
"""Conversations of a step that are written as text."""


@dataclass(frozen=True)
class UpdateLogProbs:
    """Log-probs that the update of a step computed for some of its rows."""

    rows: Tensor
    """Their positions in the step's original order."""
    log_probs: Tensor
    entropy: Tensor | None = None


class SampleWriter:
    """Writes at most `max_samples` samples of each step: whole groups of one prompt, evenly spaced in the
    step."""

    def __init__(self, directory: Path, *, max_samples: int, texts: TokenTexts):
        self.folder = directory / FOLDER
        self.max_samples = max_samples
        self.texts = texts
        self._warned = threading.Lock()
        """Held from the first warning on."""
        self._jobs: queue.Queue[SampleJob | None] = queue.Queue(MAX_PENDING_STEPS)
        self._thread: threading.Thread | None = None

    def begin(self, resumed_from: int | None) -> None:
        """Delete samples of later steps when a run resumes; rename the folder of an older run for a new
        one."""
        try:
            if resumed_from is None:
                set_folder_aside(self.folder)
                return
            for file in self.folder.glob("*.parquet"):
                parsed = parse_name(file.name)
                if parsed is not None and parsed[1] > resumed_from:
                    file.unlink()
        except OSError as error:
            self._warn_once(f"older samples could not be put away: {error}")

    def submit(
        self,
        split: str,
        step: int,
        trajectories: Sequence[Trajectory],
        batch: Batch | None = None,
        log_probs: UpdateLogProbs | None = None,
    ) -> None:
        """Queue a step for writing. `batch` has the same rows, in the same order; `log_probs` are those of
        its update."""
        rows = choose_rows(trajectories, self.max_samples)
        if not rows:
            return
        chosen = [trajectories[row] for row in rows]
        tables = {} if batch is None else token_tables(batch, rows, log_probs)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="samples", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait(SampleJob(split, step, chosen, tables))
        except queue.Full:
            self._warn_once(f"the disk is slower than the run, so those of step {step} are left out")

    def close(self) -> None:
        """Wait until every submitted step is on the disk."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                write_samples(self.folder, job.split, job.step, sample_table(job, self.texts))
            except Exception as error:  # noqa: BLE001 - samples must not stop a run
                self._warn_once(f"step {job.step}: {type(error).__name__}: {error}")

    def _warn_once(self, problem: str) -> None:
        if self._warned.acquire(blocking=False):
            log.warning("Samples for the board: %s. Training continues; this is logged once.", problem)


def choose_rows(trajectories: Sequence[Trajectory], max_samples: int) -> list[int]:
    """Rows of whole groups, about `max_samples` in all, evenly spaced: independent of any score.

    The first group is always chosen, however large it is.
    """
    groups: dict[int, list[int]] = {}
    for row, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.group, []).append(row)
    if not groups or max_samples < 1:
        return []
    largest = max(map(len, groups.values()))
    count = min(len(groups), max(1, max_samples // largest))
    rows_by_group = list(groups.values())
    chosen: list[int] = []
    for i in range(count):
        chosen += rows_by_group[i * len(rows_by_group) // count]
    return chosen


def token_tables(batch: Batch, rows: Sequence[int], log_probs: UpdateLogProbs | None) -> dict[str, Tensor]:
    """What the trainer computed for the tokens of these rows, copied to the host; [rows, T] each."""
    import torch

    index = torch.as_tensor(list(rows), dtype=torch.long)
    fields = {
        "trained_log_probs": batch.old_log_probs,
        "ref_log_probs": batch.ref_log_probs,
        "entropy": batch.entropy,
        "advantages": batch.advantages,
        "values": batch.values,
        "mask": batch.mask,
    }
    tables = {}
    for name, table in fields.items():
        if table is not None:
            tables[name] = table[index.to(table.device)].float().cpu()
    if batch.old_log_probs is None and log_probs is not None:
        tables["trained_log_probs"] = _select_rows(log_probs.rows, log_probs.log_probs, index)
        if log_probs.entropy is not None:
            tables["entropy"] = _select_rows(log_probs.rows, log_probs.entropy, index)
    return tables


def _select_rows(rows: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """The rows of the table in the order of `index`; NaN where a row was not computed."""
    import torch

    positions = torch.full((int(max(rows.max(), index.max())) + 1,), -1)
    positions[rows.cpu()] = torch.arange(len(rows))
    found = positions[index]
    return torch.where((found >= 0)[:, None], table.float().cpu()[found], float("nan"))


def set_folder_aside(folder: Path) -> None:
    """Give an existing folder the next free number: samples becomes samples.1."""
    if folder.is_dir():
        count = 1
        while (other := folder.with_name(f"{folder.name}.{count}")).exists():
            count += 1
        folder.rename(other)


def dump_trajectories(
    folder: str | Path, step: int, trajectories: Sequence[Trajectory], *, decode: Decode
) -> None:
    """Write the samples of a step as rows and as transcripts. A disk that fails does not stop a run."""
    folder = Path(folder).expanduser()
    try:
        dump(folder, step, rollout_rows(trajectories, step=step, decode=decode))
        write_transcripts(folder, step, trajectories, decode=decode)
    except OSError as error:
        log.warning("The samples of step %d are not in %s: %s. Training continues.", step, folder, error)


def dump(folder: str | Path, step: int, rows: Iterable[Mapping[str, object]]) -> Path:
    """Write the rows of a step; a file of an earlier attempt at this step is replaced."""
    target = Path(folder) / f"{step}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.new")
    try:
        write_file(temporary, (to_json(row).encode() + b"\n" for row in rows))
        return temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def rollout_rows(trajectories: Sequence[Trajectory], *, step: int, decode: Decode) -> list[dict[str, object]]:
    """Rows for `dump`; `decode` turns tokens into text, without special tokens as in verl.

    A key of the scorer or the agent replaces Strop's column of the same name, and never one of verl's.
    """
    reported: dict[str, None] = {}
    for trajectory in trajectories:
        reported.update(dict.fromkeys(trajectory.extras))
    has_turns = any(trajectory.turns for trajectory in trajectories)
    rows = []
    for trajectory in trajectories:
        first: dict[str, object] = {
            "input": decode(trajectory.prompt.ids),
            "output": decode(trajectory.response),
            "gts": trajectory.prompt.ground_truth,
            "score": trajectory.reward,
            "step": step,
        }
        extras = {key: trajectory.extras.get(key) for key in reported}
        origin = _origin(trajectory)
        for key in reported:
            origin.pop(key, None)
        if has_turns:
            origin["messages"] = messages_of(trajectory, decode) if trajectory.turns else None
        rows.append({**first, **extras, **origin, **first})
    return rows


def messages_of(trajectory: Trajectory, decode: Decode) -> list[dict[str, object]]:
    """The turns after the prompt: role, text, number of tokens, and the reward of the turn where it has
    one."""
    messages = []
    for turn in trajectory.turns:
        message: dict[str, object] = {
            "role": turn.role,
            "content": decode(trajectory.response[turn.start : turn.end]),
            "tokens": turn.end - turn.start,
        }
        if turn.end - 1 in trajectory.turn_rewards:
            message["reward"] = trajectory.turn_rewards[turn.end - 1]
        messages.append(message)
    return messages


def write_transcripts(
    folder: str | Path, step: int, trajectories: Sequence[Trajectory], *, decode: Decode
) -> Path | None:
    """Write the first multi-turn conversations as text; None where there are none."""
    chosen = [t for t in trajectories if len(t.turns) > 1][:MAX_TRANSCRIPTS]
    if not chosen:
        return None
    target = Path(folder) / f"{step}.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_file(target, (_transcript(t, decode).encode(errors="replace") for t in chosen))
    return target


def _transcript(trajectory: Trajectory, decode: Decode) -> str:
    prompt = trajectory.prompt
    ended = trajectory.extras.get("stopped", trajectory.finish)
    reward = "failed" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    lines = [
        f"===== row {prompt.index} of {prompt.data_source}: {reward}, {ended}",
        f"[prompt]\n{decode(prompt.ids)}",
    ]
    for message in messages_of(trajectory, decode):
        earned = f" ({message['reward']:+g})" if "reward" in message else ""
        lines.append(f"[{message['role']}]{earned}\n{message['content']}")
    return "\n".join(lines) + "\n\n"


def _origin(trajectory: Trajectory) -> dict[str, object]:
    """Strop's own columns: where a response comes from."""
    sampled = sum(trajectory.mask)
    return {
        "data_source": trajectory.prompt.data_source,
        "index": trajectory.prompt.index,
        "group": trajectory.group,
        "finish": trajectory.finish,
        "num_turns": trajectory.num_turns,
        "weights_version": trajectory.version,
        "prompt_tokens": len(trajectory.prompt.ids),
        "response_tokens": len(trajectory.response),
        "sampled_tokens": sampled,
        "mean_log_prob": sum(trajectory.log_probs) / sampled if sampled else None,
    }


# --- the batch of a non-finite loss -------------------------------------------------------------------------


def write_evidence(
    folder: Path,
    batch: Batch,
    texts: Sequence[Mapping[str, object]],
    *,
    step: int,
    message: str,
    suspects: Sequence[int],
    not_finite: Sequence[str],
) -> None:
    """Write what is needed to compute a step with a non-finite loss again: batch.safetensors, with every
    tensor of the batch, and rows.json, with the text of all rows and which of them are suspect."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "batch.safetensors", tensors_of(batch))
    rows: list[dict[str, object]] = []
    for row, (text, (prompt, response)) in enumerate(zip(texts, _prompts_and_responses(batch), strict=True)):
        ids = {"prompt_ids": prompt, "response_ids": response}
        rows.append({"row": row, "suspect": row in suspects, **text, **ids})
    content = {
        "step": step,
        "message": message,
        "suspects": list(suspects),
        "not_finite": list(not_finite),
        "rows": rows,
    }
    replace_text(folder / "rows.json", to_json(content, indent=1))


def batch_rows(batch: Batch, decode: Decode) -> list[dict[str, object]]:
    """The text of the rows of a batch, from their tokens."""
    return [
        {"input": decode(prompt), "output": decode(response)}
        for prompt, response in _prompts_and_responses(batch)
    ]


def _prompts_and_responses(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Prompt and response of each row."""
    cuts = zip(batch.sequences, batch.prompt_lengths.tolist(), strict=True)
    return [(ids[:prompt].tolist(), ids[prompt:].tolist()) for ids, prompt in cuts]


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch by name, without images; token ids are concatenated, with the length of each
    sequence."""
    import torch

    tensors = {"token_ids": torch.cat(batch.sequences), "lengths": torch.tensor(batch.lengths)}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            tensors[field.name] = value
    return tensors
