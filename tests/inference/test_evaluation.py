"""Scores for a file of answers: the numbers by hand, failures that show, and two files side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.config.compose import load
from strop.inference.evaluation import ScoredPrompt, evaluate, has_binary_scores, summarise
from strop.inference.evaluation_report import compare
from strop.trainer.main_eval import run
from tests.rewards.limits import limit_responses


def row(
    question: str, truth: Any, responses: list[str] | None, source: str = "openai/gsm8k"
) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "responses": responses,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def results(path: str, *more: str) -> tuple[list[ScoredPrompt], dict[str, Any]]:
    config = load("evaluation", [f"data.path={path}", *more]).config
    scored_prompts = evaluate(config)
    return scored_prompts, summarise(scored_prompts, config.evaluation)


GSM8K = [
    row("a", "4", ["#### 4", "#### 4.0", "#### 5", "nothing"]),
    row("b", "7", ["#### 8", "#### 8", "#### 7", "#### 9"]),
]


def test_the_numbers_by_hand(tmp_path):
    scored_prompts, found = results(write(tmp_path / "out.parquet", GSM8K))
    assert [prompt.scores for prompt in scored_prompts] == [[1, 1, 0, 0], [0, 0, 1, 0]]
    assert scored_prompts[0].votes == ["4", "4", "5", None]
    metrics = {name: estimate.mean for name, estimate in found["openai/gsm8k"].metrics.items()}
    expected = {
        "score": 3 / 8,
        "pass@1": 3 / 8,
        "pass@2": ((1 - 1 / 6) + (1 - 3 / 6)) / 2,  # 1 - C(n-c,2)/C(4,2)
        "pass@4": 1.0,
        "maj@2": (5 / 6 + 1 / 6) / 2,  # a: every pair but (5, nothing); b: only (7, 9), for 8 comes before 7
        "maj@4": 0.5,
    }
    assert metrics == pytest.approx(expected)
    interval = found["openai/gsm8k"].metrics["pass@1"]
    assert (interval.low, interval.high) == (0.25, 0.5) and interval.prompts == 2


def test_a_k_for_which_there_are_too_few_responses_is_refused_before_scoring(tmp_path):
    path = write(tmp_path / "out.parquet", [*GSM8K, row("c", "7", ["#### 7"])])
    with pytest.raises(
        ValueError, match=r"evaluation.k=\[1, 8\]: pass@8 needs 8 .* more than 4.*n_samples=8"
    ):
        results(path, "evaluation.k=[1,8]")
    found = results(path, "evaluation.k=[4]")[1]["openai/gsm8k"]
    assert found.metrics["pass@4"].prompts == 2, "the prompts that have enough"


def test_a_math_scorer_with_accuracy_of_its_own(tmp_path):
    rows = [
        row("x", "33", ["\\boxed{33}", "Answer: 34"], "aime_2024"),
        row("y", "5", ["\\boxed{5}", "\\boxed{05}"], "aime_2024"),
    ]
    scored_prompts, found = results(write(tmp_path / "out.parquet", rows))
    assert scored_prompts[0].scores == [1.0, -1.0] and scored_prompts[0].correct == [1.0, 0.0]
    assert (
        found["aime_2024"].metrics["score"].mean == 0.5 and found["aime_2024"].metrics["pass@1"].mean == 0.75
    )


def test_scores_that_are_no_yes_or_no_have_a_best(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def compute_score(solution_str, ground_truth):\n"
        "    words = float('nan') if solution_str == 'aaa' else 2.0  # undefined for some, as in training\n"
        "    return {'score': len(solution_str) / 10, 'words': words}\n"
    )
    path = write(tmp_path / "out.parquet", [row("a", "", ["aaa", "aaaaa"], "own")])
    mine = f"custom_reward_function.path={tmp_path}/mine.py"
    unnamed = write(tmp_path / "unnamed.parquet", [{"prompt": "a", "responses": ["aaa", "aaaaa"]}])
    assert results(unnamed, mine)[1]["custom"].metrics["best@2"].mean == 0.5  # no data_source is needed
    scored_prompts, found = results(path, mine)
    assert not has_binary_scores(scored_prompts)
    assert {name: e.mean for name, e in found["own"].metrics.items()} == pytest.approx(
        {"score": 0.4, "best@2": 0.5, "words": 2.0}
    )


FAILING = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "slow":
        time.sleep(60)
    if solution_str == "bad":
        raise KeyError("no such thing")
    if solution_str == "nan":
        return float("nan")
    return {"score": float(solution_str == ground_truth), "pred": solution_str}
"""


def test_failures_are_counted_and_in_no_mean(tmp_path, capsys, monkeypatch):
    limit_responses(monkeypatch, "slow")
    (tmp_path / "mine.py").write_text(FAILING)
    rows = [
        row("a", "x", ["x", "bad", "slow"], "own"),
        row("b", "x", ["y", "nan"], "own"),
        row("c", "x", None, "own"),
    ]
    path = write(tmp_path / "out.parquet", rows)
    words = [f"data.path={path}", f"custom_reward_function.path={tmp_path}/mine.py", "evaluation.timeout=1"]
    assert run(words) == 0
    said = capsys.readouterr().out
    assert "3 of 5 responses could not be scored and are in no mean (1 took too long)" in " ".join(
        said.split()
    )
    assert "KeyError: 'no such thing'" in said and "1 prompts have no response" in said
    content = json.loads((tmp_path / "out.eval.json").read_text())
    assert content["test_score"] == {"own": 0.5}
    about = content["sources"]["own"]
    assert (about["failed"], about["timed_out"], about["unanswered"], about["responses"]) == (3, 1, 1, 5)
    assert content["prompts"][0]["scores"] == [1.0, None, None]


def test_when_everything_fails_the_scorer_is_broken(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def compute_score(solution_str, ground_truth):\n    raise KeyError('k')\n"
    )
    path = write(tmp_path / "out.parquet", GSM8K)
    with pytest.raises(
        ValueError, match=r"failed for all 8 responses\. The first, row 0 of openai/gsm8k: KeyError: 'k'"
    ):
        results(path, f"custom_reward_function.path={tmp_path}/mine.py")
    with pytest.raises(ValueError, match=r"No rule scorer knows the data source 'gsm9k'"):
        results(write(tmp_path / "b.parquet", [row("a", "4", ["4"], "gsm9k")]))
    with pytest.raises(ValueError, match="No row has a response"):
        results(write(tmp_path / "c.parquet", [row("a", "4", None), row("b", "4", None)]))


def test_an_async_function(tmp_path):
    (tmp_path / "mine.py").write_text(
        "async def compute_score(solution_str, ground_truth):\n    return solution_str == ground_truth\n"
    )
    path = write(tmp_path / "out.parquet", [row("a", "x", ["x", "y"], "own")])
    _, found = results(path, f"custom_reward_function.path={tmp_path}/mine.py")
    assert found["own"].metrics["pass@1"].mean == 0.5


def test_a_function_that_takes_columns(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def compute_score(completion, prompt, level):\n    return completion == prompt[0]['content'] * level\n"
    )
    path = write(tmp_path / "out.parquet", [{**row("a", "x", ["aa", "a"], "own"), "level": 2}])
    _, found = results(path, f"custom_reward_function.path={tmp_path}/mine.py")
    assert found["own"].metrics["pass@1"].mean == 0.5


def test_raw_benchmark_rows(tmp_path):
    rows = [
        {
            "ID": "2024-I-1",
            "Problem": "p",
            "Solution": "s",
            "Answer": 204,
            "responses": ["\\boxed{204}", "no"],
        }
    ]
    _, found = results(write(tmp_path / "aime.parquet", rows), "data.benchmark=aime")
    assert found["aime_2024"].metrics["pass@1"].mean == 0.5
    rows = [{"problem": "p", "solution": "s", "answer": "\\frac{1}{2}", "responses": ["\\boxed{1/2}"]}]
    _, found = results(write(tmp_path / "math.parquet", rows), "data.benchmark=math500")
    assert found["HuggingFaceH4/MATH-500"].metrics["pass@1"].mean == 1.0
    rows = [{"question": "q", "answer": "so\n#### 1,400", "responses": ["#### 1400"]}]
    _, found = results(write(tmp_path / "gsm8k.parquet", rows), "data.benchmark=gsm8k")
    assert found["openai/gsm8k"].metrics["pass@1"].mean == 1.0


def test_what_flipped(tmp_path, capsys):
    inputs = [f"question {n}" for n in range(8)]
    first = [row(q, "1", ["#### 1" if n < 4 else "#### 2"]) for n, q in enumerate(inputs)]
    second = [row(q, "1", ["#### 1" if n in (0, 1, 2, 4, 5, 6) else "#### 2"]) for n, q in enumerate(inputs)]
    a, b = (
        write(tmp_path / "a.parquet", first),
        write(tmp_path / "b.parquet", [*second[::-1], row("new", "1", ["#### 1"])]),
    )
    assert run(["--compare", a, b]) == 0
    said = capsys.readouterr().out
    assert (
        "  gained: row 3, 0.00 -> 1.00  question 4" in said
        and "  lost: row 4, 1.00 -> 0.00  question 3" in said
    )
    assert (
        "openai/gsm8k: 3 prompts gained, 1 lost; the chance of that" in said
        and "1 prompts are in one file only" in said
    )
    content = json.loads((tmp_path / "b.compare.json").read_text())["sources"]["openai/gsm8k"]
    assert {flip["prompt"][0]["content"] for flip in content["gained"]} == {
        "question 4",
        "question 5",
        "question 6",
    }
    assert [flip["prompt"][0]["content"] for flip in content["lost"]] == ["question 3"]
    assert (content["prompts"], content["only_before"], content["only_after"]) == (8, 0, 1)
    assert content["difference"]["mean"] == 0.25 and content["p_value"] == 0.625
    assert content["difference"]["low"] <= 0.25 <= content["difference"]["high"]


def test_files_without_a_prompt_in_common(tmp_path):
    a, b = write(tmp_path / "a.parquet", GSM8K[:1]), write(tmp_path / "b.parquet", GSM8K[1:])
    with pytest.raises(ValueError, match="no prompt in common"):
        run(["--compare", a, b])
    with pytest.raises(ValueError, match="--compare needs two files"):
        run(["--compare", a, "data.prompt_key=x"])
    odd = tmp_path / "lr=1e-6 (2)"
    odd.mkdir()
    assert run(["--compare", a, write(odd / "b, c.parquet", GSM8K[:1])]) == 0


def test_repeated_prompts_are_matched_in_their_order(tmp_path):
    rows = [row("same", "1", ["#### 1"]), row("same", "1", ["#### 2"])]
    config = load("evaluation", ["data.path=x"]).config
    scored_prompts = evaluate(config, write(tmp_path / "a.parquet", rows))
    assert compare(scored_prompts, scored_prompts, config.evaluation)["openai/gsm8k"].flips == []


def test_addresses(tmp_path):
    system = fsspec.filesystem("memory")
    system.put_file(write(tmp_path / "out.parquet", GSM8K), "/answers/out.parquet")
    assert run(["data.path=memory://answers/out.parquet"]) == 0
    assert json.loads(system.cat_file("/answers/out.eval.json"))["test_score"] == {"openai/gsm8k": 0.375}


@pytest.mark.parametrize(
    ("rows", "more", "words"),
    [
        (GSM8K, ["data.response_key=response"], "no column 'response'.*Did you mean 'responses'"),
        (GSM8K, ["data.data_source_key=source"], "no column 'source'"),
        ([{**GSM8K[0], "responses": 5}], [], "holds a int; a list of texts"),
        ([{**GSM8K[0], "data_source": None}, GSM8K[0]], [], "row 0: the column 'data_source' is empty"),
        (GSM8K, ["data.benchmark=aime"], "no column 'Problem'"),
    ],
)
def test_mistakes(tmp_path, rows, more, words):
    with pytest.raises(ValueError, match=words):
        run([f"data.path={write(tmp_path / 'out.parquet', rows)}", *more])


def test_a_half_written_file(tmp_path):
    path = Path(write(tmp_path / "out.parquet", GSM8K))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"out\.parquet cannot be read as parquet"):
        run([f"data.path={path}"])


def test_compat_selects_the_scorers_of_verl(tmp_path):
    path = write(tmp_path / "out.parquet", [row("a", "4", ["#### 4", "#### 4.0"])])
    assert results(path)[0][0].scores == [1, 1]
    assert results(path, "evaluation.compat=verl")[0][0].scores == [1, 0]  # verl compares texts
