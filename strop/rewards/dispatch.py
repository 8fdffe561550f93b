"""The rule scorer of a data source, and its score."""

from __future__ import annotations

import fnmatch
from typing import Any

from strop.catalog import SCORERS
from strop.registry import Entry, nearest
from strop.rewards.timelimit import shared_pool

TIME_LIMIT = 10.0  # seconds for one response, in scorers that can hang


def scorer_for(data_source: str) -> Entry:
    """The entry whose patterns match; the longest pattern wins, and one without wildcards wins over all."""
    matching = [
        ("*" not in pattern and "?" not in pattern and "[" not in pattern, len(pattern), name)
        for name in SCORERS.names()
        for pattern in SCORERS.entry(name).facts["sources"]
        if fnmatch.fnmatchcase(data_source, pattern)
    ]
    if not matching:
        raise ValueError(_unknown(data_source))
    return SCORERS.entry(max(matching)[2])


def check_truth(entry: Entry, data_source: str, ground_truth: Any) -> None:
    """Refuse to compare with nothing, whose score would be a zero that nobody sees."""
    if ground_truth is None and entry.facts["needs_truth"]:
        raise ValueError(
            f"The row has no ground truth, with which the scorer {entry.name!r} of the data source {data_source!r} compares. "
            "Put it into the column reward_model as ground_truth, or name its column in data.label_key. (A scorer of your own "
            "that needs none is registered with needs_truth=False.)"
        )


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    timeout: float = TIME_LIMIT,
    **options: Any,
) -> float | dict[str, Any]:
    """The score of a response, as a number or a dict with `score`; `options` go to the scorer (`method="flexible"` ...).

    Signature of a custom reward function, so that one can take its place; the rules do not read `extra_info`. A scorer
    declared slow runs in a worker process, and raises TimeoutError when `timeout` seconds are over.
    """
    if not isinstance(solution_str, str):
        raise ValueError(f"`solution_str` must be the text of the response, it is {type(solution_str).__name__}.")
    entry = scorer_for(data_source)
    check_truth(entry, data_source, ground_truth)
    if entry.facts["slow"]:
        return shared_pool().call(entry.load(), solution_str, ground_truth, timeout=timeout, **options)
    return entry.load()(solution_str, ground_truth, **options)


def _unknown(data_source: str) -> str:
    sources = sorted({pattern for name in SCORERS.names() for pattern in SCORERS.entry(name).facts["sources"]})
    close = nearest(data_source, sources)
    meant = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return (
        f"No rule scorer knows the data source {data_source!r}.{meant} Known: {', '.join(sources)}. Give your own with "
        "custom_reward_function.path=my_reward.py custom_reward_function.name=compute_score, or register a scorer with "
        "`sources` in a file listed under `plugins`."
    )
