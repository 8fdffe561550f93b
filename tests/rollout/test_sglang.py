"""The sglang engine against what a real server answered once, and against a double of it."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strop.rollout.base import EngineDied, Request, Sampling
from strop.rollout.external import named_weights
from strop.rollout.sglang import SglangEngine, command_line, read_completion
from tests.backends.replay_checks import chosen
from tests.models.tiny import tiny_model
from tests.rollout import tiny
from tests.rollout.sglang_double import Double, recorded

GREEDY = Sampling(temperature=0, max_tokens=6)


@pytest.fixture
def double() -> Iterator[Double]:
    made = Double(tiny.make())
    yield made
    made.close()


def answers() -> list[dict[str, Any]]:
    """Completions that a real server gave with log-probs."""
    found = []
    for exchange in recorded("/generate"):
        replies = exchange["response"] if isinstance(exchange["response"], list) else [exchange["response"]]
        found += [
            r for r in replies if isinstance(r, dict) and "output_token_logprobs" in r.get("meta_info", {})
        ]
    return found


def test_recorded_answers_are_read() -> None:
    first = read_completion(answers()[0], 5)
    assert first.ids == [7042, 30, 198, 198, 504, 2988, 314, 42]
    assert first.log_probs[:2] == [-0.2808312177658081, -0.3921559154987335]
    assert (first.finish, first.version, first.versions, first.error) == ("length", 5, [], None)
    for reply in answers():
        completion = read_completion(reply, 0)
        assert len(completion.ids) == len(completion.log_probs) == reply["meta_info"]["completion_tokens"]


def test_a_recorded_abort_keeps_its_tokens() -> None:
    aborted = [
        exchange["response"]
        for exchange in recorded("/generate")
        if isinstance(exchange["response"], dict)
        and exchange["response"].get("meta_info", {}).get("finish_reason", {}).get("type") == "abort"
    ]
    assert aborted
    for reply in aborted:
        completion = read_completion(reply, 0)
        assert completion.finish == "abort" and completion.ids


def test_versions_on_the_way_are_counted() -> None:
    reply = json.loads(json.dumps(answers()[0]))
    spans = [{"version": "3", "start": 0, "end": 5}, {"version": "4", "start": 5, "end": 8}]
    reply["meta_info"] |= {"weight_version": "4", "weight_versions": spans}
    completion = read_completion(reply, 9)
    assert (completion.version, completion.versions) == (4, [(3, 5), (4, 3)])


def test_weights_go_in_a_session_while_generation_is_paused(double: Double) -> None:
    model = tiny.make()
    engine = SglangEngine(model, engine_kwargs={"url": double.url}, bucket_megabytes=1)
    engine._bucket_bytes = 4000  # several buckets for a tiny model
    double.calls.clear()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    engine.update_weights(named_weights(model), 12)
    begin, *buckets, end = double.calls[1:-1]
    assert (double.calls[0], begin) == ("/pause_generation", "/begin_weight_update")
    assert (end, double.calls[-1]) == ("/end_weight_update", "/continue_generation")
    assert len(buckets) > 3 and set(buckets) == {"/update_weights_from_tensor"}
    assert double.weight_version == "12"
    (one,) = engine.generate([Request([5, 9, 2])], GREEDY)[0]
    assert (one.ids, one.version) == (tiny.plain_greedy(model, [5, 9, 2], 6), 12)
    engine.close()


def test_weights_are_written_as_the_server_reads_them() -> None:
    """The same kinds of objects, by name, as in the recording: SGLang refuses to load any other."""
    from strop.rollout.sglang import _serialized

    mine = base64.b64decode(_serialized([("model.norm.weight", torch.ones(576, dtype=torch.bfloat16))]))
    theirs = base64.b64decode(
        recorded("/update_weights_from_tensor")[1]["request"]["serialized_named_tensors"][0]
    )
    words = [
        b"rebuild_tensor",
        b"rebuild_storage_filename",
        b"torch.storage",
        b"UntypedStorage",
        b"bfloat16",
        b"model.norm.weight",
    ]
    assert all(word in mine and word in theirs for word in words)
    ((name, weight),) = pickle.loads(mine)
    assert name == "model.norm.weight" and torch.equal(weight, torch.ones(576, dtype=torch.bfloat16))


def test_memory_is_given_back_only_if_asked(double: Double) -> None:
    for asked, calls in ((False, []), (True, ["/release_memory_occupation", "/resume_memory_occupation"])):
        engine = SglangEngine(tiny.make(), free_cache_engine=asked, engine_kwargs={"url": double.url})
        double.calls.clear()
        engine.sleep()
        engine.wake()
        assert double.calls == calls
        engine.close()


def test_a_server_that_refuses_one_request_serves_the_others(double: Double) -> None:
    engine = SglangEngine(tiny.make(), engine_kwargs={"url": double.url})
    double.engine.max_model_len = 8  # less than the client believes
    bad, good = engine.generate([Request([1] * 20), Request([5, 9])], GREEDY)
    assert bad[0].finish == "error" and "Input length (20 tokens) exceeds" in (bad[0].error or "")
    assert good[0].finish == "length"
    engine.close()


_NO_LOG_PROBS = {"output_ids": [1, 2], "meta_info": {"finish_reason": {"type": "stop"}}}


@pytest.mark.parametrize(
    "reply", [[{"text": "no ids"}], "busy", {"meta_info": {}}, [], [_NO_LOG_PROBS]], ids=str
)
def test_a_reply_of_another_layout_is_an_error_of_its_request(
    double: Double, monkeypatch: pytest.MonkeyPatch, reply: Any
) -> None:
    """Nothing waits for it forever."""
    engine = SglangEngine(double.module, engine_kwargs={"url": double.url})
    monkeypatch.setattr(double, "generate", lambda _: (200, reply))
    asked = engine.agenerate(Request([5, 9]), Sampling(max_tokens=2))
    (answer,) = asyncio.run(asyncio.wait_for(asked, 20))
    assert answer.finish == "error" and "reply of the sglang server cannot be read" in str(answer.error)
    engine.close()


def test_a_server_that_goes_away_is_named(double: Double) -> None:
    before = set(threading.enumerate())  # engines of other tests may be open
    engine = SglangEngine(tiny.make(), engine_kwargs={"url": double.url})
    double.close()
    with pytest.raises(EngineDied, match=f"The sglang server at {double.url} cannot be reached"):
        SglangEngine(tiny.make(), engine_kwargs={"url": double.url})
    engine.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name == "strop-sglang-http"]


def test_a_server_that_does_not_start_tells_its_last_words() -> None:
    with pytest.raises(
        EngineDied, match=r"(?s)SGLang did not start.*exit code 1.*launch_server.*No module named .?sglang"
    ):
        SglangEngine(tiny.make(), engine_kwargs={"python": sys.executable})
    with pytest.raises(ValueError, match="'localhost:1' is not an http"):
        SglangEngine(tiny.make(), engine_kwargs={"url": "localhost:1"})


@pytest.mark.parametrize(("device", "saver"), [("cuda", True), ("cpu", False)])
def test_without_cuda_there_is_no_memory_saver(device: str, saver: bool) -> None:
    """The server preloads the saver's library, which does not load where there is no libcuda.so.1."""
    with pytest.raises(EngineDied) as caught:
        SglangEngine(tiny.make(), engine_kwargs={"python": sys.executable, "device": device})
    kept = re.search(r"are in (\S+\.log)", str(caught.value))
    assert kept is not None
    command = Path(kept[1]).read_text().splitlines()[0]
    assert f"--device {device}" in command
    assert ("--enable-memory-saver" in command) == saver


def test_settings_become_flags() -> None:
    given = {
        "tp_size": 2,
        "enable_memory_saver": True,
        "disable_radix_cache": False,
        "dtype": None,
        "cuda_graph_bs": [1, 2],
    }
    assert command_line(given) == ["--tp-size", "2", "--enable-memory-saver", "--cuda-graph-bs", "1", "2"]


def test_experts_of_tokens_are_read(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    double = Double(model)
    double.module.load_state_dict(model.state_dict())
    engine = SglangEngine(tmp_path, record_experts=True, engine_kwargs={"url": double.url})
    try:
        request = Request([5, 9, 2], n=2)
        [found] = engine.generate([request], Sampling(max_tokens=6))
    finally:
        engine.close()
        double.close()
    for completion in found:
        expected = chosen(model, [*request.ids, *completion.ids])
        assert completion.experts is not None and np.array_equal(completion.experts, expected)
