from __future__ import annotations

import os
import subprocess
import sys

import pytest

STEPS = """
import resource, time
from strop.shared.process_setup import prepare_process
{prepare}
import torch

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():
    held = [torch.ones(1 << 20) for _ in range(12)]
    while held:
        held.pop()
        time.sleep(0.015)

step()
before = faults()
for _ in range(3):
    step()
print(faults() - before)
"""


def faults(prepare: str, **environment: str) -> tuple[int, str]:
    """Pages mapped by three steps that use 48 MiB each, and what the allocator says of itself."""
    own = {name: value for name, value in os.environ.items() if name != "MIMALLOC_PURGE_DELAY"}
    done = subprocess.run(
        [sys.executable, "-c", STEPS.format(prepare=prepare)],
        env={**own, "MIMALLOC_VERBOSE": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    if "mimalloc" not in done.stderr:
        pytest.skip("this torch has another allocator")
    return int(done.stdout), done.stderr


def test_memory_that_a_step_freed_is_there_for_the_next() -> None:
    without, _ = faults("")
    with_it, _ = faults("prepare_process()")
    assert without > 1000 and with_it < without / 20, (without, with_it)


def test_what_the_user_has_set_stays() -> None:
    _, said = faults("prepare_process()", MIMALLOC_PURGE_DELAY="25")
    assert "'purge_delay': 25" in said
