"""vLLM as a server of its own, started as the documentation says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from strop.quickstart.tiny_model import tiny_model, tiny_tokenizer
from strop.rollout.base import EngineDied, Request, Sampling
from strop.rollout.external_host import HostProcess, JsonClient
from strop.rollout.sglang import _free_port
from strop.rollout.vllm.engine import VllmEngine
from tests.rollout import engines, tiny

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, HostProcess]]:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, hidden=128).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    port = _free_port()
    extension = "strop.rollout.vllm.extension.Extension"
    flags = (
        f"--model {folder} --dtype float32 --enforce-eager --max-model-len 64 --host 127.0.0.1 --port {port}"
    )
    more = f"--generation-config vllm --worker-extension-cls {extension}"
    command = [
        engines.vllm_python(),
        "-m",
        "vllm.entrypoints.openai.api_server",
        *flags.split(),
        *more.split(),
    ]
    process = HostProcess(
        "vllm", command, {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    )
    client = JsonClient("vllm", f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + 400
    while not client.is_healthy("/health"):
        assert process.alive and time.monotonic() < deadline, process.describe_exit()
        time.sleep(1)
    client.close()
    yield f"http://127.0.0.1:{port}", process
    process.close()


def test_a_server_is_trained_with(served: tuple[str, HostProcess], tmp_path: Path) -> None:
    url, process = served
    model = tiny_model(tiny_tokenizer(), hidden=128, seed=3).eval()
    engine = VllmEngine(model, engine_kwargs={"url": url})
    prompts = [[5, 9, 2], [7, 1, 1, 4, 10, 12], [11]]
    for version in (0, 1):
        if version:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn_like(weight) * 0.3)
            engine.update_weights(model.named_parameters(), version)
        greedy = engine.generate([Request(p, n=2) for p in prompts], Sampling(temperature=0, max_tokens=9))
        for prompt, group in zip(prompts, greedy):
            assert [(c.ids, c.version) for c in group] == [(tiny.plain_greedy(model, prompt, 9), version)] * 2
    drawn = engine.generate(
        [Request(p, n=3) for p in prompts], Sampling(temperature=0.6, top_k=9, max_tokens=12, stop_ids=(3,))
    )
    for prompt, group in zip(prompts, drawn):
        for c in group:
            tiny.assert_log_probs(model, prompt, c.ids, c.log_probs, 0.6)
            assert c.finish == ("stop" if 3 in c.ids else "length")
    threading.Timer(0.1, engine.abort).start()
    (stopped,) = engine.generate([Request([3])], Sampling(max_tokens=60))[0]
    assert stopped.finish == "abort" and len(stopped.ids) == len(stopped.log_probs) < 60
    threading.Timer(0.2, process.close).start()
    with pytest.raises(EngineDied, match=f"The vllm server at {url} cannot be reached"):
        while True:
            engine.generate([Request([3])], Sampling(max_tokens=60))
    engine.close()
