"""A run that goes on by itself says what was changed meanwhile, loudest where another model was named."""

from __future__ import annotations

import logging
import shutil

import pytest

from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer
from tests.supervised.runs import make_task, settings, train


def test_another_model_and_other_settings_are_told(tmp_path, caplog):
    task = make_task(tmp_path)
    base = settings(task, tmp_path / "run", "sft")
    train("sft", base, "trainer.total_training_steps=1")
    shutil.copytree(task / "model", task / "other")
    with caplog.at_level(logging.INFO, logger="strop"):
        train("sft", base, "trainer.total_training_steps=1")
        assert "Resuming from" in caplog.text and "Changed since" not in caplog.text
        caplog.clear()
        train("sft", base, "trainer.total_training_steps=2", f"model.path={task}/other", "optim.lr=1e-4")
    assert (
        "trainer.total_training_steps was 1 and is 2" in caplog.text
        and "optim.lr was 0.001 and is 0.0001" in caplog.text
    )
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    assert any("Changed since the checkpoint" in words for words in warnings)  # Python shows only these
    assert [
        words
        for words in warnings
        if "began as" in words and str(task / "model") in words and "resume_mode" in words
    ]


def test_a_folder_of_another_program_or_model_is_told(tmp_path):
    task = make_task(tmp_path)
    base = settings(task, tmp_path / "run", "sft")
    train("sft", base, "trainer.total_training_steps=1")
    with pytest.raises(
        ValueError,
        match=r"cannot resume from .*global_step_1: .* SftTrainer, and this is a DpoTrainer\. .*resume_mode",
    ):
        train("dpo", settings(task, tmp_path / "run", "dpo"))
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, hidden=64, layers=2).save_pretrained(task / "wide")
    tokenizer.save_pretrained(task / "wide")
    with pytest.raises(
        ValueError,
        match=r"cannot resume from .*global_step_1: .*\(17, 32\) and is \(17, 64\) here.*default_local_dir",
    ):
        train("sft", base, f"model.path={task}/wide")


def test_the_state_of_another_optimizer_is_refused_or_left_out(tmp_path):
    """AdamW has no use for the momentum of SGD: its first update was a KeyError."""
    base = settings(make_task(tmp_path), tmp_path / "run", "sft")
    momentum = ["optim.optimizer=SGD", "optim.override_optimizer_config.momentum=0.9"]
    train("sft", base, *momentum, "trainer.total_training_steps=1")
    more = "trainer.total_training_steps=2"
    with pytest.raises(
        ValueError, match=r"optim\.optimizer was 'SGD' and is 'AdamW'.*trainer\.checkpoint\.load_contents"
    ):
        train("sft", base, more)
    train("sft", base, more, "trainer.checkpoint.load_contents=[model,extra]")
    assert (tmp_path / "run" / "global_step_2").is_dir()


def test_a_checkpoint_that_was_named_is_taken_as_it_is(tmp_path, caplog):
    base = settings(make_task(tmp_path), tmp_path / "run", "sft")
    train("sft", base, "trainer.total_training_steps=1")
    named = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/run/global_step_1"]
    with caplog.at_level(logging.INFO, logger="strop"):
        train("sft", base, "trainer.total_training_steps=2", *named)
    assert "Resuming from" in caplog.text and "Changed since" not in caplog.text
