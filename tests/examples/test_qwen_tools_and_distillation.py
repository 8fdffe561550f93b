"""The examples qwen_tools and qwen_distillation: their commands compose, with and without the tool differ in the tool
alone, and SFT gets as many tokens as it is told."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

from strop.agents.parsers.base import parser_for
from strop.config.compose import load
from strop.data.files import open_rows

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def script(path: str):
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), EXAMPLES / f"{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flat(value, prefix=""):
    if not isinstance(value, dict):
        return {prefix: value}
    found = {}
    for key, item in value.items():
        found |= flat(item, f"{prefix}.{key}" if prefix else str(key))
    return found


def test_with_and_without_the_tool_differ_in_the_tool_alone(monkeypatch):
    monkeypatch.chdir(ROOT)
    tool, plain = (
        flat(asdict(load("ppo_trainer", [], f"examples/qwen_tools/{name}.yaml").config))
        for name in ("tool", "plain")
    )
    different = {key for key in tool if tool[key] != plain[key]}
    rollout = "actor_rollout_ref.rollout.multi_turn"
    assert different == {
        "data.train_files",
        "data.val_files",
        "data.tool_config_path",
        f"{rollout}.tool_config_path",
        f"{rollout}.max_assistant_turns",
        f"{rollout}.max_tool_response_length",
        "trainer.experiment_name",
        "trainer.default_local_dir",
        "trainer.rollout_data_dir",
    }


def test_questions_with_and_without_the_tool(tmp_path):
    rows = [{"question": "Tom has 3 pears and buys 4. How many?", "answer": "3+4 = <<3+4=7>>7\n#### 7"}]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [f"{tmp_path}/train.jsonl", f"{tmp_path}/test.jsonl"]
    script("qwen_tools/prepare").main(["--from", *files, "--out", str(tmp_path)])
    (tool,), (plain,) = open_rows(f"{tmp_path}/test.parquet"), open_rows(f"{tmp_path}/plain_test.parquet")
    assert tool["agent_name"] == "tool_agent" and "agent_name" not in plain
    assert tool["reward_model"] == plain["reward_model"] and tool["reward_model"]["ground_truth"] == "7"
    assert tool["prompt"][-1]["content"].startswith(rows[0]["question"])
    # The solved example calls as the parser of the run reads calls, and its results are the calculator's.
    parser = parser_for("hermes", None)
    calculator = script("tool_calculator/calculator").calculator
    called = []
    for message, reply in pairwise(tool["prompt"]):
        for found in parser.parse(message["content"]).calls:
            assert reply == {"role": "tool", "content": calculator(**found.arguments)}
            called.append(found.arguments["expression"])
    assert called == ["4*6", "24-5"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("70% of (1150-150)", "700"),
        ("20% * 50", "10"),
        ("100% - 20%", "0.8"),
        ("50 / 20%", "250"),
        ("5% of 10% of 1000", "5"),
        ("80*(1 + 12.5%)", "90"),
        ("17 % 5", "2"),
        ("(5+15)%(3+4)", "6"),
        ("$1,250.50 * 2", "2501"),
        ("1,000,000/4 - $5", "249995"),
    ],
)
def test_the_calculator_knows_percentages_modulo_and_money(expression, value):
    assert script("tool_calculator/calculator").calculator(expression) == value


class Words:
    """A tokenizer of words."""

    def encode(self, text, add_special_tokens):
        return text.split()


def test_sft_gets_the_tokens_that_were_asked_for_round_by_round():
    teach = script("qwen_distillation/teach")
    rows = [
        {"prompt": [{"role": "user", "content": str(i)}], "responses": [f"first {i}", f"second {i}", "third"]}
        for i in range(4)
    ]
    rows.append({"prompt": [{"role": "user", "content": "failed"}], "responses": None})
    made, total = teach.chosen(teach.by_rounds(rows, seed=0), Words(), 16)
    answers = [row["messages"][-1]["content"] for row in made]
    assert total == 18 and len(answers) == 6  # three tokens each with the end of text
    assert sorted(answers[:4]) == [f"first {i}" for i in range(4)]
    assert all(answer.startswith("second") for answer in answers[4:])
    assert all(row["messages"][0]["content"] == row["messages"][1]["content"][-1] for row in made)
    with pytest.raises(
        ValueError, match=r"have 32 tokens in all, which is less than --tokens 33.*data.n_samples"
    ):
        teach.chosen(teach.by_rounds(rows, seed=0), Words(), 33)


PROGRAMS = {"ppo": "ppo_trainer", "sft": "sft_trainer", "generate": "generation"}


@pytest.mark.parametrize("example", ["qwen_code", "qwen_math", "qwen_tools", "qwen_distillation"])
def test_commands_of_the_page_compose(example, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (EXAMPLES / example / "README.md").read_text().replace("\\\n", " ")
    seen = 0
    for verb, words in re.findall(r"^    strop (ppo|sft|generate) (.*)$", page, re.MULTILINE):
        given = shlex.split(words)
        file = None
        if given[0].endswith(".yaml"):
            file = given.pop(0)
        load(PROGRAMS[verb], given, file)
        seen += 1
    assert seen
    for path in re.findall(r"examples/[\w/]+\.(?:py|yaml)", page):
        assert (ROOT / path).is_file(), path


def test_grpo_after_distillation_differs_from_grpo_alone_in_model_data_and_learning_rate(monkeypatch):
    monkeypatch.chdir(ROOT)
    alone = flat(asdict(script("qwen_gsm8k/algorithms").config_of(["grpo"]).config))
    after = flat(asdict(load("ppo_trainer", [], "examples/qwen_distillation/then_grpo.yaml").config))
    others = ("trainer.", "critic.", "reward_model.")  # names of the run, and roles that there are not
    different = {key for key in alone if alone[key] != after[key] and not key.startswith(others)}
    assert different == {
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.actor.optim.lr",
        "data.train_files",
        "data.val_files",
    }
