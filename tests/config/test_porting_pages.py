"""README_zh.md and the porting guides: every flag and every key of their tables exists, and means what stands beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strop.config.openrlhf.convert import convert
from strop.config.openrlhf.table import load_rows
from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys

ROOT = Path(__file__).parents[2]
PAGES = ["README_zh.md", "docs/porting_openrlhf.md", "docs/zh/porting_openrlhf.md"]
KEYS = {key.path for key in keys(ROOTS["ppo_trainer"])}
FLAGS = {name for row in load_rows() for name in row.names}


def pairs(page: str) -> list[tuple[list[str], list[str]]]:
    """Flags and keys of every row of the tables with three columns."""
    rows = [
        line.strip("|").split("|") for line in (ROOT / page).read_text().splitlines() if line.startswith("| ")
    ]
    found = [
        (re.findall(r"`([a-z_]+)`", row[1]), re.findall(r"`([^`]+)`", row[2]))
        for row in rows
        if len(row) == 3
    ]
    return [(flags, names) for flags, names in found if flags]


@pytest.mark.parametrize("page", PAGES)
def test_flags_and_keys_exist(page: str) -> None:
    found = pairs(page)
    assert len(found) > 12
    for flags, names in found:
        assert set(flags) <= FLAGS, set(flags) - FLAGS
        for name in names:
            key = name.partition("=")[0].strip()
            fits = [
                path
                for path in KEYS
                if path == key or path.endswith(key.removeprefix("*")) or path.endswith(f".{key}")
            ]
            assert fits, f"{page}: {name}"


def test_the_arithmetic_of_the_pages() -> None:
    command = (
        "train_ppo_ray --pretrain m --reward_pretrain r --prompt_data d.jsonl --rollout_batch_size 32 --n_samples_per_prompt 8 "
        "--train_batch_size 128 --micro_train_batch_size 4 --micro_rollout_batch_size 4 --actor_num_nodes 1 "
        "--actor_num_gpus_per_node 8 --colocate_all_models"
    )
    told = convert(command.split()).render()
    assert "actor_rollout_ref.actor.ppo_mini_batch_size=16" in told
    assert "256 samples per step, 2 updates of 128 samples, 4 accumulation passes" in told
    assert "reward_model.micro_batch_size_per_gpu=4" in told and "--micro_rollout_batch_size" in told


def test_old_names_of_verl_are_translated_as_the_guide_says() -> None:
    from strop.config.compose import load

    loaded = load(
        "ppo_trainer", ["trainer.profile_steps=[3]", "actor_rollout_ref.actor.optim.warmup_style=cosine"]
    )
    assert loaded.config.global_profiler.steps == [3] and len(loaded.notices) == 2
