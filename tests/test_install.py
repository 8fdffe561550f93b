"""What an installation takes: pins that resolve on every platform, and the build of torch that fits the machine."""

from __future__ import annotations

import http.server
import importlib
import io
import re
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import strop
from strop import extras

ROOT = Path(__file__).parent.parent


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


resolve = script("resolve")
overlays = script("resolve_overlays")
package_index = script("package_index")
torch_build = script("torch_build")
release = script("release")
try_dockerfile = script("try_dockerfile")

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


def test_an_environment_over_torch_must_not_replace_what_torch_requires() -> None:
    """constraints-sglang.txt once put triton 3.9.0 over the 3.7.1 of torch."""
    target = resolve.Target(overlays.PLATFORM, "3.12")
    source = resolve.CachedSource(Table())

    def found(text: str) -> set[str]:
        return overlays.overlay_problems("constraints-sglang.txt", text, target, PINS, source)

    assert found("triton==3.7.1\nliger_kernel==0.8.5\n") == set()
    assert found("triton==3.9.0\n") == {
        "constraints-sglang.txt: torch requires triton==3.7.1, but triton==3.9.0 is pinned"
    }
    assert found("mathlib==2\n") == {"constraints-sglang.txt: the index has no wheel of mathlib==2 here"}


def test_every_file_of_pins_is_resolved() -> None:
    files = {path.name for path in ROOT.glob("constraints-*.txt")}
    assert {*overlays.OVER_TORCH, *overlays.ALONE} == files
    makefile = (ROOT / "Makefile").read_text()
    for name in files:
        assert f"-r {name}" in makefile and name in (ROOT / "MANIFEST.in").read_text()
        pins = resolve.read_pins((ROOT / name).read_text())
        for what in overlays.ACCEPTED.get(name, {}):
            package = what.partition(" requires ")[0]
            assert resolve.canonicalize_name(package) in pins, f"{what}: {package} is pinned no more"


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].keys()
    assert set(resolve.OWN_ENVIRONMENT) == {"vllm", "sglang", "environments"}
    assert resolve.NO_WHEELS == {"macos-arm64": {"liger": "triton", "megatron": "megatron-core"}}
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


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({}, "pip install 'strop[plot]'"),
        ({"url": "file:///", "dir_info": {}}, "pip install '/[plot]'"),
        ({"url": "file:///", "dir_info": {"editable": True}}, "pip install -e '/[plot]'"),
        ({"url": "file:///nowhere/strop.whl", "archive_info": {}}, "pip install 'matplotlib>=3.9'"),
        (
            {"url": "https://h/strop.whl", "archive_info": {}},
            "pip install 'strop[plot] @ https://h/strop.whl'",
        ),
        ({"url": "https://h/s", "vcs_info": {"vcs": "git"}}, "pip install 'strop[plot] @ git+https://h/s'"),
    ],
)
def test_a_missing_library_is_installed_from_where_strop_came(
    origin: dict[str, object], command: str
) -> None:
    requires = ["torch>=2.11", 'matplotlib>=3.9; extra == "plot"', 'pytest>=8; extra == "dev"']
    assert extras.command_from_source("plot", origin, requires) == command


def test_no_message_names_an_index_that_may_not_have_the_package() -> None:
    """`pip install 'strop[board]'` finds nothing while the package is not published."""
    for file in (ROOT / "strop").rglob("*.py"):
        if file.name != "extras.py":
            assert "pip install 'strop[" not in file.read_text(), file


def test_the_board_needs_no_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {resolve.Requirement(line).name for line in project["dependencies"]}
    assert {"starlette", "uvicorn"} <= core
    assert project["optional-dependencies"]["board"] == []


def test_versions_agree_and_the_changelog_has_a_section(tmp_path: Path) -> None:
    assert release.version_of(ROOT) == strop.__version__
    for name in ("pyproject.toml", "CHANGELOG.md", "strop/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n")
    with pytest.raises(ValueError, match=r"CHANGELOG\.md has no section"):
        release.version_of(tmp_path)
    (tmp_path / "strop" / "__init__.py").write_text('__version__ = "9.9"\n')
    with pytest.raises(ValueError, match="set __version__"):
        release.version_of(tmp_path)


def test_links_of_the_readme_work_on_the_page_of_an_index(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    full = release.index_readme(text, "https://host/strop", "v1.0")
    targets = re.findall(r"\]\(([^)\s]+)\)", full)
    assert len(targets) > 20
    assert all(target.startswith(("https://", "http://", "#")) for target in targets)
    assert "(https://host/strop/blob/v1.0/docs/supervised.md)" in full
    assert not re.findall(r"\]\((?!https?:|#)", release.index_readme(text, None, "v1.0"))
    for name in ("README.md", "pyproject.toml", "CHANGELOG.md", "strop/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    release.prepare(tmp_path, "https://host/strop")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Changelog"].startswith("https://host/strop/blob/v")


def test_the_metadata_has_what_an_index_page_shows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["authors"] and project["keywords"] and project["readme"] == "README.md"
    for python in resolve.PYTHONS:
        assert f"Programming Language :: Python :: {python}" in project["classifiers"]


def test_the_source_distribution_names_what_make_needs() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text().split()
    for path in release.IN_SOURCE:
        assert path in manifest or path.partition("/")[0] in manifest, path
    if not (ROOT / ".git").exists():  # tests of an unpacked source distribution
        return
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    top = {line.partition("/")[0] for line in tracked.split()}
    built_in = {"strop", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", ".gitignore"}
    assert top <= {*manifest, *built_in}, "MANIFEST.in lacks something of the tree"


@pytest.mark.slow
def test_the_wheel_alone_works_in_an_empty_environment(tmp_path: Path) -> None:
    """Build both files, check them, install the wheel, and use the quickstart, the preflight and the board."""
    release.export(tmp_path / "tree", None)
    tools = release.make_environment(tmp_path / "tools")
    files = release.build(tmp_path / "tree", tools, tmp_path / "dist")
    release.check_contents(files, tmp_path / "tree")
    (wheel,) = [file for file in files if file.suffix == ".whl"]
    release.try_wheel(wheel, tmp_path / "clean")


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, rest) of each line, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2]) for line in lines]


def test_the_dockerfile_copies_what_exists_and_installs_extras_that_exist() -> None:
    """It cannot be built in CI; so each of its lines is checked by itself."""
    extras_known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ignored = (ROOT / ".dockerignore").read_text().split()
    stages = []
    for instruction, rest in dockerfile():
        assert instruction in ("ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "CMD"), instruction
        if instruction == "FROM":
            stages.append(rest.split()[-1])
        elif instruction == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists() and source not in ignored, source
        elif instruction == "RUN":
            assert subprocess.run(["bash", "-n", "-c", rest], check=False).returncode == 0, rest
            if "pip install" in rest:
                assert "-c constraints.txt" in rest, rest
            for group in re.findall(r"'\.\[([\w,]+)\]'", rest):
                assert set(group.split(",")) <= extras_known.keys(), rest
            for program, options in re.findall(r"python (scripts/\S+) (--index \S+)\)", rest):
                words = [sys.executable, str(ROOT / program), *options.split()]
                done = subprocess.run(words, check=True, capture_output=True, text=True)
                index = options.partition(" ")[2]
                assert done.stdout.split() == ([] if index == "default" else ["--extra-index-url", index])
    assert stages == ["base", "cpu", "cuda"]


def test_every_command_of_the_dockerfile_can_be_tried(tmp_path: Path) -> None:
    found = list(try_dockerfile.commands((ROOT / "Dockerfile").read_text()))
    assert len(found) >= 9
    tried = [try_dockerfile.dry_run(command, tmp_path) for command in found]
    assert sum("pip install --dry-run" in str(command) for command in tried) == 4
    with pytest.raises(ValueError, match="runs 'curl': say in"):
        try_dockerfile.dry_run("curl https://host", tmp_path)


def test_the_images_have_what_an_installation_from_the_tree_needs() -> None:
    copied = [
        source for instruction, rest in dockerfile() if instruction == "COPY" for source in rest.split()[:-1]
    ]
    for stage_files in ("pyproject.toml", "README.md", "LICENSE", "examples", "strop"):
        assert copied.count(stage_files) == 2, stage_files
    link = ROOT / "strop" / "quickstart" / "quickstart.yaml"
    assert link.resolve().is_relative_to(ROOT / "examples")
