"""A template gets every message in a form that it reads, and what it leaves out of a trained turn is an error."""

from __future__ import annotations

import pytest

from strop.data.chat import Chat
from strop.data.templates.turn_end import turn_end_token
from tests.data.tokens import CHATML, character_tokenizer, decoded

TOKENIZER = character_tokenizer()


def turns(body: str, opening: str = "<|im_start|>assistant\n") -> str:
    """A template of ChatML that writes `body` for each message."""
    each = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + body + "<|im_end|>\n{% endfor %}"
    return each + "{% if add_generation_prompt %}" + opening + "{% endif %}"


def calls(arguments: str) -> str:
    """A template that writes calls, with `arguments`."""
    return turns(
        "{{ m.content }}{% for c in m.tool_calls %}<{{ c.function.name }} " + arguments + ">{% endfor %}"
    )


LOOP = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
# Text that is given as parts: Python's notation of a list, nothing at all, an error.
TEXT_ONLY = [
    turns("{{ m.content | trim }}"),
    turns("{% if m.content is string %}{{ m.content }}{% endif %}"),
    turns("{{ '' + m.content }}"),
]
# Parts that are given as text: nothing at all, an error.
PARTS_ONLY = [turns(LOOP), turns("{{ m.content[0].text.strip() }}")]
BOTH = turns("{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}")
PARTS_OF_USERS = turns("{% if m.role == 'user' %}" + LOOP + "{% else %}{{ m.content | trim }}{% endif %}")
ARGUMENTS = "{{ c.function.arguments }}"
AS_JSON = "{{ c.function.arguments | tojson }}"
CALL_TEMPLATES = {
    "as JSON": calls(AS_JSON),
    "as they are": calls(ARGUMENTS),
    "added to text": calls("{{ '' + c.function.arguments }}"),
    "either": calls(
        "{% if c.function.arguments is string %}" + ARGUMENTS + "{% else %}" + AS_JSON + "{% endif %}"
    ),
}


def talk(*, parts: bool) -> list[dict]:
    said = [
        ("system", "short"),
        ("user", "2+3?"),
        ("assistant", "five"),
        ("user", "4+4?"),
        ("assistant", "8!"),
    ]
    messages: list[dict] = [{"role": role, "content": text} for role, text in said]
    if parts:
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}]
    return messages


@pytest.mark.parametrize("template", [*TEXT_ONLY, *PARTS_ONLY, BOTH, PARTS_OF_USERS])
@pytest.mark.parametrize("parts", [False, True])
def test_a_template_reads_texts_in_either_form(template: str, parts: bool) -> None:
    chat = Chat(TOKENIZER, template=template)
    plain = Chat(TOKENIZER, template=CHATML)
    messages = talk(parts=parts)
    assert chat.text(messages, generate=True) == plain.text(talk(parts=False), generate=True)
    assert chat.conversation(messages) == plain.conversation(talk(parts=False))
    assert messages == talk(parts=parts), "the rows are not changed"


def test_several_parts_of_text_are_one_text() -> None:
    content = [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}]
    chat = Chat(TOKENIZER, template=TEXT_ONLY[0])
    assert chat.text([{"role": "user", "content": content}]) == "<|im_start|>user\n2+3?<|im_end|>\n"


@pytest.mark.parametrize("template", CALL_TEMPLATES.values(), ids=CALL_TEMPLATES)
@pytest.mark.parametrize("arguments", [{"a": 2, "b": "ü"}, '{"a": 2, "b": "ü"}'], ids=["object", "text"])
def test_arguments_of_calls_are_written_once_as_json(template: str, arguments: object) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = Chat(TOKENIZER, template=template).text([{"role": "user", "content": "?"}, turn])
    assert text.endswith('assistant\n<add {"a": 2, "b": "ü"}><|im_end|>\n')
    assert call["function"] == {"name": "add", "arguments": arguments}, "the row is not changed"


@pytest.mark.parametrize("arguments", ["not JSON", "[1]"])
def test_arguments_that_are_no_object_stay_as_they_are(arguments: str) -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": arguments}]}
    template = turns("{% for c in m.tool_calls %}{{ c.name }} {{ c.arguments }}{% endfor %}")
    text = Chat(TOKENIZER, template=template).text([turn])
    assert text.endswith(f"add {arguments}<|im_end|>\n")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_that_the_template_leaves_out_is_an_error(name: str) -> None:
    messages = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "five", name: "I add."}]
    with pytest.raises(ValueError, match=rf"leaves out '{name}' of message 1.*data\.chat_template"):
        Chat(TOKENIZER).conversation(messages)
    writes = turns("{% if m.X %}({{ m.X }}) {% endif %}{{ m.content }}".replace("X", name))
    rendered = Chat(TOKENIZER, template=writes).conversation(messages)
    taught = [token for token, learned in zip(rendered.ids, rendered.mask, strict=True) if learned]
    assert decoded(TOKENIZER, taught) == "(I add.) five<|im_end|>"
    earlier = [*messages, {"role": "user", "content": "?"}, {"role": "assistant", "content": "Yes."}]
    assert Chat(TOKENIZER).conversation(earlier, learn_from=2), "only what is trained must be written"


def test_contents_that_the_template_leaves_out_are_an_error() -> None:
    template = turns(
        "{% if not m.tool_calls %}{{ m.content }}{% endif %}{% for c in m.tool_calls %}add{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "I call it.", "tool_calls": [call]},
    ]
    with pytest.raises(ValueError, match=r"leaves out the content of message 1"):
        Chat(TOKENIZER, template=template).conversation(messages)


# Cuts the thought out of every turn and opens one for the model, as templates of the R1 distillations do.
CUTS_THOUGHTS = turns("{{ m.content.split('</think>')[-1] }}", "<|im_start|>assistant\n<think>\n")
ENABLES = turns(
    "{{ m.content }}", "<|im_start|>assistant\n{% if not enable_thinking %}<think></think>{% endif %}"
)
THINKS = {"role": "assistant", "content": "<think>\nI add.\n</think>\n\nfive"}
SAYS = {"role": "assistant", "content": "five"}


@pytest.mark.parametrize(
    ("template", "answer", "kwargs", "advice"),
    [
        (
            CUTS_THOUGHTS,
            THINKS,
            {},
            "file of a template .* so that turns keep their thoughts .*cut contents at </think>",
        ),
        (CUTS_THOUGHTS, SAYS, {}, "Set data.chat_template .* so that the generation prompt opens no thought"),
        (ENABLES, THINKS, {}, r"has a thought: set data\.apply_chat_template_kwargs\.enable_thinking=true\."),
        (ENABLES, {**SAYS, "thinking": "I add."}, {}, "has a thought: set .*enable_thinking=true"),
        (ENABLES, SAYS, {}, r"no thought: set data\.apply_chat_template_kwargs\.enable_thinking=false\."),
        (ENABLES, SAYS, {"enable_thinking": False}, "Set data.chat_template"),  # it is set already
    ],
)
def test_a_generation_prompt_that_the_turn_does_not_begin_with_is_named_with_what_to_set(
    template: str, answer: dict, kwargs: dict, advice: str
) -> None:
    chat = Chat(TOKENIZER, template=template, kwargs=kwargs)
    with pytest.raises(ValueError, match=rf"(?s)opens message 1 with .*<think>.*' when .*{advice}"):
        chat.conversation([{"role": "user", "content": "2+3?"}, answer])


def test_what_is_advised_for_rows_with_thoughts_trains_them() -> None:
    template = CUTS_THOUGHTS.replace(".split('</think>')[-1]", "")
    rendered = Chat(TOKENIZER, template=template).conversation([{"role": "user", "content": "2+3?"}, THINKS])
    taught = [token for token, learned in zip(rendered.ids, rendered.mask, strict=True) if learned]
    assert decoded(TOKENIZER, taught) == "I add.\n</think>\n\nfive<|im_end|>"


def test_a_thought_in_the_content_that_the_template_leaves_out_is_an_error() -> None:
    """Such rows were trained without their thoughts."""
    cuts = Chat(TOKENIZER, template=turns("{{ m.content.split('</think>')[-1] }}"))
    question = {"role": "user", "content": "2+3?"}
    with pytest.raises(
        ValueError, match=r"leaves out the thought in the content .*message 1\. Set data\.chat_template"
    ):
        cuts.conversation([question, THINKS])
    empty = {"role": "assistant", "content": "<think>\n\n</think>\n\nfive"}
    assert cuts.conversation([question, empty]) and cuts.conversation([question, SAYS])
    assert cuts.conversation([question, THINKS, question, SAYS], learn_from=3), (
        "only what is trained must be written"
    )


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALLING = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
# Writes calls only where the content is none, and their arguments as they are, as those of DeepSeek R1 do.
CALLS_WITHOUT_CONTENT = turns(
    "{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ '<' + c.function.name + ' ' + c.function.arguments + '>' }}{% endfor %}"
    "{% else %}{{ '' + m.content }}{% endif %}"
)


@pytest.mark.parametrize("content", [{"content": ""}, {"content": None}, {}, {"content": []}])
@pytest.mark.parametrize(
    "template",
    [CALLS_WITHOUT_CONTENT, calls(ARGUMENTS), calls(AS_JSON).replace("m.content", "m['content'] + ''")],
)
def test_a_turn_that_only_makes_calls_has_the_content_that_the_template_expects(
    template: str, content: dict
) -> None:
    turn = {"role": "assistant", "tool_calls": [CALL], **content}
    text = Chat(TOKENIZER, template=template).text([CALLING[0], turn])
    assert text.endswith('assistant\n<add {"a": 2}><|im_end|>\n')


@pytest.mark.parametrize("content", ["", None, []])
def test_a_message_without_content_has_an_empty_one(content: object) -> None:
    for template in (turns("{{ '' + m.content }}"), PARTS_ONLY[1]):
        text = Chat(TOKENIZER, template=template).text([{"role": "user", "content": content}])
        assert text == "<|im_start|>user\n<|im_end|>\n"


@pytest.mark.parametrize("no_calls", [[], None])
def test_a_turn_with_an_empty_list_of_calls_makes_none(no_calls: object) -> None:
    """Templates of Llama 3 only ask whether there is a list."""
    template = turns(
        "{% if 'tool_calls' in m %}{{ m.tool_calls[0].name }}{% else %}{{ m.content }}{% endif %}"
    )
    turn = {"role": "assistant", "content": "five", "tool_calls": no_calls}
    assert Chat(TOKENIZER, template=template).text([turn]).endswith("assistant\nfive<|im_end|>\n")


@pytest.mark.parametrize("template", [calls("{{ '' + c.function.arguments }}"), CALLS_WITHOUT_CONTENT])
def test_results_of_calls_are_given_as_text_to_a_template_that_wants_arguments_as_text(template: str) -> None:
    result = {"role": "tool", "content": [{"type": "text", "text": "5"}]}
    template = template.replace("{{ m.content }}", "{{ '' + m.content }}")
    text = Chat(TOKENIZER, template=template).text([*CALLING, result])
    assert text.endswith("<|im_start|>tool\n5<|im_end|>\n")


def test_results_that_a_template_writes_as_json_are_given_as_text() -> None:
    """Templates of Llama 3.1 and gpt-oss; of parts they would write their notation."""
    template = turns("{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}")
    result = {"role": "tool", "content": [{"type": "text", "text": "5"}]}
    text = Chat(TOKENIZER, template=template).text([*CALLING, result])
    assert text.endswith('<|im_start|>tool\n"5"<|im_end|>\n')


def test_a_second_call_that_the_template_leaves_out_is_an_error() -> None:
    """gpt-oss writes the first call only."""
    template = turns(
        "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}"
    )
    chat = Chat(TOKENIZER, template=template)
    assert chat.conversation(CALLING)
    again = {"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
    with pytest.raises(ValueError, match=r"leaves out the tool call 'add' of message 1"):
        chat.conversation([CALLING[0], {**CALLING[1], "tool_calls": [CALL, again]}])


def test_the_end_of_a_turn_is_found_where_only_answers_with_thoughts_can_be_trained() -> None:
    body = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    chat = Chat(TOKENIZER, template=turns(body, "<|im_start|>assistant\n<think>\n"))
    end = turn_end_token(chat)
    assert end is not None and decoded(TOKENIZER, [end]) == "<|im_end|>"
    never = Chat(TOKENIZER, template=turns("{{ m.content }}", "<|im_start|>assistant\n<think>\n"))
    assert turn_end_token(never) is None
