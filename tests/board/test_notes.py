"""Notes and tags of runs: what is kept, what is refused, and who may write."""

from __future__ import annotations

import http.client
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from strop.board.app import Board
from strop.board.notes import BadNote
from tests.board.scene import line, serving
from tests.board.test_app import runs


def send(url: str, run: str, body: str, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    given = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    connection.request("POST", f"/api/runs/{run}/notes", body, given)
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def test_notes_are_kept_with_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(line(1, loss=1.0))
    wanted = {"note": "better lr", "tags": ["baseline", "lr"]}
    with serving(tmp_path) as url:
        run = runs(url)["one"]["id"]
        assert send(url, run, json.dumps(wanted)) == (200, {})
        assert {name: runs(url)["one"][name] for name in wanted} == wanted
        assert send(url, "gone", json.dumps(wanted))[0] == 404
        for body in ("{", "[]", "{}", '{"note": 1, "tags": []}', '{"note": "", "tags": [""]}'):
            assert send(url, run, body)[0] == 400, body
        assert send(url, run, json.dumps({"note": "x" * 70_000, "tags": []}))[0] == 413
        origin = urlsplit(url)
        other_site = {"content_type": "text/plain"}, {"origin": "http://evil.example"}, {"origin": "null"}
        for headers in other_site:
            assert send(url, run, json.dumps({"note": "stolen", "tags": []}), **headers)[0] == 403, headers
        assert send(url, run, json.dumps(wanted), origin=f"{origin.scheme}://{origin.netloc}")[0] == 200
    assert json.loads((folder / "notes.json").read_text()) == wanted
    (folder / "notes.json").write_text("{")
    with serving(tmp_path) as url:
        assert "notes.json cannot be read" in runs(url)["one"]["damaged"][0]
    (folder / "notes.json").unlink()
    (folder / "notes.json").symlink_to(tmp_path / "secret")
    with serving(tmp_path) as url:
        assert send(url, run, json.dumps(wanted))[0] == 404 and not (tmp_path / "secret").exists()
    with pytest.raises(BadNote, match="read-only"):
        Board(tmp_path, read_only=True).note(run, b"")


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_what_stands_where_notes_are_written_first_is_neither_followed_nor_waited_for(
    tmp_path: Path, planted: str
) -> None:
    """The folders of runs may belong to other users."""
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(line(1, loss=1.0))
    own = tmp_path / "own.txt"
    own.write_text("precious")
    if planted == "link":
        (folder / ".notes.json.new").symlink_to(own)
    else:
        os.mkfifo(folder / ".notes.json.new")
    board = Board(tmp_path / "runs")
    (run,) = board.runs.all()
    writer = threading.Thread(target=board.note, args=(run, b'{"note": "x", "tags": []}'), daemon=True)
    writer.start()
    writer.join(10)
    assert not writer.is_alive() and own.read_text() == "precious"
    assert not (folder / "notes.json").is_symlink()
    assert json.loads((folder / "notes.json").read_text()) == {"note": "x", "tags": []}


def test_notes_of_several_writers_are_whole(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "metrics.jsonl").write_text(line(1, loss=1.0))
    board = Board(tmp_path)
    (run,) = board.runs.all()
    bodies = [json.dumps({"note": f"{writer}" * 5000, "tags": []}).encode() for writer in range(4)]
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda body: board.note(run, body), bodies * 10))
    assert len(set(json.loads((tmp_path / "one" / "notes.json").read_text())["note"])) == 1
