"""Rules of the `critic` section."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.config.derived import estimator_needs, has_critic, resource_pools
from strop.config.rules.actor import two_betas
from strop.config.rules.findings import Findings, error, warning

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.ppo import PpoConfig


def needed(loaded: Loaded[PpoConfig]) -> Findings:
    """The critic exists where the estimator needs values; without it its keys have no effect."""
    config = loaded.config
    name = config.algorithm.adv_estimator
    if config.critic.enable is False and "values" in estimator_needs(config):
        yield error(
            "critic.enable",
            f"false, but {name} needs values. Leave it unset, or choose grpo, rloo, reinforce_plus_plus ...",
        )
    if has_critic(config):
        return
    keys = [path for path in loaded.set_by_user if path.startswith("critic.")]
    if keys:
        more = ""
        if len(keys) > 1:
            more = f" (the same holds for {len(keys) - 1} more critic.* keys)"
        yield warning(keys[0], f"no effect: {name} needs no critic{more}.")
    if config.trainer.critic_warmup > 1:
        yield warning(
            "trainer.critic_warmup",
            f"{config.trainer.critic_warmup}, but {name} has no critic: nothing is trained before that step. "
            "Set it to 0.",
        )


def betas(loaded: Loaded[PpoConfig]) -> Findings:
    """AdamW has two momentum coefficients."""
    yield from two_betas("critic.optim.betas", loaded.config.critic.optim.betas)


def resource_pool(loaded: Loaded[PpoConfig]) -> Findings:
    """A recorded step stores the state of one process."""
    config = loaded.config
    if "critic" in resource_pools(config) and config.trainer.record_steps:
        yield error(
            "critic.nnodes",
            f"{config.critic.nnodes}: trainer.record_steps stores what one process learns. Set 0.",
        )
