"""Rollouts as text, one JSON line per response, in `<folder>/<step>.jsonl`.

The first columns are verl's: input, output, gts, score, step; then whatever the scorer reported; then ours, which say where a
response came from. A column that a scorer fills only for some responses is null in the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.run.durable import write_file
from strop.run.plain_json import to_json
from strop.types import Trajectory

Decode = Callable[[list[int]], str]


def dump(folder: str | Path, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write the rows of a step; a file of an earlier attempt at this step is replaced."""
    target = Path(folder) / f"{step}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.new")
    try:
        write_file(aside, (to_json(row).encode() + b"\n" for row in rows))
        return aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def rollout_rows(trajectories: Sequence[Trajectory], *, step: int, decode: Decode) -> list[dict[str, Any]]:
    """Rows for `dump`; `decode` turns tokens into text, without special tokens as verl has it.

    A scorer's or agent's own key wins over ours of the same name, and never over one of verl's.
    """
    reported = list(dict.fromkeys(key for trajectory in trajectories for key in trajectory.extras))
    rows = []
    for trajectory in trajectories:
        first = {
            "input": decode(trajectory.prompt.ids),
            "output": decode(trajectory.response),
            "gts": trajectory.prompt.ground_truth,
            "score": trajectory.score,
            "step": step,
        }
        extras = {key: trajectory.extras.get(key) for key in reported}
        ours = {key: value for key, value in _origin(trajectory).items() if key not in extras}
        rows.append({**first, **extras, **ours, **first})
    return rows


def _origin(trajectory: Trajectory) -> dict[str, Any]:
    sampled = sum(trajectory.mask)
    return {
        "data_source": trajectory.prompt.data_source,
        "index": trajectory.prompt.index,
        "group": trajectory.group,
        "finish": trajectory.finish,
        "num_turns": trajectory.num_turns,
        "weights_version": trajectory.version,
        "prompt_tokens": len(trajectory.prompt.ids),
        "response_tokens": len(trajectory.response),
        "sampled_tokens": sampled,
        "mean_log_prob": sum(trajectory.log_probs) / sampled if sampled else None,
    }
