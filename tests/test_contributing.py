"""The recipes of CONTRIBUTING.md, followed as they are printed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from strop.agents.parsers.base import Malformed, ToolCall, parser_for
from strop.registry import load_module
from strop.rewards.function import score_response
from tests.ppo.runs import run

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
PLUGINS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = dict(re.findall(r"```\nplugins=\[(\w+\.py)\] ?(.*?)\n```", PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page."""
    folder = tmp_path_factory.mktemp("plugins")
    for name, source in PLUGINS.items():
        (folder / name).write_text(source)
    return folder


@pytest.fixture
def short(overrides: list[str]) -> list[str]:
    """One step of a tiny run."""
    return [
        *overrides,
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    ]


def keys(name: str, plugins: Path) -> list[str]:
    """The keys that the page prints below a file."""
    return [f"plugins=[{plugins / name}]", *COMMANDS[name].replace("\\\n", " ").split()]


def test_every_recipe_has_a_command() -> None:
    assert set(PLUGINS) == {*COMMANDS, "guess.py"} and len(PLUGINS) == 8


def test_an_estimator(short: list[str], plugins: Path) -> None:
    [step] = run(short, *keys("soft_baseline.py", plugins)).values()
    # 0.9 of a positive mean is subtracted, so the mean advantage is a tenth of the mean score.
    assert step["critic/advantages/mean"] == pytest.approx(0.1 * step["critic/score/mean"], abs=0.02)


def test_a_loss(short: list[str], plugins: Path) -> None:
    [step] = run(short, *keys("quadratic_loss.py", plugins)).values()
    assert step["actor/ratio_squared"] == 0.0  # on-policy: the ratio is exactly 1
    assert step["actor/grad_norm"] > 0


def test_a_reward_manager(short: list[str], plugins: Path, tmp_path: Path) -> None:
    reward = tmp_path / "large.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 7\n"
    )
    chosen = [*keys("clipped_manager.py", plugins), f"custom_reward_function.path={reward}"]
    [step] = run(short, *chosen).values()
    assert step["critic/score/max"] == step["critic/score/min"] == 1.0


def test_a_scorer(plugins: Path) -> None:
    load_module(str(plugins / "last_number.py"))
    assert score_response("my_task/easy", "3 and 4 are 7", "7") == 1.0
    assert score_response("my_task/easy", "none", "7") == 0.0


def test_an_environment(short: list[str], plugins: Path) -> None:
    [(place, rest)] = re.findall(r"```\n(actor_rollout_ref\S+=gym:)(guess.*?)\n```", PAGE, re.DOTALL)
    sizes = ["data.max_prompt_length=32", "data.max_response_length=30"]
    [step] = run(short, *f"{place}{plugins}/{rest}".split(), *sizes).values()
    assert step["agent/episodes"] == 32 and step["agent/failed"] == 0
    assert step["agent/assistant_turns/max"] == 2  # limit=2 ended it


def test_an_engine(short: list[str], plugins: Path) -> None:
    [step] = run(short, *keys("counting_engine.py", plugins)).values()
    assert step["rollout/requests"] == 8
    assert step["training/rollout_logprobs_diff_max"] < 1e-4


def test_a_logger(short: list[str], plugins: Path) -> None:
    steps = run(short, *keys("list_logger.py", plugins))
    [(step, metrics)] = load_module(str(plugins / "list_logger.py")).LOGGED
    assert step == 1 and metrics["critic/score/mean"] == steps[1]["critic/score/mean"]


def test_a_tool_format(plugins: Path) -> None:
    load_module(str(plugins / "arrow_format.py"))
    parsed = parser_for("arrow", None).parse('I look.\n-> search {"query": "x"}\n-> search {bad')
    assert parsed.content == "I look."
    call, wrong = parsed.calls
    assert call == ToolCall("search", {"query": "x"})
    assert isinstance(wrong, Malformed) and "invalid JSON" in wrong.why


def test_a_key(tmp_path: Path) -> None:
    """The two insertions of the recipe, in a copy of the package: explained, read, printed."""
    package = tmp_path / "strop"
    shutil.copytree(ROOT / "strop", package, ignore=shutil.ignore_patterns("__pycache__"))
    recipes = re.findall(r"```python\n# in (\S+), class (\w+)(?:, method (\w+))?\n(.*?)```", PAGE, re.DOTALL)
    assert len(recipes) == 2
    for file, owner, method, lines in recipes:
        insert(tmp_path / file, owner, method, lines)
    explained = command(tmp_path, "config", "explain", "trainer.greeting")
    assert "Printed when the run ends." in explained and "hello" in explained
    assert "shared/run_output.py" in explained, "its reader"
    shown = json.dumps(command(tmp_path, "config", "show", "ppo_trainer", "trainer.greeting=bye"))
    assert "greeting: bye" in shown


def insert(file: Path, owner: str, method: str, lines: str) -> None:
    """Put lines at the end of a class's fields, or at the beginning of a method."""
    text = file.read_text()
    start = text.index(f"class {owner}")
    if method:
        place = re.compile(rf"    def {method}\(.*?\n(?=        [^\"\s])(?!        \"\"\")", re.DOTALL)
        found = place.search(text, start)
        assert found is not None
        end = found.end()
    else:
        first = re.compile(r"^    \w+: ", re.MULTILINE).search(text, start)
        assert first is not None
        end = first.start()
    file.write_text(text[:end] + lines + text[end:])


def command(folder: Path, *words: str) -> str:
    """What `strop` of the copied package prints."""
    done = subprocess.run(
        [sys.executable, "-m", "strop.cli", *words],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
