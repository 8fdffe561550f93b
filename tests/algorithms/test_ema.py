"""EMA follows its formula in float32, survives a round trip and names what does not match."""

from __future__ import annotations

import pytest
import torch

from strop.algorithms.ema import EMA


def test_formula_over_several_updates() -> None:
    ema = EMA({"w": torch.tensor([1.0, 2.0])}, decay=0.9)
    ema.update({"w": torch.tensor([3.0, 2.0])})
    ema.update([("w", torch.tensor([0.0, 2.0]))])
    assert torch.allclose(ema.average["w"], torch.tensor([(0.9 * 1 + 0.1 * 3) * 0.9, 2.0]))
    assert ema.updates == 2


def test_small_updates_survive_bfloat16_weights() -> None:
    weight = torch.ones(1, dtype=torch.bfloat16)
    ema = EMA({"w": weight}, decay=0.992)
    for _ in range(1000):
        ema.update({"w": weight * 1.01})
    target = float(weight * 1.01)
    assert float(ema.average["w"]) == pytest.approx(target, abs=1e-5)
    assert ema.average["w"].dtype == torch.float32
    ema.copy_to({"w": weight})
    assert weight.dtype == torch.bfloat16 and float(weight) == target


def test_the_average_is_not_the_weight_itself_and_carries_no_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    ema = EMA([("w", weight)])
    with torch.no_grad():
        weight.add_(1.0)
    assert ema.average["w"].tolist() == [1.0, 1.0]
    ema.update([("w", weight)])
    assert not ema.average["w"].requires_grad


def test_counters_are_copied() -> None:
    ema = EMA({"steps": torch.tensor(1)})
    ema.update({"steps": torch.tensor(7)})
    assert ema.average["steps"].item() == 7


def test_state_round_trip_continues_the_same_numbers() -> None:
    torch.manual_seed(0)
    steps = [{"w": torch.randn(3)} for _ in range(6)]
    straight = EMA(steps[0], decay=0.8)
    for step in steps[1:]:
        straight.update(step)
    first = EMA(steps[0], decay=0.8)
    for step in steps[1:3]:
        first.update(step)
    second = EMA(steps[0], decay=0.8)
    second.load_state_dict(first.state_dict())
    for step in steps[3:]:
        second.update(step)
    assert torch.equal(straight.average["w"], second.average["w"]) and second.updates == 5
    changed = EMA(steps[0], decay=0.1)
    changed.load_state_dict(first.state_dict())
    assert changed.decay == 0.1, "a setting that was changed before a resume takes effect"


def test_mismatches_are_named() -> None:
    ema = EMA({"w": torch.zeros(2)})
    with pytest.raises(ValueError, match="missing \\['w'\\], not known \\['v'\\]"):
        ema.update({"v": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"shape \(2,\), the tensor \(3,\)"):
        ema.update({"w": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"shape \(2,\), the tensor \(3,\)"):
        ema.load_state_dict(EMA({"w": torch.zeros(3)}).state_dict())
    with pytest.raises(ValueError, match="decay must lie between 0 and 1"):
        EMA({}, decay=2)
