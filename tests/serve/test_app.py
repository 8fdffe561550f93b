"""A real server on a real port, without a model: the protocol, keys of users, limits, and bad requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strop.serve.accounts import Accounts, load_accounts, parse_tokens
from tests.serve.scene import BASE, Running, log_probs_of, metrics_of, pass_body

ALICE, BOB = "tml-alice-0123456789", "tml-bob-0123456789ab"
STEP = {"adam_params": {"learning_rate": 0.1}}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(**settings: Any) -> Running:
        started.append(Running(tmp_path, **settings))
        return started[-1]

    yield start
    for server in started:
        server.close()


def sample(server: Running, sampler: str, seq: int, **more: Any) -> Any:
    request = {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2},
        **more,
    }
    return server.ok("asample", request)


def test_training_and_sampling(serve: Any) -> None:
    server = serve()
    session = server.session()
    model = server.model(session)
    body = pass_body(model, 1, weights=[1.0, 0.0, 2.0])
    output = server.answer(server.ok("forward_backward", body))
    assert log_probs_of(output) == pytest.approx([-1.02, -1.03, -1.04])
    assert metrics_of(output) == {"loss:sum": pytest.approx(1.02 + 2 * 1.04)}
    step = server.ok("optim_step", {"model_id": model, "seq_id": 2, **STEP})
    assert server.answer(step) == {"metrics": {"grad_norm": 1.0}}
    assert server.host.adapters[model]["w"] == pytest.approx(-1 + 0.1 * 3)
    # The same number again is the same request: it is answered, and not carried out a second time.
    assert server.ok("optim_step", {"model_id": model, "seq_id": 2, **STEP}) == step
    assert server.host.adapters[model]["steps"] == 1
    again = server.call("optim_step", {"model_id": model, "seq_id": 0, **STEP})
    assert again[0] == 200  # 0 is the creation of the model

    saved = server.answer(server.ok("save_weights", {"model_id": model, "seq_id": 3, "path": "first"}))
    assert saved["path"] == f"tinker://{model}/weights/first"
    request = {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 0}
    sampler = server.answer(server.ok("save_weights_for_sampler", request))["sampling_session_id"]
    future = sample(server, sampler, 0, num_samples=3, prompt_logprobs=True)
    assert len(future["sample_sequence_ids"]) == 3
    found = server.answer(future)
    assert len(found.messages(1)) == 3 and len(found.raw(2)) == 8
    assert server.ok(f"samplers/{sampler}")["base_model"] == BASE

    other = server.model(session, 1, seed=5)
    load = {"model_id": other, "seq_id": 1, "path": saved["path"], "optimizer": True}
    assert server.answer(server.ok("load_weights", load))["path"] == saved["path"]
    assert server.host.adapters[other]["w"] == server.host.adapters[model]["w"]
    assert server.ok("weights_info", {"tinker_path": saved["path"]})["lora_rank"] == 4
    names = [one["checkpoint_id"] for one in server.ok(f"training_runs/{model}/checkpoints")["checkpoints"]]
    assert names == ["weights/first", "sampler_weights/ephemeral-000000000004"]
    assert server.ok("training_runs?limit=1")["cursor"]["total_count"] == 2

    assert server.ok(f"sessions/{session}/finish", {}) == {}
    assert server.call("session_heartbeat", {"session_id": session})[0] == 410
    assert server.call("optim_step", {"model_id": model, "seq_id": 9, **STEP})[0] == 410


def test_samples_of_all_users_run_together(serve: Any) -> None:
    server = serve(users={ALICE: "alice", BOB: "bob"})
    futures = []
    for token in (ALICE, BOB):
        session = server.session(token=token)
        create = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = server.ok("create_sampling_session", create, token=token)["sampling_session_id"]
        model = server.model(session, token=token)
        futures.append((token, model, sampler))
    server.host.hold = threading.Event()  # training has the model, so samples gather
    for token, model, _ in futures:
        server.ok("forward_backward", pass_body(model, 1), token=token)
    waiting = []
    for token, _, sampler in futures:
        request = {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": [1]}]},
            "sampling_params": {"max_tokens": 1},
        }
        waiting.append((token, server.ok("asample", request, token=token)))
    server.host.hold.set()
    for token, future in waiting:
        assert server.answer(future, token=token).messages(1)
    assert max(server.host.sampled_together) == 2


def test_what_belongs_to_another_user_does_not_exist(serve: Any) -> None:
    server = serve(users={ALICE: "alice", BOB: "bob"})
    session = server.session(token=ALICE)
    model = server.model(session, token=ALICE)
    future = server.ok("forward_backward", pass_body(model, 1), token=ALICE)
    request = {"model_id": model, "seq_id": 2, "path": "mine"}
    path = server.answer(server.ok("save_weights_for_sampler", request, token=ALICE), token=ALICE)["path"]
    create = {"session_id": session, "sampling_session_seq_id": 1, "model_path": path}
    sampler = server.ok("create_sampling_session", create, token=ALICE)["sampling_session_id"]
    own = server.session(token=BOB)
    own_model = server.model(own, token=BOB)
    attempts: list[tuple[str, Any]] = [
        ("session_heartbeat", {"session_id": session}),
        ("forward_backward", pass_body(model, 9)),
        ("optim_step", {"model_id": model, "seq_id": 9, **STEP}),
        ("retrieve_future", {"request_id": future["request_id"]}),
        ("get_info", {"model_id": model}),
        ("weights_info", {"tinker_path": path}),
        (f"samplers/{sampler}", None),
        (f"training_runs/{model}", None),
        (f"sessions/{session}", None),
        ("cancel_future", {"request_id": f"{sampler}:0"}),
        ("create_sampling_session", {"session_id": own, "sampling_session_seq_id": 0, "model_path": path}),
        ("load_weights", {"model_id": own_model, "seq_id": 1, "path": path, "optimizer": False}),
    ]
    absent = "s" + "0" * (len(session) - 1)
    for url, body in attempts:
        status, reply = server.call(url, body, token=BOB)
        assert status == 404, (url, reply)
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        other = None if body is None else sent.replace(session.encode(), absent.encode())
        expected = server.call(url.replace(session, absent), other, token=BOB)
        assert (status, reply["detail"].replace(session, absent)) == (expected[0], expected[1]["detail"]), url
    assert server.ok("training_runs", token=BOB)["cursor"]["total_count"] == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("create_session", b"{", 400, "not JSON"),
        ("create_session", b"\xff", 400, "not JSON"),
        ("create_session", b"[" * 100_000, 400, "not JSON"),
        ("create_session", b"[]", 400, "must be a JSON object"),
        ("create_session", b'{"user_metadata": 3}', 400, "user_metadata must be an object, it is 3"),
        ("create_session", b" " * 3_000_000, 413, "the limit is 1 MB"),
        ("session_heartbeat", b"{}", 400, "session_id must be a text"),
        ("forward_backward", b"\x08", 400, "not a ForwardBackwardRequest"),
        ("nothing", b"{}", 404, "Not Found"),
    ],
)
def test_bad_bodies(serve: Any, path: str, body: bytes, status: int, words: str) -> None:
    server = serve(max_body_mb=1)
    found, reply = server.call(path, body)
    assert found == status and words in reply["detail"], reply
    assert server.ok("healthz") == {"status": "ok"}


def test_requests_beyond_the_limits(serve: Any) -> None:
    server = serve(max_adapters_per_user=1, max_lora_rank=8, max_batch_tokens=4, max_samples=2)
    session = server.session()
    create = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 9}}
    refused: list[tuple[str, Any, int, str]] = [
        ("create_model", create, 400, "lora_config.rank must be a whole number from 1 to 8, it is 9"),
        ("create_model", {**create, "base_model": "gpt"}, 400, f"has the model {BASE}, not gpt"),
        (
            "create_model",
            {**create, "lora_config": {"rank": 4, "train_attn": False}},
            400,
            "train_attn=false is not offered",
        ),
    ]
    _all_refused(server, refused)
    model = server.model(session)
    params = {"sampling_params": {"max_tokens": 2}}
    create_sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = server.ok("create_sampling_session", create_sampler)["sampling_session_id"]
    ask = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}, **params}
    image = {"chunks": [{"type": "image", "data": ""}]}
    refused = [
        ("create_model", {**create, "model_seq_id": 1, "lora_config": {"rank": 4}}, 400, "You have 1 models"),
        ("forward_backward", pass_body(model, 1, tokens=[1] * 5), 413, "5 tokens; the limit is 4"),
        ("forward_backward", pass_body(model, 1, "ppoo"), 400, "There is no loss 'ppoo'"),
        ("forward_backward", pass_body(model, 2**62), 400, "seq_id must be a whole number from 0 to"),
        ("forward_backward", pass_body(model, 2**63), 400, "seq_id must be a whole number from 0 to"),
        ("retrieve_future", {"request_id": f"{model}:{'9' * 400}"}, 404, "There is no future"),
        ("retrieve_future", {"request_id": f"{model}:{'9' * 5000}"}, 404, "There is no future"),
        ("optim_step", {"model_id": model, **STEP}, 400, "seq_id must be"),
        ("asample", {**ask, "num_samples": 3}, 400, "num_samples must be a whole number from 1 to 2"),
        ("asample", {**ask, "prompt": {"chunks": [{"tokens": [100]}]}}, 400, "a token id from 0 to 99"),
        ("asample", {**ask, "prompt": {"chunks": [{"tokens": [1] * 32}]}}, 400, "has no room left"),
        ("asample", {**ask, "prompt": image}, 400, "only text is offered"),
        ("asample", {**ask, "topk_prompt_logprobs": 2}, 400, "topk_prompt_logprobs is not offered"),
        ("asample", {**ask, "sampling_params": {"temperature": -1}}, 400, "temperature must be"),
        (
            "create_sampling_session",
            {**create_sampler, "model_path": "tinker://a/b"},
            400,
            "no path of weights",
        ),
    ]
    _all_refused(server, refused)
    for name in ("../x", ".hidden", "a/b", "x" * 200, ""):
        future = server.call("save_weights", {"model_id": model, "seq_id": 5, "path": name})
        assert future[0] == 400 or "path must be" in server.answer(future[1])["error"]
    answer = server.answer(server.ok("optim_step", {"model_id": model, "seq_id": 6}))
    assert answer["category"] == "user" and "needs adam_params" in answer["error"]


def _all_refused(server: Running, requests: list[tuple[str, Any, int, str]]) -> None:
    for path, body, status, words in requests:
        found, reply = server.call(path, body)
        assert found == status and words in reply["detail"], (path, body, reply)


def test_keys(serve: Any) -> None:
    server = serve(users={ALICE: "alice"})
    for token in ("", "tml-wrong-0123456789", ALICE[:-1], ALICE + "x"):
        status, reply = server.call("get_server_capabilities", token=token)
        assert status == 401 and "key" in reply["detail"]
    bearer = server.call("get_server_capabilities", token="", Authorization=f"Bearer {ALICE}")
    assert bearer[0] == 200


def test_without_tokens_only_this_machine_is_answered(serve: Any) -> None:
    server = serve()
    assert server.call("get_server_capabilities", Host="evil.example")[0] == 421
    assert server.call("get_server_capabilities", token="")[0] == 401
    assert server.call("get_server_capabilities", Host="localhost:1")[0] == 200


def test_tokens_are_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# users\nalice {ALICE}\n\nbob:{BOB}\n")
    assert load_accounts(str(file), "0.0.0.0").user_of(BOB) == "bob"
    monkeypatch.setenv("STROP_SERVE_TOKENS", f"alice:{ALICE}")
    assert load_accounts(None, "0.0.0.0").user_of(ALICE) == "alice"
    monkeypatch.delenv("STROP_SERVE_TOKENS")
    assert isinstance(load_accounts(None, "127.0.0.1"), Accounts)
    with pytest.raises(ValueError, match=r"server.host=0.0.0.0 lets other machines in"):
        load_accounts(None, "0.0.0.0")
    with pytest.raises(ValueError, match="there is no such file"):
        load_accounts(str(tmp_path / "none"), "127.0.0.1")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("alice", "the token of alice must begin with tml-"),
        ("alice tml-short", "at least 20"),
        (f"a/b {ALICE}", "the user is not"),
        (f"alice {ALICE} extra words", "must begin with"),
    ],
)
def test_a_token_that_the_client_would_refuse(line: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        parse_tokens([line], "file")
    assert "short" not in str(error.value)
    with pytest.raises(ValueError, match="have the same token"):
        parse_tokens([f"a {ALICE}", f"b {ALICE}"], "file")
