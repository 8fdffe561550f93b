"""Format rewards: they check the structure and the length of a response, not its content."""

from __future__ import annotations

from collections.abc import Callable

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer_format(solution_str: str) -> float:
    """Return 1 if the response is <think>...</think><answer>...</answer>, each once, with nothing outside."""
    text = solution_str.strip()
    positions = [text.find(tag) for tag in TAGS]
    if any(text.count(tag) != 1 for tag in TAGS) or positions != sorted(positions):
        return 0.0
    between = text[positions[1] + len("</think>") : positions[2]]
    whole = text.startswith("<think>") and text.endswith("</answer>") and not between.strip()
    return float(whole)


def think_boxed_format(solution_str: str) -> float:
    """Return 1 if the response starts with <think>, closes it, and then has a boxed answer; else 0."""
    if not solution_str.startswith("<think>"):
        return 0.0
    closed = solution_str.find("</think>")
    if closed < 0:
        return 0.0
    boxed = solution_str.find("\\boxed{", closed)
    return float(boxed >= 0 and solution_str.find("}", boxed) >= 0)


def length_format(solution_str: str, *, min_chars: int = 0, max_chars: int | None = None) -> float:
    """Return 1 inside the bounds; outside, the ratio to the bound (a text twice too long scores 0.5)."""
    length = len(solution_str)
    if max_chars is not None and max_chars < min_chars:
        raise ValueError(f"max_chars={max_chars} is below min_chars={min_chars}.")
    if length < min_chars:
        return length / min_chars
    if max_chars is None or length <= max_chars:
        return 1.0
    return max_chars / length


def no_format(solution_str: str) -> float:
    """Return 1 for every response."""
    return 1.0


STYLES: dict[str, Callable[[str], float]] = {
    "think_answer": think_answer_format,
    "think_boxed": think_boxed_format,
    "free": no_format,
}


def compute_score(
    solution_str: str,
    ground_truth: object = None,
    *,
    style: str = "think_answer",
    min_chars: int = 0,
    max_chars: int | None = None,
) -> float:
    """Return the format score of `style` (a key of STYLES) times the length score; the ground truth is not
    read."""
    if style not in STYLES:
        raise ValueError(f"The format styles are {sorted(STYLES)}, not {style!r}.")
    return STYLES[style](solution_str) * length_format(solution_str, min_chars=min_chars, max_chars=max_chars)
