"""A key is read by some file, or says that it has no effect."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from strop.config import readers as module
from strop.config.compose import load
from strop.config.explain import explain
from strop.config.readers import NOT_READERS, readers
from strop.config.rules.supervised import PPO_ONLY
from strop.config.schema import ROOTS
from strop.config.schema.fields import section, setting
from strop.config.schema.ppo import PpoConfig
from strop.config.schema.reflect import keys
from strop.config.schema.trainer import TrainerConfig
from strop.config.source_reads import Read, SchemaIndex, reads_of


def reported(path: str, root: str) -> bool:
    """Whether a rule tells the user that the key has no effect for this root."""
    if root not in ("sft_trainer", "rm_trainer", "dpo_trainer"):
        return False
    return any(path == f"trainer.{name}" or path.startswith(f"trainer.{name}.") for name in PPO_ONLY)


def unread(root: str) -> list[str]:
    found = []
    for key in keys(ROOTS[root]):
        if not key.inert and not reported(key.path, root) and not readers(key, root):
            found.append(key.path)
    return found


@pytest.mark.parametrize("root", ROOTS)
def test_every_live_key_has_a_reader(root):
    assert not unread(root), "read these keys, or declare them with inert() and the reason"


def test_a_new_key_that_no_file_reads_is_found(monkeypatch):
    @dataclass(eq=False)
    class Trainer(TrainerConfig):
        key_without_any_reader: int = setting(1)

    @dataclass(eq=False)
    class Root(PpoConfig):
        trainer: Trainer = section(Trainer)

    Root.__annotations__["trainer"] = Trainer  # a class inside a function cannot be looked up by its name
    roots = {"ppo_trainer": Root}
    monkeypatch.setattr(module, "ROOTS", roots)
    monkeypatch.setitem(globals(), "ROOTS", roots)
    assert unread("ppo_trainer") == ["trainer.key_without_any_reader"]


def names_read(source: str) -> set[tuple[str, str]]:
    """(section class, attribute) of the certain reads in a source text; ("?", attribute) of possible ones."""
    found = set()
    for read in reads_of("ppo/example.py", source, SchemaIndex()):
        if read.sections is None:
            found.add(("?", read.name))
        for place in read.sections or ():
            found.add((place.kind.__name__, read.name))
    return found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(config: PpoConfig):\n    return config.trainer.seed", ("TrainerConfig", "seed")),
        ("def f(loaded: Loaded[PpoConfig]):\n    return loaded.config.data.seed", ("DataConfig", "seed")),
        (
            "def f(config):\n    actor = config.actor_rollout_ref.actor\n    actor.shuffle",
            ("ActorConfig", "shuffle"),
        ),
        ("def f(critic):\n    return getattr(critic, 'grad_clip')", ("CriticConfig", "grad_clip")),
        (
            "NAMES = ('n', 'top_k')\ndef f(rollout: RolloutConfig):\n    return [getattr(rollout, x) for x in NAMES]",
            ("RolloutConfig", "top_k"),
        ),
        (
            "class A:\n    def __init__(self, c: CriticConfig):\n        self.c = c\n"
            "    def g(self):\n        return self.c.shuffle",
            ("CriticConfig", "shuffle"),
        ),
        ("def f(kl: KlCtrlConfig):\n    return asdict(kl)", ("KlCtrlConfig", "horizon")),
        ("def f(thing):\n    return thing.horizon", ("?", "horizon")),
    ],
)
def test_which_section_is_read(source, expected):
    assert expected in names_read(source)


def test_attributes_of_other_objects_are_no_reads():
    source = "import torch\ndef f(model: Module, step: int):\n    return model.seed, torch.seed, step.seed"
    assert names_read(source) == set()


def test_a_read_counts_for_the_roots_that_reach_it():
    key = next(key for key in keys(ROOTS["sft_trainer"]) if key.path == "trainer.seed")
    read = next(
        iter(reads_of("x.py", "def f(config: PpoConfig):\n    return config.trainer.seed", SchemaIndex()))
    )
    assert isinstance(read, Read)
    assert not any(module._holds(place, key, ROOTS["sft_trainer"]) for place in read.sections or ())


def test_explain_names_files_that_exist():
    text = explain("actor_rollout_ref.rollout.enforce_eager")
    files = text.partition("read by:   ")[2].partition("\n")[0].split(", ")
    assert "shared/build.py" in files
    assert all((module.PACKAGE / file).is_file() for file in files)
    assert not any(file.startswith(NOT_READERS) for file in files)


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor.megatron.grad_offload=true",
        "actor_rollout_ref.actor.optim.clip_grad=0.5",
        "actor_rollout_ref.rollout.stop=[a,b]",
        "global_profiler.global_tool_config.torch_memory.stack_depth=8",
        "reward_model.ulysses_sequence_parallel_size=2",
        "data.trust_remote_code=true",
    ],
)
def test_keys_without_a_reader_give_a_notice(override):
    key = override.partition("=")[0]
    assert any(
        notice.startswith(f"{key} has no effect: ") for notice in load("ppo_trainer", [override]).notices
    )


def test_supervised_training_reports_keys_of_ppo():
    from strop.config.rules import check

    loaded = load("sft_trainer", ["trainer.samples_to_keep=4", "trainer.async_training.max_policy_age=2"])
    warned = [finding.key for finding in check(loaded) if "no effect in supervised" in finding.message]
    assert warned == ["trainer.samples_to_keep", "trainer.async_training.max_policy_age"]


@pytest.mark.parametrize(
    "override",
    [
        "reward_model.model.fsdp_config.fsdp_size=2",
        "reward_model.model.fsdp_config.wrap_policy.min_num_params=9",
        "reward_model.model.fsdp_config.model_dtype=bf16",
        "reward_model.model.lora_rank=8",
        "reward_model.profiler.save_path=x",
        "actor_rollout_ref.actor.profiler.tool=torch",
    ],
)
def test_keys_that_a_role_does_not_read_give_a_notice(override):
    key = override.partition("=")[0]
    assert any(n.startswith(f"{key} has no effect: ") for n in load("ppo_trainer", [override]).notices)
