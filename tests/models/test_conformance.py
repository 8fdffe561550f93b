"""Packed rows, padded rows and the native engine against single sequences, over many architectures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from strop.models.layouts import check as layouts
from strop.models.layouts.small_model import build_small, small_config
from strop.rollout import native_check
from tests.models.conformance import OTHERS, QUICK, Conformance, conformance

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def documented() -> dict[str, list[str]]:
    """The words of the table in docs/models.md, without numbers."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0] in {*QUICK, *OTHERS}:
            found[cells[0]] = [cell.partition(" (")[0] for cell in cells[1:]]
    return found


def check(row: Conformance) -> None:
    # How much is rounding differs from machine to machine.
    found = [cell.replace("rounding", "yes") for cell in row.cells]
    written = [cell.replace("rounding", "yes") for cell in documented()[row.family]]
    assert found == written, "run `python -m tests.models.conformance`"
    assert row.padded.right or row.family == "doge"


@pytest.mark.parametrize("family", QUICK)
def test_it_is_as_documented(family: str) -> None:
    row = conformance(family)
    check(row)
    assert row.cells == ("yes", "yes", "yes"), row


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_this_one_too(family: str) -> None:
    check(conformance(family))


def test_the_page_has_every_architecture_and_most_of_them_have_everything() -> None:
    found = documented()
    assert set(found) == {*QUICK, *OTHERS}
    everything = [family for family, cells in found.items() if set(cells) <= {"yes", "rounding"}]
    assert len(everything) >= 60


LIMITS = {
    "gpt_oss": "sliding_window",
    "gemma3_text": "sliding_window",
    "gemma4_text": "sliding_window",
    "llama4_text": "attention_chunk_size",
    "deepseek_v32": "index_topk",
}


@pytest.mark.parametrize("family", LIMITS)
@torch.no_grad()
def test_what_is_measured_is_longer_than_the_window(family: str) -> None:
    """A sequence within the window, the chunk or the selected keys would not show whether they are kept."""
    config = AutoConfig.for_model(family, **{**QUICK, **OTHERS}[family])
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    narrow = small_config(config)
    limit = getattr(narrow, LIMITS[family])
    longest = max(layouts._LENGTHS)
    assert 2 * limit < longest < max(native_check._PROMPTS)
    wide = small_config(config)
    setattr(wide, LIMITS[family], 1000)
    ids = torch.randint(3, 61, (1, longest), generator=torch.Generator().manual_seed(0))
    one, other = (
        build_small(kind, each)(input_ids=ids, use_cache=False).logits[0] for each in (narrow, wide)
    )
    differs = (one - other).abs().amax(-1)
    assert differs[:limit].max() < 1e-5, "up to the limit all tokens are seen"
    assert differs[limit + 1 :].max() > 0.01
