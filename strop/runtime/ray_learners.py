"""Learners as Ray actors. One that dies is not made again: the run goes on from its checkpoint, with new ones."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from strop.runtime.learners import Learner, Make
from strop.runtime.ray_frozen import address_of, named_actors
from strop.runtime.ray_pool import cluster_of

SETTLE = 5.0
"""Seconds in which a learner's death must be known after another has complained of it."""


class LearnerLost(Exception):
    """A learner is gone, and with it a part of its model."""


@contextmanager
def learners_of(
    role: str,
    make: Make,
    places: Sequence[dict[str, Any]],
    seats: Sequence[tuple[str, str]],
    namespace: str,
    limit: float,
) -> Iterator[dict[str, str]]:
    """A learner at each of `places` (options of its actor) while the block lasts; yields what ranks must know. `seats`: the
    address of each one's machine, and its number there."""
    with named_actors(role, Learner, make, places, namespace, limit, "machine") as (ray, actors, variables):
        meeting = {
            "WORLD_SIZE": str(len(actors)),
            "MASTER_ADDR": seats[0][0],
            "MASTER_PORT": str(ray.get(actors[0].free_port.remote())),
        }
        ray.get(
            [
                actor.settle.remote(os.getcwd(), address, {"RANK": str(rank), "LOCAL_RANK": local, **meeting})
                for rank, (actor, address, local) in enumerate(
                    (actor, *seat) for actor, seat in zip(actors, seats, strict=True)
                )
            ]
        )
        yield variables


class RayLearners:
    """The `Team` of runtime/learners.py, in a rank."""

    def __init__(self, role: str, key: str) -> None:
        address, namespace, names = address_of(role, key)
        self._ray, self._role = cluster_of(address, namespace), role
        self._actors = [self._ray.get_actor(name, namespace=namespace) for name in names]
        self._machines: list[tuple[str, int]] = self._ray.get([actor.machine.remote() for actor in self._actors])

    def ask(self, method: str, *arguments: Any) -> Any:
        """What is asked lies in the object store once, however many learners there are."""
        failures = self._ray.exceptions
        try:
            box = self._ray.put(arguments)
        except failures.ObjectStoreFullError as error:
            raise ValueError(
                f"The object store of Ray has no room for a batch on its way to the {self._role}. Start Ray with a larger "
                "--object-store-memory, or lower data.train_batch_size."
            ) from error
        asked = {actor.do.remote(method, box): number for number, actor in enumerate(self._actors)}
        answers: dict[int, Any] = {}
        problem: Exception | None = None
        waiting, deadline = dict(asked), float("inf")
        while waiting and time.monotonic() < deadline:
            done, _ = self._ray.wait(list(waiting), timeout=None if problem is None else SETTLE)
            for one in done:
                number = waiting.pop(one)
                try:
                    answers[number] = self._ray.get(one)
                except failures.RayActorError as error:
                    raise self._lost(number, error) from error
                except failures.RayTaskError as error:
                    problem = problem or error.cause or error
                    deadline = min(deadline, time.monotonic() + SETTLE)
        if problem is not None:
            raise problem
        return answers[0]

    def _lost(self, number: int, error: Exception) -> LearnerLost:
        host, pid = self._machines[number]
        return LearnerLost(
            f"Learner {number} of {len(self._actors)} of the {self._role} (host {host}, process {pid}) is gone, and what it "
            f"had learnt since the last checkpoint with it: {' '.join(str(error).split())[-300:]}"
        )
