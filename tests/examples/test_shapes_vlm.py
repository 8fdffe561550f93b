"""The example examples/shapes_vlm: its pictures, and (slowly) that a model learns to name them and looks at them."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "shapes_vlm"


def prepare_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shapes_prepare", EXAMPLE / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_and_scores() -> None:
    example = prepare_module()
    rows = example.rows(24, seed=3)
    assert len({row["response"] for row in rows}) == 12
    images = [Image.open(io.BytesIO(row["images"][0]["bytes"])) for row in rows]
    assert {image.size for image in images} == {(example.SIDE, example.SIDE)}
    other = example.with_other_pictures(rows, seed=1)
    assert sum(a["images"] == b["images"] for a, b in zip(rows, other, strict=True)) < 6
    assert example.compute_score("shapes", "redring<eos>", "redring") == 1.0
    assert example.compute_score("shapes", "redcross", "redring") == 0.0


def strop(folder: Path, *words: str) -> None:
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "strop.cli", *words], cwd=folder, env=given, check=True, timeout=1500
    )


def accuracies(file: Path) -> list[float]:
    """Validation accuracies of a run, in order."""
    found = []
    for line in file.read_text().splitlines():
        numbers = json.loads(line)["data"]
        found += [value for name, value in numbers.items() if name.startswith("val-core/shapes/reward/mean@")]
    return found


@pytest.mark.slow
def test_a_tiny_model_learns_to_name_what_it_sees(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    prepare_module().prepare(tmp_path / "runs/shapes_vlm")
    strop(tmp_path, "sft", "examples/shapes_vlm/sft.yaml")
    strop(tmp_path, "ppo", "examples/shapes_vlm/grpo.yaml")
    before, *_, after = accuracies(tmp_path / "runs/shapes_vlm/grpo/metrics.jsonl")
    assert before < 0.4
    assert after > 0.85
    model = "runs/shapes_vlm/grpo/global_step_100/actor/huggingface"
    words = [
        f"actor_rollout_ref.model.path={model}",
        "data.val_files=runs/shapes_vlm/data/shuffled.parquet",
        "trainer.default_local_dir=runs/shapes_vlm/shuffled",
        "trainer.val_only=true",
    ]
    strop(tmp_path, "ppo", "examples/shapes_vlm/grpo.yaml", *words)
    [blind] = accuracies(tmp_path / "runs/shapes_vlm/shuffled/metrics.jsonl")
    assert blind < 0.2, "chance is 1 in 12"
