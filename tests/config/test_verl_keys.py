"""Every key of verl 0.7.0 to 0.10 is used, accepted without effect, or refused with a reason.

verl_keys.tsv lists the keys with the default of the newest version that has them, that version, and the files
that set this default. verl_example_keys.tsv lists further keys that verl's example commands set.
"""

from __future__ import annotations

import csv
import functools
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from strop.config.aliases import flatten, nest, reason_for, translate
from strop.config.aliases.async_lengths import ASYNC_LENGTHS
from strop.config.commandline import parse
from strop.config.compose import SchemaKeys, load
from strop.config.hydra import GROUP_WORDS
from strop.config.rules import check
from strop.config.schema import ROOTS
from strop.config.typed import ConfigError
from strop.trainer.main_generation_server import with_defaults

HERE = Path(__file__).parent


def rows(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


KEYS = rows("verl_keys.tsv")
NEWEST = "0.10.0.dev"
FILES = sorted({(row["root"], file) for row in KEYS for file in row["files"].split()})


@functools.cache
def schema_of(root: str) -> SchemaKeys:
    return SchemaKeys(ROOTS[root])


def classes(key: str, root: str) -> set[str]:
    """What becomes of a key: used, inert, refused (for values that ask for a missing feature), unknown."""
    if key in ASYNC_LENGTHS:
        return {"used"}
    schema = schema_of(root)
    found = set()
    for name in translate({key: 0}, root)[0] or {"": 0}:
        if schema.has(name) or name == "":
            inert = [k.inert for k in schema.keys if name == k.path or name.startswith(f"{k.path}.")]
            found.add("inert" if any(inert) else "used")
        elif (row := reason_for(name)) is not None:
            found.add("inert" if row.accepted is None else "refused")
        else:
            found.add("unknown")
    return found


def test_every_key_has_a_class():
    counts: Counter[str] = Counter()
    for root, key in {(row["root"], row["key"]) for row in KEYS}:
        kinds = classes(key, root)
        assert "unknown" not in kinds, f"{root}: {key}"
        counts.update(kinds)
    assert counts["used"] > 480 and counts["refused"] > 10, counts
    assert sum(counts.values()) >= 1650, counts


def test_what_is_no_key_of_verl_stays_unknown():
    for key in (
        "reward.reward_manger.name",
        "trainer.use_v2",
        "critic.fsdp.param_offlod",
        "distilation.nnodes",
    ):
        assert classes(key, "ppo_trainer") == {"unknown"}, key
        with pytest.raises(ConfigError, match="no such key"):
            load("ppo_trainer", [f"{key}=1"])


@pytest.mark.parametrize("newest", [True, False], ids=["newest", "older"])
@pytest.mark.parametrize(("root", "file"), FILES)
def test_the_defaults_of_a_file_compose_and_change_only_the_keys_that_are_used(tmp_path, root, file, newest):
    said = {}
    for row in KEYS:
        in_file = row["root"] == root and file in row["files"].split()
        if in_file and (row["last_version"] == NEWEST) == newest and row["default"] != '"???"':
            said[row["key"]] = json.loads(row["default"])
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump(nest(said)), encoding="utf-8")
    loaded = load(root, config=str(tmp_path / "verl.yaml"))
    plain = flatten(load(root).tree())
    tree = flatten(loaded.tree())
    for key, value in said.items():
        for name, moved in translate({key: value}, root)[0].items():
            literal = not isinstance(moved, str) or "${" not in moved
            if name in tree and literal and moved not in (None, {}):
                assert tree[name] == moved or float(tree[name]) == float(moved), key
    changed = {name for name in tree if tree[name] != plain.get(name)}
    schema = schema_of(root)
    live = [name for name in changed if name in loaded.set_by_user and not inert(schema, name)]
    followers = [name for name in changed - set(live) if not inert(schema, name)]
    assert all(is_link(schema, name) for name in followers), followers


def inert(schema: SchemaKeys, name: str) -> bool:
    return any(key.inert and (name == key.path or name.startswith(f"{key.path}.")) for key in schema.keys)


def is_link(schema: SchemaKeys, name: str) -> bool:
    return any(key.path == name and "${" in str(key.default) for key in schema.keys) or not schema.has(name)


@pytest.mark.parametrize("root", ["ppo_trainer", "sft_trainer", "generation"])
def test_keys_of_the_example_commands_compose(root):
    words: dict[str, str] = {}
    for row in rows("verl_example_keys.tsv"):
        if row["root"] == root:
            assert (
                row["key"] in GROUP_WORDS or "@" in row["key"] or "unknown" not in classes(row["key"], root)
            )
            target = " ".join(translate({row["key"]: 0}, root)[0])
            words.setdefault(target, f"{row['key']}={row['value']}")  # one of several names of a key
    load(root, list(words.values()))


@pytest.mark.parametrize(
    ("root", "override", "path", "value"),
    [
        ("ppo_trainer", "reward.custom_reward_function.path=r.py", "custom_reward_function.path", "r.py"),
        ("ppo_trainer", "reward.reward_manager.name=dapo", "reward_manager.name", "dapo"),
        ("ppo_trainer", "reward.reward_model.model_path=m", "reward_model.model.path", "m"),
        ("ppo_trainer", "reward.num_workers=3", "reward_model.num_workers", 3),
        (
            "ppo_trainer",
            "reward.reward_kwargs.overlong_buffer_cfg.len=9",
            "reward_model.overlong_buffer.len",
            9,
        ),
        ("ppo_trainer", "critic.fsdp.param_offload=true", "critic.model.fsdp_config.param_offload", True),
        (
            "ppo_trainer",
            "actor_rollout_ref.actor.profiler.enable=true",
            "actor_rollout_ref.actor.profiler.enable",
            True,
        ),
        ("ppo_trainer", "trainer.v1.trainer_mode=separate_async", "trainer.async_training.enable", True),
        (
            "ppo_trainer",
            "trainer.v1.trainer_mode=separate_async",
            "trainer.async_training.trigger_parameter_sync_step",
            4,
        ),
        ("ppo_trainer", "trainer.resume_from_path=False", "trainer.resume_from_path", None),
        ("ppo_trainer", "actor_rollout_ref.hybrid_engine=False", "trainer.async_training.enable", True),
        ("ppo_trainer", "actor_rollout_ref.hybrid_engine=True", "trainer.async_training.enable", False),
        ("ppo_trainer", "trainer.test_freq=False", "trainer.test_freq", -1),
        ("ppo_trainer", "custom_reward_function.name=null", "custom_reward_function.name", "compute_score"),
        (
            "ppo_trainer",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=null",
            "actor_rollout_ref.actor.optim.lr_warmup_steps",
            -1,
        ),
        ("ppo_trainer", "actor_rollout_ref.model.lora_alpha=0", "actor_rollout_ref.model.lora_alpha", 0),
        ("ppo_trainer", "model_engine=megatron", "actor_rollout_ref.actor.strategy", "megatron"),
        ("ppo_trainer", "rollout.nnodes=2", "actor_rollout_ref.rollout.nnodes", 2),
        (
            "ppo_trainer",
            "actor_rollout_ref.actor.megatron.router_replay.mode=R3",
            "actor_rollout_ref.actor.router_replay.mode",
            "R3",
        ),
        ("sft_trainer", "engine.fsdp_size=4", "model.fsdp_config.fsdp_size", 4),
        ("sft_trainer", "engine.ulysses_sequence_parallel_size=2", "ulysses_sequence_parallel_size", 2),
        ("sft_trainer", "engine=veomni", "model.strategy", "veomni"),
        ("sft_trainer", "checkpoint.save_contents=[model]", "trainer.checkpoint.save_contents", ["model"]),
        ("sft_trainer", "data.messages_key=talk", "data.multiturn.messages_key", "talk"),
        ("sft_trainer", "data.messages_key=talk", "data.multiturn.enable", True),
        ("sft_trainer", "trainer.test_freq=False", "trainer.test_freq", -1),
        ("sft_trainer", 'optim.betas="[0.9,0.98]"', "optim.betas", [0.9, 0.98]),
        ("generation", "actor_rollout_ref.rollout.n=3", "data.n_samples", 3),
        ("generation", "data.train_files=x.parquet", "data.path", "x.parquet"),
        ("generation", "data.max_prompt_length=7", "rollout.prompt_length", 7),
        ("generation", "data.max_response_length=7", "rollout.response_length", 7),
    ],
)
def test_names_of_newer_versions_reach_their_place(root, override, path, value):
    assert flatten(load(root, [override]).tree())[path] == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.actor.qat.enable=true", "quantization-aware"),
        ("actor_rollout_ref.rollout.disaggregation.enabled=true", "one engine"),
        ("actor_rollout_ref.rollout.multi_turn.function_tool_path=tools.py", "tool_config_path"),
        ("trainer.v1.sampler.custom_sampler.path=s.py", "data.sampler"),
    ],
)
def test_missing_features_are_refused_with_what_to_use_instead(override, message):
    with pytest.raises(ConfigError, match=message):
        load("ppo_trainer", [override])
    load("ppo_trainer", [override.partition("=")[0] + "=null"])


@pytest.mark.parametrize("engine", ["torchtitan", "veomni", "mlite"])
def test_a_missing_backend_is_refused_with_a_reason(engine):
    errors = [f for f in check(load("ppo_trainer", [f"model_engine={engine}"])) if f.level == "error"]
    assert any(f.key == "actor_rollout_ref.actor.strategy" and "not supported" in f.message for f in errors)


def test_the_adapters_of_megatron_are_those_of_every_strategy():
    """verl's section counts if it has a rank; its alpha is 32 where the key beside it is 16."""
    model = "actor_rollout_ref.model"
    modules = f"{model}.lora.target_modules=[linear_qkv,linear_fc2]"
    given = load("ppo_trainer", [f"{model}.lora.rank=8", f"{model}.lora.alpha=64", modules]).config
    found = given.actor_rollout_ref.model
    assert (found.lora_rank, found.lora_alpha) == (8, 64)
    assert found.target_modules == ["q_proj", "k_proj", "v_proj", "down_proj"]
    alone = load("ppo_trainer", [f"{model}.lora.rank=8"]).config.actor_rollout_ref.model
    assert (alone.lora_rank, alone.lora_alpha) == (8, 32)
    beside = load("ppo_trainer", [f"{model}.lora.rank=0", f"{model}.lora.alpha=64", f"{model}.lora_rank=4"])
    found = beside.config.actor_rollout_ref.model
    assert (found.lora_rank, found.lora_alpha) == (4, 16)


def test_adapters_need_a_scale():
    loaded = load("sft_trainer", ["model.lora_alpha=0", "model.lora_rank=8"])
    assert any(f.key == "model.lora_alpha" and f.level == "error" for f in check(loaded))


def test_a_family_gives_one_notice():
    words = [f"actor_rollout_ref.actor.veomni.{name}=1" for name in ("a", "b", "c", "d")]
    notices = load("ppo_trainer", words).notices
    assert len(notices) == 1 and "and 2 more have no effect" in notices[0]
    words = [
        f"reward.reward_kwargs.overlong_buffer_cfg.{word}" for word in ("enable=true", "len=9", "log=true")
    ]
    [notice] = load("ppo_trainer", words).notices
    assert notice == (
        "reward.reward_kwargs.overlong_buffer_cfg.enable is now reward_model.overlong_buffer.enable (a section of its "
        "own); 2 more of reward.reward_kwargs.overlong_buffer_cfg.* moved in the same way."
    )


@pytest.mark.parametrize(
    "config", ["fully_async_ppo_trainer.yaml", "one_step_off_ppo_trainer", "ppo_trainer"]
)
def test_the_config_folder_of_verl(config):
    words = ["async_training.staleness_threshold=0.5", "rollout.n_gpus_per_node=2"]
    loaded = load("ppo_trainer", words, config, "config")
    assert loaded.config.trainer.async_training.enable == (config != "ppo_trainer")
    assert loaded.config.trainer.async_training.staleness_threshold == 0.5
    assert loaded.config.actor_rollout_ref.rollout.n_gpus_per_node == 2


def test_lengths_of_asynchronous_training_count_in_steps():
    words = ["rollout.total_rollout_steps=512", "rollout.test_freq=5", "data.train_batch_size=0"]
    words += ["actor_rollout_ref.actor.ppo_mini_batch_size=32", "async_training.require_batches=2"]
    config = load("ppo_trainer", [*words, "async_training.trigger_parameter_sync_step=4"]).config
    assert config.data.train_batch_size == 64
    assert config.trainer.total_training_steps == 8
    assert config.trainer.test_freq == 20
    words = ["trainer.test_freq=10", "trainer.save_freq=3", "async_training.trigger_parameter_sync_step=4"]
    trainer = load("ppo_trainer", words).config.trainer
    assert (trainer.test_freq, trainer.save_freq) == (40, 12)
    words[-1] = "trainer.async_training.trigger_parameter_sync_step=4"  # no key of verl: counts in steps
    assert load("ppo_trainer", words).config.trainer.test_freq == 10


def test_asynchronous_programs_have_the_defaults_of_their_files():
    """Their commands need no --config-name: ratios are to the engine's log-probs either way."""

    def found(*words, name=None):
        config = load("ppo_trainer", words, name, name and "config").config
        plan, actor = config.trainer.async_training, config.actor_rollout_ref.actor
        bypass = config.algorithm.rollout_correction.bypass_mode
        return bypass, actor.use_rollout_log_probs, plan.staleness_threshold, plan.trigger_parameter_sync_step

    separate = "actor_rollout_ref.hybrid_engine=False"
    step = found(separate, "rollout.nnodes=1")
    assert step[:2] == (True, False) == found(name="one_step_off_ppo_trainer")[:2]
    fully = found(separate, "async_training.require_batches=1", "rollout.nnodes=1")
    assert fully == (True, True, 0.1, 4) == found(name="fully_async_ppo_trainer")
    own = found(
        separate, "async_training.staleness_threshold=0.5", "+algorithm.rollout_correction.bypass_mode=False"
    )
    assert own == (False, True, 0.5, 4)
    assert found("actor_rollout_ref.hybrid_engine=True")[0] is False


def test_the_sync_interval_of_the_new_trainer_can_be_set():
    words = ["trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=2"]
    assert load("ppo_trainer", words).config.trainer.async_training.trigger_parameter_sync_step == 2


def test_the_generation_server_of_verl_has_the_defaults_of_ppo(tmp_path):
    """strop/trainer/main_generation_server.py; main_generation has 5 samples, top_k 50 and top_p 0.7."""
    (tmp_path / "mine.yaml").write_text("rollout: {top_p: 0.9}\n")
    words = [str(tmp_path / "mine.yaml"), "actor_rollout_ref.rollout.n=2", "data.max_response_length=9"]
    options = parse(with_defaults(words))
    config = load("generation", options.overrides, options.config).config
    rollout = config.rollout
    assert (rollout.top_p, rollout.top_k, rollout.prompt_length, rollout.response_length) == (0.9, -1, 512, 9)
    assert config.data.n_samples == 2


def test_a_command_of_the_newer_sft_trainer_has_its_defaults():
    def optim(*words):
        loaded = load("sft_trainer", ["model.path=m", "data.train_files=t", *words])
        found = loaded.config.optim
        assert not [finding for finding in check(loaded) if finding.level == "error"]
        said = [text for text in loaded.notices if "verl's sft_trainer" in text]
        return [found.lr, found.lr_scheduler_type, found.lr_warmup_steps_ratio, found.betas, len(said)]

    older = [1e-5, "cosine", 0.1, [0.9, 0.95]]
    assert optim() == [*older, 0]
    assert optim("engine=fsdp") == optim("engine.fsdp_size=1") == [1e-3, "constant", 0.0, [0.9, 0.999], 1]
    some = ["engine=fsdp", "optim=fsdp", "optim.lr=1e-4", "optim.warmup_style=cosine"]
    assert optim(*some) == [1e-4, "cosine", 0.0, [0.9, 0.999], 1]
    megatron = ["engine=megatron", "optim=megatron", "optim.lr=2e-5", "optim.lr_decay_style=cosine"]
    assert optim(*megatron) == [2e-5, "constant", 0.0, [0.9, 0.999], 1]
    assert optim("model.strategy=megatron", "optim.lr_decay_style=cosine") == [*older, 0]


def test_a_link_to_an_old_name_is_followed(tmp_path):
    (tmp_path / "sft.yaml").write_text(
        "checkpoint: {save_contents: [model], load_contents: '${checkpoint.save_contents}'}\n"
    )
    loaded = load("sft_trainer", config=str(tmp_path / "sft.yaml"))
    assert loaded.config.trainer.checkpoint.load_contents == ["model"]


def test_the_command_line_wins_over_a_file_under_another_name(tmp_path):
    (tmp_path / "run.yaml").write_text("reward_model: {num_workers: 2}\n")
    loaded = load("ppo_trainer", ["reward.num_workers=5"], str(tmp_path / "run.yaml"))
    assert loaded.config.reward_model.num_workers == 5
    (tmp_path / "both.yaml").write_text("reward_model: {num_workers: 2}\nreward: {num_workers: 5}\n")
    with pytest.raises(ConfigError, match="two names of one setting"):
        load("ppo_trainer", config=str(tmp_path / "both.yaml"))


TEACHER = "distillation.teacher_models.teacher_model.model_path=big"
BY_REWARD = [
    "distillation.distillation_loss.loss_mode=k1",
    "distillation.distillation_loss.use_policy_gradient=True",
]


def test_distillation_with_a_policy_gradient_is_that_of_strop():
    words = [*BY_REWARD, TEACHER, "distillation.nnodes=1", "distillation.distillation_loss.topk=64"]
    words += [
        "distillation.distillation_loss.use_task_rewards=False",
        "distillation.distillation_loss.loss_max_clamp=10.0",
    ]
    loaded = load("ppo_trainer", ["distillation.enabled=True", *words])
    found = loaded.config.algorithm.distillation
    assert (found.enable, found.path, found.task_reward, found.loss_max_clamp) == (True, "big", False, 10.0)
    assert (found.loss_mode, found.use_policy_gradient, found.topk) == ("k1", True, 64)
    assert found.nnodes == 0 and [notice[:14] for notice in loaded.notices] == ["distillation.*"]
    assert not load("ppo_trainer", words).config.algorithm.distillation.enable
    named = "distillation.teacher_models.math.model_path=m"
    found = load(
        "ppo_trainer", ["distillation.enabled=True", *BY_REWARD, TEACHER, named]
    ).config.algorithm.distillation
    assert (found.path, found.task_reward) == ("m", True)  # verl drops teacher_model beside a named one
    with pytest.raises(ConfigError, match="one teacher"):
        load(
            "ppo_trainer",
            ["distillation.enabled=True", *BY_REWARD, named, "distillation.teacher_models.geo.model_path=g"],
        )


def test_keys_of_the_distillation_loss_that_are_not_read_are_named():
    words = ["distillation.enabled=True", TEACHER, *BY_REWARD]
    more = ["distillation.distillation_loss.policy_loss_mode=gspo", "distillation.distillation_loss.topkk=3"]
    notices = load("ppo_trainer", [*words, *more]).notices
    assert len(load("ppo_trainer", words).notices) == 1 and len(notices) == 2
    assert all(word.partition("=")[0] in notices[1] for word in more) and "have no effect" in notices[1]


def test_distillation_with_the_defaults_of_verl_is_a_loss():
    unset = "distillation.distillation_loss.use_policy_gradient=null"
    config = load("ppo_trainer", ["distillation.enabled=True", TEACHER, unset]).config
    assert not config.algorithm.distillation.use_policy_gradient
    loaded = load("ppo_trainer", ["distillation.enabled=True", TEACHER])
    found = loaded.config.algorithm.distillation
    assert (found.loss_mode, found.use_policy_gradient, found.task_reward) == ("k3", False, True)
    mode = "distillation.distillation_loss.loss_mode=forward_kl_topk"
    clamp = "distillation.distillation_loss.log_prob_min_clamp=-10.0"
    found = load(
        "ppo_trainer", ["distillation.enabled=True", TEACHER, mode, clamp]
    ).config.algorithm.distillation
    assert (found.loss_mode, found.use_policy_gradient, found.log_prob_min_clamp) == (
        "forward_kl_topk",
        False,
        -10.0,
    )
