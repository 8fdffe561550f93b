"""Run every test that needs a CUDA device and record the result.

    python benchmarks/gpu_suite.py [--jobs 4] [--commit HASH] [--out benchmarks/results/gpu_suite.json]

`make test-gpu` runs this. Several processes share the tests and the device, because most of the time is spent
in starting and compiling. A test that fails there runs once more alone, and that result counts, because tests
that fill the memory may disturb each other. The record has date, commit, versions, device, and per
test file how many tests passed and failed and how long they took. docs/performance.md prints it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOT_CRASHED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class Share:
    """A pytest plugin: keep every n-th test and write the outcome of each to a file as soon as known."""

    def __init__(self, index: int, jobs: int, out: Path) -> None:
        self.index = index
        self.jobs = jobs
        self.out = out
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[self.index :: self.jobs]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] += report.duration
        if report.outcome != "passed":
            test["outcome"] = report.outcome
        if report.when == "teardown":
            self.out.write_text(json.dumps(self.tests))


def run_share(index: int, jobs: int, out: Path, tests: list[str]) -> int:
    """In a process of its own: one share of the tests."""
    return int(pytest.main(["-m", "gpu and not vllm", *tests], plugins=[Share(index, jobs, out)]))


def run_all(jobs: int, tests: list[str]) -> tuple[dict[str, dict[str, Any]], int]:
    """Outcomes by test, and 0 if no process crashed."""
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for index in range(jobs):
            out = Path(folder, f"{index}.json")
            command = [sys.executable, __file__, "--share", str(index), str(jobs), str(out), *tests]
            processes.append((out, subprocess.Popen(command, cwd=ROOT)))
        codes = [process.wait() for _, process in processes]
        for out, _ in processes:
            if out.exists():
                results.update(json.loads(out.read_text()))
    return results, sum(abs(code) for code in codes if code not in NOT_CRASHED)


def gpu_files() -> list[str]:
    """Only files that name the mark: others may import what a GPU machine does not have."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "pytest.mark.gpu" in path.read_text():
            found.append(str(path.relative_to(ROOT)))
    return found


def current_commit() -> str:
    said = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return said.stdout.strip() or "unknown"


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "triton", "peft"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def by_file(tests: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    files: dict[str, dict[str, float]] = {}
    for name, test in sorted(tests.items()):
        file = files.setdefault(name.split("::")[0], {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
        file[test["outcome"]] += 1
        file["seconds"] = round(file["seconds"] + test["seconds"], 1)
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=4, help="processes that share the tests")
    parser.add_argument("--commit", default="", help="where there is no git; default: git's HEAD")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu_suite.json")
    parser.add_argument("--share", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.share:
        index, jobs, out, *tests = asked.share
        return run_share(int(index), int(jobs), Path(out), tests)
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    start = time.perf_counter()
    tests, crashed = run_all(asked.jobs, gpu_files())
    failed = [name for name, test in tests.items() if test["outcome"] == "failed"]

    def write() -> int:
        code = crashed or int(any(test["outcome"] == "failed" for test in tests.values()))
        result: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": asked.commit or current_commit(),
            "device": torch.cuda.get_device_name(),
            "versions": versions(),
            "jobs": asked.jobs,
            "seconds": round(time.perf_counter() - start, 1),
            "exit_code": code,
            "repeated": failed,
        }
        for outcome in ("passed", "failed", "skipped"):
            result[outcome] = sum(test["outcome"] == outcome for test in tests.values())
        result["files"] = by_file(tests)
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{asked.out}: {result['passed']} passed, {result['failed']} failed", flush=True)
        return code

    code = write()  # also if the repetition is cut off
    if failed:
        print(f"alone: {failed}", flush=True)
        again, crashed_again = run_all(1, failed)
        tests.update(again)
        crashed += crashed_again
        code = write()
    return code


if __name__ == "__main__":
    sys.exit(main())
