"""Rules of actor.router_replay: updates of a mixture of experts that take the experts of an earlier pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.catalog import ENGINES
from strop.config.derived import engine_name, records_experts, uses_engine_log_probs
from strop.config.megatron import row_ranks
from strop.config.rules.findings import Findings, error

if TYPE_CHECKING:
    from strop.config.compose import Loaded
    from strop.config.schema.ppo import PpoConfig

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODE = f"{ACTOR}.router_replay.mode"
RECORDS = "record_experts"
"""The setting of engines that return the experts of tokens."""


def router_replay(loaded: Loaded[PpoConfig]) -> Findings:
    """What router replay does not go together with."""
    config = loaded.config
    actor = config.actor_rollout_ref.actor
    mode = actor.router_replay.mode
    if mode == "disabled":
        return
    if records_experts(config):
        yield from _engine(config)
    elif uses_engine_log_probs(config):
        yield error(
            MODE,
            "R2 takes the experts of the pass that computes old log-probs, but they are those of the engine "
            "(algorithm.rollout_correction.bypass_mode=true). Set that to false, or "
            f"{MODE}=R3, which takes the experts of the engine.",
        )
    if actor.aux_loss_coef > 0:
        yield error(
            MODE,
            f"{mode} with aux_loss_coef={actor.aux_loss_coef:g}: the load-balancing loss counts tokens whose "
            f"experts are not recorded. Set {ACTOR}.aux_loss_coef=0, or {MODE}=disabled.",
        )
    ranks = row_ranks(actor)
    if ranks > 1:
        key = f"{ACTOR}.ulysses_sequence_parallel_size"
        if actor.strategy == "megatron":
            key = f"{ACTOR}.megatron.context_parallel_size"
        yield error(
            MODE,
            f"{mode} with {key}={ranks}: the experts of a row that devices share are not recorded. Set "
            f"{key}=1, or {MODE}=disabled.",
        )


def _engine(config: PpoConfig) -> Findings:
    """R3 needs an engine that returns the experts that it chose."""
    rollout = config.actor_rollout_ref.rollout
    name = engine_name(rollout)
    if RECORDS not in ENGINES.entry(name).facts["settings"]:
        able = [other for other in ENGINES.names() if RECORDS in ENGINES.entry(other).facts["settings"]]
        yield error(
            MODE,
            f"R3 takes the experts that the rollout engine chose, and {name} does not return them. Set "
            f"{ROLLOUT}.name to one of {', '.join(able)}, or {MODE}=R2: the experts of the old log-probs, "
            "under the weights that were sampled from.",
        )
    if name != "vllm":
        return
    if (rollout.engine_kwargs.get(name) or {}).get("url"):
        yield error(
            MODE,
            f"R3 with {ROLLOUT}.engine_kwargs.vllm.url: the experts of tokens are not read from a server of "
            f"vLLM. Let Strop start vLLM ({ROLLOUT}.engine_kwargs.vllm.python), or set {MODE}=R2.",
        )
    if not rollout.enable_prefix_caching:
        yield error(
            MODE,
            "R3 without the prefix cache, in which vLLM keeps the experts of tokens. Set "
            f"{ROLLOUT}.enable_prefix_caching=true, or {MODE}=R2.",
        )
