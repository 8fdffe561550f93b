"""Rollouts as text, one JSON line per response, in `<folder>/<step>.jsonl`.

The first columns are verl's: input, output, gts, score, step; then whatever the scorer or the agent loop reported; then ours,
which say where a response came from. A column that is filled only for some responses is null in the others. Conversations of
several turns have their turns under `messages`, and some of them are written out for reading in `<folder>/<step>.txt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.run.durable import write_file
from strop.run.plain_json import to_json
from strop.types import Trajectory

Decode = Callable[[list[int]], str]
WRITTEN_OUT = 32
"""Conversations of a step that are written out for reading."""


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
    conversations = any(trajectory.turns for trajectory in trajectories)
    rows = []
    for trajectory in trajectories:
        first = {
            "input": decode(trajectory.prompt.ids),
            "output": decode(trajectory.response),
            "gts": trajectory.prompt.ground_truth,
            "score": trajectory.reward,
            "step": step,
        }
        extras = {key: trajectory.extras.get(key) for key in reported}
        ours = {key: value for key, value in _origin(trajectory).items() if key not in extras}
        if conversations:
            ours["messages"] = messages_of(trajectory, decode) if trajectory.turns else None
        rows.append({**first, **extras, **ours, **first})
    return rows


def messages_of(trajectory: Trajectory, decode: Decode) -> list[dict[str, Any]]:
    """The turns after the prompt: role, text, number of tokens, and what was earned there."""
    rewards = trajectory.turn_rewards
    return [
        {
            "role": turn.role,
            "content": decode(trajectory.response[turn.start : turn.end]),
            "tokens": turn.end - turn.start,
            **({"reward": rewards[turn.end - 1]} if turn.end - 1 in rewards else {}),
        }
        for turn in trajectory.turns
    ]


def write_transcripts(folder: str | Path, step: int, trajectories: Sequence[Trajectory], *, decode: Decode) -> Path | None:
    """The first conversations of several turns as a text to read; None where there are none."""
    chosen = [t for t in trajectories if len(t.turns) > 1][:WRITTEN_OUT]
    if not chosen:
        return None
    target = Path(folder) / f"{step}.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_file(target, (_written_out(t, decode).encode(errors="replace") for t in chosen))
    return target


def _written_out(trajectory: Trajectory, decode: Decode) -> str:
    prompt, reward = trajectory.prompt, trajectory.reward
    ended = trajectory.extras.get("stopped", trajectory.finish)
    earned = "failed" if reward is None else f"reward {reward:g}"
    lines = [f"===== row {prompt.index} of {prompt.data_source}: {earned}, {ended}", f"[prompt]\n{decode(prompt.ids)}"]
    for turn in messages_of(trajectory, decode):
        earned = f" ({turn['reward']:+g})" if "reward" in turn else ""
        lines.append(f"[{turn['role']}]{earned}\n{turn['content']}")
    return "\n".join(lines) + "\n\n"


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
