"""Reward managers: how the scoring function is called for a batch of samples; and `build_scorer`.

A manager is built as `Manager(function, settings, **reward_kwargs)`; `function(sample)` is the configured
scorer. It has one method, `score(samples)`, which returns for every sample what its scorer returned, or the
exception that it raised. Checking those values, retries, penalties and counters are the same for all managers
and are in `scorer.py`.

    @REWARD_MANAGERS.register("halved")
    class HalvedRewardManager:
        def __init__(self, function, settings): self.function = function
        def score(self, samples): return [self.function(sample) / 2 for sample in samples]
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from strop.catalog import REWARD_MANAGERS
from strop.compat import Conventions, conventions
from strop.concurrency import call_each
from strop.config.schema.fields import is_link
from strop.config.schema.reward import CustomRewardFunctionConfig, RewardManagerConfig, RewardModelConfig
from strop.registry import Entry, load_attribute
from strop.rewards.base import RewardSample
from strop.rewards.function import LOOP_GRACE, RewardFunction, RuleScorer, load_function
from strop.rewards.judge import ChatCompleter, ChatCompletionsClient, Judge
from strop.rewards.model import TokenScorer, build_reward_model_scorer
from strop.rewards.remote import RewardFile, RewardServerClient
from strop.rewards.scorer import RewardManager, Scorer, Shaping
from strop.rewards.timelimit import TimeLimitedPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MAX_ASYNC_CALLS = 256
ScoringFunction = RewardFunction | RuleScorer


class NaiveRewardManager:
    """Calls the function in order, in `num_workers` threads; the calls of an async function run
    concurrently."""

    def __init__(self, function: ScoringFunction, settings: RewardModelConfig):
        self.function = function
        self.workers = settings.num_workers
        if function.is_async:
            self.workers = MAX_ASYNC_CALLS
        self.timeout = _thread_timeout(function, settings)

    def score(self, samples: Sequence[RewardSample]) -> list[object]:
        workers = max(self.workers, self._rule_concurrency(samples))
        return call_each(self.function, samples, workers=workers, timeout=self.timeout)

    def _rule_concurrency(self, samples: Sequence[RewardSample]) -> int:
        if not isinstance(self.function, RuleScorer):
            return 1
        try:
            return self.function.concurrency(samples)
        except ValueError:  # a data source without a rule; each of its samples raises this error again
            return 1


class PrimeRewardManager:
    """Calls the function in `num_workers` worker processes, which are killed and restarted after a timeout.

    verl's `remote` manager is the same. (A reward server is used because of reward_model.remote_url, with any
    manager.)
    """

    def __init__(self, function: ScoringFunction, settings: RewardModelConfig):
        if function.is_async:
            raise ValueError(
                "reward_model.reward_manager=prime runs functions in processes, but the reward function is "
                "async. Use naive (all calls run concurrently) or rate_limited."
            )
        self.function = function
        self.timeout = settings.timeout
        self.pool = TimeLimitedPool(settings.num_workers)
        weakref.finalize(self, self.pool.close)

    def score(self, samples: Sequence[RewardSample]) -> list[object]:
        return call_each(self._call_in_process, samples, workers=self.pool.workers)

    def _call_in_process(self, sample: RewardSample) -> object:
        function, args, kwargs = self.function.call_for(sample)
        return self.pool.run(function, args, kwargs, self.timeout)

    def close(self) -> None:
        """Stop the worker processes."""
        self.pool.close()


class BatchRewardManager:
    """Calls the user's function once, with lists. Rules take one sample and are called in order."""

    def __init__(self, function: ScoringFunction, settings: RewardModelConfig):
        self.function = function
        self.settings = settings

    def score(self, samples: Sequence[RewardSample]) -> Sequence[object]:
        if isinstance(self.function, RuleScorer):
            return NaiveRewardManager(self.function, self.settings).score(samples)
        timeout = self.settings.timeout * len(samples) + LOOP_GRACE
        [values] = call_each(self.function.call_with_lists, [samples], timeout=timeout)
        return [values] * len(samples) if isinstance(values, Exception) else values


class RateLimitedRewardManager:
    """Allows `max_concurrent` calls at the same time, `max_rpm` calls and `max_tpm` tokens in any minute."""

    def __init__(self, function: ScoringFunction, settings: RewardModelConfig):
        self.function = function
        self.workers = settings.max_concurrent
        self.timeout = _thread_timeout(function, settings)
        tokens = settings.estimated_tokens_per_request
        if settings.max_tpm is not None and tokens > settings.max_tpm:
            raise ValueError(
                f"reward_model.max_tpm={settings.max_tpm:g} is below "
                f"reward_model.estimated_tokens_per_request={tokens}, so no request could ever be sent. "
                "Raise the first or lower the second."
            )
        self.limits: list[tuple[float, RateLimit]] = []
        """What one call consumes of each limit."""
        if settings.max_rpm is not None:  # less than one call a minute is one call in a longer window
            window = 60.0 / min(settings.max_rpm, 1.0)
            self.limits.append((1, RateLimit(max(settings.max_rpm, 1.0), window)))
        if settings.max_tpm is not None:
            self.limits.append((tokens, RateLimit(settings.max_tpm, 60.0)))

    def score(self, samples: Sequence[RewardSample]) -> list[object]:
        return call_each(
            self.function, samples, workers=self.workers, timeout=self.timeout, before=self._wait_for_limits
        )

    def _wait_for_limits(self) -> None:
        for amount, limit in self.limits:
            limit.acquire(amount)


class RateLimit:
    """Allows a total of `limit` in any `window` seconds; `acquire` sleeps until the amount fits."""

    def __init__(self, limit: float, window: float):
        self.limit = limit
        self.window = window
        self._used: deque[tuple[float, float]] = deque()
        """Time and amount of each use inside the window."""
        self._total = 0.0
        self._lock = threading.Lock()

    def acquire(self, amount: float) -> None:
        """Wait until `amount` fits, then use it."""
        with self._lock:  # held during the sleep, so later callers keep their order
            while self._total + amount > self.limit and self._used:
                used_at, used_amount = self._used[0]
                pause = used_at + self.window - time.monotonic()
                if pause > 0:
                    time.sleep(pause)
                self._used.popleft()
                self._total -= used_amount
            self._used.append((time.monotonic(), amount))
            self._total += amount


def _thread_timeout(function: ScoringFunction, settings: RewardModelConfig) -> float:
    if function.is_async:
        return settings.timeout + LOOP_GRACE
    return settings.timeout


# --- Build a scorer from the configuration ------------------------------------------------------------------


def build_scorer(
    config: RewardModelConfig,
    custom: CustomRewardFunctionConfig,
    reward_manager: RewardManagerConfig,
    tokenizer: PreTrainedTokenizerBase,
    reward_model: TokenScorer | None = None,
    *,
    judge: ChatCompleter | None = None,
    max_response_length: int | None = None,
    compat: str | None = None,
    given: Callable[..., object] | None = None,
) -> Scorer:
    """Build the scorer of the sections `reward_model`, `custom_reward_function` and `reward_manager`.

    Scores come from the user's function; else from a reward server (`remote_url`), a reward model (`enable`)
    or a judge (`judge.enable`); else from the rule of each row's data source. With a function and one of the
    models, the function reads the model's score in extra_info["rm_score"]. `reward_model` is the model if it
    is loaded already, `judge` a judge in this process. The overlong penalty ends at
    reward_kwargs.max_resp_len, or else at `max_response_length`. `compat` is algorithm.compat: it decides
    how rules compare answers, how the overlong penalty ends, and whether the scorer clips scores. `given` is
    the user's function itself, which is then not loaded from its file.
    """
    options = dict(config.reward_kwargs)
    max_length = options.pop("max_resp_len", None) or max_response_length
    whole_transcript = bool(options.pop("whole_transcript", False))
    shaping = _build_shaping(config, max_length, conventions(compat))
    model = _build_model(config, tokenizer, reward_model, judge)
    entry = _manager_entry(config, reward_manager)
    manager: RewardManager | None = None
    if custom.path or model is None:
        manager = _build_manager(entry, config, custom, options, compat, given)
    return Scorer(
        tokenizer,
        manager=manager,
        model=model,
        shaping=shaping,
        retries=config.retries,
        stores_acc=entry.facts["stores_acc"],
        whole_transcript=whole_transcript,
    )


def _build_model(
    config: RewardModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    reward_model: TokenScorer | None,
    judge: ChatCompleter | None,
) -> RewardManager | None:
    """Return the reward server, reward model or judge of the configuration; None if there is none."""
    if config.remote_url:
        if config.normalize:
            logger.warning("reward_model.normalize has no effect: scores of a reward server are not changed.")
        if isinstance(config.remote_url, str) and config.remote_url.endswith(".py"):
            return RewardFile(config.remote_url, tokenizer, timeout=config.timeout)
        return RewardServerClient(
            config.remote_url, tokenizer, timeout=config.timeout, workers=config.num_workers
        )
    if config.enable:
        return build_reward_model_scorer(config, tokenizer, reward_model)
    if config.judge.enable:
        return Judge(judge or ChatCompletionsClient(config.judge, timeout=config.timeout), config.judge)
    return None


def _manager_entry(config: RewardModelConfig, chosen: RewardManagerConfig) -> Entry:
    if chosen.source == "importlib":
        if not chosen.module.path:
            raise ValueError(
                "reward_manager.source=importlib needs reward_manager.module.path, the file of your manager."
            )
        name = chosen.name  # as in verl, unless it still names a registered manager
        if is_link(name) or name in REWARD_MANAGERS:
            name = chosen.module.name
        target = load_attribute(chosen.module.path, name)
        return Entry(name, target, REWARD_MANAGERS.defaults, source=chosen.module.path)
    if is_link(chosen.name):
        return REWARD_MANAGERS.entry(config.reward_manager)
    return REWARD_MANAGERS.entry(chosen.name)


def _build_manager(
    entry: Entry,
    config: RewardModelConfig,
    custom: CustomRewardFunctionConfig,
    options: dict[str, object],
    compat: str | None,
    given: Callable[..., object] | None,
) -> RewardManager:
    if options and entry.source == "built-in":
        raise ValueError(
            f"reward_model.reward_kwargs has {sorted(options)}, which the manager {entry.name!r} does not "
            "take. It takes max_resp_len and whole_transcript; arguments of your function go to "
            "custom_reward_function.reward_kwargs."
        )
    function: ScoringFunction = RuleScorer(
        config.timeout, config.sandbox_fusion, compat=conventions(compat).scorers
    )
    if custom.path:
        function = load_function(
            custom.path,
            custom.name,
            custom.reward_kwargs,
            takes_lists=entry.facts["takes_lists"],
            timeout=config.timeout,
            given=given,
        )
    made = entry.load()
    if not isinstance(made, type) or callable(getattr(made, "score", None)):
        made = made(function, config, **options)
    if not callable(getattr(made, "score", None)):
        raise ValueError(
            f"The reward manager {entry.name!r} of {entry.source} has no method `score(samples)` "
            "(CONTRIBUTING.md has an example). verl's managers, which read its DataProto, cannot be "
            "used; a function needs no manager: custom_reward_function.path."
        )
    manager: RewardManager = made
    return manager


def _build_shaping(config: RewardModelConfig, max_response_length: int | None, rules: Conventions) -> Shaping:
    clip = None
    if config.clip_range is not None:
        if len(config.clip_range) != 2:
            raise ValueError(f"reward_model.clip_range must be [low, high], it is {config.clip_range}.")
        if rules.reward_clip == "scores":
            clip = (config.clip_range[0], config.clip_range[1])
    overlong = config.overlong_buffer
    overlong_buffer = None
    if overlong.enable:
        overlong_buffer = overlong.len
    return Shaping(
        overlong_buffer=overlong_buffer,
        overlong_factor=overlong.penalty_factor,
        overlong_capped=rules.overlong_penalty == "capped",
        max_response_length=max_response_length,
        log_overlong=overlong.log,
        truncated=config.stop_properly_penalty_coef,
        clip=clip,
    )
