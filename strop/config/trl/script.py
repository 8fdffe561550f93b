"""Reads the settings of a TRL run: from a Python script, which is parsed and never executed, or from the
words of a `trl` command.

In a script, the constructor calls of TRL's configurations and trainers are found (`GRPOConfig(...)`,
`GRPOTrainer(...)`), and of peft's LoraConfig. An argument counts if it is a literal, or a name to which the
script assigns a literal once. What only running the script could tell is reported as an expression.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from strop.config.yaml_files import read_limited

TRAINERS = {"GRPO": "grpo", "RLOO": "rloo", "SFT": "sft", "DPO": "dpo", "KTO": "kto", "Reward": "reward"}
"""Prefix of TRL's class names, and TRL's command."""


@dataclass(frozen=True)
class Expression:
    """An argument whose value only running the script would tell."""

    text: str


@dataclass
class TrlRun:
    """The arguments of one TRL run, as written."""

    trainer: str
    """grpo, rloo, sft, dpo, kto or reward."""
    config: dict[str, object] = field(default_factory=dict)
    """Arguments of the configuration class."""
    given: dict[str, object] = field(default_factory=dict)
    """Arguments of the trainer class: model, reward_funcs, train_dataset ..."""
    lora: dict[str, object] = field(default_factory=dict)
    """Arguments of peft's LoraConfig."""
    source: str = ""
    """File, or command."""


def read_trl(words: Sequence[str]) -> TrlRun:
    """The run that `words` describe: one Python file, or a command of TRL's own command line."""
    words = list(words)
    if words and words[0] == "trl":
        words = words[1:]
    if len(words) == 1 and words[0].endswith(".py"):
        return read_script(Path(words[0]))
    if words and words[0] in TRAINERS.values():
        return read_command(words[0], words[1:])
    raise ValueError(
        "Expected a Python script that builds a TRL trainer (strop convert trl train.py), or a TRL command "
        f"(strop convert trl -- grpo --learning_rate 1e-6 ...; one of {', '.join(TRAINERS.values())}), got: "
        f"{' '.join(words) or 'nothing'}."
    )


def read_script(path: Path) -> TrlRun:
    """Find the constructor calls of a script. Raises ValueError if it builds no trainer or several."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path} is not Python that can be parsed: {error}.") from error
    constants = _constants(tree)
    runs: dict[str, TrlRun] = {}
    lora: dict[str, object] = {}
    for name, call in _constructor_calls(tree):
        arguments = _arguments(call, constants)
        if name == "LoraConfig":
            lora = {"r": 8, "lora_alpha": 8, **arguments}  # peft's defaults
            continue
        prefix, kind = _split_class(name)
        run = runs.setdefault(prefix, TrlRun(TRAINERS[prefix], source=str(path)))
        if kind == "Config":
            run.config.update(arguments)
        else:
            run.given.update(arguments)
    if not runs:
        raise ValueError(
            f"{path} builds no trainer of TRL: there is no call of "
            f"{', '.join(prefix + 'Trainer' for prefix in TRAINERS)}."
        )
    if len(runs) > 1:
        raise ValueError(
            f"{path} builds several trainers ({', '.join(prefix + 'Trainer' for prefix in runs)}). Convert "
            "one script per trainer."
        )
    run = next(iter(runs.values()))
    run.lora = lora
    return run


def read_command(trainer: str, words: Sequence[str]) -> TrlRun:
    """The flags of `trl grpo --learning_rate 1e-6 --use_vllm ...`. They win over those of a --config FILE."""
    run = TrlRun(trainer, source=f"trl {trainer}")
    flags: dict[str, object] = {}
    at = 0
    words = list(words)
    while at < len(words):
        word = words[at]
        if not word.startswith("--"):
            raise ValueError(f"trl {trainer}: expected a flag that begins with --, got {word!r}.")
        name, equals, value = word[2:].partition("=")
        at += 1
        values = [value] if equals else []
        while not equals and at < len(words) and not words[at].startswith("--"):
            values.append(words[at])
            at += 1
        read = [_word(text) for text in values]
        flags[name] = read or True
        if len(read) == 1:
            flags[name] = read[0]
    if "config" in flags:
        flags = {**_read_file(str(flags.pop("config"))), **flags}
    for name, given in flags.items():
        _put_flag(run, name, given)
    return run


def _read_file(path: str) -> dict[str, object]:
    """The arguments in a YAML file of `trl grpo --config FILE`."""
    where = f"--config {path}"
    try:
        tree = yaml.safe_load(read_limited(Path(path), where))
    except yaml.YAMLError as problem:
        raise ValueError(f"{where} is not YAML: {' '.join(str(problem).split())}.") from problem
    if not isinstance(tree, dict):
        raise ValueError(f"{where} must hold arguments and values, got {type(tree).__name__}.")
    # YAML reads 2e-4 as text.
    values = {str(name): _word(value) if isinstance(value, str) else value for name, value in tree.items()}
    return {name: value for name, value in values.items() if value is not None}


_MODEL_FLAGS = {
    "model_name_or_path": "model",
    "dataset_name": "train_dataset",
    "reward_funcs": "reward_funcs",
}
_LORA_FLAGS = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
}

USE_PEFT = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""Defaults of TRL's --lora_r, --lora_alpha and --lora_dropout."""


def _put_flag(run: TrlRun, name: str, value: object) -> None:
    if name in _MODEL_FLAGS:
        run.given[_MODEL_FLAGS[name]] = value
    elif name in _LORA_FLAGS:
        run.lora[_LORA_FLAGS[name]] = value
    elif name == "use_peft":
        if value is True:
            run.lora = {**USE_PEFT, **run.lora}
    elif name == "load_in_4bit":
        run.given[name] = value
    else:
        run.config[name] = value


def _word(text: str) -> object:
    """A word of a command line as the value that it spells."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.startswith("{"):
        try:
            return json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def _constructor_calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Calls of TRL's classes and of LoraConfig, in the order of the script."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _called_name(node)
        if name == "LoraConfig" or _split_class(name)[0] in TRAINERS:
            yield name, node


def _called_name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Name):
        return call.func.id
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return ""


def _split_class(name: str) -> tuple[str, str]:
    """GRPOConfig is ("GRPO", "Config"); a class that is not TRL's has an empty prefix."""
    for kind in ("Config", "Trainer"):
        if name.endswith(kind) and name.removesuffix(kind) in TRAINERS:
            return name.removesuffix(kind), kind
    return "", ""


def _constants(tree: ast.Module) -> dict[str, object]:
    """Names to which the script assigns exactly once, and a literal."""
    found: dict[str, object] = {}
    assigned: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Name):
            continue
        if target.id in assigned:
            found.pop(target.id, None)
            continue
        assigned.add(target.id)
        value = _literal(node.value, {})
        if not isinstance(value, Expression):
            found[target.id] = value
    return found


def _literal(node: ast.expr, constants: dict[str, object]) -> object:
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Expression(ast.unparse(node))


_POSITIONS = {"Trainer": ("model", "reward_funcs"), "LoraConfig": (), "Config": ("output_dir",)}


def _arguments(call: ast.Call, constants: dict[str, object]) -> dict[str, object]:
    name = _called_name(call)
    kind = _split_class(name)[1] or name
    positions = _POSITIONS[kind]
    if kind == "Trainer" and not name.startswith(("GRPO", "RLOO")):
        positions = ("model",)
    if len(call.args) > len(positions):
        raise ValueError(
            f"{name} at line {call.lineno} has {len(call.args)} positional arguments; write those after the "
            f"first {len(positions)} by name."
        )
    found: dict[str, object] = {}
    for position, node in zip(positions, call.args, strict=False):
        found[position] = _literal(node, constants)
    for keyword in call.keywords:
        if keyword.arg is None:  # **settings
            settings = _literal(keyword.value, constants)
            if isinstance(settings, dict):
                found.update(settings)
            else:
                found[f"**{ast.unparse(keyword.value)}"] = Expression(ast.unparse(keyword.value))
        else:
            found[keyword.arg] = _literal(keyword.value, constants)
    return found
