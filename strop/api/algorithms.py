"""The algorithms of reinforcement learning, one function each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from strop.api.callbacks import OnSamples, OnStep, Stop
from strop.api.reinforcement import GROUP, Reward, train_policy
from strop.api.rows import Data
from strop.api.run import Run
from strop.config.schema.ppo import PpoConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def grpo(
    model: str | Path | PreTrainedModel,
    train: Data,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    val: Data | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward_weights: Sequence[float] | None = None,
    tools: Sequence[Callable[..., object]] = (),
    on_step: OnStep | None = None,
    on_samples: OnSamples | None = None,
    stop: Stop | None = None,
    progress: bool = True,
    **keys: object,
) -> Run[PpoConfig]:
    """Train with GRPO: the advantage of a response is its score relative to its group.

    run = strop.grpo("Qwen/Qwen2.5-0.5B-Instruct", train=rows, reward=reward, steps=100)

    model: a name, a folder, or a module of transformers (with `tokenizer`), of which the run trains a copy.
    train, val: rows with a prompt (text or messages) and any other columns: a list of dicts, a data set of
        Hugging Face, a pandas frame, an iterable, or files (parquet, json, jsonl).
    reward: one function or several, whose scores are added with `reward_weights`. A function takes
        `completion` and columns of the row by name, TRL's `prompts, completions, **columns`, or verl's
        `data_source, solution_str, ground_truth, extra_info`; it may be async. Without one, the data_source
        of a row chooses the scorer, or keys name a reward model.
    tools: Python functions that the model may call; their type hints and docstrings are shown to it.
    on_step(step, metrics), on_samples(step, samples): called after each step.
    stop(step, metrics): ends the run when it returns True.
    progress: show the progress in place (terminal, notebook).
    keys: any key of the configuration, by its full name (`**{"trainer.save_freq": 10}`), or by a short form:
        its last name (`max_response_length=512`), or steps, epochs, batch_size, lr, n, folder ...

    The run is the one of the command line: the same checks, checkpoints and numbers; `run.command()` gives
    that command. The same call continues where an earlier one was interrupted (Ctrl-C), from the last
    checkpoint in the folder of the run (`folder=`, by default checkpoints/PROJECT/EXPERIMENT).
    """
    return train_policy(
        "grpo",
        GROUP,
        model,
        train,
        reward,
        val=val,
        tokenizer=tokenizer,
        reward_weights=reward_weights,
        tools=tools,
        on_step=on_step,
        on_samples=on_samples,
        stop=stop,
        progress=progress,
        keys=keys,
    )


def ppo(
    model: str | Path | PreTrainedModel,
    train: Data,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    val: Data | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward_weights: Sequence[float] | None = None,
    tools: Sequence[Callable[..., object]] = (),
    on_step: OnStep | None = None,
    on_samples: OnSamples | None = None,
    stop: Stop | None = None,
    progress: bool = True,
    **keys: object,
) -> Run[PpoConfig]:
    """Train with PPO: a critic estimates values (GAE). Its keys begin with `critic.`

    The arguments are those of `grpo`.
    """
    return train_policy(
        "gae",
        1,
        model,
        train,
        reward,
        val=val,
        tokenizer=tokenizer,
        reward_weights=reward_weights,
        tools=tools,
        on_step=on_step,
        on_samples=on_samples,
        stop=stop,
        progress=progress,
        keys=keys,
    )


def rloo(
    model: str | Path | PreTrainedModel,
    train: Data,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    val: Data | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward_weights: Sequence[float] | None = None,
    tools: Sequence[Callable[..., object]] = (),
    on_step: OnStep | None = None,
    on_samples: OnSamples | None = None,
    stop: Stop | None = None,
    progress: bool = True,
    **keys: object,
) -> Run[PpoConfig]:
    """Train with RLOO: the baseline of a response is the mean score of the others of its group.

    The arguments are those of `grpo`.
    """
    return train_policy(
        "rloo",
        GROUP,
        model,
        train,
        reward,
        val=val,
        tokenizer=tokenizer,
        reward_weights=reward_weights,
        tools=tools,
        on_step=on_step,
        on_samples=on_samples,
        stop=stop,
        progress=progress,
        keys=keys,
    )


def reinforce_plus_plus(
    model: str | Path | PreTrainedModel,
    train: Data,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    val: Data | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward_weights: Sequence[float] | None = None,
    tools: Sequence[Callable[..., object]] = (),
    on_step: OnStep | None = None,
    on_samples: OnSamples | None = None,
    stop: Stop | None = None,
    progress: bool = True,
    **keys: object,
) -> Run[PpoConfig]:
    """Train with REINFORCE++: returns are normalized over the batch.

    The arguments are those of `grpo`.
    """
    return train_policy(
        "reinforce_plus_plus",
        1,
        model,
        train,
        reward,
        val=val,
        tokenizer=tokenizer,
        reward_weights=reward_weights,
        tools=tools,
        on_step=on_step,
        on_samples=on_samples,
        stop=stop,
        progress=progress,
        keys=keys,
    )


def reinforce_plus_plus_baseline(
    model: str | Path | PreTrainedModel,
    train: Data,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    val: Data | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward_weights: Sequence[float] | None = None,
    tools: Sequence[Callable[..., object]] = (),
    on_step: OnStep | None = None,
    on_samples: OnSamples | None = None,
    stop: Stop | None = None,
    progress: bool = True,
    **keys: object,
) -> Run[PpoConfig]:
    """Train with REINFORCE++ and the group's mean score as baseline.

    The arguments are those of `grpo`.
    """
    return train_policy(
        "reinforce_plus_plus_baseline",
        GROUP,
        model,
        train,
        reward,
        val=val,
        tokenizer=tokenizer,
        reward_weights=reward_weights,
        tools=tools,
        on_step=on_step,
        on_samples=on_samples,
        stop=stop,
        progress=progress,
        keys=keys,
    )


def remax(
    model: str | Path | PreTrainedModel,
    train: Data,
    reward: Reward | Sequence[Reward] | None = None,
    *,
    val: Data | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward_weights: Sequence[float] | None = None,
    tools: Sequence[Callable[..., object]] = (),
    on_step: OnStep | None = None,
    on_samples: OnSamples | None = None,
    stop: Stop | None = None,
    progress: bool = True,
    **keys: object,
) -> Run[PpoConfig]:
    """Train with ReMax: the baseline of a response is the score of the greedy one.

    The arguments are those of `grpo`.
    """
    return train_policy(
        "remax",
        1,
        model,
        train,
        reward,
        val=val,
        tokenizer=tokenizer,
        reward_weights=reward_weights,
        tools=tools,
        on_step=on_step,
        on_samples=on_samples,
        stop=stop,
        progress=progress,
        keys=keys,
    )
