"""Supervised training from Python: `sft`, `dpo` and `reward_model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.api.callbacks import CallerObserver, OnStep, Stop
from strop.api.launch import Prepared, draft_config, inputs_folder, launch
from strop.api.rows import Data, columns_of, is_files, open_files, paths_of, read_rows, write_rows
from strop.api.run import Run
from strop.api.settings import Settings
from strop.config.schema.supervised import DpoConfig, RmConfig, SftConfig
from strop.data.schema import to_plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_ROWS = 32
"""Rows per update where neither the caller nor the data says less."""


def sft(
    model: str | Path | PreTrainedModel,
    train: Data,
    *,
    val: Data | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_step: OnStep | None = None,
    stop: Stop | None = None,
    progress: bool = True,
    **keys: object,
) -> Run[SftConfig]:
    """Supervised fine-tuning.

    train, val: rows with `messages` (conversations), with `prompt` and `response` (or `completion`), or with
    `text`, of which every token is trained. `prompt_key`, `response_key` and `data.multiturn.messages_key`
    name other columns.

    The other arguments are those of `grpo`.
    """
    return _train("sft", model, train, val, tokenizer, CallerObserver(on_step, None, stop, progress), keys)


def dpo(
    model: str | Path | PreTrainedModel,
    train: Data,
    *,
    val: Data | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_step: OnStep | None = None,
    stop: Stop | None = None,
    progress: bool = True,
    **keys: object,
) -> Run[DpoConfig]:
    """Train on pairs of responses (direct preference optimization).

    train, val: rows with `chosen` and `rejected`, and `prompt` if these do not contain it. The reference is
    the initial model, or `ref.path`.

    The other arguments are those of `grpo`.
    """
    return _train("dpo", model, train, val, tokenizer, CallerObserver(on_step, None, stop, progress), keys)


def reward_model(
    model: str | Path | PreTrainedModel,
    train: Data,
    *,
    val: Data | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_step: OnStep | None = None,
    stop: Stop | None = None,
    progress: bool = True,
    **keys: object,
) -> Run[RmConfig]:
    """Train a reward model on pairs of responses.

    train, val: rows as for `dpo`. A language model gets a new scalar head.

    The other arguments are those of `grpo`.
    """
    return _train("rm", model, train, val, tokenizer, CallerObserver(on_step, None, stop, progress), keys)


def _train(
    verb: str,
    model: str | Path | PreTrainedModel,
    train: Data,
    val: Data | None,
    tokenizer: PreTrainedTokenizerBase | None,
    observer: CallerObserver,
    keys: dict[str, object],
) -> Run[Any]:
    root = f"{verb}_trainer"
    settings = Settings(root, keys)
    config = draft_config(root, settings.arguments())
    folder = inputs_folder(config)
    settings.set_model("model", model, tokenizer, folder)
    columns, first, rows = _set_files(settings, "data.train_files", train, folder, "train")
    if val is not None:
        _set_files(settings, "data.val_files", val, folder, "val")
    if verb == "sft":
        set_columns(settings, columns)
    elif "prompt" in columns and not holds_prompt(first):
        settings.default("data.prompt_key", "prompt")
    settings.default("data.train_batch_size", min(MAX_ROWS, rows))
    settings.default("data.use_dynamic_bsz", True)
    observer.title = f"{config.trainer.project_name} / {config.trainer.experiment_name}"
    return launch(Prepared(root, verb, f"strop.trainer.main_{verb}", settings.arguments()), observer)


def _set_files(
    settings: Settings, key: str, data: Data, folder: Path, name: str
) -> tuple[Sequence[str], Mapping[str, object], int]:
    """Set the files of the data; returns its columns, its first row and the number of rows."""
    if is_files(data):
        files = open_files(data, name)
        settings.set(key, paths_of(data), name)
        return files.columns, files[0], len(files)
    rows = read_rows(data, name)
    settings.set(key, str(write_rows(rows, folder, name)), name)
    return columns_of(rows), rows[0], len(rows)


def holds_prompt(row: Mapping[str, object]) -> bool:
    """Whether the chosen response of a row is a whole conversation, which a column `prompt` only repeats."""
    chosen = to_plain(row.get("chosen"))
    if not isinstance(chosen, list) or not chosen or not isinstance(chosen[0], Mapping):
        return False
    return chosen[0].get("role") != "assistant"


def set_columns(settings: Settings, columns: Sequence[str]) -> None:
    """The form of SFT rows, where the caller has not named its columns."""
    if any(map(settings.has, ("data.prompt_key", "data.response_key", "data.multiturn"))):
        return
    if "messages" in columns:
        settings.default("data.multiturn.enable", True)
    elif "prompt" in columns and "response" not in columns and "completion" in columns:
        settings.default("data.response_key", "completion")
    elif "prompt" not in columns and "text" in columns:
        settings.default("data.prompt_key", "text")
        settings.default("data.response_key", None)
        settings.default("data.pretrain_mode", True)
        settings.default("data.apply_chat_template", False)
