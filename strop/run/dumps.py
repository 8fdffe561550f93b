"""Rollouts as text: one JSON line per response in `<folder>/<step>.jsonl`.

The first columns are verl's: input, output, gts, score, step. Then come the columns that the scorer or the
agent loop reported, then Strop's, which say where a response came from. A column that only some responses
have is null in the rest. Multi-turn conversations have their turns under `messages`, and the first of them
are also written as text in `<folder>/<step>.txt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from strop.run.atomic_files import to_json, write_file
from strop.types import Trajectory

Decode = Callable[[list[int]], str]
MAX_TRANSCRIPTS = 32
"""Conversations of a step that are written as text."""


def dump(folder: str | Path, step: int, rows: Iterable[Mapping[str, object]]) -> Path:
    """Write the rows of a step; a file of an earlier attempt at this step is replaced."""
    target = Path(folder) / f"{step}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.new")
    try:
        write_file(temporary, (to_json(row).encode() + b"\n" for row in rows))
        return temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def rollout_rows(trajectories: Sequence[Trajectory], *, step: int, decode: Decode) -> list[dict[str, object]]:
    """Rows for `dump`; `decode` turns tokens into text, without special tokens as in verl.

    A key of the scorer or the agent replaces Strop's column of the same name, and never one of verl's.
    """
    reported: dict[str, None] = {}
    for trajectory in trajectories:
        reported.update(dict.fromkeys(trajectory.extras))
    has_turns = any(trajectory.turns for trajectory in trajectories)
    rows = []
    for trajectory in trajectories:
        first: dict[str, object] = {
            "input": decode(trajectory.prompt.ids),
            "output": decode(trajectory.response),
            "gts": trajectory.prompt.ground_truth,
            "score": trajectory.reward,
            "step": step,
        }
        extras = {key: trajectory.extras.get(key) for key in reported}
        origin = _origin(trajectory)
        for key in reported:
            origin.pop(key, None)
        if has_turns:
            origin["messages"] = messages_of(trajectory, decode) if trajectory.turns else None
        rows.append({**first, **extras, **origin, **first})
    return rows


def messages_of(trajectory: Trajectory, decode: Decode) -> list[dict[str, object]]:
    """The turns after the prompt: role, text, number of tokens, and the reward of the turn where it has
    one."""
    messages = []
    for turn in trajectory.turns:
        message: dict[str, object] = {
            "role": turn.role,
            "content": decode(trajectory.response[turn.start : turn.end]),
            "tokens": turn.end - turn.start,
        }
        if turn.end - 1 in trajectory.turn_rewards:
            message["reward"] = trajectory.turn_rewards[turn.end - 1]
        messages.append(message)
    return messages


def write_transcripts(
    folder: str | Path, step: int, trajectories: Sequence[Trajectory], *, decode: Decode
) -> Path | None:
    """Write the first multi-turn conversations as text; None where there are none."""
    chosen = [t for t in trajectories if len(t.turns) > 1][:MAX_TRANSCRIPTS]
    if not chosen:
        return None
    target = Path(folder) / f"{step}.txt"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_file(target, (_transcript(t, decode).encode(errors="replace") for t in chosen))
    return target


def _transcript(trajectory: Trajectory, decode: Decode) -> str:
    prompt = trajectory.prompt
    ended = trajectory.extras.get("stopped", trajectory.finish)
    reward = "failed" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    lines = [
        f"===== row {prompt.index} of {prompt.data_source}: {reward}, {ended}",
        f"[prompt]\n{decode(prompt.ids)}",
    ]
    for message in messages_of(trajectory, decode):
        earned = f" ({message['reward']:+g})" if "reward" in message else ""
        lines.append(f"[{message['role']}]{earned}\n{message['content']}")
    return "\n".join(lines) + "\n\n"


def _origin(trajectory: Trajectory) -> dict[str, object]:
    """Strop's own columns: where a response comes from."""
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
