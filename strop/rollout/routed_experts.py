"""Experts that vLLM and SGLang return for tokens (router_replay.mode=R3), as `Completion.experts`.

Both return a table over all layers of the model, in which layers without experts are 0, for the tokens of
prompt and completion but the last one, which is never an input.
"""

from __future__ import annotations

import base64

import numpy as np


def engine_experts(found: np.ndarray, tokens: int) -> np.ndarray | None:
    """The layers with experts of a table [n, layers, k], for prompt and completion of `tokens` tokens
    together. Experts of a token differ, so a layer of zeros has none."""
    if not len(found):
        return None
    routed = (found != 0).any(axis=(0, 2))
    if found.shape[2] == 1 and not routed.all():
        raise ValueError(
            "router_replay.mode=R3: the engine returns one expert per token, and expert 0 cannot be told "
            "from a layer without experts. Set rollout.name=native, or router_replay.mode=R2."
        )
    kind = np.uint8 if found.dtype == np.uint8 else np.int16
    return found[: tokens - 1, routed].astype(kind)


def decoded_experts(text: str, layers: int, count: int) -> np.ndarray:
    """The table in a reply of SGLang: int32 in base64."""
    numbers = np.frombuffer(base64.b64decode(text), dtype=np.int32)
    return numbers.reshape(-1, layers, count)
