"""What survives a restart: one folder of small files, each written whole before it is referred to.

    service.json                       the model that is served; another one is refused
    lock                               held by the service that runs
    sessions/ID.json                   owner, whether it has ended
    models/ID/model.json               owner, rank, seed; the adapter's first weights follow from them
    models/ID/requests/SEQ             an accepted request: a line of JSON, then its body
    models/ID/answers/SEQ              the answer to it: a line of JSON, then its body
    models/ID/snapshot.json            which request the newest snapshot follows
    models/ID/snapshots/SEQ/           weights and optimizer state after that request
    models/ID/weights/NAME/            checkpoints of users
    models/ID/sampler_weights/NAME/    weights that samplers use
    samplers/ID.json                   a sampling session: its owner and its weights

A request is durable when its id has been returned, and an answer before anyone can read it. So after a crash
every model is its newest snapshot plus the requests after it, computed again in their order.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from strop.run.atomic_files import flush_folder, flush_tree, replace_text, to_json, write_file

FORMAT = 1
_DIGITS = 12
"""Of sequence numbers in file names, so that names sort as numbers."""


@dataclass(frozen=True)
class SessionRecord:
    """A client's session."""

    session_id: str
    owner: str
    metadata: dict[str, str] = field(default_factory=dict)
    ended: bool = False


@dataclass(frozen=True)
class ModelRecord:
    """An adapter that a user trains."""

    model_id: str
    owner: str
    session_id: str
    rank: int
    seed: int
    created: float
    """Seconds since 1970."""
    metadata: dict[str, str] = field(default_factory=dict)
    ended: bool = False
    """The user unloaded it, or its session ended: only its checkpoints are left."""


@dataclass(frozen=True)
class SamplerRecord:
    """A sampling session: which weights it samples from."""

    sampler_id: str
    owner: str
    session_id: str
    path: str | None
    """tinker:// path of the weights; None: the base model."""


@dataclass(frozen=True)
class Stored:
    """A request or an answer on disk: what it is, and its body."""

    kind: str
    """Of a request: forward_backward, optim_step ... Of an answer: json, proto, error."""
    body: bytes
    facts: dict[str, str] = field(default_factory=dict)


class StateStore:
    """Reads and writes the state folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("sessions", "models", "samplers"):
            (root / name).mkdir(parents=True, exist_ok=True)

    # --- the service ----------------------------------------------------------------------------------------

    def claim(self, base_model: str) -> None:
        """Note the model on first use; ValueError if the folder belongs to another one, or to a service that
        runs. The kernel releases the lock when this process ends."""
        lock = os.open(self.root / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise ValueError(
                f"server.state_dir={self.root} belongs to a service that has not ended. Set another "
                "server.state_dir, or end that service."
            ) from error
        except OSError:
            pass  # a file system without locks
        path = self.root / "service.json"
        if not path.exists():
            replace_text(path, to_json({"format": FORMAT, "base_model": base_model}))
            return
        found = json.loads(path.read_text())
        if found.get("format") != FORMAT:
            raise ValueError(
                f"{path} has format {found.get('format')}, this version writes {FORMAT}. Set another "
                "server.state_dir."
            )
        if found["base_model"] != base_model:
            raise ValueError(
                f"The adapters in {self.root} belong to the model {found['base_model']}, not to {base_model}."
                " Set another server.state_dir, or serve that model."
            )

    # --- records --------------------------------------------------------------------------------------------

    def write_session(self, record: SessionRecord) -> None:
        replace_text(self.root / "sessions" / f"{record.session_id}.json", to_json(asdict(record)))

    def write_sampler(self, record: SamplerRecord) -> None:
        replace_text(self.root / "samplers" / f"{record.sampler_id}.json", to_json(asdict(record)))

    def drop_sampler(self, sampler_id: str) -> None:
        (self.root / "samplers" / f"{sampler_id}.json").unlink(missing_ok=True)

    def write_model(self, record: ModelRecord) -> None:
        folder = self.model_folder(record.model_id)
        for name in ("requests", "answers", "snapshots", "weights", "sampler_weights"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        replace_text(folder / "model.json", to_json(asdict(record)))
        flush_folder(folder.parent)

    def sessions(self) -> list[SessionRecord]:
        return [SessionRecord(**_content(path)) for path in _records(self.root / "sessions")]

    def samplers(self) -> list[SamplerRecord]:
        return [SamplerRecord(**_content(path)) for path in _records(self.root / "samplers")]

    def models(self) -> list[ModelRecord]:
        found = []
        for folder in sorted((self.root / "models").iterdir()):
            path = folder / "model.json"
            if path.exists():  # else the service died before the model was accepted
                found.append(ModelRecord(**_content(path)))
        return found

    def model_folder(self, model_id: str) -> Path:
        return self.root / "models" / model_id

    # --- requests and answers -------------------------------------------------------------------------------

    def write_request(self, model_id: str, seq: int, request: Stored) -> None:
        _write_stored(self.model_folder(model_id) / "requests" / _file_name(seq), request)

    def write_answer(self, model_id: str, seq: int, answer: Stored) -> None:
        _write_stored(self.model_folder(model_id) / "answers" / _file_name(seq), answer)

    def read_answer(self, model_id: str, seq: int) -> Stored | None:
        path = self.model_folder(model_id) / "answers" / _file_name(seq)
        return _read_stored(path) if path.exists() else None

    def answered(self, model_id: str) -> list[int]:
        return sorted(_numbers(self.model_folder(model_id) / "answers"))

    def requests(self, model_id: str, after: int) -> Iterator[tuple[int, Stored]]:
        """Accepted requests after a sequence number, in order."""
        folder = self.model_folder(model_id) / "requests"
        for seq in sorted(_numbers(folder)):
            if seq > after:
                yield seq, _read_stored(folder / _file_name(seq))

    def last_seq(self, model_id: str) -> int:
        """The highest sequence number that was ever accepted."""
        folder = self.model_folder(model_id)
        return max(
            [self.snapshot(model_id)[0], *_numbers(folder / "requests"), *_numbers(folder / "answers")]
        )

    def drop_answers(self, model_id: str, keep: int) -> None:
        """Forget all but the newest answers."""
        folder = self.model_folder(model_id) / "answers"
        for seq in self.answered(model_id)[:-keep]:
            (folder / _file_name(seq)).unlink(missing_ok=True)

    # --- snapshots ------------------------------------------------------------------------------------------

    def snapshot(self, model_id: str) -> tuple[int, Path | None]:
        """The request that the newest snapshot follows, and its folder; (-1, None) before the first."""
        path = self.model_folder(model_id) / "snapshot.json"
        if not path.exists():
            return -1, None
        seq = int(json.loads(path.read_text())["seq"])
        return seq, self.model_folder(model_id) / "snapshots" / _file_name(seq)

    def new_snapshot_folder(self, model_id: str, seq: int) -> Path:
        """The folder that a snapshot is written to before `commit_snapshot`."""
        folder = self.model_folder(model_id) / "snapshots" / _file_name(seq)
        shutil.rmtree(folder, ignore_errors=True)  # what a crash left of an earlier attempt
        return folder

    def commit_snapshot(self, model_id: str, seq: int) -> None:
        """Make a written snapshot the one that counts; requests up to it are not needed any more."""
        folder = self.model_folder(model_id)
        flush_tree(folder / "snapshots")
        replace_text(folder / "snapshot.json", to_json({"seq": seq}))
        for old in _numbers(folder / "snapshots"):
            if old != seq:
                shutil.rmtree(folder / "snapshots" / _file_name(old))
        for done in _numbers(folder / "requests"):
            if done <= seq:
                (folder / "requests" / _file_name(done)).unlink()

    # --- checkpoints ----------------------------------------------------------------------------------------

    def checkpoint_folder(self, model_id: str, kind: str, name: str) -> Path:
        return self.model_folder(model_id) / kind / name

    def checkpoint_names(self, model_id: str, kind: str) -> list[str]:
        folder = self.model_folder(model_id) / kind
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))

    def commit_checkpoint(self, written: Path, model_id: str, kind: str, name: str) -> None:
        """Give a completely written folder its name, replacing an older one."""
        flush_tree(written)
        target = self.checkpoint_folder(model_id, kind, name)
        if target.exists():
            old = target.with_name(f".old-{name}")
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
            written.rename(target)
            shutil.rmtree(old)
        else:
            written.rename(target)
        flush_folder(target.parent)

    def temporary_checkpoint(self, model_id: str, kind: str, name: str) -> Path:
        folder = self.model_folder(model_id) / kind / f".new-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def drop_checkpoint(self, model_id: str, kind: str, name: str) -> None:
        shutil.rmtree(self.checkpoint_folder(model_id, kind, name), ignore_errors=True)

    def end_model(self, record: ModelRecord) -> None:
        """Keep the checkpoints of a model and forget how to train it on."""
        self.write_model(replace(record, ended=True))
        folder = self.model_folder(record.model_id)
        for name in ("requests", "snapshots"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "snapshot.json").unlink(missing_ok=True)


# --- files --------------------------------------------------------------------------------------------------


def _file_name(seq: int) -> str:
    return f"{seq:0{_DIGITS}d}"


def _numbers(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


def _records(folder: Path) -> list[Path]:
    return sorted(folder.glob("[!.]*.json"))


def _content(path: Path) -> dict[str, Any]:
    """The fields of a record; the dataclass refuses other names."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _write_stored(path: Path, stored: Stored) -> None:
    header: Mapping[str, object] = {"kind": stored.kind, "facts": stored.facts, "size": len(stored.body)}
    temporary = path.with_name(f".{path.name}.new")
    write_file(temporary, [to_json(header).encode(), b"\n", stored.body])
    temporary.replace(path)
    flush_folder(path.parent)


def _read_stored(path: Path) -> Stored:
    header, _, body = path.read_bytes().partition(b"\n")
    content = json.loads(header)
    if len(body) != content["size"]:
        raise ValueError(f"{path} is damaged: {len(body)} bytes instead of {content['size']}.")
    return Stored(content["kind"], body, content["facts"])
