"""The tiny task of the loop's tests."""

from tests.trainer.conftest import overrides, task

__all__ = ["overrides", "task"]
