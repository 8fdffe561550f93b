"""Dumps of rollouts: the known columns first, then the scorer's, then ours."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from strop.run.samples import (
    batch_rows,
    dump,
    dump_trajectories,
    rollout_rows,
    write_evidence,
    write_transcripts,
)
from strop.types import ImageInput, Prompt, Trajectory, Turn, batch_of


def trajectory(score: float | None, /, **extras: Any) -> Trajectory:
    prompt = Prompt(index=7, ids=[1, 2], messages=[], data_source="arithmetic", ground_truth="4")
    return Trajectory(
        prompt, 3, [5, 6, 7], [1, 0, 1], [-1.0, 0.0, -2.0], version=9, score=score, extras=extras
    )


def decode(ids: list[int]) -> str:
    return "".join(chr(96 + i) for i in ids)


def test_rows_have_the_known_columns_and_ours(tmp_path: Path) -> None:
    rows = rollout_rows(
        [trajectory(1.0, acc=True), trajectory(None, pred="é", score="mine")], step=4, decode=decode
    )
    path = dump(tmp_path / "rollouts", 4, rows)
    assert path == tmp_path / "rollouts/4.jsonl"
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert list(first)[:5] == ["input", "output", "gts", "score", "step"]
    assert [first[key] for key in list(first)[:5]] == ["ab", "efg", "4", 1.0, 4]
    assert (first["acc"], first["pred"]) == (True, None) and (second["acc"], second["pred"]) == (None, "é")
    assert second["score"] is None, "a scorer's own key must not hide the score"
    assert list(first)[5:8] == ["acc", "pred", "data_source"]
    ours = {
        "data_source": "arithmetic",
        "index": 7,
        "group": 3,
        "finish": "stop",
        "num_turns": 2,
        "weights_version": 9,
    }
    ours |= {"prompt_tokens": 2, "response_tokens": 3, "sampled_tokens": 2, "mean_log_prob": -1.5}
    assert {key: first[key] for key in ours} == ours


def test_a_full_disk_costs_the_file_of_a_step_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # a write beyond it fails as on a full disk
    try:
        dump_trajectories(tmp_path / "said", 1, [trajectory(1.0)], decode=decode)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"The samples of step 1 are not in {tmp_path}/said: [Errno 27]" in caplog.text
    dump_trajectories("~/said", 2, [trajectory(1.0)], decode=decode)
    assert [path.name for path in (tmp_path / "said").iterdir()] == ["2.jsonl"]


def test_a_batch_with_images_is_written_as_evidence(tmp_path: Path) -> None:
    prompt = Prompt(0, [1, 2], [], "test", images=(ImageInput("digest", {}, 1),))
    batch = batch_of([Trajectory(prompt, 0, [3, 4], [1, 1], [0.0, 0.0], score=1.0)])
    texts = batch_rows(batch, decode)
    write_evidence(tmp_path, batch, texts, step=1, message="NaN", suspects=[0], not_finite=["values"])
    assert load_file(tmp_path / "batch.safetensors")["token_ids"].tolist() == [1, 2, 3, 4]
    [row] = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["suspect"] and row["response_ids"] == [3, 4]


def test_a_second_attempt_replaces_the_file_and_a_failed_one_does_not(tmp_path: Path) -> None:
    dump(tmp_path, 1, [{"output": "old"}, {"output": "older"}])
    dump(tmp_path, 1, [{"output": "new \ud800", "score": float("nan"), "path": Path("x")}])
    assert json.loads((tmp_path / "1.jsonl").read_text()) == {"output": "new ?", "score": "NaN", "path": "x"}

    def failing() -> Any:
        yield {"output": "half"}
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        dump(tmp_path, 1, failing())
    assert [path.name for path in tmp_path.iterdir()] == ["1.jsonl"] and "new" in (
        tmp_path / "1.jsonl"
    ).read_text()


def test_conversations_have_their_turns_and_can_be_read(tmp_path: Path) -> None:
    spoken = trajectory(1.0, stopped="interaction")
    spoken.turns = [Turn("assistant", 0, 1), Turn("tool", 1, 2), Turn("assistant", 2, 3)]
    spoken.turn_rewards = {0: -0.25, 2: 0.5}
    first, second = rollout_rows([spoken, trajectory(1.0)], step=1, decode=decode)
    assert first["score"] == 1.25 and second["score"] == 1.0, "everything that was earned"
    assert first["output"] == "efg" and second["messages"] is None
    assert first["messages"] == [
        {"role": "assistant", "content": "e", "tokens": 1, "reward": -0.25},
        {"role": "tool", "content": "f", "tokens": 1},
        {"role": "assistant", "content": "g", "tokens": 1, "reward": 0.5},
    ]
    path = write_transcripts(tmp_path, 1, [spoken, trajectory(1.0)], decode=decode)
    assert path is not None and path.read_text() == (
        "===== row 7 of arithmetic: reward 1.25, interaction\n[prompt]\nab\n[assistant] (-0.25)\ne\n[tool]\nf\n"
        "[assistant] (+0.5)\ng\n\n"
    )
    assert write_transcripts(tmp_path, 2, [trajectory(1.0)], decode=decode) is None
