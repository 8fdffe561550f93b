"""`strop convert trl`: scripts and commands of TRL become the same run here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strop.cli import dispatch
from strop.config.compose import load
from strop.config.openrlhf.convert import Conversion
from strop.config.schema import ROOTS as SCHEMAS
from strop.config.schema.reflect import keys
from strop.config.trl.convert import convert_trl
from strop.config.trl.table import ALL, ARGUMENTS, COMBINED, MISSING

ROOTS = {"ppo": "ppo_trainer", "sft": "sft_trainer", "rm": "rm_trainer", "dpo": "dpo_trainer"}
SCRIPT = """
from peft import LoraConfig
import trl

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
def by_length(completions, **columns):
    return [-abs(20 - len(text)) for text in completions]
args = trl.GRPOConfig(
    output_dir="out", per_device_train_batch_size=16, gradient_accumulation_steps=2,
    steps_per_generation=4, num_generations=8, num_iterations=2, max_completion_length=256,
    learning_rate=1e-5, beta=0.04, loss_type="dr_grpo", scale_rewards=False, bf16=True, max_steps=200,
    epsilon_high=0.28, lr_scheduler_type="cosine", warmup_ratio=0.1, report_to="wandb", logging_steps=1,
    temperature=read_temperature(), nonsense=3,
)
trainer = trl.GRPOTrainer(
    MODEL, by_length, args=args, train_dataset=rows(), peft_config=LoraConfig(r=32, task_type="CAUSAL_LM"),
)
raise SystemExit("the script was executed")
"""


def keys_of(conversion: Conversion) -> dict[str, object]:
    return {override.key: override.value for override in conversion.overrides}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_of_grpo_becomes_the_same_run(script: Path):
    """32 completions per update, 64 per generation, twice over: 4 updates per step."""
    conversion = convert_trl([str(script)])
    found = keys_of(conversion)
    expected = {
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B-Instruct",
        "actor_rollout_ref.model.lora_rank": 32,
        "actor_rollout_ref.model.lora_alpha": 8,
        "data.train_batch_size": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 16,
        "actor_rollout_ref.actor.ppo_epochs": 2,
        "trainer.total_training_steps": 50,
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.kl_loss_coef": 0.04,
        "actor_rollout_ref.actor.clip_ratio_low": 0.2,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "actor_rollout_ref.actor.optim.weight_decay": 0.0,
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1,
        "actor_rollout_ref.actor.fsdp_config.dtype": "bfloat16",
        "algorithm.adv_estimator": "grpo",
        "algorithm.compat": "trl",
        "trainer.logger": ["console", "file", "wandb"],
    }
    assert {key: found[key] for key in expected} == expected
    reasons = {name: reason for name, _, reason in conversion.unmapped}
    assert reasons["temperature"] == "its value is known only when the script runs"
    assert "no such argument" in reasons["nonsense"]
    text = conversion.render()
    assert "strop.grpo('Qwen/Qwen2.5-0.5B-Instruct', train=rows(), reward=by_length, **keys)" in text


@pytest.mark.parametrize(
    "words",
    [
        "grpo --model_name_or_path m --use_vllm --top_k 20 --loss_type vespo --vespo_k_pos 3 --save_strategy no",
        "rloo --model_name_or_path m --num_generations 4 --reward_clip_range (-1,1)",
        "sft --model_name_or_path m --use_peft --load_in_4bit --packing --completion_only_loss false --max_length 64",
        "dpo --model_name_or_path m --loss_type ipo --truncation_mode keep_end --fp16",
        "kto --model_name_or_path m --per_device_train_batch_size 4 --use_peft --precompute_ref_log_probs",
        "reward --model_name_or_path m --eval_strategy steps --eval_steps 10 --warmup_steps 5",
    ],
)
def test_what_a_command_becomes_composes(words: str):
    """Every key exists and every value has its type."""
    conversion = convert_trl(words.split())
    loaded = load(ROOTS[conversion.verb], conversion.arguments())
    assert loaded.config.trainer.total_epochs == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sft --eval_strategy epoch --save_strategy epoch", ("after_each_epoch", "after_each_epoch")),
        ("sft --eval_strategy steps", (10, 500)),
        ("sft --eval_strategy steps --logging_steps 3 --save_steps 7", (3, 7)),
        ("sft --eval_strategy steps --eval_steps 0.25 --save_steps 0.1 --max_steps 50", (13, 5)),
        ("sft --save_steps 0.1", (None, None)),
        ("grpo --save_strategy epoch --eval_strategy epoch", (None, None)),
        ("grpo --save_strategy best --eval_strategy no", (None, None)),
    ],
)
def test_how_often_a_run_validates_and_saves(words: str, expected: tuple[object, object]):
    """Without eval_steps transformers takes logging_steps (TRL: 10); a number below 1 is a share of the run."""
    conversion = convert_trl(words.split())
    found = keys_of(conversion)
    assert (found.get("trainer.test_freq"), found.get("trainer.save_freq")) == expected
    told = {name for name, _, _ in conversion.unmapped}
    for what, frequency in zip(("eval", "save"), expected, strict=True):
        dropped = frequency is None and f"--{what}_" in words and f"--{what}_strategy no" not in words
        assert dropped == bool(told & {f"{what}_strategy", f"{what}_steps"})


def test_values_that_switch_something_off(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(
        "SFTTrainer('m', args=SFTConfig(max_length=None, max_grad_norm=0, report_to=['none']), "
        "eval_dataset=held_out, peft_config=LoraConfig())"
    )
    conversion = convert_trl([str(path)])
    config = load("sft_trainer", conversion.arguments()).config
    assert config.data.truncation == "error" and "max_length" in {name for name, _, _ in conversion.unmapped}
    assert config.optim.clip_grad > 1e6
    assert config.trainer.logger == load("sft_trainer").config.trainer.logger
    assert (config.model.lora_rank, config.model.lora_alpha) == (8, 8)
    assert "strop.sft('m', val=held_out, **keys)" in conversion.render()


def test_arguments_of_the_chat_template_stay_a_mapping(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text("GRPOTrainer('m', f, args=GRPOConfig(chat_template_kwargs={'enable_thinking': False}))")
    in_words = ["grpo", "--chat_template_kwargs", '{"enable_thinking": false}']
    for command in ([str(path)], in_words):
        config = load("ppo_trainer", convert_trl(command).arguments()).config
        assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}


def test_the_file_of_a_command_is_read(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "model_name_or_path: m\nlearning_rate: 2e-4\nuse_peft: true\nlora_r: 4\nbeta: 0.5\nseed:\n"
    )
    words = ["dpo", "--config", str(path), "--beta", "0.2", "--num_processes", "4"]
    conversion = convert_trl(words)
    loaded = load("dpo_trainer", conversion.arguments())
    config = loaded.config
    assert loaded.notices == []
    assert (config.model.path, config.optim.lr, config.model.lora_rank, config.loss.beta) == (
        "m",
        2e-4,
        4,
        0.2,
    )
    reasons = {name: reason for name, _, reason in conversion.unmapped}
    assert "trainer.n_gpus_per_node" in reasons["num_processes"] and "config" not in reasons
    for text, message in (("- 1\n", "arguments and values, got list"), ("a: [\n", "is not YAML")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            convert_trl(words)
    with pytest.raises(ValueError, match="does not exist"):
        convert_trl(["dpo", "--config", "missing.yaml"])


def test_validation_samples_as_training_does():
    words = ["grpo", "--eval_strategy", "steps", "--temperature", "0.7", "--num_generations", "8"]
    config = load("ppo_trainer", convert_trl(words).arguments()).config
    sampled = config.actor_rollout_ref.rollout.val_kwargs
    assert (sampled.do_sample, sampled.temperature, sampled.n) == (True, 0.7, 8)
    assert not config.trainer.val_before_train
    fewer = keys_of(convert_trl([*words, "--num_generations_eval", "2", "--eval_on_start"]))
    assert fewer["actor_rollout_ref.rollout.val_kwargs.n"] == 2 and "trainer.val_before_train" not in fewer


def test_the_loss_of_rloo_is_a_sum_over_tokens():
    """TRL takes the log-prob of the whole completion: long ones weigh more than in a mean over tokens."""
    once = convert_trl(["rloo"])
    assert keys_of(once)["actor_rollout_ref.actor.loss_agg_mode"] == "seq-mean-token-sum"
    assert "clips the ratio of a whole completion" not in once.render()
    assert "clips the ratio of a whole completion" in convert_trl(["rloo", "--num_iterations", "2"]).render()


def test_order_and_length_of_supervised_rows():
    """transformers shuffles; shuffle_dataset only does so once more, before. A reward model never sees cut pairs."""
    assert load("sft_trainer", convert_trl(["sft"]).arguments()).config.data.shuffle
    assert keys_of(convert_trl(["grpo", "--shuffle_dataset", "false"]))["data.shuffle"] is False
    reward = convert_trl(["reward"])
    assert load("rm_trainer", reward.arguments()).config.data.truncation == "error"
    assert "longer than max_length" in reward.render() and "set loss.margin=true" in reward.render()


def test_a_chat_template_of_another_model_is_not_taken_for_jinja():
    conversion = convert_trl(["sft", "--chat_template_path", "Qwen/Qwen3-0.6B"])
    assert "data.chat_template" not in keys_of(conversion)
    assert "chat_template_path" in {name for name, _, _ in conversion.unmapped}
    assert keys_of(convert_trl(["sft", "--chat_template_path", "a.jinja"]))["data.chat_template"] == "a.jinja"


def test_losses_of_dpo_with_weights():
    found = keys_of(convert_trl(["dpo", "--loss_type", "sigmoid", "sft", "--loss_weights", "1.0", "0.2"]))
    assert found["loss.type"] == "dpo"
    assert found["loss.nll_coef"] == 0.2
    averaged = keys_of(convert_trl(["dpo", "--loss_type", "sigmoid_norm"]))
    assert (averaged["loss.type"], averaged["loss.length_normalized"]) == ("dpo", True)


def test_kto_is_dpo_with_the_loss_of_labels():
    words = ["kto", "--beta", "0.2", "--undesirable_weight", "1.5", "--gradient_accumulation_steps", "2"]
    conversion = convert_trl(words)
    config = load("dpo_trainer", conversion.arguments()).config
    loss = config.loss
    assert (loss.type, loss.beta, loss.desirable_weight, loss.undesirable_weight) == ("kto", 0.2, 1.0, 1.5)
    data = config.data
    assert (data.prompt_key, data.response_key, data.label_key) == ("prompt", "completion", "label")
    assert (data.train_batch_size, data.shuffle, data.truncation) == (16, False, "right")
    assert conversion.unmapped == []
    apo = convert_trl(["kto", "--loss_type", "apo_zero_unpaired", "--train_sampling_strategy", "random"])
    assert [name for name, _, _ in apo.unmapped] == ["loss_type"]
    assert load("dpo_trainer", apo.arguments()).config.data.shuffle


def test_every_argument_of_trl_is_known():
    """1.16.0: each has a key, or a reason why not."""
    lines = Path(__file__).with_name("trl_arguments.tsv").read_text().splitlines()
    unknown = []
    for line in lines[1:]:
        trainer, name = line.split("\t")
        assert trainer in ALL
        single = any(row.name == name and trainer in row.trainers for row in ARGUMENTS)
        if not single and name not in COMBINED and name not in MISSING:
            unknown.append(line)
    assert unknown == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import trl\n", "builds no trainer of TRL"),
        ("SFTTrainer('m')\nDPOTrainer('m')\n", "several trainers"),
        ("GRPOTrainer(\n", "cannot be parsed|can be parsed"),
        ("GRPOTrainer('m', f, args=GRPOConfig(num_generations=3))\n", "num_generations=3 does not divide"),
        ("GRPOTrainer('m', f, args=GRPOConfig(loss_type='dapoo'))\n", "Did you mean 'dapo'"),
        ("GRPOTrainer('m', f, args=GRPOConfig(epsilon='big'))\n", "epsilon must be a number"),
        ("GRPOTrainer('m', f, args, rows)\n", "write those after the first 2 by name"),
    ],
)
def test_a_script_that_cannot_be_converted_says_why(text: str, message: str, tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        convert_trl([str(path)])


def test_the_command_line_prints_it(script: Path, capsys: pytest.CaptureFixture):
    assert dispatch(["convert", "trl", str(script)]) == 0
    assert "# Arguments without equivalent" in capsys.readouterr().out
    assert dispatch(["convert", "trl", "--", "trl", "sft", "--learning_rate=2e-4"]) == 0
    assert "optim.lr=0.0002" in capsys.readouterr().out
    with pytest.raises(ValueError, match="got: train"):
        dispatch(["convert", "trl", "train"])


def test_the_keys_of_the_porting_page_exist():
    page = (Path(__file__).parents[2] / "docs/porting_trl.md").read_text()
    known = [key.path for root in ROOTS.values() for key in keys(SCHEMAS[root])]
    checked = 0
    for line in page.splitlines():
        cells = line.strip("|").split("|")
        if not line.startswith("| ") or len(cells) != 3:
            continue
        for name in re.findall(r"`((?:[a-z_0-9]+\.)+[a-z_]+)", cells[2]):
            if not name.startswith("strop."):
                checked += 1
                assert any(path == name or path.endswith(f".{name}") for path in known), name
    assert checked > 35
