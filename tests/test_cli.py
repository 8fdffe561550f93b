"""The front door, as a person uses it: exit codes, one message, no traceback, and nothing heavy imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strop.config.commandline import parse


def strop(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "strop.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "STROP_DEBUG": "0", **environment},
    )


def test_help_lists_the_verbs():
    done = strop("--help")
    assert done.returncode == 0
    for verb in (
        "ppo",
        "generate",
        "eval",
        "merge",
        "serve-rm",
        "serve-train",
        "check",
        "config",
        "convert",
        "quickstart",
        "data",
    ):
        assert f"\n  {verb} " in done.stdout


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("rm", "strop config show rm_trainer"),
        ("check", "usage: strop check ppo|sft|"),
        ("plan", "--gpus-per-node"),
        ("data", "--from"),
    ],
)
def test_every_verb_has_help(verb, words):
    done = strop(verb, "--help")
    assert done.returncode == 0 and words in done.stdout and done.stderr == ""


def test_modules_of_the_current_folder_are_found(tmp_path):
    """The installed program is a script in another folder, which Python puts on its path instead."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "strop"
    program.write_text("import sys\nfrom strop.cli import main\nsys.exit(main())\n")
    (tmp_path / "my_parts.py").write_text("def right(text, answer):\n    return text == answer\n")
    (tmp_path / "json.py").write_text("1 / 0\n")
    (tmp_path / "mine.py").write_text(
        "from my_parts import right\ndef compute_score(completion, answer):\n    return right(completion, answer)\n"
    )
    row = {"prompt": "1+1=", "answer": "2", "data_source": "sums", "reward_model": {}, "responses": ["2"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    words = ["eval", "data.path=rows.jsonl", "custom_reward_function.path=mine.py"]
    done = subprocess.run(
        [sys.executable, str(program), *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["run.yaml", "--json", "--help"]])
def test_the_help_of_a_check_has_its_command(words):
    done = strop("check", "sft", *words)
    assert done.returncode == 0 and "strop config show sft_trainer" in done.stdout
    assert "usage: strop check sft [FILE.yaml]" in done.stdout and "[--json]" in done.stdout


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_the_modules_of_verl_have_help(word, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["data.train_batch_size=8", word])
    assert ended.value.code == 0
    assert "strop config explain KEY" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pppo"], ["no verb 'pppo'", "'ppo'"]),
        (["check"], ["strop check ppo"]),
        (["check", "ppo", "data.train_fils=x"], ["data.train_files"]),
        (["check", "ppo", "--multirun"], ["sweeps"]),
        (["check", "ppo", "--data.train_files", "x"], ["without dashes"]),
        (["check", "ppo", "--config-name"], ["needs a value"]),
        (["config", "show", "ppo_trainr"], ["ppo_trainer"]),
        (["config", "explain", "data.shufle"], ["data.shuffle"]),
        (["convert", "openrlhf"], ["strop convert openrlhf --"]),
        (
            ["convert", "openrlhf", "--", "train_ppo_ray", "--actor_lerning_rate", "1"],
            ["actor_learning_rate"],
        ),
    ],
)
def test_mistakes_get_one_message_and_exit_code_1(arguments, words):
    done = strop(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("strop: error: ")
    assert "Traceback" not in done.stderr + done.stdout
    for word in words:
        assert word in done.stderr


def test_debug_shows_where_it_came_from():
    assert "Traceback" in strop("pppo", STROP_DEBUG="1").stderr


def test_check_speaks_json():
    done = strop("check", "ppo", "data.train_batch_size=0", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["ok"] is False
    assert report["findings"][0]["key"] == "data.train_batch_size"
    done = strop("check", "ppo", "--json")
    keys = {finding["key"] for finding in json.loads(done.stdout)["findings"]}
    assert "actor_rollout_ref.model.path" in keys


def test_a_configuration_error_is_told_without_torch():
    code = (
        "import sys\nfrom strop.cli import main\n"
        "codes = [main(['--help']), main(['check', 'ppo']), main(['config', 'explain', 'data.seed'])]\n"
        "heavy = [m for m in ('torch', 'transformers', 'numpy', 'pyarrow') if m in sys.modules]\n"
        "assert codes == [0, 1, 0] and not heavy, (codes, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_module_form_answers_like_the_verb():
    done = subprocess.run(
        [sys.executable, "-m", "strop.trainer.main_ppo", "data.train_fils=x"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "data.train_files" in done.stderr and "Traceback" not in done.stderr


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "strop", "chek"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode and "Did you mean 'check'?" in done.stderr, done.stderr
