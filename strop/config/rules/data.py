"""Rules of the `data` sections: files, custom classes and token budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.config.rules.findings import Findings, error

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.ppo import PpoConfig
    from strop.config.schema.roots import AnySupervisedConfig
    from strop.config.schema.supervised import DpoConfig, RmConfig


def files(loaded: Loaded[PpoConfig]) -> Findings:
    """Training needs training files, and validation alone needs validation files."""
    config = loaded.config
    if not config.data.train_files:
        yield error(
            "data.train_files",
            "not set. Name one or more parquet, json or jsonl files (`strop data` makes some).",
        )
    if config.trainer.val_only and not config.data.val_files:
        yield error("data.val_files", "trainer.val_only=true needs files to validate on.")


def custom_class(loaded: Loaded[PpoConfig]) -> Findings:
    """A custom dataset class needs both its file and its name."""
    custom = loaded.config.data.custom_cls
    if (custom.path is None) != (custom.name is None):
        yield error("data.custom_cls", f"path={custom.path!r} and name={custom.name!r}: set both or neither.")


def supervised_validation_files(loaded: Loaded[AnySupervisedConfig]) -> Findings:
    """Validation alone needs validation files."""
    if loaded.config.trainer.val_only and not loaded.config.data.val_files:
        yield error("data.val_files", "trainer.val_only=true needs files to validate on.")


def row_token_budget(loaded: Loaded[AnySupervisedConfig]) -> Findings:
    """With dynamic batch sizes, a micro-batch must hold the longest row."""
    data = loaded.config.data
    ulysses = loaded.config.ulysses_sequence_parallel_size
    if data.use_dynamic_bsz and data.max_token_len_per_gpu * ulysses < data.max_length:
        yield error(
            "data.max_token_len_per_gpu",
            f"{data.max_token_len_per_gpu} tokens cannot hold a row of data.max_length={data.max_length}.",
        )


def pair_token_budget(loaded: Loaded[RmConfig | DpoConfig]) -> Findings:
    """With dynamic batch sizes, a micro-batch must hold both answers of a pair."""
    data = loaded.config.data
    tokens = data.max_token_len_per_gpu * loaded.config.ulysses_sequence_parallel_size
    if data.use_dynamic_bsz and data.max_length <= tokens < 2 * data.max_length:
        yield error(
            "data.max_token_len_per_gpu",
            f"{data.max_token_len_per_gpu} tokens cannot hold the two answers of a pair, each up to "
            f"data.max_length={data.max_length}. Set it to {2 * data.max_length} or more.",
        )
