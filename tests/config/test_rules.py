"""Rules between keys, the arithmetic of batches, roles and the objective."""

from __future__ import annotations

import inspect

import pytest

from strop.catalog import POLICY_LOSSES
from strop.config.arithmetic import plan_ppo, sampling_precision
from strop.config.compose import load
from strop.config.derived import roles, rollout_correction
from strop.config.objective import objective
from strop.config.rules import check

READY = [
    "actor_rollout_ref.model.path=m",
    "data.train_files=f.parquet",
    "trainer.save_freq=10",
    "data.train_batch_size=32",
]
GRPO = [
    *READY,
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
]


def found(*overrides, base=GRPO, root="ppo_trainer"):
    return check(load(root, [*base, *overrides]))


def errors(*overrides, **kwargs):
    return {f.key: f.message for f in found(*overrides, **kwargs) if f.level == "error"}


def warnings(*overrides, **kwargs):
    return {f.key: f.message for f in found(*overrides, **kwargs) if f.level == "warning"}


def test_a_sound_configuration_has_no_findings():
    assert found() == []


def test_the_arithmetic_of_the_first_document():
    """1024 prompts, 32 per step, n 8, 128 sequences per update in micro-batches of 4 on 8 devices."""
    loaded = load(
        "ppo_trainer",
        [*GRPO, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "trainer.n_gpus_per_node=8"],
    )
    plan = plan_ppo(loaded.config, rows=1024)
    assert plan.steps_per_epoch == 32
    assert plan.sequences_per_step == 256
    assert plan.updates_per_step == 2
    assert plan.accumulation == 4
    assert not plan.on_policy
    on = load("ppo_trainer", [*GRPO, "actor_rollout_ref.actor.ppo_mini_batch_size=32"])
    assert plan_ppo(on.config).on_policy


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["actor_rollout_ref.model.path=null"], "actor_rollout_ref.model.path", ["not set"]),
        (["data.train_files=null"], "data.train_files", ["not set"]),
        (
            ["actor_rollout_ref.actor.ppo_mini_batch_size=64"],
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            ["64", "train_batch_size=32", "Set it to 32"],
        ),
        (
            ["trainer.n_gpus_per_node=3", "actor_rollout_ref.actor.ppo_mini_batch_size=16"],
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            ["128 sequences", "3 ranks", "15 or 18"],
        ),
        (
            ["trainer.n_gpus_per_node=6", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"],
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
            ["6 devices", "4 or 8"],
        ),
        (
            [
                "actor_rollout_ref.actor.use_dynamic_bsz=true",
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1000",
            ],
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            ["1024", "1000"],
        ),
        (
            [
                "actor_rollout_ref.actor.ppo_micro_batch_size=8",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            ],
            "actor_rollout_ref.actor.ppo_micro_batch_size",
            ["Keep only"],
        ),
        (["actor_rollout_ref.rollout.temperature=0"], "actor_rollout_ref.rollout.n", ["the same"]),
        (
            ["actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=rloo"],
            "actor_rollout_ref.rollout.n",
            ["at least 2"],
        ),
        (["algorithm.adv_estimator=gae", "critic.enable=false"], "critic.enable", ["gae needs values"]),
        (
            [
                "algorithm.rollout_correction.rollout_is=token",
                "actor_rollout_ref.rollout.calculate_log_probs=false",
            ],
            "actor_rollout_ref.rollout.calculate_log_probs",
            ["Set it to true"],
        ),
        (["reward_model.enable=true"], "reward_model.model.path", ["remote_url"]),
        (
            ["actor_rollout_ref.actor.strategy=veomni"],
            "actor_rollout_ref.actor.strategy",
            ["not supported"],
        ),
        (
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/x"],
            "trainer.resume_from_path",
            ["global_step_N"],
        ),
        (
            ["actor_rollout_ref.actor.optim.betas=[0.9]"],
            "actor_rollout_ref.actor.optim.betas",
            ["two numbers"],
        ),
        (
            ["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=4"],
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            ["2 devices"],
        ),
        (
            ["actor_rollout_ref.rollout.agent.service=true"],
            "actor_rollout_ref.rollout.agent.service",
            ["agent.command"],
        ),
        (
            [
                "actor_rollout_ref.rollout.agent.command=x",
                "actor_rollout_ref.rollout.agent.players=[a,a]",
                "actor_rollout_ref.rollout.agent.reward=file",
            ],
            "actor_rollout_ref.rollout.agent.players",
            ["different names"],
        ),
        (
            ["actor_rollout_ref.rollout.agent.credit=turn", "algorithm.adv_estimator=opo"],
            "actor_rollout_ref.rollout.agent.credit",
            ["turn is defined for grpo", "credit=shared"],
        ),
        (
            ["actor_rollout_ref.rollout.agent.credit=turn", "algorithm.compat=openrlhf"],
            "actor_rollout_ref.rollout.agent.credit",
            ["before", "credit=shared"],
        ),
        (
            ["actor_rollout_ref.rollout.agent.command=x", "actor_rollout_ref.rollout.agent.players=[a,b]"],
            "actor_rollout_ref.rollout.agent.players",
            ["agent.reward=file"],
        ),
        (
            [
                "trainer.n_gpus_per_node=2",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
                "actor_rollout_ref.rollout.agent.command=x",
            ],
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            ["on one device"],
        ),
        (["data.custom_cls.path=x.py"], "data.custom_cls", ["both or neither"]),
        (["reward_model.clip_range=[1,0]"], "reward_model.clip_range", ["low < high"]),
        (["trainer.val_only=true"], "data.val_files", ["val_only"]),
        (
            ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.strict=true"],
            "actor_rollout_ref.rollout.name",
            ["not installed", "native"],
        ),
    ],
)
def test_errors_say_what_clashes_and_what_to_set(overrides, key, words):
    messages = errors(*overrides)
    assert key in messages, messages
    for word in words:
        assert word in messages[key], messages[key]


def test_clip_ratio_sets_both_sides_unless_one_is_given():
    both = load("ppo_trainer", [*GRPO, "actor_rollout_ref.actor.clip_ratio=0.1"]).config
    assert "clip 0.9..1.1" in objective(both)
    one = load(
        "ppo_trainer",
        [*GRPO, "actor_rollout_ref.actor.clip_ratio=0.1", "actor_rollout_ref.actor.clip_ratio_high=0.28"],
    )
    assert "clip 0.9..1.28" in objective(one.config)
    dead = warnings(
        "actor_rollout_ref.actor.clip_ratio=0.1",
        "actor_rollout_ref.actor.clip_ratio_low=0.2",
        "actor_rollout_ref.actor.clip_ratio_high=0.2",
    )
    assert "no effect" in dead["actor_rollout_ref.actor.clip_ratio"]


def test_kl_switches():
    assert "use_kl_in_reward" in warnings("algorithm.kl_ctrl.kl_coef=0.1")["algorithm.kl_ctrl.kl_coef"]
    assert (
        "use_kl_loss"
        in warnings("actor_rollout_ref.actor.kl_loss_coef=0.1")["actor_rollout_ref.actor.kl_loss_coef"]
    )
    off = warnings("algorithm.kl_ctrl.kl_coef=0.0", "actor_rollout_ref.actor.kl_loss_coef=0.0")
    assert not any("kl_" in key for key in off)
    both = ["algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.use_kl_loss=true"]
    assert "acts twice" in warnings(*both)["algorithm.use_kl_in_reward"]
    text = objective(load("ppo_trainer", [*GRPO, *both]).config)
    assert "0.001*KL[kl, fixed]" in text and "0.001*KL[low_var_kl]" in text


@pytest.mark.parametrize("estimator", ["kl", "k1", "K1", "kl+", "k1+", "mse", "low_var_kl", "abs"])
def test_the_log_ratio_as_a_loss_restrains_nothing(estimator):
    key = "actor_rollout_ref.actor.kl_loss_type"
    said = warnings(f"{key}={estimator}", "actor_rollout_ref.actor.use_kl_loss=true")
    assert (key in said) == (estimator.lower() in ("kl", "k1"))
    assert key not in said or f"or {estimator}+ (the same value" in said[key]
    in_reward = warnings("algorithm.use_kl_in_reward=true", f"algorithm.kl_penalty={estimator}")
    assert not any("kl" in found for found in in_reward)


def test_the_penalty_for_long_responses_fits_into_them():
    key, on = "reward_model.overlong_buffer.len", "reward_model.overlong_buffer.enable=true"
    limit = "data.max_response_length=100"
    for length in (0, 101):
        assert "between 1 and the longest response, 100" in errors(on, limit, f"{key}={length}")[key]
        assert key not in errors(limit, f"{key}={length}"), "the penalty is off"
    assert key not in errors(on, limit, f"{key}=100")
    whole = "+reward_model.reward_kwargs.max_resp_len=200"
    assert key not in errors(on, limit, f"{key}=101", whole)
    assert "response, 200" in errors(on, limit, f"{key}=201", whole)[key]


def test_dropout_of_adapters_is_for_supervised_training():
    key, lora = "actor_rollout_ref.model.lora_dropout", "actor_rollout_ref.model.lora_rank=8"
    assert "ratio is not 1" in warnings(lora, f"{key}=0.1")[key]
    assert key not in warnings(lora) and key not in warnings(f"{key}=0.1")
    sft = ["model.path=m", "data.train_files=f.parquet", "model.lora_rank=8", "model.lora_dropout=0.1"]
    assert "model.lora_dropout" not in warnings(base=sft, root="sft_trainer")


def test_an_adapter_to_start_from_is_not_part_of_the_reference():
    """The KL to the model without it is not that to the policy at the start."""
    key, ref = "actor_rollout_ref.model.lora_adapter_path", "actor_rollout_ref.ref.model"
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    assert key not in warnings(f"{key}=folder")
    assert key not in warnings("actor_rollout_ref.model.lora_rank=8", kl)
    dead = warnings(f"{key}=folder", f"+{ref}.path=other", kl)
    assert "without the adapter folder" in dead[key] and "not read" in dead[ref]
    assert "not read" in warnings("actor_rollout_ref.model.lora_rank=8", f"+{ref}.path=other", kl)[ref]


def test_roles_follow_from_facts_not_names():
    def there(*overrides):
        return {role.name: role.exists for role in roles(load("ppo_trainer", [*GRPO, *overrides]).config)}

    assert there() == {"actor": True, "critic": False, "reference": False, "reward model": False}
    assert there("algorithm.adv_estimator=gae")["critic"]
    assert there("critic.enable=true")["critic"]
    assert there("actor_rollout_ref.actor.use_kl_loss=true")["reference"]
    assert there("algorithm.adv_estimator=remax")["greedy baseline"]
    assert there("reward_model.enable=true", "reward_model.model.path=r")["reward model"]


def test_micro_batch_sizes_are_derived_when_unset():
    plan = plan_ppo(load("ppo_trainer", GRPO).config)
    assert plan.micro_batch == 8 and plan.accumulation == 16
    old = plan_ppo(
        load(
            "ppo_trainer",
            [*GRPO, "trainer.n_gpus_per_node=8", "actor_rollout_ref.actor.ppo_micro_batch_size=32"],
        ).config
    )
    assert old.micro_batch == 4


DYNAMIC = ("actor_rollout_ref.actor.use_dynamic_bsz=true", "data.max_prompt_length=512")
CRITIC = ("algorithm.adv_estimator=gae", "critic.model.path=m")


@pytest.mark.parametrize(
    "key, more",
    [
        (
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
            ["actor_rollout_ref.actor.ppo_mini_batch_size=8"],
        ),
        (
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
            ["actor_rollout_ref.actor.use_kl_loss=true"],
        ),
        ("critic.ppo_max_token_len_per_gpu", CRITIC),
        ("critic.forward_max_token_len_per_gpu", CRITIC),
    ],
)
def test_every_token_budget_holds_the_longest_sequence(key, more):
    """Else a run ends in the middle, when the first response is too long for a pass."""
    base = [*DYNAMIC, "data.max_response_length=512", f"{key}=600", *more]
    assert "at least 1024" in errors(*base)[key]
    # Ranks of the actor that share a row do not help another model, unless they share its rows as well.
    shared = [*base, "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"]
    section = key.rpartition(".")[0]
    own = {
        "critic": "critic.ulysses_sequence_parallel_size",
        "actor_rollout_ref.ref": f"{section}.ulysses_sequence_parallel_size",
    }
    if section in own:
        assert key in errors(*shared, f"{own[section]}=1")
        assert key not in errors(*shared, f"{own[section]}=2")
    else:
        assert key not in errors(*shared)
    assert not errors(*DYNAMIC, "data.max_response_length=512", f"{key}=1024", *more)


def test_the_token_budget_of_a_pass_that_is_not_made_may_be_anything():
    key = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
    short = (*DYNAMIC, "data.max_response_length=512", f"{key}=600")
    assert key in errors(*short)
    assert not errors(*short, "actor_rollout_ref.actor.ppo_mini_batch_size=32")  # one update per step


def test_uneven_mini_batches_are_a_warning_with_the_nearest_size():
    assert (
        "24 or 36"
        in warnings("actor_rollout_ref.actor.ppo_mini_batch_size=12")[
            "actor_rollout_ref.actor.ppo_mini_batch_size"
        ]
    )


def test_other_roots():
    assert set(errors(base=[], root="generation")) == {"model.path", "data.path", "data.output_path"}
    assert set(errors(base=[], root="evaluation")) == {"data.path"}
    assert set(errors(base=[], root="sft_trainer")) == {"model.path", "data.train_files"}
    uneven = errors(
        "trainer.n_gpus_per_node=3", "model.path=m", "data.train_files=f", base=[], root="rm_trainer"
    )
    assert "126 or 129" in uneven["data.train_batch_size"]


def test_the_number_of_responses_of_generation_has_one_name():
    whole = {"base": [], "root": "generation"}
    assert "Set data.n_samples=4 instead" in errors("rollout.n=4", **whole)["rollout.n"]
    for words in (["rollout.n=1"], ["rollout.n=4", "data.n_samples=4"]):  # verl's file has n: 1
        assert "rollout.n" not in errors(*words, **whole)
    size = "rollout.tensor_model_parallel_size"
    assert "every device holds the whole model" in warnings(f"{size}=2", **whole)[size]


def test_what_tensor_parallelism_does_not_go_together_with():
    tensor, four = "actor_rollout_ref.actor.tensor_parallel_size", "trainer.n_gpus_per_node=4"
    assert tensor not in errors(f"{tensor}=2", four)
    both = errors(f"{tensor}=2", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", four)
    assert "share matrices or rows, not both" in both[tensor]
    assert "LoRA" in errors(f"{tensor}=2", "actor_rollout_ref.model.lora_rank=8", four)[tensor]
    assert (
        "3 does not divide the 4 devices"
        in errors("critic.tensor_parallel_size=3", four)["critic.tensor_parallel_size"]
    )
    engine = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    native = ["actor_rollout_ref.rollout.name=native", f"{engine}=2", four]
    assert engine not in errors(*native)
    assert "conversations" in errors(*native, "actor_rollout_ref.rollout.multi_turn.enable=true")[engine]
    assert "samples on one device" in errors("actor_rollout_ref.rollout.name=hf", f"{engine}=2", four)[engine]


def test_4_bit_weights_need_adapters_and_one_device():
    key = "actor_rollout_ref.model.quantization"
    rank = "actor_rollout_ref.model.lora_rank=8"
    assert "nothing could be trained" in errors(f"{key}=nf4")[key]
    assert key not in errors(f"{key}=nf4", rank)
    assert "4-bit weights are not sharded" in errors(f"{key}=nf4", rank, "trainer.n_gpus_per_node=4")[key]
    engine = "actor_rollout_ref.rollout.quantization"
    both = errors(f"{key}=nf4", rank, "actor_rollout_ref.rollout.name=native", f"{engine}=int8")
    assert "samples from the 4-bit weights" in both[engine]
    critic = ["algorithm.adv_estimator=gae", "critic.model.quantization=nf4"]
    assert "without LoRA" in errors(*critic)["critic.model.quantization"]
    megatron = errors(f"{key}=nf4", rank, "actor_rollout_ref.actor.strategy=megatron")
    assert "4-bit weights are not divided" in megatron[key]


def test_what_expert_parallelism_does_not_go_together_with():
    key, four = "actor_rollout_ref.actor.fsdp_config.expert_parallel_size", "trainer.n_gpus_per_node=4"
    assert key not in errors(f"{key}=2", four)
    assert "3 does not divide the 4 devices" in errors(f"{key}=3", four)[key]
    assert (
        "Set one of [1, 2]"
        in errors(f"{key}=4", "actor_rollout_ref.actor.fsdp_config.fsdp_size=2", four)[key]
    )
    assert "LoRA" in errors(f"{key}=2", "actor_rollout_ref.model.lora_rank=8", four)[key]
    matrices = errors(f"{key}=2", "actor_rollout_ref.actor.tensor_parallel_size=2", four)
    assert "share matrices or experts, not both" in matrices[key]
    megatron = errors(f"{key}=2", "actor_rollout_ref.actor.strategy=megatron", four)
    assert "megatron.expert_model_parallel_size" in megatron[key]
    supervised = ["model.path=m", "data.train_files=f", "model.fsdp_config.expert_parallel_size=3", four]
    assert "model.fsdp_config.expert_parallel_size" in errors(*supervised, base=[], root="sft_trainer")


def test_groups_of_ranks_that_share_the_weights():
    key, four = "actor_rollout_ref.actor.fsdp_config.fsdp_size", "trainer.n_gpus_per_node=4"
    assert key not in errors(f"{key}=2", four) and key not in errors(f"{key}=3")  # one device shares nothing
    assert "3 does not divide the 4 devices" in errors(f"{key}=3", four)[key]
    assert key not in errors(f"{key}=8", four)  # a command for more devices, as in verl: all four
    experts = "actor_rollout_ref.actor.fsdp_config.expert_parallel_size"
    assert "does not divide the 4 devices" in errors(f"{key}=8", f"{experts}=8", four)[experts]
    matrices = errors(f"{key}=2", "actor_rollout_ref.actor.tensor_parallel_size=4", four)
    assert "tensor_parallel_size=4 does not divide the 2 devices" in matrices[key]
    critic = "critic.model.fsdp_config.fsdp_size"
    assert critic in errors(f"{critic}=3", four, "algorithm.adv_estimator=gae")
    assert critic not in errors(f"{critic}=3", four, "algorithm.adv_estimator=grpo")
    ref, uses = "actor_rollout_ref.ref.fsdp_config.fsdp_size", "actor_rollout_ref.actor.use_kl_loss=true"
    assert ref in errors(f"{ref}=3", four, uses) and ref not in errors(f"{ref}=3", four)
    whole_copies = ["trainer.runtime=ray", "actor_rollout_ref.ref.nnodes=1"]
    assert ref not in errors(f"{ref}=3", four, uses, *whole_copies)
    teacher = ["algorithm.distillation.enable=true", "algorithm.distillation.path=t"]
    assert ref in errors(f"{ref}=3", four, *teacher)
    supervised = ["model.path=m", "data.train_files=f", "model.fsdp_config.fsdp_size=3", four]
    assert "model.fsdp_config.fsdp_size" in errors(*supervised, base=[], root="sft_trainer")


def test_a_lent_actor_cannot_be_parked():
    key = "actor_rollout_ref.actor.fsdp_config.param_offload"
    assert "no effect on one device" in warnings(f"{key}=true")[key]
    assert key not in warnings(f"{key}=true", "trainer.n_gpus_per_node=2")


def test_what_shared_matrices_of_supervised_training_do_not_go_together_with():
    base, key = ["model.path=m", "data.train_files=f", "trainer.n_gpus_per_node=4"], "tensor_parallel_size"

    def of(*overrides):
        return errors(*overrides, base=base, root="sft_trainer")

    assert of(f"{key}=2") == {}
    assert "3 does not divide the 4 devices" in of(f"{key}=3")[key]
    assert "share matrices or rows, not both" in of(f"{key}=2", "ulysses_sequence_parallel_size=2")[key]
    assert "LoRA" in of(f"{key}=2", "model.lora_rank=8")[key]
    # Two ranks are a team: four devices share a batch by two, not by four.
    assert of(f"{key}=2", "data.train_batch_size=6") == {}
    assert "shared by 4 ranks" in of("data.train_batch_size=6")["data.train_batch_size"]


def test_transports_of_weights_that_are_not_there():
    rollout, path = "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.checkpoint_engine"
    for backend in ("naive", "nccl", "file"):
        assert found(rollout, f"{path}.backend={backend}", "trainer.runtime=ray") == []
    for backend in ("nixl", "hccl"):
        message = errors(rollout, f"{path}.backend={backend}")[f"{path}.backend"]
        assert (
            f"{backend} is not there. Set nccl (a broadcast" in message
            and "naive" in message
            and "file" in message
        )
    ignored = warnings(f"{path}.backend=nccl")[f"{path}.backend"]
    assert "nccl has no effect without actor_rollout_ref.rollout.nnodes" in ignored
    own = f"+{path}.engine_kwargs.folder=/shared"
    assert found(rollout, f"{path}.backend=file", own) == []
    assert (
        "folder has no effect with backend=nccl"
        in warnings(rollout, f"{path}.backend=nccl", own)[f"{path}.engine_kwargs"]
    )
    of_verl = f"+{path}.engine_kwargs.delta_sharded.encoding=indices"
    assert "no effect" in warnings(rollout, of_verl)[f"{path}.engine_kwargs.delta_sharded"]
    assert (
        "unknown setting 'foldr'"
        in errors(rollout, f"+{path}.engine_kwargs.foldr=x")[f"{path}.engine_kwargs"]
    )


@pytest.mark.parametrize(
    "override, key",
    [
        (
            "draft_model=small actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.n_gpus_per_node=2",
            "draft_model",
        ),
        ("mtp=true actor_rollout_ref.rollout.speculation.draft_model=small", "mtp"),
        (
            "mtp=true actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.n_gpus_per_node=2",
            "mtp",
        ),
        ("min_match=9", "min_match"),
        ("enable=true actor_rollout_ref.rollout.name=hf", "enable"),
    ],
)
def test_speculation_that_cannot_be_is_refused(override, key):
    prefix = "actor_rollout_ref.rollout.speculation"
    messages = errors(*f"{prefix}.{override}".split())
    assert set(messages) == {f"{prefix}.{key}"}
    assert not errors(f"{prefix}.enable=true", f"{prefix}.num_tokens=3")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["quantization=fp8", "name=hf"], "rollout.name=hf samples"),
        (["quantization=fp-8"], "Did you mean 'fp8'"),
        (["quantization=int8", "tensor_model_parallel_size=2"], "whole weights only"),
        (["quantization=fp8"], "trainer.device=cpu"),
        (["quantization=int8"], None),
        (["quantization=torchao", "name=vllm", "+engine_kwargs.vllm.python=python"], None),
    ],
)
def test_which_engines_sample_with_quantised_weights(overrides, message):
    section = "actor_rollout_ref.rollout."
    keys = [f"+{section}{word[1:]}" if word[0] == "+" else section + word for word in overrides]
    got = errors(*keys, "trainer.device=cpu", "trainer.n_gpus_per_node=2").get(f"{section}quantization")
    if message is None:
        assert got is None
    else:
        assert message in got


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["kv_cache_dtype=fp8", "name=hf"], "Set actor_rollout_ref.rollout.name=native"),
        (["kv_cache_dtype=fp-8"], "Did you mean 'fp8'"),
        (["kv_cache_dtype=fp8"], None),
        (["kv_cache_dtype=fp8_e5m2", "name=vllm", "+engine_kwargs.vllm.python=python"], None),
    ],
)
def test_which_engines_have_a_kv_cache_of_8_bits(overrides, message):
    section = "actor_rollout_ref.rollout."
    keys = [f"+{section}{word[1:]}" if word[0] == "+" else section + word for word in overrides]
    got = errors(*keys, "trainer.device=cpu").get(f"{section}kv_cache_dtype")
    assert got is None if message is None else message in got


def test_a_kv_cache_of_8_bits_is_corrected_by_default():
    config = load("ppo_trainer", [*GRPO, "actor_rollout_ref.rollout.kv_cache_dtype=fp8"]).config
    assert rollout_correction(config).rollout_is == "token"
    shown = {row[0]: row[1:] for row in plan_ppo(config).table()}["rollout precision"]
    default = "rollout_is=token, truncated at 2.0 (the default with rollout.kv_cache_dtype)"
    assert shown == ("fp8 KV cache", default)


def test_quantised_rollouts_are_corrected_by_default():
    correction = "algorithm.rollout_correction."
    quantised = "actor_rollout_ref.rollout.quantization=int8"

    def weights(*overrides):
        config = load("ppo_trainer", [*GRPO, quantised, *overrides]).config
        chosen = rollout_correction(config)
        shown = {row[0]: row[1:] for row in plan_ppo(config).table()}["rollout precision"]
        return chosen.rollout_is, chosen.rollout_is_threshold, shown[1]

    assert sampling_precision(load("ppo_trainer", GRPO).config) == "bfloat16"
    assert sampling_precision(load("ppo_trainer", [*GRPO, quantised]).config) == "8 bits"
    default = "rollout_is=token, truncated at 2.0 (the default with rollout.quantization)"
    assert weights() == ("token", 2.0, default)
    assert weights(f"{correction}rollout_is=sequence")[0] == "sequence"
    assert weights(f"{correction}rollout_is_threshold=null")[::2] == (None, "no correction")
    assert weights(f"{correction}bypass_mode=true")[::2] == (None, "the engine's log-probs")
    key = "actor_rollout_ref.rollout.calculate_log_probs"
    assert "compares with the engine's log-probs" in errors(quantised, f"{key}=false")[key]


def test_bypass_mode_has_a_loss_of_its_own():
    loss_mode = "actor_rollout_ref.actor.policy_loss.loss_mode"
    correction = "algorithm.rollout_correction"
    bypass = f"{correction}.bypass_mode=true"
    assert not errors(bypass) and not errors(bypass, f"{loss_mode}=vanilla")
    refused = errors(bypass, f"{loss_mode}=gspo")[loss_mode]
    assert "loss_type=ppo_clip" in refused and "use_rollout_log_probs=true" in refused
    assert not errors(f"{loss_mode}=gspo", "actor_rollout_ref.actor.use_rollout_log_probs=true")
    assert f"{correction}.bypass_mode=true" in errors(f"{loss_mode}=bypass_mode")[loss_mode]
    normalize = f"{correction}.rollout_is_batch_normalize"
    assert "micro-batch" in errors(bypass, f"{correction}.rollout_is=token", f"{normalize}=true")[normalize]
    assert "of the bypass_mode surrogate (clip 0.8" in objective(load("ppo_trainer", [*GRPO, bypass]).config)


def test_the_objective_has_the_clip_range_of_losses_that_clip() -> None:
    """Those that take clip_low; the preflight said `(clip 0.8..1.2)` of REINFORCE too."""
    loss_mode = "actor_rollout_ref.actor.policy_loss.loss_mode"
    for name in POLICY_LOSSES.names():
        entry = POLICY_LOSSES.entry(name)
        if name != "bypass_mode":
            shown = "(clip " in objective(load("ppo_trainer", [*GRPO, f"{loss_mode}={name}"]).config)
            assert shown == ("clip_low" in inspect.signature(entry.load()).parameters), name
    correction = "algorithm.rollout_correction"
    reinforce = [f"{correction}.bypass_mode=true", f"{correction}.loss_type=reinforce"]
    assert "(clip" not in objective(load("ppo_trainer", [*GRPO, *reinforce]).config)


def test_vespo_multiplies_the_weights_of_tokens() -> None:
    """Weights of a sequence, on each of its tokens, would be multiplied once per token."""
    correction = "algorithm.rollout_correction"
    vespo = "actor_rollout_ref.actor.policy_loss.loss_mode=vespo"
    rollout_is = f"{correction}.rollout_is"
    assert "Set it to token" in errors(vespo, f"{rollout_is}=sequence")[rollout_is]
    normalized = f"{correction}.rollout_is_batch_normalize"
    found = errors(vespo, f"{rollout_is}=token", f"{normalized}=true")
    assert "Set it to false" in found[normalized]
    assert not {rollout_is, normalized} & errors(vespo, f"{rollout_is}=token").keys()
    assert not {rollout_is} & errors(f"{rollout_is}=sequence").keys()


def test_gradient_checkpointing_named_twice():
    model = "actor_rollout_ref.model"
    both = [f"{model}.gradient_checkpointing=none", f"{model}.enable_gradient_checkpointing=true"]
    assert "Leave out one" in errors(*both)[f"{model}.gradient_checkpointing"]
    agree = [f"{model}.gradient_checkpointing=selective", f"{model}.enable_gradient_checkpointing=true"]
    assert f"{model}.gradient_checkpointing" not in errors(*agree)


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
@pytest.mark.parametrize("root", ["ppo_trainer", "sft_trainer"])
def test_optimizers_that_do_not_fit_into_an_update(root: str, name: str) -> None:
    section = "actor_rollout_ref.actor.optim" if root == "ppo_trainer" else "optim"
    words = [f"{section}.optimizer={name}", "data.train_files=x"]
    found = [str(finding) for finding in check(load(root, words))]
    assert any(f"{section}.optimizer: {name}" in text and "Set AdamW." in text for text in found)
    own = [str(finding) for finding in check(load(root, [*words, f"{section}.optimizer_impl=mine"]))]
    assert not any("Set AdamW." in text for text in own)
