"""The window: prompts that were drawn and are being answered, oldest first.

A step takes what it trains on from the front, always in the order in which it was drawn: long answers are never passed over in
favour of short ones, and a prompt's answers are as old as its place in the window allows and no older. How far drawing may run
ahead of training is counted from the latest weights of the engine. With nothing ahead, answers are made in the caller's thread,
one draw after the other: the synchronous loop.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from strop.agents.episode import Episode
from strop.ranks import Ranks
from strop.rollout.interruptible import Interruptible
from strop.types import Prompt, Trajectory

Draw = Callable[[], list[Prompt]]
"""The next prompts of the training data."""
Numbered = tuple[int, Prompt]
"""A prompt and its number among those of a step."""

FAREWELL_SECONDS = 20.0
"""For threads to notice that the run is over; they are daemons, so nothing waits for them longer."""


@dataclass
class Answers:
    """What was sampled for some prompts; no scores yet."""

    trajectories: list[Trajectory] = field(default_factory=list)
    greedy: list[Trajectory] = field(default_factory=list)
    """One greedy answer each, where an estimator wants a baseline."""
    episodes: list[Episode] = field(default_factory=list)

    def __add__(self, other: Answers) -> Answers:
        return Answers(self.trajectories + other.trajectories, self.greedy + other.greedy, self.episodes + other.episodes)


class Work(Protocol):
    """Who answers prompts."""

    ranks: Ranks

    def share(self, numbered: Sequence[Numbered]) -> list[Numbered]:
        """What this rank answers of them; the same moment on all ranks."""
        ...

    def answer(self, numbered: Sequence[Numbered], step: int) -> Answers:
        """Here, without a word to other ranks, in any thread."""
        ...


@dataclass(eq=False)
class Order:
    """Prompts that were drawn together, and the work on their answers."""

    step: int
    """Whose random streams they use."""
    first: int
    """Number of the first of them."""
    prompts: list[Prompt]
    draws: int
    """Calls of the loader they took."""
    mine: list[Numbered]
    begun: int = 0
    """How many of the prompts are being answered."""
    pieces: list[Future[Answers]] = field(default_factory=list)

    @property
    def waiting(self) -> int:
        return len(self.prompts) - self.begun

    def next(self, count: int) -> list[Numbered]:
        """Of the next `count` prompts, those of this rank."""
        start, self.begun = self.first + self.begun, min(len(self.prompts), self.begun + count)
        return [(number, prompt) for number, prompt in self.mine if start <= number < self.first + self.begun]


@dataclass(eq=False)
class Window:
    between_updates: int = 0
    """Prompts that may be begun from one weight update of the engine to the next. 0: each when a step asks for it."""
    last_step: int | None = None
    """Nothing is begun for steps after this one."""
    engine: Interruptible | None = None
    """Through which answers are made in threads; None: in the caller's."""
    beside: bool = False
    """Sampling goes on while the models learn; else it is stopped between two steps."""
    used: Callable[[int], None] = lambda draws: None
    """Told how many draws a step has taken."""

    _orders: deque[Order] = field(default_factory=deque)
    _numbers: Counter[int] = field(default_factory=Counter)
    """Prompts ordered so far, by the step whose streams they use."""
    _taken: int = 0
    """Prompts that were handed to steps."""
    _begun: int = 0
    _allowed: int = -1
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.published()
        if self.engine is not None and not self.beside:
            self.engine.stop()

    def published(self) -> None:
        """The engine has new weights: the window moves on."""
        self._allowed = self._taken + self.between_updates

    @property
    def ahead(self) -> int:
        """Prompts whose answers are under way, or wait to be trained on."""
        return self._begun - self._taken

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """Around a step's sampling. Where models and engine share weights or memory, nothing is sampled outside of it."""
        if self.engine is None or self.beside:
            yield
            return
        self.engine.go()
        yield
        self.engine.stop()  # not after a failure: whoever closes the window ends what is running, and does not wait for long

    def take(self, draw: Draw, prompts: int, step: int, work: Work) -> tuple[Order, Answers]:
        """The oldest order of at least `prompts` prompts, answered (on this rank: its share)."""
        if not self._orders:
            self._orders.append(self._order(draw, prompts, step, work))
        order = self._orders[0]
        self._begin(order, order.waiting, work)
        self._fill(draw, prompts, step, work)
        answers = work.ranks.together(lambda: self._whole(order), "sampling")
        self._orders.popleft()
        self._numbers = Counter({whose: count for whose, count in self._numbers.items() if whose >= step})
        self._taken += len(order.prompts)
        self.used(order.draws)
        return order, answers

    def close(self) -> bool:
        """End all threads, and return even if the engine does not; whether all of them ended."""
        if self.engine is not None:
            self.engine.end()
        deadline = time.monotonic() + FAREWELL_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._orders.clear()
        return not any(thread.is_alive() for thread in self._threads)

    # --- running ahead ---------------------------------------------------------------------------------------------------

    def _fill(self, draw: Draw, prompts: int, step: int, work: Work) -> None:
        """Begin what may be begun under the weights of now."""
        while (room := self._allowed - self._begun) > 0:
            order = next((order for order in self._orders if order.waiting), None)
            if order is None:
                whose = step + len(self._orders)
                if self.last_step is not None and whose > self.last_step:
                    return
                order = self._order(draw, prompts, whose, work)
                self._orders.append(order)
            self._begin(order, min(room, order.waiting), work)

    def _order(self, draw: Draw, prompts: int, step: int, work: Work) -> Order:
        drawn: list[Prompt] = []
        draws = 0
        while len(drawn) < prompts:
            drawn += draw()
            draws += 1
        first = self._numbers[step]
        self._numbers[step] += len(drawn)
        return Order(step, first, drawn, draws, work.share(list(enumerate(drawn, first))))

    def _begin(self, order: Order, count: int, work: Work) -> None:
        if count == 0:
            return
        self._begun += count
        mine = order.next(count)
        if mine:
            order.pieces.append(self._started(lambda: work.answer(mine, order.step), f"strop-window-{order.step}"))

    def _started(self, make: Callable[[], Answers], name: str) -> Future[Answers]:
        future: Future[Answers] = Future()
        cores = torch.get_num_threads()

        def run() -> None:
            try:
                future.set_result(make())
            except BaseException as error:  # noqa: BLE001 - raised again where the answers are waited for
                future.set_exception(error)

        def run_in_thread() -> None:
            torch.set_num_threads(cores)  # threads begin with the machine's number; sums over other pieces have other last bits
            run()

        if self.engine is None:
            run()
            return future
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=run_in_thread, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return future

    def _whole(self, order: Order) -> Answers:
        """The answers of an order. A failure anywhere in the window is everybody's."""
        pieces: list[Future[Any]] = [piece for other in self._orders for piece in other.pieces]
        while True:
            for piece in pieces:
                if piece.done():
                    piece.result()
            if all(piece.done() for piece in order.pieces):
                return sum((piece.result() for piece in order.pieces), Answers())
            wait([piece for piece in pieces if not piece.done()], return_when=FIRST_COMPLETED)
