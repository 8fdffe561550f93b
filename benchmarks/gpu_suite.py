"""Run every test that needs a CUDA device and record the result.

    python benchmarks/gpu_suite.py [--jobs 4] [--commit HASH] [--out benchmarks/results/gpu_suite.json]
    python benchmarks/gpu_suite.py --limit 300 --files tests/rollout/test_kernels.py

`make test-gpu` runs this. Several processes share the tests and the device, because most of the time is spent
in starting and compiling. A test that fails there runs once more alone, and that result counts, because tests
that fill the memory may disturb each other. The record has date, commit, versions, device, and per
test file how many tests passed and failed and how long they took. It is printed in
docs/performance/startup_and_tests.md.

After `--limit` seconds the processes are stopped, and the record says which tests were running and how many
had not begun. The slowest tests and the end of each failure are printed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
OUTCOMES = ("passed", "failed", "skipped", "running", "not_run")
NOT_CRASHED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class Share:
    """A pytest plugin: keep every n-th test and write the outcome of each to a file as soon as known."""

    def __init__(self, index: int, jobs: int, out: Path) -> None:
        self.index = index
        self.jobs = jobs
        self.out = out
        self.tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Last, because other plugins take tests out and the shares are to be equal."""
        items[:] = items[self.index :: self.jobs]
        for item in items:
            self.tests[item.nodeid] = {"outcome": "not_run", "seconds": 0.0}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tests[nodeid]["outcome"] = "running"
        self._write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests[report.nodeid]
        test["seconds"] += report.duration
        if test["outcome"] == "running" or report.outcome != "passed":
            test["outcome"] = report.outcome
        if report.failed:
            test["said"] = report.longreprtext[-1500:]
        if report.when == "teardown":
            self._write()

    def _write(self) -> None:
        """Whole or not at all: the file is read after the process was stopped at any moment."""
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(self.tests))
        part.replace(self.out)


def run_share(index: int, jobs: int, out: Path, tests: list[str]) -> int:
    """In a process of its own: one share of the tests."""
    return int(pytest.main(["-m", "gpu and not vllm", *tests], plugins=[Share(index, jobs, out)]))


def run_all(jobs: int, tests: list[str], limit: float) -> tuple[dict[str, dict[str, Any]], int]:
    """Outcomes by test, and 0 if no process crashed or was stopped after `limit` seconds."""
    end = time.monotonic() + limit
    # References are computed on the CPU: with a thread per core in every process they take ten times as long.
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for index in range(jobs):
            out = Path(folder, f"{index}.json")
            command = [sys.executable, __file__, "--share", str(index), str(jobs), str(out), *tests]
            processes.append((out, subprocess.Popen(command, cwd=ROOT, env=environment)))
        codes = [ended(process, end) for _, process in processes]
        for out, _ in processes:
            if out.exists():
                results.update(json.loads(out.read_text()))
    return results, sum(abs(code) for code in codes if code not in NOT_CRASHED)


def ended(process: subprocess.Popen[bytes], end: float) -> int:
    """The exit code of a process. At the time `end` it is aborted, so that pytest prints where it stands."""
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
    try:
        return process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


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
        file = files.setdefault(name.split("::")[0], dict.fromkeys(OUTCOMES, 0) | {"seconds": 0.0})
        file[test["outcome"]] += 1
        file["seconds"] = round(file["seconds"] + test["seconds"], 1)
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=4, help="processes that share the tests")
    parser.add_argument("--commit", default="", help="where there is no git; default: git's HEAD")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu_suite.json")
    parser.add_argument("--limit", type=float, default=3600, help="seconds until the tests are stopped")
    parser.add_argument("--files", nargs="+", help="test files; default: all with tests for a GPU")
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
    tests, crashed = run_all(asked.jobs, asked.files or gpu_files(), asked.limit)
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
        for outcome in OUTCOMES:
            result[outcome] = sum(test["outcome"] == outcome for test in tests.values())
        result["stopped"] = [name for name, test in tests.items() if test["outcome"] == "running"]
        result["files"] = by_file(tests)
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
        counts = ", ".join(f"{result[outcome]} {outcome}" for outcome in OUTCOMES)
        print(f"{asked.out}: {counts}; stopped in {result['stopped']}", flush=True)
        return code

    code = write()  # also if the repetition is cut off
    for name in sorted(tests, key=lambda name: -tests[name]["seconds"])[:20]:
        print(f"{tests[name]['seconds']:7.1f} s  {name}")
    for name in failed:
        print(f"--- {name}\n{tests[name]['said']}")
    left = asked.limit - (time.perf_counter() - start)
    if failed and left > 0:
        print(f"alone: {failed}", flush=True)
        again, crashed_again = run_all(1, failed, left)
        tests.update(again)
        crashed += crashed_again
        code = write()
    return code


if __name__ == "__main__":
    sys.exit(main())
