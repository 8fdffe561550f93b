"""Answers in several goes: what was cut short, by abort or by a limit, is taken up again, also under newer weights.

A continuation is a plain request whose prompt is the old one and all tokens so far, so any engine can serve it. The native
engine draws from the same stream at the same positions: under unchanged weights the result is the one of an answer that was
never interrupted.
"""

from __future__ import annotations

from dataclasses import replace

from strop.rollout.base import Completion, Request


def unfinished(completion: Completion, longest: int) -> bool:
    """Whether an answer of at most `longest` tokens is still to be continued."""
    return completion.finish in ("abort", "length") and len(completion.ids) < longest


def continuation(
    request: Request, sample: int, completion: Completion, longest: int, slice_tokens: int | None = None
) -> Request:
    """The request that goes on with sample `sample` of `request`, up to `longest` tokens of the whole answer.

    `slice_tokens`: most tokens of this go; None: all that are left.
    """
    left = longest - len(completion.ids)
    if left < 1:
        raise ValueError(f"The answer has {len(completion.ids)} of {longest} tokens: there is nothing left to continue.")
    return replace(
        request,
        ids=[*request.ids, *completion.ids],
        n=1,
        first=request.first + sample,
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
