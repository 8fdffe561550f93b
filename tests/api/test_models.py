"""Models that are given as objects: saved once, loaded equal, refused if they cannot be used; and plain models
after a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from strop.api.models import plain_module, refuse_unusable, save_model, save_tokenizer
from strop.config.schema.model import ModelConfig
from strop.models.build import build_policy
from strop.models.lora import merged_weights


@pytest.fixture
def model(task: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(task / "model")
    return loaded


def test_a_module_is_saved_once_and_again_when_it_changes(model: PreTrainedModel, tmp_path: Path) -> None:
    folder = save_model(model, None, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(folder)("1+2=").input_ids
    assert save_model(model, None, tmp_path) == folder
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert save_model(model, None, tmp_path) != folder
    assert not list(tmp_path.glob(".*"))


def test_a_changed_configuration_is_another_model(model: PreTrainedModel, tmp_path: Path) -> None:
    """The weights are the same, and the run must not start from the folder with the old configuration."""
    first = save_model(model, None, tmp_path)
    model.generation_config.eos_token_id = [1, 5]
    second = save_model(model, None, tmp_path)
    assert GenerationConfig.from_pretrained(second).eos_token_id == [1, 5]
    model.config.rms_norm_eps = 0.5
    third = save_model(model, None, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(third).config.rms_norm_eps == 0.5
    assert len({first, second, third}) == 3
    moved = AutoModelForCausalLM.from_pretrained(third)  # the same model from another place is the same
    assert save_model(moved, None, tmp_path) == third


def test_a_generation_config_that_transformers_refuses_to_save_is_kept(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    model.generation_config.temperature = 0.6
    folder = save_model(model, None, tmp_path)
    assert GenerationConfig.from_pretrained(folder).temperature == 0.6
    assert model.generation_config.temperature == 0.6 and not model.generation_config.do_sample


def test_a_tokenizer_is_saved_once(task: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    assert save_tokenizer(tokenizer, tmp_path) == save_tokenizer(tokenizer, tmp_path)


def test_a_module_that_cannot_be_used_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    model.name_or_path = ""
    with pytest.raises(ValueError, match=r"not loaded from a folder. Give tokenizer="):
        save_model(model, None, tmp_path)
    model.train()
    refuse_unusable(model)  # the mode alone does no harm
    model(torch.tensor([[1, 2]])).logits.sum().backward()
    with pytest.raises(ValueError, match=r"holds gradients \(.*in training elsewhere.*zero_grad"):
        refuse_unusable(model)
    with pytest.raises(ValueError, match=r"on the device meta, which holds no values"):
        refuse_unusable(model.to("meta"))


def test_a_plain_model_has_nothing_of_a_run(task: Path) -> None:
    torch.manual_seed(0)
    trained = build_policy(ModelConfig(path=str(task / "model"), lora_rank=2, target_modules="all-linear"))
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    made = plain_module(trained, dict(merged_weights(trained)))
    ids = torch.tensor([[4, 13, 4, 16]])
    trained.eval()
    assert torch.allclose(made(ids).logits, trained(ids).logits, atol=1e-5)
    assert "lora" not in "".join(dict(made.named_parameters())) and not made.training
    assert all(parameter.requires_grad for parameter in made.parameters())
    assert type(made).__name__ == "LlamaForCausalLM"
