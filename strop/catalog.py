"""The menu: every choice that ships with Strop, and what it needs, on one page.

Entries are import paths, so this file costs nothing to read: `strop check` knows that `gae` wants a critic without importing
torch. Functions themselves stay undecorated and pure.
"""

from __future__ import annotations

from strop.registry import Registry

# --- Advantage estimators ------------------------------------------------------------------------------------------------
# needs: what the batch must carry beside rewards and mask: "values" (so a critic exists), "group" (several samples of one
# prompt are compared), "greedy_baseline" (one greedy rollout per prompt), "sum_pi_squared" (from the old log-prob pass),
# "old_log_probs", "reward_components". min_group: the smallest rollout.n that makes sense.
ADVANTAGES = Registry("advantage estimator", facts={"needs": (), "min_group": 1})

# --- Policy losses -------------------------------------------------------------------------------------------------------
# aggregation: the only mode the formula is defined for, or None when `loss_agg_mode` decides.
POLICY_LOSSES = Registry("policy loss", facts={"needs": (), "aggregation": None})

# --- Estimators of the KL divergence to the reference --------------------------------------------------------------------
KL_ESTIMATORS = Registry("KL estimator")

# --- Ways to reduce a per-token loss to a number -------------------------------------------------------------------------
AGGREGATIONS = Registry("loss aggregation")

# --- Learning-rate schedules ---------------------------------------------------------------------------------------------
SCHEDULES = Registry("learning-rate schedule")

# --- Pairwise and supervised losses --------------------------------------------------------------------------------------
PREFERENCE_LOSSES = Registry("preference loss", facts={"needs": ()})

# --- Rule scorers --------------------------------------------------------------------------------------------------------
# sources: shell-style patterns of `data_source` that this scorer answers for; slow: it can hang (sympy, regex), so it runs in
# a worker process with a time limit.
SCORERS = Registry("scorer", facts={"sources": (), "slow": False})
