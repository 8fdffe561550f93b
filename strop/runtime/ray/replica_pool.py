"""Rollout replicas as Ray actors, and the actor that manages them.

The manager starts the replicas, keeps the current weights and restarts replicas that died. The current
weights are in the object store (or in files): each machine fetches a bucket once, and its replicas read it
without a copy. When memory is short, Ray spills them to disk.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from strop.rollout.base import Completion, EngineDied, Request, Sampling
from strop.runtime.ray.connection import ActorHandle, ObjectRef, connect_to_cluster, future_of, ray_module
from strop.runtime.rollout_replica import ReplicaSpec, RolloutReplica
from strop.runtime.weight_broadcast import Rendezvous
from strop.runtime.weight_transports import Reference

POOL = "STROP_ROLLOUT_POOL"
"""Environment variable that tells ranks where the replicas are: cluster, namespace, name of the manager."""
POLL_SECONDS = 0.1
"""Seconds between two questions whether a replica can be restarted."""
MAX_STARTS = 3
"""Times in a row that a replica may die before it is ready."""

Incarnation = tuple[int, ActorHandle]
"""How often a replica was restarted, and its current actor."""
StoredBucket = tuple[Reference, str]
"""A reference to the object store or the path of a file, and the contents of the bucket."""


class ReplicaManager:
    """The actor that manages the replicas. It runs one call after the other."""

    def __init__(self, spec: ReplicaSpec, places: Sequence[Mapping[str, Any]], timeout: float) -> None:
        """`places`: the actor options of each replica. `timeout`: seconds in which a replica must start."""
        self._ray = ray_module("A pool of rollout replicas")
        self._spec = spec
        self._places = places
        self._timeout = timeout
        self._buckets: list[StoredBucket] = []
        self._version = 0
        self._update_running = False
        """Whether weights are on their way that a restarted replica must not miss."""
        self._why_no_copy = ""
        """Why there is no copy of the current weights."""
        self._deaths = 0
        self._given_up: dict[int, str] = {}
        """Replicas that could not be restarted, and why. Requests to their last actor would wait for ever."""
        self._incarnations = [0] * len(places)
        self._replicas: list[ActorHandle] = []

    def start(self) -> None:
        """Start the replicas, and return when they are ready."""
        self._replicas = [self._start_replica(number) for number in range(len(self._places))]
        self._ray.get([replica.ready.remote() for replica in self._replicas])

    def _start_replica(self, number: int) -> ActorHandle:
        remote = self._ray.remote(RolloutReplica).options(**self._places[number])
        actor: ActorHandle = remote.remote(self._spec)
        return actor

    def handles(self) -> list[Incarnation]:
        """Return incarnation and actor of each replica."""
        return list(zip(self._incarnations, self._replicas, strict=True))

    def deaths(self) -> int:
        """Return how many replicas have died so far."""
        return self._deaths

    def restart(self, number: int, incarnation: int) -> Incarnation | None:
        """Restart a replica after the death of this incarnation, unless it was done already.

        None while the weights that the replica needs are on their way.
        """
        if number in self._given_up:
            raise EngineDied(self._given_up[number])
        if incarnation == self._incarnations[number]:
            if self._update_running:
                return None
            if self._why_no_copy:
                raise EngineDied(
                    f"Replica {number} died, and there are no weights for another: {self._why_no_copy}"
                )
            self._replace(number)
        return self._incarnations[number], self._replicas[number]

    def _replace(self, number: int) -> None:
        errors = self._ray.exceptions
        for start in range(MAX_STARTS):
            self._deaths += 1
            self._incarnations[number] += 1
            self._ray.kill(self._replicas[number])
            self._replicas[number] = self._start_replica(number)
            try:
                self._load_current_weights(self._replicas[number])
                return
            except errors.GetTimeoutError as error:
                self._given_up[number] = (
                    f"Replica {number} died, and the cluster had no place for another within "
                    f"trainer.ray_wait_register_center_timeout={self._timeout:g} s."
                )
                raise EngineDied(self._given_up[number]) from error
            except errors.RayActorError as error:
                if start + 1 == MAX_STARTS:
                    self._given_up[number] = (
                        f"Replica {number} died {MAX_STARTS} times before it was ready: {error}"
                    )
                    raise EngineDied(self._given_up[number]) from error

    def _load_current_weights(self, replica: ActorHandle) -> None:
        self._ray.get(replica.ready.remote(), timeout=self._timeout)
        for box, contents in self._buckets:
            self._ray.get(replica.load.remote(box, contents, self._version))
        self._ray.get(replica.set_version.remote(self._version))

    def load(self, box: Sequence[Reference], contents: str, version: int, first: bool, last: bool) -> None:
        """Load a bucket into all replicas. `box` holds its reference, so the bytes do not pass this actor."""
        if first:
            self._buckets = []
            self._why_no_copy = ""
        self._buckets.append((box[0], contents))
        self._version = version
        calls = [replica.load.remote(box[0], contents, version) for replica in self._replicas]
        for number, call in enumerate(calls):
            try:
                self._ray.get(call)
            except self._ray.exceptions.RayActorError:
                if last:  # before the last bucket, a new replica would miss a part
                    self._replace(number)
        self._update_running = not last

    def begin_update(self, version: int) -> list[Incarnation]:
        """Weights travel past this actor; until `keep_copy` it restarts no replica."""
        self._update_running = True
        return self.handles()

    def keep_copy(self, buckets: Sequence[StoredBucket], version: int, why_not: str) -> None:
        """Keep the weights that all replicas have now. References inside a list stay references."""
        self._buckets = list(buckets)
        self._version = version
        self._why_no_copy = why_not
        self._update_running = False

    def set_version(self, version: int) -> None:
        """Set the version of the weights of all replicas."""
        self._version = version
        self._ray.get([replica.set_version.remote(version) for replica in self._replicas])


class RayReplicaPool:
    """The `ReplicaPool` of replica_engine.py and the `WeightReceivers` of weight_transports.py, in a rank."""

    def __init__(self, location: str) -> None:
        """`location`: the value of the variable POOL."""
        address, namespace, name = location.split(" ")
        self._ray = connect_to_cluster(address, namespace)
        self._manager: ActorHandle = self._ray.get_actor(name, namespace=namespace)
        self._handles: list[Incarnation] = self._ray.get(self._manager.handles.remote())
        self._load_threads = ThreadPoolExecutor(2, thread_name_prefix="weights")
        self.size = len(self._handles)

    # --- requests -------------------------------------------------------------------------------------------

    def generate(self, number: int, request: Request, sampling: Sampling) -> Future[list[Completion]]:
        def died(error: BaseException) -> EngineDied:
            return EngineDied(f"Replica {number} is gone: {error}")

        _, replica = self._handles[number]
        return future_of(self._ray, replica.generate.remote(request, sampling), died)

    def _get(self, call: ObjectRef) -> Any:
        """The result of a call of the manager. Why it gave a replica up is raised without Ray's stacks."""
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EngineDied):
                raise error.cause from None
            raise

    def incarnation(self, number: int) -> int:
        return self._handles[number][0]

    def wait_for_restart(self, number: int, incarnation: int) -> None:
        while incarnation == self._handles[number][0]:
            restarted = self._get(self._manager.restart.remote(number, incarnation))
            if restarted is None:
                time.sleep(POLL_SECONDS)
            else:
                self._handles[number] = restarted

    def abort(self, number: int) -> None:
        _, replica = self._handles[number]
        try:
            self._ray.get(replica.abort.remote())
        except self._ray.exceptions.RayActorError:
            return  # its requests are sent again to the restarted replica

    # --- weights --------------------------------------------------------------------------------------------

    def put(self, memory: np.ndarray) -> ObjectRef:
        try:
            reference: ObjectRef = self._ray.put(memory)
            return reference
        except self._ray.exceptions.ObjectStoreFullError as error:
            raise ValueError(
                f"The object store of Ray has no room for {memory.nbytes >> 20} MiB of weights. Lower "
                "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes, or start Ray "
                "with a larger --object-store-memory."
            ) from error

    def load(self, box: Reference, contents: str, version: int) -> Future[None]:
        table = json.loads(contents)
        call = self._manager.load.remote([box], contents, version, table["first"], table["last"])
        return self._load_threads.submit(self._get, call)

    def begin_update(self, version: int) -> list[int]:
        handles: list[Incarnation] = self._ray.get(self._manager.begin_update.remote(version))
        for number, handle in enumerate(handles):
            if handle[0] >= self._handles[number][0]:
                self._handles[number] = handle
        return [incarnation for incarnation, _ in handles]

    def keep_copy(self, buckets: Sequence[StoredBucket], version: int, why_not: str = "") -> None:
        self._ray.get(self._manager.keep_copy.remote(list(buckets), version, why_not))

    def address(self) -> str:
        node_id = self._ray.get_runtime_context().get_node_id()
        own = next(node for node in self._ray.nodes() if node["NodeID"] == node_id)
        return str(own["NodeManagerAddress"])

    def join(self, number: int, rendezvous: Rendezvous) -> Future[None]:
        _, replica = self._handles[number]
        return replica.join.remote(rendezvous, number + 1).future()

    def receive(self, number: int, version: int) -> Future[None]:
        _, replica = self._handles[number]
        return replica.receive.remote(version).future()

    def set_version(self, version: int) -> None:
        self._ray.get(self._manager.set_version.remote(version))

    # --- the rest -------------------------------------------------------------------------------------------

    def replaced(self) -> int:
        return int(self._ray.get(self._manager.deaths.remote()))

    def close(self) -> None:
        self._load_threads.shutdown(wait=False, cancel_futures=True)


def connect_replica_pool() -> RayReplicaPool:
    """Return the replicas that the launcher of this rank has started."""
    location = os.environ.get(POOL)
    if location is None:
        raise ValueError(
            "actor_rollout_ref.rollout.nnodes asks for replicas on machines of their own, which `strop ppo` "
            "starts with trainer.runtime=ray. Set that, or rollout.nnodes=0."
        )
    return RayReplicaPool(location)
