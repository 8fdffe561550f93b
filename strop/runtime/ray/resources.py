"""What a run asks of a cluster, what the cluster lacks, and what ranks get from the shell of the command."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from strop.runtime.ray.rank_launcher import Machine

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


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the command's shell that every rank gets."""
    return {name: value for name, value in environment.items() if name.startswith(FORWARDED_PREFIXES)}
