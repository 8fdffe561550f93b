"""The last line is the answer, and it must be the number."""

from __future__ import annotations

from typing import Any


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, float]:
    right = float(solution_str.rpartition("\n")[2].strip() == str(ground_truth))
    return {"score": right, "acc": right, "called": float("<tool_call>" in solution_str)}
