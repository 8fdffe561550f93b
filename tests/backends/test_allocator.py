"""Ragged micro-batches do not fragment the memory of a GPU; what the user has set for it stays."""

from __future__ import annotations

import pytest
import torch

from strop.backends.base import ALLOCATOR_VARIABLES, use_expandable_segments

GIB = 2**30


@pytest.fixture
def asked(monkeypatch):
    found: list[str] = []
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", found.append)
    return found


@pytest.mark.parametrize("variable", [None, *ALLOCATOR_VARIABLES])
def test_a_setting_of_the_user_stays(variable, asked, monkeypatch):
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:512")
    use_expandable_segments(torch.device("cuda"))
    assert asked == (["expandable_segments:True"] if variable is None else [])


def test_a_cpu_needs_none(asked):
    use_expandable_segments(torch.device("cpu"))
    assert asked == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_growing_blocks_reserve_no_more_than_the_largest(monkeypatch):
    """Twelve sizes in turn, each larger than all before: blocks of a fixed size would be kept for each."""
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    use_expandable_segments(torch.device("cuda"))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for step in range(12):
        block = torch.empty(GIB // 4 + step * GIB // 16, dtype=torch.uint8, device="cuda")
        del block
    assert torch.cuda.memory_reserved() - before < 1.1 * GIB
