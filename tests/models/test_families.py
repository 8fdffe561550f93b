"""What single families need: models whose classes differ from Llama's in more than sizes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from strop.config.schema.model import ModelConfig
from strop.models.build import build_policy, persistent_buffers
from strop.models.forward import response_outputs
from strop.models.heads import load_scalar_model
from strop.models.layouts.small_model import small_config
from strop.models.layouts.wide_stream import _by_class
from strop.models.load import load_config, resolve
from strop.models.patches import applied_patches
from strop.rollout.base import Request, Sampling
from strop.rollout.native.engine import NativeEngine
from strop.run.merge.merge import _write_folder, compare_with_folder, final_weights, named_as_in_files
from strop.run.merge.sources import MergeSource
from strop.shared.export import exported
from tests.backends.make import single
from tests.models.hybrids import hybrid
from tests.models.tiny import tiny_batch, tiny_model

IDS = torch.tensor([[5, 9, 3, 7, 11, 4]])


@pytest.fixture
def loud_memory():
    """Uninitialized memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@torch.no_grad()
def test_a_critic_of_falcon_h1_computes_with_its_multipliers(tmp_path: Path, loud_memory: None) -> None:
    """They are buffers that no file has: transformers computes them when it loads a model."""
    model = hybrid("falcon_h1")
    model.save_pretrained(tmp_path)
    critic = load_scalar_model(str(tmp_path), load_config(resolve(str(tmp_path))), new_head=True).eval()
    states = model.model(input_ids=IDS, use_cache=False).last_hidden_state
    values = critic(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(values, states @ critic.score.weight.t())


@pytest.mark.filterwarnings("ignore:mkldnn")
@pytest.mark.parametrize("family", ["olmo2", "exaone4", "gemma3n_text"])
def test_a_layer_that_reads_the_stream_without_a_norm_runs_in_bf16(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By default the stream is float32, and a product of it with 16-bit weights raises an error."""
    config = small_config(AutoConfig.for_model(family))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    _by_class.clear()
    with caplog.at_level(logging.INFO, "strop"):
        model = build_policy(ModelConfig(path=str(tmp_path)), dtype=torch.bfloat16)
    assert "without a float32 residual stream" in caplog.text
    assert "fp32_residual" not in applied_patches(model)
    response_outputs(model, tiny_batch(), ["log_probs"])["log_probs"].sum().backward()
    [[completion]] = NativeEngine(model).generate([Request([5, 9, 3])], Sampling(max_tokens=3))
    assert completion.error is None


def test_a_layer_that_normalizes_the_stream_has_it_in_float32(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    assert "fp32_residual" in applied_patches(build_policy(ModelConfig(path=str(tmp_path))))


RENAMED = ["gpt_neox", "mixtral", "nemotron_h"]
"""transformers loads their weights under other names than those of their folders, or several as one."""


def small_family(family: str) -> Any:
    """A small model of a family, as its folder would load."""
    return AutoModelForCausalLM.from_config(small_config(AutoConfig.for_model(family))).eval()


@pytest.mark.parametrize("family", RENAMED)
def test_an_export_has_the_names_of_published_folders(family: str, tmp_path: Path) -> None:
    """vLLM and older versions of transformers know no others."""
    model = small_family(family)
    model.save_pretrained(tmp_path)
    published = load_file(tmp_path / "model.safetensors")
    found = exported(single(model))
    assert found.keys() == published.keys() != dict(model.named_parameters()).keys()
    for name, weight in published.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize("family", RENAMED)
def test_merged_checkpoints_have_them_too(family: str, tmp_path: Path) -> None:
    model = small_family(family)
    model.save_pretrained(tmp_path / "base")
    saved = MergeSource(dict(model.state_dict()), ModelConfig(path=str(tmp_path / "base")))
    _write_folder(saved, tmp_path, None)
    published = load_file(tmp_path / "base" / "model.safetensors")
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == published.keys()
    assert all(torch.equal(written[name], weight) for name, weight in published.items())
    assert not compare_with_folder(named_as_in_files(saved, final_weights(saved)), tmp_path / "base")


@pytest.mark.parametrize("family", ["nemotron_h", "minimax_m2", "kimi_linear"])
def test_routing_biases_with_another_name_in_files_are_loaded(family: str, tmp_path: Path) -> None:
    """Ranks build a model without its weights, and read the buffers from the files by name."""
    model = small_family(family)
    biases = persistent_buffers(model)
    assert biases
    for bias in biases.values():
        bias.copy_(torch.randn(bias.shape))
    model.save_pretrained(tmp_path)
    later = persistent_buffers(build_policy(ModelConfig(path=str(tmp_path)), weights=False))
    for name, bias in biases.items():
        assert torch.equal(later[name], bias), name
