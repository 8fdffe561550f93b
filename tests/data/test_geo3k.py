"""`strop data geo3k` makes rows that can be trained on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from strop.config.schema.data import DataConfig
from strop.data.make import main, write
from strop.data.prompts import build_prompts
from tests.data.test_images import FAMILY, png
from tests.models.vision.tiny_vlm import processor_of, tokenizer_of


def test_rows_with_drawings(tmp_path: Path) -> None:
    published = {"images": [{"bytes": png(), "path": None}], "problem": "<image>What is x?", "answer": "12"}
    write([published, {**published, "problem": "no drawing"}], tmp_path / "train.parquet")
    write([published], tmp_path / "test.parquet")
    files = [str(tmp_path / name) for name in ("train.parquet", "test.parquet")]
    assert main(["geo3k", "--out", str(tmp_path / "out"), "--from", *files]) == 0
    config = DataConfig(train_files=str(tmp_path / "out/train.parquet"), max_prompt_length=400)
    prompts = build_prompts(config, tokenizer_of(FAMILY), load_processor=partial(processor_of, FAMILY))
    assert len(prompts) == 1, "a row without its drawing is left out"
    assert prompts[0].ground_truth == "12" and prompts[0].data_source == "hiyouga/geometry3k"
    assert prompts[0].images[0].num_tokens == 4
