"""Settings of a training function: the caller's keys, and what the function sets where there are none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from strop.api.models import is_name, quiet_transformers, save_model, save_tokenizer
from strop.config.short_keys import full_key, overrides

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Settings:
    """Keys of a configuration by their full names, in the order in which they were set."""

    def __init__(self, root: str, given: Mapping[str, object]) -> None:
        self.root = root
        self.given: dict[str, object] = {}
        for word in overrides(root, given):  # refuses unknown names and one key under two names
            key, _, _ = word.partition("=")
            self.given[key] = word
        self._added: dict[str, object] = {}

    def arguments(self) -> list[str]:
        """The words of the command line: what the function added, then what the caller has set."""
        words = overrides(self.root, self._added)
        return [*words, *map(str, self.given.values())]

    def has(self, key: str) -> bool:
        """Whether the caller has set a key, or one below it."""
        return any(given == key or given.startswith(f"{key}.") for given in self.given)

    def set(self, key: str, value: object, argument: str) -> None:
        """Set a key that stands for `argument` of the function; a ValueError if the caller has set it too."""
        if self.has(key):
            raise ValueError(f"{argument} sets {key}, which is also given as a key. Give one of them.")
        self._added[full_key(self.root, key)] = value

    def default(self, key: str, value: object) -> None:
        """Set a key unless the caller has."""
        if not self.has(key) and key not in self._added:
            self._added[key] = value

    def set_model(
        self,
        key: str,
        model: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        folder: Path,
    ) -> None:
        """Set the section `key` to a model that is given by name or as an object."""
        if is_name(model):
            self.set(f"{key}.path", str(model), "model")
            if tokenizer is not None:
                self.set(f"{key}.tokenizer_path", str(save_tokenizer(tokenizer, folder)), "tokenizer")
            return
        assert not isinstance(model, str | Path)
        with quiet_transformers():
            folder = save_model(model, tokenizer, folder)
        self.set(f"{key}.path", str(folder), "model")
