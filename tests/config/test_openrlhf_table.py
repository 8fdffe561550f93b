"""The table of OpenRLHF flags is complete and agrees with the facts and with the schema."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from strop.config.openrlhf.command import TRAINERS
from strop.config.openrlhf.convert import convert
from strop.config.openrlhf.reverse_rules import REVERSE_RULES
from strop.config.openrlhf.rules import RULES
from strop.config.openrlhf.run_rules import RUN_RULES
from strop.config.openrlhf.table import TRANSFORMS, VERBS, flags_for, load_rows, names_of, rows_of
from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys
from tests.config.openrlhf_commands import (
    COMMANDS,
    sample_words,
)

FACTS = [
    line.split("\t")
    for line in Path(__file__).with_name("openrlhf_flags.tsv").read_text().splitlines()
    if not line.startswith("#")
]

# The parser of single-node train_ppo in 2024, with its defaults.
G1_PARSER = {
    "prompt_data": None, "pretrain_data": None, "pretrain": None, "reward_pretrain": None, "num_episodes": 1,
    "rollout_batch_size": 512, "micro_rollout_batch_size": 8, "max_epochs": 1, "prompt_max_len": 1024, "generate_max_len": 1024,
    "max_len": None, "max_samples": 100000, "max_norm": 1.0, "l2": 0.0, "ptx_coef": 0.05, "eps_clip": 0.2, "value_clip": 0.2,
    "lambd": 0.95, "gamma": 1.0, "micro_train_batch_size": 4, "train_batch_size": 128, "load_checkpoint": False,
    "normalize_reward": False, "top_p": 1.0, "temperature": 1.0, "seed": 42, "local_rank": -1, "zero_stage": 2,
    "gradient_checkpointing": False, "bf16": False, "actor_learning_rate": 1e-6, "critic_learning_rate": 9e-6,
    "kl_target": None, "init_kl_coef": 0.02, "enable_ema": False, "zpg": 1, "adam_offload": False, "actor_init_on_gpu": False,
    "flash_attn": False, "aux_loss_coef": 0.0, "grad_accum_dtype": None, "disable_trace_cache": False,
}  # fmt: skip


def test_no_flag_of_the_fact_sheet_is_left_without_target_or_reason():
    assert len(FACTS) == 406
    for trainer, flat, _, dotted, _ in FACTS:
        known = names_of(TRAINERS[trainer])
        for name in {flat, dotted} - {"-", "REMOVED"}:
            assert name in known, f"{trainer} --{name}"
            for row in known[name]:
                assert row.targets or row.note, f"{trainer} --{name} has neither a key nor a reason"
        if "-" not in (flat, dotted) and dotted != "REMOVED":
            assert dotted in [row.flag for row in known[flat]], f"--{flat} became --{dotted}"


def test_defaults_are_those_of_the_fact_sheet():
    for trainer, flat, flat_default, dotted, dotted_default in FACTS:
        name, text = (flat, flat_default) if dotted == "REMOVED" else (dotted, dotted_default)
        if text == "-" or "datetime" in text or name == "train_split":
            continue
        expected = (
            float("inf")
            if "inf" in text
            else ast.literal_eval(text[4:-1] if text.startswith("int(") else text)
        )
        for row in names_of(TRAINERS[trainer])[name]:
            if row.id not in (dotted, flat):
                continue
            default = row.default(3)
            if row.type == "words":
                default = default[0]
            elif row.type in ("pair", "band") and expected is not None:
                expected = list(expected)
            assert default == expected, (
                f"{trainer} --{name}: {default!r} in the table, {expected!r} in the fact sheet"
            )


def test_every_flag_of_the_2024_parser_is_known_with_its_default():
    assert len(G1_PARSER) == 42
    for name, default in G1_PARSER.items():
        for row in names_of("ppo")[name]:
            assert row.default(1) == default or (default == {"switch": False}.get(row.type)), name
            assert row.targets or row.note


@pytest.mark.parametrize("verb", VERBS)
def test_every_spelling_of_every_flag_converts(verb):
    trainer = {"ppo": "train_ppo_ray"}.get(verb, f"train_{verb}")
    for name, rows in names_of(verb).items():
        group = ["--n_samples_per_prompt", "2"] if "estimator" in name else []
        conversion = convert([trainer, *sample_words(rows[0], name), *group])
        told = {f for override in conversion.overrides for f in override.flag.split()} | {
            flag for flag, _, _ in conversion.unmapped
        }
        assert f"--{name}" in told, f"--{name} vanished without a word"
        assert all(reason for _, _, reason in conversion.unmapped)


@pytest.mark.parametrize("verb", VERBS)
def test_every_target_exists_in_the_schema(verb):
    known = {key.path for key in keys(ROOTS[f"{verb}_trainer"])}
    for row in rows_of(verb).values():
        for key in row.targets:
            assert key in known or key.rpartition(".")[0] in known, f"--{row.id} -> {key}"


@pytest.mark.parametrize("verb", VERBS)
def test_a_default_is_written_out_exactly_where_ours_differs(verb):
    # Names of folders and runs are no part of a run's meaning; a cap nobody reaches is none.
    harmless = {
        "trainer.project_name",
        "trainer.max_ckpt_mem_gb",
        "trainer.best_metric",
        "data.train_max_samples",
    }
    ours = {key.path: key.default for key in keys(ROOTS[f"{verb}_trainer"])}
    for row in rows_of(verb).values():
        default = row.default(3)
        if row.rule or not row.flag or default is None:
            continue
        for key in set(row.targets) - harmless:
            if key in ours:
                differs = TRANSFORMS[row.transform].from_openrlhf(default) != ours[key]
                assert differs == (row.when in ("always", "say")), (
                    f"--{row.id} {default} vs {key} {ours[key]}"
                )


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_written_out_for_a_command_differs_from_our_default(command):
    conversion = convert([command])
    ours = {key.path: key.default for key in keys(ROOTS[f"{conversion.verb}_trainer"])}
    same = [o.key for o in conversion.overrides if o.implied and o.value == ours.get(o.key)]
    assert not same


def test_table_is_consistent():
    rules = {row.rule for row in load_rows() if row.rule}
    assert rules == set(RULES | RUN_RULES) == set(REVERSE_RULES)
    for row in load_rows():
        assert row.rule or not row.targets or row.transform in TRANSFORMS
        assert row.flag or row.older
        assert row.when in ("given", "always", "say", "-")


def test_a_key_knows_its_flags():
    assert flags_for("ppo", "critic.optim.lr") == ("critic.adam.lr",)
    assert flags_for("sft", "optim.min_lr_ratio") == ("lr_scheduler", "min_lr_ratio")
    assert flags_for("ppo", "actor_rollout_ref.rollout.top_k") == ()


def test_imports_nothing_heavy():
    code = (
        "import sys, strop.config.openrlhf.convert, strop.config.openrlhf.reverse as r; "
        "strop.config.openrlhf.convert.convert(['train_ppo_ray']); r.to_openrlhf({}); "
        "print([m for m in ('torch', 'hydra', 'omegaconf', 'transformers', 'numpy') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


@pytest.mark.parametrize("verb", ["ppo", "sft", "rm", "dpo"])
def test_a_flag_sets_a_key_with_effect_or_is_reported(verb):
    """Convert every flag by itself: no key without effect is set, and no flag disappears."""
    from strop.config.openrlhf.convert import ROOT_OF_VERB, convert

    inert = {key.path for key in keys(ROOTS[ROOT_OF_VERB[verb]]) if key.inert}
    trainer = "train_ppo_ray" if verb == "ppo" else f"train_{verb}"
    for row in rows_of(verb).values():
        if row.type != "switch":
            continue
        conversion = convert([trainer, f"--{row.names[0]}"])
        assert not [override.key for override in conversion.overrides if override.key in inert], row.names[0]
    offload = convert(["train_ppo_ray", "--ref_reward_offload"])
    assert "reward_model.model.fsdp_config.param_offload=true" in offload.arguments()
    frozen = convert(["train_ppo_ray", "--freeze_visual_encoder"])
    assert "actor_rollout_ref.actor.freeze_vision_tower=true" in frozen.arguments()
