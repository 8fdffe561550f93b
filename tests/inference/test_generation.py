"""Answers for a file: the same rows with a column more, whatever happens on the way."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.config.compose import load
from strop.inference import generation, generation_model
from strop.inference.generation import generate
from strop.inference.resumable_rows import PartialOutput
from strop.models.heads import new_scalar_model
from strop.preflight.examine import main as preflight
from strop.trainer.main_generation import run
from tests.forked import Forked

SETTINGS = [
    "rollout.prompt_length=8",
    "rollout.response_length=6",
    "rollout.dtype=float32",
    "trainer.device=cpu",
]


@pytest.fixture
def asked(task: Path, tmp_path: Path) -> list[str]:
    return [
        f"model.path={task}/model",
        f"data.path={task}/data/train.parquet",
        f"data.output_path={tmp_path}/out.parquet",
        "data.n_samples=3",
        "data.batch_size=10",
        *SETTINGS,
    ]


def answered(asked: list[str], *more: str) -> generation.GenerationSummary:
    return generate(load("generation", [*asked, *more]).config)


def responses(path: Path | str) -> list[list[str]]:
    return pq.read_table(str(path))["responses"].to_pylist()


def test_the_input_rows_and_a_column(asked, task, tmp_path):
    summary = answered(asked)
    before, after = pq.read_table(task / "data" / "train.parquet"), pq.read_table(tmp_path / "out.parquet")
    assert after.drop_columns(["responses"]).equals(before)
    assert {len(row) for row in responses(tmp_path / "out.parquet")} == {3}
    assert (summary.rows, summary.fresh.rows, summary.fresh.responses) == (64, 64, 192) and not summary.failed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet"]


def test_greedy_answers_are_those_of_transformers(asked, task, tmp_path):
    answered(asked, "data.n_samples=1", "rollout.temperature=0")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(task / "model"),
        AutoTokenizer.from_pretrained(task / "model"),
    )
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    for row in rows[:10]:
        ids = torch.tensor([tokenizer.encode(row["prompt"][0]["content"])])
        out = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        assert row["responses"] == [tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)]


def test_answers_do_not_depend_on_batches_or_processes(asked, tmp_path):
    answered(asked)
    expected = responses(tmp_path / "out.parquet")
    answered(asked, f"data.output_path={tmp_path}/large.parquet", "data.batch_size=64")
    assert responses(tmp_path / "large.parquet") == expected
    answered(asked, f"data.output_path={tmp_path}/other.parquet", "trainer.seed=7")
    assert responses(tmp_path / "other.parquet") != expected


@pytest.mark.slow
def test_two_processes_say_the_same(asked, tmp_path):
    answered(asked)
    answered(asked, f"data.output_path={tmp_path}/two.parquet", "trainer.n_gpus_per_node=2")
    assert responses(tmp_path / "two.parquet") == responses(tmp_path / "out.parquet")


def test_a_job_goes_on_where_it_was(asked, tmp_path, monkeypatch):
    answered(asked, f"data.output_path={tmp_path}/whole.parquet")
    original, calls = generation_model.ResponseGenerator.generate, []

    def interrupted(self, rows):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(list(rows))
        return original(self, rows)

    close, closed = generation_model.ResponseGenerator.close, []
    monkeypatch.setattr(generation_model.ResponseGenerator, "generate", interrupted)
    monkeypatch.setattr(
        generation_model.ResponseGenerator, "close", lambda self: closed.append(self) or close(self)
    )
    with pytest.raises(KeyboardInterrupt):
        answered(asked)
    assert len(closed) == 1, "engines of other processes end with it"
    assert not (tmp_path / "out.parquet").exists() and (tmp_path / "out.parquet.parts").is_dir()
    calls.clear()
    monkeypatch.setattr(
        generation_model.ResponseGenerator,
        "generate",
        lambda self, rows: calls.append(list(rows)) or original(self, rows),
    )
    summary = answered(asked, "data.batch_size=20")
    assert [row for rows in calls for row in rows] == list(range(30, 64)), (
        "no row twice, whatever the batch size"
    )
    assert summary.fresh.rows == 34
    assert responses(tmp_path / "out.parquet") == responses(tmp_path / "whole.parquet")
    calls.clear()
    assert answered(asked).fresh.rows == 0 and not calls, "nothing is left to do"


WAITS = """
import time
from strop.inference.generation_model import ResponseGenerator
calls, generate = [], ResponseGenerator.generate
def wait_in_the_end(self, rows):
    calls.append(rows)
    if len(calls) > 5:
        time.sleep(600)
    return generate(self, rows)
ResponseGenerator.generate = wait_in_the_end
"""


def test_a_real_kill(asked, tmp_path):
    answered(asked, f"data.output_path={tmp_path}/whole.parquet")
    (tmp_path / "waits.py").write_text(WAITS)
    words = [*asked, "data.batch_size=2", f"plugins=[{tmp_path}/waits.py]"]
    process = Forked("strop.trainer.main_generation", words, tmp_path / "killed.log")
    parts = tmp_path / "out.parquet.parts"
    process.kill_when(lambda: parts.is_dir() and len(list(parts.glob("[0-9]*.json"))) >= 3)
    assert not (tmp_path / "out.parquet").exists()
    summary = answered(asked)
    assert 0 < summary.fresh.rows < 64
    assert responses(tmp_path / "out.parquet") == responses(tmp_path / "whole.parquet")


def test_addresses(asked, task):
    system = fsspec.filesystem("memory")
    system.put_file(str(task / "data" / "test.parquet"), "/in/test.parquet")
    answered(asked, "data.path=memory://in/test.parquet", "data.output_path=memory://made/out.parquet")
    with system.open("/made/out.parquet") as file:
        assert len(pq.read_table(file)["responses"]) == 16
    assert system.find("/made") == ["/made/out.parquet"]


def test_an_output_of_something_else_is_not_overwritten(asked, task, tmp_path):
    out = tmp_path / "out.parquet"
    whole = (task / "data" / "train.parquet").read_bytes()
    out.write_bytes(whole)
    with pytest.raises(ValueError, match="was not written by strop generate, so it is not overwritten"):
        answered(asked)
    out.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        ValueError, match=r"exists but is no whole parquet file .* Delete it, or choose another"
    ):
        answered(asked)
    assert out.read_bytes() == whole[: len(whole) // 2]
    out.unlink()
    answered(asked)
    with pytest.raises(ValueError, match=r"of another job: data.n_samples was 3 and is 2\."):
        answered(asked, "data.n_samples=2")


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("model.lora_adapter_path", "the weights in model.lora_adapter_path"),
        ("model.custom_chat_template", "the text of model.custom_chat_template"),
        ("rollout.multi_turn.max_assistant_turns", "rollout.multi_turn.max_assistant_turns was 2 and is 3"),
    ],
)
def test_finished_rows_of_other_weights_templates_or_turns_are_of_another_job(
    asked, tmp_path, setting, changed
):
    """The path of an adapter, like that of a template, stays the same when a run writes it again."""
    file = tmp_path / "adapter" / "template.jinja"
    file.parent.mkdir()
    values = {"model.lora_adapter_path": file.parent, "model.custom_chat_template": file}
    file.write_text("{{ messages }}")
    first = load("generation", [*asked, f"{setting}={values.get(setting, 2)}"]).config
    inputs = generation.open_input_rows(first)
    PartialOutput(str(tmp_path / "out.parquet"), generation._job(first, inputs)).open()
    generation.check_output(first, inputs)
    file.write_text("{{ messages[0] }}")
    second = load("generation", [*asked, f"{setting}={values.get(setting, 3)}"]).config
    with pytest.raises(ValueError, match=f"holds finished rows of another job: {changed}"):
        generation.check_output(second, inputs)


def test_a_half_written_output_of_this_job_is_written_again(asked, tmp_path):
    config = load("generation", asked).config
    inputs = generation.open_input_rows(config)
    parts = PartialOutput(str(tmp_path / "out.parquet"), generation._job(config, inputs))
    parts.open()
    parts.add({row: ["x", "y", "z"] for row in range(64)})
    (tmp_path / "out.parquet").write_bytes(b"PAR1 and then the power went")
    answered(asked)
    assert responses(tmp_path / "out.parquet") == [["x", "y", "z"]] * 64


def test_new_weights_are_another_job(asked, task, tmp_path):
    import shutil

    shutil.copytree(task / "model", tmp_path / "model")
    mine = [*asked, f"model.path={tmp_path}/model"]
    answered(mine)
    os.utime(tmp_path / "model" / "model.safetensors", (1, 1))
    with pytest.raises(ValueError, match=r"the weights in model.path was"):
        answered(mine)


def test_rows_that_cannot_be_answered_are_counted_and_kept(asked, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in ("1+1=", "1+2+3+4+5+6=", "")))
    summary = answered(asked, f"data.path={file}")
    table = pq.read_table(tmp_path / "out.parquet")
    assert [len(r) if r is not None else None for r in table["responses"].to_pylist()] == [3, 3, None]
    assert list(summary.failed) == [2] and summary.fresh.cut_prompts == 1
    assert "1 rows have no responses (null); the first, row 2: the prompt is empty" in str(summary)
    assert "1 prompts were longer than rollout.prompt_length and lost their beginning" in str(summary)


def test_a_row_without_its_images_has_no_responses(asked, tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1+1=", "images": []}, {"prompt": "<image>+1=", "images": []}]
    file.write_text("\n".join(map(json.dumps, rows)))
    summary = answered(asked, f"data.path={file}")
    assert [row is None for row in responses(tmp_path / "out.parquet")] == [False, True]
    assert "the prompt has <image> but its column 'images' is empty" in summary.failed[1]


def test_when_no_row_can_be_answered(asked, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": ""}\n{"prompt": ""}\n')
    with pytest.raises(ValueError, match=r"No row could be answered\. The first: the prompt is empty"):
        answered(asked, f"data.path={file}")


def test_a_benchmark_as_it_is_published(asked, tmp_path):
    raw = {"ID": "2024-II-4", "Problem": "1+1=", "Solution": "2", "Answer": 2}
    (tmp_path / "aime.jsonl").write_text(json.dumps(raw))
    answered(asked, f"data.path={tmp_path}/aime.jsonl", "data.benchmark=aime", "rollout.prompt_length=20")
    [row] = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert {name: row[name] for name in raw} == raw
    assert (
        row["data_source"] == "aime_2024"
        and row["reward_model"]["ground_truth"] == "2"
        and len(row["responses"]) == 3
    )
    with pytest.raises(
        ValueError, match=r"columns are those of aime as it is published: set data.benchmark=aime"
    ):
        answered(asked, f"data.path={tmp_path}/aime.jsonl")


def test_stop_strings_cut_what_comes_after(asked, tmp_path):
    whole = answered(asked)
    cut = answered(asked, f"data.output_path={tmp_path}/cut.parquet", "rollout.stop=['5','','=']")
    assert cut.fresh.cut_responses < whole.fresh.cut_responses, "a response that ends at a text was not cut"
    pairs = zip(responses(tmp_path / "out.parquet"), responses(tmp_path / "cut.parquet"))
    expected = [[text.partition("5")[0].partition("=")[0] for text in whole] for whole, _ in pairs]
    assert responses(tmp_path / "cut.parquet") == expected and expected != responses(tmp_path / "out.parquet")


def test_mixed_columns_are_refused_before_the_first_answer(asked, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "x": 1}\n{"prompt": "2", "x": {"a": 2}}\n')
    with pytest.raises(ValueError, match="the column 'x' has values of different types"):
        answered(asked, f"data.path={tmp_path}/rows.jsonl")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["data.prompt_key=promt"], "no column 'promt'.*Did you mean 'prompt'"),
        (["rollout.temperature=0"], "3 samples at temperature 0 would all be the same"),
        (["data.benchmark=aimee"], "Did you mean 'aime'"),
        (["data.path=nowhere.parquet"], r"nowhere\.parquet does not exist"),
        (["data.output_path=out.csv"], r"must end in \.parquet"),
        (["trainer.nnodes=2"], "one machine"),
    ],
)
def test_mistakes(asked, more, words):
    with pytest.raises(ValueError, match=words):
        run([*asked, *more])


def test_sequences_longer_than_the_model(asked, capsys):
    words = [*asked, "rollout.response_length=100"]
    assert preflight("generation", words) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "sequences of 108 tokens (prompts of 8, responses of 100) do not fit into the 64 positions" in shown
    )
    assert "Lower rollout.prompt_length or rollout.response_length" in shown
    assert preflight("generation", [*words, "rollout.max_model_len=64"]) == 0


def test_columns_of_any_type_come_through(asked, tmp_path):
    table = pa.table(
        {
            "prompt": ["1+1=", "2+2="],
            "when": pa.array([0, 1], pa.timestamp("us")),
            "picture": pa.array([b"\x00\xff", None], pa.binary()),
            "half": pa.array([0.5, 1.5], pa.float32()),
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    answered(asked, f"data.path={tmp_path}/in.parquet")
    assert pq.read_table(tmp_path / "out.parquet").drop_columns(["responses"]).equals(table)


def test_a_reward_model_cannot_talk(asked, task, tmp_path):
    config = AutoModelForCausalLM.from_pretrained(task / "model").config
    new_scalar_model(config).save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(task / "model").save_pretrained(tmp_path / "judge")
    with pytest.raises(ValueError, match=r"it holds a classifier .* but a language model is needed"):
        run([*asked, f"model.path={tmp_path}/judge"])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("rows", "data.path: .*the column 'x' has values of different types .*in one way"),
        ("prompts", "data.path: No row can be answered. The first: .*row 0, column 'prompt' is int 1"),
        ("foreign", "was not written by strop generate, so it is not overwritten"),
        ("parts", r"holds finished rows of another job: data\.n_samples was 3 and is 2"),
        ("folder", "cannot be a folder"),
        ("adapter", "model.lora_adapter_path: holds no adapter"),
    ],
)
def test_check_finds_what_generate_would_refuse(asked, task, tmp_path, case, words, capsys):
    more = []
    if case == "rows":
        (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "x": 1}\n{"prompt": "2", "x": {"a": 2}}\n')
        more = [f"data.path={tmp_path}/rows.jsonl"]
    elif case == "prompts":
        (tmp_path / "rows.jsonl").write_text('{"prompt": 1}\n{"prompt": null}\n')
        more = [f"data.path={tmp_path}/rows.jsonl"]
    elif case == "adapter":
        more = [f"model.lora_adapter_path={tmp_path}"]
    elif case == "foreign":
        (tmp_path / "out.parquet").write_bytes((task / "data" / "train.parquet").read_bytes())
    elif case == "parts":
        config = load("generation", asked).config
        job = generation._job(config, generation.open_input_rows(config))
        PartialOutput(f"{tmp_path}/out.parquet", job).open()
        more = ["data.n_samples=2"]
    else:
        (tmp_path / "file").write_text("")
        more = [f"data.output_path={tmp_path}/file/out.parquet"]
    assert preflight("generation", [*asked, *more]) == 1
    assert re.search(words, " ".join(capsys.readouterr().out.split()))


def test_check_starts_nothing(asked, tmp_path):
    assert preflight("generation", asked) == 0
    assert list(tmp_path.iterdir()) == []


def test_check_names_a_row_without_an_answer(asked, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"prompt": null}\n{"prompt": "1+1="}\n')
    assert preflight("generation", [*asked, f"data.path={tmp_path}/rows.jsonl"]) == 0
    assert "rows.jsonl, row 0: the prompt column 'prompt' is empty" in capsys.readouterr().out
