"""Advice names keys as the command line takes them: in findings, plans, profiles, alerts and notices."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import strop
from strop.config.aliases import translate
from strop.config.compose import load
from strop.config.rules import RULES, check
from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys
from strop.planning.advice import advise, complaint
from strop.planning.devices import PlannedCluster, device_of
from strop.preflight.device_checks import memory_findings
from strop.run.health.rules import RULES as HEALTH_RULES
from strop.run.profile.report import levers
from tests.config.test_rules import GRPO, READY

PACKAGE = Path(strop.__file__).parent
KEYS = {root: {key.path for key in keys(kind)} for root, kind in ROOTS.items()}
EVERY_KEY = set().union(*KEYS.values())
# A name before "of the" is none of the command line: lr_scheduler_type of the optimizer.
NAME = re.compile(r"(?<![\w./{}'-])([a-z_][a-z0-9_]*(?:\.[a-z_][a-z0-9_]*)*)\b(?! of the )(=?)")
ADVICE = re.compile(
    r"\b([Ss]et|[Ll]ower|[Rr]aise|[Uu]se|[Ll]eave|[Tt]ake|[Tt]ry|[Cc]hoose|[Ww]iden|switch|merge|or better|or)\b"
)
PPO = ("ppo_trainer",)
SUPERVISED = ("sft_trainer", "rm_trainer", "dpo_trainer")
HOLE = "{}"
"""Stands for the fields of an f-string."""
NOT_KEYS = {"agent_name", "strategy"}
"""A column of the data; the name of a backend in the text of facts."""


def parts(path: str) -> Iterator[str]:
    """`path` without some of its first words."""
    words = path.split(".")
    for start in range(1, len(words)):
        yield ".".join(words[start:])


def beginnings(path: str) -> Iterator[str]:
    """`path`, and without some of its last words."""
    words = path.split(".")
    for end in range(len(words), 0, -1):
        yield ".".join(words[:end])


SECTIONS = {root: {start for path in paths for start in beginnings(path)} for root, paths in KEYS.items()}
SHORT = {short for path in EVERY_KEY for start in beginnings(path) for short in parts(start)}
"""Names without their first words."""


def is_key(name: str, root: str) -> bool:
    """Whether the root has such a key or section, or takes it as an old name; below a free-form key are others."""
    if name in SECTIONS[root] or any(start in KEYS[root] for start in beginnings(name)):
        return True
    return any(path in KEYS[root] for path in translate({name: 0}, root)[0])


def shortened(text: str, roots: tuple[str, ...]) -> list[str]:
    """Names in a text that are not keys of any of the roots, but the end of some key."""
    found = []
    for sentence in re.split(r"(?<=[.;:])\s", text):
        for name, equals in NAME.findall(sentence):
            dotted = "." in name and any(("." in s or "_" in s) and s in SHORT for s in beginnings(name))
            advised = ("_" in name or equals) and name in SHORT and ADVICE.search(sentence)
            if (dotted or advised) and name not in NOT_KEYS and not any(is_key(name, root) for root in roots):
                found.append(name)
    return found


# --- texts in the code --------------------------------------------------------------------------------------


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """The messages of a file with their lines; documentation is none."""
    tree = ast.parse(file.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            words = [part.value if isinstance(part, ast.Constant) else HOLE for part in node.values]
            skipped |= {id(part) for part in node.values}
            yield node.lineno, "".join(map(str, words))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def roots_of_rules() -> dict[str, tuple[str, ...]]:
    """The roots that each file of rules is for."""
    found: dict[str, set[str]] = {}
    for root, rules in RULES.items():
        for rule in rules:
            file = rule.__module__.removeprefix("strop.").replace(".", "/") + ".py"
            found.setdefault(file, set()).add(root)
    return {file: tuple(sorted(roots)) for file, roots in found.items()}


FILES = roots_of_rules() | {
    "config/rules/actor.py": (*PPO, *SUPERVISED),  # rules of supervised training call some of it
    "preflight/ppo.py": PPO,
    "preflight/image_checks.py": PPO,
    "preflight/reward_checks.py": PPO,
    "preflight/supervised.py": SUPERVISED,
    "preflight/inference.py": ("generation", "evaluation", "reward_server", "training_service"),
    "preflight/device_checks.py": (*PPO, *SUPERVISED),
    "preflight/megatron_checks.py": (*PPO, *SUPERVISED),
    "preflight/model_checks.py": (*PPO, *SUPERVISED),
    "preflight/examine.py": (*PPO, *SUPERVISED),
    "planning/advice.py": (*PPO, *SUPERVISED),
    "planning/knobs.py": (*PPO, *SUPERVISED),
    "planning/model_sections.py": (*PPO, *SUPERVISED),
    "run/health/rules.py": (*PPO, *SUPERVISED),
    "run/health/mismatch.py": PPO,
    "run/profile/report.py": (*PPO, *SUPERVISED),
    "config/aliases/without_effect.py": (*PPO, *SUPERVISED),
}


@pytest.mark.parametrize("name", FILES)
def test_messages_in_the_code_name_whole_keys(name):
    found = {}
    for line, text in texts(PACKAGE / name):
        if " " in text and (names := shortened(text, FILES[name])):
            found[line] = names
    assert not found


@pytest.mark.parametrize("root", ["ppo_trainer", "sft_trainer"])
def test_reasons_of_keys_without_effect_name_whole_keys(root):
    reasons = {key.inert for key in keys(ROOTS[root]) if key.inert}
    found = {why: names for why in reasons if (names := shortened(why, (*PPO, root)))}
    assert not found


# --- texts of runs ------------------------------------------------------------------------------------------

SFT = ["model.path=m", "data.train_files=f"]
GENERATION = ["model.path=m", "data.path=a.parquet", "data.output_path=b.parquet"]
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
REWARD = "reward_model"
RUNS = [
    ("ppo_trainer", f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.quantization=int8"),
    ("ppo_trainer", f"{ROLLOUT}.quantization=fp8", "trainer.device=cpu"),
    ("ppo_trainer", f"{ROLLOUT}.name=hf", f"{ROLLOUT}.kv_cache_dtype=fp8", f"{ROLLOUT}.quantization=int8"),
    ("ppo_trainer", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.strict=true"),
    ("ppo_trainer", f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.val_kwargs.do_sample=true"),
    ("ppo_trainer", f"{ROLLOUT}.val_kwargs.temperature=1"),
    ("ppo_trainer", f"{ROLLOUT}.speculation.mtp=true", f"{ROLLOUT}.speculation.draft_model=d"),
    ("ppo_trainer", f"{ROLLOUT}.speculation.enable=true", f"{ROLLOUT}.name=hf"),
    ("ppo_trainer", f"{ROLLOUT}.over_sampling=2", "trainer.async_training.enable=true"),
    ("ppo_trainer", f"{ROLLOUT}.over_sampling=2", "trainer.async_training.max_policy_age=0"),
    ("ppo_trainer", f"{ROLLOUT}.over_sampling=2", f"{ROLLOUT}.multi_turn.enable=true"),
    ("ppo_trainer", f"{ACTOR}.router_replay.mode=R3", f"{ACTOR}.aux_loss_coef=0.1"),
    ("ppo_trainer", f"{ACTOR}.router_replay.mode=R2", f"{ACTOR}.ulysses_sequence_parallel_size=2"),
    ("ppo_trainer", f"{ACTOR}.ppo_micro_batch_size=3", "trainer.n_gpus_per_node=2"),
    ("ppo_trainer", f"{MODEL}.quantization=nf4"),
    ("ppo_trainer", f"{MODEL}.quantization=nf4", f"{MODEL}.lora_rank=8", f"{ROLLOUT}.quantization=int8"),
    ("ppo_trainer", f"{ACTOR}.optim.lr_decay_style=cosine", f"{ACTOR}.megatron.tensor_model_parallel_size=2"),
    (
        "ppo_trainer",
        f"{ACTOR}.strategy=megatron",
        f"{ACTOR}.aux_loss_coef=0.1",
        f"{ACTOR}.fsdp_config.expert_parallel_size=2",
        f"{ACTOR}.tensor_parallel_size=2",
        f"{ACTOR}.megatron.use_dist_checkpointing=true",
        f"{ACTOR}.megatron.expert_tensor_parallel_size=2",
        f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2",
        f"{MODEL}.lora_rank=8",
        f"{MODEL}.lora_dropout=0.1",
        f"{MODEL}.target_modules=[lm_head]",
        "trainer.n_gpus_per_node=2",
    ),
    (
        "ppo_trainer",
        "algorithm.adv_estimator=gae",
        "critic.strategy=megatron",
        "critic.model.fsdp_config.expert_parallel_size=2",
        "critic.model.lora_rank=8",
        "critic.model.lora_dropout=0.1",
        "critic.megatron.dist_checkpointing_path=p",
    ),
    ("ppo_trainer", f"{REWARD}.enable=true", f"{REWARD}.model.path=r", f"{REWARD}.enable_resource_pool=true"),
    (
        "ppo_trainer",
        f"{REWARD}.enable=true",
        f"{REWARD}.model.path=r",
        f"{REWARD}.megatron.tensor_model_parallel_size=2",
    ),
    ("sft_trainer", "model.quantization=nf4", "trainer.n_gpus_per_node=2"),
    ("sft_trainer", "model.lora_rank=8", "model.lora_alpha=0", "model.override_config.attention_dropout=0.1"),
    (
        "sft_trainer",
        "model.strategy=megatron",
        "model.aux_loss_coef=0.1",
        "model.fsdp_config.expert_parallel_size=2",
        "model.lora_rank=8",
        "model.lora_dropout=0.1",
        "model.target_modules=[lm_head]",
        "tensor_parallel_size=2",
        "optim.lr_decay_style=cosine",
        "optim.lr_scheduler=cosine",
    ),
    ("generation", "rollout.quantization=fp8", "trainer.device=cpu"),
    ("generation", "rollout.name=hf", "rollout.quantization=int8", "rollout.kv_cache_dtype=fp8"),
    ("generation", "rollout.name=vllm"),
    ("generation", "rollout.speculation.draft_model=d", "rollout.speculation.mtp=true"),
    ("generation", "rollout.temperature=0", "data.n_samples=4"),
]
BASE = {"ppo_trainer": GRPO, "sft_trainer": SFT, "generation": GENERATION}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]} {run[-1]}")
def test_findings_name_keys_of_the_verb(run):
    root, *overrides = run
    findings = check(load(root, [*BASE[root], *overrides]))
    assert findings
    for finding in findings:
        assert is_key(finding.key, root)
        assert shortened(finding.message, (root,)) == [], finding.message


MODELS = {"ppo_trainer": f"{MODEL}.path", **dict.fromkeys(SUPERVISED, "model.path")}


@pytest.mark.parametrize("root", MODELS)
@pytest.mark.parametrize("size, gpu", [("1.5b", "16GiB"), ("7b", "4090"), ("72b", "24GiB"), ("7b", "h100")])
def test_plans_name_keys_of_the_verb(root, size, gpu):
    base = READY[1:] if root == "ppo_trainer" else []
    config = load(root, [*base, f"{MODELS[root]}=qwen2.5-{size}"]).config
    advice = advise(config, PlannedCluster(device_of(gpu)))
    changes = [*advice.changes, *advice.adapters, *advice.settings_there, *advice.room]
    assert [change.key for change in changes if change.key not in KEYS[root]] == []
    if not advice.fits:
        assert shortened(complaint(advice), (root,)) == []
        [finding] = memory_findings(advice)
        assert is_key(finding.key, root)


PHASES = dict.fromkeys(
    ["gen", "reward", "old_log_prob", "ref", "update_actor", "update_critic", "values", "update_weights"]
    + ["testing", "save_checkpoint", "keep_samples", "dump_rollout_generations", "(between phases)"],
    10.0,
)
SAMPLING = {
    "rollout/seconds": 5.0,
    "rollout/occupancy": 0.2,
    "rollout/preemptions": 3.0,
    "rollout/prefill_share": 0.9,
    "response_length/max": 100.0,
    "critic/zero_variance_groups": 0.9,
}
IN_REWARD = ["algorithm.use_kl_in_reward=true"]


@pytest.mark.parametrize("metrics", [SAMPLING, {}, {"num_turns/max": 2.0}])
@pytest.mark.parametrize(
    "root, overrides",
    [
        ("ppo_trainer", [f"{ACTOR}.use_kl_loss=true"]),
        ("ppo_trainer", IN_REWARD),
        ("sft_trainer", []),
    ],
)
def test_profiles_name_keys_of_the_verb(root, overrides, metrics):
    tree = load(root, [*BASE[root], *overrides]).tree()
    phases = PHASES
    if root == "sft_trainer":
        phases = {"update": 10.0, "testing": 10.0, "save_checkpoint": 10.0, "(between phases)": 1.0}
        metrics = {}
    found = levers(phases, metrics, tree)
    assert found
    for lever in found:
        assert shortened(lever.turn, (root,)) == [], lever.turn


@pytest.mark.parametrize("rule", HEALTH_RULES, ids=lambda rule: rule.name)
def test_alerts_name_keys(rule):
    assert shortened(rule.advice, (*PPO, "sft_trainer")) == []


def test_shortened_names_are_found():
    for text in (
        "set rollout.agent.default_agent_loop=tool_agent.",
        "Raise rollout.n.",
        "actor.use_dynamic_bsz=true with large micro-batches",
        "use shorter sequences or model.lora_rank",
        "R3 with engine_kwargs.vllm.url is not supported",
        "no effect; set lr_scheduler_type.",
        "4-bit weights. Set lora_rank, or quantization=null.",
    ):
        assert shortened(text, PPO), text
    assert shortened("use model.lora_rank", ("sft_trainer",)) == []
