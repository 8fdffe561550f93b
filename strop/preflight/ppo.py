"""The preflight of reinforcement learning: files, tokenizer, chat template, models, reward functions, and
agents with their loops, tools and interactions."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from strop.agents.endpoint.program import PROGRAM_AGENT
from strop.agents.parsers.base import parser_for
from strop.agents.rendering import Rendering
from strop.agents.runner import AgentSetup
from strop.catalog import AGENT_LOOPS
from strop.compat import conventions
from strop.concurrency import call_each
from strop.config.derived import engine_name, has_critic, has_task_reward
from strop.config.rules import ConfigFinding, error, warning
from strop.config.rules.megatron import megatron_roles
from strop.config.schema.ppo import PpoConfig
from strop.data.prompts import ToolListing, build_chat
from strop.data.report import SAMPLE, DataReport, SourceReport
from strop.data.schema import RowFields
from strop.models.vision.processor import processor_loader
from strop.preflight.device_checks import quantization_findings
from strop.preflight.image_checks import image_findings
from strop.preflight.megatron_checks import megatron_findings
from strop.preflight.model_checks import (
    EVERY_ROW_UP_TO,
    draft_findings,
    find_tokenizer,
    head_findings,
    local_model_config,
    lora_findings,
    native_obstacle,
    policy_findings,
    ppo_expert_findings,
    remote_file_findings,
    reward_file_finding,
    teacher_tokenizer_findings,
    topk_findings,
)
from strop.preflight.position_checks import response_position_findings
from strop.preflight.report import PreflightReport
from strop.preflight.reward_checks import unreported_values
from strop.preflight.row_checks import inspect_rows, unknown_token_findings
from strop.preflight.template_checks import template_findings
from strop.rewards.base import RewardSample, parse_verdict
from strop.rewards.function import RewardFunction, RuleScorer, load_function
from strop.rewards.judge import check_judge
from strop.shared.in_process import NOTHING_GIVEN, InProcess
from strop.types import Prompt, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRIED_TEXT = "The preflight asks for a score of this text."
ROLLOUT = "actor_rollout_ref.rollout"
UNUSED_TOOLS = (
    "tools are configured, but no row names an agent_name that uses them, so single_turn_agent answers and "
    "no tool is called. Add agent_name=tool_agent to the rows, or set "
    f"{ROLLOUT}.agent.default_agent_loop=tool_agent."
)


def examine_ppo(config: PpoConfig, report: PreflightReport, given: InProcess | None = None) -> int | None:
    """Add findings and facts to the report; returns the number of training rows where it is known. `given`
    are objects of the caller."""
    given = given or NOTHING_GIVEN
    tokenizer, findings = find_tokenizer(config.actor_rollout_ref.model)
    report.findings += findings
    if tokenizer is not None:
        model = config.actor_rollout_ref.model
        template = model.custom_chat_template
        report.findings += template_findings(tokenizer, model, config.data, template=template)
    # An error of the template is reported once, not again for each file.
    renderer = tokenizer if report.ok else None
    agents = AgentCheck(config, renderer, given.tools)
    train = _examine_files(config, "train_files", renderer, agents, report)
    val = _examine_files(config, "val_files", renderer, agents, report)
    agents.close(report)
    report.findings += agents.findings
    report.findings += _models(config, tokenizer is not None)
    rollout = config.actor_rollout_ref.rollout
    report.findings += quantization_findings(ROLLOUT, rollout, config.trainer.device)
    if tokenizer is not None and report.ok:
        report.findings += _positions(config) or unknown_token_findings(config, tokenizer)
        report.findings += megatron_findings(megatron_roles(config))
        report.findings += ppo_expert_findings(config)
        report.findings += policy_findings(config.actor_rollout_ref)
        report.findings += draft_findings(ROLLOUT, rollout, config.actor_rollout_ref.model)
        report.findings += lora_findings(config.actor_rollout_ref.model, "actor_rollout_ref.model")
        if has_critic(config):
            report.findings += lora_findings(config.critic.model, "critic.model")
    if config.algorithm.pretrain_files:
        report.findings += _pretrain_files(config.algorithm.pretrain_files, tokenizer)
    sources: dict[str, SourceReport] = {}
    scored = (val, train) if has_task_reward(config) else (val,)
    for found in scored:
        if found is not None:
            sources.update(found.data_sources)
    report.data["data sources"] = ", ".join(f"{name} ({of.rows} rows)" for name, of in sources.items())
    if report.ok and rollout.multi_turn.reward_weights.score and rollout.environment is None:
        report.findings += _rewards(config, sources, report, given.reward)
    return None if train is None else _training_rows(config, train)


def _examine_files(
    config: PpoConfig,
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    agents: AgentCheck,
    report: PreflightReport,
) -> DataReport | None:
    """Read the rows of `data.<name>`; None: none are configured, or they cannot be read here."""
    if not getattr(config.data, name):
        return None
    one_long_prompt_stops = config.data.truncation == "error" and not config.data.filter_overlong_prompts
    model = config.actor_rollout_ref.model
    found = inspect_rows(
        config.data,
        name,
        tokenizer,
        chat_template=model.custom_chat_template,
        listing=agents.listing,
        load_processor=processor_loader(model),
        sample=EVERY_ROW_UP_TO if one_long_prompt_stops else SAMPLE,
    )
    if found is None:
        return None
    for finding in found.findings:
        report.findings.append(ConfigFinding(finding.level, f"data.{name}", finding.message))
    fact = f"{found.rows} rows"
    if tokenizer is not None:
        fact += (
            f", longest of {found.measured} prompts {found.longest} tokens, {found.too_long} over the limit"
        )
    if found.images:
        fact += f"; {found.images}"
        report.findings += image_findings(config, videos=found.videos > 0)
    report.data[name] = fact
    examples = [source.example for source in found.data_sources.values() if source.example is not None]
    agents.rows(name, found.agents, found.rows, examples)
    return found


def _training_rows(config: PpoConfig, found: DataReport) -> int:
    """Rows that are left after filtering."""
    if config.data.filter_overlong_prompts and found.measured == found.rows:
        return found.rows - found.too_long
    return found.rows


def _models(config: PpoConfig, has_tokenizer: bool) -> list[ConfigFinding]:
    """Check the folders of policy, critic and reward model. Names on the hub are not checked."""
    policy = config.actor_rollout_ref.model.path
    reward = config.reward_model
    findings: list[ConfigFinding] = []
    if has_tokenizer:
        findings += _model_findings("actor_rollout_ref.model.path", policy, "language")
    if has_critic(config) and config.critic.model.path != policy:
        findings += _model_findings("critic.model.path", config.critic.model.path, "scalar")
    if reward.judge.enable and not reward.judge.url:
        findings += _model_findings("reward_model.model.path", reward.model.path, "language")
    elif reward.enable and not reward.remote_url:
        findings += _model_findings("reward_model.model.path", reward.model.path, "reward")
    teacher = config.algorithm.distillation
    if teacher.enable and teacher.path:
        findings += _model_findings("algorithm.distillation.path", teacher.path, "language")
        if has_tokenizer and not findings:
            findings += teacher_tokenizer_findings(config.actor_rollout_ref.model, teacher.path)
            findings += topk_findings(config.actor_rollout_ref.model, teacher)
    return findings


def _model_findings(key: str, path: str | None, wanted: str) -> list[ConfigFinding]:
    if path is None:
        return []
    try:
        return head_findings(key, path, wanted)
    except ValueError as problem:
        return [error(key, str(problem).replace(f"model.path={path!r}", str(path), 1))]


def _positions(config: PpoConfig) -> list[ConfigFinding]:
    """Whether transformers knows the architecture, and prompt and response fit into the model."""
    rollout = config.actor_rollout_ref.rollout
    try:
        model_config = local_model_config(config.actor_rollout_ref.model)
    except ValueError as problem:
        return [error("actor_rollout_ref.model.path", str(problem))]
    if model_config is not None and engine_name(rollout) == "native":
        obstacle = native_obstacle(model_config)
        if obstacle is not None:
            return [error("actor_rollout_ref.rollout.name", f"{obstacle} Set it to hf.")]
    lengths = ("data.max_prompt_length", "data.max_response_length")
    return response_position_findings(ROLLOUT, rollout, model_config, lengths)


def _pretrain_files(paths: str | list[str], tokenizer: PreTrainedTokenizerBase | None) -> list[ConfigFinding]:
    from strop.data.files import open_rows
    from strop.ppo.pretrain import KEY, check_columns

    try:
        check_columns(open_rows(paths, key=KEY))
    except ValueError as problem:
        return [error(KEY, str(problem).removeprefix(f"{KEY}: "))]
    return []


def _rewards(
    config: PpoConfig,
    sources: Mapping[str, SourceReport],
    report: PreflightReport,
    given: Callable[..., object] | None,
) -> list[ConfigFinding]:
    """Call the reward function once per data source, with its first row."""
    custom = config.custom_reward_function
    reward = config.reward_model
    if reward.judge.enable:
        try:
            check_judge(reward.judge, timeout=reward.timeout)
        except ValueError as problem:
            return [error("reward_model.judge", str(problem))]
    if not custom.path and (reward.enable or reward.remote_url or reward.judge.enable):
        return remote_file_findings(reward.remote_url)
    function: RewardFunction | RuleScorer
    if custom.path:
        lists = config.reward_manager.name == "batch"
        try:
            function = load_function(
                custom.path,
                custom.name,
                custom.reward_kwargs,
                takes_lists=lists,
                timeout=reward.timeout,
                given=given,
            )
        except ValueError as problem:
            return [reward_file_finding(custom.path, problem)]
    else:
        function = RuleScorer(
            reward.timeout, reward.sandbox_fusion, compat=conventions(config.algorithm.compat).scorers
        )
    findings: list[ConfigFinding] = []
    for name, source in sources.items():
        if source.example is not None:
            findings += _try_reward(config, function, name, source.example, report)
    function.close()
    return findings


def _try_reward(
    config: PpoConfig,
    function: RewardFunction | RuleScorer,
    data_source: str,
    row: RowFields,
    report: PreflightReport,
) -> list[ConfigFinding]:
    key = f"reward of {data_source}"
    try:
        verdict = parse_verdict(_call_reward(function, data_source, row, config.reward_model.timeout))
    except Exception as problem:  # noqa: BLE001 - a user's function may raise anything; it becomes a finding
        loop = None if config.custom_reward_function.path else _custom_agent_loop(config, row)
        if loop is None:
            return [error(key, f"{type(problem).__name__}: {problem}")]
        message = f"{problem} Until then the agent loop {loop!r} must set episode.score in every episode."
        return [warning(key, message)]
    values = verdict.extras or {"score": verdict.score}
    text = ", ".join(f"{part} {reprlib.repr(value)}" for part, value in values.items())
    report.data[key] = f"{text} for {TRIED_TEXT!r}"
    return unreported_values(config, data_source, verdict)


def _custom_agent_loop(config: PpoConfig, row: RowFields) -> str | None:
    """The agent loop of this row if it is not built in: it may set the score of an episode itself."""
    agent = config.actor_rollout_ref.rollout.agent
    if row.agent_name is None and agent.command is not None and agent.reward != "verifier":
        return PROGRAM_AGENT
    name: str = row.agent_name or agent.default_agent_loop
    if name in AGENT_LOOPS and AGENT_LOOPS.entry(name).source == "built-in":
        return None
    return name


def _call_reward(
    function: RewardFunction | RuleScorer, data_source: str, row: RowFields, timeout: float
) -> object:
    """What the function returns for the row. A function that hangs or exits raises, as it would in a run."""
    prompt = Prompt(0, [], row.messages, data_source, row.ground_truth, row.extra_info, row.columns)
    sample = RewardSample(Trajectory(prompt, 0, [], [], []), TRIED_TEXT, dict(row.extra_info))

    def call(one: RewardSample) -> object:
        if isinstance(function, RewardFunction) and function.takes_lists:
            return function.call_with_lists([one])[0]
        return function(one)

    [answer] = call_each(call, [sample], timeout=timeout)
    if isinstance(answer, Exception):
        raise answer
    return answer


class AgentCheck:
    """Reads what the configuration names; every problem becomes a finding."""

    def __init__(
        self,
        config: PpoConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        tools: Sequence[Callable[..., object]] = (),
    ) -> None:
        self.config = config
        self.settings = config.actor_rollout_ref.rollout
        self.findings: list[ConfigFinding] = []
        template = config.actor_rollout_ref.model.custom_chat_template
        self.agents: AgentSetup | None = None
        self.named: set[str | None] = set()
        """Agents that some row names; None if a row names none."""
        if tokenizer is not None:
            self.agents = AgentSetup(self.settings, build_chat(config.data, tokenizer, template), tools)
            self._examine_setup(self.agents, tokenizer)

    def _examine_setup(self, agents: AgentSetup, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read every file that the configuration names."""
        self._try(f"{ROLLOUT}.agent.agent_loop_config_path", lambda: agents.loops)
        self._try(f"{ROLLOUT}.agent.default_agent_loop", lambda: agents.loops.get(None))
        self._try(f"{ROLLOUT}.multi_turn.interaction_config_path", lambda: agents.interactions)
        self._try(f"{ROLLOUT}.multi_turn.tool_config_path", lambda: agents.tools)
        if self.ok and agents.tools.schemas:
            name = self.settings.multi_turn.format
            self._try(f"{ROLLOUT}.multi_turn.format", lambda: parser_for(name, tokenizer))

    @property
    def ok(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)

    @property
    def listing(self) -> ToolListing | None:
        return self.agents.listing() if self.agents is not None and self.ok else None

    def rows(self, key: str, agents: Mapping[str, int], rows: int, examples: Iterable[RowFields]) -> None:
        """Check the agents that rows of `data.<key>` name, and one row of each data source."""
        named: set[str | None] = set(agents)
        if sum(agents.values()) < rows:
            named.add(None)
        self.named |= named
        used = {name or self.settings.agent.default_agent_loop for name in named}
        if self.settings.multi_turn.tool_config_path and used <= {"single_turn_agent"}:
            self.findings.append(warning(f"data.{key}", UNUSED_TOOLS))
        setup = self.agents
        if setup is None or not self.ok:
            return
        for name in sorted(name for name in named if name):
            self._try(f"data.{key}", partial(setup.loops.get, name))
        for row in examples:
            interaction = row.extra_info.get("interaction_kwargs")
            self._try(f"data.{key}", partial(setup.interactions.choose, interaction))

    def close(self, report: PreflightReport) -> None:
        """Check the template if any row has several turns, report how rewards add up, and close the tools."""
        if self.agents is None or not self.ok:
            return
        if not all(self.agents.loops.batched(name) for name in self.named):
            self._try("chat template", self._render)
            weights = self.settings.multi_turn.reward_weights
            report.data["reward"] = (
                f"{weights.score:g} x score + {weights.turn:g} x turns + {weights.tool:g} x tools"
            )
        self.agents.tools.close()

    def _render(self) -> None:
        assert self.agents is not None
        rendering = Rendering.of(self.agents.chat, tools=self.agents.tools.schemas or None)
        for notice in rendering.notices:
            self.findings.append(warning("chat template", notice))

    def _try(self, key: str, read: Callable[[], object]) -> None:
        if not self.ok:
            return
        try:
            read()
        except (ValueError, ImportError) as problem:
            self.findings.append(error(key, str(problem)))
