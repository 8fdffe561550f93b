"""verl's example commands: the arguments that a rule reads (verl_commands.tsv), and the sizes of their models."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

PREFIXES = {
    "amo.": "actor_rollout_ref.actor.megatron.override_transformer_config.",
    "am.": "actor_rollout_ref.actor.megatron.",
    "fm.": "actor_rollout_ref.ref.megatron.",
    "cm.": "critic.megatron.",
    "a.": "actor_rollout_ref.actor.",
    "r.": "actor_rollout_ref.rollout.",
    "f.": "actor_rollout_ref.ref.",
    "m.": "actor_rollout_ref.model.",
}
"""Abbreviations of the table."""

INPUTS = {
    "ppo_trainer": ("actor_rollout_ref.model.path=model", "data.train_files=train.parquet"),
    "sft_trainer": ("model.path=model", "data.train_files=train.parquet"),
    "generation": ("model.path=model", "data.path=train.parquet", "data.output_path=answers.parquet"),
}
"""What stands in place of the models and files of the commands."""


@dataclass(frozen=True)
class ModelSizes:
    """What a config.json says about a model, as far as Megatron's sizes depend on it."""

    model_type: str
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    intermediate_size: int
    num_experts: int | None = None
    others: tuple[tuple[str, object], ...] = ()
    """Further values of config.json."""

    def configuration(self) -> PreTrainedConfig | ModelSizes:
        """With the defaults of its family, where transformers knows it."""
        if self.model_type not in CONFIG_MAPPING:
            return self
        values: dict[str, object] = dict(self.others)
        for name in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "intermediate_size"):
            values[name] = getattr(self, name)
        if self.num_experts is not None:
            values["n_routed_experts" if self.model_type == "deepseek_v3" else "num_experts"] = (
                self.num_experts
            )
        return AutoConfig.for_model(self.model_type, **values)


YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 10000.0}


MODELS = {
    "qwen1.5-moe-a2.7b": ModelSizes("qwen2_moe", 16, 16, 24, 5632, 60),
    "qwen2.5-vl-7b": ModelSizes("qwen2_5_vl", 28, 4, 28, 18944),
    "qwen3-vl-235b-a22b": ModelSizes("qwen3_vl_moe", 64, 4, 94, 12288, 128),
    "qwen3-vl-30b-a3b": ModelSizes("qwen3_vl_moe", 32, 4, 48, 6144, 128),
    "qwen3-vl-8b": ModelSizes("qwen3_vl", 32, 8, 36, 12288),
    "deepseek-v3": ModelSizes("deepseek_v3", 128, 128, 61, 18432, 256, (("rope_parameters", YARN),)),
    "moonlight-16b-a3b": ModelSizes(
        "deepseek_v3", 16, 16, 27, 11264, 64, (("n_group", 1), ("topk_group", 1))
    ),
    "qwen3-235b-a22b": ModelSizes("qwen3_moe", 64, 4, 94, 12288, 128),
    "qwen3-30b-a3b": ModelSizes("qwen3_moe", 32, 4, 48, 6144, 128),
    "mimo-7b": ModelSizes("mimo", 32, 8, 36, 11008),
    "qwen2.5-0.5b": ModelSizes("qwen2", 14, 2, 24, 4864),
    "qwen2.5-3b": ModelSizes("qwen2", 16, 2, 36, 11008),
    "qwen2.5-7b": ModelSizes("qwen2", 28, 4, 28, 18944),
    "qwen2.5-32b": ModelSizes("qwen2", 40, 8, 64, 27648),
    "deepseek-llm-7b": ModelSizes("llama", 32, 32, 30, 11008),
}
"""The models of commands with Megatron."""


@dataclass(frozen=True)
class VerlCommand:
    """One line of the table."""

    script: str
    root: str
    model: str
    images: bool
    refused_by: str
    """The key of the first error; empty: the command passes."""
    arguments: tuple[str, ...]

    def overrides(self) -> list[str]:
        """The arguments with whole names, and stand-ins for model and files."""
        return [*map(_whole_name, self.arguments), *INPUTS[self.root]]


def _whole_name(argument: str) -> str:
    for short, prefix in PREFIXES.items():
        if argument.startswith(short):
            return prefix + argument.removeprefix(short)
    return argument


def load_commands() -> list[VerlCommand]:
    file = Path(__file__).parent / "verl_commands.tsv"
    with file.open(encoding="utf-8", newline="") as rows:
        return [
            VerlCommand(
                row["script"],
                row["root"],
                row["model"],
                row["images"] == "images",
                row["refused_by"],
                tuple(row["arguments"].split()),
            )
            for row in csv.DictReader(rows, delimiter="\t", quoting=csv.QUOTE_NONE)
        ]
