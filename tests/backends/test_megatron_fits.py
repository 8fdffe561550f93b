"""Models that cannot be divided as asked are refused before anything is loaded, with the sizes that work."""

from __future__ import annotations

import json
import re

import pytest
from transformers import AutoConfig

from strop.backends.megatron.fits import problems
from strop.config.arithmetic import plan_supervised
from strop.config.compose import load
from strop.config.rules import check
from strop.config.rules.megatron import megatron_roles
from strop.config.schema.megatron import MegatronConfig
from strop.preflight.megatron_checks import megatron_findings
from tests.models.tiny import FAMILIES, OTHERS, SIZE

ACTOR = "actor_rollout_ref.actor"
OPTIONS = f"+{ACTOR}.megatron.override_transformer_config"


FIRST = "num_layers_in_first_pipeline_stage"


@pytest.mark.parametrize(
    ("family", "sizes", "key", "said"),
    [
        ("llama", {"tensor_model_parallel_size": 4}, "tensor_model_parallel_size", r"4 .*2 key-value heads.*\[1, 2\]"),
        ("llama", {"tensor_model_parallel_size": 3}, "tensor_model_parallel_size", r"3 .*4 attention heads.*\[1, 2\]"),
        ("llama", {"pipeline_model_parallel_size": 3}, "pipeline_model_parallel_size", r"2 layers.*\[1, 2\]\.$"),
        ("deepseek_v3", {"pipeline_model_parallel_size": 3}, "pipeline", r"4 layers.*\[1, 2, 4\], or .*last_pipeline_stage to one of \[2\]"),
        ("deepseek_v3", {"pipeline_model_parallel_size": 2, "override_transformer_config": {FIRST: 5}}, "pipeline", r"=5 and .*=None do not take the 4 layers.* one of \[1, 2, 3\]"),
        ("deepseek_v3", {"pipeline_model_parallel_size": 3, "override_transformer_config": {FIRST: 1}}, "pipeline", "do not take the 4 layers"),
        ("llama", {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, "pipeline", "2 part"),
        ("llama", {"expert_model_parallel_size": 2}, "expert_model_parallel_size", "no experts"),
        ("qwen3_moe", {"expert_model_parallel_size": 3}, "expert_model_parallel_size", r"4 experts.*\[1, 2, 4\]"),
        ("mixtral", {"tensor_model_parallel_size": 2, "sequence_parallel": False}, "sequence_parallel", "needs true"),
        ("llama", {"context_parallel_size": 8}, "context_parallel_size", r"4 attention heads.*\[1, 2, 4\]"),
        ("deepseek_v3", {"tensor_model_parallel_size": 8}, "tensor_model_parallel_size", r"8 .*4 attention heads.*\[1, 2, 4\]"),
        ("gemma2", {}, "strategy", "no table of weights for model_type='gemma2'.*qwen3_moe"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_divide_is_refused_with_the_sizes_that_work(family, sizes, key, said):
    config = AutoConfig.for_model(family, **{**SIZE, **(FAMILIES | OTHERS)[family]})
    ((found, message),) = problems(config, MegatronConfig(**sizes))
    assert key in found
    assert re.search(said, message), message
    assert not list(problems(AutoConfig.for_model("llama", **SIZE), MegatronConfig()))


@pytest.mark.parametrize(
    ("stages", "uneven"),
    [(2, {FIRST: 1}), (3, {FIRST: 2}), (3, {FIRST: 1, "num_layers_in_last_pipeline_stage": 1})],
)
def test_uneven_stages_that_take_all_layers_pass(stages, uneven):
    config = AutoConfig.for_model("deepseek_v3", **{**SIZE, **OTHERS["deepseek_v3"]})
    sizes = MegatronConfig(pipeline_model_parallel_size=stages, override_transformer_config=uneven)
    assert not list(problems(config, sizes))


def test_options_that_megatron_core_does_not_have_are_named():
    words = [f"{OPTIONS}.num_layerz=5", f"{OPTIONS}.moe_enable_deepep=true", f"{ACTOR}.strategy=megatron"]
    config = load("ppo_trainer", [*words, "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B"]).config
    [found] = [f for f in megatron_findings(megatron_roles(config)) if f.key.startswith(ACTOR)]
    assert found.key.endswith(".num_layerz") and "Did you mean 'num_layers'" in found.message


JUDGED = [
    "reward_model.enable=true",
    "reward_model.model.path=judge",
    "reward_model.megatron.pipeline_model_parallel_size=2",
]
RANK = "actor_rollout_ref.model.lora_rank=8"
TARGETS = "actor_rollout_ref.model.target_modules"


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        ([f"{ACTOR}.megatron.tensor_model_parallel_size=3"], f"{ACTOR}.megatron.tensor_model_parallel_size", "4 devices"),
        ([f"{ACTOR}.megatron.expert_model_parallel_size=3"], f"{ACTOR}.megatron.expert_model_parallel_size", "[1, 2, 4]"),
        ([f"{ACTOR}.megatron.expert_tensor_parallel_size=2"], f"{ACTOR}.megatron.expert_tensor_parallel_size", "Set 1"),
        ([f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2"], f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size", "at least 2"),
        ([f"{ACTOR}.megatron.use_dist_checkpointing=true"], f"{ACTOR}.megatron.use_dist_checkpointing", "dist_checkpointing_path is not set"),
        ([f"{ACTOR}.megatron.load_weight=false"], f"{ACTOR}.megatron.load_weight", "without weights"),
        ([f"{ACTOR}.tensor_parallel_size=2"], f"{ACTOR}.tensor_parallel_size", "strategy=fsdp"),
        ([f"{ACTOR}.aux_loss_coef=0.1"], f"{ACTOR}.aux_loss_coef", "load-balancing"),
        ([f"{OPTIONS}.moe_router_load_balancing_type=seq_aux_loss"], f"{OPTIONS}.moe_router_load_balancing_type", "aux_loss or none"),
        ([RANK, "actor_rollout_ref.model.lora_dropout=0.1"], "actor_rollout_ref.model.lora_dropout", "drop different inputs"),
        ([RANK, f"{TARGETS}=[q_proj,lm_head]"], TARGETS, "includes lm_head with actor_rollout_ref.actor.strategy=megatron"),
        ([RANK, f"{TARGETS}=[q_proj,embed_tokens]"], TARGETS, "includes model.embed_tokens"),
        ([RANK, f"{TARGETS}='.*(q_proj|embed_tokens)|lm_head'"], TARGETS, "includes model.embed_tokens, lm_head"),
        ([RANK, f"{TARGETS}='(q_proj'"], TARGETS, "is no regular expression"),
        ([RANK, f"{ACTOR}.megatron.use_dist_checkpointing=true", f"{ACTOR}.megatron.dist_checkpointing_path=saved"], f"{ACTOR}.megatron.use_dist_checkpointing", "has no adapters"),
        ([*JUDGED, "reward_model.megatron.tensor_model_parallel_size=3"], "reward_model.megatron.tensor_model_parallel_size", "4 devices"),
        ([*JUDGED, "custom_reward_function.path=score.py"], "custom_reward_function.path", "every rank would call it"),
        ([*JUDGED, "reward_model.enable_resource_pool=true"], "reward_model.enable_resource_pool", "a whole reward model"),
        (["algorithm.adv_estimator=gae", "critic.megatron.pipeline_model_parallel_size=3"], "critic.megatron.tensor_model_parallel_size", "[1, 2, 4]"),
    ],
)  # fmt: skip
def test_keys_that_clash_are_refused(words, key, said):
    loaded = load("ppo_trainer", [f"{ACTOR}.strategy=megatron", "trainer.n_gpus_per_node=4", *words])
    found = {finding.key: finding.message for finding in check(loaded) if finding.level == "error"}
    assert said in found[key.removeprefix("+")]


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        (["model.megatron.tensor_model_parallel_size=3"], "model.megatron.tensor_model_parallel_size", "4 devices"),
        (["model.aux_loss_coef=0.1"], "model.aux_loss_coef", "moe_aux_loss_coeff"),
        (["ulysses_sequence_parallel_size=2"], "ulysses_sequence_parallel_size", "strategy=fsdp"),
        (["engine.pipeline_model_parallel_size=8"], "model.megatron.tensor_model_parallel_size", "pipeline_model_parallel_size=8"),
    ],
)  # fmt: skip
def test_supervised_training_is_checked_in_the_same_way(words, key, said):
    loaded = load("sft_trainer", ["model.strategy=megatron", "trainer.n_gpus_per_node=4", *words])
    found = {finding.key: finding.message for finding in check(loaded) if finding.level == "error"}
    assert said in found[key]


@pytest.mark.parametrize(
    "words",
    [
        [RANK],
        [RANK, f"{TARGETS}=[q_proj,lm_head]", "actor_rollout_ref.model.exclude_modules=[lm_head]"],
        [RANK, f"{TARGETS}='model.layers.*(q_proj|v_proj)'"],
        [f"{TARGETS}=[lm_head]"],  # without adapters it says nothing
        [
            "algorithm.adv_estimator=gae",
            "critic.model.lora_rank=8",
            "critic.model.target_modules=[q_proj,lm_head]",
        ],
    ],
)
def test_targets_inside_the_layers_pass(words):
    loaded = load("ppo_trainer", [f"{ACTOR}.strategy=megatron", *words])
    assert not [finding for finding in check(loaded) if "target_modules" in finding.key]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules includes lm_head"),
        ({"target_modules": ["q_proj"], "lora_dropout": 0.1}, "lora_dropout=0.1, which actor_rollout_ref.actor"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, r"modules_to_save=['lm_head']"),
        ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora=True"),
        ({"target_modules": ["q_proj"], "lora_dropout": 0.0, "modules_to_save": None}, None),
    ],
)  # fmt: skip
def test_adapters_of_a_folder_are_checked_by_their_file(said, expected, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))
    words = [
        f"actor_rollout_ref.model.lora_adapter_path={tmp_path}",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B",
    ]
    config = load("ppo_trainer", [f"{ACTOR}.strategy=megatron", *words]).config
    found = megatron_findings(megatron_roles(config))
    assert bool(found) == (expected is not None)
    for finding in found:
        assert finding.level == "error" and expected in finding.message


def test_rows_of_an_update_are_divided_over_copies_of_the_model():
    words = [
        "model.strategy=megatron",
        "model.megatron.tensor_model_parallel_size=2",
        "data.train_batch_size=8",
    ]
    plan = plan_supervised(load("sft_trainer", [*words, "trainer.n_gpus_per_node=4"]).config)
    assert plan.rows_per_device == 4


def test_the_reference_is_divided_as_the_actor_is():
    words = [f"{ACTOR}.megatron.tensor_model_parallel_size=2", f"{ACTOR}.megatron.dtype=float32"]
    ref = load("ppo_trainer", words).config.actor_rollout_ref.ref.megatron
    assert ref.tensor_model_parallel_size == 2 and ref.dtype == "float32"


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    loaded = load("ppo_trainer", [f"{ACTOR}.strategy=megatron"])
    found = {finding.key: finding.message for finding in check(loaded)}
    assert "megatron-core" in found[f"{ACTOR}.strategy"] and "pip install" in found[f"{ACTOR}.strategy"]
