"""The native engine: scheduler (who runs), cache and rows (what they hold), runner (the module), sampler (the
next token)."""

from strop.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
