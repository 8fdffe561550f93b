"""The config.json of well-known models, as far as memory and time depend on it."""

from __future__ import annotations

_COLUMNS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)
_TABLE: dict[str, tuple[str, tuple[int, ...]]] = {
    "qwen2.5-0.5b": ("qwen2", (896, 4864, 24, 14, 2, 64, 151936, 1)),
    "qwen2.5-1.5b": ("qwen2", (1536, 8960, 28, 12, 2, 128, 151936, 1)),
    "qwen2.5-3b": ("qwen2", (2048, 11008, 36, 16, 2, 128, 151936, 1)),
    "qwen2.5-7b": ("qwen2", (3584, 18944, 28, 28, 4, 128, 152064, 0)),
    "qwen2.5-14b": ("qwen2", (5120, 13824, 48, 40, 8, 128, 152064, 0)),
    "qwen2.5-32b": ("qwen2", (5120, 27648, 64, 40, 8, 128, 152064, 0)),
    "qwen2.5-72b": ("qwen2", (8192, 29568, 80, 64, 8, 128, 152064, 0)),
    "qwen3-0.6b": ("qwen3", (1024, 3072, 28, 16, 8, 128, 151936, 1)),
    "qwen3-1.7b": ("qwen3", (2048, 6144, 28, 16, 8, 128, 151936, 1)),
    "qwen3-4b": ("qwen3", (2560, 9728, 36, 32, 8, 128, 151936, 1)),
    "qwen3-8b": ("qwen3", (4096, 12288, 36, 32, 8, 128, 151936, 0)),
    "qwen3-14b": ("qwen3", (5120, 17408, 40, 40, 8, 128, 151936, 0)),
    "qwen3-32b": ("qwen3", (5120, 25600, 64, 64, 8, 128, 151936, 0)),
    "qwen3-30b-a3b": ("qwen3_moe", (2048, 6144, 48, 32, 4, 128, 151936, 0)),
    "qwen3-235b-a22b": ("qwen3_moe", (4096, 12288, 94, 64, 4, 128, 151936, 0)),
    "llama-3-8b": ("llama", (4096, 14336, 32, 32, 8, 128, 128256, 0)),
    "llama-3-70b": ("llama", (8192, 28672, 80, 64, 8, 128, 128256, 0)),
    "llama-3.2-1b": ("llama", (2048, 8192, 16, 32, 8, 64, 128256, 1)),
    "llama-3.2-3b": ("llama", (3072, 8192, 28, 24, 8, 128, 128256, 1)),
    "smollm2-135m": ("llama", (576, 1536, 30, 9, 3, 64, 49152, 1)),
    "smollm2-360m": ("llama", (960, 2560, 32, 15, 5, 64, 49152, 1)),
    "smollm2-1.7b": ("llama", (2048, 8192, 24, 32, 32, 64, 49152, 1)),
    "mixtral-8x7b": ("mixtral", (4096, 14336, 32, 32, 8, 128, 32000, 0)),
    "deepseek-v3": ("deepseek_v3", (7168, 18432, 61, 128, 128, 64, 129280, 0)),
}
_MIXTURES: dict[str, dict[str, int]] = {
    "qwen3-30b-a3b": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "qwen3-235b-a22b": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
    "mixtral-8x7b": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek-v3": {
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}
_SAME_SHAPE = {
    "deepseek-r1": "deepseek-v3",
    "llama-3.1-8b": "llama-3-8b",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3.3-70b": "llama-3-70b",
}
_VARIANTS = ("meta-", "-instruct", "-chat", "-base", "-coder", "-math", "-it")
"""Parts of a hub name that say how a model was trained, not which shape it has."""


def _known_model(name: str) -> dict[str, object]:
    """What the config.json of a model says, as far as memory and time depend on it."""
    kind, numbers = _TABLE[name]
    values: dict[str, object] = {"model_type": kind}
    values.update(zip(_COLUMNS, numbers, strict=True))
    values["tie_word_embeddings"] = bool(numbers[-1])
    values.update(_MIXTURES.get(name, {}))
    return values


KNOWN: dict[str, dict[str, object]] = {name: _known_model(name) for name in _TABLE}
"""The config.json of each model by name."""


def plain_name(path: str) -> str:
    """`Qwen/Qwen2.5-7B-Instruct` -> `qwen2.5-7b`."""
    name = path.rstrip("/").rsplit("/", 1)[-1].lower()
    for part in _VARIANTS:
        name = name.replace(part, "")
    return _SAME_SHAPE.get(name, name)
