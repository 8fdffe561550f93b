"""What an installation takes: pins that resolve on every platform, and the build of torch that fits the machine."""

from __future__ import annotations

import http.server
import importlib
import io
import re
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


resolve = script("resolve")
package_index = script("package_index")
torch_build = script("torch_build")

PYPROJECT = """
[project]
name = "strop"
dependencies = ["torch>=2.11"]
[project.optional-dependencies]
liger = ["liger-kernel>=0.8"]
vllm = ["vllm"]
dev = ["strop[liger]", "source-only"]
"""
# Wheel -> Requires-Dist.
WHEELS = {
    "torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl": ["triton==3.7.1; platform_system == 'Linux'"],
    "torch-2.13.0-cp312-cp312-macosx_14_0_arm64.whl": ["triton==3.7.1; platform_system == 'Linux'"],
    "triton-3.7.1-cp312-cp312-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl": [],
    "triton-3.9.0-cp312-cp312-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl": [],
    "liger_kernel-0.8.5-py3-none-any.whl": ["triton>=2.3", "toolkit[math]==1.0", "absent; extra == 'dev'"],
    "toolkit-1.0.0-py3-none-any.whl": ["mathlib; extra == 'math'", "other; extra == 'other'"],
    "mathlib-1-py3-none-any.whl": [],
    "source_only-4.9-py3-none-any.whl": [],
}
PINS = """
torch==2.13.0
triton==3.7.1
liger_kernel==0.8.5
toolkit==1.0
mathlib==1
source-only==4.9
"""


class Table:
    """An index in memory."""

    def files(self, project: str, containing: str) -> list[object]:
        found = [name for name in WHEELS if name.startswith(project.replace("-", "_") + "-")]
        return [package_index.IndexFile(name, name, ">=3.9") for name in found if containing in name]

    def metadata(self, file) -> str:
        lines = [f"Requires-Dist: {line}" for line in WHEELS[file.name]]
        return "\n".join(["Metadata-Version: 2.4", *lines]) + "\n\nText"


def problems(pins: str, platform=resolve.PLATFORMS[0], python: str = "3.12") -> set[str]:
    target = resolve.Target(platform, python)
    return resolve.resolve(target, PYPROJECT, pins, resolve.CachedSource(Table())).problems


def test_pins_that_fit_resolve() -> None:
    assert problems(PINS) == set()
    assert problems(PINS, resolve.MACOS) == set()


def test_a_pin_that_contradicts_a_wheel_is_found() -> None:
    """torch 2.13.0 with triton 3.9.0 once failed on every machine but those with a local build of torch."""
    (found,) = problems(PINS.replace("triton==3.7.1", "triton==3.9.0"))
    assert found == "torch 2.13.0 requires triton==3.7.1, but constraints.txt pins triton==3.9.0"
    assert problems(PINS.replace("triton==3.7.1", "triton==3.9.0"), resolve.MACOS) == set()


def test_a_requirement_without_a_pin_and_a_pin_without_a_wheel_are_found() -> None:
    (found,) = problems(PINS.replace("mathlib==1", ""))
    assert found == 'toolkit 1.0 requires mathlib; extra == "math", which constraints.txt does not pin'
    (found,) = problems(PINS, python="3.13", platform=resolve.MACOS)
    assert found.startswith("strop requires torch>=2.11: the index has no wheel of torch==2.13.0")


def test_every_requirement_of_the_project_is_pinned_once() -> None:
    lines = (ROOT / "constraints.txt").read_text().split()
    pins = resolve.read_pins("\n".join(lines))
    assert len(pins) == len(lines)
    for platform in resolve.PLATFORMS:
        groups = resolve.project_requirements((ROOT / "pyproject.toml").read_text(), platform)
        for requirement in [item for group in groups.values() for item in group]:
            version = resolve.pinned_version(pins[resolve.canonicalize_name(requirement.name)])
            assert requirement.specifier.contains(version), f"{requirement}: pinned to {version}"


def test_only_extras_that_cannot_resolve_are_left_out() -> None:
    project = resolve.tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys()
    assert set(resolve.OWN_ENVIRONMENT) == {"vllm", "sglang"}
    assert resolve.NO_WHEELS == {"macos-arm64": {"liger": "triton"}}
    assert {*resolve.OWN_ENVIRONMENT, "liger"} <= extras


@pytest.fixture
def server() -> Iterator[str]:
    """An index of one wheel that has no .metadata file and answers ranges; /json/ speaks JSON."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as wheel:
        wheel.writestr("big.bin", bytes(300_000))
        wheel.writestr("demo-1.0.dist-info/METADATA", "Name: demo\nRequires-Dist: numpy>=2\n\n")
    body = packed.getvalue()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            if self.path.endswith(".whl"):
                first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers["Range"]).groups()
                start = int(first) if first else max(0, len(body) - int(last))
                end = int(last) + 1 if first else len(body)
                extra = {"Content-Range": f"bytes {start}-{end - 1}/{len(body)}"}
                self._send(206, body[start:end], "application/zip", extra)
            elif self.path == "/simple/demo/":
                page = b'<a href="../../demo-1.0-py3-none-any.whl#sha256=0" data-requires-python="&gt;=3.9">demo</a>'
                self._send(200, page, "text/html", {})
            elif self.path == "/json/demo/":
                page = b'{"files": [{"filename": "demo-1.0-py3-none-any.whl", "url": "/demo-1.0-py3-none-any.whl"}]}'
                self._send(200, page, "application/vnd.pypi.simple.v1+json", {})
            else:
                self._send(404, b"", "text/plain", {})

        def _send(self, status: int, data: bytes, kind: str, extra: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **extra}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


@pytest.mark.parametrize("page", ["simple", "json"])
def test_metadata_is_read_from_the_end_of_a_wheel(server: str, page: str) -> None:
    index = package_index.PackageIndex(f"{server}/{page}")
    (file,) = index.files("demo", "1.0")
    assert file.requires_python in (">=3.9", "")
    assert "Requires-Dist: numpy>=2" in index.metadata(file)
    assert index.downloaded < 100_000
    assert index.files("demo", "2.0") == []


def test_an_index_that_does_not_answer_fails_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert resolve.main(["--index", "http://127.0.0.1:9/simple"]) == 1
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err


CPU_PAGE = "<a>torch-2.13.0%2Bcpu-cp312-cp312-manylinux_2_28_x86_64.whl</a>"


@pytest.mark.parametrize(
    ("system", "gpu", "index", "page", "arguments", "message"),
    [
        ("Linux", False, "auto", CPU_PAGE, ("--extra-index-url", torch_build.CPU_INDEX), "for CPU"),
        ("Linux", False, "auto", None, (), "cannot be reached"),
        ("Linux", False, "auto", CPU_PAGE.replace("cp312", "cp311"), (), "no build of it for cp312, x86_64"),
        ("Linux", True, "auto", CPU_PAGE, (), "with CUDA"),
        ("Darwin", False, "auto", CPU_PAGE, (), "no CUDA libraries"),
        ("Linux", False, "default", CPU_PAGE, (), "pip's index"),
        ("Linux", True, "https://a.b/c", None, ("--extra-index-url", "https://a.b/c"), "https://a.b/c"),
    ],
)
def test_the_build_of_torch_fits_the_machine(system, gpu, index, page, arguments, message) -> None:
    machine = torch_build.Machine(system, "x86_64", "cp312", has_gpu=gpu)
    build = torch_build.choose("2.13.0", machine, index, lambda _: page)
    assert build.arguments == arguments
    assert message in build.message


def test_every_environment_of_the_makefile_asks_which_torch() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in makefile.splitlines():
        if line.endswith(" torch"):
            assert "scripts/torch_build.py" in line, line
    assert torch_build.pinned_torch((ROOT / "constraints.txt").read_text())
    assert "resolve" in (ROOT / ".ci" / "run").read_text()
