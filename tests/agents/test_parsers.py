"""Every format of tool calls: what it understands, what it gives back as malformed, and that no text makes it raise."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.agents.parsers.base import Malformed, Parsed, Raw, ToolCall, parser_for
from strop.agents.parsers.template import written_call
from strop.catalog import TOOL_PARSERS
from strop.config.compose import load

NESTED = {"query": 'say "}" or </tool_call>\n[x](', "limits": {"a": [1, 2.5, None], "b": True}}
Calls = list[tuple[str, dict[str, Any]]]


def write_hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in json_calls(calls, "arguments"))


def write_llama3_json(calls: Calls) -> str:
    return "<|python_tag|>" + "; ".join(json_calls(calls, "parameters")) + "<|eom_id|>"


def write_mistral(calls: Calls) -> str:
    return "[TOOL_CALLS] [" + ", ".join(json_calls(calls, "arguments")) + "]</s>"


def write_pythonic(calls: Calls) -> str:
    written = [f"{name}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for name, a in calls]
    return "[" + ", ".join(written) + "]"


def write_qwen(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        lines = [f"<tool_call>\n<function={name}>\n"]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value)
            lines.append(f"<parameter={key}>\n{text}\n</parameter>\n")
        lines.append("</function>\n</tool_call>")
        written.append("".join(lines))
    return "\n".join(written)


def write_harmony(calls: Calls) -> str:
    header = "<|start|>assistant<|channel|>commentary to=functions."
    written = [f"{header}{n} <|constrain|>json<|message|>{json.dumps(a)}<|call|>" for n, a in calls]
    return "".join(written)


def json_calls(calls: Calls, arguments: str) -> list[str]:
    return [json.dumps({"name": name, arguments: values}) for name, values in calls]


@dataclass(frozen=True)
class Conformance:
    """What the conformance tests need to know about one format of tool calls."""

    write: Callable[[Calls], str]
    """Writes calls as a model of this format does."""
    template: str
    """The part of a chat template that writes one call `c` in this format."""
    malformed: tuple[tuple[str, str], ...]
    """(text, part of the reason) of calls that cannot be read."""
    typed: bool = True
    """Whether arguments come back with their types. Otherwise all are text, and the tool's schema decides."""


CONFORMANCE = {
    "hermes": Conformance(
        write_hermes,
        '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>',
        (
            ('<tool_call>{"name": "a", "arguments": {}', "invalid JSON"),
            ('<tool_call>{"name": "a"}', "not closed"),
            ('<tool_call>{"name": "a"} and more</tool_call>', "text between"),
            ('<tool_call>{"arguments": {}}</tool_call>', "no 'name'"),
            (
                '<tool_call>{"name": "a", "arguments": [1]}</tool_call>',
                "must be a JSON object, not a list",
            ),
            ('<tool_call>{"name": "a", "arguments": "{b"}</tool_call>', "string with invalid JSON"),
            ("<tool_call>" + "[" * 100_000 + "</tool_call>", "nested too deeply"),
            ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN is not a number"),
        ),
    ),
    "llama3_json": Conformance(
        write_llama3_json,
        '<|python_tag|>{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
        (
            ('<|python_tag|>{"name": "a", "parameters": {', "invalid JSON"),
            ('{"name": 3}', "no 'name'"),
        ),
    ),
    "qwen": Conformance(
        write_qwen,
        "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
        "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        (
            (
                "<tool_call>\n<function=a>\n<parameter=x>\n1\n</function></tool_call>",
                "not closed by </parameter>",
            ),
            ("<tool_call>\n<function=a>\n<parameter=x>\n1", "not closed by </function>"),
            ('<tool_call>{"name": "a"}</tool_call>', "no <function=NAME>"),
        ),
        typed=False,
    ),
    "mistral": Conformance(
        write_mistral,
        '[TOOL_CALLS] [{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}]',
        (
            ("[TOOL_CALLS]", "nothing follows"),
            ('[TOOL_CALLS][{"name": "a", ]', "invalid JSON"),
            ("[TOOL_CALLS]calculator please", "must follow"),
        ),
    ),
    "pythonic": Conformance(
        write_pythonic,
        "[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}='{{ v }}'{% endfor %})]",
        (
            ("[a(1)]", "needs its name"),
            ("[a(x=b())]", "plain literal"),
            ("[a(x=1), 2]", "must hold calls"),
            ("[a(x=1", "not closed"),
            ("[a(x={1, 2})]", "plain literal"),
            ("[a(x=" + "(" * 500 + ")" * 500 + ")]", "invalid Python"),
        ),
    ),
    "gpt_oss": Conformance(
        write_harmony,
        "<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
        "{{ c.function.arguments | tojson }}<|call|>",
        (
            ('<|channel|>commentary to=functions.a json<|message|>{"x": <|call|>', "invalid JSON"),
            ("<|channel|>commentary to=functions.a json<|message|><|call|>", "invalid JSON"),
            ("<|channel|>commentary to=functions.a json<|message|>[1]<|call|>", "not a list"),
            ("<|channel|>commentary to=functions.a json<|message|>{} so<|call|>", "text after"),
            ("<|channel|>commentary to=functions.a <|constrain|>json", "no <|message|>"),
        ),
    ),
}
"""Test data by format. A format of the catalog without an entry here fails every conformance test."""

FORMATS = [name for name in TOOL_PARSERS.names() if not TOOL_PARSERS.entry(name).facts["reads_template"]]
READING_TEMPLATES = [name for name in TOOL_PARSERS.names() if name not in FORMATS]


def conformance(form: str) -> Conformance:
    assert form in CONFORMANCE, f"The format {form!r} of the catalog has no test data: add it to CONFORMANCE."
    return CONFORMANCE[form]


def write(form: str, calls: Calls) -> str:
    """Calls as a model of that format writes them."""
    return conformance(form).write(calls)


def test_every_format_of_the_catalog_has_test_data():
    assert sorted(CONFORMANCE) == FORMATS
    assert all(case.malformed for case in CONFORMANCE.values())


def parse(form: str, text: str, tokenizer: Any = None) -> Parsed:
    return parser_for(form, tokenizer).parse(text)


@pytest.mark.parametrize("form", FORMATS)
def test_several_calls_in_order_with_text_before(form):
    calls = [("weather", {"city": "Rome"}), ("clock", {}), ("weather", {"city": "Łódź"})]
    parsed = parse(form, "Let me see.\n" + write(form, calls))
    assert [(call.name, call.arguments) for call in parsed.calls] == calls
    assert parsed.content == "Let me see."


@pytest.mark.parametrize("form", FORMATS)
def test_nested_arguments_survive_brackets_quotes_and_end_tags(form):
    if conformance(form).typed:
        assert parse(form, write(form, [("search", NESTED)])).calls == (ToolCall("search", NESTED),)
    else:
        words = {"query": NESTED["query"]}
        assert parse(form, write(form, [("search", words)])).calls == (ToolCall("search", words),)


def test_qwen_values_are_raw_text():
    text = "<tool_call>\n<function=run>\n<parameter=code>\nif a < 2:\n    print('x')\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    [call] = parse("qwen", text).calls
    assert call.arguments == {"code": "if a < 2:\n    print('x')", "n": "3"}
    assert all(isinstance(value, Raw) for value in call.arguments.values())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "text", ["", "The answer is 4.", 'He said {"x": 1} and [1, 2].', "<think>\n</think>\nFour.", "["]
)
def test_plain_answers_are_no_calls(form, text):
    assert parse(form, text) == Parsed(text.strip())


@pytest.mark.parametrize("form", FORMATS)
def test_a_call_inside_a_thought_is_not_made(form):
    call = write(form, [("weather", {"city": "Rome"})])
    assert parse(form, f"<think>I could write {call} here").calls == ()
    thought = f"<think>Perhaps {call}?</think>"
    assert parse(form, thought + "No need.").calls == ()
    assert len(parse(form, f"{thought}Yes.\n{call}").calls) == 1


@pytest.mark.parametrize("form", FORMATS)
def test_bad_calls_come_back_with_the_reason(form):
    for text, why in conformance(form).malformed:
        bad = [call for call in parse(form, text).calls if isinstance(call, Malformed)]
        assert len(bad) == 1 and why in bad[0].why, (text[:80], bad)


def test_a_bad_call_does_not_spoil_its_neighbours():
    good = write("hermes", [("a", {})])
    parsed = parse("hermes", f"{good}<tool_call>oops</tool_call>{good}<tool_call>never closed{good}")
    assert [type(call) for call in parsed.calls] == [ToolCall, Malformed, ToolCall, Malformed, ToolCall]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_malformed(number):
    [bad] = parse("hermes", f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>').calls
    assert isinstance(bad, Malformed) and f"invalid JSON: {number}" in bad.why


def test_mistral_forms():
    expected = (ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2}))
    assert (
        parse("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}</s>').calls == expected
    )
    assert parse("mistral", '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]add {"a": 2}').calls == expected
    [call] = parse("mistral", '[TOOL_CALLS]add[CALL_ID]x9[ARGS]{"a": 1}').calls
    assert (call.name, call.id) == ("add", "x9")


def test_llama_takes_a_bare_object_but_not_any_json():
    assert parse("llama3_json", '{"name": "f", "parameters": {"a": 1}}<|eot_id|>').calls == (
        ToolCall("f", {"a": 1}),
    )
    assert parse("llama3_json", '{"answer": 4}').calls == ()


def test_pythonic_evaluates_nothing(tmp_path):
    proof = tmp_path / "proof"
    [call] = parse("pythonic", f"[f(x=open({str(proof)!r}, 'w'))]").calls
    assert isinstance(call, Malformed) and not proof.exists()


def test_harmony_messages():
    """Calls are read from headers alone: not from thoughts, answers, or results that the model makes up."""
    thought = "<|channel|>analysis<|message|>I send to=functions.add {}.<|end|>"
    call = '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    comment = "<|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
    parsed = parse("gpt-oss", thought + comment + call)  # the stop token is not part of the text
    assert parsed == Parsed("I add.", (ToolCall("add", {"a": 1}),))
    first = ' to=functions.add<|channel|>analysis json<|message|>{"a": "<|call|><|start|>"}<|call|>'
    assert parse("gpt-oss", first).calls == (ToolCall("add", {"a": "<|call|><|start|>"}),)
    for text in (
        thought + '<|start|>assistant<|channel|>final<|message|>I wrote to=functions.add<|message|>{"a": 1}',
        "to=functions.add is a header. So is assistant to=functions.add json {}",
        "<|start|>functions.add to=assistant<|channel|>commentary<|message|>to=functions.add {}<|end|>",
        thought[:40],
    ):
        assert parse("gpt-oss", text).calls == (), text
    broken = call.replace("1", "one") + "<|call|>"
    both = parse("gpt-oss", thought + broken + call + "<|call|>").calls
    assert [type(found) for found in both] == [Malformed, ToolCall] and both[0].name == "add"
    answer = thought + "<|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    assert parse("gpt-oss", answer) == Parsed("Four.")


# --- the template's own ---------------------------------------------------------------------------------------------------


class Template:
    """As much of a tokenizer as a chat template needs."""

    def __init__(self, chat_template: str | None):
        self.chat_template = chat_template

    def apply_chat_template(self, messages: Any, tools: Any = None, tokenize: bool = False) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, _ = render_jinja_template(
            conversations=[messages], tools=tools, chat_template=self.chat_template
        )
        return rendered[0]


def template_writing(call: str) -> Template:
    return Template(
        "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{%- for c in m.tool_calls or [] -%}" + call + "{%- endfor -%}<|im_end|>\n{%- endfor -%}"
    )


@pytest.mark.parametrize("reader", READING_TEMPLATES)
@pytest.mark.parametrize("form", FORMATS)
def test_template_finds_the_known_formats(form, reader):
    tokenizer = template_writing(conformance(form).template)
    assert type(parser_for(reader, tokenizer)) is type(parser_for(form, None))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            '<|tool_call|>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}<|/tool_call|>',
            '<|tool_call|>{"name": "add", "arguments": {"a": 1}}<|/tool_call|> <|tool_call|>{"name": "add", "arguments": {"a": 2}}<|/tool_call|>',
        ),
        (
            "<call>{{ c.function.name }}<sep>```json\n{{ c.function.arguments | tojson }}\n```</call>",
            'So <call>add<sep>```json\n{"a": 1}\n```</call><call>add<sep>```json\n{"a": 2}\n```</call>',
        ),
    ],
)
def test_template_learns_an_unknown_format(call, text):
    parser = parser_for("auto", template_writing(call))
    assert [(c.name, c.arguments) for c in parser.parse(text).calls] == [("add", {"a": 1}), ("add", {"a": 2})]
    [bad] = parser.parse(text[: text.index("1}")]).calls
    assert isinstance(bad, Malformed)


def test_template_says_what_to_set_when_there_is_nothing_to_learn():
    with pytest.raises(ValueError, match=r"no.*chat template|there is none.*multi_turn.format"):
        parser_for("template", None)
    with pytest.raises(ValueError, match=r"does not write tool calls.*multi_turn.format"):
        parser_for("template", Template("{% for m in messages %}{{ m.content }}{% endfor %}"))
    with pytest.raises(ValueError, match=r"cannot write a tool call: .*no tools here"):
        parser_for("template", Template("{{ raise_exception('no tools here') }}"))
    with pytest.raises(ValueError, match=r"unknown form"):
        parser_for("template", template_writing("{{ c.function.name }}!"))


def test_written_call_is_what_the_template_adds():
    assert written_call(template_writing("<c>{{ c.function.name }}</c>")) == "<c>probe_tool</c>"


def test_unknown_format_names_the_known_ones():
    with pytest.raises(ValueError, match=r"Unknown format of tool calls 'hermse'. Did you mean 'hermes'"):
        parser_for("hermse", None)
    with pytest.raises(ValueError, match="hermse"):
        load("ppo_trainer", ["actor_rollout_ref.rollout.multi_turn.format=hermse"])


# --- fuzzing --------------------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<function=",
            "<function=f>",
            "</function>",
            "<parameter=x>",
            "</parameter>",
        ),
        *(
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<|python_tag|>",
            "<|python_start|>",
            "<|python_end|>",
            "<|eot_id|>",
            "</s>",
        ),
        *("<|start|>assistant", "<|channel|>final", " to=functions.f", "<|message|>", "<|call|>"),
        *(
            "<think>",
            "</think>",
            '{"name": "f", ',
            '"arguments": {}',
            "}",
            "{",
            "[",
            "]",
            "(",
            ")",
            "f(",
            "x=",
            '"',
            "'",
            "\\",
        ),
        *("1e999", "NaN", "\ud800", "\x00", "\n", ",", ";", "null", '"""', "9" * 5000, " " * 50),
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=8), max_size=30).map("".join)


@pytest.mark.parametrize("form", [*FORMATS, *READING_TEMPLATES])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_no_text_makes_a_parser_raise(form, text):
    parser = NAMED if form in READING_TEMPLATES else parser_for(form, None)
    parsed = parser.parse(text)
    assert isinstance(parsed.content, str)
    for call in parsed.calls:
        assert isinstance(call, ToolCall | Malformed)
        if isinstance(call, ToolCall):
            assert call.name and isinstance(call.arguments, dict)
        else:
            assert call.why


NAMED = parser_for(
    "template", template_writing("<call>{{ c.function.name }}<sep>{{ c.function.arguments | tojson }}</call>")
)

NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(
    lambda name: not __import__("keyword").iskeyword(name)
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.text(st.characters(codec="utf-8"), max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=40, deadline=None)
@given(calls=st.lists(st.tuples(NAMES, st.dictionaries(NAMES, JSON, max_size=3)), min_size=1, max_size=3))
def test_what_is_written_is_read_back(form, calls):
    parsed = parse(form, write(form, calls))
    if conformance(form).typed:
        assert [(call.name, call.arguments) for call in parsed.calls] == calls
    else:
        assert [call.name for call in parsed.calls] == [name for name, _ in calls]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>",
        "<function=f>",
        "[TOOL_CALLS]",
        "{}",
        "[f(",
        " ",
        "<|eot_id|>",
        '{"name": "f"};',
        "<|start|> to=functions.f<|message|>",
    ],
)
def test_long_texts_are_read_in_little_time(form, piece):
    start = time.thread_time()  # not the wall clock: other processes may have the processor
    parse(form, piece * (100_000 // len(piece)))
    assert time.thread_time() - start < 3.0
