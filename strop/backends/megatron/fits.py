"""Whether a model can be divided as its `megatron` section says; read from its configuration alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strop.config.megatron import FAMILIES
from strop.config.schema.megatron import MegatronConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PLAIN_ROPE = ("default", "linear", "llama3", "yarn")
_FIRST = "num_layers_in_first_pipeline_stage"
_LAST = "num_layers_in_last_pipeline_stage"
_OTHER_LAYOUTS = (
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Options of override_transformer_config with which stages have different numbers of layers."""

Problem = tuple[str, str]
"""(key of the role's section, what is wrong with its value)."""


def problems(config: PreTrainedConfig, settings: MegatronConfig) -> Iterator[Problem]:
    """Why this model cannot be built, each with the key to change."""
    family = str(config.model_type)
    if family not in FAMILIES:
        yield (
            "strategy",
            f"megatron has no table of weights for model_type={family!r}; it has "
            f"{', '.join(sorted(FAMILIES))}. Set fsdp.",
        )
        return
    for problem in _layers(config, family):
        yield "strategy", f"megatron cannot build this {family} model: {problem}. Set fsdp."
    yield from _divisions(config, settings)
    yield from _experts(config, settings)


def _layers(config: PreTrainedConfig, family: str) -> Iterator[str]:
    if getattr(config, "hidden_act", "silu") != "silu":
        yield f"hidden_act={config.hidden_act!r} is not silu"
    if getattr(config, "mlp_bias", False):
        yield "mlp_bias=True"
    if getattr(config, "attention_bias", False) and family != "qwen2":
        yield "attention_bias=True"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in _PLAIN_ROPE:
        yield f"rope_type={kind!r} is not one of {', '.join(_PLAIN_ROPE)}"
    if FAMILIES[family].latent:
        yield from _latent(config)
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        yield "some layers have experts and some have none"


def _latent(config: PreTrainedConfig) -> Iterator[str]:
    if not config.norm_topk_prob:
        yield "norm_topk_prob=False"
    if config.n_group > 1 and config.num_experts_per_tok // config.topk_group != 2:
        yield (
            f"num_experts_per_tok={config.num_experts_per_tok} and topk_group={config.topk_group}: "
            "megatron-core scores a group by so many experts as a token visits in it, transformers by 2"
        )


def _divisions(config: PreTrainedConfig, settings: MegatronConfig) -> Iterator[Problem]:
    """Heads over tensor-parallel and context-parallel devices, layers over stages."""
    tensor = settings.tensor_model_parallel_size
    counts = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "rows of the feed-forward layers": config.intermediate_size,
    }
    for what, count in counts.items():
        if count % tensor:
            yield (
                "megatron.tensor_model_parallel_size",
                f"{tensor} does not divide the {count} {what} of the model. Set one of "
                f"{_divisors(config.num_key_value_heads)}.",
            )
            return
    heads = config.num_attention_heads // tensor
    if heads % settings.context_parallel_size:
        yield (
            "megatron.context_parallel_size",
            f"{settings.context_parallel_size} does not divide the {heads} attention heads of each "
            f"tensor-parallel device. Set one of {_divisors(heads)}.",
        )
    yield from _stages(config.num_hidden_layers, settings)


def _stages(layers: int, settings: MegatronConfig) -> Iterator[Problem]:
    """Layers over stages, and parts of them."""
    key = "megatron.pipeline_model_parallel_size"
    stages = settings.pipeline_model_parallel_size
    virtual = settings.virtual_pipeline_model_parallel_size or 1
    given = settings.override_transformer_config
    first = given.get(_FIRST)
    last = given.get(_LAST)
    if any(given.get(name) for name in _OTHER_LAYOUTS):
        return
    if first or last:
        if not _fits_uneven(layers, stages, virtual, first, last):
            yield (
                key,
                f"{stages} stages of {virtual} part(s) with {_FIRST}={first} and {_LAST}={last} do not take "
                f"the {layers} layers of the model: the other stages must have equal numbers of the "
                f"remaining layers. {_uneven_advice(layers, stages, virtual)}",
            )
        return
    if layers % (stages * virtual):
        yield (
            key,
            f"{stages} stages of {virtual} part(s) do not divide the {layers} layers of the model. Set one "
            f"of {_divisors(layers)}{_uneven_hint(layers, stages, virtual)}.",
        )


def _fits_uneven(layers: int, stages: int, virtual: int, first: int | None, last: int | None) -> bool:
    """Whether the stages between the first and the last one get equal numbers of layers."""
    rest = layers - (first or 0) - (last or 0)
    between = stages - bool(first) - bool(last)
    for own in (first, last):
        if own and own % virtual:
            return False
    if between <= 0:
        return between == 0 and rest == 0
    return rest > 0 and rest % (between * virtual) == 0


def _uneven_sizes(layers: int, stages: int, virtual: int) -> list[int]:
    """Numbers of layers that the last stage may have."""
    return [last for last in range(1, layers) if _fits_uneven(layers, stages, virtual, None, last)]


def _uneven_advice(layers: int, stages: int, virtual: int) -> str:
    sizes = _uneven_sizes(layers, stages, virtual)
    if not sizes:
        return f"Set pipeline_model_parallel_size to one of {_divisors(layers)}."
    return f"Leave out {_FIRST}, and set {_LAST} to one of {sizes}."


def _uneven_hint(layers: int, stages: int, virtual: int) -> str:
    sizes = _uneven_sizes(layers, stages, virtual)
    return f", or override_transformer_config.{_LAST} to one of {sizes}" if sizes else ""


def _experts(config: PreTrainedConfig, settings: MegatronConfig) -> Iterator[Problem]:
    size = settings.expert_model_parallel_size
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not FAMILIES[str(config.model_type)].experts:
        if size > 1:
            yield "megatron.expert_model_parallel_size", f"{size}, but the model has no experts. Set 1."
        return
    if experts is not None and experts % size:
        yield (
            "megatron.expert_model_parallel_size",
            f"{size} does not divide the {experts} experts of the model. Set one of {_divisors(experts)}.",
        )
    if settings.tensor_model_parallel_size > 1 and not settings.sequence_parallel:
        yield (
            "megatron.sequence_parallel",
            "false: a mixture of experts with tensor_model_parallel_size="
            f"{settings.tensor_model_parallel_size} needs true.",
        )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
