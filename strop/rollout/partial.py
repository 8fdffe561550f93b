"""Answers in several goes: what was cut short, by abort or by a limit, is taken up again, also under newer weights.

A continuation is a plain request whose prompt is the old one and all tokens so far, so any engine can serve it. An engine whose
`same_stream` is true (the native one) draws from the same stream at the same positions: under unchanged weights the result is
the one of an answer that was never interrupted. Others would begin the stream again, so they are given a new one.
"""

from __future__ import annotations

import random
from dataclasses import replace

from strop.rollout.base import Completion, Request


def unfinished(completion: Completion, longest: int) -> bool:
    """Whether an answer of at most `longest` tokens is still to be continued."""
    return completion.finish in ("abort", "length") and len(completion.ids) < longest


def continuation(
    request: Request,
    sample: int,
    completion: Completion,
    longest: int,
    slice_tokens: int | None = None,
    *,
    same_stream: bool = True,
) -> Request:
    """The request that goes on with sample `sample` of `request`, up to `longest` tokens of the whole answer.

    `slice_tokens`: most tokens of this go; None: all that are left. `same_stream`: the engine finds its place in the stream of
    `request.seed` by the number of tokens; else this go gets a seed of its own.
    """
    left = longest - len(completion.ids)
    if left < 1:
        raise ValueError(f"The answer has {len(completion.ids)} of {longest} tokens: there is nothing left to continue.")
    first, seed = request.first + sample, request.seed
    if seed is not None and completion.ids and not same_stream:
        seed = random.Random(f"{seed}/{first}/{len(completion.ids)}").getrandbits(62)
    return replace(
        request,
        ids=[*request.ids, *completion.ids],
        n=1,
        seed=seed,
        first=first,
        max_tokens=left if slice_tokens is None else min(left, slice_tokens),
    )


def joined(before: Completion, after: Completion) -> Completion:
    """Both goes as one answer, with the versions of the weights that sampled each stretch."""
    versions = merged([*stretches(before), *stretches(after)])
    return Completion(
        ids=[*before.ids, *after.ids],
        log_probs=[*before.log_probs, *after.log_probs],
        finish=after.finish,
        version=after.version,
        error=after.error,
        versions=versions if len(versions) > 1 else [],
    )


def stretches(completion: Completion) -> list[tuple[int, int]]:
    """(version, tokens) in order, also where all tokens have one version."""
    return completion.versions or ([(completion.version, len(completion.ids))] if completion.ids else [])


def merged(versions: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours of one version become one."""
    found: list[tuple[int, int]] = []
    for version, count in versions:
        if count and found and found[-1][0] == version:
            found[-1] = (version, found[-1][1] + count)
        elif count:
            found.append((version, count))
    return found


def up_to(versions: list[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    """The stretches of the first `tokens` tokens."""
    found = []
    for version, count in versions:
        found.append((version, min(count, tokens)))
        tokens -= found[-1][1]
    return merged(found)
