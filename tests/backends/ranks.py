"""Tests that run as several ranks: a file of tests is started once per rank, and every rank goes through all of them."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from strop.ranks import Ranks
from strop.runtime.local import joined
from tests.forked import Forked


@functools.cache
def here() -> Ranks:
    """This process as one of the ranks it was started with."""
    import os

    group = joined(int(os.environ["WORLD_SIZE"]), torch.device("cpu"), timeout=300)
    group_of_process.append(group)  # it lasts as long as the process
    return group.__enter__()


group_of_process: list[Any] = []


def pytest_as_ranks(world: int, arguments: Sequence[str], timeout: float = 300) -> str:
    """Run tests once per rank; what the first rank printed, when all of them pass."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the meeting point is ours
        # All ranks must go through the same tests in the same order: plugins that shuffle, and options that
        # load them, are for the process that starts the ranks.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "",
        "PYTEST_ADDOPTS": "",
        # As in the product: ranks with a thread per core each wait for one another a hundred times longer.
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // world)),
    }
    words = ["-q", "-x", "-p", "no:cacheprovider", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(rank)) for rank in range(world)]
        ranks = [
            Forked("pytest", words, logs[rank], **shared, RANK=str(rank), LOCAL_RANK=str(rank))
            for rank in range(world)
        ]
        deadline = time.monotonic() + timeout
        while (
            None in (codes := [rank.poll() for rank in ranks])
            and not any(codes)
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        for rank in ranks:  # nobody waits for one that is gone
            rank.kill()
            rank.wait()
        said = [log.read_text() for log in logs]
    assert codes == [0] * world, f"exit codes {codes}\n" + "\n".join(text[-4000:] for text in said)
    return said[0]
