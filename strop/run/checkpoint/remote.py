"""Copies of checkpoints at any fsspec address (s3://, hdfs://, gs://, memory:// ...), in the same layout.

The manifest is copied last and the tracker file after it, so an interrupted copy is not taken for a
checkpoint. Copies are an archive: retention limits apply to the run's own folder only.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec

from strop.run.atomic_files import flush_file, flush_tree
from strop.run.checkpoint import layout
from strop.run.checkpoint.layout import MANIFEST, DamagedCheckpoint, read_manifest, verify


def is_address(path: str) -> bool:
    return "://" in path


def upload(checkpoint: Path, address: str) -> None:
    """Copy a checkpoint and make it the latest at the address."""
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
    complete: dict[int, str] = {}
    for name in system.ls(root, detail=False):
        step = layout.step_of(Path(name))
        if step is not None and system.exists(f"{name}/{MANIFEST}"):
            complete[step] = name
    latest = _latest(system, root)
    order = sorted(complete, key=lambda step: (step != latest, -step))
    return [system.unstrip_protocol(complete[step]) for step in order]


def fetch(address: str, directory: Path) -> Path:
    """Download one copied checkpoint into a run's folder, completely or not at all."""
    system, source = fsspec.core.url_to_fs(address)
    step = layout.step_of(Path(source))
    if step is None or not system.exists(f"{source}/{MANIFEST}"):
        raise DamagedCheckpoint(
            f"{address} is no complete checkpoint: it needs the name global_step_<N> and a {MANIFEST}."
        )
    staged = layout.create_staging_folder(directory, step)
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


def _latest(system: fsspec.AbstractFileSystem, root: str) -> int | None:
    try:
        return int(system.cat_file(f"{root.rstrip('/')}/{layout.LATEST}"))
    except (FileNotFoundError, ValueError):
        return None
