"""Which outputs and values count as equal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.rewards.rules.code_compare import same_output, same_value


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("inf", "1" * 400, False),
        ("1e400", "1" + "0" * 400, False),
        ("inf", "1e400", False),
        ("1e400", "inf", False),
        ("inf", "Infinity", True),
        ("1" * 5000, "2" * 5000, False),
        ("1" * 5000, "0" + "1" * 5000, True),
        ("1000005.0", "1000000", False),
        ("1000000.0", "1000000", True),
        ("1e6", "1000000", True),
        ("1000004.5", "1000000", False),
        ("999999.9999999", "1000000", True),
        ("1.0000001", "1", True),
        ("0.000009", "0", False),
        ("1000000000.9", "1000000000", False),
        ("nan", "3", False),
        ("3.00001", "3.0", True),
        ("+7", "7", True),
        ("-0", "0", True),
        ("007", "7", True),
    ],
)
def test_outputs(written, expected, same):
    assert same_output(written, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (10**400, 0.5, False),
        (10**400, float("inf"), False),
        (float("inf"), 10**400, False),
        (float("inf"), float("inf"), True),
        (1000005.0, 1000000, False),
        (1000000.0, 1000000, True),
        (float("nan"), 3, False),
        ([10**400], [0.5], False),
        (2.9999999999, 3, True),
        (3, 3.00001, True),
    ],
)
def test_values(value, expected, same):
    assert same_value(value, expected) is same


numbers = st.one_of(
    st.integers(), st.floats(), st.integers(min_value=300, max_value=600).map(lambda digits: 10**digits)
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(values, values)
def test_no_value_raises(value, expected):
    assert same_value(value, expected) in (True, False)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="0123456789.eE+-infa \n_"), st.text(alphabet="0123456789.eE+-infa \n_"))
def test_no_output_raises(written, expected):
    assert same_output(written, expected) in (True, False)


@settings(max_examples=150, deadline=None)
@given(st.integers(), st.integers())
def test_an_integer_as_a_float_is_that_integer_or_wrong(value, expected):
    """No other integer passes, however near it is."""
    try:
        given_float = float(value)
    except OverflowError:
        return
    assert same_value(given_float, expected) is (given_float == expected)
    assert same_output(str(value), str(expected)) is (value == expected)
