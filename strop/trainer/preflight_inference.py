"""The preflight of models in use: files of prompts and answers, tokenizer and template, the scorer. No weights are loaded."""

from __future__ import annotations

from typing import Any

from strop.config.compose import Loaded
from strop.config.rules import Finding, error
from strop.data.probe import probe_template
from strop.rewards.function import load_function
from strop.trainer.preflight_data import find_tokenizer, head_findings, unloaded


def examine_inference(loaded: Loaded, report: Any) -> int | None:
    """Add findings to the report; returns the number of rows where there are some."""
    config = loaded.config
    if loaded.root == "generation":
        return _generation(config, report)
    if loaded.root == "evaluation":
        return _evaluation(config, report)
    report.findings += find_tokenizer(config.model, key="model.path")[1]
    if report.ok:
        report.findings += head_findings("model.path", config.model.path, "reward")
    return None


def _generation(config: Any, report: Any) -> int | None:
    from strop.trainer.generation_input import open_questions

    tokenizer, findings = find_tokenizer(config.model, key="model.path")
    report.findings += findings or head_findings("model.path", config.model.path, "language")
    if tokenizer is not None:
        found = probe_template(
            tokenizer,
            template=config.model.custom_chat_template,
            kwargs=config.data.apply_chat_template_kwargs,
            plain=not config.data.apply_chat_template,
        )
        report.findings += [Finding(f.level, "chat template", f.message) for f in found]
    try:
        rows = len(open_questions(config).rows)
    except (ValueError, OSError) as problem:
        report.findings.append(error("data.path", str(problem)))
        return None
    report.data["rows"] = rows
    return rows


def _evaluation(config: Any, report: Any) -> int | None:
    from strop.trainer.evaluation import open_answers

    own = config.custom_reward_function
    if own.path:
        try:
            load_function(own.path, own.name, own.reward_kwargs, timeout=config.evaluation.timeout).close()
        except ValueError as problem:
            report.findings.append(unloaded(own.path, problem))
    try:
        rows = len(open_answers(config))
    except (ValueError, OSError) as problem:
        report.findings.append(error("data.path", str(problem)))
        return None
    report.data["rows"] = rows
    return rows
