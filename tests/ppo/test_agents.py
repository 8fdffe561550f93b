"""Agents in the loop: the batch path is untouched, episodes are scored, weighed, masked and counted, and rewards rise."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from strop.agents.metrics import EpisodeFacts
from strop.agents.runner import AgentSetup
from strop.config.compose import load
from strop.config.schema.rollout import RewardWeightsConfig
from strop.ppo.build import build_ppo
from strop.ppo.collect import Collector, weigh_rewards
from strop.ppo.sampler import Sampler, StepRollout
from strop.preflight.examine import examine
from strop.ranks import Ranks
from strop.rollout.base import Sampling
from strop.types import Prompt, Trajectory, Turn, batch_of
from tests.ppo.runs import metrics, run

ROOT = Path(__file__).parents[2]


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).parent.name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("games")
    script("examples/guessing_game/prepare.py").prepare(folder, numbers=4, guesses=2)
    player = f"{ROOT}/examples/guessing_game/guessing.py:GuessingInteraction"
    (folder / "interactions.yaml").write_text(
        f"interaction: [{{name: guessing, class_name: {player}, config: {{numbers: 4}}}}]"
    )
    return folder


@pytest.fixture
def game(games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(ROOT)
    return [
        f"data.train_files={games}/data/train.parquet",
        f"data.val_files={games}/data/test.parquet",
        f"actor_rollout_ref.model.path={games}/model",
        f"trainer.default_local_dir={tmp_path}/run",
        f"trainer.rollout_data_dir={tmp_path}/samples",
        f"actor_rollout_ref.rollout.multi_turn.interaction_config_path={games}/interactions.yaml",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "trainer.logger=file",
    ]


def played(game: list[str], *more: str) -> dict[int, dict[str, float]]:
    loaded = load("ppo_trainer", [*game, *more], str(ROOT / "examples/guessing_game/grpo.yaml"))
    report = examine(loaded)
    assert report.ok, report.errors
    build_ppo(loaded).fit()
    return metrics(Path(loaded.config.trainer.default_local_dir))


@pytest.mark.parametrize("estimator", ["grpo", pytest.param("gae", marks=pytest.mark.slow)])
def test_a_game_with_rewards_of_turns_is_learned(game: list[str], estimator: str, tmp_path: Path) -> None:
    steps = played(
        game,
        f"algorithm.adv_estimator={estimator}",
        "trainer.total_training_steps=16",
        "trainer.test_freq=-1",
    )
    rewards = [steps[step]["critic/score/mean"] for step in range(1, 17)]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 4 * 0.08, rewards
    assert all(steps[step]["training/rollout_logprobs_diff_max"] < 1e-3 for step in range(1, 17)), (
        "token-exact over turns"
    )
    assert (
        steps[1]["agent/episodes"] == 128 and steps[1]["agent/failed"] == 0 and steps[1]["num_turns/max"] == 4
    )
    rows = [json.loads(line) for line in (tmp_path / "samples" / "1.jsonl").read_text().splitlines()]
    several = next(row for row in rows if len(row["messages"]) == 3)
    assert [m["role"] for m in several["messages"]] == ["assistant", "user", "assistant"]
    assert several["score"] == pytest.approx(sum(m.get("reward", 0.0) for m in several["messages"]))
    assert "[assistant]" in (tmp_path / "samples" / "1.txt").read_text()


def test_one_failed_episode_masks_its_sample_and_the_step_goes_on(
    game: list[str], games: Path, tmp_path: Path
) -> None:
    from strop.data.files import open_rows
    from strop.data.make import write

    rows = [dict(row) for row in open_rows(f"{games}/data/train.parquet")][:8]
    rows[3]["extra_info"] = {"index": 3, "interaction_kwargs": {"name": "guessing", "secret": 99}}
    write(rows, tmp_path / "bad.parquet")
    steps = played(
        game,
        f"data.train_files={tmp_path}/bad.parquet",
        "data.val_files=null",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=1",
    )
    assert steps[1]["agent/failed"] == 8 and steps[1]["agent/episodes"] == 64
    dumped = [json.loads(line) for line in (tmp_path / "samples" / "1.jsonl").read_text().splitlines()]
    assert [row["finish"] for row in dumped].count("error") == 8
    assert all(row["score"] is None for row in dumped if row["index"] == 3)
    assert steps[1]["critic/score/min"] >= -1.5, "masked samples are in no mean"


def test_a_run_without_agents_asks_the_engine_once(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """single_turn_agent keeps the batch path: the same numbers as without any cast, and no episode."""
    calls: list[int] = []
    real = Sampler._sample_batch

    def counted(self: Sampler, prompts: Any, *rest: Any) -> Any:
        calls.append(len(prompts))
        return real(self, prompts, *rest)

    def forbidden(self: Sampler, prompts: Any, *rest: Any) -> Any:
        assert not prompts
        return []

    monkeypatch.setattr(Sampler, "_sample_batch", counted)
    monkeypatch.setattr(Sampler, "_run_episodes", forbidden)
    found = run(
        overrides, "trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=false"
    )
    assert calls == [8, 8] and "agent/episodes" not in found[1]


def test_rows_of_different_agents_share_a_step(game: list[str]) -> None:
    trainer = build_ppo(load("ppo_trainer", game, str(ROOT / "examples/guessing_game/grpo.yaml")))
    collector = trainer.collector
    talk = trainer.loader.draw()[:3]
    alone = [Prompt(p.index, p.ids, p.messages, p.data_source, agent_name="single_turn_agent") for p in talk]
    mixed = collector.generate([talk[0], alone[1], talk[2]], collector.rollout.sampling, 2, 5)
    assert [t.group for t in mixed] == [0, 0, 1, 1, 2, 2]
    assert [bool(t.turns) for t in mixed] == [True, True, False, False, True, True]
    again = collector.generate([talk[0], alone[1], talk[2]], collector.rollout.sampling, 2, 5)
    assert [t.response for t in mixed] == [t.response for t in again], (
        "seeds depend on the row, the sample and the turn"
    )
    batch = collector.generate([alone[0], alone[1]], collector.rollout.sampling, 2, 5)
    assert batch[2].response == mixed[2].response and batch[3].response == mixed[3].response
    trainer.close()


def test_rewards_add_up_by_their_weights() -> None:
    prompt = Prompt(0, [1], [], "x")
    made = Trajectory(
        prompt,
        0,
        [5, 6, 7, 8],
        [1, 0, 1, 1],
        [-1.0, 0.0, -1.0, -1.0],
        score=2.0,
        turn_rewards={0: 1.0, 3: 0.5},
        extras={"tool_rewards": {"a": 1.0, "b": 2.0}},
        turns=[Turn("assistant", 0, 1), Turn("tool", 1, 2), Turn("assistant", 2, 4)],
    )
    weigh_rewards(made, RewardWeightsConfig(score=0.5, turn=2.0, tool=0.1))
    assert (
        made.score == pytest.approx(1.3)
        and made.turn_rewards == {0: 2.0, 3: 1.0}
        and made.reward == pytest.approx(4.3)
    )
    assert torch.allclose(batch_of([made]).scores[0], torch.tensor([2.0, 0.0, 0.0, 2.3]))  # type: ignore[index]
    failed = Trajectory(prompt, 0, [5], [1], [-1.0], turn_rewards={0: 1.0})
    weigh_rewards(failed, RewardWeightsConfig())
    assert failed.score is None and failed.reward is None


class Recorder:
    """A scorer that keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[Trajectory] = []

    def score(self, trajectories: Any) -> Any:
        self.seen += [t for t in trajectories if t.score is None]
        for t in self.seen:
            t.score = 1.0
        return type("Report", (), {"metrics": {}, "failed": 0, "samples": len(self.seen)})()

    def close(self) -> None: ...


def test_failed_episodes_and_own_scores_do_not_reach_the_scorer() -> None:
    prompt = Prompt(0, [1], [], "x")
    failed = Trajectory(prompt, 0, [5], [1], [-1.0], finish="error")
    own, other = Trajectory(prompt, 0, [5], [1], [-1.0], score=0.25), Trajectory(prompt, 0, [5], [1], [-1.0])
    scorer = Recorder()
    collector = Collector(None, StepRollout(None, Sampling(), 1), scorer)  # type: ignore[arg-type]
    collector.score([failed, own, other])
    assert scorer.seen == [other] and (failed.score, own.score, other.score) == (None, 0.25, 1.0)
    unscored = Collector(
        None,  # type: ignore[arg-type]
        StepRollout(None, Sampling(), 1),  # type: ignore[arg-type]
        scorer,
        weights=RewardWeightsConfig(score=0.0),
    )
    more = Trajectory(prompt, 0, [5], [1], [-1.0], turn_rewards={0: 0.5})
    unscored.score([more])
    assert scorer.seen == [other] and (more.score, more.reward) == (0.0, 0.5)


def test_a_cast_is_only_read_when_somebody_asks() -> None:
    config = load(
        "ppo_trainer", ["actor_rollout_ref.rollout.multi_turn.tool_config_path=/nowhere.yaml"]
    ).config
    cast = AgentSetup(config.actor_rollout_ref.rollout, None)  # type: ignore[arg-type]
    assert cast.loops.batched(None)
    with pytest.raises(ValueError, match=r"/nowhere\.yaml does not exist"):
        cast.listing()


def test_generation_uses_the_same_loops(games: Path, tmp_path: Path) -> None:
    from strop.data.files import open_rows
    from strop.data.make import write
    from strop.inference.generation import generate

    rows = [dict(row) for row in open_rows(f"{games}/data/test.parquet")][:4]
    rows[2]["agent_name"] = "single_turn_agent"
    rows[3]["extra_info"] = {"index": 3, "interaction_kwargs": {"name": "guessing", "secret": 99}}
    write(rows, tmp_path / "in.parquet")
    asked = [
        f"data.path={tmp_path}/in.parquet",
        f"data.output_path={tmp_path}/out.parquet",
        "data.n_samples=3",
        f"model.path={games}/model",
        "rollout.prompt_length=8",
        "rollout.response_length=12",
        f"rollout.multi_turn.interaction_config_path={games}/interactions.yaml",
        "rollout.multi_turn.max_assistant_turns=2",
    ]
    summary = generate(load("generation", asked).config)
    assert "secret=99" in summary.failed[3] and set(summary.failed) == {3}
    made = [row["responses"] for row in open_rows(f"{tmp_path}/out.parquet")]
    assert [len(answers) for answers in made[:3]] == [3, 3, 3] and made[3] is None
    turns = [answer.split("\n") for answers in made[:2] for answer in answers]
    assert all(len(said) <= 2 for said in turns) and any(len(said) == 2 for said in turns), (
        "what the policy said, turn by turn"
    )
    assert not any("\n" in answer for answer in made[2])


def calculated(folder: Path, *more: str) -> dict[int, dict[str, float]]:
    loaded = load(
        "ppo_trainer",
        [
            f"data.train_files={folder}/data/train.parquet",
            f"data.val_files={folder}/data/test.parquet",
            f"actor_rollout_ref.model.path={folder}/model",
            f"trainer.default_local_dir={folder}/run",
            f"trainer.rollout_data_dir={folder}/samples",
            "trainer.logger=file",
            *more,
        ],
        str(ROOT / "examples/tool_calculator/grpo.yaml"),
    )
    build_ppo(loaded).fit()
    return metrics(folder / "run")


@pytest.mark.slow  # the notebook of tests/examples/test_notebooks.py learns to call a tool in half the time
def test_a_tiny_model_learns_to_call_a_calculator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example at small size: fewer lessons, a handful of steps."""
    monkeypatch.chdir(ROOT)
    script("examples/tool_calculator/prepare.py").prepare(tmp_path, updates=220)
    steps = calculated(
        tmp_path, "trainer.total_training_steps=5", "trainer.test_freq=-1", "trainer.val_before_train=false"
    )
    first, last = steps[1], steps[5]
    assert first["critic/score/mean"] < 0.3 and last["critic/score/mean"] > first["critic/score/mean"] + 0.15
    assert last["reward/called/mean"] > first["reward/called/mean"] + 0.2
    assert first["training/rollout_logprobs_diff_max"] < 1e-3, "token-exact over turns"
    assert "[tool]" in (tmp_path / "samples" / "5.txt").read_text()


@pytest.mark.slow
def test_a_tiny_model_learns_to_use_a_calculator_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    script("examples/tool_calculator/prepare.py").prepare(tmp_path)
    steps = calculated(tmp_path)
    name = "val-core/arithmetic/acc/mean@1"
    assert steps[0][name] < 0.3 and steps[20][name] > 0.85
    assert steps[20]["val-aux/arithmetic/called/mean@1"] > 0.9


class TwoRanks(Ranks):
    """Rank 0 of two; the other one has the episodes of the test."""

    def all_gather_object(self, value):
        return [value, OTHER]


FINE = EpisodeFacts(False, "", {"tool_calls": 2}, 1, {"generate_sequences": 0.5, "tool_calls": 0.1}, 8, 4)
OTHER = [FINE, replace(FINE, failed=True, stopped="tool_error"), replace(FINE, response_length=9)]


def test_the_metrics_of_episodes_are_those_of_all_ranks():
    collector = Collector(None, None, None, ranks=TwoRanks(0, 2))  # type: ignore[arg-type]
    found = collector.episode_metrics()
    assert (found["agent/episodes"], found["agent/failed"], found["agent/tool_calls"]) == (3, 1, 6)
    assert found["agent/stopped/tool_error"] == 1
    assert Collector(None, None, None).episode_metrics() == {}  # type: ignore[arg-type]
