"""Copies of frozen models as Ray actors. Ray itself makes a copy again that died, and asks it again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from strop.runtime.frozen import Frozen
from strop.runtime.ray_pool import cluster_of, ray_library

MOST_RETRIES = 10
"""Deaths of copies that one question survives: it may be the one that kills them."""


class CopiesLost(Exception):
    """Copies of a frozen model die faster than they can be made."""


def variable(role: str) -> str:
    """Tells ranks where the copies are: address of the cluster, namespace, name, number."""
    return f"STROP_{role.upper()}_POOL"


@contextmanager
def copies_of(
    role: str, make: Callable[[], Any], places: Sequence[dict[str, Any]], namespace: str, limit: float
) -> Iterator[dict[str, str]]:
    """A copy of the model at each of `places` (options of its actor) while the block lasts; yields what ranks must know."""
    again = {"max_restarts": -1, "max_task_retries": MOST_RETRIES}
    places = [{**place, **again} for place in places]
    with named_actors(role, Frozen, make, places, namespace, limit, "ready") as (_, _, variables):
        yield variables


@contextmanager
def named_actors(
    role: str, kind: type, make: Any, places: Sequence[dict[str, Any]], namespace: str, limit: float, ready: str
) -> Iterator[tuple[Any, list[Any], dict[str, str]]]:
    """Actors that ranks find by name; each is there when its method `ready` has answered."""
    ray = ray_library()
    name = f"{role}-{os.getpid()}-{time.monotonic_ns()}"
    remote = ray.remote(kind)
    actors = [
        remote.options(name=f"{name}-{number}", namespace=namespace, **place).remote(make)
        for number, place in enumerate(places)
    ]
    try:
        ray.get([getattr(actor, ready).remote() for actor in actors], timeout=limit)
    except ray.exceptions.GetTimeoutError:
        raise ValueError(
            f"The {role} model did not come up on its machines within trainer.ray_wait_register_center_timeout={limit:g} s."
        ) from None
    address = ray.get_runtime_context().gcs_address
    yield ray, actors, {variable(role): f"{address} {namespace} {name} {len(actors)}"}
    for actor in actors:  # after an error they end with their places
        ray.kill(actor)


def address_of(role: str, key: str) -> tuple[str, str, list[str]]:
    """Cluster, namespace and names of the actors that whoever started this rank has prepared; `key` asked for them."""
    where = os.environ.get(variable(role))
    if where is None:
        raise ValueError(
            f"{key} asks for a {role} model on machines of its own, which `strop ppo` starts with trainer.runtime=ray. Set "
            "that, or leave the key out."
        )
    address, namespace, name, size = where.split(" ")
    return address, namespace, [f"{name}-{number}" for number in range(int(size))]


class RayCopies:
    """The `Copies` of runtime/frozen.py, in a rank."""

    def __init__(self, role: str, key: str) -> None:
        address, namespace, names = address_of(role, key)
        self._ray = cluster_of(address, namespace)
        self._role, self.size = role, len(names)
        self._actors = [self._ray.get_actor(name, namespace=namespace) for name in names]

    def ask(self, number: int, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            elif isinstance(error, self._ray.exceptions.RayActorError):
                answer.set_exception(CopiesLost(f"Copy {number} of the {self._role} model is gone: {error}"))
            else:
                answer.set_exception(error)

        getattr(self._actors[number], method).remote(*arguments).future().add_done_callback(settle)
        return answer
