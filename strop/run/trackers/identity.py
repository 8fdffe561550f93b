"""Under which id a run is known to each tracker, so that a resumed run goes on in the same one: trackers.json in its folder."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable

from strop.run.durable import replace_text
from strop.run.tracking import Run

FILE = "trackers.json"
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"


def known_id(run: Run, tracker: str) -> str | None:
    """The id of a run that goes on; None for a new run, and where nobody wrote one down."""
    return None if run.resumed_from is None else _known(run).get(tracker)


def remember_id(run: Run, tracker: str, identity: str) -> None:
    run.directory.mkdir(parents=True, exist_ok=True)
    replace_text(run.directory / FILE, json.dumps({**_known(run), tracker: identity}, indent=1))


def id_of(run: Run, tracker: str, make: Callable[[], str] | None = None, length: int = 12) -> str:
    """The run's id at a tracker that lets us choose it."""
    identity = known_id(run, tracker) or (make or (lambda: new_id(length)))()
    remember_id(run, tracker, identity)
    return identity


def new_id(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))


def _known(run: Run) -> dict[str, str]:
    try:
        return dict(json.loads((run.directory / FILE).read_text()))
    except (OSError, ValueError):
        return {}
