"""The precision that a device computes in; modules whose weights are loaded later."""

from __future__ import annotations

import json
import re

import pytest
import torch

from strop.config.schema.model import ModelConfig
from strop.models import build
from strop.shared.export import exported
from tests.backends.make import single
from tests.models.tiny import tiny_model


@pytest.mark.parametrize(
    ("machine", "onednn", "avx512_bf16", "amx", "expected"),
    [
        ("aarch64", False, False, False, torch.float32),
        ("aarch64", True, False, False, torch.bfloat16),
        ("x86_64", False, False, False, torch.float32),  # AVX2
        ("x86_64", True, False, False, torch.float32),  # AVX-512: oneDNN emulates bf16
        ("x86_64", True, True, False, torch.bfloat16),
        ("x86_64", True, False, True, torch.bfloat16),
    ],
)
def test_bf16_is_computed_where_the_cpu_multiplies_it(
    monkeypatch, machine, onednn, avx512_bf16, amx, expected
):
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert build.compute_dtype("bfloat16", torch.device("cpu")) == expected
    assert build.compute_dtype("float32", torch.device("cpu")) == torch.float32
    assert build.compute_dtype("bfloat16", torch.device("cuda")) == torch.bfloat16


def test_a_change_of_precision_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(build, "has_bf16_instructions", lambda: False)
    build._warn_fp32.cache_clear()
    assert [build.compute_dtype("bfloat16", torch.device("cpu")) for _ in range(3)] == [torch.float32] * 3
    assert caplog.text.count("no bf16 instructions") == 1


def test_flash_attention_is_used_where_it_is(monkeypatch, caplog):
    chosen = ModelConfig(override_config={"attn_implementation": "flash_attention_2"})
    for found, expected in ((False, None), (True, "flash_attention_2")):
        monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda found=found: found)
        build._has_flash_attention.cache_clear()
        assert [build.attention_of(chosen) for _ in range(2)] == [expected] * 2
    build._has_flash_attention.cache_clear()
    assert caplog.text.count("flash-attn is not installed") == 1
    assert build.attention_of(ModelConfig(override_config={"attn_implementation": "eager"})) == "eager"


def test_a_module_whose_weights_come_later_has_the_generation_config_of_its_folder(tmp_path):
    """Else its samples would end at other tokens on several ranks than in one process."""
    tiny_model("qwen2").save_pretrained(tmp_path)
    written = {"eos_token_id": [2, 5, 7], "temperature": 0.6, "top_k": 20, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    for weights in (True, False):
        made = build.build_policy(ModelConfig(path=str(tmp_path)), weights=weights).generation_config
        assert {name: getattr(made, name) for name in written} == written


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[2]", "TypeError: "),
        ("null", "NoneType"),
        ('{"eos_token_id": 2', "it is not JSON"),  # transformers reads config.json alone, and says nothing
        ('{"eos_token_id": "</s>"}', "eos_token_id is '</s>', not a number or a list of numbers"),
        ('{"max_new_tokens": -3}', "must be greater than 0"),
    ],
)
def test_a_generation_config_that_cannot_be_read_is_named(tmp_path, weights, text, said):
    tiny_model("qwen2").save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"{file} cannot be read: .*{re.escape(said)}.* or remove it"):
        build.build_policy(ModelConfig(path=str(tmp_path)), weights=weights)
    file.unlink()
    assert build.build_policy(ModelConfig(path=str(tmp_path)), weights=weights).generation_config is not None


def test_adapters_larger_than_every_matrix_are_refused() -> None:
    from strop.models.lora import add_adapters

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    with pytest.raises(ValueError, match=r"lora_rank=100000 .* \(0 is 16 x 8\).* Use at most 8"):
        add_adapters(model, rank=100_000, alpha=1)


def test_routing_biases_are_read_with_a_module_whose_weights_come_later_and_are_exported(tmp_path):
    """They are buffers: loaders of shards, and weight sync, go through parameters alone."""
    model = tiny_model("deepseek_v3")
    model.save_pretrained(tmp_path)
    expected = build.persistent_buffers(model)
    assert len(expected) == 3 and all(bias.any() for bias in expected.values())
    later = build.build_reference(ModelConfig(path=str(tmp_path)), weights=False)
    assert next(later.parameters()).is_meta
    written = exported(single(model))
    for name, bias in expected.items():
        assert torch.equal(build.persistent_buffers(later)[name], bias)
        assert torch.equal(written[name], bias)
