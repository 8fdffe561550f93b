"""Changes to modules that can be undone and done again: what a patch (models/patches.py) consists of.

They refer to modules weakly: the record of what was applied must not keep a module alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Protocol

from torch import nn


class Change(Protocol):
    """One change to a module. It can be undone, and done again."""

    def do(self) -> None: ...

    def undo(self) -> None: ...

    def can_undo(self) -> bool: ...


def undo_changes(changes: Sequence[Change]) -> None:
    """Undo changes, the last one first."""
    for change in reversed(changes):
        change.undo()


def done(changes: Iterable[Change]) -> list[Change]:
    """Make these changes, each as it is found, and return them."""
    made = []
    for change in changes:
        change.do()
        made.append(change)
    return made


def subclass(own: type[nn.Module], forward: Callable[..., object], mark: str) -> type[nn.Module]:
    """The class `own` with another forward, for `SetClass`. It keeps its name; `mark` is set to true."""
    attributes = {
        "forward": forward,
        mark: True,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
    }
    return type(own.__name__, (own,), attributes)


def evaluating(own: type[nn.Module]) -> type[nn.Module]:
    """The class `own` that computes as in evaluation also in a model that trains, for `SetClass`. It keeps
    its name."""

    def remember(module: nn.Module, mode: bool) -> None:
        vars(module)["training"] = mode  # what the module says when the change is undone

    attributes = {
        "training": property(lambda module: False, remember),
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
    }
    return type(own.__name__, (own,), attributes)


class SetAttribute:
    """An attribute of one module (or Python module), instead of what its class says."""

    def __init__(self, owner: nn.Module | ModuleType, name: str, value: object) -> None:
        self._owner = weakref.ref(owner)
        self.name = name
        self.value = value
        self._had = False
        self._before: object = None

    def do(self) -> None:
        owner = self._owner()
        self._had = self.name in vars(owner)
        self._before = vars(owner).get(self.name)
        setattr(owner, self.name, self.value)

    def undo(self) -> None:
        owner = self._owner()
        if owner is None:
            return
        if self._had:
            setattr(owner, self.name, self._before)
        else:
            vars(owner).pop(self.name, None)

    def can_undo(self) -> bool:
        return True


class SetClass:
    """The class of one module."""

    def __init__(self, owner: nn.Module, value: type[nn.Module]) -> None:
        self._owner = weakref.ref(owner)
        self.value = value
        self._before = type(owner)

    def do(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner.__class__ = self.value

    def undo(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner.__class__ = self._before

    def can_undo(self) -> bool:
        """Not after FSDP2 has made a subclass of the class."""
        owner = self._owner()
        return owner is None or type(owner) is self.value
