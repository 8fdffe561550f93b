"""benchmarks/rollout.py at a tiny size: every system answers the same work in full."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.rollout import engines, tiny

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rollout.py"


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, *more: str
) -> list[dict[str, object]]:
    small = [
        "--prompts",
        "3",
        "--samples",
        "2",
        "--tokens",
        "5",
        "--lengths",
        "4",
        "9",
        "--repeats",
        "1",
        "--model",
        str(folder),
    ]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *small, *more])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.vllm
def test_all_engines_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.make(wide=True).save_pretrained(tmp_path)
    names = ["hf", "native", "vllm-eager", "strop-vllm-eager"]
    *lines, ratios = run(
        monkeypatch,
        capsys,
        tmp_path,
        "--engines",
        ",".join(names),
        "--vllm-python",
        engines.vllm_python(),
        "--max-num-seqs",
        "8",
    )
    assert [line["engine"] for line in lines] == names
    assert all(line["work"] == "3x2x5" and line["tokens_per_second"] > 0 for line in lines)  # type: ignore[operator]
    assert ratios.keys() == {f"native/{name}" for name in names if name != "native"}
    assert lines[2]["vllm_version"]


@pytest.mark.slow
def test_adapters_take_turns_with_the_base_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = SCRIPT.with_name("adapters.py")
    monkeypatch.syspath_prepend(str(script.parent))
    small = "--layers 1 --prompts 4 --samples 2 --tokens 3 --lengths 4 9 --repeats 1 --adapters 3 --rank 2"
    monkeypatch.setattr(sys, "argv", [str(script), *small.split()])
    runpy.run_path(str(script), run_name="__main__")
    *lines, ratios = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["way"] for line in lines] == ["base", "ordinary", "one", "many"]
    assert all(line["work"] == "4x2x3" and line["tokens_per_second"] > 0 for line in lines)
    assert {"many/base", "many/ordinary", "many/one"} <= ratios.keys()


def test_a_second_epoch_with_speculation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.make().save_pretrained(tmp_path)
    more = "--engines native --speculation on --epochs 2 --same-seeds --tokens 9 --stats"
    native, guessing, ratios, _, stats = run(monkeypatch, capsys, tmp_path, *more.split())
    assert [native["engine"], guessing["engine"]] == ["native", "native-on"]
    assert "native-on/native" in ratios
    assert stats["speculation/acceptance"] > 0.8  # type: ignore[operator]


def test_a_hybrid_shape_is_measured_where_vllm_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "--shape tiny-hybrid --prompts 2 --samples 2 --tokens 3 --lengths 2 4 --repeats 1"
    # Any program that ends without an answer stands for a vLLM that does not know the model.
    more = "--engines native,vllm --vllm-python /bin/false"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *small.split(), *more.split()])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert lines[0]["engine"] == "vllm" and "exit code 1" in lines[0]["error"]
    assert lines[1]["engine"] == "native" and lines[1]["tokens_per_second"] > 0


def test_a_limited_cache_of_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both native engines have the same bytes, in which more rows of 8 bits run at a time."""
    tiny.make().save_pretrained(tmp_path)
    more = f"--engines native --kv-cache-dtype fp8 --samples 8 --cache-gib {64 * 256 / 2**30}"
    native, short, ratios = run(monkeypatch, capsys, tmp_path, *more.split())
    assert [native["engine"], short["engine"]] == ["native", "native-fp8cache"]
    assert short["rows_in_flight"] > native["rows_in_flight"] > 0  # type: ignore[operator]
    assert "native/native-fp8cache" in ratios


def test_a_draft_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft model that is the policy itself is always right, up to the end of an answer."""
    tiny.make().save_pretrained(tmp_path)
    more = f"--engines native --draft-model {tmp_path} --stats"
    native, drafted, ratios, _, stats = run(monkeypatch, capsys, tmp_path, *more.split())
    assert [native["engine"], drafted["engine"]] == ["native", "native-draft"]
    assert "native-draft/native" in ratios
    assert stats["speculation/acceptance"] > 0.4  # type: ignore[operator]


def test_drafts_on_paper_keep_what_was_sampled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """benchmarks/draft_bound.py: an answer as before is all kept, four tokens a pass with three drafts; one
    that differs at every fifth token is kept up to there; where earlier answers differ, the latest is not the
    most frequent."""
    script = SCRIPT.with_name("draft_bound.py")

    def rates(earlier: list[list[int]], answer: list[int]) -> dict[str, float]:
        count = len(earlier)
        record = {"prompt": [1, 2], "answers": [*earlier, *[answer] * count]}
        record["log_probs"] = [[-1.0] * len(row) for row in record["answers"]]
        record["ranks"] = [[0] * len(row) for row in record["answers"]]
        file = tmp_path / "answers.jsonl"
        file.write_text(json.dumps(record), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", [str(script), "bound", str(file), "--drafts", "3"])
        runpy.run_path(str(script), run_name="__main__")
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert lines[0]["two_draws_agree"] == 0.368 and lines[-1]["tokens_per_pass"] > 3.7
        return {line["drafter"]: line["tokens_per_pass"] for line in lines if "drafts" in line}

    text = list(range(10, 50))
    assert rates([text], text) == {"latest": 4.0, "frequent": 4.0, "tree": 4.0}
    changed = [100 + place if place % 5 == 4 else token for place, token in enumerate(text)]
    assert set(rates([text], changed).values()) == {2.5}
    longer = list(range(10, 53))
    ways = [[*longer[:22], token, *longer[22:]] for token in (8, 8, 7)]
    found = rates(ways, ways[0])
    assert found["latest"] < found["frequent"] == found["tree"] == 4.0
