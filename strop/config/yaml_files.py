"""Read YAML files of users, within limits.

A few lines of YAML can stand for any amount of data: an alias repeats what its anchor names, and aliases of
aliases multiply. Deep nesting ends in a RecursionError of the parser. Both are counted in the events of the
file, before anything is built from them.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yaml import MappingNode, Node, SafeLoader

MAX_DEPTH = 50
MAX_NODES = 200_000
"""Keys, values and list items, where an alias counts as often as what it repeats."""
BAD_VALUES = (ValueError, LookupError, AttributeError, TypeError, OverflowError)
"""What PyYAML raises for numbers, dates and tagged values (`!!int ''`) that Python does not take."""


def read_yaml(file: Path, where: str) -> object:
    """The content of a YAML file as OmegaConf reads it: 1e-3 is a number, a date is text, a key that appears
    twice is an error, and ${oc.env:NAME} is a variable of the environment. ValueError begins with `where` and
    says what is wrong."""
    import yaml

    text = read_limited(file, where)
    try:
        content = yaml.load(text, _loader())
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not YAML: {' '.join(str(error).split())}") from error
    except BAD_VALUES as error:
        raise ValueError(
            f"{where} has a value that cannot be read: {type(error).__name__}: {error}"
        ) from error
    return _with_environment(content, where)


_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+")
"""Numbers that PyYAML, other than OmegaConf, takes for text."""
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*(\w+)\s*(?:,\s*('[^']*'|\"[^\"]*\"|[^{}]*?)\s*)?\}")


@cache
def _loader() -> type[SafeLoader]:
    """PyYAML's safe loader with the rules of OmegaConf."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: dict[str, Node]) -> MappingNode:
            node = super().compose_mapping_node(anchor)
            keys = set()
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:str" and key.value in keys:
                    raise yaml.composer.ComposerError(
                        "while reading a section", node.start_mark, f"found {key.value} twice", key.start_mark
                    )
                if isinstance(key, yaml.ScalarNode):
                    keys.add(key.value)
            return node

    Loader.yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
        for letter, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
    return Loader


def _with_environment(value: object, where: str) -> object:
    """The value with ${oc.env:NAME} and ${oc.env:NAME,default} replaced in its texts."""
    if isinstance(value, dict):
        return {name: _with_environment(below, where) for name, below in value.items()}
    if isinstance(value, list):
        return [_with_environment(item, where) for item in value]
    if not isinstance(value, str):
        return value

    def variable(found: re.Match[str]) -> str:
        name, default = found.groups()
        if name in os.environ:
            return os.environ[name]
        if default is None:
            raise ValueError(
                f"{where} reads the environment variable {name}, which is not set. Set it, or write a "
                f"default: ${{oc.env:{name},DEFAULT}}."
            )
        return str(default).strip("'\"")

    return _VARIABLE.sub(variable, value)


def read_limited(file: Path, where: str) -> str:
    """The text of a YAML file that is not nested too deep and does not grow by its aliases. What is no YAML
    passes: its parser has the better message."""
    if not file.is_file():
        raise ValueError(f"{where} does not exist: there is no such file.")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    problem = limit_exceeded(text)
    if problem is not None:
        raise ValueError(f"{where} {problem}")
    return text


def limit_exceeded(text: str) -> str | None:
    """What is too large in a YAML text; None if nothing is, or if the text is no YAML.

    >>> limit_exceeded("[" * 60)
    'is nested more than 50 levels deep. Write it flatter.'
    """
    import yaml
    from yaml import events

    open_nodes: list[tuple[str | None, int]] = []
    sizes: dict[str, int] = {}
    total = 0
    try:
        # The parser in C is ten times faster; some installations lack it.
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(event, events.CollectionStartEvent):
                open_nodes.append((event.anchor, total))
                total += 1
                if len(open_nodes) > MAX_DEPTH:
                    return f"is nested more than {MAX_DEPTH} levels deep. Write it flatter."
            elif isinstance(event, events.CollectionEndEvent):
                anchor, before = open_nodes.pop()
                if anchor is not None:
                    sizes[anchor] = total - before
            elif isinstance(event, events.ScalarEvent):
                total += 1
                if event.anchor is not None:
                    sizes[event.anchor] = 1
            elif isinstance(event, events.AliasEvent):
                if any(anchor == event.anchor for anchor, _ in open_nodes):
                    return f"repeats &{event.anchor} inside itself, which never ends."
                total += sizes.get(event.anchor, 1)
            if total > MAX_NODES:
                return (
                    f"holds more than {MAX_NODES:,} values, counting what its aliases (*name) repeat. Write "
                    "out what is needed, or make the lists shorter."
                )
    except yaml.YAMLError:
        return None
    return None
