"""Rules of the `reward_model` section: where scores come from, and on which devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.catalog import REWARD_MANAGERS
from strop.config.derived import resource_pools
from strop.config.rules.findings import Findings, error, warning

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.ppo import PpoConfig


def score_source(loaded: Loaded[PpoConfig]) -> Findings:
    """Scores come from one source: a reward model or a judge, each with an address or a path."""
    reward = loaded.config.reward_model
    judge = reward.judge
    if reward.enable and not (reward.model.path or reward.remote_url):
        yield error(
            "reward_model.model.path",
            "reward_model.enable=true needs reward_model.model.path or reward_model.remote_url.",
        )
    path = "reward_model.model.path"
    if loaded.set_by_user.get(path) and not reward.enable and not judge.enable:
        yield warning(path, "no effect: reward_model.enable is false. Set it to true to score with it.")
    if judge.enable and (reward.enable or reward.remote_url):
        yield error(
            "reward_model.judge.enable",
            "scores come from a judge or from a reward model, not both. Switch one off.",
        )
    if judge.enable and not (judge.url or reward.model.path):
        yield error(
            "reward_model.judge.url",
            "reward_model.judge.enable=true needs reward_model.judge.url or reward_model.model.path.",
        )


def manager(loaded: Loaded[PpoConfig]) -> Findings:
    """reward_manager.name is a registered manager, or with importlib a class of the user's file."""
    chosen = loaded.config.reward_manager
    older = loaded.config.reward_model.reward_manager
    if chosen.source == "register":
        if "reward_model.reward_manager" in loaded.set_by_user and chosen.name != older:
            yield error(
                "reward_manager.name",
                f"{chosen.name}, but its older name reward_model.reward_manager is {older}. Set only one.",
            )
        try:
            REWARD_MANAGERS.entry(chosen.name)
        except ValueError as unknown:
            yield error("reward_manager.name", str(unknown))


def clip_range(loaded: Loaded[PpoConfig]) -> Findings:
    """reward_model.clip_range is [low, high]."""
    yield from ordered_pair("reward_model.clip_range", loaded.config.reward_model.clip_range)


def ordered_pair(key: str, pair: list[float] | None) -> Findings:
    """A range is two numbers in ascending order."""
    if pair is not None and (len(pair) != 2 or pair[0] >= pair[1]):
        yield error(key, f"expected [low, high] with low < high, got {pair}.")


def overlong_buffer(loaded: Loaded[PpoConfig]) -> Findings:
    """The penalty for long responses begins inside of the longest one."""
    reward = loaded.config.reward_model
    limit = reward.reward_kwargs.get("max_resp_len") or loaded.config.data.max_response_length
    buffer = reward.overlong_buffer
    if buffer.enable and isinstance(limit, int) and not 0 < buffer.len <= limit:
        yield error(
            "reward_model.overlong_buffer.len",
            f"{buffer.len} must lie between 1 and the longest response, {limit} tokens "
            "(data.max_response_length, or reward_model.reward_kwargs.max_resp_len).",
        )


def resource_pool(loaded: Loaded[PpoConfig]) -> Findings:
    """reward_model.enable_resource_pool needs devices and a reward model that runs on them."""
    reward = loaded.config.reward_model
    key = "reward_model.enable_resource_pool"
    if not reward.enable_resource_pool:
        return
    if min(reward.nnodes, reward.n_gpus_per_node) < 1:
        yield error(
            key,
            f"true, with reward_model.nnodes={reward.nnodes} and n_gpus_per_node={reward.n_gpus_per_node}. "
            "Set reward_model.nnodes and reward_model.n_gpus_per_node above 0.",
        )
    elif reward.judge.enable and not reward.judge.url:
        yield error(
            key,
            "true, but a judge that runs here shares the actor's devices. Serve it elsewhere "
            "(reward_model.judge.url), or set false.",
        )
    elif "reward" not in resource_pools(loaded.config):
        yield warning(key, "true, but the run has no reward model of its own.")
