"""The sharding backend as several ranks on the CPU; what the ranks test is in test_conformance.py and ranks_fsdp.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.ranks import pytest_as_ranks

HERE = Path(__file__).parent
CENTRAL = (
    "packing_change_nothing or clipped or not_finite or (resuming_is_exact and fp32) or lora or pairs_stay"
)


def test_ranks_go_through_their_tests_in_one_order(tmp_path, monkeypatch):
    """A plugin that shuffles tests is not loaded by ranks, which would wait for each other in different tests."""
    file = tmp_path / "test_plugins.py"
    file.write_text(
        "def test_none(pytestconfig):\n    assert not pytestconfig.pluginmanager.list_plugin_distinfo()\n"
    )
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing_has_this_name")
    pytest_as_ranks(1, [str(file), "--rootdir", str(tmp_path)])


def test_two_ranks_do_what_a_backend_must_do():
    pytest_as_ranks(
        2, [str(HERE / "test_conformance.py"), "-k", f"({CENTRAL}) and not padded and not megatron"]
    )


@pytest.mark.slow
def test_two_ranks_shard_every_way_and_family():
    pytest_as_ranks(2, [str(HERE / "ranks_fsdp.py")], timeout=900)


@pytest.mark.slow
def test_two_ranks_train_with_images():
    pytest_as_ranks(2, [str(HERE / "ranks_images.py")], timeout=300)


@pytest.mark.slow
def test_two_ranks_pass_the_whole_conformance_suite():
    pytest_as_ranks(2, [str(HERE / "test_conformance.py"), "-k", "not megatron"], timeout=900)
