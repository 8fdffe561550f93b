"""Rewards for the shape of a response, whatever it says."""

from __future__ import annotations

from typing import Any


def think_answer_format(solution_str: str) -> float:
    """1 if the response is exactly <think>...</think> then <answer>...</answer>, each once and nothing outside, else 0."""
    text = solution_str.strip()
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    places = [text.find(tag) for tag in tags]
    if any(text.count(tag) != 1 for tag in tags) or places != sorted(places):
        return 0.0
    between = text[places[1] + len("</think>") : places[2]]
    whole = text.startswith("<think>") and text.endswith("</answer>") and not between.strip()
    return float(whole)


def think_boxed_format(solution_str: str) -> float:
    """1 if the response opens with <think>, closes it, and then boxes an answer, else 0."""
    closed = solution_str.find("</think>") if solution_str.startswith("<think>") else -1
    boxed = solution_str.find("\\boxed{", closed) if closed >= 0 else -1
    return float(boxed >= 0 and solution_str.find("}", boxed) >= 0)


def length_format(solution_str: str, *, min_chars: int = 0, max_chars: int | None = None) -> float:
    """1 inside the bounds; outside them the share of the bound that is kept (a text twice too long scores a half)."""
    length = len(solution_str)
    if max_chars is not None and max_chars < min_chars:
        raise ValueError(f"max_chars={max_chars} is below min_chars={min_chars}.")
    if length < min_chars:
        return length / min_chars
    return 1.0 if max_chars is None or length <= max_chars else max_chars / length


def compute_score(
    solution_str: str,
    ground_truth: Any = None,
    *,
    style: str = "think_answer",
    min_chars: int = 0,
    max_chars: int | None = None,
) -> float:
    """The format of `style` ("think_answer", "think_boxed" or "free"), times the length score; the ground truth is not read."""
    styles = {"think_answer": think_answer_format, "think_boxed": think_boxed_format, "free": lambda _: 1.0}
    if style not in styles:
        raise ValueError(f"The format styles are {sorted(styles)}, not {style!r}.")
    return styles[style](solution_str) * length_format(solution_str, min_chars=min_chars, max_chars=max_chars)
