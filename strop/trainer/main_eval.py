"""python -m strop.trainer.main_eval key=value ... [--compare A.parquet B.parquet]: scores for a file of answers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from strop.config.commandline import parse
from strop.config.compose import load
from strop.errors import answer
from strop.registry import load_plugins
from strop.trainer.prepare import prepare_process

COMPARE = "--compare"


def run(arguments: Sequence[str]) -> int:
    """Compose, examine, score, show, write."""
    words, pair = _take_pair(list(arguments))
    asked = parse(words)
    overrides = [*asked.overrides, *([f"data.path=[{','.join(pair)}]"] if pair else [])]
    loaded = load("evaluation", overrides, asked.config, asked.search)
    from strop.trainer.preflight import require

    require(loaded)
    load_plugins(loaded.config.plugins)
    if pair:
        return _compare(loaded.config, (pair[0], pair[1]))
    return _evaluate(loaded.config)


def _take_pair(words: list[str]) -> tuple[list[str], list[str]]:
    if COMPARE not in words:
        return words, []
    at = words.index(COMPARE)
    pair = words[at + 1 : at + 3]
    if len(pair) < 2 or any("=" in name or name.startswith("-") for name in pair):
        raise ValueError(f"{COMPARE} needs two files: strop eval {COMPARE} BEFORE.parquet AFTER.parquet [key=value ...].")
    return words[:at] + words[at + 3 :], pair


def _evaluate(config: Any) -> int:
    from strop.trainer.evaluation import evaluate, summarise
    from strop.trainer.evaluation_print import results_as_json, show_results

    judged = evaluate(config)
    results = summarise(judged, config.evaluation)
    show_results(results, confidence=config.evaluation.confidence)
    first = config.data.path if isinstance(config.data.path, str) else config.data.path[0]
    _write(config.data.output_path or _beside(first, "eval"), {"path": config.data.path, **results_as_json(results, judged)})
    return 0


def _compare(config: Any, pair: tuple[str, str]) -> int:
    from strop.trainer.evaluation import evaluate
    from strop.trainer.evaluation_compare import compare
    from strop.trainer.evaluation_print import comparison_as_json, show_comparison

    before, after = (evaluate(config, path) for path in pair)
    found = compare(before, after, config.evaluation)
    show_comparison(found, confidence=config.evaluation.confidence)
    content = {"before": pair[0], "after": pair[1], "sources": comparison_as_json(found)}
    _write(config.data.output_path or _beside(pair[1], "compare"), content)
    return 0


def _beside(path: str, what: str) -> str:
    stem, dot, _ = path.rpartition(".")
    return f"{stem if dot else path}.{what}.json"


def _write(path: str, content: dict[str, Any]) -> None:
    from strop.run.parts import publish
    from strop.run.plain_json import to_json

    publish(path, lambda file: file.write_text(to_json(content, indent=1), encoding="utf-8"))
    sys.stdout.write(f"Results: {path}\n")


if __name__ == "__main__":
    prepare_process()
    sys.exit(answer(lambda: run(sys.argv[1:])))
