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


def small(task: Path, folder: Path, **more: object) -> dict[str, object]:
    """Arguments of a run of two steps."""
    return {"model": str(task / "model"), "train": ROWS, "folder": str(folder), "steps": 2, **SMALL, **more}


def digits(completion: str, answer: str, **row: object) -> float:
    """A reward that varies with the sample."""
    return sum(letter in answer for letter in completion) / 4
