"""Reads a package index without downloading packages: file lists, and the metadata of single wheels.

The metadata of a wheel comes from its `.metadata` file (PEP 658). Where the index has none, the end of the
wheel is read by HTTP ranges: a wheel is a zip archive, and its directory stands at the end.
"""

from __future__ import annotations

import html
import http.client
import io
import json
import os
import re
import tarfile
import threading
import urllib.parse
import zipfile
from dataclasses import dataclass

from packaging.utils import canonicalize_name

LINK = re.compile(r'<a\s([^>]*?)href="([^"]+)"([^>]*)>', re.IGNORECASE)
REQUIRES_PYTHON = re.compile(r'data-requires-python="([^"]*)"', re.IGNORECASE)
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
MAX_SOURCE = 5_000_000  # bytes of a source archive that is downloaded whole
TAIL = 64_000  # bytes that are read first from the end of a wheel
CHUNK = 256_000
ATTEMPTS = 3


class IndexUnreachable(ValueError):
    """The index does not answer, or answers with an error."""


@dataclass(frozen=True)
class IndexFile:
    name: str
    url: str
    requires_python: str


class PackageIndex:
    """One index; connections are kept per thread."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.downloaded = 0
        self._local = threading.local()

    def files(self, project: str, containing: str) -> list[IndexFile]:
        """The files of a project whose name has `containing`; a page may list ten thousand others."""
        page = f"{self.url}/{canonicalize_name(project)}/"
        status, headers, body = self.get(page, {"Accept": ACCEPT})
        if status == http.HTTPStatus.NOT_FOUND:
            raise IndexUnreachable(f"{self.url} has no project {project!r}")
        if status != http.HTTPStatus.OK:
            raise IndexUnreachable(f"{page} answers with HTTP status {status}")
        if "json" in headers.get("content-type", ""):
            return _json_files(body, page, containing)
        return _html_files(body.decode(), page, containing)

    def metadata(self, file: IndexFile) -> str:
        """METADATA of a wheel, or PKG-INFO of a source archive."""
        if not file.name.endswith(".whl"):
            return _source_metadata(self.read(file.url), file.name)
        status, _, body = self.get(file.url + ".metadata", {})
        if status == http.HTTPStatus.OK:
            return body.decode()
        archive = _RemoteFile(self, file.url)
        with zipfile.ZipFile(archive) as wheel:
            (name,) = [item for item in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", item)]
            return wheel.read(name).decode()

    def read(self, url: str) -> bytes:
        status, _, body = self.get(url, {"Range": f"bytes=0-{MAX_SOURCE}"})
        if status not in (http.HTTPStatus.OK, http.HTTPStatus.PARTIAL_CONTENT):
            raise IndexUnreachable(f"{url} answers with HTTP status {status}")
        return body

    def get(self, url: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        """One GET; a lost connection is tried again."""
        parts = urllib.parse.urlsplit(url)
        last: Exception | None = None
        for _ in range(ATTEMPTS):
            connection = self._connection(parts.scheme, parts.netloc)
            try:
                connection.request("GET", parts.path, headers={"User-Agent": "strop-resolve", **headers})
                response = connection.getresponse()
                body = response.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                last = error
                continue
            self.downloaded += len(body)
            found = {name.lower(): value for name, value in response.getheaders()}
            return response.status, found, body
        raise IndexUnreachable(f"{parts.scheme}://{parts.netloc} cannot be reached: {last}")

    def _connection(self, scheme: str, host: str) -> http.client.HTTPConnection:
        open_ones: dict[str, http.client.HTTPConnection] = self._local.__dict__.setdefault("open", {})
        if host not in open_ones:
            kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
            open_ones[host] = kind(host, timeout=30)
        return open_ones[host]


def _html_files(page: str, base: str, containing: str) -> list[IndexFile]:
    found = []
    for match in LINK.finditer(page):
        if containing not in match[2]:
            continue
        url = match[2].partition("#")[0]
        if not url.startswith("https://"):
            url = urllib.parse.urljoin(base, html.unescape(url))
        python = REQUIRES_PYTHON.search(match[1] + match[3])
        needs = html.unescape(python[1]) if python else ""
        found.append(IndexFile(urllib.parse.unquote(url.rpartition("/")[2]), url, needs))
    return found


def _json_files(body: bytes, base: str, containing: str) -> list[IndexFile]:
    found = []
    for item in json.loads(body)["files"]:
        if containing not in item["filename"]:
            continue
        url = urllib.parse.urljoin(base, item["url"])
        found.append(IndexFile(item["filename"], url, item.get("requires-python") or ""))
    return found


def _source_metadata(body: bytes, name: str) -> str:
    """PKG-INFO with the requirements that setuptools writes beside it."""
    if not name.endswith(".tar.gz"):
        raise IndexUnreachable(f"{name}: only .tar.gz source archives are read")
    with tarfile.open(fileobj=io.BytesIO(body), mode="r:gz") as archive:
        texts = {}
        for member in archive.getmembers():
            stream = archive.extractfile(member)
            if stream is not None and os.path.basename(member.name) in ("PKG-INFO", "requires.txt"):
                texts[os.path.basename(member.name)] = stream.read().decode()
    text = texts["PKG-INFO"]
    if "Requires-Dist:" in text:
        return text
    head, blank, rest = text.partition("\n\n")
    return head + _requires_dist(texts.get("requires.txt", "")) + blank + rest


def _requires_dist(text: str) -> str:
    """requires.txt as header lines; a section [extra:marker] becomes a marker."""
    lines = []
    conditions = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("["):
            extra, _, marker = line.strip("[]").partition(":")
            parts = [f"({marker})"] if marker else []
            parts += [f'extra == "{extra}"'] if extra else []
            conditions = "; " + " and ".join(parts)
            continue
        lines.append(f"\nRequires-Dist: {line}{conditions}")
    return "".join(lines)


class _RemoteFile(io.RawIOBase):
    """A file behind HTTP ranges: what zipfile needs to read one member."""

    def __init__(self, index: PackageIndex, url: str) -> None:
        super().__init__()
        self.index = index
        self.file_url = url
        self.position = 0
        tail = self._range(f"bytes=-{TAIL}")
        self.pieces = [(self.size - len(tail), tail)]

    def _range(self, wanted: str) -> bytes:
        status, headers, body = self.index.get(self.file_url, {"Range": wanted})
        if status == http.HTTPStatus.PARTIAL_CONTENT:
            self.size = int(headers["content-range"].rpartition("/")[2])
            return body
        if status == http.HTTPStatus.OK:  # a server without ranges sent the whole file
            self.size = len(body)
            return body
        raise IndexUnreachable(f"{self.file_url} answers with HTTP status {status}")

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = start + offset
        return self.position

    def read(self, count: int = -1) -> bytes:
        if count < 0:
            count = self.size - self.position
        end = min(self.position + count, self.size)
        if end <= self.position:
            return b""
        for start, piece in self.pieces:
            if start <= self.position and end <= start + len(piece):
                found = piece[self.position - start : end - start]
                self.position = end
                return found
        last = min(max(end, self.position + CHUNK), self.size) - 1
        piece = self._range(f"bytes={self.position}-{last}")
        self.pieces.append((self.position, piece))
        found = piece[: end - self.position]
        self.position = end
        return found
