"""The native engine: scheduler (which sequences run), KV cache and rows (device memory), runner (forward
passes), sampler (the next token)."""

from strop.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
