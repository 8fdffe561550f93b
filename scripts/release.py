"""Builds the files of a release, checks them, and tests the wheel in an empty environment.

    python scripts/release.py --repository https://github.com/OWNER/strop [--out dist] [--skip-test]

The files are built from the last commit, not from the working tree. Links of README.md that lead into the
repository are written in full for the page of a package index; without --repository they become plain text,
and the metadata has no URLs. The wheel is installed with the pins of constraints.txt into a new environment
with an empty home; there the quickstart, the preflight and the board must work. Signing the tag and uploading
are left to the owner; the commands are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
BOARD_SECONDS = 60
IN_SOURCE = (
    "Makefile",
    "constraints.txt",
    "CHANGELOG.md",
    "examples/quickstart.yaml",
    "docs/index.md",
    "tests/conftest.py",
    "scripts/resolve.py",
    ".ci/run",
    "board/package.json",
)
"""Some files of each folder that `make quickstart` and `make test` need."""
SHORT = ("--largest", "9", "trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.logger=file")
"""A quickstart of seconds."""


def version_of(tree: Path) -> str:
    """The version of pyproject.toml; it must be that of the package, and CHANGELOG.md must have a section."""
    version = str(tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"])
    package = re.search(r'^__version__ = "(.+)"', (tree / "strop" / "__init__.py").read_text(), re.MULTILINE)
    if package is None or package[1] != version:
        raise ValueError(f"pyproject.toml has version {version}; set __version__ in strop/__init__.py to it.")
    released = version.partition(".dev")[0]
    if not re.search(rf"^## {re.escape(released)}\b", (tree / "CHANGELOG.md").read_text(), re.MULTILINE):
        raise ValueError(f"CHANGELOG.md has no section '## {released}'. Write one.")
    return version


def index_readme(text: str, repository: str | None, tag: str) -> str:
    """README.md for the page of an index, where relative links lead nowhere."""

    def absolute(match: re.Match[str]) -> str:
        image, label, target = match[1], match[2], match[3]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        if repository is None:
            return label
        kind = "raw" if image else "blob"
        return f"{image}[{label}]({repository}/{kind}/{tag}/{target})"

    return LINK.sub(absolute, text)


def project_urls(repository: str, tag: str) -> str:
    """[project.urls] for pyproject.toml."""
    pages = {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in pages.items())


def export(folder: Path, repository: str | None) -> str:
    """Write the last commit to `folder` with the readme and the URLs of an index; returns the version."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryFile() as file:
        file.write(archive)
        file.seek(0)
        with tarfile.open(fileobj=file) as tar:
            tar.extractall(folder, filter="data")
    return prepare(folder, repository)


def prepare(folder: Path, repository: str | None) -> str:
    """The readme and the URLs of an index in a copy of the tree; returns the version."""
    version = version_of(folder)
    readme = folder / "README.md"
    readme.write_text(index_readme(readme.read_text(), repository, f"v{version}"))
    if repository is not None:
        with (folder / "pyproject.toml").open("a") as file:
            file.write(project_urls(repository, f"v{version}"))
    return version


def make_environment(folder: Path) -> Path:
    """A new environment; returns its folder of programs."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    run([programs / "pip", "install", "--quiet", "--upgrade", "pip"])
    return programs


def build(tree: Path, tools: Path, out: Path) -> list[Path]:
    """The source distribution, and the wheel from it; both pass `twine check --strict`."""
    run([tools / "pip", "install", "--quiet", "build", "twine"])
    out.mkdir(parents=True, exist_ok=True)
    run([tools / "python", "-m", "build", "--outdir", out.resolve(), tree])
    version = version_of(tree)
    files = sorted(path for path in out.iterdir() if f"-{version}" in path.name)
    run([tools / "python", "-m", "twine", "check", "--strict", *files])
    return files


def check_contents(files: Sequence[Path], tree: Path) -> None:
    """The wheel has every file of the package, the source distribution what make needs."""
    for file in files:
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as wheel:
                names = set(wheel.namelist())
            needed = {
                str(path.relative_to(tree))
                for path in (tree / "strop").rglob("*")
                if path.is_file() and "__pycache__" not in path.parts
            }
        else:
            with tarfile.open(file) as source:
                names = {name.partition("/")[2] for name in source.getnames()}
            needed = {
                "Makefile",
                "constraints.txt",
                "CHANGELOG.md",
                "examples/quickstart.yaml",
                "docs/index.md",
            }
            needed |= {"tests/conftest.py", "scripts/resolve.py", ".ci/run", "board/package.json"}
        missing = sorted(needed - names)
        if missing:
            raise ValueError(f"{file.name} lacks {', '.join(missing)}. Correct MANIFEST.in or package-data.")


def try_wheel(wheel: Path, folder: Path, *, steps: Sequence[str] = SHORT) -> None:
    """Install the wheel alone, with an empty home, and use it far from the source tree."""
    programs = make_environment(folder / "environment")
    pins = ["-c", str(ROOT / "constraints.txt")]
    chosen = run([programs / "python", ROOT / "scripts" / "torch_build.py"]).split()
    run([programs / "pip", "install", "--quiet", *pins, *chosen, "torch"])
    run([programs / "pip", "install", "--quiet", *pins, wheel.resolve()])
    home = folder / "home"
    home.mkdir()
    clean = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home)}
    strop = programs / "strop"
    run([strop, "quickstart", *steps], cwd=home, env=clean)
    example = run(
        [programs / "python", "-c", "import strop.quickstart.quickstart as q; print(q.EXAMPLE)"], home, clean
    )
    run([strop, "check", "ppo", example.strip()], cwd=home, env=clean)
    board_answers(strop, home, clean)


def board_answers(strop: Path, home: Path, env: dict[str, str]) -> None:
    """Start the board, read its first page and its list of runs, and stop it."""
    board = subprocess.Popen(
        [strop, "board", "runs", "--port", "0"], cwd=home, env=env, stdout=subprocess.PIPE, text=True
    )
    assert board.stdout is not None
    try:
        line = board.stdout.readline()
        found = re.search(r"http://\S+", line)
        if found is None:
            raise ValueError(f"strop board did not start: {line!r}")
        page = read_url(found[0])
        runs = json.loads(read_url(found[0] + "api/runs"))
    finally:
        board.terminate()
        board.wait(BOARD_SECONDS)
    if "<html" not in page.lower() or not runs:
        raise ValueError(f"strop board shows no runs: {runs}")


def read_url(url: str) -> str:
    deadline = time.monotonic() + BOARD_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=BOARD_SECONDS) as answer:
                return answer.read().decode()
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise


def run(command: Sequence[object], cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command and return its output; its output is printed if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, check=False, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repository", help="URL of the public repository")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--skip-test", action="store_true", help="build and check only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        version = export(scratch / "tree", options.repository)
        tools = make_environment(scratch / "tools")
        files = build(scratch / "tree", tools, options.out)
        check_contents(files, scratch / "tree")
        if not options.skip_test:
            (wheel,) = [file for file in files if file.suffix == ".whl"]
            try_wheel(wheel, scratch / "clean")
    print(f"strop {version}: {', '.join(file.name for file in files)} in {options.out}")
    if ".dev" in version:
        print("A development version: set the version in pyproject.toml and strop/__init__.py to release it.")
    print(f"Next: git tag --sign v{version}; git push origin v{version}; twine upload {options.out}/*")
    return 0


if __name__ == "__main__":
    sys.exit(main())
