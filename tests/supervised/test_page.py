"""docs/supervised.md tells the truth: its keys exist, its metrics are logged. And experts balance in supervised training too."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys
from strop.quickstart.tiny_model import tiny_tokenizer
from tests.ppo.test_training_page import words
from tests.supervised.runs import VERBS, make_task, settings, train

PAGE = (Path(__file__).parents[2] / "docs" / "supervised.md").read_text()


def test_every_key_exists():
    known = {
        key.path
        for root in (*(f"{verb}_trainer" for verb in VERBS), "ppo_trainer")
        for key in keys(ROOTS[root])
    }
    asked = {
        word.partition("=")[0] for word in words(PAGE) if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+(=.*)?", word)
    }
    asked = {
        word
        for word in asked
        if not word.endswith((".py", ".json", ".jsonl", ".jinja", ".safetensors")) and "strop." not in word
    }
    assert len(asked) > 30
    assert not {
        word for word in asked if word not in known and not any(path.startswith(f"{word}.") for path in known)
    }


def test_every_metric_is_logged(tmp_path):
    task = make_task(tmp_path)
    logged = {"train/skipped_rows", "train/empty_updates"}  # of test_supervised_check.py
    for verb in VERBS:
        steps = train(verb, settings(task, tmp_path / verb, verb), "trainer.total_training_steps=1")
        logged |= {name for found in steps.values() for name in found}
    table = PAGE.partition("| metric |")[2].partition("\n\n")[0]
    first = "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    promised = [word for word in words(first) if "/" in word]
    assert len(promised) > 15
    for name in promised:
        wanted = [name.replace("*", split) for split in ("train", "val")] if "*" in name else [name]
        assert set(wanted) <= logged, name


def test_experts_are_asked_for_their_balance(tmp_path):
    tokenizer = tiny_tokenizer()
    config = Qwen2MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    task = make_task(tmp_path)
    Qwen2MoeForCausalLM(config).save_pretrained(tmp_path / "experts")
    tokenizer.save_pretrained(tmp_path / "experts")
    for verb in ("sft", "dpo"):
        more = [
            f"model.path={tmp_path}/experts",
            "model.aux_loss_coef=0.01",
            "trainer.total_training_steps=2",
        ]
        steps = train(verb, settings(task, tmp_path / verb, verb), *more)
        assert steps[1]["train/aux_loss"] >= 2.0 - 1e-3  # at perfect balance it equals the experts per token
        assert "val/aux_loss" not in steps[0]
