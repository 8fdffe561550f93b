"""Parts of the vllm engine that need no vLLM: messages, buckets of weights, samplers, answers of a server."""

from __future__ import annotations

import itertools
import os
import queue
import socket
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

import strop
from strop.data.chat import Chat
from strop.data.images import ImageProcessor
from strop.errors import CRASHED, answer
from strop.rollout import external_host
from strop.rollout.base import Completion, EngineDied, Request, Sampling
from strop.rollout.buckets import Buckets, read_bucket
from strop.rollout.external import model_source, named_weights
from strop.rollout.external_host import HostProcess
from strop.rollout.vllm.driver import Driver, _RequestState, _RunningSample
from strop.rollout.vllm.engine import Remote
from strop.rollout.vllm.extension import Extension
from strop.rollout.vllm.images import engine_prompt
from strop.rollout.vllm.server import read_choices
from strop.rollout.vllm.wire import Wire, pack_completions, pack_request, unpack_completions, unpack_request
from tests.models.vision.tiny_vlm import picture, processor_of, save_vlm, tokenizer_of
from tests.rollout import tiny


def test_requests_and_completions_survive_the_wire() -> None:
    ours, theirs = socket.socketpair()
    a, b = Wire(ours), Wire(theirs)
    request = Request([5, 9, 60000], n=3, seed=1 << 61, max_tokens=7, first=2)
    sampling = Sampling(temperature=0.5, stop_ids=(1, 2), min_p=0.1)
    a.send(*pack_request(request, sampling))
    found = b.receive()
    assert found is not None and unpack_request(*found) == (request, sampling)
    completions = [
        Completion([3, 4], [-0.5, -1.25], "stop", 4, None, [(3, 1), (4, 1)]),
        Completion([], [], "error", 4, "why not"),
        Completion([70000] * 3, [float("-inf"), 0.0, -3.0], "length", 4),
    ]
    completions[0].experts = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    completions[2].experts = np.arange(500, 524, dtype=np.int16).reshape(4, 3, 2)
    b.send(*pack_completions(completions))
    found = a.receive()
    assert found is not None and unpack_completions(*found) == completions
    for one, sent in zip(unpack_completions(*found), completions):
        assert (one.experts is None) == (sent.experts is None)
        if one.experts is not None and sent.experts is not None:
            assert one.experts.dtype == sent.experts.dtype and np.array_equal(one.experts, sent.experts)
    b.close()
    assert a.receive() is None


def test_a_long_message_arrives_whole_and_messages_of_threads_do_not_mix() -> None:
    ours, theirs = socket.socketpair()
    a, b = Wire(ours), Wire(theirs)
    threads = [threading.Thread(target=a.send, args=({"id": i}, bytes([i]) * 3_000_000)) for i in range(4)]
    for thread in threads:
        thread.start()
    for _ in threads:
        found = b.receive()
        assert found is not None and found[1] == bytes([found[0]["id"]]) * 3_000_000


@pytest.mark.parametrize("separate", [False, True], ids=["together", "prompt-apart"])
def test_the_driver_returns_the_experts_of_layers_that_have_some(separate: bool) -> None:
    """vLLM's table has all layers of a model, here a dense one and two with experts. Some versions return the
    experts of the prompt apart, and those of the last token too."""
    driver = Driver.__new__(Driver)
    driver.version = 1
    table = np.zeros((6, 3, 2), np.uint8)
    table[:, 1:] = np.random.default_rng(0).permuted(np.tile(np.arange(5), (6, 2, 1)), axis=2)[:, :, :2]
    future: Future[list[Completion]] = Future()
    request = Request([5, 6, 7])
    driver._running = {"0-0": _RunningSample(_RequestState(request, future), 0)}
    log_probs = [{9: SimpleNamespace(logprob=-1.0)}] * 3
    output = SimpleNamespace(token_ids=[9, 9, 9], logprobs=log_probs, finish_reason="stop")
    answer = SimpleNamespace(request_id="0-0", outputs=[output])
    if separate:
        answer.prompt_routed_experts = table[:3]
        output.routed_experts = table[3:]
    else:
        output.routed_experts = table[:5]
    driver._finish(answer)  # type: ignore[arg-type]
    [found] = future.result()
    assert found.experts is not None and np.array_equal(found.experts, table[:5, 1:])


def running_driver(**methods: Any) -> Driver:
    """A driver in its thread, whose vLLM has these methods."""
    driver = Driver.__new__(Driver)
    driver._engine = SimpleNamespace(  # type: ignore[assignment] # vLLM's engine
        output_processor=SimpleNamespace(request_states={}), **methods
    )
    driver._inbox, driver._failure, driver._closing = queue.SimpleQueue(), None, False
    driver._running, driver._request_ids, driver.version = {}, itertools.count(), 0
    driver._parameters = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=driver._run, daemon=True).start()
    return driver


def dead(*_: object) -> None:
    raise RuntimeError("EngineCore encountered an issue")


@pytest.mark.parametrize("place", [0, 1])
def test_a_request_that_a_dead_engine_does_not_take_fails(place: int) -> None:
    """The process of vLLM's core may end while nothing runs; the next request finds it."""
    added: list[str] = []

    def add_request(name: str, *_: object) -> None:
        if len(added) == place:
            dead()
        added.append(name)

    driver = running_driver(add_request=add_request)
    for _ in range(2):
        with pytest.raises(EngineDied, match="EngineCore encountered an issue"):
            driver.submit(Request([5], n=2), Sampling()).result(timeout=20)


def test_running_requests_fail_when_the_engine_cannot_abort_them() -> None:
    aborting = threading.Event()

    def step() -> list[object]:
        if aborting.wait(0.01):
            dead()
        return []

    def abort_request(names: object) -> None:
        aborting.set()
        dead()

    driver = running_driver(add_request=lambda *_: None, step=step, abort_request=abort_request)
    future = driver.submit(Request([5]), Sampling())
    with pytest.raises(RuntimeError, match="EngineCore"):
        driver.call("abort").result(timeout=20)
    with pytest.raises(EngineDied, match="EngineCore"):
        future.result(timeout=20)


def test_experts_that_cannot_be_read_are_an_error_of_their_request() -> None:
    table = np.zeros((3, 2, 1), np.int16)
    table[0, 0] = 1
    log_probs = [{9: SimpleNamespace(logprob=-1.0)}] * 2
    output = SimpleNamespace(token_ids=[9, 9], logprobs=log_probs, finish_reason="stop", routed_experts=table)
    answers = [SimpleNamespace(request_id="0-0", outputs=[output], finished=True)]
    driver = running_driver(
        add_request=lambda *_: None, step=lambda: [answers.pop()] if answers else [], abort_request=dead
    )
    [found] = driver.submit(Request([5, 6]), Sampling()).result(timeout=20)
    assert found.finish == "error" and "one expert per token" in str(found.error)


@pytest.mark.parametrize("megabytes", [1, 64])
def test_weights_of_all_kinds_survive_buckets(megabytes: int) -> None:
    weights: dict[str, Tensor] = {
        "half": torch.randn(300, 700).to(torch.bfloat16),
        "odd": torch.randn(3),
        "scalar": torch.tensor(2.5),
        "large": torch.randn(1000, 600),  # more than a bucket of one megabyte
        "flipped": torch.randn(40, 50).T,
        "bytes": torch.arange(7, dtype=torch.uint8),
    }
    buckets, found, flags = Buckets(megabytes), {}, []

    def deliver(contents: str, last: bool) -> None:
        entries, first, ends = read_bucket(contents)
        assert ends == last
        flags.append(first)
        found.update({name: weight.clone() for name, weight in entries})

    for _ in range(2):
        flags.clear()
        buckets.send(weights.items(), deliver)
        assert flags == [True] + [False] * (len(flags) - 1) and (len(flags) > 1) == (megabytes == 1)
    path = buckets._path
    assert os.path.exists(path)
    buckets.close()
    assert not os.path.exists(path)
    assert all(
        torch.equal(found[name], weight) and found[name].dtype == weight.dtype
        for name, weight in weights.items()
    )


class _FirstSampler(nn.Module):
    """Shaped like the sampler that is told temperatures with the logits."""

    def forward(self, logits: Tensor, sampling_metadata: Any) -> Tensor:
        raw = self.compute_logprobs(logits)
        logits.div_(3.0)  # as top-k and the rest would change them
        return raw

    @staticmethod
    def compute_logprobs(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1, dtype=torch.float32)


class _SecondSampler:
    """Shaped like the sampler that keeps temperatures by row."""

    logprobs_mode = "raw_logprobs"

    def __init__(self, temperature: Tensor) -> None:
        self.sampling_states = SimpleNamespace(temperature=SimpleNamespace(gpu=temperature))

    def sample(self, logits: Tensor, rows: Tensor, return_logprobs: bool = False) -> tuple[Tensor, Tensor]:
        return logits.argmax(-1), torch.full_like(logits, -9.0)

    def __call__(self, logits: Tensor, rows: Tensor) -> Tensor:
        _, processed = self.sample(logits, rows, return_logprobs=True)
        return (processed if self.logprobs_mode == "processed_logprobs" else logits).log_softmax(-1)


def test_both_samplers_report_log_probs_at_the_temperature_of_each_row() -> None:
    logits, temperature = torch.randn(3, 11), torch.tensor([0.5, 0.0, 2.0])
    expected = torch.log_softmax(logits / torch.tensor([0.5, 1.0, 2.0])[:, None], -1)
    extension = Extension()
    extension.model_runner = SimpleNamespace(sampler=_FirstSampler())
    assert [extension.strop_prepare(), extension.strop_prepare()] == ["exact", "exact"]
    first = extension.model_runner.sampler(logits.clone(), SimpleNamespace(temperature=temperature))
    assert torch.allclose(first, expected)
    greedy = extension.model_runner.sampler(logits.clone(), SimpleNamespace(temperature=None))
    assert torch.allclose(greedy, torch.log_softmax(logits, -1))
    rows = torch.tensor([2, 0, 1])
    extension.model_runner = SimpleNamespace(sampler=_SecondSampler(torch.tensor([0.0, 2.0, 0.5])))
    assert extension.strop_prepare() == "exact"
    assert torch.allclose(extension.model_runner.sampler(logits.clone(), rows), expected)
    extension.model_runner = SimpleNamespace(sampler=SimpleNamespace())
    assert extension.strop_prepare() == "filtered"


def test_a_head_of_its_own_is_refused_by_an_engine_that_ties_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM skips it in silence, and samples from the embedding: a server has the config.json of its folder."""
    model: Any = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = nn.Embedding(11, 4)
    model.lm_head = nn.Linear(4, 11, bias=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    extension = Extension()
    extension.model_runner = SimpleNamespace(model=model)
    buckets, sent = Buckets(1), []
    buckets.send({"lm_head.weight": torch.zeros(11, 4)}.items(), lambda contents, _: sent.append(contents))
    with pytest.raises(ValueError, match=r"--hf-overrides '\{\"tie_word_embeddings\": false\}'"):
        extension.strop_load(sent[0])
    model.lm_head = nn.Linear(4, 11, bias=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError):  # it goes on to vLLM's own reload
        extension.strop_load(sent[0])
    buckets.close()


class _Sleeper:
    """Writes down what is asked of vLLM's engine."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, parts: list[str]) -> None:
        self.calls.append(("wake", parts))

    def collective_rpc(self, method: str, args: tuple[str, ...]) -> None:
        self.calls.append(args[0])

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        self.calls.append("reset")


def test_new_weights_wake_only_the_weights_and_only_once() -> None:
    driver = object.__new__(Driver)
    driver._engine = engine = _Sleeper()
    driver._can_sleep, driver._asleep, driver._running, driver.version = True, set(), {}, 0
    driver._sleep()
    driver._sleep()
    driver._load("one", None)
    driver._load("two", 3)
    assert (
        engine.calls == ["reset", ("sleep", 1), ("wake", ["weights"]), "one", "two", "reset"]
        and driver.version == 3
    )
    driver._wake()
    driver._wake()
    assert engine.calls[6:] == [("wake", ["kv_cache"])]
    driver._sleep()
    driver._wake()
    assert engine.calls[-1] == ("wake", ["kv_cache", "weights"])


_ONE = {"index": 0, "token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}


@pytest.mark.parametrize(
    "reply",
    [
        {"object": "error"},
        {"choices": []},
        {"choices": [{"index": 0}]},
        "busy",
        {"choices": [_ONE]},  # one of two samples, which was copied
        {"choices": [_ONE, {**_ONE, "logprobs": None}]},
    ],
)
def test_a_reply_of_a_server_that_cannot_be_read_is_an_error(reply: Any) -> None:
    found = external_host.completions_of(Request([1], n=2), "vllm", 3, lambda: read_choices(reply, 3), 2)
    assert [(c.finish, c.version) for c in found] == [("error", 3)] * 2
    assert "reply of the vllm server cannot be read" in str(found[0].error)


def test_answers_of_a_server_are_read_in_order() -> None:
    def choice(index: int, finish: str) -> dict[str, Any]:
        return {
            "index": index,
            "token_ids": [index],
            "logprobs": {"token_logprobs": [-1.0]},
            "finish_reason": finish,
        }

    reply = {"choices": [choice(1, "stop"), choice(0, "length"), choice(2, "content_filter")]}
    found = read_choices(reply, 6)
    assert [(c.ids, c.finish, c.version) for c in found] == [
        ([0], "length", 6),
        ([1], "stop", 6),
        ([2], "error", 6),
    ]
    assert found[2].error == "vLLM ended it: content_filter"


def test_the_experts_of_a_layer_travel_one_by_one() -> None:
    """transformers keeps them in one tensor; files, and so other engines, have a weight per expert."""
    model = tiny.make("mixtral")
    source = model_source(model, None)
    names = dict(source.as_checkpoint(source.check(dict(named_weights(model)))))
    experts = [name for name in names if ".experts." in name and name.startswith("model.layers.0.")]
    assert len(experts) == 4 * 3
    source.close()


def test_adapters_travel_merged_and_under_the_names_of_the_model() -> None:
    adapted = tiny.with_lora()
    source = model_source(adapted, None)
    given = source.check(dict(named_weights(adapted)))
    plain = dict(tiny.make("qwen2").named_parameters())
    assert given.keys() == plain.keys()
    changed = [name for name in plain if not torch.equal(given[name], plain[name])]
    assert changed and all("proj" in name for name in changed)
    source.close()


def test_a_process_that_ends_tells_how() -> None:
    process = HostProcess("vllm", ["sh", "-c", "echo so long; kill -KILL $$"])
    assert (
        "The vllm process (id" in process.describe_exit()
        and "(SIGKILL); its last line: so long\nIts command and its output (1 lines)"
        in process.describe_exit()
    )
    assert not process.alive
    process.close()


WORKER = """#!{python}
# Started in the place of a Python with vLLM, with `-m strop.rollout.vllm.worker FD`.
import os, socket, sys
sys.path.insert(0, {root!r})
from strop.rollout.vllm.wire import Wire
wire = Wire(socket.socket(fileno=int(sys.argv[-1])))
wire.receive()
wire.send({{"ready": "processed"}})
for number in range(58):
    print(f"WARNING 11-16 10:00:00 [envs.py:{{number}}] something of no importance", flush=True)
print("torch.OutOfMemoryError: CUDA out of memory.", flush=True)
print("[rank0]: a last word", flush=True)
wire.receive()
os.kill(os.getpid(), 9)
"""


def test_a_worker_that_dies_is_described_in_two_lines_and_a_file(tmp_path: Path, capsys: Any) -> None:
    python = tmp_path / "python"
    python.write_text(WORKER.format(python=sys.executable, root=str(Path(strop.__file__).parent.parent)))
    python.chmod(0o755)
    external_host.keep_output_in(tmp_path / "workers")

    def program() -> int:
        remote = Remote(str(python), {"model": "m"})
        try:
            remote.call("set_version", 1).result()
        finally:
            remote.close()
        return 0

    assert answer(program) == CRASHED
    said = capsys.readouterr().err.splitlines()
    [file] = (tmp_path / "workers").glob("vllm_*.log")
    assert len(said) == 2, said
    assert "The vllm engine has gone with 1 of its requests unanswered." in said[0]
    assert "exit code -9 (SIGKILL); its last error: torch.OutOfMemoryError: CUDA out of memory." in said[0]
    assert said[1] == f"strop: error: Its command and its output (60 lines) are in {file}."
    kept = file.read_text()
    assert kept.startswith(f"$ {python} -m strop.rollout.vllm.worker ") and kept.count("WARNING") == 58
    external_host.keep_output_in(None)


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ([], "it printed nothing."),
        (["  ", ""], "it printed nothing."),
        (["a", "b ", ""], "its last line: b"),
        (["ValueError: wrong", "cleaning up"], "its last error: ValueError: wrong"),
        (["x" * 900], "its last line: " + "x" * 200),
    ],
)
def test_the_line_that_says_most(lines: list[str], shown: str) -> None:
    assert external_host.telling_line(lines) == shown


def image_request() -> Request:
    """A prompt with two images, as the data set makes it."""
    chat = Chat(
        tokenizer_of("qwen2_5_vl"), images=ImageProcessor(lambda: processor_of("qwen2_5_vl"), max_pixels=512)
    )
    shown, images = chat.with_images([picture(), picture((0, 9, 9), width=24)], where="x")
    parts = [{"type": "image"}, {"type": "text", "text": "what"}, {"type": "image"}]
    return Request(shown.ids([{"role": "user", "content": parts}]), n=2, max_tokens=3, images=images)


def test_images_reach_vllm_as_pictures_with_one_placeholder_each() -> None:
    request = image_request()
    token = request.images[0].token_id
    assert list(request.ids).count(token) == 4 + 6
    prompt: Any = engine_prompt(unpack_request(*pack_request(request, Sampling()))[0])
    assert prompt["prompt_token_ids"].count(token) == 2
    assert [token_id for token_id in prompt["prompt_token_ids"] if token_id != token] == [
        token_id for token_id in request.ids if token_id != token
    ]
    assert [shown.tobytes() for shown in prompt["multi_modal_data"]["image"]] == [
        image.picture.tobytes() for image in request.images if image.picture is not None
    ]
    assert prompt["mm_processor_kwargs"] == {"min_pixels": 64, "max_pixels": 512}
    cut = replace(request, ids=request.ids[2:])
    with pytest.raises(ValueError, match=r"4 tokens of an image are not one run .* set rollout.name=native"):
        engine_prompt(cut)
    film = replace(request, images=(replace(request.images[0], video=True), *request.images[1:]))
    with pytest.raises(ValueError, match="the prompt has a video, which vLLM is not given"):
        engine_prompt(film)


def test_the_driver_gives_images_to_vllm_and_refuses_bad_ones_alone() -> None:
    asked: list[Any] = []
    driver = object.__new__(Driver)
    driver._engine = SimpleNamespace(  # type: ignore[assignment] # vLLM's engine, of which it keeps the requests
        add_request=lambda name, prompt, parameters: asked.append(prompt), abort_request=lambda names: None
    )
    driver._request_ids, driver._running, driver.version = itertools.count(), {}, 0
    driver._parameters = lambda *_: None  # type: ignore[method-assign, assignment, return-value]
    request = image_request()
    driver._add(request, Sampling(), Future())
    assert len(asked) == 2 and len(asked[0]["multi_modal_data"]["image"]) == 2
    refused: Future[list[Completion]] = Future()
    driver._add(replace(request, ids=request.ids[2:]), Sampling(), refused)
    assert "not one run" in str(refused.result()[0].error) and len(driver._running) == 2


def test_an_engine_with_a_vision_tower_gets_tokenizer_and_processor(tmp_path: Path) -> None:
    folder = save_vlm("qwen2_5_vl", tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    source = model_source(model, 64)
    assert source.takes_images and model_source(str(folder), 64).takes_images
    names = {file.name for file in Path(source.folder).iterdir()}
    assert {"config.json", "preprocessor_config.json", "tokenizer.json"} <= names
    source.close()
    assert not model_source(tiny.make(), 64).takes_images
