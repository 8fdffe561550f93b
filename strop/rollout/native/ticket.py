"""A request on its way through the engine, and the completions it has so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from strop.rollout.base import Completion, Request


@dataclass(eq=False)
class Ticket:
    number: int
    request: Request
    on_done: Callable[[Ticket], None] | None = None
    error: BaseException | None = None
    """Why it could not go on; completions are missing then."""
    _found: dict[int, Completion] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return max(1, self.request.n)

    @property
    def complete(self) -> bool:
        """All completions are there."""
        return len(self._found) == self.count

    @property
    def done(self) -> bool:
        """Whoever waits need not wait any longer."""
        return self.error is not None or self.complete

    def deliver(self, index: int, completion: Completion) -> None:
        before = self.done
        self._found[index] = completion
        self._tell(before)

    def fail(self, error: BaseException) -> None:
        before = self.done
        self.error = self.error or error
        self._tell(before)

    def _tell(self, before: bool) -> None:
        if self.done and not before and self.on_done is not None:
            self.on_done(self)

    def result(self) -> list[Completion]:
        """The completions in order, or the error that ended the work on them."""
        if self.error is not None:
            raise self.error
        assert self.complete
        return [self._found[index] for index in range(self.count)]
