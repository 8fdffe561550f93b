"""The sglang engine with a real server on the CPU: an unsupported configuration of SGLang, good for the protocol only."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.rollout.base import Request, Sampling
from strop.rollout.sglang import SglangEngine
from tests.rollout import tiny

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
PYTHON = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"
PROMPTS = [[5, 9, 2], [7, 1, 1, 4, 30, 12, 8, 77, 3, 2, 6], [11]]
ON_A_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 2048,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[SglangEngine]:
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: run `make .venv-sglang/.ready`")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("sglang_stub")))
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        own = {"python": str(PYTHON), **ON_A_CPU}
        made = SglangEngine(
            tiny.make(wide=True), max_num_seqs=16, gpu_memory_utilization=0.2, engine_kwargs=own
        )
    yield made
    made.close()


def renewed(engine: SglangEngine, version: int) -> Any:
    """A module with other weights, which the engine has too."""
    model = tiny.make(wide=True)
    torch.manual_seed(version)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    engine.update_weights(model.named_parameters(), version)
    return model


def test_greedy_is_a_plain_forward_before_and_after_new_weights(engine: SglangEngine) -> None:
    model = tiny.make(wide=True)
    engine.update_weights(model.named_parameters(), 0)
    for version in (0, 1):
        model = renewed(engine, version) if version else model
        answers = engine.generate([Request(p, n=2) for p in PROMPTS], Sampling(temperature=0, max_tokens=9))
        for prompt, group in zip(PROMPTS, answers):
            assert [(c.ids, c.version) for c in group] == [(tiny.plain_greedy(model, prompt, 9), version)] * 2


def test_log_probs_are_at_the_temperature_before_filters(engine: SglangEngine) -> None:
    model = tiny.make(wide=True)
    engine.update_weights(model.named_parameters(), 2)
    for sampling in (
        Sampling(temperature=0.6, max_tokens=12),
        Sampling(temperature=1.3, top_k=20, top_p=0.95, max_tokens=12),
    ):
        for prompt, group in zip(PROMPTS, engine.generate([Request(p, n=2) for p in PROMPTS], sampling)):
            for c in group:
                tiny.assert_log_probs(model, prompt, c.ids, c.log_probs, sampling.temperature)


def test_stop_tokens_aborts_and_bad_requests(engine: SglangEngine) -> None:
    model = renewed(engine, 3)
    path = tiny.plain_greedy(model, PROMPTS[0], 12)
    end = path.index(path[5]) + 1
    (one,) = engine.generate(
        [Request(PROMPTS[0])], Sampling(temperature=0, max_tokens=12, stop_ids=(95, path[5]))
    )[0]
    assert (one.ids, one.finish) == (path[:end], "stop")
    threading.Timer(0.5, engine.abort).start()
    for c in engine.generate([Request([3], n=3)], Sampling(max_tokens=110))[0]:
        assert c.finish == "abort" and 0 < len(c.ids) == len(c.log_probs) < 110
    bad, good = engine.generate([Request([96]), Request([3])], Sampling(max_tokens=2))
    assert (bad[0].finish, good[0].finish) == ("error", "length")


def test_a_request_goes_on_with_weights_that_came_on_the_way(engine: SglangEngine) -> None:
    renewed(engine, 4)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, [Request([3])], Sampling(temperature=0, max_tokens=100))
        time.sleep(0.5)
        renewed(engine, 5)
        (one,) = running.result()[0]
    (before, count), (after, rest) = one.versions
    assert (before, after, count + rest, one.version) == (4, 5, 100, 5)
    engine.update_weights((), 6)
    assert engine.generate([Request([3])], Sampling(max_tokens=2))[0][0].version == 6
