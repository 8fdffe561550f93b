"""Where files of rows are: a local path, or a copy of what lies at an fsspec address."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from pathlib import Path

from strop.host import cache_root
from strop.registry import did_you_mean

FORMATS = (".parquet", ".json", ".jsonl")
NEXT_STEPS = {
    ".csv": ' Convert it: python -c "import csv, json, sys; [print(json.dumps(row)) for row in '
    "csv.DictReader(open(sys.argv[1], encoding='utf-8-sig', newline=''))]\" {} > rows.jsonl",
    ".gz": " Decompress it: gunzip {}",
}
"""For files of other formats; {} is the file or its local copy. CSV has only texts: 07 is not 7."""
GZIP = b"\x1f\x8b"
"""The first bytes of a compressed file."""
SAID_BY_SERVERS = ("size", "ETag", "Content-MD5", "Digest", "Last-Modified")
"""What tells versions of a file at an HTTP address apart."""
HUB_NAME = re.compile(r"[\w-]+/[\w.-]+")


def is_remote(address: str) -> bool:
    """Whether an address is not a local path."""
    return "://" in address and not address.startswith("file://")


def fetch(address: str) -> Path:
    """Return the local path of a file; a remote one is copied to the cache, once per version."""
    return _download(address) if is_remote(address) else _local(address)


def row_format(address: str, path: Path) -> str:
    """Return the extension of a file of rows, which lies at `path`; ValueError if it has another format."""
    suffix = Path(address.partition("?")[0]).suffix.lower()
    named = shlex.quote(str(path))
    if suffix not in FORMATS:
        raise ValueError(
            f"{address} ends in {suffix or 'no extension'!r}; files of rows end in {', '.join(FORMATS)}."
            + NEXT_STEPS.get(suffix, "").format(named)
        )
    with path.open("rb") as file:
        if file.read(len(GZIP)) == GZIP:
            raise ValueError(
                f"{address} is compressed with gzip, which its name does not say. Decompress it: "
                f"mv {named} {named}.gz && gunzip {named}.gz"
            )
    return suffix


def _local(address: str) -> Path:
    path = Path(address.removeprefix("file://")).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if file.suffix in FORMATS)
        raise ValueError(
            f"{address} is a folder; name its files. It holds: {', '.join(names[:10]) or 'no file of rows'}."
        )
    if HUB_NAME.fullmatch(address) and path.suffix.lower() not in FORMATS:
        raise ValueError(
            f"{address} does not exist. A data set of the Hugging Face hub is named by its files: "
            f"hf://datasets/{address}/FILE.parquet, or the paths of files that were fetched."
        )
    if found := sorted(path.parent.glob(path.name)) if "*" in path.name else []:
        listed = ",".join(str(file) for file in found[:20])
        raise ValueError(f"{address} is no file; patterns are not expanded. List the files: [{listed}].")
    hint = f" The folder {path.parent} does not exist either."
    if path.parent.is_dir():
        hint = did_you_mean(path.name, [file.name for file in path.parent.iterdir()])
    raise ValueError(f"{address} does not exist.{hint}")


def _download(address: str) -> Path:
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(address)
        if not system.isfile(path):
            raise FileNotFoundError("no such file")
        # The key of an HTTP address is the same whatever lies there, its headers are not.
        facts = system.info(path)
        said = [facts.get(name) for name in SAID_BY_SERVERS]
        version = hashlib.sha256(f"{address} {system.ukey(path)} {said}".encode()).hexdigest()[:24]
        target = cache_root() / "files" / version / address.partition("?")[0].rpartition("/")[2]
        if target.is_file():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        system.get_file(path, str(part))
        os.replace(part, target)
    except Exception as error:  # what the library of a file system defines: httpx, botocore ...
        raise ValueError(f"{address} cannot be fetched: {type(error).__name__}: {error}") from error
    return target
