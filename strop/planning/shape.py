"""The shape of a decoder, read from its config.json, and how many weights each part of it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strop.registry import did_you_mean


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


FAMILIES = {
    "llama": Family(),
    "mistral": Family(biased_inputs=False, biased_output=False),
    "granite": Family(),
    "phi3": Family(biased_inputs=False, biased_output=False),
    "smollm3": Family(ties=True),
    "gemma": Family(ties=True),
    "gemma2": Family(norms=4, ties=True),
    "gemma3_text": Family(norms=4, head_norms=True, ties=True),
    "qwen2": Family(biased_inputs=True, biased_output=False),
    "qwen3": Family(head_norms=True),
    "mixtral": Family(biased_inputs=False, biased_output=False, mixture=True),
    "qwen2_moe": Family(biased_inputs=True, biased_output=False, mixture=True),
    "qwen3_moe": Family(head_norms=True, mixture=True),
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
    longest: int | None = None
    """Positions the model was built for."""
    scalar: bool = False
    """A critic or reward model: one number per token instead of logits."""

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
        return 0 if self.tied else self.embedding

    @property
    def attention(self) -> int:
        """Weights of one layer's attention, its head norms included."""
        inputs, output = self.queries + 2 * self.keys, self.hidden
        biases = inputs * self.biased_inputs + output * self.biased_output
        return self.hidden * inputs + self.queries * output + biases + 2 * self.head_size * self.head_norms

    @property
    def dense_mlp(self) -> int:
        return 3 * self.hidden * self.width + (2 * self.width + self.hidden) * self.biased_mlp

    def _sparse_mlp(self, visited: int) -> int:
        assert self.experts is not None
        shared = (3 * self.experts.shared_width + 1) * self.hidden if self.experts.shared_width else 0
        return self.hidden * self.experts.count + visited * 3 * self.hidden * self.experts.width + shared

    def layer(self, *, sparse: bool = False, active: bool = False) -> int:
        """Weights of one layer; with `active`, those that one token meets."""
        if sparse:
            assert self.experts is not None
            mlp = self._sparse_mlp(self.experts.chosen if active else self.experts.count)
        else:
            mlp = self.dense_mlp
        return self.attention + mlp + self.norms * self.hidden

    @property
    def largest_layer(self) -> int:
        return self.layer(sparse=self.sparse_layers > 0)

    def _stack(self, active: bool = False) -> int:
        dense = (self.layers - self.sparse_layers) * self.layer()
        return dense + (self.sparse_layers * self.layer(sparse=True, active=active) if self.sparse_layers else 0)

    @property
    def body(self) -> int:
        """Weights of all layers."""
        return self._stack()

    @property
    def root(self) -> int:
        """Weights outside the layers: embedding, last norm, head."""
        return self.embedding + self.hidden + self.head

    @property
    def parameters(self) -> int:
        return self.body + self.root

    @property
    def multiplied(self) -> int:
        """Weights that a token is multiplied with on its way through the layers; the head is counted apart."""
        return self._stack(active=True)

    @property
    def biggest_matrix(self) -> int:
        return max(self.embedding, self.largest_layer // 3)

    def cache_per_token(self, bytes_per_number: int) -> int:
        """Bytes that the keys and values of one token take in all layers."""
        return 2 * self.layers * self.keys * bytes_per_number

    def adapters(self, rank: int) -> int:
        """Weights of LoRA adapters on all linear parts of the layers: (inputs + outputs) times the rank for each.

        Experts that transformers keeps as one tensor get none.
        """
        ends = 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.keys)
        dense = self.layers - self.sparse_layers
        mlp = 3 * (self.hidden + self.width) * dense
        return rank * (ends * self.layers + mlp)


def read_shape(config: Mapping[str, Any], *, where: str = "config.json", scalar: bool = False) -> Shape:
    """The shape that a config.json describes."""
    said = config.get("text_config") or config
    kind = str(said.get("model_type"))
    family = FAMILIES.get(kind)
    if family is None:
        raise ValueError(
            f"{where}: the planner does not know model_type={kind!r}.{did_you_mean(kind, FAMILIES)} It knows "
            f"{', '.join(sorted(FAMILIES))}."
        )
    missing = [key for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size") if key not in said]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}, without which the size of the model is not known.")
    heads, layers = int(said["num_attention_heads"]), int(said["num_hidden_layers"])
    biased = bool(said.get("attention_bias", False))
    experts = _experts(said, kind, where) if family.mixture else None
    return Shape(
        hidden=int(said["hidden_size"]),
        layers=layers,
        heads=heads,
        key_heads=int(said.get("num_key_value_heads") or heads),
        head_size=int(said.get("head_dim") or said["hidden_size"] // heads),
        width=int(said.get("intermediate_size") or 0),
        vocabulary=int(said["vocab_size"]),
        tied=bool(said.get("tie_word_embeddings", family.ties)),
        biased_inputs=biased if family.biased_inputs is None else family.biased_inputs,
        biased_output=biased if family.biased_output is None else family.biased_output,
        biased_mlp=bool(said.get("mlp_bias", False)),
        head_norms=family.head_norms,
        norms=family.norms,
        experts=experts,
        sparse_layers=0 if experts is None else _sparse_layers(said, layers),
        longest=said.get("max_position_embeddings"),
        scalar=scalar,
    )


def _experts(said: Mapping[str, Any], kind: str, where: str) -> Experts:
    count = said.get("num_experts") or said.get("num_local_experts")
    width = said.get("intermediate_size" if kind == "mixtral" else "moe_intermediate_size")
    chosen = said.get("num_experts_per_tok")
    if not (count and width and chosen):
        raise ValueError(
            f"{where} does not say how many experts there are (num_experts), how wide, or how many a token visits."
        )
    return Experts(
        count=int(count),
        chosen=int(chosen),
        width=int(width),
        shared_width=int(said.get("shared_expert_intermediate_size") or 0) if kind == "qwen2_moe" else 0,
    )


def _sparse_layers(said: Mapping[str, Any], layers: int) -> int:
    every, dense = int(said.get("decoder_sparse_step") or 1), set(said.get("mlp_only_layers") or [])
    return sum(1 for layer in range(layers) if (layer + 1) % every == 0 and layer not in dense)
