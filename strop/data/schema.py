"""What a row of reinforcement learning says: which columns are needed, and how a row becomes fields.

    data_source   chooses the scorer
    prompt        messages [{role, content}, ...], or plain text that becomes one user message
    reward_model  {style, ground_truth}
    extra_info    anything the scorer, tools or interactions want
    ability, agent_name, images, videos   optional

Plain files (a text column, perhaps a label column) do as well: `data.label_key` names the answer, and the file's name
stands for the missing data_source.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strop.config.schema.data import Data
from strop.data.files import Rows
from strop.registry import did_you_mean

Message = dict[str, Any]
Row = Mapping[str, Any]
WRITTEN_OUT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
"""How json.dumps, or a csv file on the way, leaves messages."""


@dataclass(frozen=True)
class Keys:
    """The columns to read, by role."""

    prompt: str = "prompt"
    label: str | None = None
    source: str = "data_source"
    images: str = "images"
    videos: str = "videos"
    input_template: str | None = None

    def __post_init__(self) -> None:
        if self.input_template is not None:
            _check_template(self.input_template)

    @classmethod
    def of(cls, config: Data) -> Keys:
        return cls(
            prompt=config.prompt_key,
            label=config.label_key,
            source=config.reward_fn_key,
            images=config.image_key,
            videos=config.video_key,
            input_template=config.input_template,
        )


@dataclass(frozen=True)
class Fields:
    """A row, understood."""

    messages: list[Message]
    data_source: str
    ground_truth: Any = None
    style: str | None = None
    ability: str | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    agent_name: str | None = None
    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)


def check_columns(columns: Sequence[str], keys: Keys, *, where: str) -> None:
    """Refuse a file that lacks a column the settings name. `where` is the file."""
    needed = {"data.prompt_key": keys.prompt}
    if keys.label is not None:
        needed["data.label_key"] = keys.label
    if keys.source != "data_source" or ("reward_model" in columns and keys.label is None):
        needed["data.reward_fn_key"] = keys.source
    for setting, name in needed.items():
        require_column(columns, name, setting=setting, where=where)


def require_column(columns: Sequence[str], name: str, *, setting: str, where: str) -> None:
    if name not in columns:
        raise ValueError(
            f"{where} has no column {name!r}, which {setting}={name} asks for.{did_you_mean(name, columns)} "
            f"Its columns: {', '.join(columns) or 'none'}. Set {setting} to one of them."
        )


def row_fields(row: Row, keys: Keys, *, where: str, stem: str = "custom") -> Fields:
    """Understand one row; `where` names it in errors, `stem` is its data_source when the file has none."""
    row = {name: plain(value) for name, value in row.items()}
    if row.get(keys.prompt) is None:
        raise ValueError(f"{where}: the prompt column {keys.prompt!r} is empty.{_columns_hint(keys.prompt, row)}")
    messages = as_messages(row[keys.prompt], where=f"{where}, column {keys.prompt!r}", input_template=keys.input_template)
    reward = _struct(row, "reward_model", where)
    images, videos = (_list(row, name, where) for name in (keys.images, keys.videos))
    messages = split_placeholders(messages, {"image": len(images), "video": len(videos)}, where=where)
    return Fields(
        messages=messages,
        data_source=_data_source(row, keys, where, stem),
        ground_truth=row.get(keys.label) if keys.label else reward.get("ground_truth"),
        style=reward.get("style"),
        ability=row.get("ability"),
        extra_info=_struct(row, "extra_info", where),
        agent_name=row.get("agent_name") or None,
        images=images,
        videos=videos,
    )


def fields_at(rows: Rows, index: int, keys: Keys) -> Fields:
    """Row `index` of files, understood."""
    return row_fields(rows[index], keys, where=rows.where(index), stem=rows.place(index)[0].stem)


def as_messages(value: Any, *, where: str, input_template: str | None = None) -> list[Message]:
    """Messages as they are; plain text as one user message, wrapped in `input_template`."""
    if isinstance(value, str):
        if WRITTEN_OUT.match(value):
            raise ValueError(f"{where} is a list of messages written out as text, {_shown(value)}; store the list itself.")
        text = value if input_template is None else input_template.format(value)
        return [{"role": "user", "content": text}]
    value = plain(value)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} is {_shown(value)}; it must be text, or a list of messages with role and content.")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where}, message {number} is {_shown(message)}; a message is {{'role': ..., 'content': ...}}.")
        content = message.setdefault("content", "")
        if not isinstance(content, str | list):
            raise ValueError(f"{where}, message {number}: content is {_shown(content)}; it must be text or a list of parts.")
    return value


def plain(value: Any) -> Any:
    """Nested numpy and Arrow values as plain Python, without the nulls that parquet puts in structs.

    Rows of one parquet file share one nested type, so a row that says {"search": {...}} comes back as
    {"search": {...}, "calculator": None}; a null field is taken as absent, in every format alike.
    """
    if isinstance(value, str | bytes | bool | int | float) or value is None:
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    as_py = getattr(value, "as_py", None)
    return plain(as_py()) if callable(as_py) else value


def split_placeholders(messages: list[Message], counts: Mapping[str, int], *, where: str) -> list[Message]:
    """Turn `<image>` and `<video>` in text into content parts, if the row has such; their numbers must agree."""
    if not any(counts.values()):
        return messages
    found = dict.fromkeys(counts, 0)
    made = []
    for message in messages:
        parts = message["content"]
        if isinstance(parts, str):
            parts = list(_parts(parts, list(counts)))
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in found:
                found[kind] += 1
        has_media = any(isinstance(part, dict) and part.get("type") in counts for part in parts)
        made.append({**message, "content": parts} if has_media else message)
    for kind, count in counts.items():
        if found[kind] != count:
            raise ValueError(f"{where}: the prompt has {found[kind]} <{kind}> placeholders but the row has {count} {kind}s.")
    return made


def dig(row: Row, column: str, path: Iterable[str] | None, *, where: str) -> Any:
    """The value of a column, or one nested in it under the names of `path`."""
    value = plain(row.get(column))
    for name in path or ():
        if not isinstance(value, dict) or name not in value:
            held = list(value) if isinstance(value, dict) else []
            raise ValueError(
                f"{where}: {column!r} holds no {name!r}.{did_you_mean(name, held)} It holds {held or _shown(value)}."
            )
        value = value[name]
    return value


def _parts(text: str, kinds: list[str]) -> Iterable[dict[str, str]]:
    """Pieces of text and placeholders, in order."""
    while text:
        places = {kind: text.find(f"<{kind}>") for kind in kinds}
        places = {kind: place for kind, place in places.items() if place >= 0}
        if not places:
            yield {"type": "text", "text": text}
            return
        kind = min(places, key=lambda name: places[name])
        if places[kind]:
            yield {"type": "text", "text": text[: places[kind]]}
        yield {"type": kind}
        text = text[places[kind] + len(kind) + 2 :]


def _data_source(row: Row, keys: Keys, where: str, stem: str) -> str:
    for name in (keys.source, "datasource") if keys.source == "data_source" else (keys.source,):
        if row.get(name) is not None:
            return str(row[name])
    if keys.source in row:
        raise ValueError(f"{where}: the column {keys.source!r} is empty; it chooses the scorer, so every row needs it.")
    return stem or "custom"


def _struct(row: Row, name: str, where: str) -> dict[str, Any]:
    value = row.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{where}: the column {name!r} is {_shown(value)}; it must be a struct (a dictionary).")
    return value


def _list(row: Row, name: str, where: str) -> list[Any]:
    value = row.get(name)
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{where}: the column {name!r} is {_shown(value)}; it must be a list.")
    return value or []


def _columns_hint(name: str, row: Row) -> str:
    others = [column for column in row if column != name]
    return f"{did_you_mean(name, others)} The row has: {', '.join(others) or 'nothing else'}."


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _check_template(template: str) -> None:
    try:
        kept = "\0" in template.format("\0")
    except (IndexError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(
            f"data.input_template={template!r} is not a format string with one {{}}: {type(error).__name__}: {error}. "
            "Write {{ and }} for braces that should stay."
        ) from error
    if not kept:
        raise ValueError(f"data.input_template={template!r} has no {{}}, so the prompt would be lost. Put {{}} where it goes.")
