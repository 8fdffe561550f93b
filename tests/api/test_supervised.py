"""Supervised training from Python: the columns of rows choose the keys, and each program trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import strop
from strop.api.settings import Settings
from strop.api.supervised import set_columns
from tests.api.scene import ROWS

EXAMPLES = [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS]
PAIRS = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "9"} for row in ROWS]


@pytest.mark.parametrize(
    ("columns", "given", "expected"),
    [
        (["prompt", "response"], {}, []),
        (["prompt", "completion"], {}, ["data.response_key=completion"]),
        (["messages"], {}, ["data.multiturn.enable=true"]),
        (
            ["text"],
            {},
            [
                *("data.prompt_key=text", "data.response_key=null"),
                *("data.pretrain_mode=true", "data.apply_chat_template=false"),
            ],
        ),
        (["prompt", "completion"], {"response_key": "completion"}, ["data.response_key=completion"]),
    ],
)
def test_columns_choose_the_keys(columns: list[str], given: dict[str, object], expected: list[str]) -> None:
    settings = Settings("sft_trainer", given)
    set_columns(settings, columns)
    assert settings.arguments() == expected


def test_a_prompt_beside_whole_conversations_is_not_read_twice(task: Path, tmp_path: Path) -> None:
    rows = []
    for pair in PAIRS:
        user = {"role": "user", "content": pair["prompt"]}
        chosen, rejected = ({"role": "assistant", "content": pair[side]} for side in ("chosen", "rejected"))
        rows.append({"prompt": pair["prompt"], "chosen": [user, chosen], "rejected": [user, rejected]})
    settings = {"steps": 1, "max_length": 16, "progress": False, "logger": "file"}
    runs = []
    for name, data in (("whole", rows), ("parts", PAIRS)):
        runs.append(strop.dpo(task / "model", data, folder=tmp_path / name, **settings))
    whole, parts = (run.metrics["train/global_tokens"] for run in runs)
    assert whole == parts


@pytest.mark.parametrize(("function", "rows"), [("sft", EXAMPLES), ("dpo", PAIRS), ("reward_model", PAIRS)])
def test_each_program_trains(function: str, rows: list[dict[str, str]], task: Path, tmp_path: Path) -> None:
    run: strop.Run[Any] = getattr(strop, function)(
        task / "model", rows, folder=tmp_path / "run", steps=1, max_length=16, progress=False, logger="file"
    )
    assert run.finished and len(run.metrics["train/loss"]) == 1
    assert (run.save(tmp_path / "out") / "model.safetensors").exists()
    assert run.config.data.train_batch_size == len(rows)
    assert run.command().startswith(f"strop {run.verb} ")
