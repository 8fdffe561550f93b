"""What a run leaves for others: folders that transformers loads, with the weights of the last step or their average."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from strop.run.checkpoint.store import load as load_checkpoint
from strop.shared.export import architecture_of
from tests.ppo.runs import run, same, weights

CONTENTS = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"


def greedy(folder, rows):
    """Greedy answers of the exported folder by transformers alone."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    said = []
    for row in rows:
        ids = torch.tensor([tokenizer.encode(row["input"])])
        out = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        said.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return said


@pytest.mark.parametrize("adapters", [[], ["actor_rollout_ref.model.lora_rank=4"]], ids=["whole", "lora"])
def test_the_actor_loads_elsewhere_and_says_the_same(overrides, tmp_path, adapters):
    lr = "actor_rollout_ref.actor.optim.lr=2e-2"
    run(overrides, CONTENTS, lr, f"trainer.validation_data_dir={tmp_path}/said", *adapters)
    answers = {
        step: [json.loads(line) for line in (tmp_path / "said" / f"{step}.jsonl").open()] for step in (0, 4)
    }
    assert [row["output"] for row in answers[4]] != [row["output"] for row in answers[0]]
    folder = tmp_path / "run" / "global_step_4" / "actor" / "huggingface"
    assert greedy(folder, answers[4]) == [row["output"] for row in answers[4]]
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_sharded_module_is_named_by_its_class_in_transformers(task):
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    plain = type(model)
    assert architecture_of(model) == "LlamaForCausalLM"
    model.__class__ = type("FSDPLlamaForCausalLM", (FSDPModule, plain), {})  # as fully_shard does it
    assert architecture_of(model) == "LlamaForCausalLM"


def test_the_critic_loads_as_a_sequence_classifier(overrides, tmp_path):
    contents = "critic.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    run(overrides, "algorithm.adv_estimator=gae", contents)
    folder = tmp_path / "run" / "global_step_4" / "critic" / "huggingface"
    model, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and model.config.num_labels == 1
    own = load_checkpoint(tmp_path / "run" / "global_step_4")["critic/model"]
    assert torch.equal(model.score.weight, own["score.weight"])


def averages(folder, step):
    return load_checkpoint(folder / f"global_step_{step}")["trainer"]["ema"]


def test_the_average_is_right_after_a_resume_and_is_exported(overrides, task, tmp_path):
    base = [*overrides, CONTENTS, "trainer.enable_ema=true", "trainer.ema_beta=0.75", "trainer.save_freq=1"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(base, f"trainer.default_local_dir={whole}")
    run(base, f"trainer.default_local_dir={cut}", "trainer.total_training_steps=2")
    run(base, f"trainer.default_local_dir={cut}")
    expected = dict(AutoModelForCausalLM.from_pretrained(task / "model").named_parameters())
    for step in (1, 2, 3, 4):
        now = weights(cut, step)
        expected = {name: 0.75 * value.detach() + 0.25 * now[name] for name, value in expected.items()}
    found = averages(cut, 4)
    assert found["updates"] == 4 and same(found["average"], averages(whole, 4)["average"])
    for name, value in expected.items():
        assert torch.allclose(found["average"][name], value, atol=1e-6), name
    assert same(weights(cut, 4), weights(whole, 4))  # exporting the average left the weights alone
    exported = AutoModelForCausalLM.from_pretrained(cut / "global_step_4" / "actor" / "huggingface_ema")
    plain = AutoModelForCausalLM.from_pretrained(cut / "global_step_4" / "actor" / "huggingface")
    for (name, average), (_, last) in zip(exported.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(average, found["average"][name]), name
        assert name.endswith("norm.weight") or not torch.equal(average, last), name


def test_every_update_of_a_step_is_averaged(overrides, tmp_path):
    two = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    run(overrides, two, "trainer.enable_ema=true", "trainer.test_freq=-1")
    assert averages(tmp_path / "run", 4)["updates"] == 4 * 2
