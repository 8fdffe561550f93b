"""Whether sequences fit into the positions of a model: prompts with their responses, and the rows of
supervised training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from strop.config.arithmetic import plan_supervised
from strop.config.rules import ConfigFinding, error
from strop.config.schema.supervised import PairDataConfig, RmConfig
from strop.data.supervised.labelled import reads_labels
from strop.models.packing import longrope_limit
from strop.preflight.model_checks import local_model_config
from strop.rollout.position_limit import position_limit

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from strop.config.schema.rollout import RolloutConfig
    from strop.config.schema.roots import AnySupervisedConfig


def response_position_findings(
    key: str, rollout: RolloutConfig, config: PreTrainedConfig | None, lengths: tuple[str, str]
) -> list[ConfigFinding]:
    """An error if prompt and response do not fit into the model. `key`: that of the rollout section;
    `lengths`: those of the longest prompt and response."""
    limit = None if config is None else position_limit(config)
    tokens = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    if not limit or tokens <= limit:
        return []
    message = (
        f"sequences of {tokens} tokens (prompts of {rollout.prompt_length}, responses of "
        f"{rollout.response_length}) do not fit into the {limit} positions of the model. Lower "
        f"{lengths[0]} or {lengths[1]}, or set {key}.max_model_len={limit}, where long prompts get shorter "
        "responses."
    )
    return [error(f"{key}.max_model_len", message)]


def row_position_findings(
    config: AnySupervisedConfig, lengths: Sequence[int], key: str
) -> list[ConfigFinding]:
    """An error if a row has more tokens than the model has positions in a table, or if a micro-batch may hold
    rows for which longrope has different angles. `lengths`: tokens of the sequences, those of a pair one
    after the other; `key`: that of the files."""
    try:
        model = local_model_config(config.model)
    except ValueError as problem:
        return [error("model.path", str(problem))]
    if model is None or not lengths:
        return []
    unread = 0 if isinstance(config, RmConfig) else 1  # no token is predicted from the last one
    read = [min(length, config.data.max_length) - unread for length in lengths]
    longest = max(read) + unread
    limit = position_limit(model)
    if limit and max(read) > limit and _looks_positions_up(model):
        message = (
            f"{key} has sequences of {longest} tokens (after data.max_length={config.data.max_length}), but "
            f"the model has {limit} positions. Set data.max_length={limit} and data.truncation, or choose a "
            "model with more positions."
        )
        return [error("data.max_length", message)]
    trained = longrope_limit(model)
    if trained is None or not _have_both(_together(config, read), trained):
        return []
    message = (
        f"{key} has sequences of {min(read) + unread} to {longest} tokens. With the longrope of this model, "
        f"sequences over {trained} tokens (original_max_position_embeddings) have other angles, and a "
        f"micro-batch has one kind. Set data.max_length={trained} and data.truncation"
    )
    if not _have_both(_alone(config, read), trained):
        message += ", or data.micro_batch_size_per_gpu=1 without data.use_dynamic_bsz"
    return [error("data.max_length", f"{message}.")]


def _have_both(groups: Sequence[Sequence[int]], limit: int) -> bool:
    """Whether a group has lengths up to the limit and beyond."""
    return any(min(lengths) <= limit < max(lengths) for lengths in groups)


def _together(config: AnySupervisedConfig, lengths: Sequence[int]) -> list[Sequence[int]]:
    """The lengths that one micro-batch may have."""
    plan = plan_supervised(config)
    if config.data.use_dynamic_bsz or (plan.micro_batch or plan.rows_per_device) > 1:
        return [lengths]
    return _alone(config, lengths)


def _alone(config: AnySupervisedConfig, lengths: Sequence[int]) -> list[Sequence[int]]:
    """The lengths of each row or pair, which is never divided."""
    size = 2 if isinstance(config.data, PairDataConfig) and not reads_labels(config) else 1
    return [lengths[start : start + size] for start in range(0, len(lengths), size)]


def _looks_positions_up(config: PreTrainedConfig) -> bool:
    """Whether the model has a table of positions and fails beyond it, as GPT-2 and OPT do; tried on a small
    one. False for a model that cannot be made small."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from strop.models.layouts.check import FAILURES
    from strop.models.layouts.small_model import build_small, small_config

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    kind = cast("type[PreTrainedModel]", MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    ids = torch.ones(1, 2, dtype=torch.long)
    try:
        small = build_small(kind, small_config(config))
        limit = position_limit(small.config)
        if limit is None:
            return False
        small(input_ids=ids, position_ids=torch.tensor([[limit - 2, limit - 1]]), use_cache=False)
    except FAILURES:
        return False
    try:
        small(input_ids=ids, position_ids=torch.tensor([[limit - 1, limit]]), use_cache=False)
    except (IndexError, RuntimeError):
        return True
    return False
