"""docs/scaling.md and docs/scaling/ show what the planner says.

`python -m tests.planning.test_scaling_page` writes its answers into the pages.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import shlex
from pathlib import Path

import pytest

from strop.trainer.main_plan import run

from .test_measured import table

DOCS = Path(__file__).parents[2] / "docs"
FITTING = {"scaling.md": [False, True], "scaling/large_models.md": [True, True], "scaling/accuracy.md": []}
"""Whether each run of a page fits."""
TABLE = re.compile(r"\| shape \| phase \|.*?\n\n", re.DOTALL)
SMALLEST = re.compile(r"\| model \| all weights.*?\n\n", re.DOTALL)
EXAMPLE = re.compile(r"```\n(strop plan (?:[^`]*\\\n)[^`]*?)\n```\n\n```\n([^`]*?)```", re.DOTALL)


def answer(command: str) -> str:
    words = shlex.split(command.replace("\\\n", " "))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run(words[2:])
    return said.getvalue()


GPUS = ("4090", "a100-40", "h100", "h200")
"""From small to large."""
ADAPTERS = "actor_rollout_ref.model.lora_rank=32"
COLUMNS = {
    "all weights": (1, ()),
    "LoRA, rank 32": (1, (ADAPTERS,)),
    "QLoRA, rank 32": (1, (ADAPTERS, "actor_rollout_ref.model.quantization=nf4")),
    "all weights, 8 GPUs": (8, ()),
}
BASE = str(Path(__file__).parents[2] / "examples/recipes/base.yaml")


def smallest(model: str, count: int, keys: tuple[str, ...]) -> str:
    """The first GPU of which `count` run the recipes' base file with this model."""
    for gpu in GPUS:
        words = [BASE, f"actor_rollout_ref.model.path={model}", *keys, "--gpu", gpu, "--gpus-per-node"]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            run([*words, str(count), "--json"])
        if json.loads(said.getvalue())["fits"]:
            return gpu
    return "none"


@functools.cache
def smallest_gpus() -> str:
    rows = [["model", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b"):
        model = f"qwen2.5-{size}"
        rows.append([model, *(smallest(model, count, keys) for count, keys in COLUMNS.values())])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def renewed(page: str) -> str:
    if SMALLEST.search(page):
        page = SMALLEST.sub(lambda _: smallest_gpus() + "\n\n", page)
    page = TABLE.sub(lambda _: table() + "\n\n", page)
    return EXAMPLE.sub(lambda found: f"```\n{found[1]}\n```\n\n```\n{answer(found[1])}```", page)


@pytest.mark.parametrize("name", FITTING)
def test_a_page_shows_what_the_planner_says(name):
    page = (DOCS / name).read_text()
    assert renewed(page) == page, "run `python -m tests.planning.test_scaling_page`"


def test_one_page_has_the_table_of_measurements():
    assert [name for name in FITTING if TABLE.search((DOCS / name).read_text())] == ["scaling/accuracy.md"]


@pytest.mark.parametrize("name", FITTING)
def test_the_runs_of_a_page_fit_or_say_what_to_set(name):
    answers = [said for _, said in EXAMPLE.findall((DOCS / name).read_text())]
    assert ["\nfits\n" in said for said in answers] == FITTING[name]
    assert ["Set " in said for said in answers] == [not fits for fits in FITTING[name]]


if __name__ == "__main__":
    for name in FITTING:
        (DOCS / name).write_text(renewed((DOCS / name).read_text()))
