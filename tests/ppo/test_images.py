"""GRPO, SFT and generation with images, from files to exported folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from strop.config.compose import load
from strop.ppo.build import build_ppo
from strop.preflight.examine import examine
from strop.preflight.model_checks import image_findings
from tests.data.test_images import row, url_of
from tests.models.vision.tiny_vlm import picture, save_vlm

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 2\n"


def run_of(tmp_path: Path, *changes: str) -> list[str]:
    folder = save_vlm("qwen2_5_vl", tmp_path / "model")
    rows = []
    for number in range(4):
        shown = row(url_of(picture((60 * number, 0, 90))), prompt="<image>what")
        rows.append({**shown, "reward_model": {"style": "rule", "ground_truth": "red"}})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    return [
        f"data.train_files={tmp_path}/train.jsonl",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "algorithm.adv_estimator=grpo",
        f"custom_reward_function.path={tmp_path}/reward.py",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.logger=[file]",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "trainer.device=cpu",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
        *changes,
    ]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_trains_the_tower_or_not(tmp_path: Path, frozen: bool) -> None:
    changes = run_of(tmp_path, f"actor_rollout_ref.actor.freeze_vision_tower={frozen}".lower())
    build_ppo(load("ppo_trainer", changes)).fit()
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines if "actor/grad_norm" in line]
    assert len(metrics) == 2
    drift = [
        one["training/rollout_logprobs_diff_max"]
        for one in metrics
        if "training/rollout_logprobs_diff_max" in one
    ]
    assert all(value < 1e-5 for value in drift)
    folder = tmp_path / "run/global_step_2/actor/huggingface"
    assert (folder / "preprocessor_config.json").is_file()
    before = weights_of(tmp_path / "model")
    after = weights_of(folder)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    towers = {name for name in before if "visual" in name}
    assert bool(changed & towers) != frozen
    assert changed - towers


def test_the_preflight_reports_images_and_what_they_exclude(tmp_path: Path) -> None:
    changes = run_of(tmp_path)
    report = examine(load("ppo_trainer", changes))
    assert report.ok, report.findings
    assert "4 images in 4 rows, largest 16 x 16, 4 to 4 tokens each" in report.data["train_files"]
    config = load("ppo_trainer", [*changes, "algorithm.adv_estimator=gae"]).config
    messages = [finding.message for finding in image_findings(config)]
    assert any("needs a critic" in message for message in messages)


def test_lora_on_the_language_model_alone(tmp_path: Path) -> None:
    lora = "actor_rollout_ref.model"
    more = [
        f"{lora}.lora_rank=4",
        f"{lora}.target_modules=all-linear",
        f"{lora}.exclude_modules='.*visual.*'",
    ]
    trainer = build_ppo(load("ppo_trainer", run_of(tmp_path, *more)))
    adapted = [name for name, _ in trainer.roles.actor.module.named_parameters() if ".lora_A." in name]
    assert adapted and not any("visual" in name for name in adapted)
    trainer.fit()
