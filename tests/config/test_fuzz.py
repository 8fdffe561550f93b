"""Whatever is typed, the answer is a configuration or a ValueError with a message; never another exception."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.config.compose import load
from strop.config.rules import check
from strop.config.schema import ROOTS
from strop.config.schema.reflect import keys

PATHS = [key.path for key in keys(ROOTS["ppo_trainer"])]
words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
paths = st.one_of(
    st.sampled_from(PATHS),
    st.sampled_from(PATHS).map(lambda p: p[:-1]),
    st.sampled_from(PATHS).map(lambda p: p + ".x"),
    words,
)
values = st.one_of(
    words,
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        [
            "null",
            "true",
            "[]",
            "{}",
            "[1,2]",
            "{a: 1}",
            "''",
            "${data.seed}",
            "${",
            "a,b",
            "range(1,3)",
            "-1",
            "0",
            "nan",
            "???",
        ]
    ),
)
overrides = st.tuples(st.sampled_from(["", "+", "++", "~"]), paths, values).map(
    lambda t: f"{t[0]}{t[1]}={t[2]}"
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(overrides, max_size=3))
def test_random_overrides_never_escape(lines):
    try:
        loaded = load("ppo_trainer", lines)
    except ValueError as error:
        assert str(error).strip()
    else:
        check(loaded)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    st.one_of(
        words,
        st.lists(st.tuples(paths, values), max_size=4).map(
            lambda rows: "\n".join(f"{k}: {v}" for k, v in rows)
        ),
    )
)
def test_random_files_never_escape(tmp_path, text):
    file = tmp_path / "fuzz.yaml"
    file.write_text(text, encoding="utf-8")
    try:
        loaded = load("ppo_trainer", config=str(file))
    except ValueError as error:
        assert str(error).strip()
    else:
        check(loaded)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from([p for p in PATHS if "." in p]), st.integers(-3, 70)), max_size=4))
def test_sound_types_with_wild_numbers_reach_the_rules(pairs):
    try:
        loaded = load("ppo_trainer", [f"{path}={number}" for path, number in pairs])
    except ValueError as error:
        assert str(error).strip()
    else:
        for finding in check(loaded):
            assert finding.message
