"""What all tests share: one thread per worker, and the census of golden cases after the run."""

from __future__ import annotations

import os
from collections import Counter

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    total: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", []):
                if name == "golden" and report.when == "call":
                    total.update(value[1])
    if total:
        terminalreporter.write_line(
            "golden cases: " + ", ".join(f"{n} {kind}" for kind, n in sorted(total.items()))
        )
