"""The schema of RL data: the columns of a file, and how a row is parsed to `RowFields`.

    data_source   selects the scorer
    prompt        messages [{role, content}, ...], or plain text that becomes one user message
    reward_model  {style, ground_truth}
    extra_info    anything that the scorer, tools or interactions need
    ability, agent_name   optional
    images, videos        optional; a prompt has <image> where an image goes, <video> where a video goes

Files with only a text column and perhaps a label column work too: `data.label_key` names the answer, and the
file name replaces the missing data_source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from strop.config.schema.data import DataConfig
from strop.data.files import FileRows
from strop.data.image_files import UnusableImages
from strop.registry import did_you_mean

Message = dict[str, Any]
Row = Mapping[str, Any]
MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
"""Messages that were converted to text, by json.dumps or a csv file."""


@dataclass(frozen=True)
class ColumnKeys:
    """The names of the columns to read."""

    prompt: str = "prompt"
    label: str | None = None
    source: str = "data_source"
    images: str = "images"
    videos: str = "videos"
    input_template: str | None = None

    def __post_init__(self) -> None:
        if self.input_template is not None:
            check_template(self.input_template)

    @classmethod
    def from_config(cls, config: DataConfig) -> ColumnKeys:
        """Return the column names of a configuration."""
        return cls(
            prompt=config.prompt_key,
            label=config.label_key,
            source=config.reward_fn_key,
            images=config.image_key,
            videos=config.video_key,
            input_template=config.input_template,
        )


@dataclass(frozen=True)
class RowFields:
    """A parsed row."""

    messages: list[Message]
    data_source: str
    ground_truth: object = None
    style: str | None = None
    ability: str | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    agent_name: str | None = None
    images: list[object] = field(default_factory=list)
    videos: list[object] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    """What a reward function may ask for by name besides extra_info (`columns_by_name`)."""
    where: str = ""
    """The row, for messages."""
    folder: Path | None = None
    """The folder of its file, for relative paths of images."""


def check_columns(columns: Sequence[str], keys: ColumnKeys, *, where: str) -> None:
    """Raise ValueError if a file lacks a column that the settings name; `where` is the file."""
    needed = {"data.prompt_key": keys.prompt}
    if keys.label is not None:
        needed["data.label_key"] = keys.label
    if keys.source != "data_source" or ("reward_model" in columns and keys.label is None):
        needed["data.reward_fn_key"] = keys.source
    for setting, name in needed.items():
        require_column(columns, name, setting=setting, where=where)


def require_column(columns: Sequence[str], name: str, *, setting: str, where: str) -> None:
    """Raise ValueError if the column `name`, the value of `setting`, is missing."""
    if name not in columns:
        raise ValueError(
            f"{where} has no column {name!r}, which {setting}={name} asks for.{did_you_mean(name, columns)} "
            f"Its columns: {', '.join(columns) or 'none'}. Set {setting} to one of them."
        )


def parse_row(
    row: Row,
    keys: ColumnKeys,
    *,
    where: str,
    stem: str = "custom",
    folder: Path | None = None,
    columns: Collection[str] = (),
) -> RowFields:
    """Parse one row; `where` names it in errors, `stem` is its data_source if the file has no such column.
    `columns`: those of its file, of which a row of JSON may lack some."""
    try:
        row = {name: to_plain(value) for name, value in row.items()}
    except RecursionError as error:
        raise ValueError(f"{where} has lists or objects that are nested too deeply.") from error
    if row.get(keys.prompt) is None:
        raise ValueError(
            f"{where}: the prompt column {keys.prompt!r} is empty.{_columns_hint(keys.prompt, row)}"
        )
    messages = as_messages(
        row[keys.prompt], where=f"{where}, column {keys.prompt!r}", input_template=keys.input_template
    )
    reward = _struct(row, "reward_model", where)
    images = _list(row, keys.images, where)
    videos = _list(row, keys.videos, where)
    for column, found, mark in ((keys.images, images, "<image>"), (keys.videos, videos, "<video>")):
        known = column in row or column in columns
        if known and not found and any(mark in str(one["content"]) for one in messages):
            raise UnusableImages(f"{where}: the prompt has {mark} but its column {column!r} is empty.")
    messages = split_placeholders(messages, {"image": len(images), "video": len(videos)}, where=where)
    ground_truth = reward.get("ground_truth")
    if keys.label:
        ground_truth = row.get(keys.label)
    return RowFields(
        messages=messages,
        data_source=_data_source(row, keys, where, stem),
        ground_truth=ground_truth,
        style=reward.get("style"),
        ability=row.get("ability"),
        extra_info=_struct(row, "extra_info", where),
        agent_name=row.get("agent_name") or None,
        images=images,
        videos=videos,
        columns=columns_by_name(row, columns, keys.prompt, hidden=(keys.images, keys.videos)),
        where=where,
        folder=folder,
    )


def columns_by_name(
    row: Row, columns: Collection[str], prompt: str, *, hidden: Collection[str] = ()
) -> dict[str, Any]:
    """The columns of a row that reward functions get by name, besides those of the schema and without the
    `hidden` ones; null where only other rows of the file have a value. `prompt` is one if it is a text."""
    known = {prompt, "prompt", "data_source", "reward_model", "extra_info", *hidden}
    found = {name: row.get(name) for name in [*columns, *row] if name not in known}
    if isinstance(row.get(prompt), str):
        found["prompt"] = row[prompt]
    return found


def read_row(rows: FileRows, index: int, keys: ColumnKeys) -> RowFields:
    """Return row `index` of files, parsed."""
    file = rows.place(index)[0]
    return parse_row(
        rows[index],
        keys,
        where=rows.where(index),
        stem=file.stem,
        folder=file.path.parent,
        columns=file.columns,
    )


def as_messages(value: object, *, where: str, input_template: str | None = None) -> list[Message]:
    """Return messages unchanged, and plain text as one user message, formatted with `input_template`."""
    if isinstance(value, str):
        if MESSAGES_AS_TEXT.match(value):
            raise ValueError(
                f"{where} is a list of messages written out as text, {_shown(value)}; store the list itself."
            )
        if input_template is not None:
            value = input_template.format(value)
        return [{"role": "user", "content": value}]
    value = to_plain(value)
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{where} is {_shown(value)}; it must be text, or a list of messages with role and content."
        )
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"{where}, message {index} is {_shown(message)}; a message is {{'role': ..., 'content': "
                "...}."
            )
        content = message.setdefault("content", "")
        if not isinstance(content, str | list):
            raise ValueError(
                f"{where}, message {index}: content is {_shown(content)}; it must be text or a list of parts."
            )
    return value


def tool_schemas(value: object, *, where: str) -> list[dict[str, Any]] | None:
    """Return schemas of tools, of which the list or each one may be JSON text; None if there are none."""
    value = _from_json(to_plain(value), where)
    if not value:
        return None
    if isinstance(value, list):
        value = [_from_json(tool, where) for tool in value]
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f"{where} is {_shown(value)}; it must be a list of JSON schemas of tools.")
    return value


def _from_json(value: Any, where: str) -> Any:
    """Return what JSON text holds; other values are unchanged."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{where} is {_shown(value)}, which is no JSON: {error}.") from error


def to_plain(value: Any) -> Any:
    """Return nested numpy and Arrow values as plain Python, without the nulls that parquet puts in structs.

    Rows of one parquet file share one nested type, so a row {"search": {...}} is read as {"search": {...},
    "calculator": None}; a null field counts as absent, in every file format.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str | bytes | bool | int | float) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, np.ndarray):
        return [to_plain(item) for item in value.tolist()]
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    as_py = getattr(value, "as_py", None)
    if callable(as_py):
        return to_plain(as_py())
    return value


def split_placeholders(messages: list[Message], counts: Mapping[str, int], *, where: str) -> list[Message]:
    """Turn `<image>` and `<video>` in text into content parts; `counts` says how many of them the row has.
    A kind that it has none of is text."""
    counts = {kind: count for kind, count in counts.items() if count}
    if not counts:
        return messages
    found = dict.fromkeys(counts, 0)
    result = []
    for message in messages:
        parts = message["content"]
        if isinstance(parts, str):
            parts = list(_parts(parts, list(counts)))
        has_media = False
        for part in parts:
            if isinstance(part, dict) and part.get("type") in found:
                found[part["type"]] += 1
                has_media = True
        if has_media:
            message = {**message, "content": parts}
        result.append(message)
    for kind, count in counts.items():
        if found[kind] != count:
            raise UnusableImages(
                f"{where}: the prompt has {found[kind]} <{kind}> placeholders but the row has {count} "
                f"{kind}s."
            )
    return result


def nested_value(row: Row, column: str, path: Iterable[str] | None, *, where: str) -> Any:
    """Return the value of a column, or the one nested in it under the names of `path`."""
    value = to_plain(row.get(column))
    for name in path or ():
        keys = []
        if isinstance(value, dict):
            keys = list(value)
        if name not in keys:
            raise ValueError(
                f"{where}: {column!r} holds no {name!r}.{did_you_mean(name, keys)} It holds "
                f"{keys or _shown(value)}."
            )
        value = value[name]
    return value


def _parts(text: str, kinds: list[str]) -> Iterable[dict[str, str]]:
    """Yield the texts and placeholders of a text, in order."""
    pattern = "|".join(f"<{re.escape(kind)}>" for kind in kinds)
    position = 0
    for match in re.finditer(pattern, text):
        if match.start() > position:
            yield {"type": "text", "text": text[position : match.start()]}
        yield {"type": match.group()[1:-1]}
        position = match.end()
    if position < len(text):
        yield {"type": "text", "text": text[position:]}


def _data_source(row: Row, keys: ColumnKeys, where: str, stem: str) -> str:
    if row.get(keys.source) is not None:
        return str(row[keys.source])
    if keys.source == "data_source" and row.get("datasource") is not None:
        return str(row["datasource"])
    if keys.source in row:
        raise ValueError(
            f"{where}: the column {keys.source!r} is empty; it chooses the scorer, so every row needs it."
        )
    return stem or "custom"


def _struct(row: Row, name: str, where: str) -> dict[str, Any]:
    value = row.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(
            f"{where}: the column {name!r} is {_shown(value)}; it must be a struct (a dictionary)."
        )
    return value


def _list(row: Row, name: str, where: str) -> list[object]:
    value = row.get(name)
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{where}: the column {name!r} is {_shown(value)}; it must be a list.")
    return value or []


def _columns_hint(name: str, row: Row) -> str:
    others = [column for column in row if column != name]
    return f"{did_you_mean(name, others)} The row has: {', '.join(others) or 'nothing else'}."


def _shown(value: object) -> str:
    """Return the type and the shortened value, for messages."""
    text = repr(value)
    if len(text) > 80:
        text = text[:77] + "..."
    return f"{type(value).__name__} {text}"


def check_template(template: str) -> None:
    """ValueError for a data.input_template that is no format string with a place for the prompt."""
    try:
        has_placeholder = "\0" in template.format("\0")
    except (IndexError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(
            f"data.input_template={template!r} is not a format string with one {{}}: {type(error).__name__}: "
            f"{error}. Write {{{{ and }}}} for braces that should stay."
        ) from error
    if not has_placeholder:
        raise ValueError(
            f"data.input_template={template!r} has no {{}}, so the prompt would be lost. Put {{}} where it "
            "goes."
        )
