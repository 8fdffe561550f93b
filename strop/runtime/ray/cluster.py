"""A run on a Ray cluster: it reserves machines, starts the remote roles and the ranks, and watches them.

Ranks talk to each other as on one machine (gloo, NCCL), so batches never pass through the driver. An actor
per rank (rank_launcher.py) starts the rank as a subprocess.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from strop.config.derived import device_count, replica_count, resource_pools
from strop.config.schema.ppo import PpoConfig
from strop.config.schema.supervised import DpoConfig, RmConfig, SftConfig
from strop.errors import CRASHED
from strop.run.heartbeat import workers_folder
from strop.runtime.failure import MACHINE_LOST, RankFailure
from strop.runtime.ray.connection import (
    ActorHandle,
    ClusterHead,
    ClusterLost,
    ObjectRef,
    PlacementGroup,
    kept_signal_handlers,
    ray_module,
    short_error,
)
from strop.runtime.ray.model_actors import start_model_copies, start_training_workers
from strop.runtime.ray.placement import (
    DeviceSection,
    RayPlacement,
    check_machines,
    forwarded_environment,
    local_paths,
)
from strop.runtime.ray.rank_launcher import Machine, RankLauncher, RankWatcher, package_versions
from strop.runtime.ray.replica_pool import POOL, ReplicaManager
from strop.runtime.remote_backend import BackendFactory, RankWorker
from strop.runtime.remote_models import ServedModel
from strop.runtime.rollout_replica import ReplicaSpec

NAMESPACE = "strop"
POOL_SECTIONS = {
    "rollout": "actor_rollout_ref.rollout",
    "reference": "actor_rollout_ref.ref",
    "teacher": "algorithm.distillation",
    "critic": "critic",
    "reward": "reward_model",
}
"""Where the configuration asks for machines of a role."""
MAX_CONCURRENT_REQUESTS = 10_000
"""Requests that a replica accepts at once; its engine queues them."""
LAUNCHER_CONCURRENCY = 4
"""A launcher waits for its rank while other calls fetch output and stop it."""


class RayCluster:
    """A connection to a cluster, or a cluster of this machine alone, for as long as the block lasts."""

    def __init__(
        self,
        config: PpoConfig | SftConfig | RmConfig | DpoConfig,
        tree: Mapping[str, object],
        replica_spec: ReplicaSpec | None = None,
        frozen_models: Mapping[str, Callable[[], ServedModel]] | None = None,
        trained_models: Mapping[str, BackendFactory] | None = None,
    ) -> None:
        """`tree`: the configuration as plain values. `replica_spec`: of rollout replicas on their own
        machines. `frozen_models` and `trained_models`: factories of models on their own machines, by role."""
        self._config = config
        self._tree = tree
        self._replica_spec = replica_spec
        self._frozen_models = frozen_models or {}
        self._trained_models = trained_models or {}
        self._trainer = config.trainer
        self._directory = Path(config.trainer.default_local_dir).expanduser().absolute()
        self.world_size = device_count(config.trainer)
        self._ray = ray_module()
        self._placement = RayPlacement(self._ray, config.trainer)

    # --- the connection -------------------------------------------------------------------------------------

    def __enter__(self) -> RayCluster:
        arguments = {k: v for k, v in self._config.ray_kwargs.ray_init.items() if v is not None}
        named = arguments.pop("address", None) or os.environ.get("RAY_ADDRESS")
        default = "auto" if self._trainer.nnodes > 1 else "local"
        address = str(named or default)
        self._placement.private_cluster = address == "local"
        arguments.setdefault("log_to_driver", False)
        arguments.setdefault("logging_level", logging.WARNING)
        if self._placement.private_cluster:
            arguments.setdefault("include_dashboard", False)
            if not self._placement.on_gpus():
                devices = self.world_size + sum(map(device_count, resource_pools(self._config).values()))
                arguments.setdefault("num_cpus", max(devices, os.cpu_count() or 1))
        else:
            arguments.pop("num_cpus", None)  # Ray accepts it only when it starts a cluster
        try:
            if re.fullmatch(r"[^/]+:\d+", address):
                ClusterHead(address).connect()  # fails at once; Ray itself retries for minutes
            with kept_signal_handlers():
                self._ray.init(address=address, **arguments)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise ValueError(
                f"Cannot reach a Ray cluster at {address}: {' '.join(str(error).split())[:400]} Start one "
                "with `ray start`, name it in ray_kwargs.ray_init.address, and use the same RAY_AUTH_MODE "
                "everywhere."
            ) from error
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ClusterLost):
            sys.stderr.write(f"strop: error: {error}\n")
            sys.stderr.flush()
            # Ray would wait a minute for its head, and then end this process without a message.
            os._exit(CRASHED)
        timeline = self._config.ray_kwargs.timeline_json_file
        if timeline and self._ray.is_initialized():
            self._ray.timeline(filename=timeline)
        self._ray.shutdown()

    # --- one attempt ----------------------------------------------------------------------------------------

    def run(self, program: str, arguments: Sequence[str]) -> RankFailure | None:
        """Run all ranks once; the failure that came first, or None."""
        errors = self._ray.exceptions
        try:
            with (
                self._placement.reserve(self._trainer, "trainer") as group,
                self._start_replicas(group) as replica_variables,
                self._start_models() as model_variables,
            ):
                launchers = self._start_launchers(group)
                machines = self._check_machines(launchers, group)
                variables = {**replica_variables, **model_variables}
                runs = self._start_ranks(launchers, machines, program, arguments, variables)
                grace = self._trainer.grace_seconds
                return RankWatcher(self._ray, launchers, machines, runs, grace).watch()
        except errors.RayActorError as error:
            if error.actor_init_failed:  # it would fail again
                raise _cannot_start(error) from error
            # A machine was lost before its rank had started.
            return RankFailure(0, self.world_size, MACHINE_LOST, detail=short_error(error))
        except errors.RayError as error:
            raise _cannot_start(error) from error

    def _start_launchers(self, group: PlacementGroup) -> list[ActorHandle]:
        """Start an actor for every rank, on the rank's machine."""
        remote = self._ray.remote(RankLauncher)
        launchers = []
        for rank in range(self.world_size):
            options = self._placement.actor_options(group, rank // self._trainer.n_gpus_per_node)
            launchers.append(remote.options(**options, max_concurrency=LAUNCHER_CONCURRENCY).remote(rank))
        return launchers

    def _check_machines(self, launchers: Sequence[ActorHandle], group: PlacementGroup) -> list[Machine]:
        """Return the machine of every rank; ValueError when one lacks files or has other versions."""
        workers_folder(self._directory).mkdir(parents=True, exist_ok=True)
        paths = [*dict.fromkeys(local_paths(self._tree)), str(workers_folder(self._directory))]
        addresses = self._placement.addresses(group, self._trainer)
        calls = []
        for launcher, address in zip(launchers, addresses, strict=True):
            calls.append(launcher.machine.remote(address, os.getcwd(), paths))
        timeout = self._trainer.ray_wait_register_center_timeout
        try:
            machines: list[Machine] = self._ray.get(calls, timeout=timeout)
        except self._ray.exceptions.GetTimeoutError:
            raise ValueError(
                f"Workers did not come up within trainer.ray_wait_register_center_timeout={timeout} s."
            ) from None
        check_machines(machines, package_versions())
        return machines

    def _start_ranks(
        self,
        launchers: Sequence[ActorHandle],
        machines: Sequence[Machine],
        program: str,
        arguments: Sequence[str],
        role_variables: Mapping[str, str],
    ) -> list[ObjectRef]:
        """Start every rank as a subprocess of its launcher; the running calls."""
        runtime_env = self._config.ray_kwargs.ray_init.get("runtime_env") or {}
        shared = {
            **forwarded_environment(os.environ, self._tree),
            **role_variables,
            **(runtime_env.get("env_vars") or {}),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self._trainer.n_gpus_per_node),
            "MASTER_ADDR": machines[0].address,
            "MASTER_PORT": str(self._ray.get(launchers[0].free_port.remote())),
        }
        runs = []
        for rank, (launcher, machine) in enumerate(zip(launchers, machines, strict=True)):
            local_rank = self._placement.local_rank(rank, self._trainer)
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": local_rank}
            directory = str(self._directory)
            runs.append(
                launcher.run.remote(program, list(arguments), machine.address, directory, environment)
            )
        return runs

    # --- roles on their own machines ------------------------------------------------------------------------

    @contextmanager
    def _start_replicas(self, ranks: PlacementGroup) -> Iterator[dict[str, str]]:
        """Run rollout replicas while the block lasts, if the run has any; yields variables for the ranks.
        Their manager runs on the machine of rank 0, so that it survives the loss of a replica's machine."""
        if self._replica_spec is None:
            yield {}
            return
        assert isinstance(self._config, PpoConfig)
        rollout = self._config.actor_rollout_ref.rollout
        devices = rollout.tensor_model_parallel_size * rollout.data_parallel_size
        with self._placement.reserve(rollout, POOL_SECTIONS["rollout"]) as group:
            places = []
            for number in range(replica_count(rollout)):
                machine = number * devices // rollout.n_gpus_per_node
                options = self._placement.actor_options(group, machine, devices)
                places.append({**options, "max_concurrency": MAX_CONCURRENT_REQUESTS})
            name = f"rollout-pool-{os.getpid()}-{time.monotonic_ns()}"
            options = {**self._placement.actor_options(ranks, 0, devices=0), "name": name}
            remote = self._ray.remote(ReplicaManager).options(namespace=NAMESPACE, **options)
            timeout = self._trainer.ray_wait_register_center_timeout
            manager = remote.remote(self._replica_spec, places, timeout)
            self._ray.get(manager.start.remote())
            yield {POOL: f"{self._ray.get_runtime_context().gcs_address} {NAMESPACE} {name}"}
            # After an error the actor ends with this process, or when its resources are released.
            self._ray.kill(manager)

    @contextmanager
    def _start_models(self) -> Iterator[dict[str, str]]:
        """Run models that have their own machines while the block lasts; yields variables for the ranks."""
        with ExitStack() as stack:
            variables: dict[str, str] = {}
            for role in [*self._frozen_models, *self._trained_models]:
                section = resource_pools(self._config)[role]
                group = stack.enter_context(self._placement.reserve(section, POOL_SECTIONS[role]))
                variables |= stack.enter_context(self._start_model(role, section, group))
            yield variables

    @contextmanager
    def workers(self, role: str, worker: type[RankWorker]) -> Iterator[dict[str, str]]:
        """Run one actor of class `worker` per device of the `trainer` section while the block lasts; yields
        the variables by which `RayTrainingWorkers` finds them."""
        with self._placement.reserve(self._trainer, "trainer") as group:
            places, seats = self._seats(self._trainer, group)
            timeout = self._trainer.ray_wait_register_center_timeout
            with start_training_workers(role, None, places, seats, NAMESPACE, timeout, worker) as variables:
                yield variables

    def _seats(
        self, section: DeviceSection, group: PlacementGroup
    ) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
        """Actor options of each device, and its address with its local rank."""
        places = []
        for number in range(device_count(section)):
            places.append(self._placement.actor_options(group, number // section.n_gpus_per_node))
        seats = []
        for rank, address in enumerate(self._placement.addresses(group, section)):
            seats.append((address, self._placement.local_rank(rank, section)))
        return places, seats

    @contextmanager
    def _start_model(
        self, role: str, section: DeviceSection, group: PlacementGroup
    ) -> Iterator[dict[str, str]]:
        timeout = self._trainer.ray_wait_register_center_timeout
        places, seats = self._seats(section, group)
        if role in self._frozen_models:
            model = self._frozen_models[role]
            with start_model_copies(role, model, places, NAMESPACE, timeout) as variables:
                yield variables
            return
        factory = self._trained_models[role]
        with start_training_workers(role, factory, places, seats, NAMESPACE, timeout) as variables:
            yield variables


def _cannot_start(error: Exception) -> ValueError:
    text = f"A worker cannot start: {short_error(error)}"
    if "No module named" in text:
        text += (
            " Strop must be installed on every machine of the cluster, or named in "
            "ray_kwargs.ray_init.runtime_env."
        )
    return ValueError(text)
