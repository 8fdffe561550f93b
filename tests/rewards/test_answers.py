"""Maths scorers against a mathematician's verdicts, bombs, and random text."""

from __future__ import annotations

import importlib.util
import logging
import random
import time
from collections.abc import Callable

import pytest

from strop.rewards.base import RewardSample
from strop.rewards.function import RuleScorer, score_response
from strop.rewards.rules import geo3k, gsm8k, math_boxed, math_dapo, math_symbolic
from strop.rewards.rules.maths.equality import canonical, compare, equal
from strop.rewards.votes import boxed, number
from tests.rewards.probes import probes, tally
from tests.rewards.scene import trajectory

ANSWERS = list(probes("answers"))
SECONDS = 0.5


def in_box(answer: str) -> str:
    return f"So the answer is \\boxed{{{answer}}}."


def by_math_boxed(answer: str, truth: str) -> bool:
    return math_boxed.compute_score(in_box(answer), truth) == 1.0


def by_math_dapo(answer: str, truth: str) -> bool:
    return math_dapo.compute_score(in_box(answer), truth)["score"] == 1.0


def by_math_dapo_line(answer: str, truth: str) -> bool:
    return math_dapo.compute_score(f"So\nAnswer: {answer}", truth)["score"] == 1.0


def by_math_symbolic(answer: str, truth: str) -> bool:
    return math_symbolic.compute_score(in_box(answer), truth)["score"] == 1.0


def by_gsm8k(response: str, truth: str) -> bool:
    response = response.replace("\\n", "\n").replace("\\t", "\t")
    return gsm8k.compute_score(response, truth) == 1.0


SCORERS = [by_math_boxed, by_math_dapo, by_math_dapo_line, by_math_symbolic]


def test_the_probes_are_many_and_balanced() -> None:
    right = sum(probe.right for probe in ANSWERS)
    assert len(ANSWERS) >= 300 and 0.45 < right / len(ANSWERS) < 0.55
    assert len(set(ANSWERS)) == len(ANSWERS)


@pytest.mark.parametrize("accepts", SCORERS)
@pytest.mark.parametrize("file", ["answers", "answers_more"])
def test_scorers_agree_with_a_mathematician(file: str, accepts: Callable[[str, str], bool]) -> None:
    found = tally(list(probes(file)), accepts)
    assert found.agree >= 98 and found.false_positive <= 1 and found.false_negative <= 2, found.wrong


def test_gsm8k_agrees_with_a_mathematician() -> None:
    found = tally(list(probes("gsm8k")), by_gsm8k)
    assert found.agree >= 98 and found.false_positive <= 1 and found.false_negative <= 2, found.wrong


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
def test_scorers_agree_more_often_than_math_verify() -> None:
    import math_verify

    def by_math_verify(answer: str, truth: str) -> bool:
        gold = math_verify.parse(f"\\boxed{{{truth}}}", parsing_timeout=None)
        given = math_verify.parse(in_box(answer), parsing_timeout=None)
        return bool(math_verify.verify(gold, given, timeout_seconds=None))

    logging.disable(logging.ERROR)  # it warns on every call that its timeouts are off
    harmless = [probe for probe in ANSWERS if probe.kind != "bombs" and "!" not in probe.answer]
    theirs = tally(harmless, by_math_verify)  # without timeouts a bomb would never end
    logging.disable(logging.NOTSET)
    for accepts in SCORERS:
        ours = tally(harmless, accepts)
        assert ours.agree > theirs.agree
        assert ours.false_positive <= theirs.false_positive and ours.false_negative <= theirs.false_negative


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        (r"3\mathrm{i}", "3", False),
        (r"2\mathrm{e}", "2", False),
        (r"5\mbox{ billion}", "5", False),
        ("1 1/2", r"\frac{11}{2}", False),
        ("1 2", "12", False),
        ("41=42", "42", False),
        (r"10\text{ million}", "10", False),
        ("1,2", "12", False),
        ("5 ft 10 inches", "510", False),
        ("x=3,x=5", "5", False),
        ("0.25", r"\frac{1}{4}", True),
        ("−5", "-5", True),
        ("1{,}000", "1000", True),
        (r"1\frac12", r"\frac{3}{2}", True),
        (r"\{2,1\}", r"\{1,2\}", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("9^{9^{9^9}}", "9", False),
    ],
)
@pytest.mark.parametrize("accepts", SCORERS)
def test_known_mistakes(accepts: Callable[[str, str], bool], answer: str, truth: str, right: bool) -> None:
    assert accepts(answer, truth) is right


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("1.5 foo is bar", "15 foo is bar", False),
        (r"\Delta \star", r"\delta \star", False),
        ("3 times", "3", True),
        (r"3\text{ times } x", "3", False),
        ("5 more apples", "5", True),
        ("5 or more", "5", False),
        ("a square", "a rectangle", False),
        (r"\{1,2\},\{3\}", r"\{1,2,3\}", False),
        ("2 dollars and 5 cents", r"\$2.05", True),
        (r"\text{2 and 5 cents}", "7 cents", False),
        (r"\{x : x > 2\}", r"(2,\infty)", True),
        (r"(-\infty,\infty) \setminus \{0,1\}", r"x \ne 0 \text{ and } x \ne 1", True),
        (r"\frac{1}{3}=0.33", r"\frac{1}{3}", False),
        (r"x = \sqrt{2} \approx 1.41", r"\sqrt{2}", True),
        (r"\sqrt{2} \approx 1.41", "1.41", True),
        (r"\sqrt{2} \approx 1.43", r"\sqrt{2}", False),
        (r"42 \approx 43", "42", False),
        ("6.2831853", r"2\pi", True),
        ("6.283", r"2\pi", False),
        ("50\\%", "50", True),
        ("1:00", "12:00", False),  # times; as ratios they would be equal
        ("1:05", "3:15", False),
        ("1:00:00", "2:00:00", False),
        ("03:15", "3:15", True),
        ("10:05", "10:05", True),
        ("2:4:6", "1:2:3", True),
        ("2/3 cup", "2/3", True),
        ("2 thirds", "2/3", True),
        ("2 thirds", "2", False),
        (r"5\text{ hundredths}", "5", False),
        ("3 quarters", "3", True),  # coins, games: not a number
        (r"\frac{1}{2}\text{ cup}", "0.5", True),
        ("(1,2) cup (3,4)", r"(1,2) \cup (3,4)", True),
        (r"\mathbf{7}", "7", True),
        ("5 cm^①", "6", False),
        (r"0.1\overline{①}", "0.1", False),
        (r"2e-3\overline{3}", "2", False),
        ("18元。", "18", True),
        ("18万元", "180000", True),
        ("18亿人口", "18", False),
        ("18分之一", "18", False),
        ("1、2", "1,2", True),
        ("3 lakh", "3", False),
        ("(A) and so on", "A", True),
        ("(A) or (B)", "A", False),
        ("(A), (B), (C)", "A", False),
        ("A. B.", "A", False),
    ],
)
def test_words_units_and_sets(answer: str, truth: str, right: bool) -> None:
    assert equal(answer, truth) is right


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("m+n=5", "5", True),  # verl reads what stands behind the last equals sign
        ("a + b + c = 5", "5", True),
        ("AB = 5", "5", True),
        ("|AB| = 5", "5", True),
        ("f(2) = 5", "5", True),
        ("P(X=2) = 0.3", "0.3", True),
        (r"\angle ABC = 60^\circ", "60", True),
        ("100m + n = 205", "205", True),
        ("a^2+b^2=25", "25", True),
        (r"\sin A = \frac{1}{2}", "0.5", True),
        ("f(f(2)) = 5", "5", True),
        ("f^{-1}(2) = 5", "5", True),
        (r"\frac{dy}{dx} = 2x", "2x", True),
        ("a:b = 2:3", "2:3", True),
        ("5 = m+n", "5", True),
        (r"m+n = \boxed{5}", "5", True),
        (r"\boxed{5}\text{ units}", "5", True),
        (r"\boxed{4}\boxed{5}", "20", False),
        ("a^2+b^2=24", "25", False),
        ("5 = x+1", "5", False),
        ("[ABC] = 5", "5", True),
        ("E[X] = 5", "5", True),
        ("4 because 2+3=5", "5", False),
        (r"\frac{1}{2} because 2+3=5", "5", False),
        ("2^n=8", "8", False),
        ("m+n=6", "5", False),
        ("x+1=6", "6", False),  # x is 5
        ("2x=6", "6", False),
        ("x^2=4", "4", False),
        ("5", "m+n=5", False),  # a line
        ("m+n=5", "m-n=5", False),
        ("2m+2n=10", "m+n=5", True),
        ("P(X=2) = 0.3", "P(X=3) = 0.3", False),
    ],
)
def test_an_equation_that_names_what_is_asked_for(answer: str, truth: str, right: bool) -> None:
    assert equal(answer, truth) is right


@pytest.mark.parametrize(
    ("line", "truth", "score"),
    [
        ("Final Answer: The final answer is $5$. I hope it is correct.", "5", 1.0),
        ("Final Answer: The final answer is $6$. I hope it is correct.", "5", -1.0),
        ("Answer: 5</answer>", "5", 1.0),
        ("Answer: 0.333...", "1/3", 1.0),
        ("Answer：$5$", "5", 1.0),
        ("Answer: $m+n=\\boxed{5}$.", "5", 1.0),
        ("Answer: The final answer is $\\boxed{5}$. I hope it is correct.", "5", 1.0),
        ("Answer:\n\\[\n\\boxed{5}\n\\]", "5", 1.0),
        ("Answer: I hope it is correct", "5", -1.0),
    ],
)
def test_words_behind_the_answer_of_dapo(line: str, truth: str, score: float) -> None:
    assert math_dapo.compute_score(line, truth)["score"] == score


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("#### 5</answer>", "5", True),
        ("<answer>#### $5 </answer>", "5", True),
        ("#### 6</answer>", "5", False),
        ("#### 1/2", "1", False),
        ("#### 10^3", "10", False),
        ("#### 42 or 43", "42", False),
        ("####42", "42", True),
        ("#### $42", "42", True),
        ("#### −5", "-5", True),
        ("#### **42**", "42", True),
    ],
)
def test_known_mistakes_of_gsm8k(response: str, truth: str, right: bool) -> None:
    assert by_gsm8k(response, truth) is right


BOMBS = [
    "9^{9^{9^9}}",
    "9^{9^{9^{9^{9^{9^9}}}}}",
    "9^{-9^{9^9}}",
    "(10^{10})!",
    "((((9!)!)!)!)!",
    "9!!!!!!!!",
    r"\binom{10^{12}}{10^{11}}",
    "1e999999999",
    "9" * 900,
    "9" * 100_000,
    "9" * 900 + "^{" + "9" * 90 + "}",
    "(" * 900,
    "(" * 400 + "1" + ")" * 400,
    "{" * 400 + "1" + "}" * 400,
    r"\{" * 24 + "17" + r"\}" * 24,
    r"\{" * 199 + "1" + r"\}" * 199,
    "-" * 900 + "1",
    r"\frac" * 150,
    r"\sqrt" * 180 + "2",
    r"\sin" * 200 + "x",
    "^2" * 400,
    "x" + "^{x" * 200 + "}" * 200,
    "(x+y+z+1)^{100000}",
    "(" + "+".join(f"x_{{{n}}}^{{99}}" for n in range(60)) + ")^{99}",
    "*".join(["(x+1)^{999}"] * 60),
    "+".join(["1/" + "7" * 20] * 40),
    "+".join(f"\\sqrt{{{n}}}" for n in range(2, 90)),
    r"\sin(10^{600})" + r"+\sin(10^{600})" * 20,
    r"\exp(\exp(\exp(\exp(9))))",
    r"\log(\log(\log(10)))",
    "2^{0.123456789012345678901234567890}" * 20,
    "|" * 400,
    ",".join(str(n) for n in range(190)),
    r"\pm" * 200 + "1",
    ",".join([r"\pm 1"] * 100),
    r"\cup".join(f"({n},{n + 1})" for n in range(70)),
    r"\begin{pmatrix}" + "1&" * 200 + r"1\end{pmatrix}",
    "=".join(["1"] * 190),
    "<".join(["x"] * 190),
]


@pytest.mark.parametrize("bomb", BOMBS, ids=range(len(BOMBS)))
def test_a_bomb_is_a_wrong_answer_and_takes_no_time(bomb: str) -> None:
    start = time.thread_time()  # not the wall clock: other processes may have the processor
    for accepts in SCORERS:
        assert accepts(bomb, "17") is False
    assert gsm8k.compute_score(f"#### {bomb}", "17") == 0.0
    assert equal(bomb + " + 1", bomb) is False
    assert time.thread_time() - start < SECONDS * (len(SCORERS) + 2)


PIECES = (
    *(
        "\\frac",
        "\\sqrt",
        "\\boxed{",
        "\\text{",
        "\\mathrm{",
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "\\{",
        "\\}",
        "|",
    ),
    *(
        "^",
        "_",
        "!",
        "%",
        "\\%",
        "=",
        "<",
        "\\le",
        "\\in",
        "\\cup",
        "\\pm",
        ",",
        ";",
        ":",
        ".",
        "...",
        "\\ldots",
    ),
    *(
        "0",
        "1",
        "12",
        "1,000",
        "3.5",
        "1e5",
        "99999",
        "x",
        "y",
        "e",
        "i",
        "\\pi",
        "\\infty",
        "\\sin",
        "\\log_",
    ),
    *(
        "\\overline{3}",
        "0.",
        "^\\circ",
        "cm",
        " or ",
        " and ",
        "million",
        "\\binom",
        "\\lfloor",
        "\\rfloor",
        "&",
    ),
    *(
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "\\\\",
        "$",
        "\\$",
        "€",
        "-",
        "−",
        "+",
        "*",
        "/",
        " ",
        "½",
        "²",
        "\x00",
    ),
    *(
        "\\mathbb{R}",
        "\\emptyset",
        "~",
        "\\",
        "#### ",
        "Answer: ",
        "\ud800",
        "٣",
        "{,}",
        "'",
        "\\over",
        "\\choose",
    ),
)


@pytest.mark.parametrize("seed", range(4))
def test_no_random_text_makes_a_scorer_raise(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(500):
        text = "".join(chance.choice(PIECES) for _ in range(chance.randrange(1, 25)))
        truth = "".join(chance.choice(PIECES) for _ in range(chance.randrange(1, 8)))
        assert compare(text, truth) in ("exact", "approximate", "none")
        assert compare(text, text) == "exact"
        assert math_dapo.compute_score(text, truth)["score"] in (-1.0, 1.0)
        assert math_symbolic.compute_score(text, truth)["score"] in (0.0, 1.0)
        assert gsm8k.compute_score(text, truth, method="flexible") in (0.0, 1.0)
        assert gsm8k.compute_score("#### " + text, truth) in (0.0, 1.0)
        assert isinstance(canonical(text), str)


def test_equality_does_not_depend_on_the_order() -> None:
    for probe in ANSWERS:
        if probe.kind != "multiple choice":  # "(A) 5" answers A; A does not answer "(A) 5"
            assert equal(probe.answer, probe.truth) == equal(probe.truth, probe.answer), probe


def test_verl_reads_the_last_box_with_a_brace() -> None:
    for strict in (False, True):
        found = math_dapo.compute_score("\\boxed{3}\\boxed ", "3", strict_box_verify=strict, compat="verl")
        assert found == {"score": 1.0, "acc": True, "pred": "3"}


@pytest.mark.parametrize(
    ("source", "text", "truth", "default", "verl"),
    [
        ("gsm8k", "#### 42 or 43", "42", 0.0, 1.0),
        ("lighteval/MATH", "\\boxed{0.25}", "1/4", 1.0, 0.0),
        ("math_dapo", "\\boxed{0.25}", "1/4", 1.0, -1.0),
        ("arithmetic", "42", "42", 1.0, 1.0),
    ],
)
def test_compat_reaches_the_scorers(source: str, text: str, truth: str, default: float, verl: float) -> None:
    sample = RewardSample(trajectory(text, source=source, truth=truth), text, {})
    for compat, expected in ((None, default), ("strop", default), ("openrlhf", default), ("verl", verl)):
        for result in (RuleScorer(compat=compat)(sample), score_response(source, text, truth, compat=compat)):
            if isinstance(result, dict):
                result = result["score"]
            assert result == expected


def test_geo3k_compares_by_value() -> None:
    assert geo3k.accuracy(r"\boxed{3\mathrm{i}}", "3") == 0.0
    assert geo3k.accuracy(r"\boxed{\sqrt{8}}", r"2\sqrt{2}") == 1.0
    assert geo3k.accuracy(r"\boxed{12\text{ cm}}", "12") == 1.0


def test_a_number_of_many_digits_has_a_vote() -> None:
    text = r"1500! \cdot 2^{5000}"  # more digits than Python writes
    assert canonical(text) == text.replace(" ", "")
    assert math_dapo.compute_score(f"Answer: {text}", "5")["score"] == -1.0


def test_equal_answers_are_one_vote() -> None:
    assert boxed("\\boxed{0.5}") == boxed("\\boxed{\\frac12}") == boxed("\\boxed{x=2/4}") == "1/2"
    assert boxed("\\boxed{1,2}") != boxed("\\boxed{12}")
    assert number("#### $1,200.50") == number("#### 1200.5") != number("#### 1/2")
