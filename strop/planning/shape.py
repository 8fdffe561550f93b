"""The shape of a decoder, and the number of weights in each of its parts.

`shape_of` reads it from the config.json of a model folder, or takes it from a table of well-known models, so
that a plan needs no model on the machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from strop.planning.gguf_header import read_gguf_config
from strop.planning.known_models import KNOWN, plain_name
from strop.planning.tower import LANGUAGE_PARTS, text_values, tower_weights
from strop.registry import did_you_mean

NF4_BYTES = (4 + 32 / 64) / 8
"""Bytes of a weight with model.quantization=nf4: 4 bits, and its share of a scale."""
ModelJson = Mapping[str, object]
"""The contents of a config.json."""


@dataclass(frozen=True)
class Family:
    """What config.json does not say because the architecture decides it."""

    biased_inputs: bool | None = None
    """Biases on queries, keys and values. None: config.json's attention_bias."""
    biased_output: bool | None = None
    """A bias on the attention's output. None: config.json's attention_bias."""
    head_norms: bool = False
    """Norms over each head of queries and keys."""
    norms: int = 2
    """Norms of a layer."""
    mixture: bool = False
    """Feed-forward layers are mixtures of experts."""
    ties: bool = False
    """The output head is the embedding unless config.json says otherwise."""
    fused: bool = False
    """Queries, keys and values are one linear layer, and so are gate and up."""


FAMILIES = {
    "llama": Family(),
    "mistral": Family(biased_inputs=False, biased_output=False),
    "granite": Family(),
    "phi3": Family(biased_inputs=False, biased_output=False, fused=True),
    "smollm3": Family(ties=True),
    "gemma": Family(ties=True),
    "gemma2": Family(norms=4, ties=True),
    "gemma3_text": Family(norms=4, head_norms=True, ties=True),
    "qwen2": Family(biased_inputs=True, biased_output=False),
    "qwen3": Family(head_norms=True),
    "mixtral": Family(biased_inputs=False, biased_output=False, mixture=True),
    "qwen2_moe": Family(biased_inputs=True, biased_output=False, mixture=True),
    "qwen3_moe": Family(head_norms=True, mixture=True),
    "deepseek_v3": Family(mixture=True),
}


@dataclass(frozen=True)
class Experts:
    """The mixture in each sparse layer."""

    count: int
    chosen: int
    """Experts that a token visits."""
    width: int
    """Inner size of one."""
    shared_width: int = 0
    """Inner size of the expert that every token visits; 0: there is none."""
    shared_gate: bool = True
    """A number per token weighs the shared expert."""
    adapted: bool = True
    """LoRA adapts experts and routers (planning/adapters.py)."""


@dataclass(frozen=True)
class Latents:
    """Multi-head latent attention: queries, and keys with values, are made of short vectors per token."""

    queries: int
    """Numbers of the vector of which the queries of all heads are made; 0: of the hidden state."""
    keys: int
    """The same for keys and values. It is what the KV cache holds, with the rotary part."""
    rotary: int
    """Numbers of a query and a key that are rotated; those of the key are the same for all heads."""
    plain: int
    """Numbers of a query and a key of one head that are not rotated."""
    values: int
    """Numbers of a value of one head."""


@dataclass(frozen=True)
class Shape:
    """A decoder with gated feed-forward layers and root-mean-square norms."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head_size: int
    width: int
    """Inner size of a dense feed-forward layer."""
    vocabulary: int
    tied: bool
    biased_inputs: bool = False
    biased_output: bool = False
    biased_mlp: bool = False
    head_norms: bool = False
    norms: int = 2
    experts: Experts | None = None
    sparse_layers: int = 0
    tower: int = 0
    """Weights of the vision tower."""
    scalar: bool = False
    """A critic or reward model: one number per token instead of logits."""
    latents: Latents | None = None
    fused: bool = False
    """Queries, keys and values are one linear layer, and so are gate and up."""

    @property
    def queries(self) -> int:
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        return self.key_heads * self.head_size

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def head(self) -> int:
        """Weights of the output head that are not the embedding's."""
        if self.scalar:
            return self.hidden
        if self.tied:
            return 0
        return self.embedding

    @property
    def attention(self) -> int:
        """Weights of one layer's attention, its head norms included."""
        if self.latents is not None:
            return self._latent_attention(self.latents)
        inputs = self.queries + 2 * self.keys
        output = self.hidden
        biases = inputs * self.biased_inputs + output * self.biased_output
        return self.hidden * inputs + self.queries * output + biases + 2 * self.head_size * self.head_norms

    def _latent_attention(self, latents: Latents) -> int:
        norms = latents.queries + latents.keys
        made = self.heads * (latents.plain + latents.rotary)
        queries = latents.queries * (self.hidden + made)
        if not latents.queries:
            queries = self.hidden * made
        keys = self.hidden * (latents.keys + latents.rotary)
        keys += latents.keys * self.heads * (latents.plain + latents.values)
        biases = (latents.queries + latents.keys + latents.rotary) * self.biased_inputs
        biases += self.hidden * self.biased_output
        return norms + queries + keys + biases + self.heads * latents.values * self.hidden

    @property
    def expert_weights(self) -> int:
        """Weights of all experts of one sparse layer, without those that every token visits."""
        if self.experts is None:
            return 0
        return self.experts.count * 3 * self.hidden * self.experts.width

    @property
    def dense_mlp(self) -> int:
        return 3 * self.hidden * self.width + (2 * self.width + self.hidden) * self.biased_mlp

    def _sparse_mlp(self, *, active: bool) -> int:
        experts = self.experts
        assert experts is not None
        count = experts.count
        if active:
            count = experts.chosen
        router = self.hidden * experts.count
        shared = 0
        if experts.shared_width:
            shared = (3 * experts.shared_width + experts.shared_gate) * self.hidden
        return router + count * 3 * self.hidden * experts.width + shared

    def layer(self, *, sparse: bool = False, active: bool = False) -> int:
        """Weights of one layer; with `active`, those that one token uses."""
        mlp = self.dense_mlp
        if sparse:
            mlp = self._sparse_mlp(active=active)
        return self.attention + mlp + self.norms * self.hidden

    @property
    def largest_layer(self) -> int:
        return self.layer(sparse=self.sparse_layers > 0)

    def _stack(self, active: bool = False) -> int:
        weights = (self.layers - self.sparse_layers) * self.layer()
        if self.sparse_layers:
            weights += self.sparse_layers * self.layer(sparse=True, active=active)
        return weights

    @property
    def body(self) -> int:
        """Weights of all layers."""
        return self._stack()

    @property
    def root(self) -> int:
        """Weights outside the layers: embedding, last norm, head, vision tower."""
        return self.embedding + self.hidden + self.head + self.tower

    @property
    def parameters(self) -> int:
        return self.body + self.root

    @property
    def multiplied(self) -> int:
        """Weights of the layers that one token is multiplied with; the head is not counted."""
        return self._stack(active=True)

    @property
    def linear(self) -> int:
        """Weights of the linear layers, which model.quantization stores in 4 bits; experts are none."""
        attention = 2 * self.hidden * (self.queries + self.keys)
        return attention * self.layers + 3 * self.hidden * self.width * (self.layers - self.sparse_layers)

    @property
    def biggest_linear(self) -> int:
        return self.hidden * max(self.width, self.queries)

    def stored(self, bytes_per_number: int, *, four_bit: bool) -> int:
        """Bytes of all weights; `four_bit`: those of linear layers in 4 bits."""
        if not four_bit:
            return bytes_per_number * self.parameters
        return int(NF4_BYTES * self.linear) + bytes_per_number * (self.parameters - self.linear)

    @property
    def biggest_matrix(self) -> int:
        return max(self.embedding, self.largest_layer // 3)

    def cache_per_token(self, bytes_per_number: int) -> int:
        """Bytes that the keys and values of one token take in all layers."""
        if self.latents is not None:
            return self.layers * (self.latents.keys + self.latents.rotary) * bytes_per_number
        return 2 * self.layers * self.keys * bytes_per_number


def read_shape(config: ModelJson, *, where: str = "config.json", scalar: bool = False) -> Shape:
    """The shape that a config.json describes."""
    values = text_values(config)
    kind = LANGUAGE_PARTS.get(str(values.get("model_type")), str(values.get("model_type")))
    family = FAMILIES.get(kind)
    if family is None:
        raise ValueError(
            f"{where}: the planner does not know model_type={kind!r}.{did_you_mean(kind, FAMILIES)} It knows "
            f"{', '.join(sorted(FAMILIES))}."
        )
    required = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    if not family.mixture:
        required.append("intermediate_size")
    _check_sizes(values, required, where)
    hidden = _whole(values, "hidden_size")
    heads = _whole(values, "num_attention_heads")
    layers = _whole(values, "num_hidden_layers")
    biased = bool(values.get("attention_bias", False))
    biased_inputs = family.biased_inputs
    if biased_inputs is None:
        biased_inputs = biased
    biased_output = family.biased_output
    if biased_output is None:
        biased_output = biased
    experts = None
    sparse_layers = 0
    if family.mixture:
        experts = _experts(values, kind, where)
        sparse_layers = _sparse_layers(values, layers)
    head_size = _whole(values, "head_dim") or hidden // heads
    latents = None
    if kind == "deepseek_v3":
        latents = _latents(values)
        head_size = latents.plain + latents.rotary
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        key_heads=_whole(values, "num_key_value_heads") or heads,
        head_size=head_size,
        width=_whole(values, "intermediate_size"),
        vocabulary=_whole(values, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", values.get("tie_word_embeddings", family.ties))),
        biased_inputs=biased_inputs,
        biased_output=biased_output,
        biased_mlp=bool(values.get("mlp_bias", False)),
        head_norms=family.head_norms,
        norms=family.norms,
        experts=experts,
        sparse_layers=sparse_layers,
        tower=tower_weights(config),
        scalar=scalar,
        latents=latents,
        fused=family.fused,
    )


def _check_sizes(values: ModelJson, required: list[str], where: str) -> None:
    """Refuse sizes that are missing, or that no model has."""
    missing = [key for key in required if values.get(key) is None]
    if missing:
        raise ValueError(
            f"{where} lacks {', '.join(missing)}, without which the size of the model is not known."
        )
    for key in required:
        value = values[key]
        if type(value) is not int or value < 1:
            raise ValueError(f"{where}: {key} must be a whole number above 0, it is {str(value)[:40]!r}.")


def _latents(values: ModelJson) -> Latents:
    return Latents(
        _whole(values, "q_lora_rank"),
        _whole(values, "kv_lora_rank"),
        _whole(values, "qk_rope_head_dim"),
        _whole(values, "qk_nope_head_dim"),
        _whole(values, "v_head_dim"),
    )


def _whole(values: ModelJson, key: str) -> int:
    """A whole number of config.json; 0 if it is missing or null."""
    return int(cast(int, values.get(key) or 0))


def _experts(values: ModelJson, kind: str, where: str) -> Experts:
    count = _whole(values, "num_experts") or _whole(values, "num_local_experts")
    count = count or _whole(values, "n_routed_experts")
    chosen = _whole(values, "num_experts_per_tok")
    width_key = "moe_intermediate_size"
    if kind == "mixtral":
        width_key = "intermediate_size"
    width = _whole(values, width_key)
    shared_width = 0
    if kind == "qwen2_moe":
        shared_width = _whole(values, "shared_expert_intermediate_size")
    elif kind == "deepseek_v3":
        shared_width = width * _whole(values, "n_shared_experts")
    if not (count and width and chosen):
        raise ValueError(
            f"{where} does not say how many experts there are (num_experts), how wide, or how many a token "
            "visits."
        )
    alone = kind == "qwen2_moe"
    return Experts(count, chosen, width, shared_width, shared_gate=alone, adapted=not alone)


def _sparse_layers(values: ModelJson, layers: int) -> int:
    """Layers with a mixture of experts."""
    every = _whole(values, "decoder_sparse_step") or 1
    dense = cast(list[int], values.get("mlp_only_layers") or [])
    dense = [*dense, *range(_whole(values, "first_k_dense_replace"))]
    return sum(1 for layer in range(layers) if (layer + 1) % every == 0 and layer not in dense)


def shape_of(
    path: str | None,
    *,
    config_path: str | None = None,
    changes: ModelJson | None = None,
    scalar: bool = False,
) -> Shape:
    """The shape of the model in a folder or a GGUF file, or of a model that is known by name. `changes` are
    values of override_config."""
    if not path:
        raise ValueError("model.path is not set, so there is no model to plan for.")
    place = Path(config_path or path).expanduser()
    if place.suffix == ".gguf" and place.is_file():
        header = read_gguf_config(place)
        return read_shape({**header, **(changes or {})}, where=str(place), scalar=scalar)
    file = place / "config.json"
    if file.is_file():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} cannot be read as JSON: {error}") from error
        return read_shape({**config, **(changes or {})}, where=str(file), scalar=scalar)
    name = plain_name(path)
    if name not in KNOWN:
        raise ValueError(
            f"model.path={path!r} is neither a folder with a config.json, nor a .gguf file, nor a name the "
            f"planner knows.{did_you_mean(name, KNOWN)} Known: {', '.join(KNOWN)}."
        )
    return read_shape({**KNOWN[name], **(changes or {})}, where=path, scalar=scalar)
