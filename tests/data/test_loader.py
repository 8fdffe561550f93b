"""A loader resumed at any position goes on with exactly the rows that would have come."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from itertools import chain, islice
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler

from strop.config.schema.data import DataConfig, SamplerConfig
from strop.data.chat import Chat
from strop.data.loader import Loader, build_loader
from strop.data.prompts import PromptDataset
from strop.registry import load_attribute
from tests.data.tokens import character_tokenizer


def stream(loader: Loader, count: int) -> list[list[int]]:
    return [loader.draw() for _ in range(count)]


def flat(loader: Loader) -> list[int]:
    """One epoch."""
    return list(chain.from_iterable(loader))


@given(st.integers(1, 17), st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_resume_equals_never_stopping_at_every_position(
    rows: int, size: int, shuffle: bool, drop: bool, seed: int
) -> None:
    size = min(size, rows)

    def make() -> Loader:
        return Loader(range(rows), size, shuffle=shuffle, seed=seed, drop_last=drop)

    total = 2 * len(make()) + 1
    whole = stream(make(), total)
    for cut in range(total):
        first = make()
        before = stream(first, cut)
        state = json.loads(json.dumps(first.state_dict()))
        second = make()
        second.load_state_dict(state)
        assert before + stream(second, total - cut) == whole


@pytest.mark.parametrize("cut", range(8))
def test_resume_inside_epoch_loops(cut: int) -> None:
    """The way a trainer loops: epochs outside, batches inside, the state taken while a batch is in use."""
    seen: list[list[int]] = []
    state = Loader(range(10), 3, seed=4).state_dict()
    loader = Loader(range(10), 3, seed=4)
    for batch in (batch for _ in range(3) for batch in loader):
        if len(seen) == cut:
            break
        seen.append(batch)
        state = loader.state_dict()
    resumed = Loader(range(10), 3, seed=4)
    resumed.load_state_dict(state)
    while resumed.epoch < 3:
        seen += list(resumed)
    whole = Loader(range(10), 3, seed=4)
    assert seen == [batch for _ in range(3) for batch in whole]


def test_epochs_see_every_row_once_in_different_orders() -> None:
    loader = Loader(range(12), 4, seed=3)
    first, second = flat(loader), flat(loader)
    assert sorted(first) == sorted(second) == list(range(12)) and first != second != list(range(12))
    assert loader.epoch == 2 and loader.position == 0
    assert flat(Loader(range(12), 4, seed=4)) != first, "another seed, another order"
    assert flat(Loader(range(12), 4, shuffle=False)) == list(range(12))


def test_the_last_short_batch() -> None:
    assert [len(batch) for batch in Loader(range(10), 4)] == [4, 4] and len(Loader(range(10), 4)) == 2
    keep = Loader(range(10), 4, drop_last=False)
    assert [len(batch) for batch in keep] == [4, 4, 2] and len(keep) == 3
    assert len(Loader(range(3), 4, drop_last=False)) == 1


def test_another_batch_size_goes_on_at_the_same_row() -> None:
    first = Loader(range(12), 4, seed=1)
    drawn = first.draw()
    second = Loader(range(12), 2, seed=1)
    second.load_state_dict(first.state_dict())
    assert sorted(drawn + flat(second)) == list(range(12))


def test_other_data_is_refused_or_explained(caplog: pytest.LogCaptureFixture) -> None:
    first = Loader(range(12), 4)
    first.draw()
    state = first.state_dict()
    with pytest.raises(
        ValueError,
        match=r"The data changed since the checkpoint: it had 12 rows .* now there are 11.*resume_mode=disable",
    ):
        Loader(range(11), 4).load_state_dict(state)
    other = Loader(range(11), 4)
    other.load_state_dict({**state, "epoch": 3}, on_change="restart")
    assert (other.epoch, other.position) == (3, 0)
    assert "Epoch 3 starts again" in caplog.text


def test_the_order_of_the_checkpoint_wins(caplog: pytest.LogCaptureFixture) -> None:
    first = Loader(range(12), 4, seed=1)
    whole = stream(Loader(range(12), 4, seed=1), 6)
    first.draw()
    second = Loader(range(12), 4, seed=2)
    second.load_state_dict(first.state_dict())
    assert stream(second, 5) == whole[1:]
    assert "in the order of the checkpoint (seed=1" in caplog.text


def test_impossible_loaders_are_refused() -> None:
    with pytest.raises(ValueError, match="holds no rows"):
        Loader([], 1)
    with pytest.raises(
        ValueError, match=r"has 3 rows, fewer than one batch of 4.*Set data\.train_batch_size"
    ):
        Loader(range(3), 4)
    with pytest.raises(ValueError, match=r"Set data\.dataloader_num_workers=0"):
        Loader(range(3), 1, sampler=[0, 1, 2], workers=1)


def test_processes_ahead_give_the_same_batches() -> None:
    tokenizer = character_tokenizer()
    rows = [{"prompt": f"{n}+{n}=", "data_source": "sums"} for n in range(20)]
    dataset = PromptDataset(rows, Chat(tokenizer))
    alone = Loader(dataset, 3, seed=5)
    ahead = Loader(dataset, 3, seed=5, workers=1)
    try:
        assert stream(ahead, 3) == stream(alone, 3)
        state = ahead.state_dict()
        assert state == alone.state_dict(), "what is under way does not count as drawn"
        rest = stream(ahead, 5)
        assert rest == stream(alone, 5)
        ahead.load_state_dict(state)
        assert stream(ahead, 5) == rest, "going back discards what was made ahead"
    finally:
        ahead.close()


def test_errors_of_processes_ahead_arrive() -> None:
    rows = [{"prompt": "x" * n, "data_source": "sums"} for n in range(4)]
    ahead = Loader(
        PromptDataset(rows, Chat(character_tokenizer()), max_prompt_length=3), 2, workers=1, shuffle=False
    )
    try:
        with pytest.raises(ValueError, match=r"row 0 has \d+ tokens, over data\.max_prompt_length=3"):
            ahead.draw()
        assert ahead.position == 0
    finally:
        ahead.close()


CLASS_OF_A_USER = """
class Numbers:
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, row):
        return row
"""


def test_processes_ahead_know_the_data_set_of_the_user(tmp_path: Path) -> None:
    """data.custom_cls with data.dataloader_num_workers: its file is no module that a process could import."""
    (tmp_path / "numbers_of_mine.py").write_text(CLASS_OF_A_USER)
    dataset = load_attribute(str(tmp_path / "numbers_of_mine.py"), "Numbers")(8)
    ahead = Loader(dataset, 4, workers=1, shuffle=False)
    try:
        assert stream(ahead, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    finally:
        ahead.close()


def processes_of(loader: Loader) -> list[int]:
    assert loader._prefetcher is not None
    return list(loader._prefetcher._workers._pool._processes)


def test_signals_to_the_processes_ahead_cost_no_batch(caplog: pytest.LogCaptureFixture) -> None:
    """Ctrl-C reaches every process of a terminal, SIGTERM of a scheduler every process of a job."""
    alone, ahead = Loader(range(30), 3, seed=5), Loader(range(30), 3, seed=5, workers=2)
    try:
        assert stream(ahead, 2) == stream(alone, 2)
        before = processes_of(ahead)
        for pid in before:
            os.kill(pid, signal.SIGINT)
        assert stream(ahead, 2) == stream(alone, 2)
        assert processes_of(ahead) == before and not caplog.records
        for pid in before:
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)
        assert stream(ahead, 8) == stream(alone, 8)
        assert "prepared by the trainer from now on" in caplog.text and len(caplog.records) == 1
    finally:
        ahead.close()


KILLED = """
import os, signal
from strop.data.loader import Loader
loader = Loader(range(9), 3, workers=2)
loader.draw()
print(*loader._prefetcher._workers._pool._processes, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_ahead_end_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(f"if __name__ == '__main__':\n{indent(KILLED, '    ')}")
    # A pipe would stay open as long as the workers; Python may warn after the last line.
    with (tmp_path / "out.txt").open("w") as out, (tmp_path / "warnings.txt").open("w") as warnings:
        subprocess.run([sys.executable, tmp_path / "killed.py"], stdout=out, stderr=warnings)
    workers = [int(pid) for pid in (tmp_path / "out.txt").read_text().splitlines()[-1].split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while (left := [pid for pid in workers if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Curriculum:
    """Easy rows first; how many rows there are grows with each update."""

    def __init__(self, dataset: Any, config: Any):
        self.rows, self.level, self.place, self.seen = len(dataset), 1, 0, []

    def __iter__(self):  # type: ignore[no-untyped-def]
        while self.place < self.rows:
            self.place += 1
            yield (self.place * self.level) % self.rows
        self.place = 0

    def update(self, batch: Any) -> None:
        self.seen.append(batch)
        self.level += 1

    def state_dict(self) -> dict:
        return {"level": self.level, "place": self.place}

    def load_state_dict(self, state: dict) -> None:
        self.level, self.place = state["level"], state["place"]


@pytest.mark.parametrize("cut", range(7))
def test_a_curriculum_steers_and_resumes(cut: int) -> None:
    def steps(loader: Loader, count: int) -> list[list[int]]:
        batches = []
        for _ in range(count):
            batches.append(loader.draw())
            loader.update({"reward": 1.0})
        return batches

    whole = steps(Loader(range(9), 3, sampler=Curriculum(range(9), None)), 7)
    assert whole[0] == [1, 2, 3] and whole[1] == [8, 1, 3], "levels 1 and 2"
    first = Loader(range(9), 3, sampler=Curriculum(range(9), None))
    before = steps(first, cut)
    second = Loader(range(9), 3, sampler=Curriculum(range(9), None))
    second.load_state_dict(first.state_dict())
    assert before + steps(second, 7 - cut) == whole


def test_a_seeded_sampler_without_state_continues_in_its_epoch() -> None:
    def loader() -> Loader[int]:
        generator = torch.Generator().manual_seed(1)  # each epoch draws a new order from it
        return Loader(range(7), 2, sampler=RandomSampler(range(7), generator=generator))

    whole, resumed = loader(), loader()
    stream(whole, 5)
    state = whole.state_dict()
    resumed.load_state_dict(state)
    assert (state["epoch"], state["position"]) == (1, 4)
    assert stream(resumed, 5) == stream(whole, 5)


def test_a_sampler_without_state_is_run_forward(caplog: pytest.LogCaptureFixture) -> None:
    first = Loader(range(6), 2, sampler=[5, 4, 3, 2, 1, 0])
    assert first.draw() == [5, 4]
    second = Loader(range(6), 2, sampler=[5, 4, 3, 2, 1, 0])
    with caplog.at_level(logging.WARNING):
        second.load_state_dict(first.state_dict())
    assert list(second) == [[3, 2], [1, 0]] and not caplog.text

    class Forgetful(list):
        def update(self, batch: Any) -> None: ...

    third = Loader(range(6), 2, sampler=Forgetful([5, 4, 3, 2, 1, 0]))
    third.load_state_dict(first.state_dict())
    assert "what it learned before the checkpoint is lost" in caplog.text
    with pytest.raises(ValueError, match=r"data\.sampler gave fewer than one batch of 2"):
        Loader(range(6), 2, sampler=iter([1])).draw()
    with pytest.raises(ValueError, match=r"data\.sampler gives 1 rows, fewer than one batch of 2"):
        Loader(range(6), 2, sampler=[1])


def test_loaders_from_a_configuration(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "data_source": "sums"} for n in range(8)]
    dataset = PromptDataset(rows, Chat(character_tokenizer()))
    config = DataConfig(train_batch_size=3, seed=2, shuffle=True)
    train = build_loader(config, dataset)
    assert len(train) == 2 and [p.index for p in train.draw()] == [
        p.index for p in build_loader(config, dataset).draw()
    ]
    orders = [
        build_loader(DataConfig(train_batch_size=8, shuffle=True, seed=n), dataset).draw() for n in (2, 3)
    ]
    assert [p.index for p in orders[0]] != [p.index for p in orders[1]]
    assert build_loader(DataConfig(train_batch_size=3, gen_batch_size=4), dataset).batch_size == 4
    (everything,) = build_loader(config, dataset, split="val")
    assert [p.index for p in everything] == list(range(8))
    mixed = [
        [
            p.index
            for p in next(
                iter(build_loader(DataConfig(validation_shuffle=True, seed=n), dataset, split="val"))
            )
        ]
        for n in (2, 2, 3)
    ]
    assert mixed[0] == mixed[1] != mixed[2] and sorted(mixed[0]) == list(range(8))
    assert [len(b) for b in build_loader(DataConfig(val_batch_size=3), dataset, split="val")] == [3, 3, 2]
    (tmp_path / "order.py").write_text(
        "class Backwards(list):\n    def __init__(self, rows, config):\n        super().__init__(range(len(rows))[::-1])\nclass No:\n    def __init__(self, rows, config): ...\n"
    )
    own = SamplerConfig(class_path=str(tmp_path / "order.py"), class_name="Backwards")
    assert [p.index for p in build_loader(DataConfig(train_batch_size=3, sampler=own), dataset).draw()] == [
        7,
        6,
        5,
    ]
    for name, message in (("No", "has no __iter__"), (None, "class_name is not")):
        bad = DataConfig(
            train_batch_size=3, sampler=SamplerConfig(class_path=own.class_path, class_name=name)
        )
        with pytest.raises(ValueError, match=message):
            build_loader(bad, dataset)


def test_supervised_items_load_as_well() -> None:
    assert list(islice(Loader(["a", "b", "c"], 1, shuffle=False), 2)) == [["a"], ["b"]]
