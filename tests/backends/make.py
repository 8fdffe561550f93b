"""Backends from keywords: fields of BackendSettings and arguments of the backend in one call."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from strop.backends.base import BackendSettings
from strop.backends.fsdp.backend import FsdpBackend
from strop.backends.single import SingleBackend

SHARED = {field.name for field in dataclasses.fields(BackendSettings)}


def make_backend(kind: type[Any], module: Any, **given: Any) -> Any:
    settings = {name: value for name, value in given.items() if name in SHARED}
    own = {name: value for name, value in given.items() if name not in SHARED}
    return kind(module, BackendSettings(**settings), **own)


single = partial(make_backend, SingleBackend)
sharded = partial(make_backend, FsdpBackend)
