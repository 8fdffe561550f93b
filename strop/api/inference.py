"""Responses and scores from Python: `generate` and `evaluate`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.api.launch import only_run, random_states_kept
from strop.api.models import quiet_transformers
from strop.api.reinforcement import Reward, check_columns, reward_function
from strop.api.rows import Data, PlainRow, RowKeys, is_files, open_files, prompt_rows, read_rows, write_rows
from strop.api.settings import Settings
from strop.api.table import Table
from strop.config.compose import load
from strop.data.fetch import FORMATS
from strop.data.schema import to_plain
from strop.registry import forget_changed_files
from strop.rewards.signatures import without_facts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from strop.inference.evaluation import ScoredPrompt, SourceResult


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model, or of responses that were given."""

    sources: Mapping[str, SourceResult]
    """Counts and metrics with confidence intervals, by data source: score, pass@k, maj@k ..., and the other
    numbers that the reward returns."""
    rows: Table
    """A row per prompt: prompt, responses and their scores."""

    def __getitem__(self, metric: str) -> float:
        """A metric over all data sources: the mean over prompts."""
        total = 0.0
        prompts = 0
        for result in self.sources.values():
            if metric in result.metrics:
                total += result.metrics[metric].mean * result.prompts
                prompts += result.prompts
        if not prompts:
            known = sorted({name for result in self.sources.values() for name in result.metrics})
            raise KeyError(f"There is no metric {metric!r}. Metrics: {', '.join(known)}.")
        return total / prompts

    def __repr__(self) -> str:
        lines = []
        for source, result in self.sources.items():
            values = ", ".join(f"{name} {estimate.mean:.4g}" for name, estimate in result.metrics.items())
            lines.append(f"{source}: {result.prompts} prompts, {result.responses} responses; {values}")
        return "\n".join(lines)


def generate(
    model: str | Path | PreTrainedModel,
    prompts: Data | Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    output: str | Path | None = None,
    **keys: object,
) -> Table:
    """Responses of a model: the rows of the prompts with a column `responses`.

    prompts: texts, or rows with a prompt (text or messages) as for `grpo`.
    output: a .parquet file for the result, from which an interrupted call continues.
    keys: any key of the configuration `generation`: n (responses per prompt, by default 1), temperature,
        max_response_length, top_p (by default 0.7) and top_k (50), seed ... Training samples with top_p=1 and
        without top_k.
    """
    column = _prompt_key(keys)
    given = _given_rows(prompts, column)
    rows = prompt_rows(given, RowKeys(column), "prompts")
    if output is not None:
        output = Path(output).expanduser()
    with _folder_for(output) as folder, only_run(), random_states_kept(), quiet_transformers():
        file = _generate(model, rows, tokenizer, folder, output, dict(keys))
        return Table([_answered(*row) for row in zip(given, rows, _rows_of(file), strict=True)])


def evaluate(
    model: str | Path | PreTrainedModel | None,
    data: Data,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward_weights: Sequence[float] | None = None,
    **keys: object,
) -> Evaluation:
    """Scores of a model on rows with a prompt, or (model=None) of rows that have `responses`.

    reward: as for `grpo`. Without one, the data_source of a row chooses the scorer.
    keys: those of `generate` (without a model: prompt_key only), and those of the configuration `evaluation`
        by their full names.
    """
    function, styles = reward_function(reward, reward_weights)
    if is_files(data):
        rows = read_rows(open_files(data, "data"), "data")
    else:
        rows = read_rows(data, "data")
    check_columns(rows, styles, "data")
    scoring = {name: keys.pop(name) for name in list(keys) if name.startswith("evaluation.")}
    column = _prompt_key(keys)
    made = prompt_rows(rows, RowKeys(column, known=("responses",)), "data")
    if model is None:
        _refuse_unused(keys)
    with _folder_for(None) as folder, only_run(), random_states_kept(), quiet_transformers():
        if model is None:
            file = write_rows(made, folder, "responses")
        else:
            file = _generate(model, made, tokenizer, folder, None, dict(keys))
        return _evaluate(file, column, function, scoring)


def _evaluate(
    file: Path, column: str, function: Callable[..., object] | None, scoring: Mapping[str, object]
) -> Evaluation:
    from strop.inference.evaluation import evaluate as score_file
    from strop.inference.evaluation import summarise
    from strop.preflight.examine import require

    forget_changed_files()
    settings = Settings("evaluation", scoring)
    settings.set("data.path", str(file), "data")
    settings.set("data.prompt_key", column, "prompt_key")
    loaded = load("evaluation", settings.arguments())
    require(loaded, quiet=True)
    scored = score_file(loaded.config, given=function)
    return Evaluation(
        summarise(scored, loaded.config.evaluation), Table([_scored_row(row) for row in scored])
    )


def _scored_row(prompt: ScoredPrompt) -> dict[str, object]:
    return {
        **without_facts(prompt.extra_info),
        "prompt": prompt.prompt,
        "responses": prompt.responses,
        "scores": prompt.scores,
        "data_source": prompt.source,
        "ground_truth": prompt.truth,
        "errors": prompt.errors,
    }


def _prompt_key(keys: Mapping[str, object]) -> str:
    """The column with the prompts, which the keys may name."""
    return str(load("generation", Settings("generation", keys).arguments()).config.data.prompt_key)


def _refuse_unused(keys: Mapping[str, object]) -> None:
    """A ValueError for keys that would change nothing, because nothing is generated."""
    unused = [f"{name}={keys[name]!r}" for name in keys if name.rpartition(".")[2] != "prompt_key"]
    if unused:
        raise ValueError(
            f"model=None scores the responses of the rows and generates none, so {', '.join(unused)} would "
            "change nothing. Leave it out, or give a model. Keys of the scoring begin with evaluation. "
            '(**{"evaluation.timeout": 60}).'
        )


def _given_rows(prompts: Data | Sequence[str], column: str) -> list[PlainRow]:
    """The rows as the caller gave them; texts are rows with the column `column`."""
    if isinstance(prompts, str) and not (prompts.endswith(FORMATS) or os.path.exists(prompts)):
        raise ValueError(
            f"prompts is one text, {prompts[:40]!r}. Give a list of texts, or the path of a file."
        )
    if is_files(prompts):
        return read_rows(open_files(prompts, "prompts"), "prompts")
    if isinstance(prompts, list | tuple) and all(isinstance(prompt, str) for prompt in prompts):
        return read_rows([{column: prompt} for prompt in prompts], "prompts")
    return read_rows(prompts, "prompts")


def _generate(
    model: str | Path | PreTrainedModel,
    rows: list[PlainRow],
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    output: str | Path | None,
    keys: dict[str, object],
) -> Path:
    """Generate by the program of the command line; returns its file."""
    from strop.inference.generation import generate as generate_file
    from strop.models.patches import undo_all_patches
    from strop.preflight.examine import require

    forget_changed_files()
    settings = Settings("generation", keys)
    settings.set_model("model", model, tokenizer, folder)
    settings.set("data.path", str(write_rows(rows, folder, "prompts")), "prompts")
    file = Path(output) if output is not None else folder / "responses.parquet"
    settings.set("data.output_path", str(file), "output")
    settings.default("data.n_samples", 1)
    loaded = load("generation", settings.arguments())
    require(loaded, quiet=True)
    try:
        generate_file(loaded.config)
    finally:
        undo_all_patches()
    return file


@contextmanager
def _folder_for(output: str | Path | None) -> Iterator[Path]:
    """A folder for inputs: next to the output, or one that is deleted afterwards."""
    if output is not None:
        target = Path(output)
        yield target.with_name(f"{target.stem}.inputs")
        return
    with tempfile.TemporaryDirectory(prefix="strop-") as folder:
        yield Path(folder)


def _rows_of(file: Path) -> Iterator[dict[str, Any]]:
    files = open_files(str(file), "output")
    for row in range(len(files)):
        yield files[row]


def _answered(given: PlainRow, made: PlainRow, row: Mapping[str, object]) -> dict[str, object]:
    """A row as the caller gave it, with what was added to the row that was written for it: its responses."""
    return {**given, **{name: to_plain(value) for name, value in row.items() if name not in made}}
