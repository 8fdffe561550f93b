"""python -m strop.trainer.main_eval key=value ... [--compare A.parquet B.parquet]: scores for a file of
answers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from strop.config.commandline import parse
from strop.config.compose import load
from strop.config.openrlhf.convert import hydra_value
from strop.errors import answer
from strop.registry import load_plugins
from strop.shared.process_setup import prepare_process

if TYPE_CHECKING:
    from strop.config.schema.inference import EvaluationConfig

COMPARE = "--compare"


def run(arguments: Sequence[str]) -> int:
    """Score the responses of a file, print the table and write the results; returns the exit code."""
    words, pair = _take_pair(list(arguments))
    options = parse(words)
    overrides = list(options.overrides)
    if pair:
        overrides.append(f"data.path={hydra_value(pair)}")
    loaded = load("evaluation", overrides, options.config, options.search)
    from strop.preflight.examine import require

    require(loaded)
    load_plugins(loaded.config.plugins)
    if pair:
        return _compare(loaded.config, (pair[0], pair[1]))
    return _evaluate(loaded.config)


def _take_pair(words: list[str]) -> tuple[list[str], list[str]]:
    """The command line without `--compare A B`, and [A, B]; [] without that option."""
    if COMPARE not in words:
        return words, []
    at = words.index(COMPARE)
    pair = words[at + 1 : at + 3]
    if len(pair) < 2 or any(_is_no_file(name) for name in pair):
        raise ValueError(
            f"{COMPARE} needs two files: strop eval {COMPARE} BEFORE.parquet AFTER.parquet [key=value ...]."
        )
    return words[:at] + words[at + 3 :], pair


def _is_no_file(word: str) -> bool:
    """Whether a word of the command line is an option or key=value; the name of a file may hold `=` too."""
    return word.startswith("-") or ("=" in word and not Path(word).is_file())


def _evaluate(config: EvaluationConfig) -> int:
    from strop.inference.evaluation import evaluate, summarise
    from strop.inference.evaluation_report import results_as_json, show_results

    scored_prompts = evaluate(config)
    results = summarise(scored_prompts, config.evaluation)
    show_results(results, confidence=config.evaluation.confidence)
    path = config.data.path
    assert path is not None, "the preflight requires data.path"
    first = path if isinstance(path, str) else path[0]
    output_path = config.data.output_path or _default_output_path(first, "eval")
    _write(output_path, {"path": path, **results_as_json(results, scored_prompts)})
    return 0


def _compare(config: EvaluationConfig, pair: tuple[str, str]) -> int:
    from strop.inference.evaluation import evaluate
    from strop.inference.evaluation_report import compare, comparison_as_json, show_comparison

    before = evaluate(config, pair[0])
    after = evaluate(config, pair[1])
    found = compare(before, after, config.evaluation)
    show_comparison(found, confidence=config.evaluation.confidence)
    content = {"before": pair[0], "after": pair[1], "sources": comparison_as_json(found)}
    _write(config.data.output_path or _default_output_path(pair[1], "compare"), content)
    return 0


def _default_output_path(path: str, kind: str) -> str:
    """The file next to `path` with the extension .{kind}.json."""
    stem, dot, _ = path.rpartition(".")
    if not dot:
        stem = path
    return f"{stem}.{kind}.json"


def _write(path: str, content: Mapping[str, object]) -> None:
    from strop.inference.resumable_rows import publish
    from strop.run.atomic_files import to_json

    publish(path, lambda file: file.write_text(to_json(content, indent=1), encoding="utf-8"))
    sys.stdout.write(f"Results: {path}\n")


if __name__ == "__main__":
    prepare_process()
    sys.exit(answer(lambda: run(sys.argv[1:])))
