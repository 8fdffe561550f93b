"""What people get wrong, and what machines do to them: one clear message, exit code 1, nothing lost.

Everything here goes through `strop ppo`.
"""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
import time

import pyarrow
import pyarrow.parquet
import pytest

import strop.run.checkpoint.tensor_files as tensor_file
from strop.cli import main
from strop.errors import STOPPED
from strop.ppo.collect import Collector
from tests.ppo.runs import metrics, run, same, weights


@pytest.fixture
def ppo(overrides, capsys):
    """Run `strop ppo`; gives the exit code and what stood on stderr."""

    def call(*more):
        capsys.readouterr()
        code = main(["ppo", *overrides, *more])
        said = capsys.readouterr()
        assert "Traceback" not in said.err + said.out
        call.out = said.out
        return code, said.err

    return call


def refused(answer, *words):
    code, said = answer
    assert code == 1, said
    lines = [line for line in said.splitlines() if line.startswith("strop: error: ")]
    assert len(lines) == 1, said  # one message, not a cascade
    for word in words:
        assert word in lines[0], said


def parquet(path, rows, columns=("data_source", "prompt", "reward_model")):
    table = (
        pyarrow.Table.from_pylist(rows)
        if rows
        else pyarrow.table({name: pyarrow.array([], "string") for name in columns})
    )
    pyarrow.parquet.write_table(table, path)
    return path


def row(content, **more):
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        **more,
    }


def test_an_empty_data_set(ppo, tmp_path):
    file = parquet(tmp_path / "empty.parquet", [])
    refused(ppo(f"data.train_files={file}"), "empty.parquet", "no rows")


def test_a_missing_column(ppo, tmp_path):
    rows = [{"data_source": "arithmetic", "question": "1+1=", "reward_model": {"ground_truth": "2"}}] * 8
    file = parquet(tmp_path / "rows.parquet", rows)
    refused(ppo(f"data.train_files={file}"), "no column 'prompt'", "question", "data.prompt_key")


def test_a_corrupt_file(ppo, task, tmp_path):
    whole = (task / "data" / "train.parquet").read_bytes()
    file = tmp_path / "cut.parquet"
    file.write_bytes(whole[: len(whole) // 2])
    refused(ppo(f"data.train_files={file}"), "cut.parquet")


def test_one_long_prompt_among_thousands_is_found_before_the_run(ppo, tmp_path):
    rows = [row("1+1=") for _ in range(4001)]
    rows[3001] = row("1+1+1+1+1+1=")
    file = parquet(tmp_path / "long.parquet", rows)
    refused(
        ppo(f"data.train_files={file}"), "1 of 4001 prompts", "the longest has 12 tokens", "data.truncation"
    )


def test_a_reward_file_that_does_not_parse(ppo, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def compute_score(solution_str):\n    return 1.0 +\n")
    refused(ppo(f"custom_reward_function.path={file}"), "reward.py", "does not parse", "line 2")


def model_without(task, tmp_path, *names):
    folder = tmp_path / "model"
    shutil.copytree(task / "model", folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True) if "chat_template" in names else None
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in settings.items() if k not in names})
    )
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    return f"actor_rollout_ref.model.path={folder}"


def test_a_tokenizer_without_chat_template(ppo, task, tmp_path):
    model = model_without(task, tmp_path, "chat_template")
    refused(ppo(model), "no chat template", "data.apply_chat_template=false")
    code, said = ppo(model, "data.apply_chat_template=false", "trainer.total_training_steps=1")
    assert code == 0, said


def test_a_tokenizer_without_pad_token_runs_and_says_so(ppo, task, tmp_path):
    code, said = ppo(model_without(task, tmp_path, "pad_token"), "trainer.total_training_steps=1")
    assert code == 0, said
    assert "The tokenizer has no pad token of its own; '<eos>' pads batches" in ppo.out


def test_a_tokenizer_that_cannot_end(ppo, task, tmp_path):
    model = model_without(task, tmp_path, "pad_token", "eos_token")
    code, said = ppo(model, "trainer.total_training_steps=1")
    assert code == 0, said  # the model's files name an end, and the engine stops there
    for name in ("config.json", "generation_config.json"):
        file = tmp_path / "model" / name
        settings = json.loads(file.read_text())
        file.write_text(json.dumps(settings | {"eos_token_id": None}))
    refused(ppo(model), "no end-of-text token", "Set eos_token")


def test_a_nan_loss(ppo, tmp_path, monkeypatch):
    import strop.ppo.update as update

    real = update.policy_loss

    def broken(name, **given):
        found = real(name, **given)
        found.per_token.data[0, 0] = float("nan")
        return found

    monkeypatch.setattr(update, "policy_loss", broken)
    refused(ppo(), "Step 1: The loss is nan", "rows", "nonfinite_step_1")
    assert (tmp_path / "run" / "nonfinite_step_1" / "batch.safetensors").is_file()


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_disk_that_fills_during_a_save(overrides, ppo, tmp_path, monkeypatch, background):
    real = tensor_file.write_file

    def full(path, pieces):
        if "global_step_4" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, pieces)

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "write_file", full)
        answer = ppo(f"actor_rollout_ref.actor.checkpoint.async_save={background}")
        refused(answer, "Step 4 could not be saved", "No space left", "global_step_2")
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert "global_step_2" in left and not [name for name in left if "global_step_4" in name], left
    assert set(metrics(tmp_path / "run")) == {0, 1, 2, 3, 4}  # what was measured is kept
    code, said = ppo()  # there is room again
    assert code == 0, said
    run(overrides, f"trainer.default_local_dir={tmp_path}/whole")
    assert same(weights(tmp_path / "run", 4), weights(tmp_path / "whole", 4))


@pytest.mark.parametrize("part", ["actor/model.safetensors", "trainer.json", "manifest.json"])
def test_a_checkpoint_cut_in_half_gives_way_to_the_one_before(overrides, ppo, tmp_path, part):
    run(overrides)
    whole = weights(tmp_path / "run", 4)
    file = tmp_path / "run" / "global_step_4" / part
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    code, said = ppo()
    assert code == 0, said
    assert "GOING BACK" in said and "step 2" in said and "global_step_4" in said
    assert same(weights(tmp_path / "run", 4), whole)


def test_no_whole_checkpoint_is_not_a_reason_to_start_over_silently(overrides, ppo, tmp_path):
    run(overrides, "trainer.save_freq=4")
    (tmp_path / "run" / "global_step_4" / "manifest.json").write_text("{")
    refused(ppo(), "No checkpoint", "trainer.resume_mode=disable")


def test_an_interrupted_run_goes_on(overrides, ppo, tmp_path, monkeypatch):
    real = Collector.collect

    def interrupted(self, draw, prompts, step, record):
        if step == 4:
            raise KeyboardInterrupt
        return real(self, draw, prompts, step, record)

    closed = []
    close = Collector.close
    with monkeypatch.context() as patch:
        patch.setattr(Collector, "collect", interrupted)
        patch.setattr(Collector, "close", lambda self: (closed.append(1), close(self))[1])
        code, said = ppo()
    assert code == 130 and "interrupted" in said and closed == [1]
    assert set(metrics(tmp_path / "run")) == {0, 1, 2, 3}
    code, said = ppo()
    assert code == 0, said
    run(overrides, f"trainer.default_local_dir={tmp_path}/whole")
    assert same(weights(tmp_path / "run", 4), weights(tmp_path / "whole", 4))


@pytest.mark.slow
def test_ctrl_c_in_a_real_process(overrides, tmp_path):
    long = [*overrides, "trainer.total_training_steps=400", "trainer.save_freq=1", "trainer.test_freq=-1"]
    long += ["trainer.max_actor_ckpt_to_keep=2", "trainer.max_critic_ckpt_to_keep=2"]
    command = [sys.executable, "-m", "strop.cli", "ppo", *long]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 120
    while (
        not (tmp_path / "run" / "global_step_3").exists()
        and process.poll() is None
        and time.time() < deadline
    ):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == STOPPED and "the same command" in said, said
    assert "Traceback" not in said, said
    latest = int((tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text())
    assert not list((tmp_path / "run").glob(".saving_*"))  # a save that had begun was finished
    steps = run(overrides, f"trainer.total_training_steps={latest + 1}", "trainer.test_freq=-1")
    assert {latest, latest + 1} <= set(steps)


def test_an_error_closes_what_was_open(ppo, monkeypatch):
    closed = []
    close = Collector.close
    monkeypatch.setattr(Collector, "close", lambda self: (closed.append(1), close(self))[1])

    def fails(self, *arguments):
        raise ValueError("the engine has left")

    monkeypatch.setattr(Collector, "collect", fails)
    refused(ppo(), "the engine has left")
    assert closed == [1]
