"""`strop data` writes files that the rest of the package reads."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from strop.config.schema.data import DataConfig
from strop.config.schema.supervised import PairDataConfig
from strop.data.files import open_rows
from strop.data.make import arithmetic, last_boxed, main, published_rows, transcript
from strop.data.prompts import build_prompts
from strop.data.supervised.datasets import build_supervised
from strop.rewards.function import score_response
from tests.data.tokens import character_tokenizer


def lines(path: Path, rows: list[dict]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def read(folder: Path, split: str) -> list[dict]:
    return pq.read_table(folder / f"{split}.parquet").to_pylist()


def test_gsm8k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    solved = {"question": "How many?", "answer": "7 * 200 = <<7*200=1400>>1400\n#### 1,400"}
    source = tmp_path / "source"
    source.mkdir()
    lines(source / "train.jsonl", [solved] * 5)
    lines(source / "test.jsonl", [solved] * 2)
    assert main(["gsm8k", "--out", str(tmp_path / "out"), "--from", str(source), "--size", "3"]) == 0
    assert "train.parquet: 3 rows" in capsys.readouterr().out
    row = read(tmp_path / "out", "train")[0]
    assert row["data_source"] == "openai/gsm8k" and row["ability"] == "math"
    assert (
        row["prompt"][0]["content"]
        == 'How many? Let\'s think step by step and output the final answer after "####".'
    )
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1400"}
    assert row["extra_info"] == {"split": "train", "index": row["extra_info"]["index"], **solved}
    assert [r["extra_info"]["split"] for r in read(tmp_path / "out", "test")] == ["test", "test"]
    files = str(tmp_path / "out" / "train.parquet")
    assert build_prompts(DataConfig(train_files=files), character_tokenizer())[0].ground_truth == "1400"


def test_math_holds_out_a_tenth_and_says_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"problem": f"p{n}", "solution": f"thus $\\boxed{{\\frac{{{n}}}{{2}}}}$."} for n in range(20)]
    file = lines(tmp_path / "problems.jsonl", [*rows, {"problem": "p", "solution": "no answer"}])
    assert main(["math", "--out", str(tmp_path), "--from", file]) == 0
    said = capsys.readouterr().err
    assert (
        "1 of 21 train rows left out; the first:" in said
        and "row 20: its solution has no \\boxed{} answer" in said
    )
    train, test = read(tmp_path, "train"), read(tmp_path, "test")
    assert (len(train), len(test)) == (18, 2)
    assert {r["extra_info"]["question"] for r in train + test} == {f"p{n}" for n in range(20)}
    assert all(r["extra_info"]["split"] == "test" for r in test)
    assert train[0]["reward_model"]["ground_truth"].startswith("\\frac{")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"is \boxed 7 $", "7"),
        (r"$\boxed{\{1,2\}}$", r"\{1,2\}"),
    ],
)
def test_boxed_answers(text: str, answer: str) -> None:
    assert last_boxed(text) == answer


def test_hh_rlhf_serves_pairs_and_prompts(tmp_path: Path) -> None:
    start = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Bye"
    rows = [
        {"chosen": f"{start}\n\nAssistant: Good bye!", "rejected": f"{start}\n\nAssistant: No."},
        {"prompt": f"{start}\n\nAssistant:", "chosen": " Good bye!", "rejected": " No."},
    ]
    file = lines(tmp_path / "train.jsonl", rows)
    assert (
        main(["hh_rlhf", "--out", str(tmp_path), "--from", file, lines(tmp_path / "test.jsonl", rows)]) == 0
    )
    first, second = read(tmp_path, "train")
    assert first["prompt"] == second["prompt"] == transcript(start)
    assert [m["role"] for m in first["prompt"]] == ["user", "assistant", "user"]
    assert first["chosen"][-1] == {"role": "assistant", "content": "Good bye!"}
    assert first["reward_model"] == {"style": "model", "ground_truth": "Good bye!"}
    out = str(tmp_path / "train.parquet")
    pair = build_supervised(PairDataConfig(train_files=out, shuffle=False), character_tokenizer())[0]
    assert sum(pair.chosen.mask) == len("Good bye!") + 1 and sum(pair.rejected.mask) == len("No.") + 1
    assert len(build_prompts(DataConfig(train_files=out), character_tokenizer())[0].messages) == 3


def test_arithmetic_is_right_and_does_not_leak(tmp_path: Path) -> None:
    arguments = [
        "arithmetic",
        "--size",
        "150",
        "--test-size",
        "40",
        "--digits",
        "1",
        "--operators",
        "+-",
        "--seed",
        "3",
    ]
    assert main([*arguments, "--out", str(tmp_path / "a")]) == 0
    assert main([*arguments, "--out", str(tmp_path / "b")]) == 0
    train, test = read(tmp_path / "a", "train"), read(tmp_path / "a", "test")
    assert train == read(tmp_path / "b", "train"), "a seed gives the same file"
    questions = [row["prompt"][0]["content"] for row in train + test]
    assert len(set(questions)) == 190 and (len(train), len(test)) == (150, 40)
    assert all(
        eval(q.rstrip("=")) == int(r["reward_model"]["ground_truth"]) for q, r in zip(questions, train + test)
    )
    assert {sign for q in questions for sign in "+-" if sign in q} == {"+", "-"}
    assert arithmetic(5, 1, seed=1) != arithmetic(5, 1, seed=2)


def test_bad_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path)]
    with pytest.raises(
        ValueError, match=r"strop data gsm8k needs --from: .* with question and answer columns"
    ):
        main(["gsm8k", *out])
    with pytest.raises(
        ValueError, match=r"only 100 different problems of numbers up to 9 with '\+', but 5500"
    ):
        main(["arithmetic", "--digits", "1", *out])
    with pytest.raises(ValueError, match=r"numbers so large cannot be drawn\. Set at most 9 digits"):
        main(["arithmetic", "--digits", "10", *out])
    with pytest.raises(ValueError, match=r"'/' is not one of \+ - \*"):
        main(["arithmetic", "--operators", "/", *out])
    wrong = lines(tmp_path / "train.jsonl", [{"qestion": "a", "answer": "b"}])
    with pytest.raises(
        ValueError,
        match=r"no column 'question', so it is not gsm8k as it is published\. Did you mean 'qestion'",
    ):
        main(["gsm8k", "--from", wrong, *out])
    unsolved = lines(tmp_path / "t.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(ValueError, match="no row is left to train on"):
        main(["gsm8k", "--from", unsolved, *out])
    number = lines(tmp_path / "n.jsonl", [{"question": 1, "answer": "b"}])
    with pytest.raises(ValueError, match=r"n\.jsonl, row 0: question and answer must be text"):
        main(["gsm8k", "--from", number, *out])
    with pytest.raises(ValueError, match="names only test files"):
        main(["gsm8k", "--from", lines(tmp_path / "test.jsonl", [{}]), *out])
    pair = {"chosen": "\n\nHuman: 1+1?\n\nAssistant: 2", "rejected": "\n\nHuman: 1+1?\n\nAssistant: 3"}
    for change in ({"chosen": "2"}, {"rejected": "3"}, {"rejected": "\n\nAssistant: 3"}):
        with pytest.raises(ValueError, match="no row is left to train on"):
            main(["hh_rlhf", "--from", lines(tmp_path / "p.jsonl", [{**pair, **change}]), *out])
        assert "must be dialogues that end with the assistant" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"--out .*p\.jsonl is a file"):
        main(["arithmetic", "--out", str(tmp_path / "p.jsonl")])
    assert main(["gsm9k", *out]) == 2 and main(["arithmetic", "--size", "0", *out]) == 2
    assert main(["arithmetic", "--size", "x", *out]) == 2
    assert main(["--help"]) == 0
    said = capsys.readouterr().err
    assert "invalid choice: 'gsm9k'" in said and "--size: invalid count value: 'x'" in said


def test_aime_as_it_is_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = {"ID": "2024-II-4", "Problem": "Let $x$ ...", "Solution": "So 033.", "Answer": 33}
    file = lines(
        tmp_path / "aime_2024_problems.jsonl",
        [raw, {**raw, "ID": "2025-I-1", "Answer": "007"}, {**raw, "Answer": "x"}],
    )
    assert main(["aime", "--out", str(tmp_path / "out"), "--from", file]) == 0
    said = capsys.readouterr()
    assert "1 of 3 test rows left out" in said.err and "its Answer 'x' is no whole number" in said.err
    assert said.out.endswith(f"Use them: data.val_files={tmp_path}/out/test.parquet\n")
    rows = read(tmp_path / "out", "test")
    assert [(row["data_source"], row["reward_model"]["ground_truth"]) for row in rows] == [
        ("aime_2024", "33"),
        ("aime_2025", "7"),
    ]
    assert score_response("aime_2024", "so \\boxed{033}", "33")["acc"] is True
    assert not (tmp_path / "out" / "train.parquet").exists()


def test_math_500_as_it_is_published(tmp_path: Path) -> None:
    raw = {
        "problem": "Convert.",
        "solution": "$\\boxed{(3, \\frac{\\pi}{2})}$",
        "answer": "(3, \\frac{\\pi}{2})",
        "level": 2,
    }
    assert main(["math500", "--out", str(tmp_path), "--from", lines(tmp_path / "test.jsonl", [raw])]) == 0
    [row] = read(tmp_path, "test")
    assert (
        row["data_source"] == "HuggingFaceH4/MATH-500"
        and row["reward_model"]["ground_truth"] == raw["answer"]
    )
    assert score_response(row["data_source"], raw["solution"], raw["answer"]) == 1.0


def test_published_rows_keep_their_columns(tmp_path: Path) -> None:
    raw = {"ID": "2024-II-4", "Problem": "Let $x$ ...", "Solution": "So 033.", "Answer": 33}
    [row] = published_rows("aime", open_rows(lines(tmp_path / "a.jsonl", [raw])))
    assert {name: row[name] for name in raw} == raw and row["prompt"][0]["content"].startswith(
        "Let $x$ ... Let's think"
    )
    with pytest.raises(
        ValueError, match=r"a\.jsonl, row 0 is no row of aime: its Answer 'n' is no whole number\."
    ):
        published_rows("aime", open_rows(lines(tmp_path / "a.jsonl", [{**raw, "Answer": "n"}])))
