"""Completions in several parts.

A completion that was cut short, by abort or by a limit, can be continued, also under newer weights. The
continuation is a request whose prompt is the old prompt plus all tokens so far, so any engine can serve it.
An engine with `same_stream` (native) continues the random stream at the same positions: with unchanged
weights the result equals a completion that was never interrupted. Other engines would restart the random
stream, so the continuation gets a new seed.
"""

from __future__ import annotations

import random
from dataclasses import replace

from strop.rollout.base import Completion, Request, merge_spans, newest_version, version_spans
from strop.types import join_experts


def is_unfinished(completion: Completion, max_tokens: int) -> bool:
    """Whether a completion of at most `max_tokens` tokens is to be continued."""
    return completion.finish in ("abort", "length") and len(completion.ids) < max_tokens


def continuation(
    request: Request,
    sample: int,
    completion: Completion,
    max_tokens: int,
    slice_tokens: int | None = None,
    *,
    same_stream: bool = True,
) -> Request:
    """The request that continues sample `sample` of `request`, up to `max_tokens` tokens in all.

    `slice_tokens`: limit of tokens of this part; None: all that are left. `same_stream`: the engine finds its
    position in the random stream of `request.seed` by the number of tokens; else this part gets a new seed.
    """
    left = max_tokens - len(completion.ids)
    if left < 1:
        raise ValueError(
            f"The completion has {len(completion.ids)} of {max_tokens} tokens: there is nothing left to "
            "continue."
        )
    if slice_tokens is not None:
        left = min(left, slice_tokens)
    first = request.first + sample
    seed = request.seed
    if seed is not None and completion.ids and not same_stream:
        seed = random.Random(f"{seed}/{first}/{len(completion.ids)}").getrandbits(62)
    prompt = [*request.ids, *completion.ids]
    return replace(request, ids=prompt, n=1, seed=seed, first=first, max_tokens=left)


def join_completions(before: Completion, after: Completion) -> Completion:
    """Both parts as one completion, with the spans of weight versions."""
    spans = merge_spans([*version_spans(before), *version_spans(after)])
    return replace(
        after,
        ids=[*before.ids, *after.ids],
        log_probs=[*before.log_probs, *after.log_probs],
        version=newest_version(spans, after.version),
        versions=spans if len(spans) > 1 else [],
        experts=join_experts(before.experts, after.experts),
    )
