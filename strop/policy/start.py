"""Where the operations of a policy run: in this process, in ranks of this machine, or in Ray actors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.config.rules.actor import usable_optimizer
from strop.config.schema.ppo import PpoConfig
from strop.policy.core import PolicyCore
from strop.policy.ownership import own_module, release_module
from strop.policy.ranked import RankedCore

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def start_core(
    config: PpoConfig, ranks: int, runtime: str, module: PreTrainedModel | None
) -> PolicyCore | RankedCore:
    """The core of a policy. `module` is a model that the caller has loaded."""
    if runtime not in ("local", "ray"):
        raise ValueError(f"runtime={runtime!r} must be 'local' or 'ray'.")
    optim = config.actor_rollout_ref.actor.optim
    for finding in usable_optimizer("actor_rollout_ref.actor.optim", optim, ranks):
        raise ValueError(str(finding))
    alone = ranks == 1 and runtime == "local"
    if module is None:
        return PolicyCore(config) if alone else RankedCore(config, ray=runtime == "ray")
    if not alone:
        raise ValueError(
            f"A loaded model cannot be sent to other processes (ranks={ranks}, runtime={runtime!r}). "
            "Save it, and give its folder."
        )
    own_module(module)
    try:
        return PolicyCore(config, module=module)
    except BaseException:
        release_module(module)
        raise
