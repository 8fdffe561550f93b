"""Notes and tags of a run: the only file that the board writes, `notes.json` in the folder of the run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

from strop.board.run_index import NotFound, RunFolder
from strop.run.atomic_files import replace_text, to_json

if TYPE_CHECKING:
    from starlette.requests import Request

FILE = "notes.json"
MAX_BYTES = 64 << 10
"""Of a request and of the file."""
MAX_NOTE = 10_000
MAX_TAGS = 16
MAX_TAG = 40


class Notes(TypedDict):
    """What somebody wrote about a run."""

    note: str
    tags: list[str]


class BadNote(ValueError):
    """Notes that are not kept, and the HTTP status that says so."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


async def answer_notes(request: Request, keep: Callable[[str, bytes], None]) -> tuple[int, str]:
    """Take the notes of a request and give them to `keep` with the id of the run; returns status and JSON."""
    try:
        body = await _sent(request)
        await asyncio.to_thread(keep, str(request.path_params["run"]), body)
    except BadNote as wrong:
        return wrong.status, to_json({"error": str(wrong)})
    except NotFound as missing:
        return 404, to_json({"error": str(missing)})
    except OSError as problem:
        return 500, to_json({"error": f"The notes were not written: {problem.strerror or problem}"})
    return 200, to_json({})


async def _sent(request: Request) -> bytes:
    """What a page of this board sent. A page of another site cannot send JSON without asking first, and is
    refused by its origin too."""
    origin = request.headers.get("origin")
    host = request.headers.get("host", "")
    is_json = request.headers.get("content-type", "").partition(";")[0].strip() == "application/json"
    if not is_json or origin not in (None, f"http://{host}", f"https://{host}"):
        raise BadNote("Notes are sent as JSON by a page of this board.", 403)
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BYTES:
            raise BadNote(f"Notes have at most {MAX_BYTES} bytes.", 413)
    return body


def parse_notes(text: bytes) -> Notes:
    """Notes from JSON; BadNote says what is wrong with them."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadNote(f"Notes are JSON; this is not: {str(error)[:100]}") from error
    if not isinstance(given, dict) or set(given) != {"note", "tags"}:
        raise BadNote('Notes are {"note": text, "tags": [text]}.')
    note = given["note"]
    tags = given["tags"]
    if not isinstance(note, str) or len(note) > MAX_NOTE:
        raise BadNote(f"note must be a text of at most {MAX_NOTE} characters.")
    if not isinstance(tags, list) or len(tags) > MAX_TAGS:
        raise BadNote(f"tags must be a list of at most {MAX_TAGS} texts.")
    for tag in tags:
        if not isinstance(tag, str) or not 0 < len(tag) <= MAX_TAG or "," in tag:
            raise BadNote(f"A tag must be a text of 1 to {MAX_TAG} characters without a comma.")
    return {"note": note, "tags": list(dict.fromkeys(tags))}


def read_notes(run: RunFolder) -> Notes:
    """The notes of a run; empty if there are none. BadNote if the file is damaged."""
    path = run.file(FILE)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadNote(f"{FILE} has more than {MAX_BYTES} bytes")
        return parse_notes(path.read_bytes())
    except FileNotFoundError:
        return {"note": "", "tags": []}
    except BadNote as problem:
        raise BadNote(f"{FILE} cannot be read: {problem}") from problem


def write_notes(run: RunFolder, notes: Notes) -> None:
    """Replace the notes of a run."""
    replace_text(run.file(FILE), to_json(notes) + "\n")
