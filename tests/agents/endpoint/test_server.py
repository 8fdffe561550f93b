"""The API over real sockets: answers, streams, tool calls, errors in the API's own format, and what they cost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from strop.agents.endpoint.calls import ModelAnswer
from strop.agents.endpoint.chat_completions import log_probs
from strop.rollout.base import Completion
from tests.agents.endpoint.clients import Client, run_agent
from tests.agents.stage import ScriptedEngine, prompt, text, tokenizer_of

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "2+2?"}]
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_an_answer_and_a_stream_have_the_fields_of_the_api() -> None:
    engine = ScriptedEngine(["four", "five"])
    replies: list[httpx.Response] = []

    async def agent(client: Client) -> None:
        body = {"model": "m", "messages": QUESTION, "temperature": 0.2, "logprobs": True}
        replies.append(await client.post(CHAT, body))
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        replies.append(await client.post(CHAT, {**body, **stream, "max_completion_tokens": 2}))
        key = {"x-api-key": client.session.key}
        replies.append(await client.http.get("/v1/models", headers=key))

    [episode] = run_agent(agent, engine)
    assert episode.error is None
    whole = replies[0].json()
    assert whole["object"] == "chat.completion" and whole["model"] == "m"
    [choice] = whole["choices"]
    assert choice["message"]["content"] == "four" and choice["finish_reason"] == "stop"
    spelled = choice["logprobs"]["content"]
    assert [item["token"] for item in spelled] == list("four")
    assert [item["logprob"] for item in spelled] == engine.completions[0].log_probs[:4]
    prompt_tokens = len(engine.requests[0].ids)
    assert whole["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": prompt_tokens + 5,
    }
    assert replies[1].headers["content-type"] == "text/event-stream"
    chunks = events(replies[1])
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1])
    assert said == "fi" and chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 2 and chunks[-1]["choices"] == []
    assert replies[2].json()["data"][0]["id"] == "policy"


def test_tool_calls_come_back_as_their_sampled_ids() -> None:
    tokenizer = tokenizer_of(WITH_TOOLS)
    call = '<tool_call>\n{"name":  "add", "arguments": {"a": 2}}\n</tool_call>'
    engine = ScriptedEngine([f"So:{call}", "4"], tokenizer)
    messages: list[dict[str, Any]] = list(QUESTION)

    async def agent(client: Client) -> None:
        answer = await client.chat(messages, tools=[ADD], tool_choice="auto")
        [made] = answer["tool_calls"]
        assert made["type"] == "function" and made["function"] == {"name": "add", "arguments": '{"a": 2}'}
        messages.extend([answer, {"role": "tool", "tool_call_id": made["id"], "content": "four"}])
        stream = {"model": "m", "messages": messages, "tools": [ADD], "stream": True}
        reply = await client.post(CHAT, stream)
        assert events(reply)[-1]["choices"][0]["finish_reason"] == "stop"

    [episode] = run_agent(agent, engine, tokenizer=tokenizer, response_length=800)
    assert episode.error is None
    sample = episode.trajectory()
    assert sample.branches == [] and [t.role for t in sample.turns] == ["assistant", "tool", "assistant"]
    assert text(sample.response).startswith(f"So:{call}<|im_end|>\n<|im_start|>tool\nfour")
    assert '"add"' in text(sample.prompt.ids)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_of_a_tool_call_are_those_that_were_sampled(stream: bool) -> None:
    tokenizer = tokenizer_of(WITH_TOOLS)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    engine = ScriptedEngine([call], tokenizer)
    found: list[dict[str, Any]] = []

    async def agent(client: Client) -> None:
        body = {"model": "m", "messages": list(QUESTION), "tools": [ADD], "logprobs": True, "stream": stream}
        reply = await client.post(CHAT, body)
        choices = [chunk["choices"][0] for chunk in events(reply)] if stream else reply.json()["choices"]
        for choice in choices:
            found.extend((choice["logprobs"] or {"content": []})["content"])

    [episode] = run_agent(agent, engine, tokenizer=tokenizer, response_length=800)
    assert episode.error is None
    [completion] = engine.completions
    assert [token["logprob"] for token in found] == completion.log_probs[:-1]
    assert "".join(token["token"] for token in found) == call


def test_a_part_of_a_character_has_no_bytes() -> None:
    answer = ModelAnswer(
        "1", "m", 1, "ü", (), "stop", ["\ufffd", "\ufffd", "é"], [1, 2, 3], [-1.0, -2.0, -3.0]
    )
    assert [token["bytes"] for token in log_probs(answer)] == [None, None, [0xC3, 0xA9]]


def test_bare_text_in_calls_gets_the_types_of_the_schema() -> None:
    template = WITH_TOOLS.replace("{{ c.function | tojson }}", "<function={{ c.function.name }}></function>")
    tokenizer = tokenizer_of(template)
    call = (
        "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=note>\n3\n</parameter>\n"
        "<parameter=other>\n4\n</parameter>\n</function>\n</tool_call>"
    )
    engine = ScriptedEngine([call, "4"], tokenizer)
    properties = {"a": {"type": "integer"}, "note": {"type": "string"}}
    schema = {"name": "add", "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": schema}]
    messages: list[dict[str, Any]] = list(QUESTION)

    async def agent(client: Client) -> None:
        answer = await client.chat(messages, tools=tools)
        [made] = answer["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"a": 2, "note": "3", "other": "4"}
        messages.extend([answer, {"role": "tool", "tool_call_id": made["id"], "content": "four"}])
        await client.chat(messages, tools=tools)

    [episode] = run_agent(agent, engine, tokenizer=tokenizer, tool_format="qwen", response_length=800)
    assert episode.error is None
    assert episode.trajectory().branches == [], "the second call continues the sampled tokens of the first"


def test_an_answer_is_cut_before_a_stop_text() -> None:
    engine = ScriptedEngine(["Thought: x\nObservation: made up"])

    async def agent(client: Client) -> None:
        answer = await client.chat(QUESTION, stop=["Observation:"])
        assert answer["content"] == "Thought: x\n"

    [episode] = run_agent(agent, engine)
    assert episode.error is None
    assert text(episode.trajectory().response) == "Thought: x\n"


@pytest.mark.parametrize(
    ("said", "stop", "content", "kept"),
    [
        ("search(x)\nObservation: no", ["\nObservation"], "search(x)", "search(x)\n"),
        ("search(x)\nObservation: no", ["no", "\nObs"], "search(x)", "search(x)\n"),
        ("search(x)\nObservation: no", ["Observation"], "search(x)\n", "search(x)\n"),
        ("search(x)\n", ["\n"], "search(x)", "search(x)\n"),
        ("\nfour\n", ["\n"], "", "\n"),
        ("four", ["five", ""], "four", "four<|im_end|>"),
        ("four", ["<|im_end|>"], "four", "four<|im_end|>"),
        ("", ["four"], "", "<|im_end|>"),
    ],
)
def test_the_text_before_a_stop_text_is_whole(said: str, stop: list[str], content: str, kept: str) -> None:
    """Tokenizers of models have tokens such as `)\\n`, in which `\\nObservation` begins."""
    tokenizer = tokenizer_of()
    tokenizer.add_tokens([")\n"])
    engine = ScriptedEngine([said, "5"], tokenizer)

    async def agent(client: Client) -> None:
        reply = await client.post(CHAT, {"messages": QUESTION, "stop": stop})
        [choice] = reply.json()["choices"]
        assert choice["message"]["content"] == content and choice["finish_reason"] == "stop"
        await client.chat([*QUESTION, choice["message"], {"role": "user", "content": "More?"}])

    [episode] = run_agent(agent, engine, tokenizer=tokenizer)
    assert episode.error is None
    sample = episode.trajectory()
    assert sample.branches == [], "the second call continues the tokens of the first"
    first = next(turn for turn in sample.turns if turn.role == "assistant")
    assert tokenizer.decode(sample.response[first.start : first.end]) == kept


REFUSED: list[tuple[str, Any, int, str]] = [
    ("not JSON", b"{", 400, "not JSON"),
    ("a list", b"[]", 400, "JSON object"),
    ("no messages", {"model": "m", "messages": []}, 400, "at least one"),
    (
        "unknown field",
        {"messages": QUESTION, "colour": 1},
        400,
        "Unrecognized request argument supplied: colour",
    ),
    ("n", {"messages": QUESTION, "n": 2}, 400, "n must be 1"),
    ("role", {"messages": [{"role": "robot", "content": "x"}]}, 400, "'robot'"),
    ("image", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "'image_url'"),
    ("tools", {"messages": QUESTION, "tools": [ADD]}, 400, "does not list 'add'"),
    ("tool type", {"messages": QUESTION, "tools": [{"type": "web"}]}, 400, "'web'"),
    ("format", {"messages": QUESTION, "response_format": {"type": "json_object"}}, 400, "only be text"),
    ("calls", {"messages": [{"role": "assistant", "tool_calls": 7}]}, 400, "tool_calls must be a list"),
    ("max_tokens", {"messages": QUESTION, "max_tokens": 0}, 400, "at least 1"),
    ("surrogate", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "surrogate"),
    ("too long", {"messages": [{"role": "user", "content": "x" * 4000}]}, 400, "maximum context length"),
]


@pytest.mark.parametrize(
    ("body", "status", "message"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED]
)
def test_a_bad_call_gets_the_error_of_the_api_and_fails_its_episode(
    body: Any, status: int, message: str
) -> None:
    async def agent(client: Client) -> None:
        await client.chat(QUESTION)
        reply = await client.post(CHAT, body)
        error = reply.json()["error"]
        assert reply.status_code == status and message in error["message"], reply.text
        assert set(error) == {"message", "type", "param", "code"}

    [episode] = run_agent(agent, ScriptedEngine(["4"]))
    assert "was refused" in str(episode.error) and message in str(episode.error)
    assert episode.counts["refused_calls"] == 1 and episode.trajectory().finish == "error"


def test_a_call_is_answered_by_the_policy_of_its_key_or_of_its_model() -> None:
    engine = ScriptedEngine(["0", "1", "2", "3"])

    async def agent(client: Client) -> None:
        [black] = client.session.others
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["white", "black"]
        for model, key in (("gpt", None), ("black", None), ("gpt", black.key), ("white", black.key)):
            reply = await client.post(CHAT, {"model": model, "messages": QUESTION}, key=key)
            assert reply.json()["model"] == model
        client.session.set_scores({"white": 1.0, "black": -1.0})

    [episode] = run_agent(agent, engine, adapters={"white": None, "black": "black"})
    assert [request.adapter for request in engine.requests] == [None, "black", "black", None]
    sample = episode.trajectory()
    said = {(row.player, text(row.response)[0]): row.score for row in sample.branches}
    assert (sample.player, text(sample.response)[0], sample.score) == ("white", "3", 1.0)
    assert said == {("white", "0"): None, ("black", "1"): -1.0, ("black", "2"): -1.0}


def test_an_agent_that_shortens_its_context_goes_on() -> None:
    async def agent(client: Client) -> None:
        reply = await client.post(CHAT, {"messages": [{"role": "user", "content": "x" * 4000}]})
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        await client.chat(QUESTION)

    [episode] = run_agent(agent, ScriptedEngine(["4"]))
    assert episode.error is None


def test_wrong_keys_and_ended_episodes_reach_no_episode() -> None:
    keys: list[str] = []
    codes: list[tuple[int, str]] = []

    async def agent(client: Client) -> None:
        for key in ("wrong", *keys):
            reply = await client.post(CHAT, {"messages": QUESTION}, key=key)
            codes.append((reply.status_code, reply.json()["error"]["code"]))
        keys.append(client.session.key)
        await client.chat(QUESTION)

    def run(*rows: Any) -> list[Any]:
        return run_agent(agent, ScriptedEngine(["4"]), *rows, max_calls=3)

    first, second = run(*(prompt(agent="agent", index=index) for index in range(2)))
    assert set(codes) == {(401, "invalid_api_key")} and first.error is None and second.error is None
    counts = first.counts + second.counts
    assert counts["wrong_keys"] == 2 and counts["calls"] == 2 and len(codes) == 2 + counts["calls_after_end"]
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer sk-of-the-user", "x-api-key": "{key}"},
        {"x-api-key": "sk-of-the-user", "Authorization": "Bearer {key}"},
        {"Authorization": "bearer {key}"},
        {"Authorization": "BEARER  {key}"},
        {"Authorization": "{key}"},
    ],
)
def test_the_key_of_the_episode_is_found_in_either_header(headers: dict[str, str]) -> None:
    """Anthropic's client sends two keys where the environment has ANTHROPIC_AUTH_TOKEN too."""

    async def agent(client: Client) -> None:
        given = {name: value.format(key=client.session.key) for name, value in headers.items()}
        reply = await client.http.post(CHAT, json={"messages": QUESTION}, headers=given)
        assert reply.status_code == 200, reply.text

    [episode] = run_agent(agent, ScriptedEngine(["4"]))
    assert episode.error is None and episode.counts["wrong_keys"] == 0


def test_a_flood_and_too_many_turns_are_refused() -> None:
    async def flood(client: Client) -> None:
        replies = [await client.post(CHAT, {"messages": QUESTION}) for _ in range(5)]
        assert [reply.status_code for reply in replies] == [200, 200, 200, 429, 429]
        assert client.session.flooded.is_set()

    [episode] = run_agent(flood, ScriptedEngine(["4"]), max_calls=3)
    assert "rollout.agent.max_calls=3" in str(episode.error) and episode.counts["flooding_calls"] == 2

    async def talk(client: Client) -> None:
        replies = [await client.post(CHAT, {"messages": QUESTION}) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [200, 429]

    [episode] = run_agent(talk, ScriptedEngine(["4"]), max_assistant_turns=1)
    assert episode.error is None and episode.stopped == "max_assistant_turns", "a limit is no failure"


class Waiting(ScriptedEngine):
    """Never answers; notes what is cancelled."""

    def __init__(self) -> None:
        super().__init__(["4"])
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def agenerate(self, request: Any, sampling: Any) -> list[Completion]:
        self.asked.set()
        try:
            return await asyncio.Future()
        finally:
            self.cancelled.set()


@pytest.mark.parametrize("who", ["client", "episode"])
def test_a_call_ends_with_its_client_and_with_its_episode(who: str) -> None:
    engine = Waiting()

    async def agent(client: Client) -> None:
        call = asyncio.ensure_future(client.post(CHAT, {"messages": QUESTION}))
        await engine.asked.wait()
        if who == "client":
            call.cancel()
        else:
            client.session.end()
            reply = await call
            assert reply.status_code == 401 and "has ended" in reply.json()["error"]["message"]
        await engine.cancelled.wait()

    [episode] = run_agent(agent, engine)
    if who == "client":
        assert "made no call" in str(episode.error)
    assert episode.trajectory().finish == "error" and episode.trajectory().response == []
