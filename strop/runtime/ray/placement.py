"""Machines and devices for the roles of a run: what it requests, what the cluster lacks, and Ray placement
groups with one bundle per machine. Also which environment variables ranks get from the shell of the
command."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from strop.config.derived import device_count
from strop.config.schema.trainer import TrainerConfig
from strop.runtime.ray.connection import ClusterLost, PlacementGroup, bundle_strategy
from strop.runtime.ray.rank_launcher import Machine

log = logging.getLogger(__name__)
QUIET_SECONDS = 5.0
"""Seconds of waiting for resources before a warning is logged."""
FORWARDED_PREFIXES = (
    "STROP_",
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "VLLM_",
    "SGL_",
    "WANDB_",
    "MLFLOW_",
    "SWANLAB_",
    "TENSORBOARD_",
    "TRACKIO_",
    "VERL_FILE_LOGGER_",
    "PYTHON",
    "OMP_",
    "MKL_",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "NCCL_",
    "GLOO_",
    "CUDA_LAUNCH_",
    "CUDA_DEVICE_MAX_",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)
"""Prefixes of the environment variables that ranks get from the shell of the command. Ray itself gives its
workers the variables of `ray start`."""
INPUT_KEYS = ("path", "files", "plugins", "custom_chat_template")
"""Endings of the keys that name what a run reads."""
OUTPUT_KEYS = ("save_path", "output_path")


@dataclass(frozen=True)
class ResourceRequest:
    """A number of machines with the same resources on each."""

    nodes: int
    per_node: Mapping[str, float]

    def __str__(self) -> str:
        amounts = []
        for kind, amount in self.per_node.items():
            plural = "s" if amount > 1 else ""
            amounts.append(f"{amount:g} {kind}{plural}")
        return f"{self.nodes} machine(s) with {' and '.join(amounts)} each"

    def met_by(self, resources: Mapping[str, float]) -> bool:
        """Return whether one machine has enough."""
        return all(resources.get(kind, 0) >= amount for kind, amount in self.per_node.items())


def missing_resources(
    request: ResourceRequest, machines: Sequence[tuple[str, Mapping[str, float]]]
) -> str | None:
    """Say why `machines` (name and resources) do not meet the request; None when they do."""
    enough = [name for name, resources in machines if request.met_by(resources)]
    if len(enough) >= request.nodes:
        return None
    described = []
    for name, resources in machines:
        amounts = ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in request.per_node)
        described.append(f"{name} has {amounts}")
    return (
        f"The run asks for {request}, and {len(enough)} of {len(machines)} can give that: "
        f"{'; '.join(described) or 'there is none'}."
    )


def check_machines(machines: Sequence[Machine], driver_versions: Mapping[str, str]) -> None:
    """Raise ValueError when a machine has other package versions than the driver, or lacks its files."""
    for rank, machine in enumerate(machines):
        for package, wanted in driver_versions.items():
            found = machine.versions.get(package)
            if found != wanted:
                raise ValueError(
                    f"{_place(rank, machine)} has {package} {found}, this command has {wanted}. Install the "
                    "same on all machines, or say how in ray_kwargs.ray_init.runtime_env."
                )
    for rank, machine in enumerate(machines):
        if machine.missing:
            raise ValueError(
                f"{_place(rank, machine)} does not see {', '.join(machine.missing)}. Models, data and the "
                "run's folder (trainer.default_local_dir) must lie where all machines see them under the "
                "same path."
            )


def _place(rank: int, machine: Machine) -> str:
    return f"Rank {rank} on host {machine.host} ({machine.address})"


def local_paths(tree: Mapping[str, object]) -> Iterator[str]:
    """Yield the existing paths of this machine that a configuration reads: models, data, code."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from local_paths(value)
        elif key.endswith(INPUT_KEYS) and key not in OUTPUT_KEYS:
            paths = value if isinstance(value, list | tuple) else [value]
            for path in paths:
                if isinstance(path, str) and os.path.exists(os.path.expanduser(path)):
                    yield path


def forwarded_environment(environment: Mapping[str, str], tree: Mapping[str, object]) -> dict[str, str]:
    """Return the variables of the command's shell that every rank gets; of the configuration `tree`, also the
    keys of the servers that ranks call."""
    found = {name: value for name, value in environment.items() if name.startswith(FORWARDED_PREFIXES)}
    for name in _server_keys(tree):
        if name in environment:
            found[name] = environment[name]
    return found


def _server_keys(tree: Mapping[str, object]) -> Iterator[str]:
    """Yield the variables that hold the keys of the servers of a configuration (judge, teacher)."""
    for section in tree.values():
        if isinstance(section, Mapping):
            if section.get("url") and "api_key_env" in section:
                yield str(section["api_key_env"])
            yield from _server_keys(section)


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
        self._reserved: dict[str, ResourceRequest] = {}
        """What this run has reserved so far, by the section that asked for it."""

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
    def reserve(self, section: DeviceSection, name: str) -> Iterator[PlacementGroup]:
        """Reserve what a section asks for, each bundle on a different machine, until the block ends. `name`:
        of the section in the configuration."""
        request = self.request(section)
        missing = missing_resources(request, self._alive_machines())
        if missing is not None and self.private_cluster:
            raise ValueError(
                f"{name}.nnodes={request.nodes}: {missing}{self._besides()} Lower {name}.nnodes or "
                f"{name}.n_gpus_per_node, or name a cluster (ray_init.address)."
            )
        bundles = [dict(request.per_node)] * request.nodes
        group = self._ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        try:
            self._wait_for(group, request, name, missing)
            self._reserved[name] = request
            yield group
        except ClusterLost:
            raise  # a cluster without a head cannot remove the group
        except BaseException:
            self._ray.util.remove_placement_group(group)
            raise
        else:
            self._ray.util.remove_placement_group(group)
        finally:
            self._reserved.pop(name, None)

    def _besides(self) -> str:
        """A sentence about what this run has reserved already, for a message."""
        if not self._reserved:
            return ""
        others = [f"{request} for {name}" for name, request in self._reserved.items()]
        return f" It has taken {', and '.join(others)}."

    def _wait_for(
        self, group: PlacementGroup, request: ResourceRequest, name: str, missing: str | None
    ) -> None:
        """Wait until the cluster has placed the group; ValueError after the timeout."""
        timeout = self._trainer.ray_wait_register_center_timeout
        key = "trainer.ray_wait_register_center_timeout"
        if missing is not None:
            missing = f"{name}: {missing}{self._besides()}"
            log.warning("%s Waiting for it, at most %d s (%s).", missing, timeout, key)
        start = time.monotonic()
        while not group.wait(1):
            waited = time.monotonic() - start
            if waited > timeout:
                missing = missing_resources(request, self._alive_machines())
                missing = missing or f"The run asks for {request}, which are in use."
                raise ValueError(
                    f"{name}: {missing}{self._besides()} It did not come within {key}={timeout} s. Add "
                    f"machines, end other jobs, or lower {name}.nnodes or {name}.n_gpus_per_node."
                )
            if missing is None and waited > QUIET_SECONDS:
                missing = f"{name}: The run asks for {request}, which are in use.{self._besides()}"
                log.warning("%s Waiting, at most %d s (%s).", missing, timeout, key)

    def _alive_machines(self) -> list[tuple[str, dict[str, float]]]:
        """Return address and resources of every machine of the cluster. In a cluster of this run alone, which
        has one machine, without what the run has taken: it cannot become free."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        machines = [(node["NodeManagerAddress"], dict(node["Resources"])) for node in alive]
        if self.private_cluster:
            for request in self._reserved.values():
                for kind, amount in request.per_node.items():
                    machines[0][1][kind] -= amount
        return machines
