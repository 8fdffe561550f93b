"""Weights of Megatron checkpoints under their Hugging Face names.

    actor/dist_ckpt/          a checkpoint of megatron-core (dist_checkpoint.py), as verl writes it
    actor/huggingface/        config and tokenizer

Megatron stacks the weights of all layers into one tensor, unless layers differ. It fuses the projections of
queries, keys and values, group of heads by group, and the halves of gated layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from strop.config.megatron import FAMILIES
from strop.models.build import persistent_buffers
from strop.models.heads import HEAD, scalar_class
from strop.models.load import language_model_class
from strop.run.merge.dist_checkpoint import DistTensor, Region, is_dist_checkpoint, read_dist_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FOLDER = "dist_ckpt"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OTHERS = re.compile(r"optimizer\.|chained_\d+\.|rng_state|.*_extra_state|rerun_state|opt_param_scheduler")
"""Names in a checkpoint that are no weights."""
_OUTSIDE = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
    f"{HEAD}.weight": "output_layer.weight",
    f"{HEAD}.bias": "output_layer.bias",
}
_FC1 = "linear_fc1.weight"
_INSIDE: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    "post_attention_layernorm.weight": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight",),
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight",),
    "self_attn.q_a_proj.weight": ("self_attention.linear_q_down_proj.weight",),
    "self_attn.q_a_layernorm.weight": (
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.q_layernorm.weight",
    ),
    "self_attn.q_b_proj.weight": ("self_attention.linear_q_up_proj.weight",),
    "self_attn.kv_a_proj_with_mqa.weight": ("self_attention.linear_kv_down_proj.weight",),
    "self_attn.kv_a_layernorm.weight": (
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attention.kv_layernorm.weight",
    ),
    "self_attn.kv_b_proj.weight": ("self_attention.linear_kv_up_proj.weight",),
    "mlp.gate.weight": ("mlp.router.weight",),
    "mlp.gate.e_score_correction_bias": ("mlp.router.expert_bias",),
    "mlp.experts.gate_up_proj": (f"mlp.experts.experts.{_FC1}",),
    "mlp.experts.down_proj": ("mlp.experts.experts.linear_fc2.weight",),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight",),
    "mlp.shared_experts.down_proj.weight": ("mlp.shared_experts.linear_fc2.weight",),
}
"""Names inside a layer: of Hugging Face, and of Megatron. With Transformer Engine a norm belongs to the
matrix after it."""

Take = Callable[[Tensor], Tensor]
"""Takes a Hugging Face weight out of a tensor of Megatron."""


@dataclass(frozen=True)
class MegatronWeight:
    """A Hugging Face weight in a Megatron checkpoint, of which any region can be read."""

    source: DistTensor
    layer: int | None
    """Its place in a tensor of all layers."""
    take: Take
    shape: tuple[int, ...]

    def read(self, region: Region | None = None) -> Tensor:
        stacked: Region | None = None
        if self.layer is not None:
            rest = (slice(None),) * (len(self.source.shape) - 1)
            stacked = (slice(self.layer, self.layer + 1), *rest)
        tensor = self.source.read(stacked)
        whole = self.take(tensor if self.layer is None else tensor[0])
        return whole if region is None else whole[region]


def saved_megatron(folder: str) -> Path:
    """The checkpoint of megatron-core that dist_checkpointing_path names."""
    place = checkpoint_folder(Path(folder).expanduser())
    if place is None:
        raise ValueError(f"{folder} is no Megatron checkpoint in the torch_dist format: it has no .metadata.")
    return place


def checkpoint_folder(folder: Path) -> Path | None:
    """The checkpoint of megatron-core in a folder of verl, or the folder itself if it is one."""
    for place in (folder / FOLDER, folder):
        if is_dist_checkpoint(place):
            return place
    return None


def read_megatron(folder: Path, config: PreTrainedConfig) -> dict[str, Tensor]:
    """All weights of a checkpoint, by Hugging Face name."""
    saved = read_dist_checkpoint(folder)
    head = saved.get("output_layer.weight")
    scalar = head is not None and head.shape[0] == 1
    shapes = weight_shapes(config, scalar=scalar, bias="output_layer.bias" in saved)
    weights = megatron_weights(folder, config, shapes, saved=saved)
    # A view of a larger tensor could not be written.
    return {name: weight.read().clone() for name, weight in weights.items()}


def weight_shapes(
    config: PreTrainedConfig, *, scalar: bool = False, bias: bool = False
) -> dict[str, torch.Size]:
    """The weights and persistent buffers of a model. `scalar`: it has a scalar head, `bias`: with a bias."""
    with torch.device("meta"):
        if scalar:
            model = scalar_class(config, bias=bias)(config)
        else:
            model = language_model_class(config).from_config(config)
    tensors = dict(model.named_parameters()) | persistent_buffers(model)
    return {name: tensor.shape for name, tensor in tensors.items()}


def megatron_weights(
    folder: Path,
    config: PreTrainedConfig,
    shapes: Mapping[str, torch.Size],
    *,
    prefix: str = "",
    saved: Mapping[str, DistTensor] | None = None,
) -> dict[str, MegatronWeight]:
    """The weights of a model, whose Hugging Face names and shapes are `shapes`. `prefix` is in front of all
    names of the checkpoint. A checkpoint of another model is refused."""
    family = str(config.model_type)
    if family not in FAMILIES:
        raise ValueError(
            f"{folder}: there is no table of Megatron's weights for model_type={family!r}; there is one for "
            f"{', '.join(sorted(FAMILIES))}."
        )
    tensors: dict[str, DistTensor] = {}
    for name, tensor in (saved or read_dist_checkpoint(folder)).items():
        if not _OTHERS.match(name):
            tensors[name.removeprefix(prefix)] = tensor
    if not tensors:
        raise ValueError(
            f"{folder} holds no weights, only the state of an optimizer. verl then writes them to the folder "
            "huggingface next to it, which transformers loads as it is."
        )
    found: dict[str, MegatronWeight] = {}
    used: set[str] = set()
    missing: list[str] = []
    for name, shape in shapes.items():
        place = next((place for place in _places(name, config) if place.name in tensors), None)
        if place is None:
            missing.append(name)
            continue
        used.add(place.name)
        found[name] = _weight(folder, name, tuple(shape), place, tensors[place.name])
    unused = sorted(tensors.keys() - used)
    if getattr(config, "tie_word_embeddings", False):
        unused = [name for name in unused if name != "output_layer.weight"]
    if missing or unused:
        raise ValueError(
            f"{folder} is a checkpoint of another model: it lacks {len(missing)} weights of a {family} "
            f"({missing[:3]}), and {len(unused)} of its own have no place ({unused[:3]})."
        )
    return found


@dataclass(frozen=True)
class _Source:
    """Where a weight may be: the tensor, its layer if the tensor has all of them, what to take of it."""

    name: str
    layer: int | None
    take: Take


def _weight(
    folder: Path, name: str, shape: tuple[int, ...], place: _Source, tensor: DistTensor
) -> MegatronWeight:
    held = tensor.shape if place.layer is None else tensor.shape[1:]
    fits = place.layer is None or place.layer < tensor.shape[0]
    try:
        taken = tuple(place.take(torch.empty(held, device="meta")).shape)
    except RuntimeError:  # the tensor cannot be divided as the model says
        taken = ()
    if not fits or taken != shape:
        raise ValueError(
            f"{folder} is a checkpoint of another model: {place.name} has shape {tensor.shape}, and {name} "
            f"of the model has shape {shape}. Is it the model of that run?"
        )
    return MegatronWeight(tensor, place.layer, place.take, shape)


def _places(name: str, config: PreTrainedConfig) -> Iterator[_Source]:
    """Where a Hugging Face weight may be."""
    match = _LAYER.fullmatch(name)
    if match is None:
        take: Take = _whole
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            take = partial(_rows, stop=int(config.vocab_size))  # Megatron pads the vocabulary
        if name in _OUTSIDE:
            yield _Source(_OUTSIDE[name], None, take)
        return
    layer = int(match[1])
    for inside, take in _inside(match[2], config):
        yield _Source(f"decoder.layers.{inside}", layer, take)
        yield _Source(f"decoder.layers.{layer}.{inside}", None, take)


def _inside(name: str, config: PreTrainedConfig) -> Iterator[tuple[str, Take]]:
    for inside in _INSIDE.get(name, ()):
        yield inside, _whole
    module, _, last = name.rpartition(".")
    owner, _, part = module.rpartition(".")
    if part in ("gate_proj", "up_proj"):
        yield f"{owner}.{_FC1}", partial(_half, second=part == "up_proj")
    elif part in ("q_proj", "k_proj", "v_proj") and owner == "self_attn":
        yield f"self_attention.linear_qkv.{last}", partial(_of_heads, part=part, config=config)
        yield f"self_attention.linear_q_proj.{last}", _whole


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _rows(tensor: Tensor, stop: int) -> Tensor:
    return tensor[:stop]


def _half(tensor: Tensor, second: bool) -> Tensor:
    return tensor.chunk(2)[int(second)]


def _of_heads(tensor: Tensor, part: str, config: PreTrainedConfig) -> Tensor:
    """The rows of queries, keys or values: each group has those of its query heads, of its key, of its
    value."""
    groups = int(config.num_key_value_heads)
    queries = int(config.num_attention_heads) // groups
    size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    by_group = tensor.reshape(groups, (queries + 2) * size, *tensor.shape[1:])
    first = {"q_proj": 0, "k_proj": queries, "v_proj": queries + 1}[part]
    count = queries if part == "q_proj" else 1
    return by_group[:, first * size : (first + count) * size].reshape(-1, *tensor.shape[1:])
