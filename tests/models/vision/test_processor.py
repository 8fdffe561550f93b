"""The processor of a model folder, without torchvision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from strop.config.schema.model import ModelConfig
from strop.models.load import copy_processor_files
from strop.models.vision.processor import load_processor, processor_loader
from strop.quickstart.tiny_model import tiny_model
from tests.models.vision.tiny_vlm import processor_of, save_vlm, tokenizer_of


def test_the_processor_of_a_folder(tmp_path: Path) -> None:
    folder = save_vlm("qwen2_5_vl", tmp_path / "model")
    processor = processor_loader(ModelConfig(path=str(folder)))()
    assert processor.image_token == "<|image_pad|>"
    assert processor.image_processor.patch_size == 4
    (tmp_path / "copy").mkdir()
    copy_processor_files(str(folder), tmp_path / "copy")
    assert (tmp_path / "copy/preprocessor_config.json").is_file()
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"preprocessor_config.json is damaged"):
        load_processor(str(folder), str(folder))
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"has no preprocessor_config.json"):
        load_processor(str(folder), str(folder))


def test_a_text_model_takes_no_images(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen2_5_vl")
    tiny_model(tokenizer, hidden=16, layers=1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a text model"):
        load_processor(str(tmp_path), str(tmp_path))


def test_a_processor_that_needs_torchvision_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of Idefics3 and SmolVLM before transformers 5.18."""

    def needs_torchvision(**_: object) -> None:
        raise ImportError("torchvision")

    monkeypatch.setattr(transformers, "Idefics3ImageProcessorPil", needs_torchvision)
    with pytest.raises(ValueError, match="Idefics3ImageProcessor of transformers needs torchvision"):
        processor_of("idefics3")


def test_models_with_other_masks_are_refused_before_their_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "paligemma", "vision_config": {}}')
    with pytest.raises(ValueError, match="is of the type paligemma, whose image tokens attend to others"):
        load_processor(str(tmp_path), str(tmp_path))


def test_a_tokenizer_of_another_model_is_named(tmp_path: Path) -> None:
    folder = save_vlm("gemma3", tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["extra_special_tokens"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"Gemma3Processor does not get what it needs .* boi_token"):
        load_processor(str(folder), str(folder))
