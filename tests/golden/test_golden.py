"""Every golden case, one test a file; the census is printed at the end of the run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.golden.differences import DIFFERENCES, Difference, difference_of, table
from tests.golden.harness import Case, NotApplicable, adapter_of, cases, compare, files, our_defaults

_used: set[Difference] = set()
_ran: set[str] = set()


def mismatch(case: Case) -> str:
    """How our outputs differ from the peer's, in words; nothing if they agree."""
    try:
        got = adapter_of(case)(case)
    except NotApplicable:
        raise
    except KeyError as error:
        return f"no adapter, or it looks for {error}"
    except Exception as error:  # noqa: BLE001 - a `raises` case passes on any error, everything else is reported
        return "" if case.raises else f"{type(error).__name__}: {error}"
    if case.raises:
        return f"the peer raises {case.raises}, the adapter returned {got!r:.120}"
    return "; ".join(compare(case.outputs, got)[:3])


def mismatch_of_trained(case: Case) -> str:
    """How our default outputs differ from the peer's on trained tokens."""
    mask = case.tensor("response_mask").bool()
    with our_defaults():
        got = adapter_of(case)(case)
    wrong: list[str] = []
    for name in ("advantages", "returns"):
        expected = torch.tensor(case.outputs[name])
        wrong += compare(expected[mask].tolist(), got[name][mask], name)
    return "; ".join(wrong[:3])


def verdict(case: Case) -> tuple[str, str]:
    """applied | differing | not applicable | failed, with a reason."""
    try:
        wrong = mismatch(case)
    except NotApplicable as reason:
        return "not applicable", str(reason)
    if wrong:
        return "failed", wrong
    with our_defaults():
        by_default = mismatch(case)
    if not by_default:
        return "applied", ""
    difference = difference_of(case.function, case.tags, case.kwargs)
    if difference is None:
        return "failed", f"our default differs, and differences.py does not say why: {by_default}"
    if difference.outside and (wrong := mismatch_of_trained(case)):
        return "failed", f"only values outside the mask may differ: {wrong}"
    _used.add(difference)
    return "differing", ""


@pytest.mark.parametrize("file", files())
def test_golden(file: str, record_property: pytest.FixtureRequest) -> None:
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for case in cases(file):
        kind, reason = verdict(case)
        counts[kind] += 1
        if kind == "failed":
            failures.append(f"{case.id} {case.function.rpartition('.')[2]} {case.tags}: {reason}")
    _ran.add(file)
    record_property("golden", (file, dict(counts)))  # type: ignore[operator]
    assert not failures, f"{len(failures)} of {sum(counts.values())} cases:\n" + "\n".join(failures[:40])


def test_no_difference_is_claimed_that_no_case_shows() -> None:
    for file in set(files()) - _ran:  # run by another worker, or not chosen
        for case in cases(file):
            verdict(case)
    assert not set(DIFFERENCES) - _used


def test_the_documented_table_is_this_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    assert table() in page, (
        "docs/algorithms.md is behind: paste what `python -m tests.golden.differences` prints"
    )
