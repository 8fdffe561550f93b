"""From token rewards to advantages.

An estimator is a pure function `estimator(rewards [B, T], mask [B, T], *, ...) -> AdvantageResult`. Results are float32 (or the
dtype of the rewards if wider) and exactly 0 outside the mask. The mask may have holes: tokens the policy did not write, such
as tool output. Discounts skip them, credit crosses them, and a reward standing on one counts for the last valid token
before it. `compat` names a peer whose numbers to give where this differs.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from strop.algorithms.advantages.result import AdvantageResult
from strop.catalog import ADVANTAGES

__all__ = ["AdvantageResult", "estimate"]


def estimate(name: str, **available: Any) -> AdvantageResult:
    """Call the estimator registered as `name` with those of the `available` arguments that its signature names.

    An argument that is None counts as not available. An estimator of a plugin may return one tensor, or a pair.
    """
    estimator = ADVANTAGES.get(name)
    parameters = inspect.signature(estimator).parameters.values()
    given = {key: value for key, value in available.items() if value is not None}
    takes_anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    if missing:
        raise ValueError(
            f"The advantage estimator {name!r} needs {', '.join(missing)}, but only {', '.join(sorted(given))} are available."
        )
    result = estimator(**(given if takes_anything else {p.name: given[p.name] for p in named if p.name in given}))
    return AdvantageResult(result, result) if isinstance(result, Tensor) else AdvantageResult(*result)
