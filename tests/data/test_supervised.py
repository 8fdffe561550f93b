"""Supervised rows: loss on the answer and its end, in every layout the settings describe."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from strop.config.schema.data import CustomClassConfig
from strop.config.schema.supervised import (
    DpoDataConfig,
    MultiTurnDataConfig,
    PairDataConfig,
    SftDataConfig,
    SupervisedDataConfig,
)
from strop.data.chat import Chat, Rendered
from strop.data.loader import Loader
from strop.data.supervised.datasets import build_supervised
from tests.data.tokens import character_tokenizer, decoded

TOKENIZER = character_tokenizer()


def lines(path: Path, rows: list[dict]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def taught(rendered: Rendered) -> str:
    return decoded(TOKENIZER, [token for token, keep in zip(rendered.ids, rendered.mask) if keep])


def sft(tmp_path: Path, row: dict, **settings: Any) -> Rendered:
    return build_supervised(
        SftDataConfig(train_files=lines(tmp_path / "a.jsonl", [row]), **settings), TOKENIZER
    )[0]


def test_prompt_and_response(tmp_path: Path) -> None:
    row = {"prompt": "2+2?", "response": "4"}
    rendered = sft(tmp_path, row)
    assert taught(rendered) == "4<|im_end|>"
    assert rendered.ids == Chat(TOKENIZER).ids([{"role": "user", "content": "2+2?"}]) + Chat(
        TOKENIZER
    ).encode("4<|im_end|>\n")
    assert "Q: 2+2?" in decoded(TOKENIZER, sft(tmp_path, row, input_template="Q: {}").ids)


def test_a_file_of_conversations_says_which_key_to_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no column 'prompt'.*'messages'.*data.multiturn.enable=true"):
        sft(tmp_path, {"messages": [{"role": "user", "content": "2+2?"}]})


def test_nested_columns(tmp_path: Path) -> None:
    row = {"extra_info": {"question": "2+2?", "answer": "4"}}
    keys = {"prompt_key": "extra_info", "response_key": "extra_info"}
    rendered = sft(tmp_path, row, prompt_dict_keys=["question"], response_dict_keys=["answer"], **keys)
    assert taught(rendered) == "4<|im_end|>"


def test_only_the_response_is_taught_unless_it_is_a_conversation(tmp_path: Path) -> None:
    talk = [
        {"role": r, "content": c}
        for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    ]
    assert taught(sft(tmp_path, {"prompt": talk[:3], "response": "d"})) == "d<|im_end|>"
    assert taught(sft(tmp_path, {"prompt": talk}, response_key=None)) == "d<|im_end|>"
    assert taught(sft(tmp_path, {"prompt": talk[:1], "response": talk[1:]})) == "b<|im_end|>d<|im_end|>"
    assert (
        taught(sft(tmp_path, {"messages": talk}, multiturn=MultiTurnDataConfig(enable=True)))
        == "b<|im_end|>d<|im_end|>"
    )


def test_tools_and_thinking_of_a_row_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{% if tools %}{{ tools[0].name }} {% endif %}{% if enable_thinking %}think {% endif %}"
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    )
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    settings = {"multiturn": MultiTurnDataConfig(enable=True), "chat_template": template}
    rendered = sft(tmp_path, {**row, "tools": [{"name": "find"}], "enable_thinking": True}, **settings)
    assert decoded(TOKENIZER, rendered.ids) == "find think ab<|im_end|>"
    assert decoded(TOKENIZER, sft(tmp_path, row, **settings).ids) == "ab<|im_end|>"


TOOL = {"type": "function", "function": {"name": "find", "parameters": {}}}
LISTING = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
LISTING += "{% if messages[-1].role == 'assistant' %}<|im_end|>{% endif %}"


@pytest.mark.parametrize(
    "tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]], ids=["list", "text", "texts"]
)
@pytest.mark.parametrize("layout", ["conversation", "prompt", "pair", "whole pair"])
def test_the_prompt_of_every_kind_of_row_lists_its_tools(tmp_path: Path, layout: str, tools: object) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    other = [talk[0], {"role": "assistant", "content": "c"}]
    row = {"messages": talk, "prompt": "a", "response": "b", "tools": tools, "chosen": "b", "rejected": "c"}
    if layout in ("conversation", "prompt"):
        several = MultiTurnDataConfig(enable=layout == "conversation")
        found = [sft(tmp_path, row, multiturn=several, chat_template=LISTING)]
    else:
        if layout == "whole pair":
            row |= {"chosen": talk, "rejected": other}
        key = "prompt" if layout == "pair" else None
        file = lines(tmp_path / "a.jsonl", [row])
        data = PairDataConfig(train_files=file, prompt_key=key, chat_template=LISTING)
        pair = build_supervised(data, TOKENIZER)[0]
        found = [pair.chosen, pair.rejected]
    texts = [decoded(TOKENIZER, one.ids) for one in found]
    assert texts == ["[find]ab<|im_end|>", "[find]ac<|im_end|>"][: len(found)]
    assert taught(found[0]) == "b<|im_end|>"


@pytest.mark.parametrize("tools", ["no JSON", '"find"', ["find"], {"name": "find"}])
def test_tools_that_are_no_schemas_are_a_bad_row(tmp_path: Path, tools: object) -> None:
    with pytest.raises(ValueError, match=r"row 0, column 'tools'.* is .*set .*tools_key"):
        sft(tmp_path, {"prompt": "a", "response": "b", "tools": tools})


def test_a_turn_that_would_teach_to_say_nothing_is_a_bad_row(tmp_path: Path) -> None:
    question = {"role": "user", "content": "2+2?"}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    calls = [question, {"role": "assistant", "content": None, "tool_calls": [call]}]
    several = MultiTurnDataConfig(enable=True)
    with pytest.raises(ValueError, match=r"leaves out the tool call 'add' of message 1.*data.chat_template"):
        sft(tmp_path, {"messages": calls}, multiturn=several)
    template = "{% for m in messages %}{{ m.content or m.tool_calls | tojson }}{% endfor %}"
    assert "add" in taught(sft(tmp_path, {"messages": calls}, multiturn=several, chat_template=template))
    empty = [question, {"role": "assistant", "content": ""}]
    with pytest.raises(ValueError, match=r"message 1, of the assistant, is empty"):
        sft(tmp_path, {"messages": empty}, multiturn=several)


def test_plain_text_and_pretraining(tmp_path: Path) -> None:
    row = {"prompt": "2+2=", "response": "4"}
    plain = sft(tmp_path, row, apply_chat_template=False)
    assert decoded(TOKENIZER, plain.ids) == "2+2=4<|im_end|>" and taught(plain) == "4<|im_end|>"
    everything = sft(tmp_path, row, apply_chat_template=False, pretrain_mode=True)
    assert taught(everything) == "2+2=4<|im_end|>"
    for text in ("2+2=4", "2+2=4<|im_end|>"):  # as in TRL and OpenRLHF, a text ends
        row = {"prompt": text}
        whole = sft(tmp_path, row, apply_chat_template=False, pretrain_mode=True, response_key=None)
        assert taught(whole) == "2+2=4<|im_end|>"


def test_long_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt": "abcdef", "response": "gh"}
    cut = {"apply_chat_template": False, "max_length": 5}
    with pytest.raises(ValueError, match=r"a\.jsonl, row 0 has 9 tokens, over data\.max_length=5"):
        sft(tmp_path, row, **cut)
    left = sft(tmp_path, row, truncation="left", **cut)
    assert decoded(TOKENIZER, left.ids) == "efgh<|im_end|>" and taught(left) == "gh<|im_end|>"
    right = sft(tmp_path, row, truncation="right", **cut)
    assert decoded(TOKENIZER, right.ids) == "abcde" and taught(right) == ""
    assert "row 0 has no loss" in caplog.text


def test_pairs(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "a"}]
    better, worse = [{"role": "assistant", "content": c} for c in "bc"]
    rows = [
        {"q": "a", "chosen": "b", "rejected": "c", "margin": 2},
        {"q": talk, "chosen": [better], "rejected": [worse]},
    ]
    pairs = build_supervised(
        PairDataConfig(train_files=lines(tmp_path / "a.jsonl", rows), prompt_key="q", shuffle=False),
        TOKENIZER,
    )
    assert [pair.margin for pair in pairs] == [2.0, 0.0]
    assert pairs[0].chosen == pairs[1].chosen and pairs[0].rejected == pairs[1].rejected
    assert (taught(pairs[0].chosen), taught(pairs[0].rejected)) == ("b<|im_end|>", "c<|im_end|>")
    whole = [{"chosen": [*talk, better, *talk, better], "rejected": [*talk, better, *talk, worse]}]
    pair = build_supervised(PairDataConfig(train_files=lines(tmp_path / "b.jsonl", whole)), TOKENIZER)[0]
    assert (taught(pair.chosen), taught(pair.rejected)) == ("b<|im_end|>", "c<|im_end|>"), (
        "the shared turns are prompt"
    )


@pytest.mark.parametrize(
    "config", [PairDataConfig(prompt_key="q"), SftDataConfig(prompt_key="q", response_key="chosen")]
)
def test_an_answer_that_repeats_the_prompt_is_refused(tmp_path: Path, config: SupervisedDataConfig) -> None:
    """Rows of UltraFeedback: a prompt, and pairs of whole conversations. The user would ask twice."""
    talk = [{"role": "user", "content": "a"}]
    better, worse = [{"role": "assistant", "content": c} for c in "bc"]
    rows = [{"q": "a", "chosen": [*talk, better], "rejected": [*talk, worse]}]
    config = dataclasses.replace(config, train_files=lines(tmp_path / "a.jsonl", rows), bad_rows="skip")
    with pytest.raises(ValueError, match="the prompt would stand twice"):
        build_supervised(config, TOKENIZER)[0]


def test_dpo_reads_no_margins(tmp_path: Path) -> None:
    """A column of this name may hold anything, for instance words."""
    rows = [{"q": "a", "chosen": "b", "rejected": "c", "margin": "slightly better"}]
    files = lines(tmp_path / "a.jsonl", rows)
    assert build_supervised(DpoDataConfig(train_files=files, prompt_key="q"), TOKENIZER)[0].margin == 0
    with pytest.raises(ValueError, match="not a number"):
        build_supervised(PairDataConfig(train_files=files, prompt_key="q"), TOKENIZER)[0]


def test_a_row_is_rendered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"q": "a", "chosen": f"b{i}", "rejected": "c", "margin": i} for i in range(3)]
    calls = []
    plain = Chat.conversation
    monkeypatch.setattr(Chat, "conversation", lambda self, *a, **k: calls.append(1) or plain(self, *a, **k))
    pairs = build_supervised(
        PairDataConfig(train_files=lines(tmp_path / "a.jsonl", rows), prompt_key="q"), TOKENIZER
    )
    first = list(pairs)
    assert (
        list(pairs) == first and len(calls) == 6 and sorted(pair.margin for pair in first) == [0.0, 1.0, 2.0]
    )
    pairs.config.max_length, pairs.config.truncation = 4, "left"  # what is kept is not yet cut
    assert all(len(pair.chosen.ids) == 4 for pair in pairs) and len(calls) == 6
    monkeypatch.setattr("strop.data.examples.CACHED_TOKENS", 0)
    fresh = build_supervised(PairDataConfig(train_files=str(tmp_path / "a.jsonl"), prompt_key="q"), TOKENIZER)
    assert list(fresh) == list(fresh) == first and len(calls) == 18


def test_bad_rows_are_named_a_few_times_when_they_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "a", "response": ""}] * 9 + [{"prompt": "a", "response": "b"}]
    found = list(
        build_supervised(
            SftDataConfig(train_files=lines(tmp_path / "a.jsonl", rows), bad_rows="skip"), TOKENIZER
        )
    )
    assert [item is None for item in found].count(True) == 9
    assert caplog.text.count("is skipped") == 5 and caplog.text.count("not named") == 1


def test_bad_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no column 'response', which data\.response_key=response asks for"):
        sft(tmp_path, {"prompt": "a", "respons": "b"})
    with pytest.raises(ValueError, match=r"row 0, column 'response' is empty"):
        sft(tmp_path, {"prompt": "a", "response": ""})
    with pytest.raises(ValueError, match=r"row 0: A conversation of roles \[user\] has no assistant turn"):
        sft(tmp_path, {"prompt": [{"role": "user", "content": "a"}]}, response_key=None)
    with pytest.raises(ValueError, match=r"row 0, column 'messages' is int 5"):
        sft(tmp_path, {"messages": 5}, multiturn=MultiTurnDataConfig(enable=True))
    odd = lines(tmp_path / "odd.jsonl", [{"prompt": 5, "chosen": "b", "rejected": "c"}])
    with pytest.raises(ValueError, match=r"row 0, column 'prompt' is int 5"):
        build_supervised(PairDataConfig(train_files=odd, prompt_key="prompt"), TOKENIZER)[0]
    text = lines(tmp_path / "b.jsonl", [{"chosen": "b", "rejected": "c"}])
    with pytest.raises(
        ValueError, match=r"column 'chosen' is text, but without data\.prompt_key it must hold a whole"
    ):
        build_supervised(PairDataConfig(train_files=text), TOKENIZER)[0]
    with pytest.raises(ValueError, match=r"data\.train_max_samples=0 leaves no rows"):
        build_supervised(PairDataConfig(train_files=text, train_max_samples=0), TOKENIZER)


def test_a_class_of_the_users_and_the_loader(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Rows(list):\n    def __init__(self, files, tokenizer, config):\n        super().__init__({'prompt': f, 'response': 'x'} for f in files)\n"
    )
    config = SftDataConfig(
        train_files=["a", "b", "c"], custom_cls=CustomClassConfig(path=str(tmp_path / "mine.py"), name="Rows")
    )
    dataset = build_supervised(config, TOKENIZER)
    batch = Loader(dataset, 2, seed=0).draw()
    assert [taught(item) for item in batch] == ["x<|im_end|>"] * 2
    assert (
        len(
            {
                dataset.fingerprint(),
                build_supervised(
                    SftDataConfig(**{**vars(config), "train_max_samples": 2}), TOKENIZER
                ).fingerprint(),
            }
        )
        == 2
    )


@pytest.mark.parametrize(
    ("row", "config", "said"),
    [
        ("[1]", SftDataConfig, "is a list; a row is a dict with columns, or a Rendered"),
        ("PreferencePair(Rendered([1], [1]), Rendered([2], [1]))", SftDataConfig, "is a PreferencePair"),
        ("Rendered([1], [1])", PairDataConfig, "is a Rendered; a row is a dict .* or a PreferencePair"),
    ],
    ids=["a list", "a pair for sft", "a text for pairs"],
)
def test_a_class_of_the_users_with_rows_of_another_kind(tmp_path: Path, row, config, said) -> None:
    (tmp_path / "mine.py").write_text(
        "from strop.data.chat import Rendered\n"
        "from strop.data.examples import PreferencePair\n\n\n"
        f"class Rows(list):\n    def __init__(self, *_):\n        self.append({row})\n"
    )
    custom = CustomClassConfig(path=str(tmp_path / "mine.py"), name="Rows")
    dataset = build_supervised(config(train_files="a", custom_cls=custom), TOKENIZER)
    with pytest.raises(ValueError, match=rf"row 0 of data\.custom_cls {said}"):
        dataset.untruncated(0)
