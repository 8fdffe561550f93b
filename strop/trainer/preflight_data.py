"""The second half of the preflight: files, tokenizer, chat template, reward functions. No weights are loaded."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

from strop.catalog import AGENT_LOOPS
from strop.config.compose import Loaded
from strop.config.objective import has_critic
from strop.config.rules import Finding, error, warning
from strop.data import report as files
from strop.data.probe import probe_template
from strop.rewards.calls import call_each
from strop.rewards.function import RewardFunction, Rules, load_function
from strop.rewards.judge import check_judge
from strop.rewards.sample import Sample
from strop.rewards.verdict import verdict_of
from strop.trainer.preflight_agents import AgentCheck
from strop.types import Prompt, Trajectory

EVERY_ROW_UP_TO = 50_000
"""Files of at most so many rows are measured whole when one long prompt would stop the run."""
TRIED_TEXT = "The preflight asks for a score of this text."


def examine_data(loaded: Loaded, report: Any) -> int | None:
    """Add findings and facts about the data to the report; returns the number of training rows where it is known."""
    config = loaded.config
    if loaded.root.startswith("ppo"):
        return _reinforcement(loaded, report)
    if hasattr(config, "optim"):
        from strop.trainer.supervised_check import examine_supervised

        return examine_supervised(config, report)
    from strop.trainer.preflight_inference import examine_inference

    return examine_inference(loaded, report)


def count(paths: Any, key: str) -> tuple[int | None, list[Finding]]:
    from strop.data.files import count_rows

    try:
        return count_rows(paths), []
    except (ValueError, OSError) as problem:
        return None, [error(key, str(problem))]


def _reinforcement(loaded: Loaded, report: Any) -> int | None:
    config = loaded.config
    tokenizer, findings = find_tokenizer(config.actor_rollout_ref.model)
    report.findings += findings
    if tokenizer is not None:
        report.findings += _template(config, tokenizer)
    agents = AgentCheck(config, tokenizer if report.ok else None)
    renders = tokenizer if report.ok else None  # what is wrong with the template is said once, not again for each file
    rows: int | None = None
    sources: dict[str, Any] = {}
    for key in ("train_files", "val_files"):
        paths = getattr(config.data, key)
        if not paths:
            continue
        fatal = config.data.truncation == "error" and not config.data.filter_overlong_prompts
        found = files.inspect(
            paths,
            config.data,
            renders,
            key=f"data.{key}",
            chat_template=config.actor_rollout_ref.model.custom_chat_template,
            listing=agents.listing,
            sample=EVERY_ROW_UP_TO if fatal else files.SAMPLE,
        )
        report.findings += [Finding(f.level, f"data.{key}", f.message) for f in found.findings]
        report.data[key] = f"{found.rows} rows" + (
            f", longest of {found.measured} prompts {found.longest} tokens, {found.too_long} over the limit" if renders else ""
        )
        sources = found.data_sources | sources
        agents.rows(key, found.agents, found.rows, [s.example for s in found.data_sources.values() if s.example is not None])
        if key == "train_files":
            rows = found.rows - (found.too_long if config.data.filter_overlong_prompts and found.measured == found.rows else 0)
            if config.data.train_max_samples > 0:
                rows = min(rows, config.data.train_max_samples)
    agents.close(report)
    report.findings += agents.findings
    report.findings += _models(config, policy_is_here=tokenizer is not None)
    if tokenizer is not None and report.ok:
        report.findings += _positions(config)
    if config.algorithm.pretrain_files:
        report.findings += _texts(config.algorithm.pretrain_files, tokenizer)
    report.data["data sources"] = ", ".join(f"{name} ({source.rows} rows)" for name, source in sources.items())
    if report.ok and config.actor_rollout_ref.rollout.multi_turn.reward_weights.score:
        report.findings += _rewards(config, sources, report)
    return rows


def _models(config: Any, policy_is_here: bool) -> list[Finding]:
    """The folders of policy, critic and reward model; a hub name is taken on trust."""
    reward = config.reward_model
    findings: list[Finding] = []
    policy = config.actor_rollout_ref.model.path
    wanted = {"actor_rollout_ref.model.path": "language", "critic.model.path": "scalar", "reward_model.model.path": "reward"}
    paths = {
        "actor_rollout_ref.model.path": policy if policy_is_here else None,
        "critic.model.path": config.critic.model.path if has_critic(config) else None,
        "reward_model.model.path": reward.model.path if _loads_reward_model(reward) else None,
    }
    for key, path in paths.items():
        try:
            if path is not None and (key != "critic.model.path" or path != policy):
                findings += head_findings(key, path, wanted[key])
        except ValueError as problem:
            findings.append(error(key, str(problem).replace(f"model.path={path!r}", str(path), 1)))
    return findings


def _positions(config: Any) -> list[Finding]:
    """Whether transformers knows the architecture, and whether a prompt and its response fit into the model."""
    rollout = config.actor_rollout_ref.rollout
    try:
        known = known_config(config.actor_rollout_ref.model)
    except ValueError as problem:
        return [error("actor_rollout_ref.model.path", str(problem))]
    limit = getattr(known, "max_position_embeddings", None)
    longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    if not limit or longest <= limit:
        return []
    said = (
        f"sequences of {longest} tokens (prompts of {rollout.prompt_length}, responses of {rollout.response_length}) do not "
        f"fit into the {limit} positions of the model. Lower data.max_prompt_length or data.max_response_length, or set "
        f"actor_rollout_ref.rollout.max_model_len={limit}, where long prompts get shorter responses."
    )
    return [error("actor_rollout_ref.rollout.max_model_len", said)]


def known_config(model: Any) -> Any:
    """What config.json says of the part that reads text, as transformers has it; None for what is not on this machine."""
    from strop.models.load import load_config, resolve

    source = resolve(model.path)
    if not Path(source.name).is_dir():
        return None
    return load_config(
        source,
        override=model.override_config,
        config_path=model.hf_config_path,
        trust_remote_code=model.trust_remote_code,
    ).get_text_config()


def _loads_reward_model(reward: Any) -> bool:
    return (reward.enable and not reward.remote_url) or (reward.judge.enable and not reward.judge.url)


def head_findings(key: str, path: str | None, wanted: str) -> list[Finding]:
    """Whether the config.json of a folder says that it holds another kind of model, or a file of weights is not whole."""
    from strop.models.heads import wrong_head
    from strop.models.load import resolve
    from strop.models.weight_files import check_weights

    source = resolve(path)
    if source.gguf_file is not None or not Path(source.name).is_dir():
        return []
    problem = wrong_head(Path(source.name), wanted=wanted)
    if problem is not None:
        return [error(key, f"{path}: {problem}")]
    try:
        check_weights(Path(source.name))
    except ValueError as damage:
        return [error(key, str(damage))]
    return []


def _texts(paths: Any, tokenizer: Any) -> list[Finding]:
    from strop.data.files import open_rows
    from strop.trainer.pretrain import KEY, Texts

    try:
        Texts(open_rows(paths, key=KEY), tokenizer, longest=1)
    except ValueError as problem:
        return [error(KEY, str(problem).removeprefix(f"{KEY}: "))]
    return []


def find_tokenizer(model: Any, key: str = "actor_rollout_ref.model.path") -> tuple[Any, list[Finding]]:
    """The tokenizer if it is on this machine; a model that would have to be downloaded first is only warned about."""
    place = model.tokenizer_path or model.path
    local = Path(place).expanduser()
    if local.exists() or place.endswith(".gguf") or place == "smollm2-135m":
        from strop.models.build import build_tokenizer

        try:
            return build_tokenizer(model), []
        except (ValueError, OSError) as problem:
            return None, [error(key, str(problem).partition("\n")[0])]
    if place.startswith(("/", "./", "~")) or place.count("/") > 1:
        return None, [error(key, f"there is no folder {local}.")]
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=model.trust_remote_code), []
    except (OSError, ValueError):
        return None, [warning(key, f"{place} is not on this machine, so template and prompt lengths were not checked.")]


def _template(config: Any, tokenizer: Any) -> list[Finding]:
    found = probe_template(
        tokenizer,
        template=config.actor_rollout_ref.model.custom_chat_template,
        kwargs=config.data.apply_chat_template_kwargs,
        plain=not config.data.apply_chat_template,
    )
    return [Finding(f.level, "chat template", f.message) for f in found]


def _rewards(config: Any, sources: dict[str, Any], report: Any) -> list[Finding]:
    """One call per data source, with its first row; what came back is told in the report."""
    custom, reward = config.custom_reward_function, config.reward_model
    if reward.judge.enable:
        try:
            check_judge(reward.judge, timeout=reward.timeout)
        except ValueError as problem:
            return [error("reward_model.judge", str(problem))]
    if not custom.path and (reward.enable or reward.remote_url or reward.judge.enable):
        return []
    function: RewardFunction | Rules
    if custom.path:
        lists = config.reward_manager.name == "batch"
        try:
            function = load_function(custom.path, custom.name, custom.reward_kwargs, takes_lists=lists, timeout=reward.timeout)
        except ValueError as problem:
            return [unloaded(custom.path, problem)]
    else:
        function = Rules(reward.timeout, reward.sandbox_fusion)
    findings = []
    for name, source in sources.items():
        if source.example is None:
            continue
        try:
            verdict = verdict_of(_ask(function, name, source.example, reward.timeout))
            told = ", ".join(
                f"{part} {reprlib.repr(value)}" for part, value in (verdict.extras or {"score": verdict.score}).items()
            )
            report.data[f"reward of {name}"] = f"{told} for {TRIED_TEXT!r}"
        except Exception as problem:  # noqa: BLE001 - a user's function may raise anything; it becomes a finding
            loop = None if custom.path else _own_loop(config, source.example)
            if loop is None:
                findings.append(error(f"reward of {name}", f"{type(problem).__name__}: {problem}"))
            else:
                said = f"{problem} Until then the agent loop {loop!r} must set episode.score in every episode."
                findings.append(warning(f"reward of {name}", said))
    function.close()
    return findings


def _own_loop(config: Any, row: Any) -> str | None:
    """The name of the agent loop that answers this row, unless it is built in: those leave scoring to others."""
    name: str = row.agent_name or config.actor_rollout_ref.rollout.agent.default_agent_loop
    return None if name in AGENT_LOOPS and AGENT_LOOPS.entry(name).source == "built-in" else name


def unloaded(path: str, problem: ValueError) -> Finding:
    """The finding about a file of the user's from which no reward function could be loaded."""
    return error("custom_reward_function.path", str(problem).removeprefix(f"custom_reward_function.path={path}: "))


def _ask(function: RewardFunction | Rules, data_source: str, row: Any, timeout: float) -> Any:
    """What the function returns for the row, under the limits of a run: to hang or to exit is told like an error."""
    prompt = Prompt(0, [], row.messages, data_source, row.ground_truth, row.extra_info)
    sample = Sample(Trajectory(prompt, 0, [], [], []), TRIED_TEXT, dict(row.extra_info))

    def ask(one: Sample) -> Any:
        if isinstance(function, RewardFunction) and function.takes_lists:
            return function.call_with_lists([one])[0]
        return function(one)

    [answer] = call_each(ask, [sample], timeout=timeout)
    if isinstance(answer, Exception):
        raise answer
    return answer
