"""Many ranks on many machines: Ray finds the places, an agent in each of them starts the rank and tells how it ended.

Ranks speak to each other as on one machine (gloo, NCCL), so batches never pass the driver; it starts, watches and restarts.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from strop.config.engine import replica_count
from strop.config.pools import devices_of, pools
from strop.errors import CRASHED
from strop.extras import require
from strop.run.heartbeat import workers_of
from strop.runtime.failure import MACHINE_LOST, Loss, first_cause
from strop.runtime.learners import Make
from strop.runtime.ray_agent import Agent, Ended, Machine, versions
from strop.runtime.ray_frozen import copies_of
from strop.runtime.ray_learners import learners_of
from strop.runtime.ray_pool import POOL, Keeper
from strop.runtime.ray_supply import Demand, check_machines, lacking, local_paths, passed_on
from strop.runtime.replica import Recipe

log = logging.getLogger(__name__)

LOOK = 0.5
"""Seconds between two looks at the ranks."""
GRACE = 15.0
"""Seconds the other ranks have to end by themselves after one has failed."""
PATIENCE = 5.0
"""Seconds that the head of the cluster may be silent."""
NAMESPACE = "strop"
MOST_REQUESTS = 10_000
"""That a replica has under way; its engine queues them."""
SETTLE = 60.0
"""Seconds that agents, which only have to start an interpreter, may take."""


def ray_module() -> ModuleType:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return require("ray", extra="ray", why="trainer.runtime=ray")


class ClusterLost(ValueError):
    """The head of the cluster does not answer any more."""


class Cluster:
    """A connection to a cluster, or a cluster of this machine alone, for as long as the block lasts."""

    def __init__(
        self,
        config: Any,
        tree: Mapping[str, Any],
        recipe: Recipe | None = None,
        frozen: Mapping[str, Callable[[], Any]] | None = None,
        learning: Mapping[str, Make] | None = None,
    ) -> None:
        """`recipe`: of rollout replicas on machines of their own. `frozen` and `learning`: makers of models that have such, by
        role."""
        self._recipe, self._frozen, self._learning = recipe, frozen or {}, learning or {}
        self._config, self._trainer, self._settings = config, config.trainer, config.ray_kwargs
        self._tree = tree
        self._directory = Path(config.trainer.default_local_dir).expanduser().absolute()
        self.world = self._trainer.nnodes * self._trainer.n_gpus_per_node
        self._ray: Any = ray_module()
        self._own = False

    def __enter__(self) -> Cluster:
        arguments = {name: value for name, value in self._settings.ray_init.items() if value is not None}
        named = arguments.pop("address", None) or os.environ.get("RAY_ADDRESS")
        address = str(named or ("auto" if self._trainer.nnodes > 1 else "local"))
        self._own = address == "local"
        arguments.setdefault("log_to_driver", False)
        arguments.setdefault("logging_level", logging.WARNING)
        if self._own:
            arguments.setdefault("include_dashboard", False)
            if "GPU" not in self._demand().per_node:
                asked = self.world + sum(map(devices_of, pools(self._config).values()))
                arguments.setdefault("num_cpus", max(asked, os.cpu_count() or 1))
        else:
            arguments.pop("num_cpus", None)  # the cluster has what it has
        try:
            if re.fullmatch(r"[^/]+:\d+", address):
                Head(address).connect()  # at once; Ray itself tries for minutes
            self._ray.init(address=address, **arguments)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise ValueError(
                f"Cannot reach a Ray cluster at {address}: {' '.join(str(error).split())[:400]} Start one with `ray start`, "
                "name it in ray_kwargs.ray_init.address, and use the same RAY_AUTH_MODE everywhere."
            ) from error
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ClusterLost):
            sys.stderr.write(f"strop: error: {error}\n")
            sys.stderr.flush()
            os._exit(CRASHED)  # Ray would wait for its head for a minute, and then end this process without a word to anybody
        if self._settings.timeline_json_file and self._ray.is_initialized():
            self._ray.timeline(filename=self._settings.timeline_json_file)
        self._ray.shutdown()

    def run(self, program: str, arguments: Sequence[str]) -> Loss | None:
        """All ranks, once; the one that failed first, or None."""
        failures = self._ray.exceptions
        try:
            with self._placed(self._demand()) as group, self._pool() as where, self._models() as others:
                agents = self._agents(group)
                machines = self._machines(agents, group)
                runs = self._start(agents, machines, program, arguments, {**where, **others})
                return self._watch(agents, machines, runs)
        except failures.RayActorError as error:  # a machine was lost before its rank had begun
            return Loss(0, self.world, MACHINE_LOST, why=_short(error))
        except failures.RayError as error:
            raise ValueError(
                f"A worker cannot start: {_short(error)} Strop must be installed on every machine of the cluster, or named in "
                "ray_kwargs.ray_init.runtime_env."
            ) from error

    # --- places ----------------------------------------------------------------------------------------------------------

    def _demand(self) -> Demand:
        return self._demand_of(self._trainer)

    def _demand_of(self, section: Any) -> Demand:
        """Of a section with nnodes and n_gpus_per_node."""
        per_node = {"CPU": float(section.n_gpus_per_node)}
        if self._on_gpus():
            per_node["GPU"] = float(section.n_gpus_per_node)
        return Demand(section.nnodes, per_node)

    def _place(self, group: Any, machine: int, devices: int = 1) -> dict[str, Any]:
        """Options of an actor on one of the machines that were found."""
        strategy = require("ray.util.scheduling_strategies", extra="ray", why="trainer.runtime=ray")
        return {
            "num_cpus": devices,
            "num_gpus": devices if self._on_gpus() else 0,
            "scheduling_strategy": strategy.PlacementGroupSchedulingStrategy(group, machine),
        }

    def _on_gpus(self) -> bool:
        device = self._trainer.device
        if device != "auto" or not self._ray.is_initialized():
            return device == "cuda"
        return self._ray.cluster_resources().get("GPU", 0) > 0

    @contextmanager
    def _placed(self, demand: Demand) -> Iterator[Any]:
        """A bundle per machine, each on a machine of its own."""
        limit = self._trainer.ray_wait_register_center_timeout
        lack = lacking(demand, self._supply())
        if lack is not None and self._own:
            raise ValueError(f"{lack} Lower trainer.nnodes or trainer.n_gpus_per_node, or name a cluster (ray_init.address).")
        if lack is not None:
            log.warning("%s Waiting for it, at most %d s (trainer.ray_wait_register_center_timeout).", lack, limit)
        group = self._ray.util.placement_group([dict(demand.per_node)] * demand.nodes, strategy="STRICT_SPREAD")
        try:
            deadline = time.monotonic() + limit
            told = time.monotonic() + 5
            while not group.wait(1):
                if time.monotonic() > deadline:
                    lack = lacking(demand, self._supply()) or f"The run asks for {demand}; other jobs have taken it."
                    raise ValueError(
                        f"{lack} It did not come within trainer.ray_wait_register_center_timeout={limit} s. Add machines, end "
                        "other jobs, or lower trainer.nnodes or trainer.n_gpus_per_node."
                    )
                if lack is None and time.monotonic() > told:
                    lack = f"{demand} asked for, but others use them."
                    log.warning("%s Waiting, at most %d s (trainer.ray_wait_register_center_timeout).", lack, limit)
            yield group
        except ClusterLost:
            raise
        except BaseException:
            self._ray.util.remove_placement_group(group)
            raise
        else:
            self._ray.util.remove_placement_group(group)

    def _supply(self) -> list[tuple[str, dict[str, float]]]:
        return [(node["NodeManagerAddress"], node["Resources"]) for node in self._ray.nodes() if node["Alive"]]

    def _agents(self, group: Any) -> list[Any]:
        per_node = self._trainer.n_gpus_per_node
        remote = self._ray.remote(Agent)
        return [
            remote.options(**self._place(group, rank // per_node), max_concurrency=4).remote(rank) for rank in range(self.world)
        ]

    def _addresses(self, group: Any, section: Any) -> list[str]:
        """How the cluster knows the machine of each device."""
        known = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        places = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
        return [known[places[number // section.n_gpus_per_node]] for number in range(devices_of(section))]

    def _machines(self, agents: Sequence[Any], group: Any) -> list[Machine]:
        """Where the agents are; they must see what this machine sees."""
        workers_of(self._directory).mkdir(parents=True, exist_ok=True)
        paths = [*dict.fromkeys(local_paths(self._tree)), str(workers_of(self._directory))]
        addresses = self._addresses(group, self._trainer)
        asked = [agent.machine.remote(address, os.getcwd(), paths) for agent, address in zip(agents, addresses, strict=True)]
        limit = self._trainer.ray_wait_register_center_timeout
        try:
            machines = self._ray.get(asked, timeout=limit)
        except self._ray.exceptions.GetTimeoutError:
            raise ValueError(f"Workers did not come up within trainer.ray_wait_register_center_timeout={limit} s.") from None
        check_machines(machines, versions())
        return machines

    @contextmanager
    def _pool(self) -> Iterator[dict[str, str]]:
        """Rollout replicas while the block lasts, where the run has some; yields the variable that leads ranks to them."""
        if self._recipe is None:
            yield {}
            return
        rollout = self._config.actor_rollout_ref.rollout
        size = rollout.tensor_model_parallel_size * rollout.data_parallel_size
        with self._placed(self._demand_of(rollout)) as group:
            places = [
                {**self._place(group, number * size // rollout.n_gpus_per_node, size), "max_concurrency": MOST_REQUESTS}
                for number in range(replica_count(rollout))
            ]
            name = f"rollout-pool-{os.getpid()}-{time.monotonic_ns()}"
            pool = (
                self._ray.remote(Keeper)
                .options(name=name, namespace=NAMESPACE, num_cpus=0)
                .remote(self._recipe, places, self._trainer.ray_wait_register_center_timeout)
            )
            self._ray.get(pool.deaths.remote())  # its replicas are there
            yield {POOL: f"{self._ray.get_runtime_context().gcs_address} {NAMESPACE} {name}"}
            self._ray.kill(pool)  # after an error it ends with this process, or for want of a place

    @contextmanager
    def _models(self) -> Iterator[dict[str, str]]:
        """Models that have machines of their own, while the block lasts; yields the variables that lead ranks there."""
        limit = self._trainer.ray_wait_register_center_timeout
        with ExitStack() as opened:
            found: dict[str, str] = {}
            for role in [*self._frozen, *self._learning]:
                section = pools(self._config)[role]
                group = opened.enter_context(self._placed(self._demand_of(section)))
                places = [self._place(group, number // section.n_gpus_per_node) for number in range(devices_of(section))]
                if role in self._frozen:
                    made = copies_of(role, self._frozen[role], places, NAMESPACE, limit)
                else:
                    seats = [
                        (address, self._local_rank(n, section)) for n, address in enumerate(self._addresses(group, section))
                    ]
                    made = learners_of(role, self._learning[role], places, seats, NAMESPACE, limit)
                found |= opened.enter_context(made)
            yield found

    # --- the ranks -------------------------------------------------------------------------------------------------------

    def _start(
        self,
        agents: Sequence[Any],
        machines: Sequence[Machine],
        program: str,
        arguments: Sequence[str],
        more: Mapping[str, str],
    ) -> list[Any]:
        shared = {
            **passed_on(os.environ),
            **more,
            **((self._settings.ray_init.get("runtime_env") or {}).get("env_vars") or {}),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self._trainer.n_gpus_per_node),
            "MASTER_ADDR": machines[0].address,
            "MASTER_PORT": str(self._ray.get(agents[0].free_port.remote())),
        }
        return [
            agent.run.remote(
                program,
                list(arguments),
                machine.address,
                str(self._directory),
                {**shared, "RANK": str(rank), "LOCAL_RANK": self._local_rank(rank, self._trainer)},
            )
            for rank, (agent, machine) in enumerate(zip(agents, machines, strict=True))
        ]

    def _local_rank(self, rank: int, section: Any) -> str:
        """Ray shows each of its workers the one GPU that it was given."""
        return "0" if self._on_gpus() else str(rank % section.n_gpus_per_node)

    def _watch(self, agents: Sequence[Any], machines: Sequence[Machine], runs: Sequence[Any]) -> Loss | None:
        """Until all ranks have ended. One that fails gives the others a while, then they are stopped."""
        ends: dict[int, Ended] = {}
        why: dict[int, str] = {}
        head = Head(self._ray.get_runtime_context().gcs_address)
        deadline = float("inf")
        with _signals() as asked:
            while len(ends) < self.world and time.monotonic() < deadline:
                running = {run: rank for rank, run in enumerate(runs) if rank not in ends}
                done, _ = self._ray.wait(list(running), num_returns=len(running), timeout=LOOK)
                if head.silent_for() > PATIENCE:
                    self._stop(agents, ends, signal.SIGTERM)
                    raise ClusterLost(
                        f"The head of the Ray cluster at {head.address} does not answer any more, so the ranks were stopped. "
                        "Start the cluster again; the same command then goes on from the last checkpoint."
                    )
                for run in done:
                    ends[running[run]], why[running[run]] = self._end_of(run)
                if 0 not in ends or runs[0] in done:
                    self._show_news(agents[0])
                if deadline == float("inf") and (asked or any(end.code for end in ends.values())):
                    deadline = time.monotonic() + GRACE
                    if asked:
                        self._stop(agents, ends, asked[0])
            self._stop(agents, ends, signal.SIGTERM)
        failed = {rank: end.code for rank, end in ends.items() if end.code}
        if not failed:
            return None if len(ends) == self.world else Loss(0, self.world, -asked[0], asked=True)
        cause = first_cause(failed)
        return Loss(
            cause, self.world, failed[cause], machines[cause].host, ends[cause].lines, why=why[cause], asked=bool(asked)
        )

    def _end_of(self, run: Any) -> tuple[Ended, str]:
        try:
            return self._ray.get(run), ""
        except self._ray.exceptions.RayError as error:
            return Ended(MACHINE_LOST, ()), _short(error)

    def _show_news(self, lead: Any) -> None:
        try:
            news = self._ray.get(lead.news.remote(), timeout=SETTLE)
        except self._ray.exceptions.RayError:
            return  # its end is told by its run
        for stream, line in news:
            (sys.stdout if stream == 1 else sys.stderr).write(line)
        sys.stdout.flush()

    def _stop(self, agents: Sequence[Any], ends: Mapping[int, Ended], number: int) -> None:
        left = [agent.stop.remote(number) for rank, agent in enumerate(agents) if rank not in ends]
        self._ray.wait(left, num_returns=len(left), timeout=GRACE) if left else None


class Head:
    """The process that every part of a cluster must be able to reach."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._heard = time.monotonic()

    def silent_for(self) -> float:
        """Seconds since it last took a connection."""
        with suppress(OSError):
            self.connect(timeout=1.0)
            self._heard = time.monotonic()
        return time.monotonic() - self._heard

    def connect(self, timeout: float = PATIENCE) -> None:
        host, _, port = self.address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=timeout).close()


def _short(error: BaseException) -> str:
    """What Ray says, without its table of properties."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[-400:] if len(lines) < 4 else f"{lines[0]} {lines[-1]}"[:400]


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Signals to end that came inside the block; Ray's own answer to them would leave ranks behind."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
