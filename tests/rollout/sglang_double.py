"""A double of SGLang's server: the shapes of exchanges recorded with SGLang 0.5.23, over a tiny model that really samples.

It is strict: a request with a key that neither the recording nor SGLang's documentation has is refused, and so is a weight update
outside of a session.
"""

from __future__ import annotations

import base64
import copy
import functools
import json
import pickle
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from strop.rollout.base import Completion, Request, Sampling
from strop.rollout.hf import HfEngine
from tests.backends.replay_checks import chosen

RECORDING = Path(__file__).with_name("sglang_protocol.jsonl")
DOCUMENTED = {
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "sampling_seed",
    "abort_all",
    "return_routed_experts",
}


@functools.cache
def recorded(path: str) -> list[dict[str, Any]]:
    exchanges = [json.loads(line) for line in RECORDING.read_text().splitlines()]
    return [exchange for exchange in exchanges if exchange["path"] == path]


def keys(value: Any) -> set[str]:
    """All keys of nested objects."""
    if isinstance(value, dict):
        return set(value) | {key for inner in value.values() for key in keys(inner)}
    return {key for inner in value for key in keys(inner)} if isinstance(value, list) else set()


class Double:
    """`calls` lists the paths that were asked, `weight_version` is what the last update said."""

    def __init__(self, model: Any) -> None:
        self.module = copy.deepcopy(model)
        with torch.no_grad():
            for weight in self.module.parameters():
                weight.zero_()  # whoever wants an answer brings weights
        self.engine = HfEngine(self.module)
        self.weight_version = "default"
        self.calls: list[str] = []
        self._session = False
        self._going = threading.Event()
        self._going.set()
        self._server = _Server(("127.0.0.1", 0), functools.partial(_Handler, self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        self.calls.append(path)
        known = recorded(path)
        if not known:
            return 404, {"detail": "Not Found"}
        strange = keys(body) - {key for exchange in known for key in keys(exchange["request"])} - DOCUMENTED
        if strange:
            return 400, {"error": {"message": f"unknown keys {sorted(strange)}"}}
        handler = getattr(self, path.strip("/"), None)
        return handler(body) if handler else (200, known[0]["response"])

    # --- what it does ----------------------------------------------------------------------------------------------------

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        self._going.wait()
        prompts, settings = body["input_ids"], body["sampling_params"]
        longest = max(len(ids) for ids in prompts)
        if longest >= self.engine.max_model_len:
            message = recorded("/generate")[3]["response"]["error"]["message"]
            return 400, {"error": {"message": message.replace("3000", str(longest))}}
        assert all(ids == prompts[0] for ids in prompts) and body["return_logprob"]
        own = settings[0]
        sampling = Sampling(
            temperature=own["temperature"],
            top_k=own["top_k"],
            top_p=own["top_p"],
            min_p=own["min_p"],
            max_tokens=own["max_new_tokens"],
            stop_ids=tuple(own["stop_token_ids"]),
            ignore_eos=own["ignore_eos"],
            repetition_penalty=own["repetition_penalty"],
        )
        if any("sampling_seed" in each for each in settings):
            requests = [Request(ids, seed=each["sampling_seed"]) for ids, each in zip(prompts, settings)]
            answers = self.engine.generate(requests, sampling)
        else:
            answers = [[c] for c in self.engine.generate([Request(prompts[0], n=len(prompts))], sampling)[0]]
        replies = [self._reply(prompts[0], group[0]) for group in answers]
        if body.get("return_routed_experts"):
            for reply in replies:
                # As SGLang 0.5.23: of all tokens but the last, in all layers of the model, int32 in base64.
                found = chosen(self.module, [*prompts[0], *reply["output_ids"]]).astype("int32")
                reply["meta_info"]["routed_experts"] = base64.b64encode(found.tobytes()).decode()
        return 200, replies

    def _reply(self, prompt: list[int], completion: Completion) -> dict[str, Any]:
        """The recorded answer with other numbers in it."""
        reply = copy.deepcopy(recorded("/generate")[1]["response"][0])
        count = len(completion.ids)
        reason = {
            "length": {"type": "length", "length": count},
            "stop": {"type": "stop", "matched": completion.ids[-1] if completion.ids else None},
            "abort": recorded("/generate")[7]["response"]["meta_info"]["finish_reason"],
        }[completion.finish]
        changes = {
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "weight_version": self.weight_version,
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": count}],
            "output_token_logprobs": [[p, i, None] for p, i in zip(completion.log_probs, completion.ids)],
            "output_token_logprobs_length": count,
        }
        assert changes.keys() <= reply["meta_info"].keys()
        reply["meta_info"].update(changes)
        reply["output_ids"] = completion.ids
        return reply

    def begin_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        self._session = True
        return 200, recorded("/begin_weight_update")[0]["response"]

    def end_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        self._session = False
        return 200, recorded("/end_weight_update")[0]["response"]

    def update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[int, Any]:
        refused, *taken = recorded("/update_weights_from_tensor")
        if not self._session:
            return 400, refused["response"]
        (text,) = body["serialized_named_tensors"]
        weights = pickle.loads(base64.b64decode(text))
        self.engine.update_weights(weights, 0)
        if "weight_version" in body:
            self.weight_version = body["weight_version"]
        return 200, taken[0]["response"]

    def update_weight_version(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.weight_version = body["new_version"]
        return 200, recorded("/update_weight_version")[0]["response"]

    def abort_request(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert body == {"abort_all": True}
        self.engine.abort()
        return 200, ""

    def pause_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self._going.clear()
        return 200, recorded("/pause_generation")[0]["response"]

    def continue_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self._going.set()
        return 200, recorded("/continue_generation")[0]["response"]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 2048  # like the real one


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body that waits for word of its headers costs 40 ms

    def __init__(self, double: Double, *arguments: Any) -> None:
        self.double = double
        super().__init__(*arguments)

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "null"))

    def _answer(self, body: Any) -> None:
        status, found = self.double.answer(self.path, body)
        text = b"" if found == "" else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if text else "text/plain")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None: ...
