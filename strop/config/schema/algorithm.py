"""The `algorithm` section: from rewards to advantages."""

from __future__ import annotations

from dataclasses import dataclass

from strop.catalog import ADVANTAGES, KL_ESTIMATORS
from strop.config.schema.fields import section, setting


@dataclass(eq=False)
class KlCtrl:
    """Weight of the KL penalty in the reward; without use_kl_in_reward it does nothing. Read by algorithms/kl.py."""

    type: str = setting("fixed", choices=("fixed", "adaptive"))
    """fixed, or adaptive: steer the KL towards target_kl."""
    kl_coef: float = setting(0.001, at_least=0)
    """The (first) weight."""
    horizon: float = setting(10000, above=0)
    """adaptive: how slowly the weight moves, in sequences."""
    target_kl: float = setting(0.1, above=0)
    """adaptive: the KL to steer to."""


@dataclass(eq=False)
class PfPpo:
    """Resampling by score. Read by algorithms/shaping.py."""

    reweight_method: str = setting("pow", choices=("pow", "max_min", "max_random"))
    """Weights of the resampling."""
    weight_pow: float = setting(2.0)
    """pow: exponent of |score|."""


@dataclass(eq=False)
class FilterGroups:
    """Dynamic sampling (DAPO). Read by trainer/collect.py."""

    enable: bool = setting(False)
    """Keep only prompts whose samples disagree, and draw more until the batch is full."""
    metric: str | None = setting("score")
    """What must disagree: score, acc, or any key the scorer returns."""
    range: list[float] | None = setting(None)
    """Keep prompts whose mean lies strictly inside [low, high] instead of those that disagree."""
    max_num_gen_batches: int = setting(0, at_least=0)
    """Give up after this many draws for one batch. 0: never."""


@dataclass(eq=False)
class RolloutCorrection:
    """Correction for rollouts that come from a slightly other policy. Read by algorithms/rollout_correction.py."""

    rollout_is: str | None = setting(None, choices=("token", "sequence", None))
    """Importance weights per token or per sequence. Null: none."""
    rollout_is_threshold: float | str = setting(2.0)
    """Weights are cut off above this; `low_high` zeroes weights outside the band."""
    rollout_is_batch_normalize: bool = False
    """Divide weights by their mean."""
    rollout_rs: str | None = None
    """Rejection: a comma list of token_k1..k3, seq_sum_k1..k3, seq_mean_k1..k3, seq_max_k2..k3."""
    rollout_rs_threshold: float | str | None = None
    """Bounds of the rejection, one or one per criterion."""
    bypass_mode: bool = False
    """Take the engine's log-probs as the old ones and skip their recomputation."""
    loss_type: str = setting("ppo_clip", choices=("ppo_clip", "reinforce"))
    """Loss in bypass mode."""


@dataclass(eq=False)
class Algorithm:
    """From rewards to advantages. Read by trainer/ppo.py and algorithms/."""

    adv_estimator: str = setting("gae", one_of=ADVANTAGES)
    """Advantage estimator."""
    gamma: float = setting(1.0, at_least=0, at_most=1)
    """Discount per token."""
    lam: float = setting(1.0, at_least=0, at_most=1)
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo: divide by the group's standard deviation. False is Dr. GRPO."""
    norm_adv_by_std: bool = setting(True)
    """gae and reinforce_plus_plus: whiten advantages over the batch. False only centres them."""
    gdpo_reward_keys: list[str] | None = setting(None)
    """gdpo: the parts of the score, by the keys that the scorer returns beside it. Null: the score itself is the only part."""
    gdpo_reward_weights: list[float] | None = setting(None)
    """gdpo: weight of each part. Null: 1 each."""
    use_kl_in_reward: bool = False
    """Subtract kl_ctrl.kl_coef * KL(policy, reference) from every token's reward. Needs a reference model."""
    kl_penalty: str = setting("kl", one_of=KL_ESTIMATORS)
    """Estimator of that KL."""
    kl_ctrl: KlCtrl = section(KlCtrl)
    """Weight of that KL."""
    use_pf_ppo: bool = False
    """Resample each batch by its scores (PF-PPO)."""
    pf_ppo: PfPpo = section(PfPpo)
    """How."""
    filter_groups: FilterGroups = section(FilterGroups)
    """Dynamic sampling."""
    rollout_correction: RolloutCorrection = section(RolloutCorrection)
    """Off-policy correction."""
    pretrain_files: str | list[str] | None = setting(None)
    """Text files for a language-modelling loss beside the policy loss (ptx)."""
    ptx_coef: float = setting(0.05, at_least=0)
    """Weight of that loss."""
    compat: str = setting("strop", choices=("strop", "verl", "openrlhf"))
    """Reproduce a peer's numbers where Strop's default deliberately differs; docs/algorithms.md lists each case."""
