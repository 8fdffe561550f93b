"""Runs with strategy=megatron as one of several ranks, beside runs of one process; started by test_megatron.py."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from strop.config.compose import load
from strop.models.heads import new_scalar_model
from strop.quickstart.tiny_model import tiny_tokenizer
from strop.ranks import Ranks
from strop.run.merge.merge import merge
from strop.supervised.build import build_supervised_trainer
from tests.backends.megatron_cpu import without_cuda
from tests.backends.ranks import here
from tests.backends.ranks_megatron import SIZES, fitting
from tests.models.tiny import tiny_model
from tests.ppo.runs import metrics
from tests.ppo.runs import weights as saved_weights
from tests.runtime.ranks_loop import PPO, UNLIKE, alone, assert_alike, fit, folder, settings  # noqa: F401
from tests.supervised.runs import make_task
from tests.supervised.runs import settings as supervised_settings

ACTOR, CRITIC = "actor_rollout_ref.actor.megatron", "critic.megatron"
KEYS = [
    "actor_rollout_ref.actor.strategy=megatron",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",  # four of them
    f"{ACTOR}.dtype=float32",
    f"{CRITIC}.dtype=float32",
]
STEPS = 10
TEN = [f"trainer.{key}={STEPS}" for key in ("total_training_steps", "save_freq", "test_freq")]
ALGORITHMS = {"grpo": [], "ppo": PPO}
DENSE = ["data", "tensor", "pipeline", "context"]
"""Ways of two ranks; those of four are in ranks_megatron_combinations.py."""
_by_one = {}


@pytest.fixture(autouse=True)
def on_cpu():
    without_cuda()


def for_two(way: str) -> None:
    """Only on two ranks; those of four are in ranks_megatron_combinations.py."""
    fitting(way)
    if here().world != 2:
        pytest.skip("for two ranks")


def words(way: str) -> list[str]:
    return [f"{role}.{name}={size}" for name, size in SIZES[way].items() for role in (ACTOR, CRITIC)]


def by_one(key, settings, folder):  # noqa: F811
    """A run by one process; made once."""
    if key not in _by_one:
        _by_one[key] = alone(settings, folder / "one")
    return _by_one[key]


def largest_gap(one, many):
    """The largest difference of a metric, relative to the larger of its value and 1; the metric, the step."""
    ours, theirs = metrics(many), metrics(one)
    gaps = [(0.0, "", 0)]
    for step, row in theirs.items():
        for metric, value in row.items():
            if not metric.startswith(UNLIKE):
                gaps.append((abs(ours[step][metric] - value) / max(abs(value), 1.0), metric, step))
    return max(gaps)


def report_gap(name, one, many):
    """Print it, and add it to the file GAPS if there is one."""
    if not here().is_rank0:
        return
    gap, metric, step = largest_gap(one, many)
    print("largest difference of", name, gap, metric, step)
    if "GAPS" in os.environ:
        with Path(os.environ["GAPS"]).open("a") as file:
            row = {"combination": name, "gap": gap, "metric": metric, "step": step}
            file.write(json.dumps(row) + "\n")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("way", DENSE)
def test_ten_steps_are_those_of_one_process(way, algorithm, settings, folder):  # noqa: F811
    for_two(way)
    common = [*settings, *ALGORITHMS[algorithm], *TEN]
    one = by_one(algorithm, common, folder)
    many = fit([*common, *KEYS, *words(way)], folder / "many", here())
    report_gap(f"{way} {algorithm}", one, many)
    assert_alike(one, many, STEPS)


def test_a_reward_model_scores_as_in_one_process(settings, folder):  # noqa: F811
    """Every rank holds all of it and scores its share of the samples, or a part of it and scores all."""
    if here().is_rank0:
        save(folder / "policy", "llama")
        judge = new_scalar_model(AutoConfig.from_pretrained(folder / "policy"))
        judge.save_pretrained(folder / "judge")
        tiny_tokenizer().save_pretrained(folder / "judge")
    rated = ["reward_model.enable=true", f"reward_model.model.path={folder}/judge"]
    common = [*settings, *rated, f"actor_rollout_ref.model.path={folder}/policy"]
    one = alone(common, folder / "one")
    many = fit([*common, *KEYS, *words("tensor")], folder / "many", here())
    report_gap("reward model", one, many)
    assert_alike(one, many, 4)
    parts = [f"reward_model.megatron.{size}=2" for size in SIZES["pipeline"]]
    judged = fit([*common, *KEYS, *parts, "reward_model.megatron.dtype=float32"], folder / "judged", here())
    report_gap("divided reward model", one, judged)
    assert_alike(one, judged, 4)
    if here().is_rank0:
        scores = {row["critic/score/mean"] for row in metrics(one).values() if "critic/score/mean" in row}
        assert len(scores) > 1, "the model tells responses apart"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("way", ["tensor", "pipeline", "tensor-pipeline"])
def test_adapters_are_trained_as_by_one_process(way, algorithm, settings, folder):  # noqa: F811
    """The reference is the actor without them; they are resumed with other sizes and by one process, and merged."""
    fitting(way)
    lora = ["actor_rollout_ref.model.lora_rank=4", "critic.model.lora_rank=4"]
    common = [*settings, *ALGORITHMS[algorithm], *lora, "actor_rollout_ref.actor.use_kl_loss=true"]
    if algorithm == "ppo":  # Adam makes full steps of roundings, which is all that a B of 0 would have
        for role in ("actor_rollout_ref.actor", "critic"):
            common += [f"{role}.optim.optimizer=SGD", f"{role}.optim.lr=0.05"]
    one = by_one(("lora", algorithm), common, folder)
    many = fit([*common, *KEYS, *words(way)], folder / "many", here())
    report_gap(f"{way} {algorithm} with adapters", one, many)
    assert_alike(one, many, 4)
    if algorithm == "ppo" or way == "pipeline":
        return
    torn = fit([*common, *KEYS, *words(way), "trainer.total_training_steps=2"], folder / "torn", here())
    fewer = copied(torn, folder / "fewer")
    assert_alike(one, fit([*common, *KEYS, *words("pipeline")], torn, here()), 4)
    assert_alike(one, alone(common, fewer), 4)
    if here().is_rank0:
        saved = many / "global_step_4" / "actor"
        assert all(".lora_" in name for name in saved_weights(many, 4))
        kept = load_file(
            merge(str(saved), str(folder / "kept"), keep_lora=True) / "adapter_model.safetensors"
        )
        expected = merge(str(one / "global_step_4" / "actor"), str(folder / "expected"), keep_lora=True)
        for name, weight in load_file(expected / "adapter_model.safetensors").items():
            assert (kept[name] - weight).abs().max() <= 1e-5 * max(weight.abs().max(), 1e-3), name
    here().all_gather_object(None)


def copied(source, target):
    """A copy of the folder of a run, for all ranks."""
    if here().is_rank0:
        shutil.copytree(source, target)
    here().all_gather_object(None)
    return target


def save(folder, family, **changes):  # noqa: F811
    tokenizer = tiny_tokenizer()
    ends = tokenizer.eos_token_id
    tiny_model(family, vocab_size=len(tokenizer), eos_token_id=ends, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_experts(folder):  # noqa: F811
    save(folder / "experts", "qwen3_moe")


def test_ten_steps_with_experts_are_those_of_one_process(settings, folder):  # noqa: F811
    way = "expert"
    for_two(way)
    if here().is_rank0:
        save_experts(folder)
    common = [*settings, *TEN, f"actor_rollout_ref.model.path={folder}/experts"]
    one = alone(common, folder / "one")
    many = fit([*common, *KEYS, *words(way)], folder / "many", here())
    report_gap(f"{way} grpo", one, many)
    assert_alike(one, many, STEPS)


@pytest.mark.parametrize("way", ["expert", "tensor-pipeline"])
def test_replayed_experts_are_those_of_one_process(way, settings, folder):  # noqa: F811
    """Two epochs per step: the second has other weights than the recorded experts."""
    fitting(way)
    if here().is_rank0:
        save_experts(folder)
    common = [*settings, f"actor_rollout_ref.model.path={folder}/experts"]
    common += ["actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.router_replay.mode=R2"]
    one = alone(common, folder / "one")
    many = fit([*common, *KEYS, *words(way)], folder / "many", here())
    report_gap(f"{way} replay", one, many)
    assert_alike(one, many, 4)


@pytest.mark.parametrize("verb", ["sft", "rm", "dpo"])
@pytest.mark.parametrize("way", ["tensor", "pipeline", "tensor-pipeline"])
def test_supervised_training_is_that_of_one_process(verb, way, folder):  # noqa: F811
    fitting(way)
    if here().is_rank0:
        make_task(folder)
    here().all_gather_object(None)

    def train(place, ranks, *more):
        given = [*supervised_settings(folder, folder / place, verb), f"trainer.n_gpus_per_node={ranks.world}"]
        build_supervised_trainer(
            load(f"{verb}_trainer", [*given, "trainer.device=cpu", *more]), ranks=ranks
        ).fit()

    if here().is_rank0:
        train("one", Ranks())
    here().all_gather_object(None)
    sizes = [f"model.megatron.{name}={size}" for name, size in SIZES[way].items()]
    train("many", here(), "model.strategy=megatron", "model.megatron.dtype=float32", *sizes)
    if here().is_rank0:
        expected, found = metrics(folder / "one"), metrics(folder / "many")
        assert expected.keys() == found.keys()
        for step, row in expected.items():
            for name, value in row.items():
                if not name.startswith(("timing", "perf/")):
                    assert found[step][name] == pytest.approx(value, rel=1e-5, abs=2e-5), (step, name)
    here().all_gather_object(None)


def test_a_run_is_resumed_with_other_sizes_and_merged(settings, folder):  # noqa: F811
    """TP 2 x PP 2 (or TP 2) for two steps, then two more by other sizes, fsdp, and one process."""
    one = alone(settings, folder / "one")
    first = "tensor-pipeline" if here().world % 4 == 0 else "tensor"
    begun = [*settings, *KEYS, *words(first), "trainer.total_training_steps=2"]
    torn = fit(begun, folder / "torn", here())
    for way in ("data", "tensor", "pipeline"):
        resumed = fit([*settings, *KEYS, *words(way)], copied(torn, folder / way), here())
        report_gap(f"{first} resumed as {way}", one, resumed)
        assert_alike(one, resumed, 4)
    sharded = fit(settings, copied(torn, folder / "sharded"), here())
    report_gap(f"{first} resumed by fsdp", one, sharded)
    assert_alike(one, sharded, 4)
    fewer = alone(settings, copied(torn, folder / "fewer"))
    report_gap(f"{first} resumed by one process", one, fewer)
    assert_alike(one, fewer, 4)
    if here().is_rank0:
        torn = folder / "pipeline"
        merged = merge(str(torn / "global_step_4" / "actor"), str(folder / "merged")) / "model.safetensors"
        own = saved_weights(torn, 4)
        for name, weight in load_file(merged).items():
            assert torch.allclose(weight.float(), own[name], atol=1e-2)
    here().all_gather_object(None)
