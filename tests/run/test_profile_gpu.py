"""What only a GPU can show: allocator snapshots, ranges for nsys, kernels in traces, peaks of memory."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from strop.algorithms.metrics.training import memory_metrics
from strop.run.profile.capture import StepProfiler

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Memory:
    context, stacks, trace_alloc_max_entries, kw_args = "all", "all", 1000, {}


def work(profiling: StepProfiler) -> None:
    with profiling.phase(3, "step"), profiling.phase(3, "update_actor"):
        a = torch.randn(512, 512, device="cuda")
        (a @ a).sum().item()


def test_a_snapshot_of_the_allocator(tmp_path: Path) -> None:
    work(StepProfiler("torch_memory", frozenset({3}), folder=tmp_path, memory=Memory()))
    snapshot = pickle.loads((tmp_path / "step_3_rank_0.memory.pickle").read_bytes())
    assert any(event["action"] == "alloc" for events in snapshot["device_traces"] for event in events)


def test_a_trace_has_kernels(tmp_path: Path) -> None:
    work(StepProfiler("torch", frozenset({3}), folder=tmp_path))
    events = json.loads(gzip.decompress((tmp_path / "step_3_rank_0.json.gz").read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert any(event.get("name") == "strop/update_actor" for event in events)


def test_marks_for_nsys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiling = StepProfiler("nsys", frozenset({3}), folder=tmp_path)
    work(profiling)
    assert profiling.tool == "nsys" and not caplog.text


def test_peaks_are_of_one_step() -> None:
    """What other tests of this process left allocated is in all of the numbers."""
    before = torch.cuda.memory_allocated() / 2**30
    big = torch.empty(2**28, device="cuda", dtype=torch.uint8)
    assert memory_metrics()["perf/max_memory_allocated_gb"] >= before + 0.25
    del big
    memory_metrics()
    assert memory_metrics()["perf/max_memory_allocated_gb"] < before + 0.25
