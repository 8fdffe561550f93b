"""The `algorithm` section: computation of advantages from rewards."""

from __future__ import annotations

from dataclasses import dataclass

from strop.catalog import ADVANTAGES, KL_ESTIMATORS
from strop.compat import FRAMEWORKS
from strop.config.schema.distillation import DistillationConfig
from strop.config.schema.fields import FreeForm, section, setting


@dataclass(eq=False)
class KlCtrlConfig:
    """Weight of the KL penalty in the reward. It has no effect without use_kl_in_reward."""

    type: str = setting("fixed", choices=("fixed", "adaptive"))
    """fixed: constant weight; adaptive: the weight changes so that the KL approaches target_kl."""
    kl_coef: float = setting(0.001, at_least=0)
    """Weight of the penalty; with adaptive, its initial value."""
    horizon: float = setting(10000, above=0)
    """adaptive: time constant of the weight, in sequences."""
    target_kl: float = setting(0.1, above=0)
    """adaptive: target of the KL."""


@dataclass(eq=False)
class PfPpoConfig:
    """Resampling of the batch by score (PF-PPO)."""

    reweight_method: str = setting("pow", choices=("pow", "max_min", "max_random"))
    """Method that turns scores into resampling weights."""
    weight_pow: float = setting(2.0)
    """pow: exponent of |score|."""


@dataclass(eq=False)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO)."""

    enable: bool = setting(False)
    """Keep only prompts whose samples have different scores, and sample more prompts until the batch is
    full."""
    metric: str | None = setting("score")
    """Value that must differ between samples: score (before penalties for the length of a response),
    seq_reward (the reward that is trained on), acc, or any key that the scorer returns."""
    range: list[float] | None = setting(None)
    """Keep prompts whose mean lies strictly between low and high, instead of prompts whose samples differ."""
    max_num_gen_batches: int | None = setting(None, at_least=0)
    """Fail after this many generation batches for one training batch. Null: fail after 10 batches in a row
    (and at least 10 times data.train_batch_size prompts) without a usable prompt. 0: no limit. In every case,
    a warning with the last scores follows after 3 such batches."""


@dataclass(eq=False)
class RolloutCorrectionConfig:
    """Off-policy correction for rollouts that were sampled by a slightly different policy."""

    rollout_is: str | None = setting(None, choices=("token", "sequence", None))
    """Importance weights per token or per sequence. Null: none."""
    rollout_is_threshold: float | str | None = setting(2.0)
    """Weights are truncated at this value. `low_high`, in YAML files in quotes ("0.5_5"), sets weights
    outside the band to 0. Null: no weights."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Rejection sampling: a comma-separated list of token_k1..k3, seq_sum_k1..k3, seq_mean_k1..k3,
    seq_max_k2..k3."""
    rollout_rs_threshold: float | str | None = None
    """Bounds of the rejection: one value for all criteria, or one per criterion."""
    bypass_mode: bool = False
    """Use the engine's log-probs as old log-probs and skip their recomputation."""
    loss_type: str = setting("ppo_clip", choices=("ppo_clip", "reinforce"))
    """Policy loss in bypass mode."""


@dataclass(eq=False)
class AlgorithmConfig:
    """Computation of advantages from rewards."""

    adv_estimator: str = setting("gae", one_of=ADVANTAGES)
    """Advantage estimator."""
    adv_kwargs: FreeForm = setting({})
    """Further keyword arguments of the estimator, by the names in its signature. They are checked before
    the run."""
    gamma: float = setting(1.0, at_least=0, at_most=1)
    """Discount per token."""
    lam: float = setting(1.0, at_least=0, at_most=1)
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo: divide by the group's standard deviation. False is Dr. GRPO."""
    norm_adv_by_std: bool = setting(True)
    """gae and reinforce_plus_plus: whiten advantages over the batch. False: only subtract the mean."""
    gdpo_reward_keys: list[str] | None = setting(None)
    """gdpo: components of the score, as keys that the scorer returns. Null: the score itself is the only
    component."""
    gdpo_reward_weights: list[float] | None = setting(None)
    """gdpo: weight of each component. Null: 1 each."""
    use_kl_in_reward: bool = False
    """Subtract kl_ctrl.kl_coef * KL(policy, reference) from every token's reward. Needs a reference model."""
    kl_penalty: str = setting("kl", one_of=KL_ESTIMATORS)
    """KL estimator of use_kl_in_reward."""
    kl_ctrl: KlCtrlConfig = section(KlCtrlConfig)
    """Weight of the KL penalty in the reward."""
    use_pf_ppo: bool = False
    """Resample each batch by its scores (PF-PPO)."""
    pf_ppo: PfPpoConfig = section(PfPpoConfig)
    """Settings of the resampling."""
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    """Dynamic sampling."""
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    """Off-policy correction."""
    distillation: DistillationConfig = section(DistillationConfig)
    """On-policy distillation from a teacher."""
    pretrain_files: str | list[str] | None = setting(None)
    """Text files for a language-model loss that is added to the policy loss (ptx)."""
    ptx_coef: float = setting(0.05, at_least=0)
    """Weight of the language-model loss."""
    compat: str = setting("strop", choices=tuple(FRAMEWORKS))
    """Reproduce the numbers of verl, OpenRLHF or TRL where Strop's default deliberately differs.
    docs/compat.md lists what each value changes."""
