"""Reinforcement learning from Python: `grpo`, `ppo`, `rloo` and the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from strop.api.callbacks import CallerObserver, OnSamples, OnStep, Stop
from strop.api.functions import IN_PROCESS, Located, locate, name_of, tools_file, write_source
from strop.api.launch import Prepared, draft_config, inputs_folder, launch
from strop.api.rows import (
    Data,
    PlainRow,
    RowKeys,
    is_files,
    needs_conversion,
    open_files,
    paths_of,
    prompt_rows,
    read_rows,
    reward_columns,
    write_rows,
)
from strop.api.run import Run
from strop.api.settings import Settings
from strop.catalog import ADVANTAGES, ENGINES, POLICY_LOSSES, REWARD_MANAGERS
from strop.config.schema.ppo import PpoConfig
from strop.rewards.several import Several
from strop.rewards.signatures import CallStyle, is_required, parameters_of, style_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Reward: TypeAlias = Callable[..., object]
"""A reward function; `strop/rewards/signatures.py` says which forms it may have."""
Forms: TypeAlias = Sequence[tuple[Reward, CallStyle]]
"""Reward functions with their forms."""
ROOT = "ppo_trainer"
MODEL = "actor_rollout_ref.model"
MAX_PROMPTS = 32
"""Prompts per step where neither the caller nor the number of rows says less."""
GROUP = 8
"""Responses per prompt of the algorithms that compare them."""
ALWAYS_GIVEN = {
    *("prompt", "prompts", "completion", "completions", "completion_ids"),
    *("data_source", "ground_truth", "num_turns", "turn_scores"),
}
"""What a reward function may ask for apart from columns."""


SCORERS_BY_KEY = ("reward_model", "custom_reward_function", "reward_manager")
"""Sections whose keys may name a scorer."""


def _is_plain(data: Data) -> bool:
    """Whether rows are given as a list without data_source."""
    return isinstance(data, list) and bool(data) and not is_files(data) and "data_source" not in data[0]


def train_policy(
    estimator: str,
    group: int,
    model: str | Path | PreTrainedModel,
    train: Data,
    reward: Reward | Sequence[Reward] | None,
    *,
    val: Data | None,
    tokenizer: PreTrainedTokenizerBase | None,
    reward_weights: Sequence[float] | None,
    tools: Sequence[Callable[..., object]],
    on_step: OnStep | None,
    on_samples: OnSamples | None,
    stop: Stop | None,
    progress: bool,
    keys: dict[str, object],
) -> Run[PpoConfig]:
    """What all algorithms do: write what was given as objects, compose the command line, start it."""
    settings = Settings(ROOT, keys)
    config = cast(PpoConfig, draft_config(ROOT, settings.arguments()))
    folder = inputs_folder(config)
    settings.default("algorithm.adv_estimator", estimator)
    settings.set_model(MODEL, model, tokenizer, folder)
    prepared = Prepared(ROOT, "ppo", "strop.trainer.main_ppo", [])
    function, styles = reward_function(reward, reward_weights)
    rows = _set_data(settings, config, train, val, folder, styles)
    prompts = min(MAX_PROMPTS, rows)
    if settings.has("data.train_batch_size"):
        prompts = config.data.train_batch_size
    set_defaults(settings, group, prompts, val is not None)
    if function is None and not any(map(settings.has, SCORERS_BY_KEY)) and _is_plain(train):
        raise ValueError(
            "Nothing scores the responses. Give reward=, a function of the completion and of columns; or "
            "rows with a data_source that has a rule; or a reward model (reward_model.enable=True)."
        )
    if function is not None:
        prepared.reward = function
        _set_reward(settings, prepared, function, styles, folder)
    if tools:
        prepared.tools = tuple(tools)
        _set_tools(settings, prepared, folder)
    prepared.problems += _registered_here(config)
    prepared.arguments = settings.arguments()
    title = f"{config.trainer.project_name} / {config.trainer.experiment_name}"
    return launch(prepared, CallerObserver(on_step, on_samples, stop, progress, title))


def _registered_here(config: PpoConfig) -> list[str]:
    """Choices of the run that the caller's script or notebook registered: no other process knows them."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    chosen = (
        (ADVANTAGES, config.algorithm.adv_estimator),
        (POLICY_LOSSES, actor.policy_loss.loss_mode),
        (REWARD_MANAGERS, config.reward_model.reward_manager),
        (ENGINES, rollout.name),
    )
    problems = []
    for registry, name in chosen:
        if name in registry and registry.entry(name).source == "__main__":
            problems.append(
                f"The {registry.kind} {name} exists in this process only: put it into a file and name the "
                "file in plugins=[...]."
            )
    return problems


# --- rewards ------------------------------------------------------------------------------------------------


def reward_function(
    reward: Reward | Sequence[Reward] | None, weights: Sequence[float] | None
) -> tuple[Reward | Several | None, Forms]:
    """One function, or several as one; and the form of each."""
    if reward is None:
        if weights is not None:
            raise ValueError("reward_weights are given, but no reward functions.")
        return None, []
    functions = list(reward) if isinstance(reward, list | tuple) else [cast(Reward, reward)]
    styles = [(function, form_of(function)) for function in functions]
    if len(functions) == 1 and weights is None:
        return functions[0], styles
    return Several(functions, weights), styles


def form_of(function: Reward) -> CallStyle:
    """The form of a reward function; a ValueError if its parameters do not say one."""
    if not callable(function):
        raise ValueError(f"reward is {function!r}, which cannot be called.")
    name = name_of(function)
    style = style_of(function, name)
    if style is None:
        signature = "(...)"
        if parameters_of(function) is not None:
            signature = str(inspect.signature(function))
        raise ValueError(
            f"{name}{signature}: its parameters do not say how to call it. Name one of them completion (the "
            "text of one response; other parameters are columns of the row), completions (lists, as in TRL), "
            "or solution_str (as in verl)."
        )
    return style


def check_columns(rows: Sequence[PlainRow], styles: Forms, name: str, label: str | None = None) -> None:
    """A ValueError if a reward function asks for a column that no row has. `label` is the column with the
    ground truth, if the configuration names one."""
    columns = reward_columns(rows)
    for function, style in styles:
        if not style.takes_columns:
            if label is None:
                _check_ground_truth(rows, function, columns, name)
            continue
        for parameter in parameters_of(function) or ():
            if is_required(parameter) and parameter.name not in columns | ALWAYS_GIVEN:
                raise ValueError(
                    f"{name_of(function)} asks for {parameter.name!r}, but {name} has no such column. Its "
                    f"columns: {', '.join(sorted(columns))}."
                )


def _check_ground_truth(rows: Sequence[PlainRow], function: Reward, columns: set[str], name: str) -> None:
    """A ValueError if a function of verl's form asks for the ground truth, and no row has one."""
    asks = [parameter.name for parameter in parameters_of(function) or () if is_required(parameter)]
    if not {"ground_truth", "ground_truths"} & set(asks) or "ground_truth" in columns:
        return
    for row in rows:
        reward = row.get("reward_model")
        if isinstance(reward, Mapping) and reward.get("ground_truth") is not None:
            return
    raise ValueError(
        f"{name_of(function)} asks for ground_truth, but {name} has none: neither a column ground_truth nor "
        f"reward_model with it. Its columns: {', '.join(sorted(columns))}. Rename the column with the "
        "answer, or name it in label_key."
    )


def _set_reward(
    settings: Settings,
    prepared: Prepared,
    function: Reward | Several,
    styles: Forms,
    folder: Path,
) -> None:
    located = [locate(one, folder) for one, _ in styles]
    prepared.problems += [found.problem for found in located if found.problem is not None]
    place = located[0]
    if isinstance(function, Several):
        place = _several_file(function, located, folder)
    settings.set("custom_reward_function.path", place.path, "reward")
    settings.set("custom_reward_function.name", place.name, "reward")
    if isinstance(function, Several) or styles[0][1].takes_lists:
        settings.default("reward_model.reward_manager", "batch")


def _several_file(function: Several, located: Sequence[Located], folder: Path) -> Located:
    """A file that loads all functions, for the command line."""
    if any(found.problem for found in located):
        return Located(IN_PROCESS, "reward")
    places = [(found.path, found.name) for found in located]
    source = (
        "from strop.rewards.several import load_several\n\n"
        f"reward = load_several({places!r}, {function.weights!r})\n"
    )
    return Located(str(write_source(source, folder, "reward")), "reward")


# --- tools --------------------------------------------------------------------------------------------------


def _set_tools(settings: Settings, prepared: Prepared, folder: Path) -> None:
    located = [locate(tool, folder) for tool in prepared.tools]
    prepared.problems += [found.problem for found in located if found.problem is not None]
    rollout = "actor_rollout_ref.rollout"
    settings.set(f"{rollout}.multi_turn.tool_config_path", str(tools_file(located, folder)), "tools")
    settings.default(f"{rollout}.agent.default_agent_loop", "tool_agent")


# --- data and defaults --------------------------------------------------------------------------------------


def _set_data(
    settings: Settings,
    config: PpoConfig,
    train: Data,
    val: Data | None,
    folder: Path,
    styles: Forms,
) -> int:
    """Set the files; returns the number of training rows."""
    data = config.data
    named = (data.label_key, data.reward_fn_key, data.image_key, data.video_key)
    keys = RowKeys(data.prompt_key, tuple(name for name in named if name), data.label_key)
    path, count = data_file(train, keys, folder, "train", styles)
    settings.set("data.train_files", path, "train")
    if val is not None:
        settings.set("data.val_files", data_file(val, keys, folder, "val", styles)[0], "val")
    return count


def data_file(
    data: Data, keys: RowKeys, folder: Path, name: str, styles: Forms
) -> tuple[str | list[str], int]:
    """The files of the data, and their number of rows. Objects, and files with columns that only reward
    functions know, are written to a file of the run."""
    rows: list[PlainRow]
    if is_files(data):
        files = open_files(data, name)
        takes_columns = any(style.takes_columns for _, style in styles)
        if not takes_columns or not needs_conversion(files, keys):
            return paths_of(data), len(files)
        rows = read_rows(files, name)
    else:
        rows = read_rows(data, name)
    made = prompt_rows(rows, keys, name)
    check_columns(rows, styles, name, keys.label)
    return str(write_rows(made, folder, name)), len(rows)


def set_defaults(settings: Settings, group: int, prompts: int, validates: bool) -> None:
    """Sizes that fit the data, and a checkpoint at the end or after Ctrl-C."""
    settings.default("actor_rollout_ref.rollout.n", group)
    settings.default("data.train_batch_size", prompts)
    settings.default("actor_rollout_ref.actor.ppo_mini_batch_size", prompts)
    settings.default("actor_rollout_ref.actor.use_dynamic_bsz", True)
    settings.default("trainer.save_freq", 100)
    if validates:
        settings.default("trainer.test_freq", 10)
