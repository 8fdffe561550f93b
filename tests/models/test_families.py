"""What single families need: models whose classes differ from Llama's in more than sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from strop.config.schema.model import ModelConfig
from strop.models.build import build_policy, meta_init, persistent_buffers
from strop.models.forward import response_outputs
from strop.models.heads import load_scalar_model, new_scalar_model
from strop.models.layouts.small_model import small_config, small_model
from strop.models.layouts.wide_stream import _by_class
from strop.models.load import load_config, resolve
from strop.models.lora import adapted_layers, add_adapters, base_name
from strop.models.patches import applied_patches, patch_for_device
from strop.rollout.base import Request, Sampling
from strop.rollout.native.engine import NativeEngine
from strop.run.merge.merge import _write_folder, compare_with_folder, final_weights, named_as_in_files
from strop.run.merge.sources import MergeSource
from strop.shared.export import exported
from strop.types import Batch
from tests.backends.make import single
from tests.models.hybrids import hybrid
from tests.models.test_architectures import plain_log_probs
from tests.models.tiny import SIZE, tiny_batch, tiny_model

SPECIAL = {"Llama4Router", "DeepseekV4GroupedLinear"}
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


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba"])
def test_mamba_families_have_critics(family: str) -> None:
    """Their bodies return no attention weights."""
    batch = tiny_batch()
    critic = new_scalar_model(hybrid(family).config).eval()
    values = response_outputs(critic, batch, ["values"])["values"]
    values.sum().backward()
    with torch.no_grad():
        for row, sequence in enumerate(batch.sequences):
            states = critic.backbone(input_ids=sequence[None], use_cache=False).last_hidden_state[0]
            expected = (states @ critic.score.weight.t()).flatten()[int(batch.prompt_lengths[row]) - 1 : -1]
            torch.testing.assert_close(values[row, : len(expected)], expected, rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("family", ["llama4_text", "deepseek_v4"])
def test_adapters_of_all_linear_modules_leave_out_those_that_are_no_product(family: str) -> None:
    """Routers of Llama 4 are linear modules that return a pair."""
    model = small_family(family)
    special = {name for name, part in model.named_modules() if type(part).__name__ in SPECIAL}
    expected = plain_log_probs(model, tiny_batch())
    adapted = add_adapters(model, rank=2, alpha=4)
    patch_for_device(adapted)
    names = {base_name(name) for name, part in adapted.named_modules() if part in adapted_layers(adapted)}
    assert special and names and not special & names
    log_probs = response_outputs(adapted, tiny_batch(), ["log_probs"])["log_probs"]
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-5)
    log_probs.sum().backward()


@pytest.mark.parametrize("build", [nullcontext, meta_init], ids=["alone", "ranks"])
def test_adapters_of_all_linear_modules_of_falcon_have_all_of_them(
    build: Callable[[], AbstractContextManager[None]],
) -> None:
    """Its linear modules are of a class of their own, which computes a product."""
    model = small_family("falcon")
    with build():
        adapted = add_adapters(model, rank=2, alpha=4)
    assert len(adapted_layers(adapted)) == 4 * adapted.config.num_hidden_layers


def test_a_module_that_peft_does_not_adapt_is_named_with_what_to_set() -> None:
    """The kernels of Mamba layers take the weight of out_proj without its adapter."""
    model = hybrid("falcon_h1")
    with pytest.raises(ValueError, match=r"out_proj.*model\.exclude_modules=\[out_proj\]"):
        add_adapters(model, rank=2, alpha=4)
    adapted = add_adapters(hybrid("falcon_h1"), rank=2, alpha=4, exclude_modules=["out_proj"])
    assert adapted_layers(adapted)


def longrope(original: int) -> Any:
    """A Phi-3 that turns three quarters of a head, with longrope."""
    factors = {"short_factor": [1.0] * 12, "long_factor": [4.0] * 12}
    sizes = {**SIZE, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 32, "partial_rotary_factor": 0.75, "original_max_position_embeddings": original}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("phi3", **sizes, rope_scaling={"rope_type": "longrope", **factors})
    ).eval()


def test_longrope_is_measured_on_a_small_model() -> None:
    """Its factors must fit the small heads; without a small model, ranks pad their rows, and engines are not
    checked."""
    assert small_model(longrope(32)).config.rope_parameters["long_factor"] == [4.0] * 3


@torch.no_grad()
def test_longrope_refuses_what_would_depend_on_the_micro_batch() -> None:
    """Sequences over the original length have other angles, and a pass of transformers has one kind."""
    sequences = [torch.arange(3, 3 + length) for length in (9, 40, 33)]
    batch = Batch(sequences, torch.tensor([2, 2, 2]), torch.ones(3, 38), torch.arange(3))
    model = longrope(24)
    with pytest.raises(ValueError, match=r"of 8 and of 39 tokens.*over 24 tokens.*micro-batch size to 1"):
        response_outputs(model, batch, ["log_probs"])
    for rows in ([0], [1, 2]):
        piece = batch.select(rows)
        expected = plain_log_probs(longrope(24), piece)
        found = response_outputs(model, piece, ["log_probs"])["log_probs"]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
