"""The time model against rates that were measured, and its proportions."""

from __future__ import annotations

import pytest

from strop.planning import times
from strop.planning.devices import DEVICES, PlannedCluster, device_of
from strop.planning.rollout import PlannedSampler
from strop.planning.shape import shape_of
from strop.planning.training import TrainedModel


@pytest.mark.parametrize(
    "name, measured", [("qwen2.5-0.5b", 227e3), ("qwen2.5-1.5b", 107e3), ("qwen2.5-7b", 34.8e3)]
)
def test_decoding_is_as_fast_as_was_measured(name, measured, monkeypatch):
    """docs/performance/rollouts.md: 256 prompts x 4 samples x 256 tokens on one H200, every answer of full length."""
    monkeypatch.setattr(times, "ANSWER_SHARE", 1.0)
    sampler = PlannedSampler(
        shape_of(name), 1024, 120, 256, max_rows=1024, batch_tokens=32768, share=0.5, samples=4
    )
    rate = 1024 * 256 / times.sampling_seconds(sampler, PlannedCluster(DEVICES["h200"]), 1024)
    assert rate == pytest.approx(measured, rel=0.15)


def test_operations_are_two_per_weight_and_token():
    shape = shape_of("qwen2.5-7b")
    assert times.operations(shape, 1000, 1000, 0) == pytest.approx(
        2 * 1000 * (shape.parameters - shape.embedding), rel=0.001
    )


def test_devices_are_known_by_name_and_by_memory():
    assert device_of("H100").memory > 79 * 2**30
    assert device_of("80GiB").memory == 80 * 2**30 and device_of("24gb").memory == 24 * 10**9
    assert device_of(str(16 * 2**30)).memory == 16 * 2**30
    with pytest.raises(ValueError, match=r"no such device\. Did you mean 'a100-80'"):
        device_of("a100-8")
    with pytest.raises(ValueError, match="give a unit, such as 80GiB"):
        device_of("80")


def test_an_update_takes_as_long_as_was_measured():
    """benchmarks/results/plan_memory.jsonl: 16 rows of 1,024 tokens of the 0.5B shape, checkpointed, 0.356 s on one H200."""
    model = TrainedModel(shape_of("qwen2.5-0.5b"))
    forward = times.forward_seconds(model, DEVICES["h200"], 16 * 1023, 16 * 768, 1024)
    assert times.FORWARD_BACKWARD_RECOMPUTE * forward == pytest.approx(0.356, rel=0.15)
