"""Run every test that needs a CUDA device and record the result.

    python benchmarks/gpu_suite.py [--commit HASH] [--out benchmarks/results/gpu_suite.json]

`make test-gpu` runs this. The record has the date, the commit, the versions, the device, and per test file
how many tests passed and failed and how long they took. docs/performance.md prints it.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


class Record:
    """A pytest plugin that counts outcomes per file."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, float]] = collections.defaultdict(
            lambda: {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0}
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        counts = self.files[report.nodeid.split("::")[0]]
        counts["seconds"] += report.duration
        if report.when == "call" or report.outcome != "passed":
            counts[report.outcome] += 1


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="", help="where there is no git; default: git's HEAD")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu_suite.json")
    asked = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    record = Record()
    start = time.perf_counter()
    code = pytest.main(["-m", "gpu and not vllm", *gpu_files()], plugins=[record])
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": asked.commit or current_commit(),
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "seconds": round(time.perf_counter() - start, 1),
        "exit_code": int(code),
    }
    for outcome in ("passed", "failed", "skipped"):
        result[outcome] = int(sum(counts[outcome] for counts in record.files.values()))
    rounded = {}
    for name, counts in sorted(record.files.items()):
        rounded[name] = {**counts, "seconds": round(counts["seconds"], 1)}
    result["files"] = rounded
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{asked.out}: {result['passed']} passed, {result['failed']} failed")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
