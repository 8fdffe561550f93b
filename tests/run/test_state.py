"""Random states, contents of a model's checkpoint, and when to save."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from strop.run.checkpoint.contents import (
    capture_random_states,
    part_selector,
    restore_random_states,
    role_parts,
    role_state,
)
from strop.run.checkpoint.retention import save_is_due
from strop.run.checkpoint.store import load, save


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.normal(),
        *torch.rand(3).tolist(),
    ]


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    draw()
    save(tmp_path, 1, {"trainer": {"random": capture_random_states()}})
    expected = [draw(), draw()]
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    assert draw() != expected[0]
    restore_random_states(load(tmp_path / "global_step_1")["trainer"]["random"])
    assert [draw(), draw()] == expected


def test_cuda_states_without_the_device_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    state = capture_random_states()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)
    if torch.cuda.is_available():
        pytest.skip("there are CUDA devices here")
    restore_random_states(state)
    assert "random states of 1 CUDA devices, there are 0 here" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_random_numbers_of_the_device_go_on(tmp_path: Path) -> None:
    torch.rand(3, device="cuda")
    save(tmp_path, 1, {"trainer": {"random": capture_random_states()}})
    expected = torch.rand(3, device="cuda")
    restore_random_states(load(tmp_path / "global_step_1")["trainer"]["random"])
    assert torch.equal(torch.rand(3, device="cuda"), expected)


STATE = {"model": {"w": 1}, "optimizer": {"lr": 2}, "schedule": {"step": 3}, "ema": {"w": 4}}


def test_contents_choose_the_parts_and_come_back() -> None:
    everything = ["model", "optimizer", "extra"]
    parts = role_parts("actor", STATE, everything)
    assert sorted(parts) == ["actor/extra", "actor/model", "actor/optimizer"]
    assert role_state("actor", parts, everything) == STATE
    assert role_state("actor", parts, ["model", "hf_model"]) == {"model": {"w": 1}}
    assert role_parts("critic", STATE, ["hf_model"]) == {}
    assert [name for name in parts if part_selector({"actor": ["model"]})(name)] == ["actor/model"]


def test_contents_that_are_missing_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"No weights are loaded: actor\.checkpoint\.load_contents.*'hf_model'"
    ):
        role_state("actor", {}, ["hf_model"])
    with pytest.raises(
        ValueError, match=r"no 'actor/optimizer', it has actor/model\. Take 'optimizer' out of"
    ):
        role_state("actor", {"actor/model": {}}, ["model", "optimizer"])


def test_saves_are_due_every_few_steps_and_at_the_end() -> None:
    due = [step for step in range(1, 11) if save_is_due(step, save_freq=4, last=step == 10, environment={})]
    assert due == [4, 8, 10]
    assert not save_is_due(10, save_freq=-1, last=True, environment={})


def test_saves_are_due_before_a_rented_machine_ends() -> None:
    rented = {"SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP": "1000"}

    def due(now: float) -> bool:
        return save_is_due(
            1, save_freq=100, last=False, longest_step=30, spare=10, now=now, environment=rented
        )

    assert [due(now) for now in (899.0, 900.0, 2000.0)] == [False, True, True]
    with pytest.raises(ValueError, match="'tomorrow' is not a Unix time"):
        save_is_due(
            1,
            save_freq=5,
            last=False,
            environment={"MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP": "tomorrow"},
        )
