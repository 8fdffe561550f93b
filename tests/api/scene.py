"""A tiny run from Python."""

from __future__ import annotations

from pathlib import Path

SMALL: dict[str, object] = {
    "max_prompt_length": 8,
    "max_response_length": 4,
    "batch_size": 4,
    "n": 2,
    "lr": 1e-3,
    "enable_gradient_checkpointing": False,
    "progress": False,
    "logger": "file",
}
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(4)]


def small(task: Path, place: Path, more: dict[str, object]) -> dict[str, object]:
    """Arguments of a run of two steps."""
    given = {"model": str(task / "model"), "train": ROWS, "folder": str(place), "steps": 2}
    return {**given, **SMALL, **more}


def digits(completion: str, answer: str, **row: object) -> float:
    """A reward that varies with the sample."""
    return sum(letter in answer for letter in completion) / 4
