"""`Run`: what a training function returns."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from strop.api.table import Table
from strop.config.openrlhf.convert import shell_word

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from strop.config.schema.roots import TrainingConfig

Config = TypeVar("Config", bound="TrainingConfig")
PLOTTED = (
    "critic/score/mean",
    "train/loss",
    "val/loss",
    "response_length/mean",
)
"""Metrics that `Run.plot` draws by itself, if the run has them; the first one that is there."""
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that a file of metrics holds as texts, because JSON has none of them."""
SPLITS = ("train", "validation")
"""What a run keeps samples of."""


@dataclass(frozen=True)
class Chart:
    """An image file. A notebook displays it."""

    path: Path

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


@dataclass
class Run(Generic[Config]):
    """A training run that has ended: its metrics, samples, model and configuration."""

    config: Config
    """The typed configuration."""
    verb: str
    """The program of the command line: ppo, sft, rm or dpo."""
    arguments: list[str]
    """The words of the command line after the verb."""
    folder: Path
    """The folder of the run: checkpoints, metrics, samples, and in `inputs` the objects it was given."""
    step: int
    """The last step that is finished."""
    total_steps: int
    """The number of steps of the whole run."""
    problems: list[str] = field(default_factory=list)
    """Reasons why no command line can start the same run."""
    rows: list[dict[str, object]] = field(default_factory=list)
    """Metrics of the steps that this process has done."""
    _model: PreTrainedModel | None = None
    _tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def finished(self) -> bool:
        """Whether all steps are done. If not, the same call continues from the last checkpoint."""
        return self.step >= self.total_steps

    @property
    def metrics(self) -> Table:
        """A row per step, also of the steps before a resumption: `step` and every metric of it."""
        from strop.run.health.monitor import read_metrics

        file = self.folder / "metrics.jsonl"
        logger = self.config.trainer.logger
        names = [logger] if isinstance(logger, str) else logger
        if not {"file", "jsonl"} & set(names) or not file.exists():
            return Table(self.rows)
        found: dict[int, dict[str, object]] = {}
        for metrics, step in read_metrics(file):  # a validation that was repeated has a line of its own
            row = found.setdefault(step, {"step": step})
            for name, value in metrics.items():
                row[name] = NOT_FINITE.get(value, value) if isinstance(value, str) else value
        return Table(list(found.values()))

    def plot(self, *names: str, file: str | Path | None = None) -> Chart:
        """Draw metrics by step (needs matplotlib: the extra `plot`). Without names: the score or the
        loss, and the core metrics of validation. The picture is `curves.png` in the folder of the run, or
        `file`."""
        from strop.run.chart import line_chart

        metrics = self.metrics
        wanted = list(names) or self._plotted(metrics.columns)
        curves = {}
        for name in wanted:
            curves[name] = metrics.points(name)
            if not curves[name]:
                raise ValueError(f"There is no metric {name!r}. Metrics: {', '.join(metrics.columns)}.")
        target = Path(file or self.folder / "curves.png").expanduser()
        return Chart(line_chart(target, curves, title=self.folder.name))

    @staticmethod
    def _plotted(columns: list[str]) -> list[str]:
        first = [name for name in PLOTTED if name in columns][:1]
        return first + [name for name in columns if name.startswith("val-core/")]

    def samples(self, step: int | None = None, split: str = "train") -> Table:
        """Samples of a step (by default the last one that has some): prompt, response, score and more.

        `split` is train or validation. trainer.samples_to_keep says how many are kept of a step.
        """
        from strop.data.files import open_file
        from strop.run.sample_table import FOLDER, file_name, parse_name

        if split not in SPLITS:
            raise ValueError(f"There is no split {split!r}. Set split to {' or '.join(SPLITS)}.")
        folder = self.folder / FOLDER
        steps = []
        for file in folder.glob(f"{split}_*.parquet"):
            parsed = parse_name(file.name)
            if parsed is not None:
                steps.append(parsed[1])
        if not steps:
            return Table([])
        chosen = max(steps) if step is None else step
        if chosen not in steps:
            raise ValueError(
                f"There are no {split} samples of step {chosen}; there are some of {sorted(steps)}."
            )
        rows = open_file(str(folder / file_name(split, chosen)))
        return Table([_shown_sample(rows[row]) for row in range(len(rows))])

    @property
    def model(self) -> PreTrainedModel:
        """The trained model, a plain module of transformers (adapters merged), in evaluation mode."""
        if self._model is None:
            self._model, self._tokenizer = _from_checkpoint(self)
        return self._model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with the chat template of the run."""
        if self._tokenizer is None:
            self._model, self._tokenizer = _from_checkpoint(self)
        return self._tokenizer

    def save(self, folder: str | Path) -> Path:
        """Write the model and its tokenizer as a folder that transformers loads."""
        from strop.api.models import write_module

        target = Path(folder).expanduser()
        write_module(self.model, target)
        self.tokenizer.save_pretrained(target)
        return target

    def command(self) -> str:
        """The command line of the same run. A ValueError if it uses a function that exists in this process
        only."""
        if self.problems:
            raise ValueError("No command line does the same: " + " ".join(self.problems))
        words = " \\\n  ".join(shell_word(word) for word in self.arguments)
        return f"strop {self.verb} \\\n  {words}"

    def __repr__(self) -> str:
        return f"<strop {self.verb} run: step {self.step} of {self.total_steps}, {self.folder}>"


def _shown_sample(row: dict[str, object]) -> dict[str, object]:
    """What a person reads of a sample, without the values of every token."""
    reported = row.get("reported")
    shown = {name: row.get(name) for name in SAMPLE_COLUMNS}
    if isinstance(reported, str):
        for name, value in json.loads(reported).items():
            shown.setdefault(name, value)
    return shown


SAMPLE_COLUMNS = ("step", "prompt", "response", "score", "ground_truth", "group", "truncated", "failed")


def _from_checkpoint(run: Run[Config]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of the newest checkpoint, for runs whose ranks were processes of their own."""
    import transformers

    from strop.run.checkpoint.layout import read_latest

    step = read_latest(run.folder)
    role = "actor" if run.verb == "ppo" else "model"
    export = run.folder / f"global_step_{step}" / role / "huggingface"
    if step is None or not (export / "config.json").exists():
        raise ValueError(
            f"The run was in processes of its own, which have ended, and {run.folder} has no checkpoint with "
            "a Hugging Face folder. Set trainer.save_freq, and add hf_model to the save_contents of the "
            "checkpoint; or use `strop merge` on a checkpoint."
        )
    kind = transformers.AutoConfig.from_pretrained(export).architectures[0]
    model: PreTrainedModel = getattr(transformers, kind).from_pretrained(export)
    return model, transformers.AutoTokenizer.from_pretrained(export)
