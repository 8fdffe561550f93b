"""Which parts of a model are saved and loaded: model, optimizer, extra (schedule, random states) and
hf_model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from strop.registry import did_you_mean
from strop.run.checkpoint.tensor_files import Tree

CONTENTS = ("model", "optimizer", "extra", "hf_model")


def check_contents(contents: Sequence[str], *, key: str) -> None:
    """Refuse names that are no part of a model's checkpoint; `key` is the setting that has them."""
    for name in contents:
        if name not in CONTENTS:
            raise ValueError(
                f"{key} names {name!r}.{did_you_mean(name, CONTENTS)} Known: {', '.join(CONTENTS)}."
            )


def role_parts(role: str, state: Mapping[str, Tree], contents: Sequence[str]) -> dict[str, Tree]:
    """The chosen parts of one model's state: `model`, `optimizer`, and the rest together as `extra`.

    >>> role_parts("actor", {"model": {}, "optimizer": {}, "schedule": {"step": 3}}, ["model", "extra"])
    {'actor/model': {}, 'actor/extra': {'schedule': {'step': 3}}}
    """
    check_contents(contents, key=f"{role}.checkpoint.save_contents")
    extra = {name: tree for name, tree in state.items() if name not in ("model", "optimizer")}
    parts: dict[str, Tree] = {}
    for name in ("model", "optimizer"):
        if name in state and name in contents:
            parts[f"{role}/{name}"] = state[name]
    if "extra" in contents:
        parts[f"{role}/extra"] = extra
    return parts


def role_state(role: str, parts: Mapping[str, Tree], contents: Sequence[str]) -> dict[str, Tree]:
    """The inverse of `role_parts`, for those contents that are to be loaded."""
    check_contents(contents, key=f"{role}.checkpoint.load_contents")
    state: dict[str, Tree] = {}
    for name in contents:
        if name == "hf_model":  # written for other libraries, never read back
            continue
        part = f"{role}/{name}"
        if part not in parts:
            raise ValueError(
                f"The checkpoint has no {part!r}, it has {', '.join(sorted(parts)) or 'nothing'}. Take "
                f"{name!r} out of {role}.checkpoint.load_contents, or resume from a checkpoint that was "
                "saved with it."
            )
        if name == "extra":
            state |= parts[part]
        else:
            state[name] = parts[part]
    return state


def part_selector(contents: Mapping[str, Sequence[str]]) -> Callable[[str], bool]:
    """A test for the parts to read: of the roles in `contents` only what is listed, of everything else all.

    >>> wanted = part_selector({"actor": ["model"]})
    >>> [wanted(part) for part in ("actor/model", "actor/optimizer", "data")]
    [True, False, True]
    """

    def wanted(part: str) -> bool:
        role, _, name = part.partition("/")
        return role not in contents or name not in CONTENTS or name in contents[role]

    return wanted
