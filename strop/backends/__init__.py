"""Training backends. Each follows the protocol of base.py and is listed here, for the conformance suite
too."""

from __future__ import annotations

from typing import Any

from strop.registry import load_attribute

BACKENDS = {
    "single": ("strop.backends.single", "SingleBackend"),
    "fsdp": ("strop.backends.fsdp.backend", "FsdpBackend"),
    "megatron": ("strop.backends.megatron.backend", "MegatronBackend"),
}
"""Module and class of every backend, by the name of its strategy."""


def backend_class(name: str) -> Any:
    """The class of a backend; its libraries are imported now."""
    module, attribute = BACKENDS[name]
    return load_attribute(module, attribute)
