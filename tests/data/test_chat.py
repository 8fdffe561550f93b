"""Rendering only ever appends; loss falls on what the assistant says and on its end-of-turn token; bad templates are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data.chat import Chat, _cached_ids, stop_ids
from strop.data.report import probe_template
from tests.data.tokens import CHATML, REWRITING, UNENDING, character_tokenizer, decoded

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "2?"},
    {"role": "assistant", "content": "3 "},
]
TOKENIZER = character_tokenizer()


def learned(chat: Chat, messages: list[dict], **options: object) -> list[str]:
    """The runs of tokens that carry loss, as text."""
    rendered = chat.conversation(messages, **options)  # type: ignore[arg-type]
    assert len(rendered.ids) == len(rendered.mask)
    pieces, run = [], []
    for token, keep in zip([*rendered.ids, 0], [*rendered.mask, 0]):
        if keep:
            run.append(token)
        elif run:
            pieces.append(decoded(chat.tokenizer, run))
            run = []
    return pieces


def test_prompts_open_the_assistants_turn() -> None:
    chat = Chat(TOKENIZER)
    assert decoded(TOKENIZER, chat.ids(TALK[:1])) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.lengths([TALK[:1], TALK[:3]]) == [len(chat.ids(TALK[:1])), len(chat.ids(TALK[:3]))]
    assert chat.lengths([]) == []


def test_loss_falls_on_answers_and_their_end() -> None:
    chat = Chat(TOKENIZER)
    assert learned(chat, TALK) == ["yo<|im_end|>", "3 <|im_end|>"]
    assert learned(chat, TALK, learn_from=2) == ["3 <|im_end|>"]
    assert chat.conversation(TALK).ids == chat.ids(TALK, generate=False), "the same ids as rendering it whole"
    assert chat.conversation([*TALK, {"role": "user", "content": "?"}]) == chat.conversation(TALK), (
        "what follows teaches nothing"
    )


@given(st.lists(st.text("ab c\n", max_size=6), min_size=2, max_size=6))
@settings(max_examples=40, deadline=None)
def test_masked_tokens_are_exactly_the_answers(contents: list[str]) -> None:
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
    assert learned(Chat(TOKENIZER), messages) == [m["content"] + "<|im_end|>" for m in messages[1::2]]


def test_prompt_plus_answer_is_the_conversation() -> None:
    """Supervised training shows the very ids an engine would be prompted with."""
    chat = Chat(TOKENIZER)
    prompt, whole = chat.ids(TALK[:3]), chat.conversation(TALK)
    assert whole.ids[: len(prompt)] == prompt
    assert whole.mask[len(prompt)] == 1 and not any(
        whole.mask[len(chat.ids(TALK[:2], generate=False)) : len(prompt)]
    )


def test_a_token_across_the_border_is_split_there() -> None:
    """With a merge of newline and letter, whole-text ids differ from prompt ids; the prompt's ids win."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: n for n, token in enumerate(["<e>", ":", "a", "b", ":a"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<e>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r":a|[\s\S]"), behavior="isolated")
    backend.add_special_tokens(["<e>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", unk_token="<e>")
    chat = Chat(
        tokenizer,
        template="{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}:{% else %}<e>{% endif %}{% endfor %}",
    )
    messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "a"}]
    assert chat.ids(messages, generate=False) == [3, 4, 0]
    rendered = chat.conversation(messages)
    assert (rendered.ids, rendered.mask) == ([3, 1, 2, 0], [0, 0, 1, 1])


def test_later_turns_continue_what_was_sampled() -> None:
    chat = Chat(TOKENIZER)
    end = TOKENIZER.eos_token_id
    sampled = chat.ids(TALK[:1]) + chat.encode("yo") + [end]
    whole = sampled + chat.ids_after(chat.later_text(TALK[2:3]), end)
    assert whole == chat.ids(TALK[:3]), (
        "the newline behind the end-of-turn token is there, the token itself once"
    )
    cut = chat.ids(TALK[:1]) + chat.encode("yo")
    assert cut + chat.ids_after(chat.later_text(TALK[2:3]), cut[-1]) == chat.ids(TALK[:3]), (
        "a turn cut by length is closed first"
    )


def test_later_turns_do_not_depend_on_rewriting_templates() -> None:
    chat = Chat(TOKENIZER, template=REWRITING)
    later = chat.later_text([{"role": "tool", "content": "7"}])
    text = decoded(TOKENIZER, chat.ids_after(later, TOKENIZER.eos_token_id))
    assert text == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"


def test_plain_text_has_no_template() -> None:
    tokenizer = character_tokenizer(template=None, eos="<eos>")
    chat = Chat(tokenizer, plain=True)
    assert decoded(tokenizer, chat.ids([{"role": "user", "content": "2+2="}])) == "2+2="
    assert learned(chat, [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]) == [
        "4<eos>"
    ]


def test_plain_text_gets_the_tokenizers_opening_token() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = character_tokenizer(template=None, eos="<eos>")
    ids = [("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=ids
    )
    chat = Chat(tokenizer, plain=True)
    prompt = [{"role": "user", "content": "1="}]
    assert decoded(tokenizer, chat.ids(prompt)) == "<bos>1=", "opened, but not ended"
    assert chat.lengths([prompt]) == [3]
    whole = chat.conversation([*prompt, {"role": "assistant", "content": "1"}])
    assert decoded(tokenizer, whole.ids) == "<bos>1=1<eos>" and whole.mask == [0, 0, 0, 1, 1]


def test_template_arguments_and_tools_reach_the_template() -> None:
    template = "{{ mood }}{% if tools %}{{ tools[0].name }}{% endif %}{{ messages[0].content }}"
    chat = Chat(TOKENIZER, template=template, kwargs={"mood": "calm:"}, tools=[{"name": "search "}])
    assert decoded(TOKENIZER, chat.ids([{"role": "user", "content": "x"}])) == "calm:search x"
    with pytest.raises(
        ValueError,
        match=r"apply_chat_template_kwargs sets \['add_generation_prompt'\], which Strop sets itself",
    ):
        Chat(TOKENIZER, kwargs={"add_generation_prompt": False})


def test_a_template_can_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("<{{ messages[0].content }}>")
    assert Chat(TOKENIZER, template=str(tmp_path / "t.jinja")).text(TALK[:1]) == "<hi>"
    with pytest.raises(ValueError, match=r"none\.jinja does not exist"):
        Chat(TOKENIZER, template=str(tmp_path / "none.jinja"))


def test_without_a_template_the_error_says_what_to_set() -> None:
    with pytest.raises(
        ValueError, match=r"no chat template. Set data.apply_chat_template=false .*custom_chat_template"
    ):
        Chat(character_tokenizer(template=None))


def test_a_template_that_raises_is_named_with_the_roles() -> None:
    chat = Chat(
        TOKENIZER,
        template="{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x",
    )
    with pytest.raises(
        ValueError, match=r"fails on messages of roles \[system, user\]: TemplateError: no system"
    ):
        chat.text([{"role": "system", "content": "be kind"}, TALK[0]])
    with pytest.raises(ValueError, match=r"The chat template fails .*TemplateSyntaxError"):
        Chat(TOKENIZER, template="{% if %}").text(TALK[:1])


def test_conversations_that_teach_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"roles \[user\] has no assistant turn"):
        Chat(TOKENIZER).conversation(TALK[:1])


def test_a_rewriting_template_cannot_train_conversations() -> None:
    with pytest.raises(ValueError, match=r"rewrites earlier turns when message 3 is added"):
        Chat(TOKENIZER, template=REWRITING).conversation(TALK)
    assert learned(Chat(TOKENIZER, template=REWRITING), TALK[:2]) == ["<think></think>yo<|im_end|>"], (
        "one turn is fine"
    )


def test_stop_ids_collect() -> None:
    assert stop_ids(TOKENIZER) == {TOKENIZER.eos_token_id}
    assert stop_ids(TOKENIZER, [1, 2]) == {TOKENIZER.eos_token_id, 1, 2}
    assert stop_ids(TOKENIZER, 7) == {TOKENIZER.eos_token_id, 7}


def said(findings: list) -> str:
    return " | ".join(f"{f.level}: {f.message}" for f in findings)


def test_a_good_template_has_no_findings() -> None:
    assert probe_template(TOKENIZER) == []
    assert probe_template(character_tokenizer(template=None), template=CHATML) == []
    assert probe_template(character_tokenizer(template=None, eos="<eos>"), plain=True) == []


def test_an_answer_that_the_prompt_does_not_open_is_found() -> None:
    turn = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    assert "ignores add_generation_prompt" in said(probe_template(TOKENIZER, template=turn))
    nothing_to_open = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    assert probe_template(TOKENIZER, template=nothing_to_open) == []


def test_a_rewriting_template_is_found() -> None:
    text = said(probe_template(TOKENIZER, template=REWRITING))
    assert (
        text.startswith("warning: The chat template is not prefix-stable")
        and "<think></think>" not in text.partition("but")[2]
    )


def test_a_template_that_never_stops_is_found() -> None:
    text = said(probe_template(TOKENIZER, template=UNENDING))
    assert (
        "warning: The chat template ends the assistant's turn with '.', which does not stop generation ('<|im_end|>' would)"
        in text
    )


def test_an_end_token_that_does_not_stop_is_found() -> None:
    """A base model's tokenizer: the template writes <|im_end|>, generation stops at <eos>."""
    base = character_tokenizer(eos="<eos>")
    assert "ends the assistant's turn with '<|im_end|>', which does not stop generation" in said(
        probe_template(base)
    )
    assert probe_template(base, further_stop_ids=[base.convert_tokens_to_ids("<|im_end|>")]) == []
    assert probe_template(base, learns_to_stop=True) == [], "training adds the token to those that stop"
    assert "'.', which does not stop" in said(probe_template(base, template=UNENDING, learns_to_stop=True)), (
        "no token can be added"
    )


def test_broken_templates_and_tokenizers_are_found() -> None:
    assert said(probe_template(TOKENIZER, template="{% if %}")).startswith("error: The chat template fails")
    assert said(probe_template(character_tokenizer(template=None))).startswith(
        "error: The tokenizer of the model has no chat"
    )
    assert "error: The chat template loses what the user said" in said(
        probe_template(TOKENIZER, template="hello")
    )
    assert "error: A prompt renders to no tokens" in said(probe_template(TOKENIZER, template="{{ '' }}"))
    assert "ignores add_generation_prompt" in said(
        probe_template(TOKENIZER, template="{{ messages[0].content }}<|im_end|>")
    )
    assert "info: The tokenizer has no pad token" in said(probe_template(character_tokenizer(pad=None)))
    assert "no answer would ever stop" in said(probe_template(character_tokenizer(eos=None)))


def test_only_short_texts_of_tools_stay_in_memory() -> None:
    chat = Chat(character_tokenizer())
    before = _cached_ids.cache_info().currsize
    for text in ("x" * 5000, "y" * 5000, "a short text", "a short text"):
        assert len(chat.ids_after(text, None)) == len(text)
    assert _cached_ids.cache_info().currsize == before + 1
