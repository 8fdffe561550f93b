"""What tests of engines share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.rollout.external_host import keep_output_in


@pytest.fixture(autouse=True)
def kept_output(tmp_path: Path) -> Iterator[None]:
    """Engines that die leave their output in the folder of the test, not in that of temporary files."""
    keep_output_in(tmp_path / "kept_output")
    yield
    keep_output_in(None)
