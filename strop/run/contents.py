"""What of a model goes into a checkpoint and comes back: model, optimizer, extra and hf_model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from strop.registry import did_you_mean
from strop.run.tree import Tree

CONTENTS = ("model", "optimizer", "extra", "hf_model")


def check_contents(contents: Sequence[str], *, key: str) -> None:
    for name in contents:
        if name not in CONTENTS:
            raise ValueError(f"{key} names {name!r}.{did_you_mean(name, CONTENTS)} Known: {', '.join(CONTENTS)}.")


def role_parts(role: str, state: Mapping[str, Tree], contents: Sequence[str]) -> dict[str, Tree]:
    """The wanted parts of one model's state: `model` and `optimizer` each, and the rest together as `extra`.

    >>> role_parts("actor", {"model": {}, "optimizer": {}, "schedule": {"step": 3}}, ["model", "extra"])
    {'actor/model': {}, 'actor/extra': {'schedule': {'step': 3}}}
    """
    check_contents(contents, key=f"{role}.checkpoint.save_contents")
    rest = {name: tree for name, tree in state.items() if name not in ("model", "optimizer")}
    pieces = {name: state[name] for name in ("model", "optimizer") if name in state} | {"extra": rest}
    return {f"{role}/{name}": tree for name, tree in pieces.items() if name in contents}


def role_state(role: str, parts: Mapping[str, Tree], contents: Sequence[str]) -> dict[str, Tree]:
    """The inverse of `role_parts`, for those contents that are to be loaded."""
    check_contents(contents, key=f"{role}.checkpoint.load_contents")
    state: dict[str, Tree] = {}
    for name in (name for name in contents if name != "hf_model"):
        part = f"{role}/{name}"
        if part not in parts:
            raise ValueError(
                f"The checkpoint has no {part!r}, it has {', '.join(sorted(parts)) or 'nothing'}. "
                f"Take {name!r} out of {role}.checkpoint.load_contents, or resume from a checkpoint that was saved with it."
            )
        state |= parts[part] if name == "extra" else {name: parts[part]}
    return state


def selector(contents: Mapping[str, Sequence[str]]) -> Callable[[str], bool]:
    """Which parts to read: of the roles in `contents` only what is listed, of everything else all.

    >>> wanted = selector({"actor": ["model"]})
    >>> [wanted(part) for part in ("actor/model", "actor/optimizer", "data")]
    [True, False, True]
    """

    def wanted(part: str) -> bool:
        role, _, name = part.partition("/")
        return role not in contents or name not in CONTENTS or name in contents[role]

    return wanted
