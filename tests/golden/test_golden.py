"""Every golden case, one test a file; the census is printed at the end of the run."""

from __future__ import annotations

import fnmatch
from collections import Counter

import pytest

from tests.golden.differences import DIFFERENCES
from tests.golden.harness import Case, NotApplicable, adapter_of, cases, compare, files


def verdict(case: Case) -> tuple[str, str]:
    """applied | differing | not applicable | failed, with a reason."""
    try:
        adapter = adapter_of(case)
    except KeyError:
        return "failed", f"no adapter for {case.function}"
    try:
        got = adapter(case)
    except NotApplicable as reason:
        return "not applicable", str(reason)
    except Exception as error:  # noqa: BLE001 - a `raises` case passes on any error, everything else is reported below
        if case.raises:
            return kind_of(case), ""
        return "failed", f"{type(error).__name__}: {error}"
    if case.raises:
        return "failed", f"the peer raises {case.raises}, the adapter returned {got!r:.120}"
    wrong = compare(case.outputs, got)
    return ("failed", "; ".join(wrong[:3])) if wrong else (kind_of(case), "")


def kind_of(case: Case) -> str:
    for (pattern, tag), _ in DIFFERENCES.items():
        if fnmatch.fnmatch(case.function, pattern) and (not tag or tag in case.tags):
            return "differing"
    return "applied"


@pytest.mark.parametrize("file", files())
def test_golden(file: str, record_property: pytest.FixtureRequest) -> None:
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for case in cases(file):
        kind, reason = verdict(case)
        counts[kind] += 1
        if kind == "failed":
            failures.append(f"{case.id} {case.function.rpartition('.')[2]} {case.tags}: {reason}")
    record_property("golden", (file, dict(counts)))  # type: ignore[operator]
    assert not failures, f"{len(failures)} of {sum(counts.values())} cases:\n" + "\n".join(failures[:40])
