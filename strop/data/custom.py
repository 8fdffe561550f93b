"""A user's own data set class, `data.custom_cls`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strop.config.schema.data import Data
from strop.config.schema.supervised import SupervisedData
from strop.registry import load_attribute

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def custom_rows(config: Data | SupervisedData, files: Any, tokenizer: PreTrainedTokenizerBase) -> Sequence[Any] | None:
    """The user's data set, made from (files, tokenizer, config); it gives rows as dictionaries, or finished items."""
    path, name = config.custom_cls.path, config.custom_cls.name
    if not path:
        return None
    if not name:
        raise ValueError(f"data.custom_cls.path={path} is set but data.custom_cls.name is not; name the class in that file.")
    rows = load_attribute(path, name)(files, tokenizer, config)
    missing = [method for method in ("__len__", "__getitem__") if not hasattr(rows, method)]
    if missing:
        raise ValueError(f"{name} in {path} has no {' and no '.join(missing)}; a data set needs both.")
    if not len(rows):
        raise ValueError(f"{name} in {path} holds no rows.")
    return rows


def order_seed(config: Data | SupervisedData) -> int:
    """data.seed, which follows trainer.seed; 0 where neither says anything."""
    return config.seed if isinstance(config.seed, int) else 0
