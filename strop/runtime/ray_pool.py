"""Replicas as Ray actors, and the actor that keeps them: it starts them, remembers the current weights, and replaces the dead.

The current weights lie in the object store (or in files), where each machine fetches a bucket once and its replicas read it
without a copy; when memory is short Ray moves them to the disk.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from strop.extras import require
from strop.rollout.base import Completion, EngineDied, Request, Sampling
from strop.runtime.broadcast import Meeting
from strop.runtime.replica import Recipe, Replica

POOL = "STROP_ROLLOUT_POOL"
"""Tells ranks where the replicas of their run are: address of the cluster, namespace, name."""
LOOK = 0.1
"""Seconds between two questions whether a replica can be replaced."""
MOST_STARTS = 3
"""Times in a row that a replica may die before it was ready."""


def ray_library() -> Any:
    return require("ray", extra="ray", why="A pool of rollout replicas")


def cluster_of(address: str, namespace: str) -> Any:
    """Ray, connected to the cluster that this rank's starter uses."""
    ray = ray_library()
    if not ray.is_initialized():
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    return ray


class Keeper:
    """An actor; one call after the other."""

    def __init__(self, recipe: Recipe, places: Sequence[dict[str, Any]], limit: float) -> None:
        """`places`: the options of each replica's actor. `limit`: seconds in which one must come up."""
        self._ray = ray_library()
        self._recipe, self._places, self._limit = recipe, places, limit
        self._buckets: list[tuple[Any, str]] = []
        self._version = 0
        self._expected = False
        """Whether weights are on their way that a successor must not miss."""
        self._why_not = ""
        """Why there is no copy of the current weights."""
        self._deaths = 0
        self._lives = [0] * len(places)
        self._replicas = [self._new(number) for number in range(len(places))]
        self._ray.get([replica.ready.remote() for replica in self._replicas])

    def _new(self, number: int) -> Any:
        return self._ray.remote(Replica).options(**self._places[number]).remote(self._recipe)

    def handles(self) -> list[tuple[int, Any]]:
        """Life and handle of each replica."""
        return list(zip(self._lives, self._replicas, strict=True))

    def deaths(self) -> int:
        return self._deaths

    def mend(self, number: int, life: int) -> tuple[int, Any] | None:
        """The successor of a replica whose `life` has ended; many may ask for it. None while the weights it needs are on their
        way."""
        if life == self._lives[number]:
            if self._expected:
                return None
            if self._why_not:
                raise EngineDied(f"Replica {number} died, and there are no weights for another: {self._why_not}")
            self._replace(number)
        return self._lives[number], self._replicas[number]

    def _replace(self, number: int) -> None:
        for start in range(MOST_STARTS):
            self._deaths += 1
            self._lives[number] += 1
            self._ray.kill(self._replicas[number])
            self._replicas[number] = self._new(number)
            try:
                self._ray.get(self._replicas[number].ready.remote(), timeout=self._limit)
                for box, contents in self._buckets:
                    self._ray.get(self._replicas[number].load.remote(box, contents, self._version))
                self._ray.get(self._replicas[number].stamp.remote(self._version))
                return
            except self._ray.exceptions.GetTimeoutError as error:
                raise EngineDied(
                    f"Replica {number} died, and the cluster had no place for another within "
                    f"trainer.ray_wait_register_center_timeout={self._limit:g} s."
                ) from error
            except self._ray.exceptions.RayActorError as error:
                if start + 1 == MOST_STARTS:
                    raise EngineDied(f"Replica {number} died {MOST_STARTS} times before it was ready: {error}") from error

    def load(self, box: Sequence[Any], contents: str, version: int, first: bool, last: bool) -> None:
        """A bucket for all. `box` holds its reference, so that it does not travel by this actor."""
        if first:
            self._buckets, self._why_not = [], ""
        self._buckets.append((box[0], contents))
        self._version = version
        asked = [replica.load.remote(box[0], contents, version) for replica in self._replicas]
        for number, done in enumerate(asked):
            try:
                self._ray.get(done)
            except self._ray.exceptions.RayActorError:
                if last:  # until then its successor would lack a part
                    self._replace(number)
        self._expected = not last

    def expect(self, version: int) -> list[tuple[int, Any]]:
        """Weights are on their way to the replicas, which this actor will know of later; until then it replaces none."""
        self._expected = True
        return self.handles()

    def keep(self, buckets: Sequence[tuple[Any, str]], version: int, why_not: str) -> None:
        """The weights that all replicas have now; references inside of something arrive as such."""
        self._buckets, self._version, self._why_not = list(buckets), version, why_not
        self._expected = False

    def stamp(self, version: int) -> None:
        self._version = version
        self._ray.get([replica.stamp.remote(version) for replica in self._replicas])


class RayPool:
    """The `Pool` of runtime/replicas.py, in a rank."""

    def __init__(self, where: str) -> None:
        address, namespace, name = where.split(" ")
        self._ray = cluster_of(address, namespace)
        self._keeper = self._ray.get_actor(name, namespace=namespace)
        self._handles: list[tuple[int, Any]] = self._ray.get(self._keeper.handles.remote())
        self._waiters = ThreadPoolExecutor(2, thread_name_prefix="weights")
        self.size = len(self._handles)

    def ask(self, number: int, request: Request, sampling: Sampling) -> Future[list[Completion]]:
        answer: Future[list[Completion]] = Future()

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            elif isinstance(error, self._ray.exceptions.RayActorError):
                answer.set_exception(EngineDied(f"Replica {number} is gone: {error}"))
            else:
                answer.set_exception(error)

        self._handles[number][1].ask.remote(request, sampling).future().add_done_callback(settle)
        return answer

    def life(self, number: int) -> int:
        return self._handles[number][0]

    def mend(self, number: int, life: int) -> None:
        while life == self._handles[number][0]:
            found = self._ray.get(self._keeper.mend.remote(number, life))
            if found is None:
                time.sleep(LOOK)
            else:
                self._handles[number] = found

    def store(self, memory: np.ndarray) -> Any:
        try:
            return self._ray.put(memory)
        except self._ray.exceptions.ObjectStoreFullError as error:
            raise ValueError(
                f"The object store of Ray has no room for {memory.nbytes >> 20} MiB of weights. Lower "
                "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes, or start Ray with a larger "
                "--object-store-memory."
            ) from error

    def load(self, box: Any, contents: str, version: int) -> Future[Any]:
        table = json.loads(contents)
        done = self._keeper.load.remote([box], contents, version, table["first"], table["last"])
        return self._waiters.submit(self._ray.get, done)

    def expect(self, version: int) -> list[int]:
        found = self._ray.get(self._keeper.expect.remote(version))
        self._handles = [max(pair, key=lambda handle: handle[0]) for pair in zip(found, self._handles, strict=True)]
        return [life for life, _ in found]

    def keep(self, buckets: Sequence[tuple[Any, str]], version: int, why_not: str = "") -> None:
        self._ray.get(self._keeper.keep.remote(list(buckets), version, why_not))

    def address(self) -> str:
        here = self._ray.get_runtime_context().get_node_id()
        return str(next(node["NodeManagerAddress"] for node in self._ray.nodes() if node["NodeID"] == here))

    def join(self, number: int, meeting: Meeting) -> Future[Any]:
        asked: Future[Any] = self._handles[number][1].join.remote(meeting, number + 1).future()
        return asked

    def receive(self, number: int, version: int) -> Future[Any]:
        asked: Future[Any] = self._handles[number][1].receive.remote(version).future()
        return asked

    def stamp(self, version: int) -> None:
        self._ray.get(self._keeper.stamp.remote(version))

    def abort(self, number: int) -> None:
        try:
            self._ray.get(self._handles[number][1].abort.remote())
        except self._ray.exceptions.RayActorError:
            return  # what it was asked is asked again of its successor

    def replaced(self) -> int:
        return int(self._ray.get(self._keeper.deaths.remote()))

    def close(self) -> None:
        self._waiters.shutdown(wait=False, cancel_futures=True)


def pool_of_this_run() -> RayPool:
    """The replicas that whoever started this rank has prepared."""
    where = os.environ.get(POOL)
    if where is None:
        raise ValueError(
            "actor_rollout_ref.rollout.nnodes asks for replicas on machines of their own, which `strop ppo` starts with "
            "trainer.runtime=ray. Set that, or rollout.nnodes=0."
        )
    return RayPool(where)
