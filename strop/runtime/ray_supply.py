"""What a run asks of a cluster, and what the cluster lacks, in words."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.runtime.ray_agent import Machine

PASSED_ON = (
    *("STROP_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "VLLM_", "SGL_", "WANDB_", "MLFLOW_", "SWANLAB_"),
    *("PYTHON", "OMP_", "MKL_", "TORCH", "PYTORCH_", "TRITON_", "NCCL_", "GLOO_", "CUDA_LAUNCH_", "CUDA_DEVICE_MAX_"),
    *("http_proxy", "https_proxy", "no_proxy"),
)
"""Beginnings of the variables that ranks get from the shell of the command; Ray gives its workers those of `ray start`."""


READ = ("path", "files", "plugins", "custom_chat_template")
"""Ends of the keys that name what a run reads."""
WRITTEN = ("save_path", "output_path")


@dataclass(frozen=True)
class Demand:
    """So many machines, with so much on each."""

    nodes: int
    per_node: Mapping[str, float]

    def __str__(self) -> str:
        what = " and ".join(f"{amount:g} {kind}{'s' if amount > 1 else ''}" for kind, amount in self.per_node.items())
        return f"{self.nodes} machine(s) with {what} each"

    def met_by(self, resources: Mapping[str, float]) -> bool:
        return all(resources.get(kind, 0) >= amount for kind, amount in self.per_node.items())


def lacking(demand: Demand, machines: Sequence[tuple[str, Mapping[str, float]]]) -> str | None:
    """What keeps `machines` (name and resources) from giving what is asked; None when nothing does."""
    enough = [name for name, resources in machines if demand.met_by(resources)]
    if len(enough) >= demand.nodes:
        return None
    each = "; ".join(
        f"{name} has " + ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in demand.per_node)
        for name, resources in machines
    )
    return f"The run asks for {demand}, and {len(enough)} of {len(machines)} can give that: {each or 'there is none'}."


def check_machines(machines: Sequence[Machine], own_versions: Mapping[str, str]) -> None:
    """Refuse machines that cannot run the same program on the same files."""
    places = [f"Rank {rank} on host {machine.host} ({machine.address})" for rank, machine in enumerate(machines)]
    for place, machine in zip(places, machines, strict=True):
        for package, wanted in own_versions.items():
            if machine.versions.get(package) != wanted:
                raise ValueError(
                    f"{place} has {package} {machine.versions.get(package)}, this command has {wanted}. Install the same on "
                    "all machines, or say how in ray_kwargs.ray_init.runtime_env."
                )
    for place, machine in zip(places, machines, strict=True):
        if machine.missing:
            raise ValueError(
                f"{place} does not see {', '.join(machine.missing)}. Models, data and the run's folder "
                "(trainer.default_local_dir) must lie where all machines see them under the same path."
            )


def local_paths(tree: Mapping[str, Any]) -> Iterator[str]:
    """What of this machine a configuration reads: models, data, code."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from local_paths(value)
        elif key.endswith(READ) and key not in WRITTEN:
            for path in value if isinstance(value, list | tuple) else [value]:
                if isinstance(path, str) and os.path.exists(os.path.expanduser(path)):
                    yield path


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(PASSED_ON)}
