"""KTO and ORPO as runs: the loss of a step by hand, micro-batches that change nothing, and runs that learn."""

from __future__ import annotations

import math

import pytest
import torch

from strop.algorithms.losses import answer_log_probs
from strop.config.compose import load
from strop.config.rules import check
from strop.supervised.tasks import pair_batch
from tests.ppo.runs import metrics
from tests.supervised.runs import build, lines, make_task, settings, sums, train


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = make_task(tmp_path_factory.mktemp("kto"))
    rows = []
    for number, row in enumerate(sums(64, seed=2)):
        good = number % 3 == 0
        rows.append(
            {"prompt": row["prompt"], "response": row["chosen" if good else "rejected"], "label": good}
        )
    lines(folder / "labels.jsonl", rows)
    return folder


def labelled(task, folder):
    return [
        *settings(task, folder, "dpo"),
        "loss.type=kto",
        f"data.train_files={task}/labels.jsonl",
        "data.val_files=null",
        "data.label_key=label",
        "data.shuffle=false",
    ]


@pytest.mark.parametrize("micro", [16, 3])
def test_the_loss_of_a_step_is_that_of_the_formula(task, tmp_path, micro):
    """With another reference, so that neither the rewards nor the KL are 0."""
    from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer

    tiny_model(tiny_tokenizer(), hidden=32, layers=2, seed=5).save_pretrained(tmp_path / "ref")
    tiny_tokenizer().save_pretrained(tmp_path / "ref")
    words = [*labelled(task, tmp_path / "run"), f"ref.path={tmp_path}/ref", "loss.beta=0.3"]
    words += ["loss.desirable_weight=1.5", "loss.undesirable_weight=0.7"]
    trainer = build("dpo", words, f"data.micro_batch_size_per_gpu={micro}", "trainer.total_training_steps=1")
    items = [trainer.loader.dataset[place] for place in range(16)]
    batch = pair_batch(items)
    own = answer_log_probs(trainer.model.forward(batch, ["log_probs"], trainer.micro).log_probs, batch.mask)
    ratio = own - batch.reference
    kl = ratio[1::2].mean().clamp(min=0)
    expected = 0.0
    for number in range(16):
        good = bool(items[number].margin)
        gain = 0.3 * (ratio[2 * number] - kl)
        expected += (1.5 if good else 0.7) * (1 - torch.sigmoid(gain if good else -gain)).item() / 16
    trainer.fit()
    found = metrics(tmp_path / "run")[1]
    assert found["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert found["train/kl"] == pytest.approx(kl.item(), rel=1e-4)


def test_the_reference_of_kto_is_not_that_of_pairs(task, tmp_path):
    """Both read the same rows, and an earlier run of the folder has stored its reference log-probs."""
    base = [*settings(task, tmp_path, "dpo"), "trainer.resume_mode=disable", "trainer.total_training_steps=1"]
    train("dpo", base, "loss.type=kto")
    assert train("dpo", base)[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert train("dpo", base, "loss.type=kto", "data.seed=7")[1]["train/loss"] == pytest.approx(0.5, abs=1e-6)


def test_a_response_of_which_nothing_is_predicted_is_skipped(task, tmp_path):
    base = [*labelled(task, tmp_path), "data.max_length=1", "data.truncation=left"]
    with pytest.raises(ValueError, match="No row could be trained on"):
        train("dpo", base)


def test_kto_learns_from_labels_and_from_pairs(task, tmp_path):
    steps = train("dpo", labelled(task, tmp_path / "labels"), "trainer.total_epochs=6", "optim.lr=5e-3")
    assert steps[1]["train/loss"] == pytest.approx(0.5, abs=0.01)
    assert steps[24]["train/loss"] < 0.45 and steps[24]["train/accuracy"] > 0.7
    pairs = [*settings(task, tmp_path / "pairs", "dpo"), "loss.type=kto", "trainer.total_training_steps=2"]
    steps = train("dpo", pairs)
    assert steps[2]["val/loss"] < steps[0]["val/loss"] and steps[2]["train/total_rows"] == 32


def test_orpo_learns_without_a_reference(task, tmp_path):
    words = [*settings(task, tmp_path, "dpo"), "loss.type=orpo", "loss.beta=1.0", "optim.lr=5e-3"]
    steps = train("dpo", words)
    assert steps[8]["val/loss"] < 0.8 * steps[0]["val/loss"]
    assert steps[8]["val/log_odds"] > steps[0]["val/log_odds"]
    assert not (tmp_path / "reference_log_probs.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loss.type=kto", "loss.reference_free=true"], "kto compares with a reference"),
        (["loss.type=kto", "data.train_batch_size=1"], "Set at least 2"),
        (["loss.type=kto", "loss.length_normalized=true"], "kto sums log-probs"),
        (["loss.type=kto", "loss.label_smoothing=0.1"], "kto has no such term"),
        (["loss.type=orpo", "loss.nll_coef=0.1"], "orpo has no such term"),
        (["data.label_key=label"], "dpo reads pairs"),
        (["loss.type=orpo", "loss.desirable_weight=2"], "orpo reads pairs"),
    ],
)
def test_what_does_not_go_together_is_said(words, said):
    loaded = load("dpo_trainer", ["model.path=m", "data.train_files=x", *words])
    assert any(said in str(finding) for finding in check(loaded))
