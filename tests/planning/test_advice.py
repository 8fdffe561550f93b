"""Configurations that do not fit are refused with the setting to change, and what is proposed fits."""

from __future__ import annotations

import pytest

from strop.config.arithmetic import plan_ppo, plan_supervised
from strop.config.compose import load
from strop.planning.advice import advise, alternatives, complaint
from strop.planning.devices import PlannedCluster, device_of
from strop.planning.forecast import forecast
from strop.planning.job import job_of
from strop.planning.knobs import changed, fits
from strop.planning.times import seconds
from strop.ppo.micro_batching import micro_batches
from strop.supervised.build import build_task, micro_batching

MODEL = "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct"
COMMON = (
    MODEL,
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=8",
    "data.max_prompt_length=1024",
    "data.max_response_length=3072",
)
TOKENS = "actor_rollout_ref.actor.use_dynamic_bsz=true"


def configured(*overrides, root="ppo_trainer"):
    return load(root, [*COMMON, *overrides] if root == "ppo_trainer" else list(overrides)).config


def cluster(gpu="h100", nodes=1, per_node=8):
    return PlannedCluster(device_of(gpu), nodes, per_node)


def keys(advice):
    return [change.key.rsplit(".", 1)[-1] for change in advice.changes]


CASES = [
    (
        (TOKENS, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=262144"),
        cluster(),
        ["ppo_max_token_len_per_gpu"],
    ),
    (
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",),
        cluster(),
        ["ppo_micro_batch_size_per_gpu"],
    ),
    (("actor_rollout_ref.rollout.gpu_memory_utilization=0.1",), cluster(), ["gpu_memory_utilization"]),
    (("actor_rollout_ref.actor.fsdp_config.fsdp_size=1",), cluster(), ["fsdp_size"]),
    (("actor_rollout_ref.model.path=qwen2.5-32b", TOKENS), cluster(nodes=8), ["tensor_model_parallel_size"]),
    (
        ("actor_rollout_ref.ref.fsdp_config.fsdp_size=1", "actor_rollout_ref.actor.use_kl_loss=true"),
        cluster("40GiB"),
        ["fsdp_size"],
    ),
]


@pytest.mark.parametrize("overrides, where, expected", CASES)
def test_the_right_knob_is_named_and_what_is_proposed_fits(overrides, where, expected):
    config = configured(*overrides)
    advice = advise(config, where)
    assert not advice.fits and not advice.hopeless
    assert set(expected) <= set(keys(advice)), complaint(advice)
    assert all(str(change) in complaint(advice) for change in advice.changes)
    better = changed(config, *advice.changes)
    assert advise(better, where).fits


def test_proposals_as_overrides_are_accepted_too():
    overrides = (TOKENS, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=262144")
    advice = advise(configured(*overrides), cluster())
    assert advise(configured(*overrides, *map(str, advice.changes)), cluster()).fits


def test_a_model_that_no_setting_fits_is_hopeless_and_more_devices_are_named():
    advice = advise(configured(), cluster(per_node=1))
    assert advice.hopeless and advice.cluster is not None and advice.cluster.ranks > 1
    assert "No setting helps" in complaint(advice)
    larger = advise(configured(), advice.cluster)
    assert larger.fits or larger.changes


SMALL_GPU = ("actor_rollout_ref.model.path=qwen2.5-1.5b", TOKENS)
ADAPTER_CASES = [
    ("ppo_trainer", SMALL_GPU, "24GiB", "LoRA"),
    ("ppo_trainer", (TOKENS, "algorithm.adv_estimator=gae"), "a100-40", "QLoRA"),
    ("ppo_trainer", (TOKENS,), "h100", "LoRA"),
    ("sft_trainer", ("model.path=qwen2.5-7b",), "4090", "QLoRA"),
    ("dpo_trainer", ("model.path=qwen2.5-7b",), "a100-40", "LoRA"),
    ("rm_trainer", ("model.path=qwen2.5-0.5b",), "8GiB", "LoRA"),
]


@pytest.mark.parametrize("root, overrides, gpu, kind", ADAPTER_CASES)
def test_adapters_with_which_a_run_fits_are_named(root, overrides, gpu, kind):
    config = configured(*overrides, root=root)
    where = cluster(gpu, per_node=1)
    advice = advise(config, where)
    assert advice.hopeless
    keys_of = " ".join(map(str, advice.adapters))
    assert f"With {kind} it fits these devices: set {keys_of}." in complaint(advice)
    assert advise(changed(config, *advice.adapters), where).fits
    only_lora = [change for change in advice.adapters if not change.key.endswith(".quantization")]
    assert advise(changed(config, *only_lora), where).fits == (kind == "LoRA")


@pytest.mark.parametrize(
    "overrides, where",
    [
        ((MODEL.replace("7B", "72B"), TOKENS), cluster("24GiB", per_node=1)),
        (
            (TOKENS, "actor_rollout_ref.actor.fsdp_config.expert_parallel_size=2"),
            cluster("16GiB", per_node=2),
        ),
        ((TOKENS, "actor_rollout_ref.rollout.quantization=int8"), cluster("16GiB", per_node=1)),
    ],
)
def test_adapters_that_do_not_fit_or_are_not_possible_are_not_named(overrides, where):
    advice = advise(configured(*overrides), where)
    assert not advice.fits and not advice.adapters and "LoRA" not in complaint(advice)


def test_rooms_for_larger_micro_batches_fit():
    config = configured(TOKENS)
    advice = advise(config, cluster())
    assert advice.fits and advice.room
    for change in advice.room:
        assert change.value > change.was
        assert fits(forecast(job_of(changed(config, change), cluster())))


def test_more_of_everything_takes_more():
    def peak(*overrides, per_node=8):
        return forecast(job_of(configured(*overrides), cluster(per_node=per_node))).peak.total

    base = peak()
    assert peak("actor_rollout_ref.model.enable_gradient_checkpointing=false") > base
    assert peak("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16") > peak(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"
    )
    assert peak("algorithm.adv_estimator=gae") > base
    assert peak(per_node=4) > base
    assert peak("actor_rollout_ref.actor.fsdp_config.offload_policy=true") < base


def test_adapters_take_a_fraction_of_training_all_weights():
    whole = forecast(job_of(configured(), cluster(per_node=1))).phases[-1].total
    adapted = (
        forecast(job_of(configured("actor_rollout_ref.model.lora_rank=32"), cluster(per_node=1)))
        .phases[-1]
        .total
    )
    assert adapted < whole / 5
    assert advise(configured("actor_rollout_ref.model.lora_rank=32"), cluster(per_node=1)).fits


def test_roles_exist_as_the_configuration_needs_them():
    names = lambda *overrides: set(job_of(configured(*overrides), cluster()).models)  # noqa: E731
    assert names() == {"actor"}
    assert names("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true") == {
        "actor",
        "critic",
        "reference",
    }
    assert names("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.model.lora_rank=8") == {
        "actor"
    }
    assert names("reward_model.enable=true", "reward_model.model.path=qwen2.5-0.5b") == {"actor", "reward"}


@pytest.mark.parametrize("root", ["sft_trainer", "rm_trainer", "dpo_trainer"])
def test_supervised_runs_are_planned(root):
    config = configured("model.path=llama-3-8b", root=root)
    assert advise(config, cluster(per_node=8)).fits
    assert not advise(config, cluster("4090", per_node=1)).fits
    assert set(seconds(forecast(job_of(config, cluster())))) == {"update"}


OLD_KEYS = [
    "actor_rollout_ref.actor.ppo_micro_batch_size",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size",
    "actor_rollout_ref.ref.log_prob_micro_batch_size",
    "critic.ppo_micro_batch_size",
    "critic.forward_micro_batch_size",
]


def test_the_old_sizes_of_micro_batches_count_over_all_devices():
    """In the run as in the plan of it: 16 over 8 devices are 2 on each."""
    common = (
        "trainer.n_gpus_per_node=8",
        "algorithm.adv_estimator=gae",
        "critic.model.path=Qwen/Qwen2.5-7B-Instruct",
        "actor_rollout_ref.actor.use_kl_loss=true",
    )
    old = configured(*common, *(f"{key}=16" for key in OLD_KEYS))
    new = configured(*common, *(f"{key}_per_gpu=2" for key in OLD_KEYS))
    run = micro_batches(old, plan_ppo(old))
    assert {name: micro.rows for name, micro in run.items()} == dict.fromkeys(run, 2)
    assert run == micro_batches(new, plan_ppo(new))
    assert job_of(old, cluster()).passes == job_of(new, cluster()).passes
    sft = ("model.path=llama-3-8b", "trainer.n_gpus_per_node=8")
    before = configured(*sft, "data.micro_batch_size=32", root="sft_trainer")
    after = configured(*sft, "data.micro_batch_size_per_gpu=4", root="sft_trainer")
    assert job_of(before, cluster()).passes == job_of(after, cluster()).passes


@pytest.mark.parametrize(
    "root, more",
    [
        ("sft_trainer", ()),
        ("rm_trainer", ()),
        ("dpo_trainer", ()),
        ("dpo_trainer", ("loss.type=kto", "data.label_key=label")),
    ],
)
def test_a_micro_batch_of_pairs_has_two_sequences_of_each(root, more):
    config = configured(
        "model.path=llama-3-8b", "data.micro_batch_size_per_gpu=4", "data.max_length=512", *more, root=root
    )
    rows = micro_batching(config, plan_supervised(config), build_task(config)).rows
    update = job_of(config, cluster(per_node=1)).passes[-1]
    assert update.size == 4
    assert update.tokens.all == rows * 512


def test_a_second_model_of_dpo_is_counted():
    same = configured("model.path=llama-3-8b", root="dpo_trainer")
    other = configured("model.path=llama-3-8b", "ref.path=llama-3.1-8b", root="dpo_trainer")
    assert set(job_of(same, cluster()).models) == {"model"} and set(job_of(other, cluster()).models) == {
        "model",
        "reference",
    }


def test_every_knob_is_turned_once():
    turned = {change.key.rsplit(".", 1)[-1] for change, _ in alternatives(configured(), cluster())}
    assert {
        "enable_gradient_checkpointing",
        "offload_policy",
        "gpu_memory_utilization",
        "max_num_seqs",
    } <= turned


def test_a_size_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="fsdp_size=3 does not divide the 8 ranks"):
        job_of(configured("actor_rollout_ref.actor.fsdp_config.fsdp_size=3"), cluster())


def test_sequences_too_long_for_one_device_are_shared():
    config = configured(
        "data.max_response_length=130000", TOKENS, "actor_rollout_ref.rollout.gpu_memory_utilization=0.8"
    )
    advice = advise(config, cluster())
    assert "ulysses_sequence_parallel_size" in keys(advice), complaint(advice)
    assert advise(changed(config, *advice.changes), cluster()).fits


def test_what_no_knob_helps_is_explained():
    advice = advise(configured("actor_rollout_ref.model.path=mixtral-8x7b"), cluster())
    assert advice.hopeless and "mixtures of experts are not divided" in complaint(advice)


def test_engines_on_devices_of_their_own_take_nothing_of_the_trainer():
    apart = ("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=8")
    beside, away = (forecast(job_of(configured(*more), cluster())) for more in ((), apart))
    here, there = (
        next(phase for phase in found.phases if phase.name == "rollout") for found in (beside, away)
    )
    assert "actor" in here.roles and "actor" not in there.roles
    assert away.phases[-1].roles["engine"] == {}  # weights are sent one at a time
