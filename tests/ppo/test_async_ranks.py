"""Sampling ahead of training on several ranks: each answers its share ahead, and all stay in step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.ranks import pytest_as_ranks


@pytest.mark.slow
def test_two_ranks_sample_ahead():
    pytest_as_ranks(2, [str(Path(__file__).with_name("ranks_async.py"))])
