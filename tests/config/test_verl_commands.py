"""Every example command of verl (January 2026) passes the checks of a configuration, or is refused for a known
reason, which docs/porting_verl.md names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest
from transformers import PreTrainedConfig

from strop.backends.megatron.fits import problems
from strop.catalog import ENGINES
from strop.config import derived
from strop.config.compose import load
from strop.config.rules import check
from strop.config.rules.megatron import megatron_roles
from strop.config.schema.ppo import PpoConfig
from strop.config.typed import ConfigError

from .verl_commands import MODELS, VerlCommand, load_commands

COMMANDS = load_commands()
PAGE = Path(__file__).parents[2] / "docs/porting_verl.md"


def first_error(command: VerlCommand) -> str:
    """The key of the first error; empty if there is none."""
    try:
        loaded = load(command.root, command.overrides())
    except ConfigError as problem:
        return str(problem).partition(":")[0]
    found = [
        finding.key for finding in check(loaded) if finding.level == "error" and not finding.about_machine
    ]
    config = loaded.config
    if isinstance(config, PpoConfig):
        for role in megatron_roles(config):
            sizes = cast(PreTrainedConfig, MODELS[command.model].configuration())
            found += [f"{role.key}.{key}" for key, _ in problems(sizes, role.settings)]
        engine = derived.engine_name(config.actor_rollout_ref.rollout)
        unknown = engine == "vllm" and not command.model.startswith("qwen")  # see rollout/vllm/images.py
        if command.images and (unknown or not ENGINES.entry(engine).facts["images"]):
            found.append("actor_rollout_ref.rollout.name")
    return found[0] if found else ""


def test_commands_pass_or_are_refused_for_the_known_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM and SGLang are taken as installed, as they are for those who come from verl.
    monkeypatch.setattr(derived, "missing_library", lambda rollout: None)
    found = {command.script: first_error(command) for command in COMMANDS}
    expected = {command.script: command.refused_by for command in COMMANDS}
    assert found == expected, "Change verl_commands.tsv and the table of docs/porting_verl.md with it."


def test_the_primary_file_of_megatron_means_its_strategy() -> None:
    arguments = ["actor_rollout_ref.model.path=m", "data.train_files=t.parquet"]
    by_file = load("ppo_megatron_trainer", arguments)
    by_key = load("ppo_trainer", [*arguments, "actor_rollout_ref.actor.strategy=megatron"])
    assert by_file.tree() == by_key.tree()


def test_the_page_names_every_refused_command() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Commands of verl that do not run")[2]
    named = set(re.findall(r"`([\w./-]+\.sh)`", text.partition("\n## ")[0]))
    refused = {command.script.removeprefix("examples/") for command in COMMANDS if command.refused_by}
    assert refused <= named, refused - named
    scripts = {command.script.removeprefix("examples/") for command in COMMANDS}
    assert not (named & scripts) - refused, "these commands pass"
