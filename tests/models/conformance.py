"""Which models are computed right in which layout: measured over many architectures, as a table.

`python -m tests.models.conformance` prints the table of docs/models.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strop.models.layouts.check import Measured, measure_layouts
from strop.models.layouts.small_model import build_small, small_config
from strop.rollout.native_check import measure_sampling

EXACT = 1e-5
"""Differences of log-probs in float32 up to this are rounding."""


QUICK: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "mistral": {},
    "gemma3_text": {},
    "gemma4_text": {},
    "phi3": {"pad_token_id": 0},
    "deepseek_v3": {},
    "glm4_moe": {},
    "olmo3": {},
    "cohere2": {},
    "gpt_neox": {},
    "opt": {},
}
"""Measured by every run of the tests, besides those of tests/models/hybrids.py."""
_AS_THEY_ARE = """
gemma gemma2 gemma3n_text vaultgemma apertus arcee ministral3 qwen2_moe mixtral minimax_m2 ernie4_5
ernie4_5_moe exaone4 smollm3 glm glm4 granite granitemoe granite_swa helium hyperclovax jais2 olmo
olmo2 olmoe phi phimoe persimmon starcoder2 stablelm gpt2 gpt_bigcode gptj bloom falcon mpt codegen
biogpt xglm cohere seed_oss minicpm3 longcat_flash afmoe diffllama hrm_text mimo_v2_flash gpt_oss
llama4_text deepseek_v32 deepseek_v4 mamba mamba2 falcon_mamba falcon_h1 jamba nemotron_h
qwen3_next qwen3_5_text qwen3_5_moe_text kimi_linear olmo_hybrid minimax inkling_text zaya
recurrent_gemma rwkv xlstm doge
"""
OTHERS: dict[str, dict[str, Any]] = {
    **{family: {} for family in _AS_THEY_ARE.split()},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2, "num_hidden_layers": 6},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 2, "num_hidden_layers": 6},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4},
}


@dataclass(frozen=True)
class Conformance:
    family: str
    packed: Measured
    padded: Measured
    sampled: Measured

    @property
    def cells(self) -> tuple[str, str, str]:
        return verdict(self.packed), verdict(self.padded), verdict(self.sampled)


def verdict(measured: Measured) -> str:
    """In words that are the same on every machine."""
    if measured.difference is None:
        return "refused"
    if measured.difference <= EXACT:
        return "yes"
    if measured.right:
        return "rounding"
    return "wrong"


def conformance(family: str) -> Conformance:
    changes = {**QUICK, **OTHERS}[family]
    config = AutoConfig.for_model(family, **changes)
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    model = build_small(kind, small_config(config))
    layouts = measure_layouts(model)
    return Conformance(family, layouts.packed, layouts.padded, measure_sampling(model))


def table(rows: Iterable[Conformance]) -> str:
    lines = ["| model_type | packed | padded | native engine |", "| --- | --- | --- | --- |"]
    for row in rows:
        numbers = []
        for measured, word in zip((row.packed, row.padded, row.sampled), row.cells, strict=True):
            difference = measured.difference
            numbers.append(word if difference is None else f"{word} ({difference:.0e})")
        lines.append(f"| {row.family} | {' | '.join(numbers)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or sorted([*QUICK, *OTHERS])
    print(table(conformance(family) for family in wanted))
