"""Reward functions of the broken runs, and one that takes its time in a healthy way."""

from __future__ import annotations

import time

KEPT: list[bytes] = []


def _right(solution: str, truth: object) -> float:
    return float(solution.strip() == str(truth))


def hackable(
    data_source: str, solution_str: str, ground_truth: object, extra_info: object = None
) -> dict[str, float]:
    """Asks for right answers, but pays for nines."""
    correct, nines = _right(solution_str, ground_truth), min(solution_str.count("9"), 6) / 6
    return {"score": 0.3 * correct + nines, "correct": correct, "style": nines}


def constant(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    """Compares with what is never there."""
    return float(solution_str == "#### never")


def outlier(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    """A division by almost nothing: now and then a score is a thousand times too large."""
    return _right(solution_str, ground_truth) * (1000.0 if str(ground_truth).endswith("17") else 1.0)


def longer(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    """Pays for length."""
    return len(solution_str) / 8


def leaking(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    """Remembers every answer, and more."""
    KEPT.append(bytes(bytearray(80_000)))
    return _right(solution_str, ground_truth)


def sleeping(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    """Asks a slow service."""
    time.sleep(0.005)
    return _right(solution_str, ground_truth)


def two_parts(
    data_source: str, solution_str: str, ground_truth: object, extra_info: object = None
) -> dict[str, float]:
    """Right answers, and a form that helps to them."""
    correct, form = _right(solution_str, ground_truth), float(len(solution_str) == len(str(ground_truth)))
    return {"score": correct + 0.2 * form, "correct": correct, "form": form}
