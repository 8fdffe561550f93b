"""A checkpoint or model folder runs none of its code unless the command line says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.config.compose import load
from strop.models.load import load_config, load_tokenizer, resolve
from strop.models.lora import load_adapters
from strop.replay.replay import code_named
from strop.replay.replay import replay as compute_again
from strop.run.checkpoint.store import save
from strop.run.merge.sources import TAKEN_FROM_THE_RUN, read_source
from strop.trainer.main_generation import run as generate
from strop.trainer.main_merge import run as merge
from strop.trainer.main_plan import run as plan
from tests.run.hostile_files import change, hostile_checkpoint, hostile_folder, sign
from tests.supervised.runs import make_task, settings, train

FLAG = "trust_remote_code=true .strop merge: --trust_remote_code"


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code_ran"


def test_a_merge_ignores_what_the_checkpoint_says_about_trust(tmp_path: Path, marker: Path) -> None:
    checkpoint = hostile_checkpoint(tmp_path / "run", marker)
    asked = ["--local_dir", f"{checkpoint}/model", "--target_dir", f"{tmp_path}/out"]
    with pytest.raises(ValueError, match=FLAG):
        merge(asked)
    with pytest.raises(ValueError, match=FLAG):
        merge(["test", *asked[:2], "--test_hf_dir", f"{checkpoint}/model/huggingface"])
    assert not marker.exists() and not (tmp_path / "out").exists()


def test_the_flag_of_a_merge_runs_the_code(tmp_path: Path, marker: Path) -> None:
    """So the tests above would see code that runs."""
    checkpoint = hostile_checkpoint(tmp_path / "run", marker)
    asked = ["--local_dir", f"{checkpoint}/model", "--target_dir", f"{tmp_path}/out"]
    assert merge([*asked, "--trust-remote-code"]) == 0
    assert marker.exists()


def test_a_known_architecture_merges_without_the_code_of_the_folder(tmp_path: Path, marker: Path) -> None:
    checkpoint = hostile_checkpoint(tmp_path / "run", marker, kind="llama")
    assert merge(["--local_dir", f"{checkpoint}/model", "--target_dir", f"{tmp_path}/out"]) == 0
    assert not marker.exists()


def test_a_merge_imports_no_library_that_the_checkpoint_names(
    tmp_path: Path, marker: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = tmp_path / "run" / "global_step_1" / "model" / "huggingface" / "evil.py"
    checkpoint = hostile_checkpoint(tmp_path / "run", marker, kind="llama", external_lib=str(named))
    assert named.is_file()
    assert merge(["--local_dir", f"{checkpoint}/model", "--target_dir", f"{tmp_path}/out"]) == 0
    assert not marker.exists()
    assert (
        f"external_lib={named}, which is not imported here" in caplog.text and "--external_lib" in caplog.text
    )


def test_settings_that_run_code_are_not_taken_from_a_checkpoint(tmp_path: Path, marker: Path) -> None:
    assert not {"trust_remote_code", "external_lib", "patches", "use_liger"} & set(TAKEN_FROM_THE_RUN)
    checkpoint = hostile_checkpoint(tmp_path / "run", marker, external_lib="evil", patches=["evil"])
    found = read_source(f"{checkpoint}/model").settings
    assert (found.trust_remote_code, found.external_lib, found.patches) == (False, None, "auto")


def test_generation_and_the_plan_of_a_hostile_folder(tmp_path: Path, marker: Path) -> None:
    folder = hostile_folder(tmp_path / "model", marker)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
    asked = [
        f"model.path={folder}",
        f"data.path={tmp_path}/rows.jsonl",
        f"data.output_path={tmp_path}/out.parquet",
        "rollout.prompt_length=8",
        "rollout.response_length=4",
        "trainer.device=cpu",
    ]
    with pytest.raises(ValueError, match=FLAG):
        generate(asked)
    with pytest.raises(ValueError, match="evil"):
        plan([f"actor_rollout_ref.model.path={folder}", "--gpu", "h100"])
    assert not marker.exists()


def test_config_and_tokenizer_of_a_hostile_folder(tmp_path: Path, marker: Path) -> None:
    folder = hostile_folder(tmp_path / "model", marker, tokenizer=True)
    with pytest.raises(ValueError, match=FLAG):
        load_config(resolve(str(folder)))
    try:
        load_tokenizer(str(folder))  # transformers may fall back to a class of its own
    except ValueError as error:
        assert "trust_remote_code" in str(error)
    assert not marker.exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_kernels_from_the_hub_are_code_too(tmp_path: Path, marker: Path, key: str) -> None:
    folder = hostile_folder(tmp_path / "model", marker, kind="llama")
    change(folder / "config.json", **{key: "somebody/kernels"})
    with pytest.raises(
        ValueError, match=r"'somebody/kernels', which is code from the hub.*trust_remote_code"
    ):
        load_config(resolve(str(folder)))


def test_an_adapter_that_names_a_module_to_import(tmp_path: Path, marker: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    said = {"peft_type": "LORA", "megatron_config": {"a": 1}, "megatron_core": "evil"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match="sets megatron_config"):
        load_adapters(None, str(tmp_path))  # type: ignore[arg-type] - refused before the model is looked at


def test_a_resumed_run_trusts_its_own_command_line_alone(tmp_path: Path, marker: Path) -> None:
    task = make_task(tmp_path)
    asked = settings(task, tmp_path / "run", "sft")
    train("sft", asked, "trainer.total_training_steps=1", "trainer.save_freq=1")
    checkpoint = tmp_path / "run" / "global_step_1"
    hostile_folder(checkpoint / "model" / "huggingface", marker)
    said: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    evil = str(checkpoint / "model" / "huggingface" / "evil.py")
    said["model"] |= {"trust_remote_code": True, "external_lib": evil, "path": str(Path(evil).parent)}
    said["plugins"] = [evil]
    (checkpoint / "config.json").write_text(json.dumps(said))
    sign(checkpoint)
    more = ["trainer.total_training_steps=2", "trainer.resume_mode=auto"]
    refuse_wrong_states(checkpoint, asked, more)
    assert 2 in train("sft", asked, *more) and not marker.exists()


def refuse_wrong_states(checkpoint: Path, asked: list[str], more: list[str]) -> None:
    """Values of other types in a checkpoint with right checksums."""
    for name, text in (
        ("trainer.json", "[]"),
        ("trainer.json", '{"random": 3}'),
        ("data.json", '"text"'),
        ("model/model.json", "{}"),
        ("model/extra.json", "null"),
    ):
        before = (checkpoint / name).read_text()
        (checkpoint / name).write_text(text)
        sign(checkpoint)
        with pytest.raises(ValueError, match="global_step_1"):
            train("sft", asked, *more)
        (checkpoint / name).write_text(before)
        sign(checkpoint)


# --- replay -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        "plugins=[evil.py]",
        "actor_rollout_ref.model.trust_remote_code=true",
        "critic.model.trust_remote_code=true",
        "reward_model.model.external_lib=evil",
        "custom_reward_function.path=evil.py",
        "reward_manager.module.path=evil.py",
        "data.custom_cls.path=evil.py",
        "data.sampler.class_path=evil.py",
        "actor_rollout_ref.actor.optim.optimizer_impl=evil",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=evil.yaml",
        "actor_rollout_ref.rollout.multi_turn.interaction_config_path=evil.yaml",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=evil.yaml",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.python=/tmp/evil",
        "ray_kwargs.ray_init.runtime_env.pip=evil",
        "reward_model.sandbox_fusion.isolation=limits",
        "actor_rollout_ref.rollout.agent.command='sh -c evil'",
        "actor_rollout_ref.rollout.environment=gym:evil.py:Evil",
        "reward_model.judge.url=http://evil/v1",
        "reward_model.remote_url=http://evil",
        "algorithm.distillation.url=http://evil/v1",
    ],
)
def test_a_replay_finds_the_code_that_a_record_names(setting: str) -> None:
    if setting.startswith("plugins"):
        tree: dict[str, object] = {"plugins": ["evil.py"]}
    else:
        tree = load("ppo_trainer", [setting]).tree()
    key = setting.partition("=")[0]
    assert any(line.startswith(f"{key}=") for line in code_named(tree)), code_named(tree)


def test_the_record_of_a_plain_run_names_no_code() -> None:
    assert code_named(load("ppo_trainer").tree()) == []


def test_a_replay_runs_no_code_of_the_record(tmp_path: Path, marker: Path) -> None:
    evil = hostile_folder(tmp_path / "model", marker) / "evil.py"
    folder = tmp_path / "run" / "recorded" / "step_1"
    folder.mkdir(parents=True)
    (folder / "facts.json").write_text("{}")
    save(folder, 0, {"config": {"plugins": [str(evil)]}})
    with pytest.raises(ValueError, match=r"names code.*plugins=.*evil\.py.*add --trust_code"):
        compute_again(tmp_path / "run", 1)
    assert not marker.exists()
