"""Checkpoints become folders that transformers loads: Strop's own, with LoRA, with a value head, and verl's FSDP shards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from strop.models.heads import new_scalar_model
from strop.models.lora import add_adapters
from strop.quickstart.tiny_model import tiny_tokenizer
from strop.run.merge.verl import read_shards
from strop.trainer.main_merge import run as merge
from tests.models.tiny import tiny_model
from tests.ppo.runs import run, weights
from tests.supervised.runs import make_task, settings, train
from tests.supervised.runs import weights as supervised_weights

CONTENTS = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"


def same(folder: Path, other: Path) -> bool:
    one, two = (load_file(path / "model.safetensors") for path in (folder, other))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def trained(task, tmp_path_factory):
    """A run with a critic, an average of the weights, and its own exports to compare with."""
    folder = tmp_path_factory.mktemp("trained")
    run(
        [
            f"data.train_files={task}/data/train.parquet",
            "data.train_batch_size=8",
            "data.max_prompt_length=8",
            "data.max_response_length=4",
            f"actor_rollout_ref.model.path={task}/model",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "critic.optim.lr=1e-2",
            "critic.model.fsdp_config.dtype=float32",
            "critic.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
            "algorithm.adv_estimator=gae",
            "trainer.enable_ema=true",
            "trainer.total_training_steps=2",
            "trainer.save_freq=2",
            f"trainer.default_local_dir={folder}",
            "trainer.logger=file",
        ],
        CONTENTS,
    )
    return folder / "global_step_2"


@pytest.mark.parametrize(
    ("role", "more", "export"),
    [("actor", [], "huggingface"), ("actor", ["--ema"], "huggingface_ema"), ("critic", [], "huggingface")],
)
def test_a_merged_folder_is_what_training_exports(trained, tmp_path, role, more, export, capsys):
    out = tmp_path / "out"
    assert merge(["--local_dir", f"{trained}/{role}", "--target_dir", str(out), *more]) == 0
    assert same(out, trained / role / export)
    assert merge(["test", "--local_dir", f"{trained}/{role}", "--test_hf_dir", str(out), *more]) == 0
    assert "tensors agree" in capsys.readouterr().out
    assert AutoTokenizer.from_pretrained(out).chat_template
    kind = AutoModelForCausalLM if role == "actor" else AutoModelForSequenceClassification
    _, report = kind.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_differences_are_named(trained, tmp_path, capsys):
    changed = load_file(trained / "actor" / "huggingface" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    changed[name][0, 0] += 0.5
    changed["model.layers.0.input_layernorm.weight"] = torch.ones(3)
    changed["extra.weight"] = changed.pop("model.norm.weight")
    save_file(changed, tmp_path / "model.safetensors")
    assert merge(["test", "--local_dir", f"{trained}/actor", "--test_hf_dir", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert f"{name} differs by up to 0.5\n" in said
    assert (
        "model.norm.weight is only in the checkpoint" in said and "extra.weight is only in the folder" in said
    )
    assert "input_layernorm.weight has shape (32,) in the checkpoint and (3,) in the folder" in said


def test_precision_can_be_chosen(trained, tmp_path):
    merge(["--local_dir", f"{trained}/actor", "--target_dir", f"{tmp_path}/out", "--dtype", "bfloat16"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    # Rounded once: comparing in the folder's precision finds no difference.
    assert merge(["test", "--local_dir", f"{trained}/actor", "--test_hf_dir", f"{tmp_path}/out"]) == 0


@pytest.fixture(scope="module")
def adapted(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    run(
        [
            f"data.train_files={task}/data/train.parquet",
            "data.train_batch_size=8",
            "data.max_prompt_length=8",
            "data.max_response_length=4",
            f"actor_rollout_ref.model.path={task}/model",
            "actor_rollout_ref.model.lora_rank=4",
            "actor_rollout_ref.model.lora_alpha=12",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            "actor_rollout_ref.actor.optim.lr=2e-2",
            "actor_rollout_ref.rollout.n=4",
            "algorithm.adv_estimator=grpo",
            "trainer.total_training_steps=2",
            "trainer.save_freq=2",
            f"trainer.default_local_dir={folder}",
            "trainer.logger=file",
        ],
        CONTENTS,
    )
    return folder / "global_step_2"


def test_adapters_are_merged(adapted, tmp_path, task):
    assert all("lora_" in name for name in weights(adapted.parent, 2))
    merge(["--local_dir", f"{adapted}/actor", "--target_dir", f"{tmp_path}/out"])
    assert same(tmp_path / "out", adapted / "actor" / "huggingface")
    assert not same(tmp_path / "out", task / "model")


def test_adapters_are_kept(adapted, tmp_path, task):
    from peft import PeftModel

    merge(["--local_dir", f"{adapted}/actor", "--target_dir", f"{tmp_path}/out", "--lora", "keep"])
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_alpha"] == 12
    assert not (tmp_path / "out" / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(task / "model")
    whole = AutoModelForCausalLM.from_pretrained(adapted / "actor" / "huggingface")
    ids = torch.tensor([[3, 4, 5, 6]])
    found = PeftModel.from_pretrained(base, tmp_path / "out")(ids).logits
    assert torch.allclose(found, whole(ids).logits, atol=1e-5)


def test_what_cannot_be_merged_is_said(trained, adapted, tmp_path, task):
    out = ["--target_dir", str(tmp_path / "out")]

    def refused(words, *arguments):
        with pytest.raises(ValueError, match=words):
            merge([*arguments, *out])
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))

    refused("does not exist", "--local_dir", f"{tmp_path}/nowhere")
    (tmp_path / "model.pt").touch()
    refused("is a file; name the folder", "--local_dir", f"{tmp_path}/model.pt")
    refused("holds no model 'actr'. Did you mean 'actor'", "--local_dir", f"{_folder(trained / 'actr')}")
    (trained / "actr").rmdir()
    refused("holds several models; name one: .*actor.*critic", "--local_dir", str(trained))
    refused("is a Hugging Face folder already", "--local_dir", f"{task}/model")
    refused("no checkpoint: .* It holds: test.parquet, train.parquet", "--local_dir", f"{task}/data")
    refused("has no adapters", "--local_dir", f"{trained}/actor", "--lora", "keep")
    refused("holds no average", "--local_dir", f"{adapted}/actor", "--ema")
    refused("Unknown precision 'fp7'", "--local_dir", f"{trained}/actor", "--dtype", "fp7")
    with pytest.raises(ValueError, match="is not empty"):
        merge(["--local_dir", f"{trained}/actor", "--target_dir", str(task)])


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("lora", [[], ["model.lora_rank=4"]], ids=["whole", "lora"])
def test_a_reward_model_keeps_its_statistics(tmp_path, lora):
    task = make_task(tmp_path)
    train("rm", settings(task, tmp_path / "run", "rm"), "optim.lr=1e-2", *lora)
    role = tmp_path / "run" / "global_step_8" / "model"
    merge(["--local_dir", str(role), "--target_dir", f"{tmp_path}/out"])
    assert same(tmp_path / "out", role / "huggingface")
    made, exported = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "out", role / "huggingface")
    )
    assert made == {**exported, "value_head_prefix": "score"} and made["std"] > 0 and made["mean"] != 0
    assert merge(["--local_dir", str(role.parent), "--target_dir", f"{tmp_path}/again"]) == 0, (
        "the only model needs no name"
    )
    kept = ["--local_dir", str(role), "--target_dir", f"{tmp_path}/kept", "--lora", "keep"]
    with pytest.raises(ValueError, match="must be merged" if lora else "has no adapters"):
        merge(kept)


@pytest.mark.parametrize("verb", ["sft", "rm"])
def test_the_average_of_a_supervised_model(tmp_path, verb):
    more = ["trainer.enable_ema=true", "trainer.total_training_steps=3", "model.lora_rank=2"]
    train(verb, settings(make_task(tmp_path), tmp_path / "run", verb), *more)
    saved = tmp_path / "run" / "global_step_3" / "model"
    assert merge(["--local_dir", str(saved), "--target_dir", str(tmp_path / "average"), "--ema"]) == 0
    assert same(tmp_path / "average", saved / "huggingface_ema") and not same(
        tmp_path / "average", saved / "huggingface"
    )


def test_a_fine_tuned_model_without_its_export(tmp_path):
    task = make_task(tmp_path)
    train("sft", settings(task, tmp_path / "run", "sft"), "trainer.checkpoint.save_contents=[model]")
    role = tmp_path / "run" / "global_step_8" / "model"
    assert not (role / "huggingface").exists()
    merge(["--local_dir", str(role), "--target_dir", f"{tmp_path}/out"])
    own, made = supervised_weights(tmp_path / "run", 8), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(own[name], made[name]) for name in made) and set(own) - set(made) <= {
        "lm_head.weight"
    }


# --- verl -----------------------------------------------------------------------------------------------------------------


def shards(folder: Path, tensors: dict[str, torch.Tensor], *, ranks: int, replicas: int = 1) -> None:
    """What verl's FSDP worker saves, by every rank: the same DTensors, of which each rank has its own piece."""
    folder.mkdir(parents=True, exist_ok=True)
    world = ranks * replicas
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        if replicas > 1:
            mesh, kinds = (
                init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("ddp", "fsdp")),
                (Replicate(), Shard(0)),
            )
        else:
            mesh, kinds = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",)), (Shard(0),)
        state = {}
        for name, whole in tensors.items():
            pieces = [piece.clone() for piece in torch.chunk(whole, ranks)]
            pieces += [whole[:0].clone()] * (ranks - len(pieces))
            piece = pieces[rank % ranks]
            state[name] = DTensor.from_local(
                piece, mesh, kinds, shape=whole.shape, stride=whole.stride(), run_check=False
            )
        torch.save(state, folder / f"model_world_size_{world}_rank_{rank}.pt")
        dist.destroy_process_group()
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (3, 1), (2, 2)])
def test_shards_of_verl(task, tmp_path, ranks, replicas):
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    shards(tmp_path / "actor", dict(model.state_dict()), ranks=ranks, replicas=replicas)
    model.config.save_pretrained(tmp_path / "actor" / "huggingface")
    tiny_tokenizer().save_pretrained(tmp_path / "actor" / "huggingface")
    asked = [
        "merge",
        "--backend",
        "fsdp",
        "--local_dir",
        f"{tmp_path}/actor",
        "--target_dir",
        f"{tmp_path}/out",
    ]
    assert merge(asked) == 0
    assert same(tmp_path / "out", task / "model")
    assert merge(["test", "--local_dir", f"{tmp_path}/actor", "--test_hf_dir", f"{task}/model"]) == 0


def test_a_critic_of_verl(task, tmp_path):
    config = AutoModelForCausalLM.from_pretrained(task / "model").config
    model = new_scalar_model(config, bias=True)
    with torch.no_grad():
        model.score.bias.fill_(0.25)
    shards(tmp_path / "critic", dict(model.state_dict()), ranks=2)
    model.config.save_pretrained(tmp_path / "critic" / "huggingface")
    tiny_tokenizer().save_pretrained(tmp_path / "critic" / "huggingface")
    merge(["--local_dir", f"{tmp_path}/critic", "--target_dir", f"{tmp_path}/out"])
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.score.weight, model.score.weight) and loaded.score.bias.item() == 0.25


def test_adapters_of_verl(task, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(task / "model")
    model = add_adapters(base, rank=4, alpha=8, target_modules=["q_proj", "v_proj"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    shards(tmp_path / "actor", dict(model.state_dict()), ranks=2)
    base.config.save_pretrained(tmp_path / "actor" / "huggingface")
    tiny_tokenizer().save_pretrained(tmp_path / "actor" / "huggingface")
    asked = ["--local_dir", f"{tmp_path}/actor", "--target_dir", f"{tmp_path}/out"]
    with pytest.raises(ValueError, match=r"not their scale. Give --lora_alpha"):
        merge(asked)
    (tmp_path / "actor" / "lora_adapter").mkdir()
    (tmp_path / "actor" / "lora_adapter" / "adapter_config.json").write_text(
        json.dumps({"lora_alpha": 8, "r": 4})
    )
    merge(asked)
    ids = torch.tensor([[3, 4, 5, 6]])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(merged(ids).logits, model(ids).logits, atol=1e-5)
    assert not torch.allclose(
        merged(ids).logits, AutoModelForCausalLM.from_pretrained(task / "model")(ids).logits, atol=1e-3
    )


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_a_head_of_its_own_stays_beside_a_configuration_that_ties_it(tmp_path, lora):
    """transformers would load it all the same; vLLM and others believe the configuration."""
    base = tiny_model(tie_word_embeddings=False)
    model = add_adapters(base, rank=4, alpha=8) if lora else base
    shards(tmp_path / "actor", dict(model.state_dict()), ranks=1)
    described = tmp_path / "actor" / "huggingface"
    base.config.save_pretrained(described)
    config = json.loads((described / "config.json").read_text())
    (described / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tiny_tokenizer().save_pretrained(described)
    (tmp_path / "actor" / "lora_adapter").mkdir()
    (tmp_path / "actor" / "lora_adapter" / "adapter_config.json").write_text(
        json.dumps({"lora_alpha": 8, "r": 4})
    )
    merge(["--local_dir", f"{tmp_path}/actor", "--target_dir", f"{tmp_path}/out", "--dtype", "fp32"])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not merged.config.tie_word_embeddings
    ids = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


class Malicious:
    def __reduce__(self):
        return os.system, ("touch hacked",)


def test_pickles_run_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Malicious()}, tmp_path / "model_world_size_1_rank_0.pt")
    with pytest.raises(ValueError, match=r"rank_0\.pt cannot be read: it names posix\.system.*refused"):
        read_shards(tmp_path)
    assert not (tmp_path / "hacked").exists()


def test_incomplete_shards_are_named(tmp_path):
    shards(tmp_path, {"weight": torch.arange(6.0).reshape(3, 2)}, ranks=2)
    whole = (tmp_path / "model_world_size_2_rank_1.pt").read_bytes()
    (tmp_path / "model_world_size_2_rank_1.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model_world_size_2_rank_1\.pt cannot be read"):
        read_shards(tmp_path)
    (tmp_path / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(ValueError, match=r"of 2 ranks, but model_world_size_2_rank_1\.pt is missing"):
        read_shards(tmp_path)
    shards(tmp_path, {"weight": torch.ones(5, 2)}, ranks=2)
    shards(tmp_path / "other", {"weight": torch.ones(3, 2)}, ranks=2)
    (tmp_path / "other" / "model_world_size_2_rank_1.pt").rename(tmp_path / "model_world_size_2_rank_1.pt")
    with pytest.raises(
        ValueError, match=r"pieces of weight make a tensor of shape \(4, 2\), but \(5, 2\) was saved"
    ):
        read_shards(tmp_path)


@pytest.mark.slow
def test_shards_of_real_fsdp_processes(task, tmp_path):
    """Two gloo processes, FSDP2, saved as verl saves them."""
    code = f"""
import os, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained({str(task / "model")!r})
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
for layer in model.model.layers: fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
torch.save(model.state_dict(), f"{tmp_path}/model_world_size_2_rank_{{dist.get_rank()}}.pt")
dist.destroy_process_group()
"""
    script = tmp_path / "save.py"
    script.write_text(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(script),
    ]
    subprocess.run(command, check=True, env=environment, timeout=300)
    found = read_shards(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(task / "model").state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
