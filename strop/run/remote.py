"""Copies of checkpoints at any fsspec address: s3://, hdfs://, gs://, memory:// ... with the layout they have at home.

The manifest goes last and the tracker file after it, so an interrupted copy is not taken for a checkpoint. Copies are an
archive: limits on what to keep apply to the run's own folder only.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fsspec

from strop.run import layout
from strop.run.durable import flush_file, flush_tree
from strop.run.manifest import NAME as MANIFEST
from strop.run.manifest import DamagedCheckpoint, read_manifest, verify


def is_address(path: str) -> bool:
    return "://" in path


def upload(checkpoint: Path, address: str) -> None:
    """Copy a checkpoint and name it the latest there."""
    system, root = fsspec.core.url_to_fs(address)
    target = f"{root.rstrip('/')}/{checkpoint.name}"
    if system.exists(f"{target}/{MANIFEST}"):
        system.rm(target, recursive=True)
    for name in [*read_manifest(checkpoint).files, MANIFEST]:
        system.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
        system.put_file(str(checkpoint / name), f"{target}/{name}")
    system.pipe_file(f"{root.rstrip('/')}/{layout.LATEST}", str(layout.step_of(checkpoint)).encode())


def candidates(address: str) -> list[str]:
    """Addresses of the complete copies, best first: the latest, then by step."""
    system, root = fsspec.core.url_to_fs(address)
    if not system.exists(root):
        return []
    system.invalidate_cache()
    steps = {layout.step_of(Path(name)): name for name in system.ls(root, detail=False)}
    complete = {step: name for step, name in steps.items() if step is not None and system.exists(f"{name}/{MANIFEST}")}
    latest = _latest(system, root)
    order = sorted(complete, key=lambda step: (step != latest, -step))
    return [system.unstrip_protocol(complete[step]) for step in order]


def fetch(address: str, directory: Path) -> Path:
    """Bring one copied checkpoint into a run's folder, whole or not at all."""
    system, source = fsspec.core.url_to_fs(address)
    step = layout.step_of(Path(source))
    if step is None or not system.exists(f"{source}/{MANIFEST}"):
        raise DamagedCheckpoint(f"{address} is no complete checkpoint: it needs the name global_step_<N> and a {MANIFEST}.")
    staged = layout.stage(directory, step)
    try:
        system.get_file(f"{source}/{MANIFEST}", str(staged / MANIFEST))
        files = read_manifest(staged).files
        for name in files:
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            system.get_file(f"{source}/{name}", str(staged / name))
            flush_file(staged / name)
        verify(staged, files)
        flush_file(staged / MANIFEST)
        flush_tree(staged)
        final = layout.publish(staged, step)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{address} is not complete: {error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    layout.write_latest(directory, step)
    return final


def _latest(system: Any, root: str) -> int | None:
    try:
        return int(system.cat_file(f"{root.rstrip('/')}/{layout.LATEST}"))
    except (FileNotFoundError, ValueError):
        return None
