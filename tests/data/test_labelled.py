"""Responses with labels: rows that have one, and pairs that give two."""

from __future__ import annotations

import json

import pytest

from strop.config.schema.supervised import DpoDataConfig
from strop.data.supervised.datasets import build_supervised
from strop.data.supervised.labelled import LabelledDataset
from strop.quickstart.tiny_model import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def opened(tmp_path, rows, **settings):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DpoDataConfig(train_files=str(file), prompt_key="prompt", shuffle=False, **settings)
    return build_supervised(config, TOKENIZER, kind=LabelledDataset)


def text(rendered):
    return TOKENIZER.decode(rendered.ids)


def test_a_pair_is_a_good_and_a_bad_response_with_those_of_the_row_before(tmp_path):
    rows = [{"prompt": f"{i}+0=", "chosen": f"{i}", "rejected": f"{i + 5}"} for i in range(3)]
    items = list(opened(tmp_path, rows))
    assert [item.margin for item in items] == [1, 0, 1, 0, 1, 0]
    assert [text(item.chosen) for item in items[2:4]] == ["1+0=1<eos>", "1+0=6<eos>"]
    assert [text(item.rejected) for item in items[:4]] == [
        "0+0=2<eos>",
        "0+0=7<eos>",
        "1+0=0<eos>",
        "1+0=5<eos>",
    ]
    again = list(opened(tmp_path, rows))
    assert items == again == [again[place] for place in range(6)]  # out of the cache, the same


def test_rows_with_labels_keep_their_number_and_bad_rows_are_passed_over(tmp_path):
    labels = [True, 0, 1.0, False]
    rows = [{"prompt": f"{i}=", "response": "" if i == 1 else f"{i}", "label": labels[i]} for i in range(4)]
    dataset = opened(tmp_path, rows, label_key="label", bad_rows="skip")
    items = list(dataset)
    assert items[1] is None and [item.margin for item in items if item] == [1, 1, 0]
    assert text(items[2].rejected) == "2=0<eos>"
    rows[2]["label"] = "good"
    with pytest.raises(ValueError, match="'good'; expected true or false"):
        opened(tmp_path, rows, label_key="label")[2]
    rows[2]["prompt"] = 5
    with pytest.raises(ValueError, match="row 2, column 'prompt' is int 5"):
        opened(tmp_path, rows, label_key="label")[2]


def test_the_other_response_belongs_to_another_prompt(tmp_path):
    """Responses to one prompt often stand together; one of them says nothing about the KL of the others."""
    prompts = ["1=", "1=", "2=", "2=", "2="]
    rows = [{"prompt": prompt, "response": f"{n}", "label": n % 2} for n, prompt in enumerate(prompts)]
    items = list(opened(tmp_path, rows, label_key="label"))
    assert [text(item.rejected) for item in items] == [
        "1=4<eos>",
        "1=4<eos>",
        "2=1<eos>",
        "2=1<eos>",
        "2=1<eos>",
    ]
    alone = opened(tmp_path, rows[2:], label_key="label")
    assert text(alone[1].rejected) == "2=2<eos>", "there is no other prompt"


def test_a_response_that_cannot_be_used_costs_no_other_row(tmp_path):
    """It is known to be bad when it is rendered: it says nothing, or the template leaves out a part of it."""
    empty = [{"role": "assistant", "content": ""}]
    thought = [{"role": "assistant", "content": "2", "reasoning": "I think."}]
    responses = ["0", empty, thought, "3"]
    rows = [{"prompt": f"{n}=", "response": response, "label": 1} for n, response in enumerate(responses)]
    items = list(opened(tmp_path, rows, label_key="label", bad_rows="skip"))
    assert [item and text(item.rejected) for item in items] == ["0=3<eos>", None, None, "3=0<eos>"]


def test_tools_of_a_row_are_listed_with_both_responses(tmp_path):
    listing = "{% for t in tools or [] %}{{ t.name }}={% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = [{"prompt": f"{n}+", "response": f"{n}", "label": 1, "tools": [{"name": "7"}]} for n in (1, 2)]
    dataset = opened(tmp_path, rows, label_key="label", chat_template=listing)
    assert [text(dataset[1].chosen), text(dataset[1].rejected)] == ["7=2+2", "7=2+1"]


def test_one_row_has_no_other(tmp_path):
    dataset = opened(tmp_path, [{"prompt": "1=", "response": "1", "label": 1}], label_key="label")
    with pytest.raises(ValueError, match="no other row has a response"):
        dataset[0]
