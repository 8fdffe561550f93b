"""Rows become prompts: cut, filtered, capped and mixed as the settings say, the same in every run."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config.schema.data import CustomClassConfig, DataConfig
from strop.data.chat import Chat
from strop.data.prompts import PromptDataset, ToolListing, build_prompts, truncate
from strop.data.selection import mixture, permutation, subset
from strop.data.workers import CHUNK, measure_prompts
from strop.types import Prompt
from tests.data.tokens import character_tokenizer, decoded

TOKENIZER = character_tokenizer()
WRAP = len(Chat(TOKENIZER).ids([{"role": "user", "content": ""}]))


def row(text: str, truth: str = "", **more: Any) -> dict[str, Any]:
    reward = {"style": "rule", "ground_truth": truth}
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": reward,
        **more,
    }


def parquet(path: Path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def config(files: Any, **settings: Any) -> DataConfig:
    return DataConfig(train_files=files, **{"shuffle": False, "seed": 1, **settings})


def texts(dataset: PromptDataset) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in dataset]


@pytest.fixture
def sums(tmp_path: Path) -> str:
    return parquet(
        tmp_path / "sums.parquet", [row("x" * n, str(n), extra_info={"index": n}) for n in range(10)]
    )


def test_prompts_carry_what_the_row_says(sums: str) -> None:
    prompt = build_prompts(config(sums), TOKENIZER)[3]
    assert prompt == Prompt(
        index=3,
        ids=Chat(TOKENIZER).ids([{"role": "user", "content": "xxx"}]),
        messages=[{"role": "user", "content": "xxx"}],
        data_source="sums",
        ground_truth="3",
        extra_info={"index": 3},
    )


def test_a_row_names_its_agent(tmp_path: Path) -> None:
    file = parquet(tmp_path / "agents.parquet", [row("a", agent_name="tool_agent"), row("b")])
    assert [prompt.agent_name for prompt in build_prompts(config(file), TOKENIZER)] == ["tool_agent", None]


def test_plain_rows_without_template(tmp_path: Path) -> None:
    (tmp_path / "add.jsonl").write_text('{"input": "1+1=", "label": 2}\n')
    settings = {
        "prompt_key": "input",
        "label_key": "label",
        "apply_chat_template": False,
        "input_template": "Q {}",
    }
    prompt = build_prompts(
        config(str(tmp_path / "add.jsonl"), **settings), character_tokenizer(template=None)
    )[0]
    assert decoded(TOKENIZER, prompt.ids) == "Q 1+1="
    assert (prompt.data_source, prompt.ground_truth) == ("add", 2)


@pytest.mark.parametrize(
    ("mode", "kept"), [("left", [5, 6, 7, 8, 9]), ("right", [0, 1, 2, 3, 4]), ("middle", [0, 1, 7, 8, 9])]
)
def test_truncation_modes(mode: str, kept: list[int]) -> None:
    assert truncate(list(range(10)), 5, mode) == kept
    assert truncate(list(range(5)), 5, mode) == list(range(5))


@given(st.integers(0, 30), st.integers(1, 12), st.sampled_from(["left", "right", "middle"]))
@settings(max_examples=50, deadline=None)
def test_truncation_keeps_an_ordered_part_of_exactly_the_limit(count: int, limit: int, mode: str) -> None:
    kept = truncate(list(range(count)), limit, mode)
    assert len(kept) == min(count, limit) and kept == sorted(set(kept))


def test_truncation_works_on_prompts(sums: str) -> None:
    whole = build_prompts(config(sums), TOKENIZER)[9].ids
    for mode in ("left", "right", "middle"):
        cut = build_prompts(config(sums, truncation=mode, max_prompt_length=WRAP + 4), TOKENIZER)
        assert cut[9].ids == truncate(whole, WRAP + 4, mode) != whole
        assert len(cut[4].ids) == WRAP + 4
    with pytest.raises(
        ValueError,
        match=rf"sums\.parquet, row 9 has {WRAP + 9} tokens, over data\.max_prompt_length={WRAP + 4}",
    ):
        build_prompts(config(sums, max_prompt_length=WRAP + 4), TOKENIZER)[9]
    with pytest.raises(ValueError, match="choose error, left, right or middle"):
        truncate([1, 2], 1, "centre")


def test_overlong_prompts_are_filtered(sums: str) -> None:
    dataset = build_prompts(config(sums, filter_overlong_prompts=True, max_prompt_length=WRAP + 4), TOKENIZER)
    assert texts(dataset) == ["x" * n for n in range(5)]
    assert [prompt.index for prompt in dataset] == [0, 1, 2, 3, 4]
    with pytest.raises(
        ValueError,
        match=rf"All 10 prompts are longer than data\.max_prompt_length=3 \(the shortest has {WRAP}",
    ):
        build_prompts(config(sums, filter_overlong_prompts=True, max_prompt_length=3), TOKENIZER)


def test_tools_count_towards_the_length(sums: str) -> None:
    template = "{% if tools %}{{ tools[0].name }}{% endif %}{{ messages[0].content }}"
    settings = config(sums, filter_overlong_prompts=True, max_prompt_length=8)
    assert len(build_prompts(settings, TOKENIZER, chat_template=template)) == 9
    shown = ToolListing([{"name": "find"}], frozenset({None}))
    filtered = build_prompts(settings, TOKENIZER, chat_template=template, listing=shown)
    assert len(filtered) == 5
    every = build_prompts(config(sums), TOKENIZER, chat_template=template, listing=shown)
    assert [prompt.ids for prompt in filtered] == [prompt.ids for prompt in every][:5], (
        "with the tools in them"
    )
    hidden = ToolListing([{"name": "find"}], frozenset({"tool_agent"}))
    assert len(build_prompts(settings, TOKENIZER, chat_template=template, listing=hidden)) == 9


def test_the_filter_gives_the_same_rows_with_processes(tmp_path: Path) -> None:
    lengths = [n % 7 for n in range(CHUNK * 2 + 10)]
    file = parquet(tmp_path / "a.parquet", [row("x" * n) for n in lengths])
    settings = {"filter_overlong_prompts": True, "max_prompt_length": WRAP + 3}
    alone = build_prompts(config(file, **settings), TOKENIZER)
    many = build_prompts(config(file, filter_overlong_prompts_workers=2, **settings), TOKENIZER)
    assert (
        many.indices.tolist()
        == alone.indices.tolist()
        == [n for n, length in enumerate(lengths) if length <= 3]
    )


def test_a_terminal_sees_progress(
    sums: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = build_prompts(config(sums), TOKENIZER)
    quiet = measure_prompts(dataset).tolist()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert measure_prompts(dataset).tolist() == quiet == [WRAP + n for n in range(10)]
    assert "Measuring prompts" in capsys.readouterr().err


def test_samples_are_capped_first_or_at_random(sums: str) -> None:
    assert [p.index for p in build_prompts(config(sums, train_max_samples=3), TOKENIZER)] == [0, 1, 2]
    drawn = [p.index for p in build_prompts(config(sums, train_max_samples=3, shuffle=True), TOKENIZER)]
    assert drawn == [
        p.index for p in build_prompts(config(sums, train_max_samples=3, shuffle=True), TOKENIZER)
    ]
    others = {
        tuple(build_prompts(config(sums, train_max_samples=3, shuffle=True, seed=s), TOKENIZER).indices)
        for s in range(9)
    }
    assert len(others) > 3 and drawn == sorted(drawn) != [0, 1, 2]
    assert len(build_prompts(config(sums, train_max_samples=99), TOKENIZER)) == 10
    with pytest.raises(ValueError, match=r"data\.train_max_samples=0 leaves no rows"):
        build_prompts(config(sums, train_max_samples=0), TOKENIZER)


def test_validation_reads_its_own_settings(sums: str, tmp_path: Path) -> None:
    both = DataConfig(
        train_files=sums, val_files=parquet(tmp_path / "v.parquet", [row("v")] * 4), val_max_samples=2
    )
    assert texts(build_prompts(both, TOKENIZER, split="val")) == ["v", "v"]
    with pytest.raises(ValueError, match=r"data\.val_files names no file"):
        build_prompts(config(sums), TOKENIZER, split="val")


def test_files_are_mixed_by_weight(tmp_path: Path) -> None:
    files = [
        parquet(tmp_path / "a.parquet", [row("a")] * 30),
        parquet(tmp_path / "b.parquet", [row("b")] * 300),
    ]
    mixed = Counter(texts(build_prompts(config(files, prompt_probs=[0.5, 0.5]), TOKENIZER)))
    assert mixed["b"] >= 300 and 0.8 < mixed["a"] / mixed["b"] < 1.25
    assert Counter(texts(build_prompts(config(files), TOKENIZER))) == {"a": 30, "b": 300}
    with pytest.raises(ValueError, match=r"data\.prompt_probs has 1 weights for 2 files"):
        build_prompts(config(files, prompt_probs=[1.0]), TOKENIZER)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 3)), min_size=1, max_size=4), st.integers(0, 99)
)
@settings(max_examples=40, deadline=None)
def test_mixtures_see_every_row_in_order_and_stop(files: list[tuple[int, float]], seed: int) -> None:
    counts, weights = [c for c, _ in files], [w for _, w in files]
    drawn = mixture(counts, weights, seed=seed)
    assert set(drawn.tolist()) == set(range(sum(counts)))
    assert set(drawn[:-1].tolist()) != set(range(sum(counts))), "it stops with the last new row"
    start = 0
    for count in counts:
        own = [r - start for r in drawn.tolist() if start <= r < start + count]
        assert own == [n % count for n in range(len(own))]
        start += count


def test_mixture_weights_are_checked() -> None:
    assert set(mixture([3, 5, 2], [1, 0, 2], seed=0).tolist()) == {0, 1, 2, 8, 9}
    assert set(mixture([3, 5], [1 / 3, 0], seed=0).tolist()) == {0, 1, 2}
    for bad in ([0, 0], [-1, 2], [float("nan"), 1]):
        with pytest.raises(ValueError, match="zero or more, and not all zero"):
            mixture([3, 5], bad, seed=0)
    with pytest.raises(
        ValueError, match=r"all 1000 rows of file 0 are drawn, an epoch has about 1.0e\+10 rows"
    ):
        mixture([1000, 1000], [1e-7, 1.0], seed=0)


def test_orders_are_pinned() -> None:
    """A checkpoint's order must not change with the version of anything."""
    assert permutation(8, seed=0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert permutation(8, seed=0, stream=1).tolist() == [7, 4, 5, 1, 6, 2, 0, 3]
    assert subset(np.arange(20), 4, shuffle=True, seed=7).tolist() == [10, 14, 18, 19]


def test_datasets_cross_processes_and_know_themselves(sums: str, tmp_path: Path) -> None:
    dataset = build_prompts(config(sums), TOKENIZER)
    dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert list(copy) == list(dataset)
    assert copy.fingerprint() == dataset.fingerprint()
    assert build_prompts(config(sums, train_max_samples=9), TOKENIZER).fingerprint() != dataset.fingerprint()
    other = parquet(
        tmp_path / "other.parquet", [row("y" * n, str(n), extra_info={"index": n}) for n in range(10)]
    )
    assert build_prompts(config(other), TOKENIZER).fingerprint() != dataset.fingerprint()


def test_rendering_is_lazy_and_kept(sums: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = build_prompts(config(sums), TOKENIZER)
    rendered = []
    ids = Chat.ids
    monkeypatch.setattr(
        Chat, "ids", lambda self, messages, **k: rendered.append(1) or ids(self, messages, **k)
    )
    assert rendered == []
    assert dataset[2] is dataset[2]
    assert len(rendered) == 1


def test_bad_files_stop_the_build(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bad\.parquet has no column 'prompt'.*Did you mean 'prompts'"):
        build_prompts(config(parquet(tmp_path / "bad.parquet", [{"prompts": "x"}])), TOKENIZER)
    (tmp_path / "corrupt.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(ValueError, match=r"corrupt\.parquet cannot be read as parquet"):
        build_prompts(config(str(tmp_path / "corrupt.parquet")), TOKENIZER)
    with pytest.raises(ValueError, match="has no chat template"):
        build_prompts(
            config(parquet(tmp_path / "ok.parquet", [row("x")])), character_tokenizer(template=None)
        )


CUSTOM = """
from strop.types import Prompt

class Rows:
    def __init__(self, files, tokenizer, config):
        self.files, self.tokenizer, self.config = files, tokenizer, config
    def __len__(self):
        return 3
    def __getitem__(self, i):
        if i == 2:
            return Prompt(index=2, ids=[9] * 40, messages=[], data_source="made")
        return {"prompt": f"{self.files}{i}", "data_source": self.config.reward_fn_key}

class Empty(Rows):
    def __len__(self):
        return 0

class NoLength:
    def __init__(self, *arguments): ...
"""


def test_a_class_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CUSTOM)

    def build(name: str | None, **settings: Any) -> PromptDataset:
        own = CustomClassConfig(path=str(tmp_path / "mine.py"), name=name)
        return build_prompts(config("abc", custom_cls=own, **settings), TOKENIZER)

    dataset = build("Rows")
    assert dataset[0].messages[0]["content"] == "abc0"
    assert dataset[1].data_source == "data_source"
    assert dataset[2].ids == [9] * 40 and dataset[2].data_source == "made"
    assert len(build("Rows", max_prompt_length=38, truncation="left")[2].ids) == 38
    assert len(build("Rows", max_prompt_length=38, filter_overlong_prompts=True)) == 2
    with pytest.raises(ValueError, match=r"mine\.py defines no 'Row'. Did you mean 'Rows'"):
        build("Row")
    with pytest.raises(ValueError, match=r"NoLength in .* has no __len__ and no __getitem__"):
        build("NoLength")
    with pytest.raises(ValueError, match=r"Empty in .* holds no rows"):
        build("Empty")
    with pytest.raises(ValueError, match=r"data\.custom_cls\.name is not; name the class"):
        build(None)
