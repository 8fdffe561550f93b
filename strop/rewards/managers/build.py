"""From the sections `reward_model`, `custom_reward_function` and `reward_manager` to a scorer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from strop.catalog import REWARD_MANAGERS
from strop.config.schema.fields import is_link
from strop.config.schema.reward import CustomRewardFunction, RewardManager, RewardModel
from strop.registry import Entry, load_attribute
from strop.rewards.function import Rules, load_function
from strop.rewards.judge import ChatServer, Completer, Judge
from strop.rewards.model import TokenScorer, model_scores
from strop.rewards.remote import RemoteModel
from strop.rewards.scorer import Manager, Scorer
from strop.rewards.shaping import Shaping

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def build_scorer(
    config: RewardModel,
    custom: CustomRewardFunction,
    reward_manager: RewardManager,
    tokenizer: PreTrainedTokenizerBase,
    reward_model: TokenScorer | None = None,
    *,
    judge: Completer | None = None,
    max_response_length: int | None = None,
) -> Scorer:
    """The scorer that the sections `reward_model`, `custom_reward_function` and `reward_manager` describe.

    Scores come from the user's function, else from a reward server (`remote_url`), a reward model (`enable`) or a judge
    (`judge.enable`), else from the rule of each row's data source. With a function and one of the others, the function reads
    their score in extra_info["rm_score"]. `reward_model` is the model where it is loaded already, `judge` a judge that speaks
    in this process. `max_response_length` is where the overlong penalty ends, unless reward_kwargs.max_resp_len says so.
    """
    options = dict(config.reward_kwargs)
    longest = options.pop("max_resp_len", None) or max_response_length
    whole_transcript = bool(options.pop("whole_transcript", False))
    shaping = _shaping(config, longest)
    model: Manager | None = None
    if config.remote_url:
        model = RemoteModel(config.remote_url, tokenizer, timeout=config.timeout, workers=config.num_workers)
        if config.normalize:
            logger.warning("reward_model.normalize has no effect: scores of a reward server are taken as they are.")
    elif config.enable:
        model = model_scores(config, tokenizer, reward_model)
    elif config.judge.enable:
        model = Judge(judge or ChatServer(config.judge, timeout=config.timeout), config.judge)
    entry = _manager_entry(config, reward_manager)
    manager: Manager | None = None
    if custom.path or model is None:
        manager = _manager(entry, config, custom, options)
    return Scorer(
        tokenizer,
        manager=manager,
        model=model,
        shaping=shaping,
        retries=config.retries,
        stores_acc=entry.facts["stores_acc"],
        whole_transcript=whole_transcript,
    )


def _manager_entry(config: RewardModel, chosen: RewardManager) -> Entry:
    if chosen.source == "importlib":
        if not chosen.module.path:
            raise ValueError("reward_manager.source=importlib needs reward_manager.module.path, the file of your manager.")
        target = load_attribute(chosen.module.path, chosen.module.name)
        return Entry(chosen.module.name, target, REWARD_MANAGERS.defaults, source=chosen.module.path)
    return REWARD_MANAGERS.entry(config.reward_manager if is_link(chosen.name) else chosen.name)


def _manager(entry: Entry, config: RewardModel, custom: CustomRewardFunction, options: dict[str, Any]) -> Manager:
    if options and entry.source == "built-in":
        raise ValueError(
            f"reward_model.reward_kwargs has {sorted(options)}, which the manager {entry.name!r} does not take. It takes "
            "max_resp_len and whole_transcript; arguments of your function go to custom_reward_function.reward_kwargs."
        )
    function: Any = Rules(config.timeout, config.sandbox_fusion)
    if custom.path:
        function = load_function(
            custom.path,
            custom.name,
            custom.reward_kwargs,
            takes_lists=entry.facts["takes_lists"],
            timeout=config.timeout,
        )
    made = entry.load()(function, config, **options)
    if not callable(getattr(made, "score", None)):
        raise ValueError(f"The reward manager {entry.name!r} of {entry.source} has no method `score(samples)`.")
    return made


def _shaping(config: RewardModel, longest: int | None) -> Shaping:
    buffer = config.overlong_buffer
    if config.clip_range is not None and len(config.clip_range) != 2:
        raise ValueError(f"reward_model.clip_range must be [low, high], it is {config.clip_range}.")
    return Shaping(
        overlong_buffer=buffer.len if buffer.enable else None,
        overlong_factor=buffer.penalty_factor,
        max_response_length=longest,
        log_overlong=buffer.log,
        truncated=config.stop_properly_penalty_coef,
        clip=None if config.clip_range is None else (config.clip_range[0], config.clip_range[1]),
    )
