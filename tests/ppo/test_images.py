"""GRPO, SFT and generation with images, from files to exported folders."""

from __future__ import annotations

import json
import pickle
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from strop.algorithms.metrics.training import StepRecord
from strop.config.compose import load
from strop.data.images import ImageProcessor
from strop.data.supervised.datasets import build_supervised
from strop.data.supervised.labelled import LabelledDataset
from strop.inference.generation import generate
from strop.ppo.build import build_ppo
from strop.ppo.rank_sharing import PackedTrajectories
from strop.preflight.examine import examine
from strop.preflight.image_checks import image_findings
from strop.quickstart.tiny_model import tiny_model
from strop.run.merge.merge import merge
from strop.runtime.remote_models import BatchArrays
from strop.supervised.build import build_supervised_trainer
from strop.types import Batch, Prompt, Trajectory, batch_of
from tests.data.test_images import row, url_of
from tests.models.vision.tiny_vlm import picture, processor_of, save_vlm, tokenizer_of

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 2\n"


def run_of(tmp_path: Path, *changes: str, family: str = "qwen2_5_vl") -> list[str]:
    folder = save_vlm(family, tmp_path / "model")
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
    metrics = [json.loads(line)["data"] for line in lines if "actor/grad_norm" in line]
    drift = [one["training/rollout_logprobs_diff_max"] for one in metrics]
    assert len(drift) == 2 and max(drift) < 1e-5, drift
    folder = tmp_path / "run/global_step_2/actor/huggingface"
    assert (folder / "preprocessor_config.json").is_file()
    before = weights_of(tmp_path / "model")
    after = weights_of(folder)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    towers = {name for name in before if "visual" in name}
    assert bool(changed & towers) != frozen
    assert changed - towers


def test_a_run_of_gemma3_samples_what_it_trains(tmp_path: Path) -> None:
    """With the default engine."""
    changes = run_of(tmp_path, "trainer.save_freq=-1", family="gemma3")
    build_ppo(load("ppo_trainer", changes)).fit()
    steps = metrics_of(tmp_path, "training/rollout_logprobs_diff_max")
    drift = [step["training/rollout_logprobs_diff_max"] for step in steps]
    assert len(drift) == 2 and max(drift) < 1e-5, drift


def metrics_of(tmp_path: Path, name: str) -> list[dict[str, float]]:
    """Lines of the metrics that have `name`."""
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["data"] for line in lines if name in line]


def spoil(tmp_path: Path, *rows: int) -> None:
    """Images of these rows are damaged."""
    file = tmp_path / "train.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    for number in rows:
        found[number]["images"] = ["data:image/png;base64,AAAA"]
    file.write_text("".join(json.dumps(one) + "\n" for one in found))


def test_a_damaged_image_is_masked_and_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    changes = run_of(tmp_path, "trainer.total_training_steps=1", "trainer.save_freq=-1")
    spoil(tmp_path, 2)
    report = examine(load("ppo_trainer", changes))
    [problem] = [finding.message for finding in report.findings if finding.level == "error"]
    assert "train.jsonl" in problem and "row 2" in problem and "images" in problem, "named before the run"
    trainer = build_ppo(load("ppo_trainer", changes))
    seen: list[Trajectory] = []
    own = trainer.train_step

    def train_step(record: StepRecord) -> tuple[list[Trajectory], Batch]:
        trajectories, batch = own(record)
        seen.extend(trajectories)
        masked = [not row.any() for row in batch.mask]
        assert masked == [bool(t.prompt.unusable) for t in trajectories]
        return trajectories, batch

    trainer.train_step = train_step  # type: ignore[method-assign]
    trainer.fit()
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    [step] = [json.loads(line)["data"] for line in lines if "actor/grad_norm" in line]
    assert step["data/unusable_samples"] == 4 and step["actor/grad_norm"] > 0
    assert [t.score for t in seen if t.prompt.unusable] == [None] * 4


def test_a_step_without_any_prompt_ends_the_run(tmp_path: Path) -> None:
    changes = run_of(tmp_path)
    spoil(tmp_path, 0, 1, 2, 3)
    with pytest.raises(ValueError, match="None of the 16 samples of the step has a prompt"):
        build_ppo(load("ppo_trainer", changes)).fit()


def test_a_text_model_with_images_is_refused_before_the_run(tmp_path: Path) -> None:
    changes = run_of(tmp_path)
    tokenizer = tokenizer_of("qwen2_5_vl")
    tiny_model(tokenizer, hidden=16, layers=1).save_pretrained(tmp_path / "text")
    tokenizer.save_pretrained(tmp_path / "text")
    report = examine(load("ppo_trainer", [*changes, f"actor_rollout_ref.model.path={tmp_path}/text"]))
    [problem] = [finding.message for finding in report.findings if finding.level == "error"]
    assert "is a text model" in problem, "said once, not for every row"


def test_the_preflight_reports_images_and_what_they_exclude(tmp_path: Path) -> None:
    changes = run_of(tmp_path)
    report = examine(load("ppo_trainer", changes))
    assert report.ok, report.findings
    assert "4 images in 4 rows, largest 16 x 16, 4 to 4 tokens each" in report.data["train_files"]
    gae = [*changes, "algorithm.adv_estimator=gae"]
    assert not image_findings(load("ppo_trainer", gae).config), "a critic of the actor's family sees images"
    tokenizer = tokenizer_of("qwen2_5_vl")
    tiny_model(tokenizer, hidden=16, layers=1).save_pretrained(tmp_path / "text")
    other = save_vlm("qwen2_vl", tmp_path / "other")
    for path, problem in ((tmp_path / "text", "reads text only"), (other, "of another family (qwen2_vl)")):
        [finding] = image_findings(load("ppo_trainer", [*gae, f"critic.model.path={path}"]).config)
        assert finding.key == "critic.model.path" and problem in finding.message
        more = ["reward_model.enable=true", f"reward_model.model.path={path}"]
        [finding] = image_findings(load("ppo_trainer", [*changes, *more]).config)
        assert finding.key == "reward_model.model.path" and problem in finding.message
    rollout = "actor_rollout_ref.rollout"
    vllm = [f"{rollout}.name=vllm", f"+{rollout}.engine_kwargs.vllm.python=python3"]
    [finding] = image_findings(load("ppo_trainer", [*changes, *vllm]).config, videos=True)
    assert "videos, which vLLM is not given" in finding.message


def test_engines_without_images_are_refused(tmp_path: Path) -> None:
    changes = run_of(tmp_path)
    rollout = "actor_rollout_ref.rollout"

    def problems(*more: str) -> list[str]:
        return [one.message for one in image_findings(load("ppo_trainer", [*changes, *more]).config)]

    other = save_vlm("gemma3", tmp_path / "gemma3")
    vllm = [f"{rollout}.name=vllm", f"+{rollout}.engine_kwargs.vllm.python=python3"]
    assert not problems() and not problems(*vllm)
    assert "models of the type gemma3" in problems(*vllm, f"actor_rollout_ref.model.path={other}")[0]
    url = f"+{rollout}.engine_kwargs.vllm.url=http://127.0.0.1:1"
    assert "engine_kwargs.vllm.url" in problems(vllm[0], url)[0]
    sglang = (f"{rollout}.name=sglang", url.replace("vllm", "sglang"))
    assert "sglang is not given" in problems(*sglang)[0]


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


def supervised(tmp_path: Path, *more: str) -> list[str]:
    """Words of a run over two pairs with images."""
    folder = save_vlm("qwen2_5_vl", tmp_path / "model")
    rows = []
    for colour in ((200, 0, 0), (0, 0, 200)):
        shown = {"prompt": "<image>what", "images": [url_of(picture(colour))]}
        rows.append({**shown, "chosen": "red", "rejected": "blue"})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return [
        f"model.path={folder}",
        "model.fsdp_config.dtype=float32",
        f"data.train_files={tmp_path}/pairs.jsonl",
        "data.prompt_key=prompt",
        "data.train_batch_size=2",
        "data.micro_batch_size_per_gpu=2",
        "data.max_length=32",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.logger=[file]",
        "trainer.total_training_steps=1",
        "trainer.device=cpu",
        *more,
    ]


def test_orpo_with_images_trains(tmp_path: Path) -> None:
    words = supervised(tmp_path, "loss.type=orpo")
    report = examine(load("dpo_trainer", words))
    assert report.ok, report.findings
    assert "2 rows with images" in report.data["train_files"]
    build_supervised_trainer(load("dpo_trainer", words)).fit()
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    [step] = [json.loads(line)["data"] for line in lines if "train/grad_norm" in line]
    assert step["train/grad_norm"] > 0


def test_kto_with_images_trains(tmp_path: Path) -> None:
    words = supervised(tmp_path, "loss.type=kto")
    build_supervised_trainer(load("dpo_trainer", words)).fit()
    [step] = metrics_of(tmp_path, "train/grad_norm")
    assert step["train/grad_norm"] > 0
    dataset = build_supervised(
        load("dpo_trainer", words).config.data,
        tokenizer_of("qwen2_5_vl"),
        kind=LabelledDataset,
        load_processor=partial(processor_of, "qwen2_5_vl"),
    )
    good, bad = dataset[0], dataset[1]
    assert good.chosen.images and good.rejected.images and (good.margin, bad.margin) == (1, 0)
    assert good.chosen.images[0].digest == bad.chosen.images[0].digest != dataset[2].chosen.images[0].digest


def test_a_reward_model_over_images_learns_and_scores_a_run(tmp_path: Path) -> None:
    """Red or blue is preferred by the picture alone: both answers are the same for both pictures."""
    words = supervised(tmp_path, "trainer.total_training_steps=12", "trainer.save_freq=12", "optim.lr=0.01")
    rows = []
    for colour, right, wrong in (((200, 0, 0), "red", "blue"), ((0, 0, 200), "blue", "red")):
        shown = {"prompt": "<image>what", "images": [url_of(picture(colour))]}
        rows.append({**shown, "chosen": right, "rejected": wrong})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    report = examine(load("rm_trainer", words))
    assert report.ok, report.findings
    build_supervised_trainer(load("rm_trainer", words)).fit()
    last = metrics_of(tmp_path, "train/loss")[-1]
    assert last["train/loss"] < 0.1, last
    [exported] = (tmp_path / "run").rglob("huggingface")
    folder = shutil.copytree(exported, tmp_path / "rm")
    assert (folder / "preprocessor_config.json").is_file()
    shutil.rmtree(tmp_path / "run")
    more = ["reward_model.enable=true", f"reward_model.model.path={folder}", "algorithm.adv_estimator=gae"]
    run = run_of(tmp_path, *more, "trainer.total_training_steps=1", "custom_reward_function.path=null")
    report = examine(load("ppo_trainer", run))
    assert report.ok, report.findings
    build_ppo(load("ppo_trainer", run)).fit()
    [step] = metrics_of(tmp_path, "critic/grad_norm")
    assert step["critic/grad_norm"] > 0 and step["critic/score/max"] != step["critic/score/min"]


@pytest.mark.slow
def test_generation_answers_rows_with_images(tmp_path: Path) -> None:
    run_of(tmp_path)
    words = [
        f"model.path={tmp_path}/model",
        f"data.path={tmp_path}/train.jsonl",
        f"data.output_path={tmp_path}/out.jsonl",
        "data.n_samples=2",
        "rollout.prompt_length=16",
        "rollout.response_length=4",
        "rollout.dtype=float32",
        "trainer.device=cpu",
    ]
    summary = generate(load("generation", words).config)
    assert (summary.rows, summary.fresh.responses) == (4, 8) and not summary.failed


@pytest.mark.slow
def test_a_merged_folder_has_the_files_of_the_processor(tmp_path: Path) -> None:
    words = run_of(tmp_path, "trainer.total_training_steps=1", "trainer.save_freq=1")
    words.append("actor_rollout_ref.actor.checkpoint.save_contents=[model]")
    build_ppo(load("ppo_trainer", words)).fit()
    target = tmp_path / "merged"
    merge(str(tmp_path / "run/global_step_1/actor"), str(target))
    assert (target / "preprocessor_config.json").read_bytes() == (
        tmp_path / "model/preprocessor_config.json"
    ).read_bytes()
    before = weights_of(tmp_path / "model")
    assert before.keys() == weights_of(target).keys()


def test_samples_of_a_prompt_send_their_image_once(tmp_path: Path) -> None:
    """To models on other machines (Ray); between ranks images of prompts are not sent at all."""
    processor = ImageProcessor(lambda: processor_of("qwen2_5_vl"))
    [prepared] = processor.prepare([picture(width=32)], where="x")
    prompt = Prompt(0, [3, *[4] * prepared.inputs.num_tokens, 5], [], "x", images=(prepared.inputs,))
    one, eight = (
        len(pickle.dumps(BatchArrays.of(batch_of([Trajectory(prompt, 0, [7], [1], [0.0])] * count))))
        for count in (1, 8)
    )
    pixels = prepared.inputs.tensors["pixel_values"].nbytes
    assert pixels < one and eight - one < pixels / 4, (one, eight, pixels)
    sent = PackedTrajectories.pack([Trajectory(prompt, 0, [7], [1], [0.0])] * 8, {0: prompt})
    assert len(pickle.dumps(sent)) < pixels
