"""OpenRLHF's command lines are not only translated: one of each trainer runs, and each takes the model of the one before."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from strop.cli import PROGRAMS
from strop.data.make import arithmetic
from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer

SHARED = "--apply_chat_template --train_batch_size 8 --micro_train_batch_size 4 --max_epochs 1"
PAIRS = "--dataset pairs.jsonl --prompt_key prompt --chosen_key chosen --rejected_key rejected --max_len 32 --learning_rate 1e-3"
SFT, RM = "final/sft", "final/rm"
COMMANDS = {
    "sft": "train_sft --pretrain model --dataset sft.jsonl --input_key prompt --output_key response --packing_samples "
    "--max_len 32 --learning_rate 1e-3",
    "rm": f"train_rm --pretrain {SFT} {PAIRS}",
    "dpo": f"train_dpo --pretrain {SFT} --beta 0.1 {PAIRS}",
    "ppo": f"train_ppo_ray --pretrain {SFT} --reward_pretrain {RM} --critic_pretrain {RM} --prompt_data prompts.jsonl "
    "--input_key prompt --label_key label --actor_num_gpus_per_node 1 --critic_num_gpus_per_node 1 --ref_num_gpus_per_node 1 "
    "--reward_num_gpus_per_node 1 --colocate_all_models --rollout_batch_size 8 --micro_rollout_batch_size 8 "
    "--n_samples_per_prompt 1 --prompt_max_len 12 --generate_max_len 8 --num_episodes 1 --init_kl_coef 0.01 --normalize_reward",
}


def write_files(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, hidden=32, layers=1).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [
        (r["prompt"], r["reward_model"]["ground_truth"])
        for r in arithmetic(16, 1, largest=9, seed=0)["train"]
    ]
    files: dict[str, list[dict[str, Any]]] = {
        "sft": [{"prompt": prompt[0]["content"], "response": truth} for prompt, truth in rows],
        "pairs": [{"prompt": prompt, "chosen": truth, "rejected": truth + "0"} for prompt, truth in rows],
        "prompts": [{"prompt": prompt, "label": truth} for prompt, truth in rows],
    }
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_one_command_of_each_trainer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    for name, command in COMMANDS.items():
        words = shlex.split(f"{command} {SHARED} --save_path final/{name} --ckpt_path {name}")
        assert PROGRAMS["openrlhf"](words) == 0
        assert (tmp_path / "final" / name / "model.safetensors").is_file()
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["step"] == 2, name
    scores = [line["data"]["critic/score/mean"] for line in lines]
    assert all(-10 < score < 10 for score in scores) and lines[-1]["data"]["reward/failed"] == 0
    assert "critic/vf_loss" in lines[-1]["data"] and "actor/reward_kl_penalty" in lines[-1]["data"]
