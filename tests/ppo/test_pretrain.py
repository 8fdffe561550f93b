"""Text mixed into the updates: the right loss, any micro-batch, exact resume."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.ppo.runs import run, same, weights

TEXTS = ["12+34=46", "7*8=56", "1+1=2", "99-98=1", "3*3"]


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


@pytest.fixture
def mixed(overrides, texts):
    return [*overrides, f"algorithm.pretrain_files={texts}", "algorithm.ptx_coef=0.5", "trainer.test_freq=-1"]


def cross_entropy(folder, rows):
    """Mean over the tokens of all rows, by transformers alone."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total, tokens = 0.0, 0
    for text in rows:
        ids = torch.tensor([[*tokenizer.encode(text), tokenizer.eos_token_id]])
        with torch.no_grad():
            total += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    return total / tokens


def test_the_loss_is_the_cross_entropy_of_the_text_whatever_the_temperature(mixed, task):
    steps = run(mixed, "trainer.total_training_steps=1", "actor_rollout_ref.rollout.temperature=0.7")
    assert steps[1]["actor/ptx_loss"] == pytest.approx(cross_entropy(task / "model", TEXTS), rel=1e-5)


def test_text_is_learned_and_its_weight_counts(mixed, tmp_path):
    lr = "actor_rollout_ref.actor.optim.lr=5e-3"
    steps = run(mixed, lr, "trainer.total_training_steps=6")
    assert steps[6]["actor/ptx_loss"] < steps[1]["actor/ptx_loss"] - 0.3
    idle = run(
        mixed,
        lr,
        "algorithm.ptx_coef=0",
        f"trainer.default_local_dir={tmp_path}/idle",
        "trainer.total_training_steps=6",
    )
    assert idle[6]["actor/ptx_loss"] > steps[6]["actor/ptx_loss"] + 0.2


def test_micro_batches_do_not_change_it(mixed, tmp_path):
    found = []
    for rows in (2, 64):
        folder = tmp_path / f"micro{rows}"
        run(
            mixed,
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={rows}",
            f"trainer.default_local_dir={folder}",
        )
        found.append(weights(folder, 4))
    for name in found[0]:
        assert torch.allclose(found[0][name], found[1][name], rtol=1e-4, atol=1e-6), name


def test_the_order_of_texts_survives_a_resume(mixed, tmp_path):
    # Six sequences per update out of many texts: which ones come next is part of the state.
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps({"text": f"{i}+{i}={2 * i}"}) + "\n" for i in range(50)))
    base = [*mixed, f"algorithm.pretrain_files={many}", "data.train_batch_size=2", "actor_rollout_ref.rollout.n=3",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2"]  # fmt: skip
    straight = run(base, f"trainer.default_local_dir={tmp_path}/whole")
    cut = f"trainer.default_local_dir={tmp_path}/cut"
    run(base, cut, "trainer.total_training_steps=2")
    resumed = run(base, cut)
    assert resumed[4]["actor/ptx_loss"] == straight[4]["actor/ptx_loss"] != straight[3]["actor/ptx_loss"]
    assert same(weights(tmp_path / "whole", 4), weights(tmp_path / "cut", 4))


def test_conversations_do_as_well(overrides, task, tmp_path):
    file = tmp_path / "chat.jsonl"
    chat = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    file.write_text(json.dumps({"messages": chat}) + "\n")
    steps = run(
        overrides,
        f"algorithm.pretrain_files={file}",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
    )
    assert steps[1]["actor/ptx_loss"] == pytest.approx(cross_entropy(task / "model", ["1+2=3"]), rel=1e-5)


def test_a_file_without_text_is_refused(overrides, tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text('{"words": "1+1"}\n')
    with pytest.raises(ValueError, match=r"neither a column `text`.*words"):
        run(overrides, f"algorithm.pretrain_files={file}")


def test_a_checkpoint_without_the_state_is_not_passed_off_as_exact(overrides, mixed, tmp_path):
    run(overrides, "trainer.total_training_steps=2")
    with pytest.raises(ValueError, match="holds no state of pretrain_files"):
        run(mixed)
