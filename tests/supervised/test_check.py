"""Bad input of supervised training: said before any weights are loaded, counted, and nothing else is lost. And OpenRLHF's commands."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from strop.cli import dispatch
from strop.config.compose import load
from strop.preflight.examine import examine
from strop.quickstart.tiny_model import tiny_tokenizer
from tests import forked
from tests.ppo.runs import metrics
from tests.supervised.runs import lines, make_task, settings, sums, train

TALK = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("check"))


def errors(verb: str, overrides: list[str], *more: str) -> str:
    return "\n".join(map(str, examine(load(f"{verb}_trainer", [*overrides, *more])).errors))


def with_rows(small: Path, folder: Path, verb: str, bad: list[dict[str, Any]]) -> list[str]:
    file = lines(folder / "rows.jsonl", [*sums(32, seed=2), *bad])
    return [*settings(small, folder / "run", verb), f"data.train_files={file}", "data.val_files=null"]


@pytest.mark.parametrize(
    ("verb", "bad", "said"),
    [
        ("rm", {"prompt": "1+1=", "chosen": "2", "rejected": "2"}, r"'chosen' and 'rejected' say the same"),
        ("dpo", {"prompt": "1+1=", "chosen": "2", "rejected": ""}, r"column 'rejected' is empty"),
        ("dpo", {"prompt": "1+1=", "chosen": None, "rejected": "3"}, r"column 'chosen' is empty"),
        ("sft", {"prompt": "1+1=", "response": ""}, r"column 'response' is empty"),
        ("sft", {"prompt": "1+1=", "response": 7}, r"must be text, or a list of messages"),
        (
            "sft",
            {"prompt": TALK[::-1], "response": "2"},
            r"begins with 'assistant', but it must begin with 'user'",
        ),
        ("rm", {"prompt": TALK[1:], "chosen": "2", "rejected": "3"}, r"begins with 'assistant'"),
        (
            "sft",
            {"prompt": [{"role": "user"}], "response": [{"role": "tool", "content": "2"}]},
            r"no assistant turn",
        ),
    ],
)
def test_a_bad_row_is_named_and_stops_the_run_or_is_counted(small, tmp_path, verb, bad, said):
    base = with_rows(small, tmp_path, verb, [bad])
    found = errors(verb, base)
    assert re.search(said, found) and "rows.jsonl, row 32" in found
    assert "1 of 33 rows cannot be learned from" in found and "data.bad_rows=skip" in found
    with pytest.raises(ValueError, match=r"data\.bad_rows=skip"):
        train(verb, base, "data.train_batch_size=33")
    report = examine(load(f"{verb}_trainer", [*base, "data.bad_rows=skip"]))
    assert report.ok and any("1 of 33 rows are left out" in str(finding) for finding in report.findings)
    steps = train(verb, base, "data.bad_rows=skip", "data.train_batch_size=33", "trainer.total_epochs=1")
    assert steps[1]["train/skipped_rows"] == 1 and steps[1]["train/loss"] > 0


def test_a_text_without_tokens_is_a_bad_row(small, tmp_path):
    base = with_rows(small, tmp_path, "sft", [{"prompt": "", "response": ""}])
    base += ["data.pretrain_mode=true", "data.response_key=null", "data.apply_chat_template=false"]
    assert "row 32 has no text" in errors("sft", base)
    assert not errors("sft", base, "data.bad_rows=skip")


def test_margins_must_be_numbers(small, tmp_path):
    base = with_rows(
        small, tmp_path, "rm", [{"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": "large"}]
    )
    assert "column 'margin' is 'large', not a number" in errors("rm", base)


def test_rows_that_are_too_long(small, tmp_path):
    base = [*settings(small, tmp_path, "sft"), "data.max_length=6"]
    assert "sequences are over data.max_length=6 (the longest has 7 tokens). Set it to 7" in errors(
        "sft", base
    )
    report = examine(load("sft_trainer", [*base, "data.truncation=right"]))
    assert report.ok and any("will be cut (right)" in str(finding) for finding in report.findings)
    assert "leaves nothing to learn of any" in errors(
        "sft", base, "data.max_length=4", "data.truncation=right"
    )
    long = with_rows(small, tmp_path, "sft", [{"prompt": "1+1=1+1=", "response": "2"}] * 3)
    report = examine(load("sft_trainer", [*long, "data.max_length=7", "data.truncation=right"]))
    assert report.ok and any("nothing to learn is left of 3." in str(finding) for finding in report.findings)
    with pytest.raises(ValueError, match=r"No row could be trained on in 5 steps.* data\.max_length=4"):
        train("sft", base, "data.max_length=4", "data.truncation=right", "data.val_files=null")


LONG = {"prompt": "1+2+3+4+5+6+7+8=", "response": "36", "chosen": "36", "rejected": "35+1"}
TABLE = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
ROTARY = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
LONGROPE = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "pad_token_id": 0, "original_max_position_embeddings": 16},
    **{"rope_parameters": {**ROTARY, "original_max_position_embeddings": 16}},
}


def of_family(folder: Path, family: str, sizes: dict[str, Any]) -> str:
    """A folder with a model of another family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    ids = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"model.path={folder}"


@pytest.mark.parametrize("verb", ["sft", "rm", "dpo"])
def test_rows_longer_than_the_table_of_positions(small, tmp_path, verb):
    base = [*with_rows(small, tmp_path, verb, [LONG]), of_family(tmp_path / "model", "gpt2", TABLE)]
    found = errors(verb, base)
    assert re.search(r"has sequences of (19|21) tokens .* the model has 16 positions", found), found
    assert not errors(verb, base, "data.max_length=16", "data.truncation=left")
    assert not errors(verb, base, f"model.path={small}/model")


@pytest.mark.parametrize("verb", ["sft", "rm", "dpo"])
def test_rows_for_which_longrope_has_different_angles(small, tmp_path, verb):
    base = [*with_rows(small, tmp_path, verb, [LONG]), of_family(tmp_path / "model", "phi3", LONGROPE)]
    alone = "data.micro_batch_size_per_gpu=1"
    found = errors(verb, base)
    assert "sequences over 16 tokens (original_max_position_embeddings) have other angles" in found, found
    assert f"or {alone}" in found
    assert not errors(verb, base, "data.max_length=16", "data.truncation=left")
    assert not errors(verb, base, alone)
    assert errors(verb, base, alone, "data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=4096")
    straddling = {**LONG, "prompt": LONG["prompt"][2:]}  # 17 tokens and 19
    base = with_rows(small, tmp_path, verb, [straddling])
    found = errors(verb, base, f"model.path={tmp_path}/model", alone)
    assert ("have other angles" in found) == (verb == "dpo"), found  # which does not read the last token
    assert f"or {alone}" not in found


def test_an_update_without_rows_is_counted(small, tmp_path):
    base = with_rows(small, tmp_path, "sft", [{"prompt": "1", "response": ""}] * 16)
    more = ("data.bad_rows=skip", "data.shuffle=false", "data.train_batch_size=16", "trainer.total_epochs=1")
    more += (f"data.val_files={tmp_path}/rows.jsonl", "trainer.val_before_train=false")
    first, second, third = train("sft", base, *more).values()
    assert first["train/loss"] > 0 and second["train/loss"] > 0
    assert third["train/skipped_rows"] == 16 and third["train/empty_updates"] == 1
    assert third["train/total_rows"] == 32 and third["val/skipped_rows"] == 16


def test_a_file_without_a_usable_row(small, tmp_path):
    file = lines(tmp_path / "rows.jsonl", [{"prompt": "1", "response": ""}] * 16)
    base = [*settings(small, tmp_path, "sft"), f"data.train_files={file}", "data.bad_rows=skip"]
    assert "none of the 16 rows can be learned from" in errors("sft", base)


def test_templates(small, tmp_path):
    base = settings(small, tmp_path, "sft")
    # Earlier turns change when a turn is added, as thoughts do: rows of one turn can be trained on.
    rewriting = "{% for m in messages %}{% if loop.last and m['role'] == 'assistant' %}!{% endif %}"
    rewriting += "{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    talks = [*base, f'data.chat_template="{rewriting}"', "data.multiturn.enable=true", "data.val_files=null"]
    single = lines(tmp_path / "single.jsonl", [{"messages": TALK}] * 16)
    report = examine(load("sft_trainer", [*talks, f"data.train_files={single}"]))
    assert report.ok and any("not prefix-stable" in str(finding) for finding in report.findings)
    later = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    several = lines(tmp_path / "several.jsonl", [{"messages": [*TALK, *later]}] * 16)
    assert "rewrites earlier turns when message 3" in errors("sft", talks, f"data.train_files={several}")
    # No {% generation %} markers and no generation prompt: what the assistant says is found by rendering twice.
    roles = "{% for m in messages %}{{ m['role'] }}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    report = examine(load("sft_trainer", [*base, f'data.chat_template="{roles}"']))
    assert report.ok and any("ignores add_generation_prompt" in str(finding) for finding in report.findings)
    assert examine(load("sft_trainer", base)).findings == []
    bare = tiny_tokenizer()
    bare.chat_template = None
    make_task(tmp_path)
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    bare.save_pretrained(tmp_path / "model")
    assert "has no chat template" in errors("sft", settings(tmp_path, tmp_path / "run", "sft"))
    assert not errors("sft", settings(tmp_path, tmp_path / "run", "sft"), "data.apply_chat_template=false")


HASHED = (
    "{% for m in messages %}#{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("of_the_hub", [False, True])
@pytest.mark.parametrize("as_file", [False, True])
def test_the_rows_of_the_preflight_have_the_template_of_the_run(
    small, tmp_path, monkeypatch, of_the_hub, as_file
):
    (tmp_path / "hashed.jinja").write_text(HASHED)
    base = settings(small, tmp_path / "run", "sft")
    if of_the_hub:
        home = tmp_path / "models--org--tiny"
        shutil.copytree(small / "model", home / "snapshots" / "abc")
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text("abc")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        base.append("model.path=org/tiny")
    loaded = load("sft_trainer", base)
    loaded.config.model.custom_chat_template = str(tmp_path / "hashed.jinja") if as_file else HASHED
    report = examine(loaded)
    assert report.ok, report.errors
    assert report.datasets["train"].chat.tokenizer.chat_template == HASHED


@pytest.mark.parametrize("verb", ["sft", "rm", "dpo"])
def test_a_tokenizer_of_another_model(small, tmp_path, verb):
    shutil.copytree(small / "model", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    told = json.loads(file.read_text())
    told["model"]["vocab"] |= {digit: 200 + int(digit) for digit in "0123456789"}
    file.write_text(json.dumps(told))
    found = errors(verb, settings(small, tmp_path / "run", verb), f"model.tokenizer_path={tmp_path}/other")
    assert "data.train_files has the token id 209, but the model knows 17 tokens" in found, found


def test_folders_with_the_wrong_head(small, tmp_path, overrides):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    train("rm", settings(small, tmp_path / "rm", "rm"), "trainer.total_training_steps=1")
    judge = tmp_path / "rm" / "global_step_1" / "model" / "huggingface"
    for verb in ("sft", "dpo"):
        found = errors(verb, settings(small, tmp_path / "run", verb), f"model.path={judge}")
        assert (
            "it holds a classifier (LlamaForSequenceClassification), but a language model is needed" in found
        )
    for key in ("model.path", "ref.path", "model.tokenizer_path"):  # one error each
        found = errors("dpo", settings(small, tmp_path / "run", "dpo"), f"{key}=nowhere/")
        assert re.fullmatch(f"{key}: (there is no folder nowhere|nowhere/ does not exist)[.]", found), found
    for verb in ("sft", "dpo"):
        found = errors(
            verb, settings(small, tmp_path / "run", verb), f"model.lora_adapter_path={small}/model"
        )
        assert found == "model.lora_adapter_path: holds no adapter: there is no adapter_config.json in it."
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_labels=3,
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "three")
    tiny_tokenizer().save_pretrained(tmp_path / "three")
    found = errors("rm", settings(small, tmp_path / "run", "rm"), f"model.path={tmp_path}/three")
    assert "has 3 labels, but a reward is one number" in found
    judged = [*overrides, "reward_model.enable=true"]
    for path, said in ((f"{small}/model", "without a score head"), (f"{tmp_path}/three", "has 3 labels")):
        found = "\n".join(
            map(str, examine(load("ppo_trainer", [*judged, f"reward_model.model.path={path}"])).errors)
        )
        assert said in found and "reward_model.model.path" in found
    assert examine(load("ppo_trainer", [*judged, f"reward_model.model.path={judge}"])).ok


@pytest.mark.parametrize(
    ("verb", "more", "said"),
    [
        ("rm", ["loss.type=sigmoid"], "logsigmoid"),
        ("rm", ["loss.margin=true"], "has no column 'margin'"),
        ("sft", ["data.input_template=Question:"], "the prompt would be lost"),
        ("dpo", ["data.input_template='{question}: {}'"], "is not a format string with one {}"),
        (
            "dpo",
            ["loss.type=logexp"],
            "compares the scores of a reward model. Choose one of dpo, ipo, kto, orpo, simpo",
        ),
        ("dpo", ["loss.label_smoothing=0.5"], "Set it below 0.5"),
        ("sft", ["data.micro_batch_size=4", "data.micro_batch_size_per_gpu=3"], "Keep only the latter"),
        (
            "dpo",
            ["data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=100", "data.max_length=60"],
            "Set it to 120 or more",
        ),
        ("rm", ["model.aux_loss_coef=0.1"], "no load-balancing loss"),
        ("sft", ["trainer.test_freq=weekly"], "expected a number of steps or after_each_epoch"),
        ("sft", ["trainer.val_only=true", "data.val_files=null"], "val_only=true needs files"),
        ("sft", ["trainer.logger=wandbb"], "unknown tracker"),
        ("sft", ["data.train_batch_size=65"], "the files have only 64"),
        ("sft", ["data.response_key=answer"], "no column 'answer'"),
        ("sft", ["trainer.default_local_dir="], "trainer.default_local_dir: empty"),
        ("sft", ["model=Qwen/Qwen2.5-0.5B"], r"Could not find .*instance model\.path=DIR"),
        ("sft", ["model.path=/nowhere"], "no folder|does not exist"),
    ],
)
def test_settings_that_cannot_work(small, tmp_path, verb, more, said):
    try:
        found = errors(verb, settings(small, tmp_path, verb), *more)
    except ValueError as problem:
        found = str(problem)
    assert re.search(said, found), found


def test_settings_without_effect_are_said(small, tmp_path):
    more = ["loss.type=ipo", "loss.label_smoothing=0.1", "trainer.critic_warmup=3"]
    more.append("trainer.checkpoint.save_contents=[optimizer]")
    more += ["trainer.best_metric=val/loss", "data.val_files=null", "optim.total_training_steps=4"]
    report = examine(load("dpo_trainer", [*settings(small, tmp_path, "dpo"), *more]))
    said = "\n".join(map(str, report.findings))
    assert report.ok and "loss.label_smoothing: 0.1 has no effect: ipo has no such term" in said
    assert "trainer.critic_warmup: no effect in supervised training" in said
    assert "trainer.checkpoint.save_contents: ['optimizer']: checkpoints have no weights" in said
    assert "trainer.best_metric: val/loss has no effect, because no step is validated" in said
    assert "4, but the run has 8 steps: later ones keep the lowest learning rate of cosine" in said


def test_validating_alone(small, tmp_path):
    steps = train("sft", settings(small, tmp_path, "sft"), "trainer.val_only=true")
    assert set(steps) == {0} and not list(tmp_path.glob("global_step_*"))


@pytest.mark.parametrize("verb", ["sft", "rm", "dpo"])
def test_openrlhf_commands_run(small, tmp_path, verb, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = {
        "sft": ["--input_key", "prompt", "--output_key", "response", "--input_template", "{}"],
        "rm": [
            "--prompt_key",
            "prompt",
            "--loss",
            "sigmoid",
            "--apply_chat_template",
            "--micro_train_batch_size",
            "4",
        ],
        "dpo": [
            "--prompt_key",
            "prompt",
            "--beta",
            "0.2",
            "--label_smoothing",
            "0.1",
            "--apply_chat_template",
        ],
    }
    command = [
        f"train_{verb}",
        "--pretrain",
        f"{small}/model",
        "--dataset",
        f"{small}/train.jsonl",
        "--max_epochs",
        "2",
    ]
    command += [
        "--train_batch_size",
        "32",
        "--learning_rate",
        "1e-3",
        "--save_path",
        f"{tmp_path}/out",
        "--max_len",
        "32",
    ]
    command += ["--eval_dataset", f"{small}/val.jsonl"]
    assert dispatch(["openrlhf", *command, *flags[verb]]) == 0
    steps = metrics(tmp_path / "out")
    assert set(steps) >= {0, 1, 2, 3, 4} and steps[4]["val/loss"] < steps[0]["val/loss"]
    saved = json.loads(
        (tmp_path / "out" / "global_step_4" / "model" / "huggingface" / "config.json").read_text()
    )
    assert saved["architectures"] == [
        "LlamaForSequenceClassification" if verb == "rm" else "LlamaForCausalLM"
    ]


def test_the_verbs_from_a_shell(small, tmp_path):
    command = ["sft", *settings(small, tmp_path, "sft"), "trainer.logger=console"]
    done = forked.run("strop.cli", command, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout.splitlines()
    assert said[0].startswith("plan: ") and "total steps 8" in said[0]
    assert any(line.startswith("train_files: 64 rows; 64 read:") for line in said)
    assert [line.split(" ")[0] for line in said if line.startswith("step:")] == [
        f"step:{step}" for step in range(9)
    ]
    last = said[-1]
    assert "perf/throughput:" in last and "perf/eta_s:0" in last and "val/loss:" in last
    broken = forked.run("strop.cli", [*command, "data.response_key=anwser"], tmp_path)
    assert (
        broken.returncode == 1 and "no column 'anwser'" in broken.stderr and "Traceback" not in broken.stderr
    )
