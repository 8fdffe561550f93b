"""The clients of OpenAI and Anthropic from the public index against the endpoint. Needs `make .venv-agents/.ready`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.agents.endpoint.test_program import run_program

PYTHON = Path(__file__).parents[3] / ".venv-agents" / "bin" / "python"
QUESTION = """
import anthropic, openai
said = [{"role": "user", "content": "?"}]
client = openai.OpenAI()
"""
SCRIPTS = {
    "chat": """
one = client.chat.completions.create(model="m", messages=said, logprobs=True)
assert one.choices[0].message.content == "4" and len(one.choices[0].logprobs.content) == 1, one
assert one.usage.completion_tokens == 2
""",
    "chat stream": """
with client.chat.completions.stream(model="m", messages=said) as stream:
    for event in stream:
        pass
    assert stream.get_final_completion().choices[0].message.content == "4"
""",
    "responses": """
one = client.responses.create(model="m", input="?", instructions="Be brief.")
assert one.output_text == "4" and one.status == "completed", one
""",
    "responses stream": """
with client.responses.stream(model="m", input="?") as stream:
    kinds = [event.type for event in stream]
    assert stream.get_final_response().output_text == "4", kinds
""",
    "messages": """
one = anthropic.Anthropic().messages.create(model="m", max_tokens=9, messages=said, system="Be brief.")
assert one.content[0].text == "4" and one.stop_reason == "end_turn", one
""",
    "messages stream": """
with anthropic.Anthropic().messages.stream(model="m", max_tokens=9, messages=said) as stream:
    assert "".join(stream.text_stream) == "4" and stream.get_final_message().usage.output_tokens == 2
""",
    "errors": """
for call, error in (
    (lambda: client.chat.completions.create(model="m", messages=said, n=2), openai.BadRequestError),
    (lambda: openai.OpenAI(api_key="x").models.list(), openai.AuthenticationError),
    (lambda: client.embeddings.create(model="m", input="?"), openai.NotFoundError),
    (lambda: anthropic.Anthropic(api_key="x").models.list(), anthropic.AuthenticationError),
    (lambda: client.responses.create(model="m", input=[]), openai.BadRequestError),
):
    try:
        call()
    except error as caught:
        assert caught.body, caught
    else:
        raise SystemExit(f"no {error}")
""",
}


@pytest.mark.agents
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_client_reads_what_the_endpoint_writes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PYTHON.exists(), "run `make .venv-agents/.ready`"
    monkeypatch.setattr(sys, "executable", str(PYTHON))
    passed = tmp_path / "passed"
    source = f"{QUESTION}{SCRIPTS[name]}\nopen({str(passed)!r}, 'w').close()\n"
    try:
        run_program(tmp_path, source, options="")
    except Exception as error:
        if name != "errors" or "was refused" not in str(error):
            raise
    assert passed.exists()
