"""The table of model families in docs/distributed.md says what the code does. `python -m
tests.backends.test_families` writes it anew."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strop.backends.fsdp.experts import expert_count, experts_of
from strop.config.megatron import FAMILIES as MEGATRON
from strop.models.tensor_parallel import plan_of
from strop.planning.shape import FAMILIES as PLANNED
from strop.preflight.model_checks import native_obstacle

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
TABLE = re.compile(r"\| family \| fsdp \|.*?\n\n", re.DOTALL)
MORE = ("gpt_oss", "glm4_moe", "qwen3_next", "deepseek_v2", "olmo3", "nemotron_h")
FAMILIES = sorted({*MEGATRON, *PLANNED, *MORE})


def skeleton(family: str) -> Any:
    """A model of two layers without weights."""
    config = AutoConfig.for_model(family)
    config.num_hidden_layers = 2
    if getattr(config, "first_k_dense_replace", 0):
        config.first_k_dense_replace = 0
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def divides_matrices(model: Any) -> str:
    """Whether tensor-parallel ranks can share the matrices of its layers. Not with experts: some versions of
    transformers have a plan without them, which is not tested."""
    if expert_count(model.config):
        return "no"
    try:
        plan_of(model, 1)
    except ValueError:
        return "no"
    return "yes"


def row(family: str, native: bool) -> str:
    model = skeleton(family)
    experts = "-"
    if expert_count(model.config):
        experts = "yes" if experts_of(model) else "no"
    cells = [
        family,
        "yes",
        divides_matrices(model),
        experts,
        "yes" if family in MEGATRON else "no",
        "yes" if native else "no",
    ]
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    lines = [
        "| family | fsdp | its tensor parallelism | its expert parallelism | megatron | native engine |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows = [row(family, native_obstacle(AutoConfig.for_model(family)) is None) for family in FAMILIES]
    return "\n".join([*lines, *rows]) + "\n\n"


def shown() -> dict[str, str]:
    [found] = TABLE.findall(PAGE.read_text())
    return {line.split(" | ")[0].removeprefix("| "): line for line in found.strip().splitlines()[2:]}


def test_the_page_shows_every_family_and_how_it_is_divided() -> None:
    lines = shown()
    assert sorted(lines) == FAMILIES
    for family, line in lines.items():
        assert line == row(family, native=line.endswith(" | yes |")), family


@pytest.mark.slow
def test_the_page_shows_what_the_native_engine_samples_from() -> None:
    assert TABLE.findall(PAGE.read_text()) == [table()], "run `python -m tests.backends.test_families`"


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
