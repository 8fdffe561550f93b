"""PF-PPO: the rows that a step trains on are resampled by their scores."""

from __future__ import annotations

from typing import Literal, cast

import torch

from strop.algorithms.metrics.training import StepRecord
from strop.algorithms.selection import pf_ppo_weights, resample_rows
from strop.config.schema.ppo import PpoConfig
from strop.rollout.base import stream_seed
from strop.types import Batch

ReweightMethod = Literal["pow", "max_min", "max_random"]
RESAMPLING_STREAM = 0x5EED
"""Separates the random stream of resampling from that of shuffling."""


def resample(batch: Batch, config: PpoConfig, step: int, record: StepRecord) -> Batch:
    """The rows to train on, drawn by score with replacement. Failed samples are never drawn."""
    usable = batch.mask.any(-1).nonzero().squeeze(-1)
    if not len(usable):
        return batch
    settings = config.algorithm.pf_ppo
    assert batch.scores is not None
    weights = torch.zeros(len(batch), dtype=torch.float64)
    scores = batch.scores[usable].double().sum(-1)
    weights[usable] = pf_ppo_weights(
        scores, method=cast(ReweightMethod, settings.reweight_method), power=settings.weight_pow
    )
    generator = torch.Generator().manual_seed(stream_seed(RESAMPLING_STREAM, config.trainer.seed, step))
    rows = resample_rows(weights, generator=generator)
    record.add({"pf_ppo/rows_drawn": len(torch.unique(rows)) / len(batch)})
    return batch.select(rows)
