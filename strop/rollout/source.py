"""What an engine outside the trainer's module is made from: a folder it can read, and weights by Hugging Face name."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from strop.models.build import compute_dtype
from strop.models.lora import has_adapters, merged_weights
from strop.registry import did_you_mean
from strop.rollout.weights import longest_sequence


@dataclass
class Source:
    folder: str
    """Of a Hugging Face model; only its config.json where the weights come from a module."""
    longest: int
    vocabulary: int
    shapes: dict[str, tuple[int, ...]] | None = None
    """Of the module's weights. None: the engine reads the weights from the folder."""
    module: Any = None
    """Names and layout of its weights are those of the engine's checkpoint, or transformers knows the way back to them."""

    def close(self) -> None:
        if self.shapes is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def check(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`weights`, if they are all weights of the module and nothing else."""
        if self.shapes is None:
            return dict(weights)
        twins = _twins(self.module)
        given = {name: weight for name, weight in weights.items() if name not in twins}
        for name, weight in given.items():
            if name not in self.shapes:
                raise ValueError(f"The model of the engine has no weight {name!r}.{did_you_mean(name, self.shapes)}")
            if self.shapes[name] != tuple(weight.shape):
                raise ValueError(
                    f"The weight {name!r} has the shape {self.shapes[name]} in the engine and {tuple(weight.shape)} here."
                )
        missing = self.shapes.keys() - given.keys()
        if missing:
            some = ", ".join(sorted(missing)[:3])
            raise ValueError(
                f"The engine takes all weights of its model or none: {len(missing)} of {len(self.shapes)} are missing ({some})."
            )
        return given

    def as_checkpoint(self, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The weights as a saved model names them: transformers keeps the experts of a layer in one tensor, files do not."""
        if self.module is None:
            yield from weights.items()
            return
        from transformers.core_model_loading import revert_weight_conversion

        yield from revert_weight_conversion(self.module, weights).items()


def source_of(model: Any, max_model_len: int | None) -> Source:
    """`model`: a Hugging Face module, adapters allowed, or the folder of one."""
    if isinstance(model, str | Path):
        from strop.models.load import load_config, resolve

        config = load_config(resolve(str(model)))
        longest = longest_sequence(SimpleNamespace(config=config), max_model_len)
        return Source(str(model), longest, config.get_text_config().vocab_size)
    base = model.get_base_model() if has_adapters(model) else model
    folder = tempfile.mkdtemp(prefix="strop-model-")
    config = copy.deepcopy(base.config)
    config.architectures = config.architectures or [type(base).__name__]
    config.eos_token_id = None  # what ends a completion is in Sampling.stop_ids
    config.save_pretrained(folder)
    return Source(
        folder,
        longest_sequence(base, max_model_len),
        int(base.get_input_embeddings().num_embeddings),
        {name: tuple(weight.shape) for name, weight in weights_of(model)},
        base,
    )


def weights_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    """All weights by their Hugging Face name, adapters added in."""
    if has_adapters(model):
        yield from merged_weights(model)
        return
    for name, weight in model.named_parameters():
        yield name, weight.detach()


def precision(asked: str, model: Any) -> str:
    """The engine's: `auto` is that of the module's weights, and a CPU without bf16 instructions gets float32."""
    if not isinstance(model, nn.Module):
        return asked
    weight = next(model.parameters())
    return str(weight.dtype if asked == "auto" else compute_dtype(asked, weight.device)).removeprefix("torch.")


def _twins(module: Any) -> set[str]:
    """Second names of tied weights: some callers give them, engines tie them by themselves."""
    every = dict(module.named_parameters(remove_duplicate=False))
    return every.keys() - dict(module.named_parameters()).keys()
