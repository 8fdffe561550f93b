"""What travels through a run: prompts, trajectories, batches. Tokens are the only currency; text is made of them, never back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, rendered.

    Example: Prompt(index=7, ids=[1, 4093, 198], messages=[{"role": "user", "content": "2+2?"}], data_source="arithmetic",
    ground_truth="4")
    """

    index: int
    """Row number in the data set; the same prompt keeps it over epochs and runs."""
    ids: list[int]
    """Tokens of the rendered prompt, generation prefix included."""
    messages: list[dict[str, Any]]
    """The conversation before the first answer, as role and content."""
    data_source: str
    """Chooses the scorer, and groups validation metrics."""
    ground_truth: Any = None
    """What the scorer compares with."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Handed to the scorer, tools and interactions as it is."""
    agent_name: str | None = None
    """Which agent loop answers; None: the configured default."""
    images: list[Any] = field(default_factory=list)
    """Images in the order of their placeholders."""
