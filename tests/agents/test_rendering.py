"""Turns behind sampled ids: stable templates render as a whole, others turn by turn with a notice, none is tokenised again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strop.agents.parsers.base import parser_for
from strop.agents.rendering import Rendering
from strop.agents.tool_set import ToolSet
from strop.data.chat import Chat
from tests.agents.stage import (
    STOP,
    TOKENIZER,
    ScriptedEngine,
    episode_context,
    play,
    prompt,
    text,
    tokenizer_of,
    tool_set,
)
from tests.data.tokens import CHATML

# Numbers its turns, as the family of ChatGLM does: what follows an answer depends on how many came before.
NUMBERED = (
    "{% for m in messages %}[{{ loop.index }}|{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[{{ messages|length + 1 }}|assistant]{% endif %}"
)
# Knows users and assistants, and refuses everybody else.
STRICT = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('who is ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Forgets what the assistant thought before its last turn, as Qwen 3 does.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Shows the tools before the last thing a user says, so that they move when a user speaks again.
MOVING = (
    "{% for m in messages %}{% if tools and m.role == 'user' and loop.index0 == messages|map(attribute='role')|list|length - 1 %}"
    "[TOOLS]{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Writes a result behind the call, with its name, and the first of several calls, as gpt-oss does.
CALLING = (
    "{% set seen = namespace(name=none) %}{% for m in messages %}"
    "{% if m.tool_calls %}{% set seen.name = m.tool_calls[0].function.name %}"
    "<|im_start|>assistant to=functions.{{ seen.name }}<|message|>{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% elif m.role == 'tool' %}{% if seen.name is none %}{{ raise_exception('no call') }}{% endif %}"
    "<|im_start|>functions.{{ seen.name }} to=assistant<|message|>{{ m.content }}"
    "{% else %}{% set seen.name = none %}<|im_start|>{{ m.role }}<|message|>{{ m.content }}{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
SILENT = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def rendering(template: str, tools: ToolSet | None = None) -> Rendering:
    return Rendering.of(Chat(TOKENIZER, template=template), tools=tools.schemas if tools else None)


@pytest.mark.parametrize("template", [CHATML, NUMBERED])
@pytest.mark.parametrize("with_tools", [False, True])
def test_stable_templates_are_proven_and_render_with_their_history(template: str, with_tools: bool) -> None:
    found = rendering(template, tool_set(add) if with_tools else None)
    assert found.stable and not found.notices and found.tool_role == "tool"
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    ids = found.after(history, [{"role": "user", "content": "e"}], last_id=STOP)
    chat = Chat(TOKENIZER, template=template)
    whole = chat.text(
        [*history, {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}], generate=True
    )
    assert (chat.text(history, generate=True) + "d<|im_end|>" + text(ids)) == whole


def test_an_episode_is_what_a_stable_template_writes_for_the_whole() -> None:
    engine = ScriptedEngine(['<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>', "3"])
    tokenizer = tokenizer_of(NUMBERED)
    scene = episode_context(engine, tools=tool_set(add), tokenizer=tokenizer)
    row = prompt()
    row = type(row)(**{**row.__dict__, "ids": Chat(tokenizer).ids(row.messages, tools=scene.tools.schemas)})
    [episode] = play(scene, row)
    sample = episode.trajectory()
    whole = Chat(tokenizer).text(episode.messages, tools=scene.tools.schemas)
    assert text(sample.prompt.ids + sample.response) == whole


@pytest.mark.parametrize(("template", "with_tools"), [(FORGETFUL, False), (FORGETFUL, True), (MOVING, True)])
def test_a_template_that_rewrites_is_rendered_turn_by_turn_and_says_so(
    template: str, with_tools: bool
) -> None:
    found = rendering(template, tool_set(add) if with_tools else None)
    assert not found.stable and "Turns stay as they were sampled" in found.notices[-1]
    ids = found.after([], [{"role": "user", "content": "more"}], last_id=STOP)
    assert text(ids) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_results_are_told_by_a_user_where_a_template_knows_no_tools() -> None:
    found = rendering(STRICT, tool_set(add))
    assert found.tool_role == "user" and found.stable and "no place for results of tools" in found.notices[0]
    ids = found.after(
        [{"role": "user", "content": "?"}], [{"role": "tool", "content": "3", "name": "add"}], last_id=STOP
    )
    assert text(ids) == "\n<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n"


def test_results_are_written_behind_their_calls_where_the_template_asks_for_them() -> None:
    found = rendering(CALLING, tool_set(add))
    assert found.after_call and "only behind its call" in found.notices[0]
    results = [
        {"role": "tool", "content": "3", "name": "add"},
        {"role": "tool", "content": "4", "name": "sub"},
    ]
    written = "<|im_start|>functions.add to=assistant<|message|>3<|im_end|>"
    assert text(found.after([], results[:1], last_id=STOP)) == f"{written}<|im_start|>assistant"
    assert text(found.after([], results[:1], last_id=5 + STOP)).startswith(f"<|im_end|>{written}")
    written += "<|im_start|>functions.sub to=assistant<|message|>4<|im_end|>"
    assert text(found.after([], results, last_id=STOP)) == f"{written}<|im_start|>assistant"
    said = [{"role": "tool", "content": "no such call"}]
    assert "user<|message|>no such call" in text(found.after([], said, last_id=STOP))


def test_an_episode_of_gpt_oss_answers_each_call_by_its_name() -> None:
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}'
    engine = ScriptedEngine([call.replace("2", ""), call, "<|channel|>final<|message|>3"])
    scene = episode_context(
        engine, tools=tool_set(add), tokenizer=tokenizer_of(CALLING), response_length=1000
    )
    [episode] = play(replace(scene, parser=parser_for("gpt-oss", None)), prompt())
    whole = text(episode.trajectory().response)
    first, second = whole.split("<|im_start|>functions.add to=assistant<|message|>")[1:]
    assert first.startswith("The tool call could not be read: invalid JSON")
    assert second == "3<|im_end|><|im_start|>assistant<|channel|>final<|message|>3<|im_end|>"


def test_a_template_that_drops_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves out what the assistant said"):
        rendering(SILENT)


def test_plain_prompts_have_turns_too() -> None:
    chat = Chat(TOKENIZER, plain=True)
    found = Rendering.of(chat)
    assert found.stable
    history: list[dict[str, Any]] = [{"role": "user", "content": "2+2="}]
    assert text(found.after(history, [{"role": "user", "content": "wrong;"}], last_id=STOP)) == "wrong;"
    assert (
        text(found.after(history, [{"role": "user", "content": "wrong;"}], last_id=5 + STOP))
        == "<|im_end|>wrong;"
    )


def test_an_answer_that_was_cut_is_closed_before_the_next_turn() -> None:
    found = rendering(CHATML)
    [letter] = TOKENIZER.encode("x", add_special_tokens=False)
    ids = found.after([{"role": "user", "content": "?"}], [{"role": "user", "content": "go"}], last_id=letter)
    assert text(ids) == "<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
