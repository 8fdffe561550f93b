"""`strop check` with files: everything that would stop a run later is said now."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig

from strop.config.compose import load
from strop.config.schema.model import ModelConfig
from strop.config.schema.rollout import RolloutConfig, SpeculationConfig
from strop.config.schema.trainer import TrainerConfig
from strop.data.files import open_rows
from strop.data.make import write
from strop.data.selection import select_rows
from strop.preflight import device_checks, model_checks
from strop.preflight.examine import examine, main, require
from tests.config.test_seeds import COMMAND


def examined(overrides, *more):
    return examine(load("ppo_trainer", [*overrides, *more]))


def errors(report):
    return {finding.key: finding.message for finding in report.findings if finding.level == "error"}


def warnings(report):
    return {finding.key: finding.message for finding in report.findings if finding.level == "warning"}


def test_a_sound_run_is_ready_and_explained(overrides):
    report = examined(overrides)
    assert report.ok, errors(report)
    assert report.plan.steps_per_epoch == 8 and report.plan.total_steps == 4
    assert "advantage grpo(score)" in report.objective
    assert {role.name: role.exists for role in report.roles}["critic"] is False
    assert "arithmetic (64 rows)" in report.data["data sources"]


def test_the_command_of_the_documents_passes_against_a_small_file(task, capsys):
    files = {"train": task / "data/train.parquet", "test": task / "data/test.parquet"}
    assert main("ppo_trainer", [word.format(**files) for word in COMMAND]) == 0
    said = capsys.readouterr().out
    assert "ready to run" in said and "off-policy" in said
    assert "is not on this machine" in said  # the model is not here, which is no reason to refuse


def test_json_for_machines(overrides, capsys):
    assert main("ppo_trainer", [*overrides, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True and report["plan"]["sequences_per_step"] == 32 and report["versions"]["torch"]


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ("data.train_files=/nowhere/train.parquet", "data.train_files", ["/nowhere/train.parquet"]),
        ("actor_rollout_ref.model.path=/nowhere/model", "actor_rollout_ref.model.path", ["/nowhere/model"]),
        ("data.max_prompt_length=3", "data.train_files", ["max_prompt_length=3", "longest has 4"]),
        ("data.prompt_key=promt", "data.train_files", ["promt", "prompt"]),
        ("data.train_batch_size=65", "data.train_batch_size", ["65", "64"]),
        (
            "data.gen_batch_size=72 algorithm.filter_groups.enable=true",
            "data.gen_batch_size",
            ["72 rows per step", "64"],
        ),
        (
            "custom_reward_function.path=/nowhere/reward.py",
            "custom_reward_function.path",
            ["The Python file '/nowhere/reward.py' does not exist"],
        ),
        (
            "critic.enable=true critic.model.path=/nowhere/critic",
            "critic.model.path",
            ["/nowhere/critic does not exist"],
        ),
        (
            "reward_model.enable=true reward_model.model.path=/nowhere/judge",
            "reward_model.model.path",
            ["/nowhere/judge does not exist"],
        ),
        (
            "algorithm.pretrain_files=/nowhere/texts.jsonl",
            "algorithm.pretrain_files",
            ["/nowhere/texts.jsonl"],
        ),
        ("algorithm.gdpo_reward_weights=[1,2]", "algorithm.gdpo_reward_weights", ["2 weights for 1 parts"]),
    ],
)
def test_what_would_fail_later_fails_now(overrides, change, key, words):
    more = ["actor_rollout_ref.actor.ppo_mini_batch_size=1"] if "65" in change else []
    found = errors(examined(overrides, *change.split(), *more))
    assert key in found, found
    for word in words:
        assert word in found[key]


def test_a_model_that_the_native_engine_samples_wrongly_is_refused(overrides, tmp_path):
    config = {"model_type": "diffllama", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = f"actor_rollout_ref.model.hf_config_path={tmp_path}"
    found = errors(examined(overrides, other))
    assert "differ by up to" in found["actor_rollout_ref.rollout.name"], found
    assert "Set it to hf" in found["actor_rollout_ref.rollout.name"], found
    found = errors(examined(overrides, other, "actor_rollout_ref.rollout.name=hf"))
    assert "actor_rollout_ref.rollout.name" not in found


def reward_file(tmp_path: Path, body: str) -> str:
    file = tmp_path / "reward.py"
    file.write_text(body)
    return f"custom_reward_function.path={file}"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (
            "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1 / 0\n",
            "ZeroDivisionError",
        ),
        ("def compute_score(solution_str):\n    return 'good'\n", "'good'"),
        ("def compute_score(solution_str):\n    return {'acc': 1}\n", "score"),
        ("def compute_score(solution_str):\n    return float('nan')\n", "nan"),
        ("async def compute_score(solution_str):\n    raise KeyError('deep')\n", "KeyError"),
        ("import sys\ndef compute_score(solution_str):\n    sys.exit(0)\n", "SystemExit"),
        ("import time\ndef compute_score(solution_str):\n    time.sleep(600)\n", "limit of 1 seconds"),
    ],
)
def test_one_call_of_the_reward_function_per_data_source(overrides, tmp_path, body, word):
    timeout = f"reward_model.timeout={1 if 'sleep' in body else 60}"
    found = errors(examined(overrides, reward_file(tmp_path, body), timeout))
    assert word in found["reward of arithmetic"], found


def test_an_evaluation_names_the_key_of_a_missing_reward_file(tmp_path):
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": "1+1=",
            "reward_model": {"ground_truth": "2"},
            "responses": ["2"],
        }
    ]
    write(rows, tmp_path / "answers.parquet")
    own = "custom_reward_function.path=/nowhere/reward.py"
    found = errors(examine(load("evaluation", [f"data.path={tmp_path}/answers.parquet", own])))
    assert found == {"custom_reward_function.path": found["custom_reward_function.path"]}, found
    assert found["custom_reward_function.path"].startswith(
        "The Python file '/nowhere/reward.py' does not exist"
    )


def test_responses_that_cannot_be_scored(tmp_path, capsys):
    """An error if that is all of them, as in the run; a warning about a data source. A run scores all at once."""
    row = {"data_source": "arithmetic", "reward_model": {"ground_truth": "2"}, "responses": ["2"]}
    file = tmp_path / "rows.jsonl"

    def said(*rows):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return main("evaluation", [f"data.path={file}"]), " ".join(capsys.readouterr().out.split())

    mine = {**row, "data_source": "mine"}
    for bad, words in (
        (mine, "No rule scorer knows the data source 'mine'"),
        ({**row, "responses": [2]}, "The response is int, not text"),
        ({**row, "responses": []}, "No row has a response"),
    ):
        code, text = said(bad, bad)
        assert code == 1 and "error data.path: " in text and words in text, text
        assert examine(load("evaluation", [f"data.path={file}"])).ok
    code, text = said(row, mine)
    assert code == 0 and "warning reward of mine: ValueError: No rule scorer" in text, text
    assert "warning" not in said(row, {**row, "responses": [2]})[1]


def test_a_reward_file_that_exits_while_it_is_imported(overrides, tmp_path):
    found = errors(
        examined(
            overrides,
            reward_file(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args(['--x'])\n"),
        )
    )
    assert "fails while it is imported: SystemExit" in found["custom_reward_function.path"], found


def test_what_a_good_reward_function_returned_is_told(overrides, tmp_path):
    body = "async def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {'score': True, 'length': 3}\n"
    report = examined(overrides, reward_file(tmp_path, body))
    assert report.ok
    assert report.data["reward of arithmetic"].startswith("score 1.0, length 3 for 'The preflight asks ")


def test_values_that_the_algorithm_reads_and_no_scorer_reports(overrides, tmp_path):
    """A run would end at its first step, after sampling."""
    body = "def compute_score(solution_str):\n    return {'score': 1.0, 'format': 0.5}\n"
    file = reward_file(tmp_path, body)
    metric, parts = "algorithm.filter_groups.metric", "algorithm.gdpo_reward_keys"
    filtered = [file, "algorithm.filter_groups.enable=true"]
    found = warnings(examined(overrides, *filtered, f"{metric}=accuracy"))
    assert found[metric].startswith("the scorer of arithmetic reports format, score, not 'accuracy'")
    assert metric in warnings(examined(overrides, *filtered, f"{metric}=acc"))
    dapo = "reward_model.reward_manager=dapo"
    assert metric not in warnings(examined(overrides, *filtered, dapo, f"{metric}=acc"))
    for known in ("score", "seq_reward", "format", "null"):
        assert metric not in warnings(examined(overrides, *filtered, f"{metric}={known}"))
    assert metric not in warnings(examined(overrides, file, f"{metric}=accuracy"))
    gdpo = [file, "algorithm.adv_estimator=gdpo"]
    assert "not 'style'" in warnings(examined(overrides, *gdpo, f"{parts}=[format,style]"))[parts]
    assert parts not in warnings(examined(overrides, *gdpo, f"{parts}=[format,score]"))
    penalty = ["reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=2"]
    logged = [*gdpo, *penalty, f"{parts}=[overlong_reward]"]
    assert parts in warnings(examined(overrides, *logged))
    assert parts not in warnings(examined(overrides, *logged, "reward_model.overlong_buffer.log=true"))


@pytest.mark.parametrize("key", ["default_local_dir", "rollout_data_dir", "validation_data_dir"])
@pytest.mark.parametrize("below", ["", "/deep/run"])
def test_a_folder_that_cannot_be_one(overrides, tmp_path, key, below):
    (tmp_path / "taken").write_text("")
    found = errors(examined(overrides, f"trainer.{key}={tmp_path}/taken{below}"))
    assert f"{tmp_path}/taken is a file" in found[f"trainer.{key}"], found


@pytest.mark.parametrize(("name", "said"), [("link/run", "link leads nowhere"), ("n" * 300, "name too long")])
def test_a_folder_that_cannot_be_made(overrides, tmp_path, name, said):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    found = errors(examined(overrides, f"trainer.default_local_dir={tmp_path}/{name}"))
    assert said in found["trainer.default_local_dir"], found


def test_an_address_for_copies_that_no_library_knows(overrides):
    found = errors(examined(overrides, "trainer.default_hdfs_dir=nosuch://bucket/run"))
    assert "Protocol not known: nosuch" in found["trainer.default_hdfs_dir"], found


@pytest.mark.parametrize("key", ["actor_rollout_ref.model.path", "critic.model.path"])
def test_weights_that_were_cut_are_found_without_loading_any(overrides, task, tmp_path, key):
    shutil.copytree(task / "model", tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    found = errors(examined(overrides, f"{key}={tmp_path}/cut", "critic.enable=true"))
    assert set(found) == {key} and f"{file} is damaged or incomplete: it has 5000 bytes" in found[key], found
    file.unlink()
    found = errors(examined(overrides, f"{key}={tmp_path}/cut", "critic.enable=true"))
    assert set(found) == {key} and f"The folder {tmp_path}/cut holds no weights" in found[key], found


def test_a_generation_config_that_is_no_object_is_found_without_loading_weights(overrides, task, tmp_path):
    shutil.copytree(task / "model", tmp_path / "odd")
    (tmp_path / "odd" / "generation_config.json").write_text("[2]")
    key = "actor_rollout_ref.model.path"
    found = errors(examined(overrides, f"{key}={tmp_path}/odd", "algorithm.adv_estimator=grpo"))
    assert set(found) == {key} and f"{tmp_path}/odd/generation_config.json cannot be read" in found[key], (
        found
    )


def test_sequences_longer_than_the_model(overrides):
    found = errors(examined(overrides, "data.max_response_length=100"))
    assert "sequences of 108 tokens" in found["actor_rollout_ref.rollout.max_model_len"], found
    assert "64 positions" in found["actor_rollout_ref.rollout.max_model_len"], found
    assert examined(
        overrides, "data.max_response_length=100", "actor_rollout_ref.rollout.max_model_len=64"
    ).ok


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (["actor_rollout_ref.model.lora_rank=100000"], "actor_rollout_ref.model.lora_rank"),
        (["algorithm.adv_estimator=gae", "critic.model.lora_rank=33"], "critic.model.lora_rank"),
    ],
)
def test_a_rank_of_adapters_over_every_matrix(overrides, more, key):
    """The model has a hidden size of 32; a rank of 100,000 took more than a minute to build."""
    found = errors(examined(overrides, *more))
    assert list(found) == [key]
    assert "hidden size is 32" in found[key] and "Use at most 32" in found[key]
    assert examined(overrides, "actor_rollout_ref.model.lora_rank=32").ok


def test_an_architecture_that_nobody_knows(overrides, task, tmp_path):
    shutil.copytree(task / "model", tmp_path / "odd")
    settings = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps(settings | {"model_type": "oddity"}))
    found = errors(examined(overrides, f"actor_rollout_ref.model.path={tmp_path}/odd"))
    assert "oddity" in found["actor_rollout_ref.model.path"], found


def test_a_run_that_would_hardly_learn_is_warned_of(overrides):
    report = examined(
        overrides, "trainer.critic_warmup=10", "actor_rollout_ref.actor.optim.lr_warmup_steps=100"
    )
    found = {finding.key: finding.message for finding in report.findings}
    assert report.ok
    assert "nothing is trained before that step" in found["trainer.critic_warmup"]
    assert (
        "the run has 4 steps: lr=0.001 is never reached"
        in found["actor_rollout_ref.actor.optim.lr_warmup_steps"]
    )


def test_a_rule_is_not_asked_to_compare_with_nothing(overrides, tmp_path):
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "1+1="}],
            "reward_model": {"answer": "2"},
        }
    ] * 8
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "unanswered.parquet")
    found = errors(examined(overrides, f"data.train_files={tmp_path}/unanswered.parquet"))
    assert (
        "no ground truth" in found["reward of openai/gsm8k"]
        and "data.label_key" in found["reward of openai/gsm8k"]
    ), found


def test_a_data_source_without_scorer_is_named(overrides, tmp_path):
    rows = [
        {
            "data_source": "riddles",
            "prompt": [{"role": "user", "content": "1+1="}],
            "reward_model": {"ground_truth": "2"},
        }
    ] * 8
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "riddles.parquet")
    found = errors(examined(overrides, f"data.train_files={tmp_path}/riddles.parquet"))
    assert "custom_reward_function" in found["reward of riddles"]


def test_a_loop_of_ones_own_may_score_what_no_scorer_knows(overrides, tmp_path):
    row = {
        "data_source": "riddles",
        "prompt": [{"role": "user", "content": "1+1="}],
        "agent_name": "math_expression",
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 8), tmp_path / "riddles.parquet")
    loops = "actor_rollout_ref.rollout.agent.agent_loop_config_path=examples/math_expression/loops.yaml"
    report = examined(overrides, f"data.train_files={tmp_path}/riddles.parquet", loops)
    assert report.ok, errors(report)
    assert any("'math_expression' must set episode.score" in finding.message for finding in report.findings)


def test_tools_that_no_row_asks_for_are_pointed_out(overrides, tmp_path):
    key = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
    assert "does not exist" in examined(overrides, f"{key}={tmp_path}/tools.yaml").errors[0].message
    (tmp_path / "add.py").write_text('def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n')
    (tmp_path / "tools.yaml").write_text("tools: [{function: add.py:add}]\n")
    report = examined(overrides, f"{key}={tmp_path}/tools.yaml")
    assert report.ok and any("agent_name=tool_agent" in finding.message for finding in report.findings)
    asked = examined(
        overrides,
        f"{key}={tmp_path}/tools.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    )
    assert asked.ok and not any("agent_name=tool_agent" in finding.message for finding in asked.findings)
    assert asked.data["reward"] == "1 x score + 1 x turns + 1 x tools"


def test_agents_that_do_not_exist_are_refused(overrides, tmp_path):
    unknown = examined(overrides, "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agnet")
    assert "Did you mean 'tool_agent'" in unknown.errors[0].message
    (tmp_path / "loops.yaml").write_text("- {name: mine, _target_: nowhere.to.be.found}\n")
    listed = examined(
        overrides, f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path}/loops.yaml"
    )
    assert "loop 1: The module 'nowhere.to.be' cannot be imported" in listed.errors[0].message
    (tmp_path / "interactions.yaml").write_text(
        "interaction: [{class_name: strop.agents.interaction.Interactions}]\n"
    )
    key = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
    assert "generate_response" in examined(overrides, f"{key}={tmp_path}/interactions.yaml").errors[0].message
    rows = [
        {
            "prompt": "1+1=",
            "data_source": "arithmetic",
            "agent_name": "my_agent",
            "reward_model": {"ground_truth": "2"},
        }
    ] * 8
    write(rows, tmp_path / "rows.parquet")
    named = examined(overrides, f"data.train_files={tmp_path}/rows.parquet")
    assert "Unknown agent loop 'my_agent'" in named.errors[0].message


def test_files_of_data_sets_and_samplers_are_opened(overrides, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Rows: ...\n")
    named = examined(overrides, f"data.sampler.class_path={file}", "data.sampler.class_name=Row")
    assert [finding.key for finding in named.errors] == ["data.sampler.class_path"]
    assert "defines no 'Row'. Did you mean 'Rows'?" in named.errors[0].message
    missing = examined(overrides, "data.custom_cls.path=nowhere.py", "data.custom_cls.name=Rows")
    assert any("'nowhere.py' does not exist" in str(finding) for finding in missing.errors)


def test_a_run_refuses_to_start(overrides):
    with pytest.raises(ValueError, match="there is no folder"):
        require(load("ppo_trainer", [*overrides, "actor_rollout_ref.model.path=/nowhere/model"]))


def test_a_draft_model_must_have_the_vocabulary_of_the_policy(tmp_path):
    for name, size in (("policy", 96), ("same", 96), ("other", 101)):
        LlamaConfig(vocab_size=size).save_pretrained(tmp_path / name)
    model = ModelConfig(path=str(tmp_path / "policy"))

    def found(name, enable=True):
        speculation = SpeculationConfig(enable=enable, draft_model=str(tmp_path / name))
        return model_checks.draft_findings("rollout", RolloutConfig(speculation=speculation), model)

    assert found("same") == [] and found("other", enable=False) == []
    (other,) = found("other")
    assert other.key == "rollout.speculation.draft_model"
    assert "101 tokens, the policy one of 96" in other.message
    (missing,) = found("nowhere")
    assert "nowhere" in missing.message


def test_mtp_needs_a_head_in_the_files_of_the_policy(tmp_path):
    LlamaConfig(num_hidden_layers=2).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    rollout = RolloutConfig(speculation=SpeculationConfig(enable=True, mtp=True))
    (without,) = model_checks.draft_findings("rollout", rollout, model)
    assert without.key == "rollout.speculation.mtp" and "(llama) has no weights of one" in without.message
    names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    head = {f"model.layers.2.{name}.weight": torch.zeros(1) for name in names}
    save_file(head, tmp_path / "model.safetensors")
    assert model_checks.draft_findings("rollout", rollout, model) == []


@pytest.mark.parametrize(
    "answer, message, level",
    [
        (None, "this machine has none", "warning"),
        ("NVIDIA A100, 8.0", "NVIDIA A100 has 8.0", "error"),
        ("NVIDIA H200, 9.0", None, None),
    ],
)
def test_fp8_needs_a_device_that_has_it(monkeypatch, answer, message, level):
    monkeypatch.setattr(device_checks, "_query_gpu", lambda fields: answer)
    rollout = RolloutConfig(quantization="fp8")
    found = device_checks.quantization_findings("rollout", rollout, "auto")
    assert [finding.key for finding in found] == ["rollout.quantization"] * (message is not None)
    assert all(message in finding.message and finding.level == level for finding in found)
    cache = RolloutConfig(kv_cache_dtype="fp8")
    for device, missing in (("auto", answer is not None and message), ("cuda", message), ("cpu", None)):
        found = device_checks.quantization_findings("rollout", cache, device)
        assert [finding.key for finding in found] == ["rollout.kv_cache_dtype"] * bool(missing)
        assert all("rollout.kv_cache_dtype=auto" in finding.message for finding in found)


def test_without_a_gpu_fp8_is_checked_and_does_not_run(monkeypatch, overrides, capsys):
    """`strop check` may run on a machine that only starts jobs; a run needs the GPU here."""
    monkeypatch.setattr(device_checks, "_query_gpu", lambda fields: None)
    key = "actor_rollout_ref.rollout.quantization"
    assert main("ppo_trainer", [*overrides, f"{key}=fp8"]) == 0
    said = capsys.readouterr().out
    assert f"warning  {key}: fp8 needs a GPU" in said and "ready to run" in said
    with pytest.raises(ValueError, match="but this machine has none"):
        require(load("ppo_trainer", [*overrides, f"{key}=fp8"]))
    assert main("ppo_trainer", [*overrides, f"{key}=fp8", "trainer.device=cpu"]) == 1


def test_a_gpu_that_is_demanded_and_not_here_is_noted(monkeypatch, overrides):
    monkeypatch.setattr(device_checks, "_query_gpu", lambda fields: None)
    report = examined(overrides, "trainer.device=cuda")
    assert report.ok and any("no GPU here" in notice for notice in report.notices)
    assert not any("GPU" in notice for notice in examined(overrides, "trainer.device=auto").notices)
    monkeypatch.setattr(device_checks, "_query_gpu", lambda fields: "NVIDIA H200, 143771")
    assert not any("GPU" in notice for notice in examined(overrides, "trainer.device=cuda").notices)


def test_a_gpu_that_does_not_tell_its_memory_is_no_error(monkeypatch):
    """nvidia-smi answers so where GPU and host share their memory (DGX Spark, Jetson)."""
    monkeypatch.setattr(device_checks, "_query_gpu", lambda fields: "NVIDIA GB10, [N/A]")
    assert device_checks.local_device(TrainerConfig(device="cuda")) is None
    assert device_checks.local_device(TrainerConfig()).is_cpu
    assert not device_checks.quantization_findings("rollout", RolloutConfig(quantization="fp8"), "cuda")


def test_a_template_with_a_token_that_the_model_does_not_know(overrides, task, tmp_path):
    shutil.copytree(task / "model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_tokens(["<user>"])
    tokenizer.chat_template = "<user>" + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "model")
    found = errors(examined(overrides, f"actor_rollout_ref.model.path={tmp_path}/model"))
    told = "'<user>' of the tokenizer is token 17, but the model knows 17 tokens"
    assert told in found["actor_rollout_ref.model.path"]


OWN_ROWS = """
class Rows:
    def __init__(self, files, tokenizer, config):
        self.texts = open(files).read().split()
    def __len__(self):
        return len(self.texts)
    def __getitem__(self, row):
        return {"prompt": self.texts[row], "data_source": "arithmetic", "reward_model": {"ground_truth": "3"}}
"""


def test_a_data_set_of_ones_own_reads_files_of_any_kind(overrides, tmp_path):
    (tmp_path / "mine.py").write_text(OWN_ROWS)
    (tmp_path / "sums.txt").write_text("1+2=\n" * 16)
    own = (f"data.custom_cls.path={tmp_path}/mine.py", "data.custom_cls.name=Rows", "data.val_files=null")
    report = examined(overrides, *own, f"data.train_files={tmp_path}/sums.txt")
    assert report.ok and report.plan.steps_per_epoch == 2, errors(report)
    assert report.data["data sources"] == "arithmetic (16 rows)" and "reward of arithmetic" in report.data
    (tmp_path / "sums.txt").write_text("1+2=\n" * 15 + "1+2+3+4+5+6+7=\n")
    found = errors(examined(overrides, *own, f"data.train_files={tmp_path}/sums.txt"))
    assert "1 of 16 prompts are over data.max_prompt_length=8" in found["data.train_files"]
    found = errors(examined(overrides, *own, f"data.train_files={tmp_path}/nowhere.txt"))
    assert "FileNotFoundError" in found["data.train_files"]


EMPTY_PROMPTS = """
from strop.types import Prompt

class Rows(list):
    def __init__(self, files, tokenizer, config):
        for row in range(16):
            ids = [] if row in (5, 9) else [3, 4]
            self.append(Prompt(index=row, ids=ids, messages=[], data_source="arithmetic", ground_truth="3"))
"""


def test_finished_prompts_without_tokens_are_found(overrides, tmp_path):
    (tmp_path / "mine.py").write_text(EMPTY_PROMPTS)
    own = (f"data.custom_cls.path={tmp_path}/mine.py", "data.custom_cls.name=Rows", "data.val_files=null")
    found = errors(examined(overrides, *own))
    assert "2 prompts have no tokens at all; the first: row 5" in found["data.train_files"]


def test_only_rows_that_the_run_reads_are_checked(overrides, task, tmp_path):
    """Rows behind data.train_max_samples and files of weight 0 are not; a mixture repeats small files."""
    good = pyarrow.parquet.read_table(task / "data/train.parquet").to_pylist()
    long = {**good[0], "prompt": [{"role": "user", "content": "1+2+3+4+5+6+7="}], "data_source": "unknown"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*good, long]), tmp_path / "long.parquet")
    file = f"data.train_files={tmp_path}/long.parquet"
    assert "1 of 65 prompts" in errors(examined(overrides, file))["data.train_files"]
    first = ("data.train_max_samples=32", "data.shuffle=false")
    report = examined(overrides, file, *first)
    assert report.ok and report.plan.steps_per_epoch == 4 and "unknown" not in report.data["data sources"]
    both = f"data.train_files=[{task}/data/train.parquet,{tmp_path}/long.parquet]"
    report = examined(overrides, both, "data.prompt_probs=[1,0]")
    assert report.ok and report.plan.steps_per_epoch == 8
    both = f"data.train_files=[{task}/data/train.parquet,{task}/data/test.parquet]"
    config = load("ppo_trainer", [*overrides, both, "data.prompt_probs=[0.95,0.05]"]).config
    drawn = select_rows(config.data, open_rows(config.data.train_files), "train")
    report = examined(overrides, both, "data.prompt_probs=[0.95,0.05]")
    assert len(drawn) > 200 and report.plan.steps_per_epoch == len(drawn) // 8
