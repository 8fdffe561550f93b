"""vLLM beyond the common rules: what it does when it dies, is refused, or gets weights on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from strop.rollout.base import EngineDied, Request, Sampling, build_engine
from strop.rollout.external import named_weights
from strop.rollout.vllm.engine import VllmEngine
from tests.rollout import engines, tiny

pytestmark = pytest.mark.vllm
PROMPT = [5, 9, 2]
ROOT = Path(__file__).parents[2]
GREEDY = Sampling(temperature=0, max_tokens=6)


def test_weights_in_small_buckets_arrive_whole_and_on_the_way() -> None:
    """Requests that are running go on with the new weights, and say which tokens came from which."""
    model = engines.model("vllm")
    engine = engines.build("vllm", model)
    assert isinstance(engine, VllmEngine)
    engine._buckets._size = 1 << 12  # most weights are larger, so each gets a bucket of its own
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    with ThreadPoolExecutor(1) as pool:
        long = Sampling(temperature=0, max_tokens=100)
        running = pool.submit(engine.generate, [Request(PROMPT), Request([7, 8])], long)
        time.sleep(0.05)
        engine.update_weights(named_weights(model), 7)
        answers = [group[0] for group in running.result()]
    for completion in answers:
        assert completion.version == 7 and len(completion.ids) == 100
        (before, count), (after, rest) = completion.versions
        assert (before, after, count + rest) == (0, 7, 100)
    assert engine.generate([Request(PROMPT)], GREEDY)[0][0].ids == tiny.plain_greedy(model, PROMPT, 6)


def test_an_update_that_lacks_weights_is_refused() -> None:
    model = engines.model("vllm")
    engine = engines.build("vllm", model)
    before = engine.generate([Request(PROMPT)], GREEDY)[0][0].ids
    some = list(named_weights(model))[:-2]
    with pytest.raises(
        ValueError, match=r"all weights of its model or none: 2 of \d+ are missing \(lm_head.weight"
    ):
        engine.update_weights(some, 3)
    assert engine.version == 0
    assert engine.generate([Request(PROMPT)], GREEDY)[0][0].ids == before


def test_an_argument_that_vllm_does_not_have_is_refused_with_the_nearest_name() -> None:
    own = {"python": engines.vllm_python(), "enforce_eagr": True}
    with pytest.raises(ValueError, match=r"no argument 'enforce_eagr'. Did you mean 'enforce_eager'"):
        build_engine("vllm", engines.model("vllm"), engine_kwargs={"vllm": own})


def test_experts_of_tokens_are_refused_on_a_cpu() -> None:
    own = {"python": engines.vllm_python()}
    with pytest.raises(ValueError, match=r"router_replay.mode=R3: vLLM's CPU build cannot return"):
        build_engine("vllm", engines.model("vllm"), engine_kwargs={"vllm": own}, record_experts=True)


def test_an_interpreter_without_vllm_says_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"needs the package 'vllm'.*pip install .*\[vllm\]'"):
        build_engine("vllm", tiny.make(), engine_kwargs={"vllm": {"python": sys.executable}})


def test_a_process_that_dies_in_the_middle_of_a_batch_is_named_with_its_last_words() -> None:
    """After those that share its engine."""
    model = engines.model("vllm")
    engine = engines.build("vllm", model)
    assert isinstance(engine, VllmEngine)
    pid = engine._host.pid
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(
        EngineDied,
        match=rf"(?s)unanswered.*process \(id {pid}\) ended with exit code -9 \(SIGKILL\).*Its command and its output",
    ):
        engine.generate([Request(PROMPT, n=200) for _ in range(50)], Sampling(max_tokens=120))
    with pytest.raises(EngineDied, match=f"id {pid}"):
        engine.generate([Request(PROMPT)], GREEDY)
    assert time.monotonic() - started < 60
    engines.forget(model)


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "1"])
def test_where_vllm_can_be_imported_it_runs_in_the_process_of_the_trainer(processes: str) -> None:
    """With VLLM_ENABLE_V1_MULTIPROCESSING=1 the core of the engine has a further process of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "VLLM_ENABLE_V1_MULTIPROCESSING": processes,
        "TOKENIZERS_PARALLELISM": "0",
    }
    script = Path(__file__).with_name("vllm_in_process.py")
    done = subprocess.run(
        [engines.vllm_python(), str(script)], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("as it should be"), (
        done.stdout[-2000:] + done.stderr[-2000:]
    )


@pytest.mark.slow
def test_a_folder_is_read_by_vllm_itself(tmp_path: Path) -> None:
    model = tiny.make("smollm", wide=True)
    model.save_pretrained(tmp_path)
    own = {"python": engines.vllm_python()}
    engine = build_engine(
        "vllm", tmp_path, enforce_eager=True, max_num_seqs=8, dtype="float32", engine_kwargs={"vllm": own}
    )
    assert engine.generate([Request(PROMPT)], GREEDY)[0][0].ids == tiny.plain_greedy(model, PROMPT, 6)
    engine.close()
    assert (tmp_path / "config.json").exists()
