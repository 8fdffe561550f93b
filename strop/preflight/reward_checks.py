"""Whether the reward function reports what the algorithm reads, as far as one call of it shows."""

from __future__ import annotations

from strop.catalog import REWARD_MANAGERS
from strop.config.rules import ConfigFinding, warning
from strop.config.schema.ppo import PpoConfig
from strop.rewards.base import Verdict

OF_EVERY_SCORER = ("score", "seq_reward", "seq_final_reward")


def unreported_values(config: PpoConfig, data_source: str, verdict: Verdict) -> list[ConfigFinding]:
    """Warnings about values that dynamic sampling or gdpo read, and this scorer did not return. A sample
    without them ends the run."""
    algorithm = config.algorithm
    read: list[tuple[str, str]] = []
    groups = algorithm.filter_groups
    if groups.enable and groups.metric not in (None, *OF_EVERY_SCORER):
        read.append(("algorithm.filter_groups.metric", str(groups.metric)))
    read += [("algorithm.gdpo_reward_keys", key) for key in algorithm.gdpo_reward_keys or []]
    reported = {"score", *verdict.extras}
    manager = config.reward_manager
    own = manager.source != "register" or manager.name not in REWARD_MANAGERS
    if own or REWARD_MANAGERS.entry(manager.name).facts["stores_acc"]:
        reported.add("acc")
    reward = config.reward_model
    if reward.overlong_buffer.enable and reward.overlong_buffer.log:
        reported |= {"overlong_reward", "overlong"}
    if reward.enable or reward.remote_url or reward.judge.enable:
        reported.add("rm_score")
    found = []
    for key, name in read:
        if name not in reported:
            found.append(
                warning(
                    key,
                    f"the scorer of {data_source} reports {', '.join(sorted(reported))}, not {name!r}. A "
                    "sample without it ends the run, unless an agent loop reports it.",
                )
            )
    return found
