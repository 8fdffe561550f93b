"""The quickstart learns with every algorithm it offers: its own model and task at small size, the ordinary loop; two more seeds in
the slow tests."""

from __future__ import annotations

import io
import json
from pathlib import Path
from statistics import mean

import pytest

from strop.config.schema.trainer import TrainerConfig
from strop.quickstart import quickstart

STEPS = 20
RISE = 0.05  # of the mean score, from the first quarter to the last; twice the noise of such a difference


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums of numbers up to 19, and a model that is right about a third of the time."""
    folder = tmp_path_factory.mktemp("quickstart")
    said = io.StringIO()
    quickstart.prepare(folder, largest=19, seed=1, say=said.write)
    assert (
        "million parameters" in said.getvalue()
        and "From here on it learns from rewards alone" in said.getvalue()
    )
    return folder


def keys(prepared: Path, out: Path, algorithm: str, seed: int) -> list[str]:
    return [
        f"data.train_files={prepared}/data/train.parquet",
        f"data.val_files={prepared}/data/test.parquet",
        "data.train_batch_size=32",
        f"actor_rollout_ref.model.path={prepared}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        f"trainer.default_local_dir={out}/run",
        f"trainer.validation_data_dir={out}/samples",
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        "trainer.save_freq=-1",
        "trainer.logger=file",
        *quickstart.ALGORITHMS[algorithm],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "algorithm",
    [name for name in quickstart.ALGORITHMS if name != "grpo"],
)
def test_every_algorithm_rises(algorithm: str, seed: int, prepared: Path, tmp_path: Path) -> None:
    quickstart.train(keys(prepared, tmp_path, algorithm, seed))
    rows = [
        json.loads(line)["data"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    scores = [row["critic/score/mean"] for row in rows if "critic/score/mean" in row]
    assert len(scores) == STEPS
    quarter = STEPS // 4
    assert mean(scores[-quarter:]) > mean(scores[:quarter]) + RISE, [round(score, 3) for score in scores]


def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One short run of the default: it writes and says what it promises."""
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "320.jsonl").write_text(
        '{"input": "", "gts": "", "output": "of an earlier run"}\n'
    )
    few = [
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "trainer.total_training_steps=2",
    ]
    code = quickstart.main(
        ["--out", str(tmp_path), "--largest", "9", *few, "trainer.test_freq=2", "trainer.logger=file"]
    )
    said = capsys.readouterr().out
    assert code == 0
    assert "Held-out greedy accuracy" in said and "after 2 steps" in said and "What to try next" in said
    assert "+" in said.partition("question")[2] and "of an earlier run" not in said
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.parametrize(
    ("word", "said"), [("out", "Expected key=value, got 'out'"), ("data.shufle=true", "data.shuffle")]
)
def test_a_typo_is_told_at_once(tmp_path: Path, word: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        quickstart.main(["--out", str(tmp_path / "out"), word])
    assert not (tmp_path / "out").exists()


def test_an_unknown_algorithm_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--algorithm remx: not one of grpo, ppo.*remax"):
        quickstart.main(["--algorithm", "remx", "--out", str(tmp_path)])


def test_a_task_without_problems_is_refused(tmp_path: Path) -> None:
    for largest in ("1", "-5"):
        with pytest.raises(ValueError, match=f"--largest {largest}: too few problems"):
            quickstart.main(["--largest", largest, "--out", str(tmp_path)])


def test_the_summary_reads_what_the_keys_say(tmp_path: Path) -> None:
    """Keys may move the run, or leave out the file or the validation that the summary compares."""
    said = io.StringIO()
    trainer = TrainerConfig(default_local_dir=str(tmp_path), validation_data_dir=str(tmp_path / "samples"))
    quickstart.summarise(tmp_path, trainer, said.write)
    assert f"The run is in {tmp_path}; it has no validation before training" in said.getvalue()
    (tmp_path / "samples").mkdir()
    row = {"input": "1+2=", "gts": "3", "output": "4"}
    for step, accuracy in ((0, 0.25), (5, 0.75)):
        (tmp_path / "samples" / f"{step}.jsonl").write_text(json.dumps(row) + "\n")
        data = {"val-core/arithmetic/acc/mean@1": accuracy, "critic/score/mean": accuracy}
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "data": data}) + "\n")
    quickstart.summarise(tmp_path, trainer, said.write)
    assert "accuracy: 25.0% before, 75.0% after 5 steps" in said.getvalue()


def test_every_algorithm_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second algorithm once hid the metrics of the first, and its checkpoints lay among the others."""
    folders = {quickstart.default_folder(name) for name in quickstart.ALGORITHMS}
    assert len(folders) == len(quickstart.ALGORITHMS)
    prepared_folders = []
    monkeypatch.setattr(quickstart, "prepare", lambda out, **_: prepared_folders.append(str(out)))
    monkeypatch.setattr(quickstart, "train", lambda overrides: prepared_folders.append(overrides[3]))
    monkeypatch.setattr(quickstart, "summarise", lambda out, trainer, say: None)
    quickstart.main(["--algorithm", "ppo"])
    quickstart.main(["--out", "mine"])
    first = ["runs/quickstart_ppo", "trainer.default_local_dir=runs/quickstart_ppo/run"]
    assert prepared_folders == [*first, "mine", "trainer.default_local_dir=mine/run"]


def test_the_last_words_say_how_to_find_the_command(monkeypatch):
    """`make quickstart` runs .venv/bin/strop, and the commands that it suggests need the path."""
    monkeypatch.setattr("sys.prefix", "/somewhere/.venv")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "/somewhere/.venv/bin/activate" in quickstart._activation()
    monkeypatch.setattr("shutil.which", lambda name: f"/somewhere/.venv/bin/{name}")
    assert quickstart._activation() == ""
