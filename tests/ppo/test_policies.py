"""Two players with adapters of their own (examples/two_policies): each learns from its own tokens alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from strop.config.compose import Loaded, load, reload
from strop.config.policies import AgentPolicy, agent_policies
from strop.config.rules import check
from strop.config.schema.ppo import PpoConfig
from strop.ppo.build import build_ppo
from strop.ppo.episodes.policies import PolicyShare, joined
from strop.ppo.trainer import PpoTrainer
from strop.preflight.model_checks import policy_findings
from strop.run.checkpoint.store import load as load_checkpoint
from strop.run.merge.merge import merge
from strop.run.samples import UpdateLogProbs
from strop.types import Prompt, Trajectory, batch_of
from tests.ppo.runs import metrics, same

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "two_policies"
AGENT = "actor_rollout_ref.rollout.agent"
KL = "actor_rollout_ref.actor.use_kl_loss=true"
EXPORTS = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("game")
    spec = importlib.util.spec_from_file_location("prepare_two_policies", EXAMPLE / "prepare.py")
    assert spec is not None and spec.loader is not None
    prepare: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    prepare.prepare(folder)
    return folder


def words(game: Path, run: Path, *more: str) -> list[str]:
    return [
        f"data.train_files={game}/data/train.parquet",
        f"data.val_files={game}/data/test.parquet",
        f"actor_rollout_ref.model.path={game}/model",
        f"{AGENT}.command='{sys.executable} -S -E {EXAMPLE}/game.py'",
        f"{AGENT}.max_concurrency=1",  # the same batches in the engine
        f"trainer.default_local_dir={run}",
        "trainer.rollout_data_dir=null",
        "trainer.logger=file",
        "trainer.save_freq=1",
        "trainer.resume_mode=auto",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        *more,
    ]


def train(game: Path, run: Path, *more: str) -> dict[int, dict[str, float]]:
    build_ppo(load("ppo_trainer", words(game, run, *more), str(EXAMPLE / "grpo.yaml"))).fit()
    return metrics(run)


def state(run: Path, step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and the state of the optimizers, by part."""
    found = {}
    for part, tree in load_checkpoint(run / f"global_step_{step}").items():
        if part.startswith("actor_") and part.endswith("/model"):
            found[part] = tree
        if part.startswith("actor_") and part.endswith("/optimizer"):
            for name, values in tree.items():
                tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
                found[f"{part}/{name}"] = tensors
    return found


@pytest.fixture(scope="module")
def whole(game: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps in which both players are trained."""
    folder = tmp_path_factory.mktemp("whole")
    train(game, folder, "trainer.total_training_steps=2", KL, EXPORTS)
    return folder


def test_the_tokens_of_one_policy_never_train_the_other(game: Path, whole: Path, tmp_path: Path) -> None:
    first, second = metrics(whole)[1], metrics(whole)[2]
    more = ["trainer.total_training_steps=1", KL, f"{AGENT}.policies.buyer.train=false"]
    frozen = train(game, tmp_path / "frozen", *more)[1]
    both = state(whole, 1)
    alone = state(tmp_path / "frozen", 1)
    seller, buyer = "actor_seller/model", "actor_buyer/model"
    assert same(both[seller], alone[seller]), "what the buyer learns does not reach the seller"
    lora_b = [name for name in both[buyer] if ".lora_B." in name]
    assert all(not alone[buyer][name].any() for name in lora_b), "a frozen policy is the model itself"
    assert all(both[buyer][name].any() for name in lora_b), "a trained policy has moved"
    assert first["policy/seller/actor/grad_norm"] == frozen["policy/seller/actor/grad_norm"] > 0
    assert first["policy/buyer/actor/grad_norm"] > 0 and "policy/buyer/actor/grad_norm" not in frozen
    assert first["policy/buyer/score/mean"] == frozen["policy/buyer/score/mean"]
    for name in ("seller", "buyer"):
        gap = second[f"policy/{name}/training/rollout_logprobs_diff_max"]
        assert gap < 1e-5, "each player was sampled with the weights that are trained on its tokens"


def test_a_resumed_run_and_merged_policies_have_the_same_weights(
    game: Path, whole: Path, tmp_path: Path
) -> None:
    parts = tmp_path / "parts"
    train(game, parts, "trainer.total_training_steps=1", KL)
    train(game, parts, "trainer.total_training_steps=2", KL)
    expected = state(whole, 2)
    resumed = state(parts, 2)
    assert expected.keys() == resumed.keys() and len(expected) > 4
    assert all(same(expected[part], resumed[part]) for part in expected)
    exported = {}
    for name in ("seller", "buyer"):
        folder = whole / "global_step_2" / f"actor_{name}"
        merge(str(folder), str(tmp_path / name))
        exported[name] = AutoModelForCausalLM.from_pretrained(folder / "huggingface").state_dict()
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        assert merged.keys() == exported[name].keys()
        for weight, value in merged.items():
            torch.testing.assert_close(value, exported[name][weight], rtol=0, atol=1e-6)
    assert not same(exported["seller"], exported["buyer"])


def test_a_policy_begins_with_the_adapter_of_a_folder(game: Path, whole: Path, tmp_path: Path) -> None:
    merge(str(whole / "global_step_1/actor_seller"), str(tmp_path / "champion"), keep_lora=True)
    frozen = f"{AGENT}.policies.buyer={{train: false, path: {tmp_path}/champion}}"
    train(game, tmp_path / "second", "trainer.total_training_steps=1", frozen)
    champion = state(whole, 1)["actor_seller/model"]
    assert same(state(tmp_path / "second", 1)["actor_buyer/model"], champion)
    more = ["actor_rollout_ref.model.lora_rank=4", frozen]
    small = load("ppo_trainer", words(game, tmp_path / "x", *more), str(EXAMPLE / "grpo.yaml"))
    [finding] = policy_findings(small.config.actor_rollout_ref)
    assert "has lora_rank=8 and lora_alpha=16, the run has 4 and 16" in str(finding)
    with pytest.raises(ValueError, match=r"buyer.path: .* has lora_rank=8 .* the run has 4"):
        build_ppo(small)
    (tmp_path / "champion" / "adapter_config.json").write_text("{}")
    [finding] = policy_findings(small.config.actor_rollout_ref)
    assert "cannot be read as that of a LoRA adapter" in str(finding)


@pytest.mark.slow
@pytest.mark.parametrize("buyer", ["true", "false"])
def test_both_players_learn_what_one_policy_cannot(
    game: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buyer: str
) -> None:
    digits: list[dict[str, float]] = []
    sample = PpoTrainer.sample_and_score

    def keep(self: PpoTrainer, *given: Any) -> list[Trajectory]:
        rows = sample(self, *given)
        named: dict[str, list[float]] = {"seller": [], "buyer": []}
        for row in rows:
            said = self.output.decode(row.response)[:1]
            if said.isdigit():
                named[row.player].append(float(said))
        digits.append({name: sum(found) / len(found) for name, found in named.items()})
        return rows

    monkeypatch.setattr(PpoTrainer, "sample_and_score", keep)
    steps = train(
        game,
        tmp_path / "run",
        "trainer.save_freq=-1",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=8",
        f"{AGENT}.max_concurrency=64",
        f"{AGENT}.policies.buyer.train={buyer}",
    )
    assert 3 < digits[0]["seller"] < 6 and 3 < digits[0]["buyer"] < 6
    assert digits[-1]["seller"] > 8
    if buyer == "true":
        assert digits[-1]["buyer"] < 1
    else:
        assert 3 < digits[-1]["buyer"] < 6
        assert steps[20]["policy/seller/score/mean"] > steps[1]["policy/seller/score/mean"] + 0.15


def test_rows_and_log_probs_of_all_policies_are_joined_in_the_same_order() -> None:
    shares = []
    for name, lengths in (("seller", (2, 3)), ("buyer", (4,))):
        rows = []
        for length in lengths:
            row = Prompt(0, [1], [], "price")
            rows.append(
                Trajectory(row, 0, [5] * length, [1] * length, [0.0] * length, score=1.0, player=name)
            )
        order = torch.arange(len(rows)).flip(0)  # as micro-batches may come
        values = torch.stack([torch.full((max(lengths),), float(lengths[place])) for place in order])
        known = UpdateLogProbs(order, values)
        shares.append(PolicyShare(AgentPolicy(name, True, None), batch_of(rows), rows, known))
    trajectories, batch, known_of_all = joined(shares)
    assert [len(row.response) for row in trajectories] == batch.response_lengths.tolist() == [2, 3, 4]
    assert batch.row_ids is not None and batch.row_ids.tolist() == [0, 1, 2]
    assert known_of_all is not None and known_of_all.rows.tolist() == [1, 0, 2]
    assert known_of_all.log_probs[:, 0].tolist() == [3.0, 2.0, 4.0], "each value belongs to its row"


@pytest.fixture(scope="module")
def one_policy(tmp_path_factory: pytest.TempPathFactory) -> Loaded[PpoConfig]:
    folder = tmp_path_factory.mktemp("rules")
    more = [f"{AGENT}.reward=file", "algorithm.adv_estimator=grpo", "actor_rollout_ref.model.lora_rank=8"]
    return load("ppo_trainer", [*words(folder, folder), *more])


TWO: dict[str, object] = {f"{AGENT}.policies.a": {}, f"{AGENT}.policies.b": {}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (TWO, None),
        ({f"{AGENT}.policies.a": {}}, "is one policy"),
        (
            {f"{AGENT}.policies.a.train": False, f"{AGENT}.policies.b.train": False},
            "nothing would be trained",
        ),
        ({**TWO, f"{AGENT}.policies.b": {"trian": False}}, "b.trian: no such key"),
        ({**TWO, f"{AGENT}.policies.b": 3}, "b=3 must be a section"),
        ({**TWO, f"{AGENT}.policies.b c": {}}, "cannot name a policy"),
        ({**TWO, f"{AGENT}.players": ["white", "black"]}, "every policy is a player"),
        ({**TWO, f"{AGENT}.reward": "exit"}, "each policy needs a score"),
        ({**TWO, f"{AGENT}.command": None}, "needs a program"),
        ({**TWO, "actor_rollout_ref.model.lora_rank": 0}, "policies are LoRA adapters"),
        ({**TWO, "actor_rollout_ref.rollout.name": "hf"}, "only the native engine"),
        ({**TWO, "trainer.n_gpus_per_node": 2}, "trained on one device"),
        ({**TWO, "trainer.async_training.enable": True}, "switch them off"),
        ({**TWO, "algorithm.adv_estimator": "gae"}, "a critic"),
        ({**TWO, "trainer.enable_ema": True}, "enable_ema"),
        ({**TWO, "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True}, "optimizer_offload"),
    ],
)
def test_what_policies_cannot_be_combined_with(
    one_policy: Loaded[PpoConfig], changes: dict[str, object], message: str | None
) -> None:
    errors = []
    for found in check(reload(one_policy.root, one_policy.tree(), changes)):
        if found.level == "error" and "policies" in found.key:
            errors.append(found.message)
    if message is None:
        assert errors == []
    else:
        assert any(message in said for said in errors), errors


def test_empty_sections_of_policies_are_read_from_words(tmp_path: Path) -> None:
    loaded = load(
        "ppo_trainer", [*words(tmp_path, tmp_path), f"{AGENT}.policies={{a: {{}}, b: {{train: false}}}}"]
    )
    policies = agent_policies(loaded.config.actor_rollout_ref.rollout.agent)
    assert policies == [AgentPolicy("a", True, None), AgentPolicy("b", False, None)]
