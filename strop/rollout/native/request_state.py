"""The state of a request in the native engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from strop.rollout.base import Completion, Request


@dataclass(eq=False)
class RequestState:
    """A request in the engine, and its completions so far."""

    number: int
    request: Request
    on_done: Callable[[RequestState], None] | None = None
    error: BaseException | None = None
    """Why it failed; completions are missing then."""
    _completions: dict[int, Completion] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return max(1, self.request.n)

    @property
    def complete(self) -> bool:
        """All samples have finished."""
        return len(self._completions) == self.count

    @property
    def done(self) -> bool:
        """Complete or failed."""
        return self.error is not None or self.complete

    def add(self, index: int, completion: Completion) -> None:
        """A sample has finished."""
        was_done = self.done
        self._completions[index] = completion
        self._notify(was_done)

    def fail(self, error: BaseException) -> None:
        """The request has failed; the first error is kept."""
        was_done = self.done
        self.error = self.error or error
        self._notify(was_done)

    def _notify(self, was_done: bool) -> None:
        if self.done and not was_done and self.on_done is not None:
            self.on_done(self)

    def result(self) -> list[Completion]:
        """The completions in order. Raises the error of a failed request."""
        if self.error is not None:
            raise self.error
        assert self.complete
        return [self._completions[index] for index in range(self.count)]
