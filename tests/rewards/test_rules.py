"""What each rule scorer accepts, rejects and survives."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.rewards.rules import (
    code,
    geo3k,
    gsm8k,
    math_boxed,
    math_dapo,
    math_symbolic,
    multiple_choice,
    search_qa,
)
from strop.rewards.rules import format as shape
from strop.rewards.rules.extract import last_box, to_number

# Pieces that real answers are made of, so that random text reaches the interesting branches.
pieces = st.sampled_from(
    [
        *(
            "\\boxed{",
            "\\boxed ",
            "\\fbox{",
            "}",
            "{",
            "$",
            "\\frac",
            "\\sqrt",
            "\\text{",
            "\\left",
            "=",
            ".",
            ",",
            "-",
            "/",
            "%",
            "\n",
        ),
        *(
            "#### ",
            "12",
            "1,000",
            "0.5",
            "x",
            "Answer:",
            "answer is",
            "<answer>",
            "</answer>",
            "<think>",
            "</think>",
            "(A)",
            "B",
            " ",
        ),
        *("٣", "²", "½", "\x00", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")),
    ]
)
model_text = st.one_of(st.text(max_size=80), st.lists(pieces, max_size=25).map("".join))


@given(model_text, model_text)
@settings(max_examples=150, deadline=None)
def test_no_text_makes_a_fast_scorer_raise(text: str, truth: str) -> None:
    for compat in (None, "verl"):
        for method in ("strict", "flexible"):
            assert gsm8k.compute_score(text, truth, method=method, compat=compat) in (0.0, 1.0)
        assert math_boxed.compute_score(text, truth, compat=compat) in (0.0, 1.0)
        for strict in (False, True):
            found = math_dapo.compute_score(text, truth, strict_box_verify=strict, compat=compat)
            assert found["score"] in (-1.0, 1.0) and found["acc"] == (found["score"] > 0)
    for match in ("exact", "substring"):
        assert search_qa.compute_score(text, {"target": [truth]}, match=match) in (0.0, 0.25, 1.0)
    assert multiple_choice.compute_score(text, "A") in (0.0, 1.0)
    for style in ("think_answer", "think_boxed", "free"):
        assert shape.compute_score(text, style=style) in (0.0, 1.0)


@given(model_text)
@settings(max_examples=50, deadline=None)
def test_the_truth_in_a_box_is_always_right(answer: str) -> None:
    if answer.count("{") == answer.count("}") == 0 and "boxed" not in answer and "fbox" not in answer:
        assert math_boxed.compute_score(f"so \\boxed{{{answer}}}", answer) == 1.0


@pytest.mark.parametrize(
    "flood",
    [
        "\\boxed{",
        "\\boxed",
        "<answer>",
        "</answer>",
        "<think></think>",
        "\\frac",
        "\\text{",
        "answer: ",
        "1,",
        "$",
        "((((",
        "a" * 7,
        " ",
        "=",
    ],
)
def test_long_floods_take_no_time(flood: str) -> None:
    text = flood * (200_000 // len(flood))
    start = time.thread_time()  # not the wall clock: other processes may have the processor
    gsm8k.compute_score(text, "1", method="flexible")
    math_boxed.compute_score(text, "1")
    math_boxed.compute_score(f"\\boxed{{{text}}}", text)
    math_dapo.compute_score(text, "1")
    search_qa.compute_score(text, "1")
    multiple_choice.compute_score(text, "A")
    code.extract_program("```" + text)
    shape.compute_score(text)
    shape.think_boxed_format("<think>" + text)
    assert time.thread_time() - start < 3.0


@pytest.mark.parametrize(
    ("text", "truth", "method", "score"),
    [
        ("#### 18.00", "18", "strict", 1.0),
        ("#### 42.", "42", "strict", 1.0),
        ("#### $18", "18", "strict", 1.0),
        ("It costs $1,234.", "1234", "flexible", 1.0),
        ("The values are 3,4", "4", "flexible", 1.0),
        ("between 2,5", "25", "flexible", 0.0),
        ("#### 19", "18", "strict", 0.0),
        ("no number", "18", "flexible", 0.0),
        ("#### 18", 18, "strict", 1.0),
        ("7 " + "x" * 400, "7", "flexible", 0.0),
    ],
)
def test_gsm8k(text: str, truth: Any, method: str, score: float) -> None:
    assert gsm8k.compute_score(text, truth, method=method) == score


def test_gsm8k_options() -> None:
    assert gsm8k.compute_score("#### 19", "18", format_score=0.1) == 0.1
    assert gsm8k.compute_score("#### 18", "18", score=2.0) == 2.0
    with pytest.raises(ValueError, match="not 'loose'"):
        gsm8k.compute_score("#### 1", "1", method="loose")


def test_numbers_need_thousands_in_threes() -> None:
    assert to_number("1,000") == 1000 and to_number("-.5") == to_number("-0.50")
    for text in ("1,2", "1,00", "1.2.3", "", ".", "-", "x", "1e5", "٣"):
        assert to_number(text) is None


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (r"\boxed{\dfrac{1}{2}}", r"\frac12", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{1,2}", "12", 0.0),
        (r"\boxed{(1,2)}", "(1, 2)", 1.0),
        (r"\boxed{3.0}", "3", 1.0),
        (r"\boxed{5 \text{cm}}", "5", 1.0),
        (r"\boxed{\text{(B)}}", "B", 1.0),
        (r"\fbox{7}", "7", 1.0),
        (r"\boxed{\sqrt 3}", r"\sqrt{3}", 1.0),
        (r"\boxed{\sqrt[3]{8}}", "2", 1.0),
        (r"\boxed 8$ first, then \boxed{9}", "9", 1.0),
        (r"\boxed{\frac{1}{2}", r"\frac{1}{2}", 0.0),
        (r"\boxed{2} but really 3", "3", 0.0),
        (r"\boxed{x+1}", "x+2", 0.0),
        (r"\boxed{9\text{ or }8}", "9", 0.0),
        (r"\boxed{9\text{ cm}^2}", "9", 1.0),
        (r"\boxed{9 \text{ cm}}", "9", 1.0),
        (r"\boxed{}", r"\text{ yes}", 0.0),
        (r"\boxed{\text{ no}}", r"\text{ yes}", 0.0),
    ],
)
def test_math_boxed(text: str, truth: str, score: float) -> None:
    assert math_boxed.compute_score(text, truth) == score


def test_the_last_box_may_nest() -> None:
    box = last_box(r"\boxed{1} then \boxed{\frac{a_{1}}{2}} end")
    assert box is not None and box.content == r"\frac{a_{1}}{2}"
    assert last_box("nothing") is None and last_box("\\boxed") is None


@pytest.mark.parametrize(
    ("text", "truth", "right", "pred"),
    [
        ("Answer: 42", "42", True, "42"),
        ("Answer: 4\nAnswer: 5", "5", True, "5"),
        (r"Answer: \dfrac{1}{2}", r"\frac{1}{2}", True, "1/2"),
        (r"so \boxed{10 \text{ dollars}}", "10", True, "10"),
        ("nothing", "3", False, math_dapo.INVALID),
        ("Answer: 4 \\boxed{5}", "5", False, None),
    ],
)
def test_math_dapo(text: str, truth: str, right: bool, pred: str | None) -> None:
    found = math_dapo.compute_score(text, truth)
    assert found["acc"] is right and found["score"] == (1.0 if right else -1.0)
    assert pred is None or found["pred"] == pred


def test_math_dapo_strict_box_ignores_the_line() -> None:
    assert math_dapo.compute_score("Answer: 5", "5", strict_box_verify=True)["acc"] is False
    assert math_dapo.compute_score(r"\boxed{5}", "5", strict_box_verify=True)["acc"] is True


def test_search_qa() -> None:
    score = search_qa.compute_score
    assert score("<answer>The Beatles!</answer>", {"target": ["beatles", "Fab Four"]}) == 1.0
    assert score("<answer>x</answer></answer>", {"target": "x"}) == 1.0
    assert score("<answer>x</answer>" * 11, {"target": ["x"]}) == 0.25
    assert score("<answer>y</answer>", {"target": np.array(["x", "y"])}) == 1.0
    assert score("<answer>the x of y</answer>", ["x"], match="substring") == 1.0
    assert score("x", "x") == 0.0
    with pytest.raises(ValueError, match="needs the key 'target', it has \\['answer'\\]"):
        score("<answer>x</answer>", {"answer": "x"})
    # "A" is an article, of which normalisation leaves nothing.
    assert (
        score("<answer></answer>", ["A", "Alpha"]) == score("<answer>y</answer>", ["A"], match="exact") == 0.0
    )
    assert score("<answer>y</answer>", ["A", "Alpha"], match="substring") == 0.0
    assert score("<answer></answer>", ["A"]) == score("<answer>y</answer>", ["A"], match="substring") == 0.0
    assert score("<answer>a</answer>", ["A"]) == score("<answer>+</answer>", ["+"], match="substring") == 1.0
    assert score("<answer>None</answer>", {"target": ["x", None]}) == 0.0
    for text in ("<answer>x</answer>", "x"):
        with pytest.raises(ValueError, match="accepts no answer: its list is empty"):
            score(text, {"target": []})


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("The answer is B.", "B"),
        ("Answer: (C)", "C"),
        (r"\boxed{\text{D}}", "D"),
        ("<answer>b</answer>", "B"),
        ("the correct option is **E**", "E"),
        ("(A) no, (B) yes. Final: B", "B"),
        (r"answer is: $\textbf{(C)}$", "C"),
        ("The answer is A, no wait, the answer is D", "D"),
        ("The answer is B because option A is wrong.", "B"),
        ("The answer is B. Hence the correct option is C.", "C"),
        ("The answer is: B, since A) is wrong", "B"),
        ("My answer is 'B'", "B"),
        (r"The answer is $\mathbf{B}$, not A.", "B"),
        ("I choose **B**", "B"),
        ("Option (B) is right.", "B"),
        ("The answer is A or B", None),
        ("Answer: A/B/C/D", None),
        (r"\boxed{A, B}", None),
        ("<answer>(A) and (B)</answer>", None),
        (r"\boxed{B) a cat and A}", "B"),
        ("Answer: Apples", None),
        ("I think so", None),
        ("The answer is B. " + "A) is a long story. " * 20, "B"),
        ("Answer: B\n\nExplanation: The answer choice A is incorrect.", "B"),
        ("Therefore, B is the correct answer.", "B"),
        ("Option A is wrong. Option B is right. Option C is wrong.", "B"),
        ("If the answer is A, x is 0. So:\n\n**B**", "B"),
        ("The answer is clearly B, not A.", "B"),
        (r"The answer is \(\text{B}\).", "B"),
        ("Answer: `B`", "B"),
        ("the answer is (b)", "B"),
        ("答案是（Ｂ）。A 错误。", "B"),
        ("<think>\\boxed{A}</think>The answer is B.", "B"),
        ("<think>The answer is A.</think>", None),
        ("The answer is B, and A is wrong", "B"),
        ("The answer is B, C and D are wrong.", "B"),
        ("Answer: B\nC. is wrong", "B"),
        ("Answer: A, B", None),
        ("The answer is A, B, C, or D.", None),
        ("The answer is both A and B", None),
        ("Answer: (A) (B) (C)", None),
        ("A. B. C. D.", None),
        (r"\boxed{A+B}", None),
        ("Answer: A decrease in demand", None),
        ("Answer: I think it is B.", "B"),
        ("The answer is C2H6", None),
        ("The answer is D-glucose", None),
        ("", None),
    ],
)
def test_multiple_choice(text: str, choice: str | None) -> None:
    assert multiple_choice.extract_choice(text) == choice


def test_multiple_choice_truths() -> None:
    score = multiple_choice.compute_score
    assert score("Answer: C", 2) == score("Answer: C", "(C)") == score("Answer: C", "c") == 1.0
    assert score("Answer: C", "A", format_score=0.2) == 0.2
    for truth in ("Paris", "A, C"):
        with pytest.raises(ValueError, match="names no choice"):
            score("Answer: C", truth)
    with pytest.raises(ValueError, match="no number of a choice"):
        score("Answer: C", 99)


def test_formats() -> None:
    good = "<think>a</think>\n<answer>b</answer>"
    assert shape.think_answer_format(good) == 1.0
    for bad in (
        good + " more",
        "x" + good,
        good.replace("\n", "chat"),
        good + good,
        "<answer>b</answer><think>a</think>",
        "",
    ):
        assert shape.think_answer_format(bad) == 0.0
    assert shape.think_boxed_format("<think>a</think> \\boxed{1}") == 1.0
    assert shape.think_boxed_format("\\boxed{1} <think>a</think>") == 0.0
    assert shape.length_format("abcd", max_chars=2) == 0.5 and shape.length_format("a", min_chars=4) == 0.25
    assert shape.compute_score(good, max_chars=1000) == 1.0
    with pytest.raises(ValueError, match="not 'haiku'"):
        shape.compute_score("x", style="haiku")


@pytest.mark.parametrize(
    ("pred", "truth", "match"),
    [
        ("2x+3", "3+2x", "exact"),
        (r"\sqrt{8}", r"2\sqrt{2}", "exact"),
        ("3.0", "3", "exact"),
        (r"50\%", "0.5", "exact"),
        (r"2\pi", "6.283185307", "approximate"),
        ("5", "6", "none"),
        ("(1,2)", "(2,1)", "none"),
        ("100001", "100000", "none"),
        ("9" * 5000, "9", "none"),
        (r"51\%", "0.5", "none"),
    ],
)
def test_symbolic_equality(pred: str, truth: str, match: str) -> None:
    assert math_symbolic.compare(pred, truth) == match


def test_symbolic_answers_without_a_box() -> None:
    assert math_symbolic.compute_score("the answer is 1/2", r"\frac{1}{2}")["acc"]
    assert math_symbolic.compute_score("The answer is: 5", "5")["acc"]
    assert math_symbolic.compute_score("The answer is:\n\n$$5$$", "5")["acc"]
    for text in ("The answer is $5$, not $6$.", "The answer is $5$ because $2+4=6$."):
        assert math_symbolic.compute_score(text, "5")["acc"]
        assert not math_symbolic.compute_score(text, "6")["acc"]
    assert math_symbolic.compute_score("So $x=4$ and $y=5$", "5")["acc"]
    for text in ("The answer is $5$ or $6$", "The answer is $4$, $5$, $6$"):
        assert not any(math_symbolic.compute_score(text, truth)["acc"] for truth in "456")
    assert math_symbolic.compute_score("", "1") == {"score": 0.0, "acc": False, "pred": "", "match": "none"}


def test_geo3k_shares() -> None:
    assert geo3k.compute_score(r"<think>a</think> \boxed{\frac{1}{2}}", "0.5") == pytest.approx(1.0)
    assert geo3k.compute_score(r"\boxed{12}", "12") == pytest.approx(0.9)
    assert geo3k.compute_score(r"<think>a</think> \boxed{13}", "12") == pytest.approx(0.1)
    assert geo3k.compute_score(r"<think>a</think> \boxed{13}", "12", format_share=0.5) == pytest.approx(0.5)
