"""The schema as text: `strop config show`, `strop config explain`."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping

from strop.config.aliases import ALIASES, reason_for, translate
from strop.config.openrlhf.table import flags_for
from strop.config.schema import ROOTS
from strop.config.schema.reflect import Key, field_docs, hints, is_section, keys, type_name
from strop.config.typed import ConfigError
from strop.registry import Registry, did_you_mean, nearest


def show(root: str, tree: Mapping[str, object]) -> str:
    """A resolved configuration as YAML, the documentation of each key as a comment above it."""
    return "\n".join(_show(ROOTS[root], tree, 0)) + "\n"


def _show(kind: type, tree: Mapping[str, object], depth: int) -> list[str]:
    lines: list[str] = []
    indent = "  " * depth
    docs = field_docs(kind)
    types_of = hints(kind)
    inert: dict[str, str] = {}
    for field in dataclasses.fields(kind):
        if "inert" in field.metadata:
            inert[field.name] = field.metadata["inert"]
    for name, value in tree.items():
        doc = docs.get(name, "")
        if name in inert:
            doc += f" No effect: {inert[name]}."
        lines += textwrap.wrap(
            doc, 118 - len(indent), initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        if is_section(types_of[name]) and isinstance(value, Mapping):
            lines.append(f"{indent}{name}:")
            lines += _show(types_of[name], value, depth + 1)
        else:
            lines.append(f"{indent}{name}: {_yaml(value)}")
    return lines


def _yaml(value: object) -> str:
    import yaml

    # PyYAML writes 1e-06, which YAML 1.1 reads back as text.
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).strip()
    return text.removesuffix("\n...").removesuffix("...").strip()


def explain(name: str) -> str:
    """Everything known of one key, in every configuration that has it. Old names, OpenRLHF's flags, short
    names of training's keys and the end of a key's name are understood. Several keys with this end are
    listed."""
    training = _training_key(name)
    if training is None:
        ends = [] if _find(name) else _keys_that_end_in(name)
        if len(ends) > 1:
            return _list_of(name, ends)
        return _about(ends[0].path if ends else name)
    return f"{_about(training)}\nAnother program has a key of this very name:\n\n{_about(name)}"


def _training_key(name: str) -> str | None:
    """The key of ppo_trainer that ends in `name`, where `name` is a key of another program only.

    `rollout.n` is a key of generation, but who asks about it usually trains.
    """
    every = [key.path for key in keys(ROOTS["ppo_trainer"])]
    ends = [path for path in every if path.endswith(f".{name}")]
    elsewhere = any(key.path == name for kind in ROOTS.values() for key in keys(kind))
    if "." not in name or name in every or not elsewhere or len(ends) != 1:
        return None
    return ends[0]


def _keys_that_end_in(name: str) -> list[Key]:
    """The keys of all configurations whose last words are `name`."""
    found: dict[str, Key] = {}
    for kind in ROOTS.values():
        for key in keys(kind):
            if key.path.endswith(f".{name}"):
                found.setdefault(key.path, key)
    return list(found.values())


def _list_of(name: str, ends: list[Key]) -> str:
    """The keys with the first sentence about each."""
    lines = [f"{len(ends)} keys end in {name}; `strop config explain KEY` explains one:", ""]
    for key in ends:
        first = key.doc.partition(". ")[0].rstrip(".")
        if key.inert:
            first = f"no effect: {key.inert}"
        lines += textwrap.wrap(f"{key.path}: {first}", 118, subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def _about(name: str) -> str:
    found = _find(name)
    row = reason_for(name)
    if found is None and row is not None:
        verb = "has no effect" if row.accepted is None else "is refused if it asks for something"
        return f"{name}\n{'=' * len(name)}\nA key of verl that {verb}: {row.why}.\n"
    if found is None:
        every = [key.path for kind in set(ROOTS.values()) for key in keys(kind)]
        last = name.rpartition(".")[2]
        close = list(dict.fromkeys(nearest(name, every) + [p for p in every if p.rpartition(".")[2] == last]))
        hint = (
            f" Did you mean {' or '.join(close[:4])}?"
            if close
            else did_you_mean(last, {p.rpartition(".")[2] for p in every})
        )
        raise ConfigError(f"{name}: no such key.{hint}")
    text, roots, remark = found
    lines = [text.path, "=" * len(text.path)]
    if remark:
        lines.append(remark)
    lines += textwrap.wrap(text.doc, 118)
    lines += ["", f"type:      {type_name(text.type)}", f"default:   {default_text(text)}"]
    lines += [f"{label + ':':<10} {value}" for label, value in limits(text)]
    lines.append(f"found in:  {', '.join(roots)}")
    lines += _other_forms(text, roots)
    if text.inert:
        lines.append(f"read by:   none; {text.inert}")
    else:
        lines += _reader_lines(text, roots)
    flags = flags_for(VERB_OF[roots[0]], text.path) if roots[0] in VERB_OF else ()
    if flags:
        lines.append(f"OpenRLHF:  {', '.join('--' + flag for flag in flags)}")
    old = [
        alias.old
        for alias in ALIASES
        if not callable(alias.new) and any(_fits(new, text.path) for new in alias.new)
    ]
    if old:
        lines.append(f"old name:  {', '.join(old)}")
    longer = {key.path for kind in ROOTS.values() for key in keys(kind) if key.path.endswith(f".{text.path}")}
    if longer:
        lines.append(f"see also:  {', '.join(sorted(longer))}")
    return "\n".join(lines) + "\n"


def _other_forms(key: Key, roots: list[str]) -> list[str]:
    """The default and the meaning of a key in the configurations where they are not those of `key`."""
    forms: dict[tuple[str, str, str], list[str]] = {}
    for root in roots:
        own = next(other for other in keys(ROOTS[root]) if other.path == key.path)
        forms.setdefault((type_name(own.type), default_text(own), own.doc), []).append(root)
    forms.pop((type_name(key.type), default_text(key), key.doc))
    lines: list[str] = []
    for (kind, default, doc), where in forms.items():
        kinds = "" if kind == type_name(key.type) else f"{kind}, "
        meaning = "" if doc == key.doc else f": {doc}"
        lines += textwrap.wrap(
            f"in {', '.join(where)} ({kinds}default {default}){meaning}", 118, subsequent_indent="  "
        )
    return lines


def _reader_lines(key: Key, roots: list[str]) -> list[str]:
    """The files that read a key, as one line; none when no file does."""
    from strop.config.readers import readers  # parses the package

    files = sorted({file for root in roots for file in readers(key, root)})
    return [f"read by:   {', '.join(files)}"] if files else []


def _fits(pattern: str, path: str) -> bool:
    return path.endswith(pattern.replace("{prefix}", ""))


def _find(name: str) -> tuple[Key, list[str], str] | None:
    for root, kind in ROOTS.items():
        current, _ = translate({name: 0}, root)
        for key in keys(kind):
            if key.path in current:
                roots = [r for r, k in ROOTS.items() if any(other.path == key.path for other in keys(k))]
                return key, roots, "" if key.path == name else f"({name} is its old name)"
    flag = name.lstrip("-")
    for root, verb in VERB_OF.items():
        for key in keys(ROOTS[root]):
            if flag in flags_for(verb, key.path):
                return key, [root], f"({name} is OpenRLHF's flag for it)"
    return None


def default_text(key: Key) -> str:
    """The default of a key as YAML, or the key that it follows."""
    value = key.default
    if isinstance(value, str) and value.startswith("${") and value.endswith("}") and value.count("${") == 1:
        return f"follows {value[2:-1]}"
    return _yaml(value)


def limits(key: Key) -> list[tuple[str, str]]:
    """(label, text) of what the value of a key must satisfy."""
    facts = key.facts
    found = []
    if facts.get("choices"):
        found.append(("one of", ", ".join("null" if c is None else str(c) for c in facts["choices"])))
    registry = facts.get("one_of")
    if isinstance(registry, Registry):
        ours = [name for name in registry.names() if registry.entry(name).source == "built-in"]
        found.append(("one of", ", ".join(ours) + " (and your plugins)"))
    bounds = [f"{words} {facts[name]:g}" for name, words in BOUNDS if name in facts]
    if bounds:
        found.append(("range", ", ".join(bounds)))
    return found


VERB_OF = {"ppo_trainer": "ppo", "sft_trainer": "sft", "rm_trainer": "rm", "dpo_trainer": "dpo"}
BOUNDS = (("at_least", "at least"), ("above", "above"), ("at_most", "at most"))
