from __future__ import annotations

import ctypes
import gc
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from strop.shared.build import use_device
from strop.shared.process_setup import HUGE_PAGES, long_lived_objects_frozen, use_huge_pages

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


def torch_has_mimalloc() -> bool:
    """It keeps freed memory for a while and takes huge pages, whatever glibc and torch are told."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch; torch.ones(1)"],
        env={**os.environ, "MIMALLOC_VERBOSE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return "mimalloc" in done.stderr


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


KEPT = """
import resource
from strop.shared.process_setup import prepare_process
{prepare}
import torch

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

def step():
    held = [torch.ones(6 << 20) for _ in range(12)]
    while held:
        held.pop()

torch.ones(1 << 16)  # starts the threads
before = resident()
step()
print(resident() - before)
for _ in range(4):
    step()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


def test_the_allocator_of_glibc_keeps_what_a_step_freed() -> None:
    """A step uses twelve tensors of 24 MiB, 73,728 pages. Blocks that differ by the bytes of an alignment do not
    fit into each other's place, so it takes a few steps until all of it is used again."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    if sys.platform != "linux" or "GLIBC_TUNABLES" in own or not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("the allocator of glibc with its own settings")
    if torch_has_mimalloc():
        pytest.skip("torch has an allocator of its own")
    kept = []
    mapped = []
    for prepare in ("", "prepare_process()"):
        done = subprocess.run(
            [sys.executable, "-c", KEPT.format(prepare=prepare)],
            env={**own, "THP_MEM_ALLOC_ENABLE": "0"},
            capture_output=True,
            text=True,
            check=True,
        )
        mib, pages = map(int, done.stdout.split())
        kept.append(mib)
        mapped.append(pages)
    assert kept[0] < 100 and kept[1] > 250, kept
    assert mapped[1] < 1000, mapped


LARGE = """
import resource
from strop.shared.process_setup import prepare_process
prepare_process()
import torch

before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(1 << 25)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_large_tensors_have_huge_pages() -> None:
    """128 MiB are 32,768 small pages or 64 huge ones."""
    if not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text():
        pytest.skip("huge pages are for all or for nobody here")
    if torch_has_mimalloc():
        pytest.skip("torch has an allocator that takes huge pages without being told")
    own = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    mapped = []
    for more in ({"THP_MEM_ALLOC_ENABLE": "0"}, {}):
        done = subprocess.run(
            [sys.executable, "-c", LARGE], env={**own, **more}, capture_output=True, text=True, check=True
        )
        mapped.append(int(done.stdout))
    # A fragmented machine may lack some huge pages.
    assert mapped[0] >= 32_768 and mapped[1] < mapped[0] / 2, mapped


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("always [madvise] never", "1"), ("[always] madvise never", None), (None, None)],
)
def test_huge_pages_are_asked_for_only_where_asking_helps(
    setting: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting)
    use_huge_pages(file)
    assert os.environ.get("THP_MEM_ALLOC_ENABLE") == expected
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    use_huge_pages(file)
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(16, 1, 4), (4, 1, 2), (1, 1, 1), (32, 8, 2)])
def test_on_a_gpu_the_hosts_operations_leave_cores_free(monkeypatch, cores, ranks, threads):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr("strop.host.cpu_quota", lambda groups: math.inf)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(cores // ranks)
        for _ in range(2):  # also when a second run begins in the same process
            assert use_device("auto").type == "cuda"
            assert torch.get_num_threads() == threads
        torch.set_num_threads(3)
        use_device("cpu")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


class Node:
    """One that refers to itself: only a garbage collection frees it."""

    def __init__(self) -> None:
        self.own = self


def test_what_lives_at_the_start_of_a_run_on_a_gpu_is_collected_after_it_and_what_comes_later_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    gc.unfreeze()  # conftest froze the modules
    try:
        before = Node()
        seen = weakref.ref(before)
        with long_lived_objects_frozen():
            del before
            later = weakref.ref(Node())
            gc.collect()
            assert seen() is not None and later() is None
        gc.collect()
        assert seen() is None and gc.get_freeze_count() == 0
    finally:
        gc.freeze()
    frozen = gc.get_freeze_count()
    with long_lived_objects_frozen():
        pass
    # Another thread may have let go of some of them.
    assert gc.get_freeze_count() > frozen / 2, "what the caller froze stays frozen"
