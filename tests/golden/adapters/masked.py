"""Masked arithmetic, response masks, and padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strop.algorithms.aggregation import EPS, masked_mean, masked_sum, masked_var, masked_whiten
from tests.algorithms.reference.masked import clamp_between, mask_through_stop, masked_normalise
from tests.algorithms.reference.padding import pad_or_truncate, strip_padding
from tests.golden.harness import Case, NotApplicable, adapts, peer

VERL = "verl.utils.torch_functional."


@adapts(VERL + "masked_sum")
def total(case: Case) -> dict[str, Tensor]:
    return {"out": masked_sum(case.tensor("values"), case.tensor("mask"), case.kwargs["axis"])}


@adapts(VERL + "masked_mean")
def mean(case: Case) -> dict[str, Tensor]:
    return {"out": masked_mean(case.tensor("values"), case.tensor("mask"), case.kwargs["axis"])}


@adapts(VERL + "masked_var")
def variance(case: Case) -> dict[str, Tensor]:
    return {"out": masked_var(case.tensor("values"), case.tensor("mask"), unbiased=case.kwargs["unbiased"])}


@adapts(VERL + "masked_whiten")
def whiten(case: Case) -> dict[str, Tensor]:
    out = masked_whiten(case.tensor("values"), case.tensor("mask"), compat=peer("verl", None), **case.kwargs)
    if "roundoff_sensitive" in case.tags:
        assert out.abs().max() < 1e-3
        raise NotApplicable(
            "equal values leave a residue that depends on the order in which a CPU adds; only its size is tested"
        )
    return {"out": out}


@adapts(VERL + "get_response_mask")
def response_mask(case: Case) -> dict[str, Tensor]:
    return {"response_mask": mask_through_stop(case.tensor("response_id"), case.kwargs["eos_token"])}


@adapts(VERL + "clip_by_value")
def clip(case: Case) -> dict[str, Tensor]:
    return {"out": clamp_between(case.tensor("x"), case.tensor("tensor_min"), case.tensor("tensor_max"))}


@adapts(VERL + "postprocess_data")
def to_width(case: Case) -> dict[str, Tensor]:
    settings = case.kwargs
    ids, attention = pad_or_truncate(
        case.tensor("input_ids"),
        case.tensor("attention_mask"),
        width=settings["max_length"],
        pad_id=settings["pad_token_id"],
        pad_side="left" if settings["left_pad"] else "right",
        truncation=settings["truncation"],
    )
    return {"input_ids": ids, "attention_mask": attention}


@adapts(VERL + "remove_pad_token")
def without_padding(case: Case) -> dict[str, Any]:
    return {"ids": strip_padding(case.tensor("input_ids"), case.tensor("attention_mask"))}


@adapts("openrlhf.models.utils.masked_mean")
def openrlhf_mean(case: Case) -> dict[str, Tensor]:
    values = case.tensor("tensor")
    mask = case.tensor("mask") if "mask" in case.inputs else torch.ones_like(values)
    return {"out": masked_mean(values, mask, case.kwargs["dim"], eps=peer(0.0, EPS))}


@adapts("openrlhf.models.utils.masked_normalize")
def openrlhf_normalise(case: Case) -> dict[str, Tensor]:
    return {"out": masked_normalise(case.tensor("tensor"), case.tensor("mask"), case.kwargs["dim"])}
