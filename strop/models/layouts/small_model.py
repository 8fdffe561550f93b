"""A model of a few thousand weights with the structure of a given one: the same class, the same kinds of
layers, the same rules of attention, random weights.

Which tokens a token depends on does not depend on the widths of a model. So whether sequences may be packed,
and whether the rollout engine samples what training recomputes, is measured on such a model: in a tenth of a
second, on the CPU, in float32, also where the weights of the model itself are not in memory (meta device).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from strop.models.lora import base_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 61
_POSITIONS = 128
_WINDOW = 5
"""Windows and chunks become so small that sequences are longer."""
_LAYERS = 6
"""At most so many layers, of different kinds where there are any."""
_DEEPEST = 64
"""At most so many layers where a few of them do not have all parts of the model."""
_LOUDER = 8.0
"""Weights are multiplied by it: with the usual ones, tokens hardly change each other's log-probs."""

_BY_SIZE: dict[int, tuple[str, ...]] = {
    VOCABULARY: ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"),
    32: (
        *("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "embedding_dim"),
        *("lru_width", "attention_hidden_size", "emb_dim"),
    ),
    48: (
        *("intermediate_size", "ffn_dim", "n_inner", "intermediate_size_mlp", "ffn_hidden_size"),
        *("decoder_ffn_dim", "encoder_ffn_dim", "dense_intermediate_size"),
    ),
    64: ("mamba_d_ssm",),
    16: (
        *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
        *("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "qk_head_dim"),
        *("q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank", "hidden_size_per_layer_input"),
        *("hc_lowrank", "ple_embed_dim", "adapter_rank", "router_hidden_size", "gated_norm_rank"),
        # With few heads many scores of an indexer are exactly 0, and which of them are the largest is open.
        *("index_n_heads", "index_head_dim"),
    ),
    8: (
        *("head_dim", "swa_head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"),
        *("global_head_dim", "attention_head_dim", "kv_channels", "rotary_dim"),
        *("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_d_head"),
        *("mamba_head_dim", "mamba_headdim", "mamba_d_state", "ssm_state_size", "state_size"),
        *("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads"),
        *("chunk_size", "mamba_chunk_size", "block_size"),
    ),
    _WINDOW: (
        *("sliding_window", "attention_chunk_size", "window_size", "attention_window_size"),
        *("sliding_window_size", "local_attention", "index_topk", "floor_scale", "keep_window_size"),
    ),
    4: (
        *("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"),
        *("encoder_attention_heads", "attention_heads", "swa_num_attention_heads"),
        *("linear_num_value_heads", "linear_num_heads"),
        *("mamba_dt_rank", "time_step_rank", "dim_model_base"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "index_block_size"),
    ),
    2: (
        *("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups"),
        *("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "linear_num_key_heads"),
        *("attn_layer_period", "no_rope_layer_interval"),
    ),
    1: (
        *("n_group", "topk_group", "num_expert_group", "o_groups"),
        *("mamba_n_groups", "n_groups", "mamba_ngroups", "index_topk_blocks"),
        *("first_k_dense_replace", "num_dense_layers", "attn_layer_offset"),
    ),
    _POSITIONS: ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "model_max_length"),
    0: (
        *("pad_token_id", "bos_token_id", "eos_token_id", "eod_token_id"),
        *("num_nextn_predict_layers", "num_mtp_layers"),
    ),
}
"""The largest size in a small model, with the names that configurations give to such sizes."""
_SIZES = {name: size for size, names in _BY_SIZE.items() for name in names}
_EXACT = (VOCABULARY, _POSITIONS)
"""Sizes that a model gets even if its own are smaller: what is measured has such ids and lengths."""
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")
_LAYER_LISTS = (
    "moe_layers",
    "full_attn_idxs",
    "hybrid_layer_ids",
    "cross_attention_layers",
    "mlp_only_layers",
)
"""Lists of numbers of layers."""
_KINDS = ("layer_types", "layers_block_type")
"""Lists of one kind per layer."""
_ROTARY = ("rope_parameters", "rope_scaling")
_FACTORS = ("short_factor", "long_factor")
_SECTIONS = (2, 1, 1)
"""How many of the frequencies of a small head turn with each axis of a position."""
_PLAIN_PARTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterDict, nn.ParameterList, nn.Identity, nn.Dropout)


def small_model(model: PreTrainedModel) -> PreTrainedModel:
    """A small model of the class of `model`, with random weights, on the CPU, in float32.

    Raises ValueError where it would lack parts of the model, and what the class raises where it cannot be
    small.
    """
    core = base_model(model)
    kind = class_of(core)
    small = build_small(kind, small_config(core.config))
    if missing_parts(part_classes(small), core):
        small = build_small(kind, small_config(core.config, all_layers=True))
    missing = missing_parts(part_classes(small), core)
    if missing:
        raise ValueError(f"a small model of its class has no {', '.join(missing)}")
    return small


def class_of(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class that a model had before it was sharded."""
    for kind in type(model).__mro__:
        if not issubclass(kind, FSDPModule):
            return cast("type[PreTrainedModel]", kind)
    return type(model)


def build_small(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model with random weights, the same ones in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = kind._from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weight in built.parameters():
                if weight.dim() > 1:
                    weight.mul_(_LOUDER)
    return built.eval().requires_grad_(False)


def part_classes(model: nn.Module) -> frozenset[type[nn.Module]]:
    return frozenset(type(part) for part in model.modules())


def missing_parts(small: frozenset[type[nn.Module]], model: nn.Module) -> list[str]:
    """Classes of parts that the model has and a small one with these classes has not, by name."""
    known = tuple(small)
    missing = set()
    for part in model.modules():
        kind = type(part)
        if not isinstance(part, (*known, *_PLAIN_PARTS)) and not kind.__module__.startswith("peft."):
            missing.add(kind.__name__)
    return sorted(missing)


def config_key(config: PreTrainedConfig) -> str:
    """Equal for configurations of the same structure."""
    return str(small_config(config).to_json_string(use_diff=False))


def small_config(config: PreTrainedConfig, *, all_layers: bool = False) -> PreTrainedConfig:
    """The configuration of a small model with the structure of the one that `config` describes."""
    small = copy.deepcopy(config)
    for part in _parts(small):
        _shrink(part, all_layers)
        part._name_or_path = ""
    return small


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and those inside it (text, vision ...)."""
    from transformers import PreTrainedConfig

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _shrink(config: PreTrainedConfig, all_layers: bool) -> None:
    own = vars(config)
    depth = _depth(own)
    kept = _kept_layers(own, depth)
    if all_layers:
        kept = list(range(min(depth, _DEEPEST)))
    changes: dict[str, object] = {}
    for name, value in own.items():
        if isinstance(value, (list, tuple)):
            changes[name] = _small_list(name, value, own, kept, depth)
        else:
            changes[name] = _small(name, value, own)
    for name in _DEPTHS:
        if isinstance(own.get(name), int):
            changes[name] = len(kept)
    by_layer = own.get("per_layer_config")
    if isinstance(by_layer, dict):
        changes["per_layer_config"] = _small_by_layer(by_layer, own, kept)
    shared = own.get("num_kv_shared_layers")
    if isinstance(shared, int) and shared:
        changes["num_kv_shared_layers"] = sum(layer >= depth - shared for layer in kept)
    for name in _ROTARY:
        rotary = own.get(name)
        if isinstance(rotary, dict) and "mrope_section" in rotary:
            changes[name] = {**rotary, "mrope_section": list(_SECTIONS)}
    own.update(changes)
    for name in _ROTARY:
        if isinstance(own.get(name), dict):
            own[name] = _small_factors(own[name], own)


def _small_factors(rotary: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """longrope has a factor for each frequency of a head, of which a small one has fewer."""
    width = own.get("head_dim") or _number(own, ("hidden_size",)) // max(1, _number(own, _HEADS))
    share = rotary.get("partial_rotary_factor") or own.get("partial_rotary_factor") or 1.0
    count = (int(cast(int, width) * cast(float, share)) + 1) // 2
    short = {key: cast("list[float]", rotary[key])[:count] for key in _FACTORS if key in rotary}
    return {**rotary, **short}


def _small_list(
    name: str, values: Sequence[object], own: Mapping[str, object], kept: Sequence[int], depth: int
) -> list[object]:
    if name in _LAYER_LISTS:
        return [new for new, old in enumerate(kept) if old in values]
    if len(values) == depth and depth > 1:
        values = [values[layer] for layer in kept]
    return [_small(name, value, own) for value in values]


def _small_by_layer(
    by_layer: Mapping[str, Mapping[str, object]], own: Mapping[str, object], kept: Sequence[int]
) -> dict[str, dict[str, object]]:
    """Settings of single layers, by the number of the layer."""
    found = {}
    numbers = {int(layer): settings for layer, settings in by_layer.items()}
    for new, old in enumerate(kept):
        if old in numbers:
            found[f"{new:02d}"] = {name: _small(name, value, own) for name, value in numbers[old].items()}
    return found


def _depth(own: Mapping[str, object]) -> int:
    """The number of layers."""
    for name in _KINDS:
        kinds = own.get(name)
        if isinstance(kinds, list):
            return len(kinds)
    return _number(own, _DEPTHS)


def _number(own: Mapping[str, object], names: Sequence[str]) -> int:
    for name in names:
        value = own.get(name)
        if isinstance(value, int):
            return value
    return 0


def _kept_layers(own: Mapping[str, object], depth: int) -> list[int]:
    """The last layer of each kind, and the first ones as long as there are few."""
    lists = [value for value in own.values() if isinstance(value, list) and len(value) == depth]
    by_kind: dict[str, list[int]] = {}
    for layer in range(depth):
        by_kind.setdefault(str([values[layer] for values in lists]), []).append(layer)
    kept = [members[-1] for members in by_kind.values()]
    kept += [members[0] for members in by_kind.values() if len(members) > 1]
    return sorted(kept[:_LAYERS])


def _small(name: str, value: object, own: Mapping[str, object]) -> object:
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name in _KEY_HEADS and value == _number(own, _HEADS):
        return min(value, _SIZES["num_attention_heads"])
    size = _SIZES.get(name, value)
    if name in _SIZES and size in _EXACT:
        return size
    return min(value, size)
