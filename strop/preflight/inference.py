"""The preflight of generation, evaluation and the two servers: files, tokenizer, template and scorer."""

from __future__ import annotations

from strop.config.rules import ConfigFinding, error, warning
from strop.config.schema.inference import EvaluationConfig, GenerationConfig, RewardServerConfig
from strop.config.schema.training_service import TrainingServiceConfig
from strop.data.prompts import PromptDataset
from strop.preflight.device_checks import quantization_findings
from strop.preflight.model_checks import (
    draft_findings,
    find_tokenizer,
    head_findings,
    local_model_config,
    lora_findings,
    reward_file_finding,
)
from strop.preflight.position_checks import response_position_findings
from strop.preflight.report import PreflightReport
from strop.preflight.template_checks import template_findings
from strop.rewards.function import load_function


def examine_inference(
    config: GenerationConfig | EvaluationConfig | RewardServerConfig | TrainingServiceConfig,
    report: PreflightReport,
) -> int | None:
    """Add findings to the report; returns the number of rows where there are some."""
    if isinstance(config, GenerationConfig):
        return _generation(config, report)
    if isinstance(config, EvaluationConfig):
        return _evaluation(config, report)
    report.findings += find_tokenizer(config.model, key="model.path")[1]
    if report.ok:
        head = "reward" if isinstance(config, RewardServerConfig) else "language"
        report.findings += head_findings("model.path", config.model.path, head)
    return None


def _generation(config: GenerationConfig, report: PreflightReport) -> int | None:
    from strop.inference.generation import check_output
    from strop.inference.generation_model import chat_of, open_input_rows, prompts_of

    tokenizer, findings = find_tokenizer(config.model, key="model.path")
    report.findings += findings or head_findings("model.path", config.model.path, "language")
    report.findings += quantization_findings("rollout", config.rollout, config.trainer.device)
    if report.ok:
        report.findings += draft_findings("rollout", config.rollout, config.model)
        report.findings += lora_findings(config.model, "model")
        report.findings += _positions(config)
    if tokenizer is not None:
        report.findings += template_findings(
            tokenizer, config.model, config.data, template=config.model.custom_chat_template
        )
    try:
        inputs = open_input_rows(config)
        inputs.table()
    except (ValueError, OSError) as problem:
        report.findings.append(error("data.path", str(problem)))
        return None
    try:
        check_output(config, inputs)
    except (ValueError, OSError) as problem:
        report.findings.append(error("data.output_path", str(problem)))
    if tokenizer is not None and report.ok and config.rollout.multi_turn.tool_config_path is None:
        report.findings += _prompts(prompts_of(config, inputs, chat_of(config, tokenizer)))
    rows = len(inputs.rows)
    report.data["rows"] = rows
    return rows


def _prompts(prompts: PromptDataset) -> list[ConfigFinding]:
    """An error if no row can be answered, a warning if one of the first cannot."""
    problem = ""
    for place in range(len(prompts)):
        try:
            unusable = prompts[place].unusable
        except ValueError as refused:
            unusable = str(refused)
        if not unusable:
            break
        problem = problem or unusable
    else:
        return [error("data.path", f"No row can be answered. The first: {problem}")]
    return [warning("data.path", f"{problem} It gets no responses.")] if problem else []


def _positions(config: GenerationConfig) -> list[ConfigFinding]:
    """Whether prompt and response fit into the model."""
    try:
        model = local_model_config(config.model)
    except ValueError as problem:
        return [error("model.path", str(problem))]
    lengths = ("rollout.prompt_length", "rollout.response_length")
    return response_position_findings("rollout", config.rollout, model, lengths)


def _evaluation(config: EvaluationConfig, report: PreflightReport) -> int | None:
    from strop.inference.evaluation import open_responses

    own = config.custom_reward_function
    if own.path:
        try:
            load_function(
                own.path,
                own.name,
                own.reward_kwargs,
                takes_lists=None,
                timeout=config.evaluation.timeout,
            ).close()
        except ValueError as problem:
            report.findings.append(reward_file_finding(own.path, problem))
    try:
        rows = len(open_responses(config))
    except (ValueError, OSError) as problem:
        report.findings.append(error("data.path", str(problem)))
        return None
    report.data["rows"] = rows
    return rows


def scoring_findings(config: EvaluationConfig) -> list[ConfigFinding]:
    """What happens to the first responses of each data source, for `strop check`: a run scores all responses,
    and counts those that cannot be scored."""
    from strop.inference.evaluation import try_scorer

    try:
        failed = try_scorer(config)
    except (ValueError, OSError) as problem:
        return [error("data.path", str(problem))]
    return [warning(f"reward of {source}", reason) for source, reason in failed.items()]
