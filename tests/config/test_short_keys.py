"""Keys as keyword arguments: full names, short forms, and what is refused."""

from __future__ import annotations

import pytest

from strop.config.compose import SchemaKeys, load
from strop.config.schema import ROOTS
from strop.config.short_keys import SHORT_FORMS, full_key, overrides


@pytest.mark.parametrize("root", SHORT_FORMS)
def test_every_short_form_stands_for_a_key(root: str) -> None:
    schema = SchemaKeys(ROOTS[root])
    assert [short for short, key in SHORT_FORMS[root].items() if not schema.has(key)] == []


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("steps", "trainer.total_training_steps"),
        ("max_response_length", "data.max_response_length"),
        ("lr", "actor_rollout_ref.actor.optim.lr"),  # not the critic's
        ("rollout.n", "actor_rollout_ref.rollout.n"),
        ("critic.optim.lr", "critic.optim.lr"),
        ("trainer.seed", "trainer.seed"),
        ("data.tokenizer", "data.tokenizer"),
    ],
)
def test_a_name_stands_for_one_key(name: str, key: str) -> None:
    assert full_key("ppo_trainer", name) == key


@pytest.mark.parametrize("root", ["sft_trainer", "rm_trainer", "dpo_trainer"])
def test_the_dtype_of_supervised_training_is_that_of_the_model(root: str) -> None:
    assert full_key(root, "dtype") == "model.fsdp_config.dtype"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("enable", "end of several keys: .*multi_turn.enable.*Write one of them in full"),
        ("max_respons_length", "max_respons_length: no such key. Did you mean data.max_response_length"),
        ("step", "Did you mean 'steps'"),
    ],
)
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        full_key("ppo_trainer", name)


def test_values_reach_the_configuration_as_they_are() -> None:
    settings = {
        "steps": 3,
        "lr": 1e-6,
        "shuffle": False,
        "trainer.experiment_name": "a, b='c' {d}",
        "apply_chat_template_kwargs": {"enable_thinking": False},
        "logger": ["file", "csv"],
        "val_files": None,
    }
    config = load("ppo_trainer", overrides("ppo_trainer", settings)).config
    assert config.trainer.total_training_steps == 3
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.data.shuffle is False
    assert config.trainer.experiment_name == "a, b='c' {d}"
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert config.trainer.logger == ["file", "csv"]


def test_one_key_under_two_names_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer.total_training_steps is set twice.*=3.*=4"):
        overrides("ppo_trainer", {"steps": 3, "trainer.total_training_steps": 4})
