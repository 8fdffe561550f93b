"""Models on their own machines as Ray actors: copies of frozen models, and training workers.

Ray itself restarts a copy that died and repeats its calls. A training worker that dies is not restarted: the
attempt ends, and the run goes on from its checkpoint with new workers.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from strop.runtime.ray.connection import (
    ActorHandle,
    connect_to_cluster,
    future_of,
    ray_module,
    short_error,
)
from strop.runtime.remote_backend import BackendFactory, RankWorker, TrainingWorker
from strop.runtime.remote_models import FrozenModel, ServedModel

MAX_TASK_RETRIES = 10
"""Deaths of copies that one call survives: the call itself may be what kills them."""
DEATH_NOTICE_SECONDS = 5.0
"""Seconds in which the death of a worker must be known after another worker has failed because of it."""

ActorOptions = Mapping[str, Any]
"""Options of one actor: its resources and its bundle."""


class ModelCopyLost(Exception):
    """Copies of a frozen model die faster than they can be restarted."""


class TrainingWorkerLost(Exception):
    """A training worker is gone, and with it a part of its model."""


# --- starting actors (in the driver) ------------------------------------------------------------------------


@contextmanager
def start_model_copies(
    role: str,
    make_model: Callable[[], ServedModel],
    places: Sequence[ActorOptions],
    namespace: str,
    timeout: float,
) -> Iterator[dict[str, str]]:
    """Run a copy of the model at each of `places` while the block lasts; yields variables for the ranks."""
    restarts = {"max_restarts": -1, "max_task_retries": MAX_TASK_RETRIES}
    places = [{**place, **restarts} for place in places]
    arguments = [make_model, os.getcwd()]
    with named_actors(role, FrozenModel, arguments, places, namespace, timeout, "ready") as (_, variables):
        yield variables


@contextmanager
def start_training_workers(
    role: str,
    make_backend: BackendFactory | None,
    places: Sequence[ActorOptions],
    seats: Sequence[tuple[str, str]],
    namespace: str,
    timeout: float,
    worker: type[RankWorker] = TrainingWorker,
) -> Iterator[dict[str, str]]:
    """Run a training worker at each of `places` while the block lasts; yields variables for the ranks.

    `seats`: the address of each worker's machine, and its local rank there. `worker`: the class of the
    actors.
    """
    ray = ray_module()
    arguments = [] if make_backend is None else [make_backend]
    started = named_actors(role, worker, arguments, places, namespace, timeout, "machine")
    with started as (actors, variables):
        shared = {
            "WORLD_SIZE": str(len(actors)),
            "MASTER_ADDR": seats[0][0],
            "MASTER_PORT": str(ray.get(actors[0].free_port.remote())),
        }
        calls = []
        for rank, (actor, (address, local_rank)) in enumerate(zip(actors, seats, strict=True)):
            environment = {"RANK": str(rank), "LOCAL_RANK": local_rank, **shared}
            calls.append(actor.set_environment.remote(os.getcwd(), address, environment))
        ray.get(calls)
        yield variables


@contextmanager
def named_actors(
    role: str,
    actor_class: type,
    arguments: Sequence[object],
    places: Sequence[ActorOptions],
    namespace: str,
    timeout: float,
    ready: str,
) -> Iterator[tuple[list[ActorHandle], dict[str, str]]]:
    """Start actors that ranks find by name; each has started when its method `ready` returns."""
    ray = ray_module()
    name = f"{role}-{os.getpid()}-{time.monotonic_ns()}"
    remote = ray.remote(actor_class)
    actors: list[ActorHandle] = []
    for number, place in enumerate(places):
        options = remote.options(name=f"{name}-{number}", namespace=namespace, **place)
        actors.append(options.remote(*arguments))
    try:
        ray.get([getattr(actor, ready).remote() for actor in actors], timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        raise ValueError(
            f"The {role} model did not come up on its machines within "
            f"trainer.ray_wait_register_center_timeout={timeout:g} s."
        ) from None
    address = ray.get_runtime_context().gcs_address
    yield actors, {role_variable(role): f"{address} {namespace} {name} {len(actors)}"}
    for actor in actors:  # after an error they end when their resources are released
        ray.kill(actor)


# --- finding actors (in a rank) -----------------------------------------------------------------------------


def role_variable(role: str) -> str:
    """Return the variable that tells ranks where the actors are: cluster, namespace, name, number."""
    return f"STROP_{role.upper()}_POOL"


def connect_to_actors(
    role: str, key: str, variables: Mapping[str, str] = os.environ
) -> tuple[ModuleType, list[ActorHandle]]:
    """Return Ray and the actors that the launcher of this rank has started; `key` of the configuration asked
    for them."""
    value = variables.get(role_variable(role))
    if value is None:
        raise ValueError(
            f"{key} asks for a {role} model on machines of its own, which `strop ppo` starts with "
            "trainer.runtime=ray. Set that, or leave the key out."
        )
    address, namespace, name, size = value.split(" ")
    ray = connect_to_cluster(address, namespace)
    actors = [ray.get_actor(f"{name}-{number}", namespace=namespace) for number in range(int(size))]
    return ray, actors


class RayModelCopies:
    """The `ModelCopies` of runtime/remote_models.py, in a rank."""

    def __init__(self, role: str, key: str) -> None:
        self._role = role
        self._ray, self._actors = connect_to_actors(role, key)
        self.size = len(self._actors)

    def call(self, number: int, method: str, *arguments: object) -> Future[Any]:
        """Call a method of one copy."""

        def lost(error: BaseException) -> ModelCopyLost:
            return ModelCopyLost(f"Copy {number} of the {self._role} model is gone: {error}")

        reference = getattr(self._actors[number], method).remote(*arguments)
        return future_of(self._ray, reference, lost)


class RayTrainingWorkers:
    """The `TrainingWorkers` of runtime/remote_backend.py, in a rank."""

    def __init__(self, role: str, key: str, variables: Mapping[str, str] = os.environ) -> None:
        """`variables` say where the workers are."""
        self._role = role
        self._ray, self._actors = connect_to_actors(role, key, variables)
        machines = self._ray.get([actor.machine.remote() for actor in self._actors])
        self.machines: list[tuple[str, int]] = machines
        """Host and process id of each worker."""
        self.unanswered: list[int] = []
        """Workers that the latest call gave up waiting for, because another one had failed."""
        self.first_failed = 0
        """The worker that failed first in the latest call that failed."""

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of every worker and return the result of the first one.

        The arguments are put into the object store once, for any number of workers.
        """
        errors = self._ray.exceptions
        try:
            box = self._ray.put(arguments)
        except errors.ObjectStoreFullError as error:
            raise ValueError(
                f"The object store of Ray has no room for a batch on its way to the {self._role}. Start Ray "
                "with a larger --object-store-memory, or lower data.train_batch_size."
            ) from error
        waiting = {actor.run_method.remote(method, box): number for number, actor in enumerate(self._actors)}
        results: dict[int, Any] = {}
        failure: Exception | None = None
        deadline = math.inf
        # A worker often fails because another one died. The death is the better message, so it gets a moment.
        while waiting and time.monotonic() < deadline:
            timeout = None if failure is None else DEATH_NOTICE_SECONDS
            done, _ = self._ray.wait(list(waiting), timeout=timeout)
            for reference in done:
                number = waiting.pop(reference)
                try:
                    results[number] = self._ray.get(reference)
                except errors.RayActorError as error:
                    raise self._lost(number, error) from error
                except errors.RayTaskError as error:
                    if failure is None:
                        failure = error.cause or error
                        self.first_failed = number
                    deadline = min(deadline, time.monotonic() + DEATH_NOTICE_SECONDS)
        self.unanswered = sorted(waiting.values())
        if failure is not None:
            raise failure
        return results[0]

    def _lost(self, number: int, error: Exception) -> TrainingWorkerLost:
        host, pid = self.machines[number]
        return TrainingWorkerLost(
            f"Training worker {number} of {len(self._actors)} of the {self._role} (host {host}, process "
            f"{pid}) is gone, and its updates since the last checkpoint are lost: "
            f"{short_error(error)}"
        )
