"""The report counts what is there and finds what is wrong, without ever raising."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.config.schema.data import DataConfig
from strop.data.chat import Chat
from strop.data.report import DataReport, inspect_files
from tests.data.tokens import character_tokenizer

TOKENIZER = character_tokenizer()
WRAP = len(Chat(TOKENIZER).ids([{"role": "user", "content": ""}]))


def row(text: Any, source: str = "sums", **more: Any) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": text,
        "reward_model": {"style": "rule", "ground_truth": "1"},
        **more,
    }


def parquet(path: Path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def said(report: DataReport) -> str:
    return " | ".join(f"{finding.level}: {finding.message}" for finding in report.findings)


def test_counts_sources_agents_and_lengths(tmp_path: Path) -> None:
    rows = [
        row("x" * n, "sums" if n % 3 else "words", agent_name="tool_agent" if n == 4 else None)
        for n in range(10)
    ]
    report = inspect_files(
        parquet(tmp_path / "a.parquet", rows), DataConfig(max_prompt_length=WRAP + 9), TOKENIZER
    )
    assert report.ok and report.findings == []
    assert (report.rows, report.measured, report.too_long, report.longest) == (10, 10, 0, WRAP + 9)
    assert report.columns == ["data_source", "prompt", "reward_model", "agent_name"]
    assert {name: source.rows for name, source in report.data_sources.items()} == {"words": 4, "sums": 6}
    example = report.data_sources["sums"].example
    assert example is not None and example.messages[0]["content"] == "x" and example.ground_truth == "1"
    assert report.agents == {"tool_agent": 1}


def test_long_prompts_by_what_will_happen_to_them(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", [row("x" * n) for n in range(10)])
    limit = {"max_prompt_length": WRAP + 6}
    refused = inspect_files(file, DataConfig(**limit), TOKENIZER)
    assert (refused.too_long, refused.longest, refused.ok) == (3, WRAP + 9, False)
    assert (
        f"error: 3 of 10 prompts are over data.max_prompt_length={WRAP + 6} (the longest has {WRAP + 9} tokens)"
        in said(refused)
    )
    assert "warning" in said(inspect_files(file, DataConfig(truncation="left", **limit), TOKENIZER))
    assert inspect_files(file, DataConfig(filter_overlong_prompts=True, **limit), TOKENIZER).ok
    assert not inspect_files(
        file, DataConfig(filter_overlong_prompts=True, max_prompt_length=1), TOKENIZER
    ).ok, "nothing would be left"
    assert (
        inspect_files(file, DataConfig(**limit)).measured == 10
        and inspect_files(file, DataConfig(**limit)).longest == 0
    ), "no tokenizer"


def test_large_files_are_sampled_and_rare_sources_still_found(tmp_path: Path) -> None:
    rows = [row("x", "rare" if n == 778 else "sums") for n in range(1000)]
    report = inspect_files(parquet(tmp_path / "a.parquet", rows), DataConfig(), TOKENIZER, sample=100)
    assert (report.rows, report.measured) == (1000, 101)
    assert report.data_sources["rare"].rows == 1 and report.data_sources["rare"].example is not None
    assert "info: 101 of 1000 rows were read" in said(report)


def test_everything_wrong_is_said(tmp_path: Path) -> None:
    good = parquet(tmp_path / "good.parquet", [row("x")])
    (tmp_path / "corrupt.parquet").write_bytes(b"PAR1nonsensePAR1")
    columns = parquet(tmp_path / "columns.parquet", [{"promt": "x", "data_source": "a"}])
    missing = str(tmp_path / "goood.parquet")
    report = inspect_files(
        [good, str(tmp_path / "corrupt.parquet"), columns, missing], DataConfig(), TOKENIZER
    )
    text = said(report)
    assert not report.ok and report.rows == 1
    assert "corrupt.parquet cannot be read as parquet" in text
    assert "columns.parquet has no column 'prompt'" in text and "Did you mean 'promt'" in text
    assert "goood.parquet does not exist. Did you mean 'good.parquet'" in text
    assert "data.val_files names no file" in said(inspect_files(None, DataConfig(), key="data.val_files"))
    assert "data.input_template='x'" in said(inspect_files(good, DataConfig(input_template="x")))
    assert "has no chat template" in said(
        inspect_files(good, DataConfig(), character_tokenizer(template=None))
    )
    assert "The chat template fails" in said(
        inspect_files(good, DataConfig(), TOKENIZER, chat_template="{% if %}")
    )
    assert "1 prompts render to no tokens at all; the first: " in said(
        inspect_files(good, DataConfig(), TOKENIZER, chat_template="{{ '' }}")
    )


def test_bad_rows_are_named_and_counted(tmp_path: Path) -> None:
    rows = [row([]) if n % 2 else row([{"role": "user", "content": "x"}]) for n in range(10)]
    report = inspect_files(parquet(tmp_path / "a.parquet", rows), DataConfig(), TOKENIZER)
    assert "a.parquet, row 1, column 'prompt' is list []" in said(report)
    assert "error: 2 further rows cannot be used either" in said(report)


def test_plain_files_get_a_source_and_a_warning(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text('{"prompt": "why?", "answer": "because"}\n')
    report = inspect_files(str(tmp_path / "questions.jsonl"), DataConfig(), TOKENIZER)
    assert report.ok and list(report.data_sources) == ["questions"]
    assert "warning: No reward_model column and no data.label_key" in said(report)
    assert "data.label_key: answer, prompt." in said(report)


@given(st.lists(st.dictionaries(st.sampled_from(["prompt", "data_source", "reward_model"]), st.none() | st.text(max_size=3) | st.integers() | st.lists(st.integers(), max_size=1)), min_size=1, max_size=5))  # fmt: skip
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_never_raises(tmp_path: Path, rows: list[dict]) -> None:
    import json

    (tmp_path / "a.json").write_text(json.dumps(rows))
    report = inspect_files(str(tmp_path / "a.json"), DataConfig(), TOKENIZER)
    assert report.rows == len(rows) or not report.ok


def test_reports_do_without_torch(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", [row("x")])
    code = (
        "import sys; from strop.config.schema.data import DataConfig; from strop.data.report import inspect_files; "
        "import strop.data.loader, strop.data.make, strop.data.supervised.datasets, strop.data.report; "
        f"assert inspect_files({file!r}, DataConfig()).ok; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
