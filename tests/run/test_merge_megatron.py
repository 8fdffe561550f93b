"""Megatron checkpoints in verl's layout become folders that transformers loads."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as saving
from transformers import AutoModelForCausalLM

from strop.quickstart.tiny_model import tiny_tokenizer
from strop.run.merge.megatron import read_megatron
from strop.trainer.main_merge import run as merge
from tests.backends import ranks_megatron_saved
from tests.backends.megatron_saved import stacked
from tests.backends.ranks import pytest_as_ranks
from tests.models.tiny import tiny_model


def saved(folder, tensors, config):
    saving.save({**tensors, "rng_state": b"x"}, checkpoint_id=folder / "dist_ckpt", no_dist=True)
    config.save_pretrained(folder / "huggingface")
    tiny_tokenizer().save_pretrained(folder / "huggingface")


def merged(folder):
    words = ["--backend", "megatron", "--dtype", "float32", "--local_dir", f"{folder}"]
    assert merge([*words, "--target_dir", f"{folder}-out"]) == 0
    return AutoModelForCausalLM.from_pretrained(f"{folder}-out", dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_weights_of_all_layers_in_one_tensor(tmp_path, family):
    """Tied and own output heads, biases, a padded vocabulary; every bit is the same."""
    model = tiny_model(family)
    saved(tmp_path / "actor", stacked(model), model.config)
    found = merged(tmp_path / "actor").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(found[name], weight), name


def test_a_checkpoint_of_another_model_is_refused_with_its_shapes(tmp_path):
    model = tiny_model("qwen2")
    wider = tiny_model("qwen2", intermediate_size=80).config
    deeper = tiny_model("qwen2", num_hidden_layers=5).config
    saved(tmp_path, stacked(model), wider)
    place = tmp_path / "dist_ckpt"
    layers = model.config.num_hidden_layers
    with pytest.raises(
        ValueError, match=rf"another model: decoder.layers.mlp.linear_fc1.weight has shape \({layers}, "
    ):
        merge(["--local_dir", f"{tmp_path}", "--target_dir", f"{tmp_path}/out"])
    with pytest.raises(ValueError, match=r"has shape .*, and model.layers.\d.* of the model has shape"):
        read_megatron(place, deeper)
    with pytest.raises(ValueError, match=r"it lacks \d+ weights of a qwen3 \(.*k_norm"):
        read_megatron(place, tiny_model("qwen3").config)
    with pytest.raises(ValueError, match=r"no table of Megatron's weights for model_type='gemma'"):
        read_megatron(place, tiny_model("gemma").config)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_weights_names_the_folder_that_has_them(tmp_path):
    saved(tmp_path, {"optimizer.state.exp_avg.decoder.x": torch.ones(2)}, tiny_model().config)
    with pytest.raises(
        ValueError, match=r"only the state of an optimizer. verl then writes them to the folder huggingface"
    ):
        read_megatron(tmp_path / "dist_ckpt", tiny_model().config)


def test_a_description_runs_nothing(tmp_path):
    class Program:
        def __reduce__(self):
            return os.mkdir, (f"{tmp_path}/ran",)

    model = tiny_model()
    saved(tmp_path, stacked(model), model.config)
    (tmp_path / "dist_ckpt" / ".metadata").write_bytes(pickle.dumps(Program()))
    with pytest.raises(ValueError, match=r"posix\.mkdir, which is no part of saved weights"):
        read_megatron(tmp_path / "dist_ckpt", model.config)
    assert not (tmp_path / "ran").exists()


def test_a_missing_file_is_named(tmp_path):
    model = tiny_model()
    saved(tmp_path, stacked(model), model.config)
    (tmp_path / "dist_ckpt" / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"__0_0\.distcp cannot be read"):
        read_megatron(tmp_path / "dist_ckpt", model.config)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
def test_checkpoints_of_megatron_core_itself(world, tmp_path, monkeypatch):
    """Written by four ranks as TP 2 x PP 2, and by one: the logits are those of the source model."""
    monkeypatch.setenv("SAVED", str(tmp_path))
    pytest_as_ranks(world, [ranks_megatron_saved.__file__], timeout=900)
    ids = torch.randint(3, 61, (2, 17))
    for family in ranks_megatron_saved.FAMILIES:
        tiny_tokenizer().save_pretrained(tmp_path / family / "actor" / "huggingface")
        source = AutoModelForCausalLM.from_pretrained(tmp_path / family / "source")
        model = merged(tmp_path / family / "actor")
        assert torch.equal(model(ids).logits, source(ids).logits)
