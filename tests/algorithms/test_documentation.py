"""The page for users names every choice, and its example runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from strop.algorithms.advantages.base import estimate
from strop.algorithms.rollout_correction import CRITERIA, PRESETS
from strop.catalog import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    SCHEDULES,
    SCORERS,
)
from strop.registry import Registry, load_plugins

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


@pytest.mark.parametrize(
    "registry",
    [ADVANTAGES, POLICY_LOSSES, AGGREGATIONS, KL_ESTIMATORS, PREFERENCE_LOSSES, SCHEDULES, SCORERS],
)
def test_every_choice_is_documented(registry: Registry) -> None:
    words = set(re.findall(r"[\w+-]+", PAGE.replace("-", "_")))
    built_in = [name for name in registry.names() if registry.entry(name).source == "built-in"]
    assert [name for name in built_in if name.removesuffix("+") not in words] == []


def test_every_preset_and_criterion_is_documented() -> None:
    assert [name for name in PRESETS if f"| {name} |" not in PAGE] == []
    assert [name for name in CRITERIA if name.rpartition("_")[0] + "_" not in PAGE] == []


def test_the_example_plugin_runs_as_printed(tmp_path: Path) -> None:
    printed = re.search(r"```python\n# centred_by_median.py\n(.*?)```", PAGE, re.DOTALL)
    assert printed is not None
    file = tmp_path / "centred_by_median.py"
    file.write_text(printed[1])
    load_plugins([str(file)])
    facts = ADVANTAGES.entry("centred-by-median").facts
    assert facts == {"needs": ("group",), "min_group": 2, "score_baseline": None}
    rewards = torch.tensor([[0.0, 1.0], [0.0, 2.0], [6.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    made = estimate(
        "centred_by_median", rewards=rewards, mask=mask, groups=torch.zeros(3, dtype=torch.long), values=None
    )
    assert made.advantages.tolist() == made.returns.tolist() == [[-1, -1], [0, 0], [4, 0]]
    with pytest.raises(ValueError, match="'centred_by_median' needs groups"):
        estimate("centred_by_median", rewards=rewards, mask=mask)
