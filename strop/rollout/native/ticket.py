"""A request on its way through the engine, and the completions it has so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from strop.rollout.base import Completion, Request


@dataclass(eq=False)
class Ticket:
    number: int
    request: Request
    seed: int
    on_done: Callable[[Ticket], None] | None = None
    error: BaseException | None = None
    """Why the engine could not go on; completions are missing then."""
    _found: dict[int, Completion] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.error is not None or len(self._found) == self.request.n

    def deliver(self, index: int, completion: Completion) -> None:
        self._found[index] = completion
        self._tell()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._tell()

    def _tell(self) -> None:
        if self.done and self.on_done is not None:
            self.on_done(self)

    def result(self) -> list[Completion]:
        """The completions in order, or the error that ended the engine's work."""
        if self.error is not None:
            raise self.error
        assert self.done
        return [self._found[index] for index in range(self.request.n)]
