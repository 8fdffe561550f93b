"""Names of weights in files. transformers renames weights when it loads a folder, and keeps the experts of a
layer in one tensor; folders that are published, and other programs, have the names of the first release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def as_in_files(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model as its `save_pretrained` writes them. Tensors that are divided or joined for it
    are on the CPU."""
    given = dict(weights)
    shapes = {name: weight.to("meta") for name, weight in given.items()}
    if revert_weight_conversion(model, shapes).keys() == given.keys():
        return given
    host = {name: weight.detach().cpu() for name, weight in given.items()}
    return dict(revert_weight_conversion(model, host))


def name_in_files(model: PreTrainedModel, name: str, weight: Tensor) -> str:
    """The name in files of a weight that is one tensor there too."""
    [found] = revert_weight_conversion(model, {name: weight.detach()})
    return str(found)
