"""verl's rule scorers."""

from __future__ import annotations

from typing import Any

import torch

from strop.algorithms.reward_shaping import overlong_penalty
from strop.rewards.function import score_response
from strop.rewards.rules import geo3k, gsm8k, math_boxed, math_dapo, math_symbolic, search_qa
from strop.rewards.rules.extract import last_box
from strop.rewards.rules.format import think_boxed_format
from tests.golden.harness import Case, adapts, peer

VERL = "verl.utils.reward_score."


@adapts(VERL + "gsm8k.compute_score")
def grade_school(case: Case) -> dict[str, Any]:
    text, truth, method = case.inputs["solution_str"], case.inputs["ground_truth"], case.kwargs["method"]
    return {
        "extracted": gsm8k.extract_answer(text, method=method, compat=peer("verl", None)),
        "score": gsm8k.compute_score(text, truth, method=method, compat=peer("verl", None)),
        "score_with_format_0.1": gsm8k.compute_score(
            text, truth, method=method, format_score=0.1, compat=peer("verl", None)
        ),
    }


@adapts(VERL + "math_reward.compute_score")
def competition(case: Case) -> dict[str, Any]:
    text, truth = case.inputs["solution_str"], case.inputs["ground_truth"]
    box, answer = (
        last_box(text, compat=peer("verl", None)),
        math_boxed.extract_answer(text, compat=peer("verl", None)),
    )
    return {
        "last_boxed": None if box is None else box.whole,
        "answer": answer,
        "normalized_answer": None if answer is None else math_boxed.normalise(answer),
        "normalized_truth": math_boxed.normalise(truth),
        "score": math_boxed.compute_score(text, truth, compat=peer("verl", None)),
    }


@adapts(VERL + "math_dapo.compute_score")
def dapo(case: Case) -> dict[str, Any]:
    return math_dapo.compute_score(**case.inputs, **case.kwargs, compat=peer("verl", None))


@adapts(VERL + "math_dapo.normalize_final_answer")
def minerva(case: Case) -> dict[str, Any]:
    return {"normalized": math_dapo.normalise(case.inputs["final_answer"])}


@adapts(VERL + "search_r1_like_qa_em.compute_score")
def question(case: Case) -> dict[str, Any]:
    text, truth = case.inputs["solution_str"], case.inputs["ground_truth"]
    return {
        "extracted": search_qa.extract_answer(text),
        "score": search_qa.compute_score(text, truth, **case.kwargs),
        "score_substring": search_qa.compute_score(text, truth, match="substring", **case.kwargs),
    }


@adapts(VERL + "geo3k.compute_score")
def geometry(case: Case) -> dict[str, Any]:
    text, truth = case.inputs["solution_str"], case.inputs["ground_truth"]
    return {
        "score": geo3k.compute_score(text, truth, compat=peer("verl", None)),
        "format": think_boxed_format(text),
        "accuracy": geo3k.accuracy(text, truth, compat=peer("verl", None)),
    }


@adapts(VERL + "prime_math.compute_score")
def prime(case: Case) -> dict[str, Any]:
    """verl calls the format right when the answer is exactly right, or else when the text has "Step 2:" and a box."""
    text = case.inputs["solution_str"]
    found = math_symbolic.compute_score(text, case.inputs["ground_truth"], compat=peer("verl", None))
    shaped = "Step 2:" in text and "\\box" in text
    return {
        "correct": found["acc"],
        "format_correct": found["match"] == "exact" or shaped,
        "extracted": found["pred"],
    }


@adapts(VERL + "math_verify._verify_in_subprocess")
def symbolic(case: Case) -> dict[str, Any]:
    return {
        "score": math_symbolic.compute_score(
            case.inputs["solution_str"], case.inputs["ground_truth"], compat=peer("verl", None)
        )["score"]
    }


@adapts(VERL + "default_compute_score")
def dispatched(case: Case) -> dict[str, Any]:
    return {
        "result": score_response(
            case.kwargs["data_source"],
            case.inputs["solution_str"],
            case.inputs["ground_truth"],
            compat=peer("verl", None),
        )
    }


@adapts("verl.workers.reward_manager.dapo.DAPORewardManager.__call__")
def overlong(case: Case) -> dict[str, Any]:
    lengths, scores = torch.tensor(case.inputs["response_len"]), torch.tensor(case.inputs["score"])
    settings = case.kwargs["overlong_buffer_cfg"]
    penalty = torch.zeros_like(scores)
    if settings["enable"]:
        penalty = overlong_penalty(
            lengths,
            max_length=case.kwargs["max_resp_len"],
            buffer=settings["len"],
            factor=settings["penalty_factor"],
        )
    rewards = torch.zeros(len(lengths), case.kwargs["padded_response_len"])
    rewards[torch.arange(len(lengths)), lengths - 1] = scores + penalty
    logged = settings["enable"] and settings["log"]
    return {
        "reward_tensor": rewards,
        "overlong_reward": penalty.tolist() if logged else [],
        "overlong": (penalty < 0).tolist() if logged else [],
    }
