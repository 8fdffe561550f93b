"""Machines and devices for the roles of a run: Ray placement groups with one bundle per machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

from strop.config.derived import device_count
from strop.config.schema.trainer import TrainerConfig
from strop.runtime.ray.connection import ClusterLost, PlacementGroup, bundle_strategy
from strop.runtime.ray.resources import ResourceRequest, missing_resources

log = logging.getLogger(__name__)

QUIET_SECONDS = 5.0
"""Seconds of waiting for resources before a warning is logged."""


class DeviceSection(Protocol):
    """A section of the configuration that asks for machines and devices."""

    nnodes: int
    n_gpus_per_node: int


class RayPlacement:
    """Reserves resources of a connected cluster and says where each device is."""

    def __init__(self, ray: ModuleType, trainer: TrainerConfig, private_cluster: bool = False) -> None:
        """`private_cluster`: it was started for this run, so nothing will be added to it."""
        self._ray = ray
        self._trainer = trainer
        self.private_cluster = private_cluster

    def on_gpus(self) -> bool:
        """Whether actors get GPUs: trainer.device, where auto looks at the cluster."""
        device = self._trainer.device
        if device != "auto" or not self._ray.is_initialized():
            return device == "cuda"
        return bool(self._ray.cluster_resources().get("GPU", 0) > 0)

    def request(self, section: DeviceSection) -> ResourceRequest:
        """Return the resources that a section asks for."""
        per_node = {"CPU": float(section.n_gpus_per_node)}
        if self.on_gpus():
            per_node["GPU"] = float(section.n_gpus_per_node)
        return ResourceRequest(section.nnodes, per_node)

    def actor_options(self, group: PlacementGroup, machine: int, devices: int = 1) -> dict[str, Any]:
        """Return the options of an actor on one machine of the group."""
        gpus = devices if self.on_gpus() else 0
        return {
            "num_cpus": devices,
            "num_gpus": gpus,
            "scheduling_strategy": bundle_strategy(group, machine),
        }

    def local_rank(self, rank: int, section: DeviceSection) -> str:
        """Return LOCAL_RANK. Ray shows each of its workers only its own GPU, so that one is number 0."""
        if self.on_gpus():
            return "0"
        return str(rank % section.n_gpus_per_node)

    def addresses(self, group: PlacementGroup, section: DeviceSection) -> list[str]:
        """Return the address of the machine of each device."""
        address_of_node = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        node_of_bundle = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
        devices = range(device_count(section))
        return [address_of_node[node_of_bundle[number // section.n_gpus_per_node]] for number in devices]

    @contextmanager
    def reserve(self, section: DeviceSection) -> Iterator[PlacementGroup]:
        """Reserve what a section asks for, each bundle on a different machine, until the block ends."""
        request = self.request(section)
        missing = missing_resources(request, self._alive_machines())
        if missing is not None and self.private_cluster:
            raise ValueError(
                f"{missing} Lower trainer.nnodes or trainer.n_gpus_per_node, or name a cluster "
                "(ray_init.address)."
            )
        bundles = [dict(request.per_node)] * request.nodes
        group = self._ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        try:
            self._wait_for(group, request, missing)
            yield group
        except ClusterLost:
            raise  # a cluster without a head cannot remove the group
        except BaseException:
            self._ray.util.remove_placement_group(group)
            raise
        else:
            self._ray.util.remove_placement_group(group)

    def _wait_for(self, group: PlacementGroup, request: ResourceRequest, missing: str | None) -> None:
        """Wait until the cluster has placed the group; ValueError after the timeout."""
        timeout = self._trainer.ray_wait_register_center_timeout
        key = "trainer.ray_wait_register_center_timeout"
        if missing is not None:
            log.warning("%s Waiting for it, at most %d s (%s).", missing, timeout, key)
        start = time.monotonic()
        while not group.wait(1):
            waited = time.monotonic() - start
            if waited > timeout:
                missing = missing_resources(request, self._alive_machines())
                missing = missing or f"The run asks for {request}; other jobs have taken it."
                raise ValueError(
                    f"{missing} It did not come within {key}={timeout} s. Add machines, end other jobs, or "
                    "lower trainer.nnodes or trainer.n_gpus_per_node."
                )
            if missing is None and waited > QUIET_SECONDS:
                missing = f"The run asks for {request}; other jobs use them."
                log.warning("%s Waiting, at most %d s (%s).", missing, timeout, key)

    def _alive_machines(self) -> list[tuple[str, dict[str, float]]]:
        """Return address and resources of every machine of the cluster."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        return [(node["NodeManagerAddress"], node["Resources"]) for node in alive]
