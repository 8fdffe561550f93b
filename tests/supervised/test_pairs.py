"""Learning from pairs: what a reward model leaves behind is a reward model, and a reference is asked once or each time."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from strop.config.compose import load
from strop.config.rules import check
from strop.config.schema.reward import RewardModelConfig
from strop.data.files import open_rows
from strop.models.heads import pad_token_other_than_eos, reward_statistics
from strop.quickstart.tiny_model import tiny_tokenizer
from strop.rewards.base import RewardSample
from strop.rewards.model import build_reward_model_scorer, load_model
from strop.run.checkpoint.tensor_files import read_tensors
from strop.supervised.reference import REFERENCE_FILE
from strop.supervised.trainer import ScoreMoments
from strop.types import Prompt, Trajectory
from tests.ppo.runs import run as run_ppo
from tests.ppo.runs import same
from tests.supervised.runs import build, lines, make_task, settings, sums, train, weights


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Even answers are better than odd ones."""
    folder = make_task(tmp_path_factory.mktemp("pairs"))
    for name, count in (("train", 64), ("val", 19)):
        rows = [
            {"prompt": f"{i % 7}+{i % 5}=", "chosen": f"{i}{i % 5 * 2}", "rejected": f"{i % 5 * 2 + 1}"}
            for i in range(count)
        ]
        lines(folder / f"{name}.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def judge(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reward model that was trained for a while."""
    run = tmp_path_factory.mktemp("judge")
    steps = train("rm", settings(pairs, run, "rm"), "trainer.total_epochs=10", "optim.lr=5e-3")
    assert steps[40]["val/accuracy"] > 0.9 > steps[0]["val/accuracy"]
    assert steps[40]["val/reward_margin"] > 1.0 > abs(steps[0]["val/reward_margin"])
    return run / "global_step_40" / "model" / "huggingface"


def sequences(pairs: Path, file: str = "val.jsonl") -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(pairs / "model")
    rows = open_rows(str(pairs / file))
    return [
        tokenizer(f"{row['prompt']}{row[key]}<eos>")["input_ids"]
        for row in rows
        for key in ("chosen", "rejected")
    ]


def reward_section(judge: Path) -> RewardModelConfig:
    said = ["reward_model.enable=true", f"reward_model.model.path={judge}", "reward_model.normalize=true"]
    return load("ppo_trainer", said).config.reward_model


@pytest.mark.slow
def test_transformers_and_ppo_load_the_reward_model_and_agree(pairs, judge):
    ids = sequences(pairs)
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    with torch.no_grad():
        alone = [model(torch.tensor([row])).logits.item() for row in ids]
        width = max(map(len, ids))
        padded = torch.tensor([row + [model.config.pad_token_id] * (width - len(row)) for row in ids])
        together = (
            model(padded, attention_mask=(padded != model.config.pad_token_id).long())
            .logits.squeeze(-1)
            .tolist()
        )
    section = reward_section(judge)
    ours = load_model(section).score(ids)
    assert ours == pytest.approx(alone, abs=1e-5) and together == pytest.approx(alone, abs=1e-5)
    assert ours == pytest.approx([load_model(section).score([row])[0] for row in ids], abs=1e-5)


def test_the_mean_and_deviation_of_the_scores_travel_with_the_model(pairs, judge):
    section = reward_section(judge)
    scores = torch.tensor(load_model(section).score(sequences(pairs)))
    kept = reward_statistics(AutoModelForSequenceClassification.from_pretrained(judge).config)
    assert kept.mean == pytest.approx(scores.mean().item(), abs=1e-4)
    assert kept.std == pytest.approx(scores.std(correction=0).item(), rel=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    samples = [
        RewardSample(
            Trajectory(Prompt(0, row[:4], [], "sums"), 0, row[4:], [1] * len(row[4:]), [0.0] * len(row[4:])),
            "",
            {},
        )
        for row in sequences(pairs)
    ]
    normal = torch.tensor(build_reward_model_scorer(section, tokenizer).score(samples))
    assert normal.mean().item() == pytest.approx(0.0, abs=1e-3) and normal.std(
        correction=0
    ).item() == pytest.approx(1, abs=1e-3)


def test_ppo_learns_from_the_reward_model(overrides, judge):
    more = ["reward_model.enable=true", f"reward_model.model.path={judge}", "reward_model.normalize=true"]
    more += [
        "algorithm.adv_estimator=gae",
        f"critic.model.path={judge}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ]
    steps = run_ppo(overrides, *more, "trainer.total_training_steps=2", "trainer.save_freq=-1")
    assert (
        abs(steps[1]["critic/score/mean"]) < 10
        and steps[1]["critic/score/max"] > steps[1]["critic/score/min"]
    )


def test_a_reward_model_can_be_trained_further(pairs, judge, tmp_path):
    more = [f"model.path={judge}", "trainer.total_training_steps=1", "optim.lr=0"]
    steps = train("rm", settings(pairs, tmp_path, "rm"), *more)
    assert steps[0]["val/accuracy"] > 0.85  # its head was not made anew
    assert steps[1]["val/loss"] == steps[0]["val/loss"]


def test_losses_and_margins_of_reward_models(pairs, tmp_path):
    rows = [{**row, "margin": 0.5 * (number % 3)} for number, row in enumerate(sums(16, seed=3))]
    file = lines(tmp_path / "margins.jsonl", rows)
    scores = torch.tensor(_first_scores(pairs, tmp_path, file))
    gap, margin = scores[0::2] - scores[1::2], torch.tensor([row["margin"] for row in rows])
    for number, (more, expected) in enumerate(
        {
            ("loss.type=logsigmoid",): -F.logsigmoid(gap).mean(),
            ("loss.type=logsigmoid", "loss.margin=true"): -F.logsigmoid(gap - margin).mean(),
            ("loss.type=logexp",): torch.log(1 + torch.exp(-gap)).mean(),
        }.items()
    ):
        one = [
            f"data.train_files={file}",
            "data.shuffle=false",
            "trainer.total_training_steps=1",
            "data.val_files=null",
        ]
        steps = train("rm", settings(pairs, tmp_path / str(number), "rm"), *one, *more)
        assert steps[1]["train/loss"] == pytest.approx(expected.item(), rel=1e-5), more
        assert steps[1]["train/reward_margin"] == pytest.approx(gap.mean().item(), abs=1e-6)
        assert steps[1]["train/accuracy"] == pytest.approx((gap > 0).float().mean().item())


def _first_scores(pairs: Path, tmp_path: Path, file: Path) -> list[float]:
    trainer = build(
        "rm", settings(pairs, tmp_path / "first", "rm"), f"data.train_files={file}", "data.shuffle=false"
    )
    scores = trainer.model.forward(
        trainer.task.batch(trainer.loader.draw()), ["scores"], trainer.micro
    ).scores
    assert scores is not None
    return scores.tolist()


def test_without_validation_the_running_scores_are_kept(pairs, tmp_path):
    train("rm", settings(pairs, tmp_path, "rm"), "data.val_files=null", "optim.lr=0")
    kept = json.loads((tmp_path / "global_step_8" / "model" / "huggingface" / "config.json").read_text())
    scores = torch.tensor(_first_scores(pairs, tmp_path, pairs / "train.jsonl"))
    assert kept["std"] == pytest.approx(scores.std().item(), rel=0.35) and kept["mean"] == pytest.approx(
        scores.mean().item(), abs=0.1
    )


def test_moments():
    moments = ScoreMoments()
    assert (moments.statistics.mean, moments.statistics.std) == (0.0, 1.0)
    found = {"chosen_reward": 3.0, "rejected_reward": 1.0, "score_square": 5.0}
    moments(found, False)
    assert (moments.statistics.mean, moments.statistics.std) == pytest.approx((2.0, 1.0))
    assert found == {"chosen_reward": 3.0, "rejected_reward": 1.0, "score_mean": 2.0, "score_std": 1.0}
    moments({"chosen_reward": 0.0, "rejected_reward": 0.0, "score_square": 4.0}, True)
    assert (moments.statistics.mean, moments.statistics.std) == (0.0, 2.0)  # of held-out pairs
    moments({"chosen_reward": 3.0, "rejected_reward": 1.0, "score_square": 5.0}, False)
    assert (moments.statistics.mean, moments.statistics.std) == pytest.approx((2.0, 1.0))  # other weights
    # Equal scores: the mean of squares is rounded below the square of the mean, and a divisor is positive.
    moments({"chosen_reward": 0.1, "rejected_reward": 0.1, "score_square": 0.01 - 1e-9}, True)
    assert moments.statistics.std == 1e-8


def test_the_end_of_an_answer_is_never_padding():
    tokenizer = tiny_tokenizer()
    assert pad_token_other_than_eos(tokenizer) == tokenizer.pad_token_id
    tokenizer.pad_token = tokenizer.eos_token
    assert pad_token_other_than_eos(tokenizer) == tokenizer.unk_token_id != tokenizer.eos_token_id


def test_a_reference_may_be_asked_once_or_in_every_step(pairs, tmp_path):
    base = [*settings(pairs, tmp_path, "dpo"), "optim.lr=5e-3"]
    ways = {
        "once": [],
        "always": ["loss.precompute_ref=false"],
        "another folder": ["loss.precompute_ref=false", "ref.param_offload=true"],
    }
    found = {}
    for name, more in ways.items():
        steps = train("dpo", base, *more, f"trainer.default_local_dir={tmp_path}/{name}")
        assert steps[8]["train/reward_margin"] > 0.05
        found[name] = weights(tmp_path / name, 8)
    assert (tmp_path / "once" / REFERENCE_FILE).exists() and not (
        tmp_path / "always" / REFERENCE_FILE
    ).exists()
    for name in ways:
        for weight, tensor in found[name].items():
            assert torch.allclose(tensor, found["once"][weight], rtol=1e-3, atol=1e-4), (name, weight)


def test_a_pair_whose_reference_was_not_computed_is_refused(pairs, tmp_path):
    trainer = build("dpo", settings(pairs, tmp_path, "dpo"))
    known = trainer.loader.dataset
    assert known[3].reference is not None
    known.table[3, 1] = torch.nan
    with pytest.raises(ValueError, match=r"of pair 3 were not computed .*loss\.precompute_ref=false"):
        known[3]


def test_another_reference_and_adapters(pairs, tmp_path):
    other = make_task_model(pairs, tmp_path / "other")
    base = settings(pairs, tmp_path, "dpo")
    away = train(
        "dpo",
        base,
        f"ref.path={other}",
        f"trainer.default_local_dir={tmp_path}/a",
        "trainer.total_training_steps=1",
    )
    assert abs(away[1]["train/reward_margin"]) > 1e-3  # not its own reference
    for precompute in ("true", "false"):
        more = ["model.lora_rank=4", f"loss.precompute_ref={precompute}", "optim.lr=2e-2"]
        steps = train("dpo", base, *more, f"trainer.default_local_dir={tmp_path}/{precompute}")
        assert steps[1]["train/reward_margin"] == pytest.approx(0.0, abs=1e-6)
        assert steps[8]["train/reward_margin"] > 0.01
    assert all(
        torch.allclose(tensor, weights(tmp_path / "false", 8)[name], rtol=1e-3, atol=1e-4)
        for name, tensor in weights(tmp_path / "true", 8).items()
    )


def test_a_model_that_starts_with_an_adapter_is_its_own_reference(pairs, tmp_path):
    """DPO after SFT with LoRA: the reference has learned what the SFT taught."""
    model = AutoModelForCausalLM.from_pretrained(pairs / "model")
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    base = [*settings(pairs, tmp_path / "run", "dpo"), f"model.lora_adapter_path={tmp_path}/adapter"]
    assert train("dpo", base)[0]["val/loss"] == pytest.approx(math.log(2), abs=1e-6)
    said = "\n".join(map(str, check(load("dpo_trainer", [*base, "loss.precompute_ref=false"]))))
    assert "the reference is the model without the adapter" in said


def make_task_model(pairs: Path, folder: Path) -> Path:
    from strop.quickstart.tiny_model import tiny_model

    tokenizer = AutoTokenizer.from_pretrained(pairs / "model")
    tiny_model(tokenizer, hidden=32, layers=2, seed=5).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_only_the_rows_of_the_run_are_asked_about_and_only_once(pairs, tmp_path, monkeypatch):
    base = [*settings(pairs, tmp_path, "dpo"), "data.val_files=null", "optim.total_training_steps=3"]
    train("dpo", base, "trainer.total_training_steps=2")
    (table,) = read_tensors(tmp_path / REFERENCE_FILE).values()
    assert table.shape == (64, 2) and int(table.isnan().any(-1).sum()) == 32
    train("dpo", base, "trainer.total_training_steps=3")
    (longer,) = read_tensors(tmp_path / REFERENCE_FILE).values()
    known = ~table.isnan()
    assert int(longer.isnan().any(-1).sum()) == 16 and torch.equal(longer[known], table[known])
    fresh = train(
        "dpo", base, "trainer.total_training_steps=3", f"trainer.default_local_dir={tmp_path}/fresh"
    )
    assert same(weights(tmp_path, 3), weights(tmp_path / "fresh", 3)) and set(fresh) == {1, 2, 3}
    (tmp_path / REFERENCE_FILE).write_bytes(b"")  # as after a power cut
    assert 4 in train("dpo", base, "trainer.total_training_steps=4")


def test_a_resume_with_another_batch_size_or_order_knows_the_reference_of_every_pair(pairs, tmp_path):
    base = [*settings(pairs, tmp_path, "dpo"), "data.val_files=null", "trainer.save_freq=1"]
    train("dpo", base, "trainer.total_training_steps=2")
    steps = train("dpo", base, "trainer.total_training_steps=4", "data.train_batch_size=8", "data.seed=77")
    assert steps[4]["train/total_rows"] == 2 * 16 + 2 * 8


def test_other_weights_at_the_same_path_are_another_reference(pairs, tmp_path):
    """A policy is its own reference before the first update, whatever an earlier run in the folder stored."""
    model = make_task_model(pairs, tmp_path / "model")
    base = [*settings(pairs, tmp_path / "run", "dpo"), f"model.path={model}", "data.val_files=null"]
    base += ["trainer.resume_mode=disable", "trainer.total_training_steps=1"]
    train("dpo", base)
    shutil.copytree(pairs / "model", model, dirs_exist_ok=True)
    steps = train("dpo", base)
    assert steps[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("change", [["model.override_config.rms_norm_eps=0.05"], ["model.quantization=nf4"]])
def test_another_computation_with_the_same_weights_is_another_reference(pairs, tmp_path, change):
    """As above: the folder has log-probs of an earlier run with the same files."""
    base = [*settings(pairs, tmp_path, "dpo"), "data.val_files=null", "model.lora_rank=2"]
    base += ["trainer.resume_mode=disable", "trainer.total_training_steps=1"]
    train("dpo", base)
    steps = train("dpo", base, *change)
    assert steps[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
